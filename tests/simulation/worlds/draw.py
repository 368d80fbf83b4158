"""Worlds, as data: an engine's settings, what its clients do and when, and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from chairlift.core.plan import Capacity
from chairlift.core.request import Request, SamplingParams
from chairlift.core.scheduler import Settings

Key = tuple[str, int]


@dataclass(frozen=True)
class Job:
    """A request. ``lag``: seconds from its arrival to the engine. One that ``takes_over`` first aborts whoever has its
    id; another one with the id of a live request must be refused."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    tenant: str = ""
    priority: int = 0
    lag: float = 0.0
    takes_over: bool = False

    def request(self, now: float) -> Request:
        return Request(
            id=self.id,
            token_ids=list(self.prompt),
            num_prompt=len(self.prompt),
            params=self.params,
            seed=self.seed,
            stop_ids=self.stop_ids,
            num_samples=self.params.width,
            tenant=self.tenant,
            priority=self.priority,
            arrival=now - self.lag,
        )

    @property
    def outputs(self) -> range:
        return range(self.params.n if self.params.use_beam_search else self.params.width)

    def limits(self, now: float) -> tuple[float, float]:
        """When the first token of a job that is sent now must have come, and when the last."""
        first, last = (
            float("inf") if ms is None else now - self.lag + ms / 1000
            for ms in (self.params.ttft_ms, self.params.deadline_ms)
        )
        return min(first, last), last


@dataclass(frozen=True)
class Cancel:
    """An abort, of a live request or not; ``in_flight``: when the next step is done and not yet committed."""

    id: str
    index: int | None = None
    in_flight: bool = False


@dataclass(frozen=True)
class Ask:
    id: str | None = None


@dataclass(frozen=True)
class Prefix:
    """To be pinned."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Jump:
    """The clock is set, forward or back."""

    seconds: float


@dataclass(frozen=True)
class Act:
    """What clients do, so many seconds after the act before it."""

    gap: float
    what: Job | Cancel | Ask | Prefix | Jump


@dataclass(frozen=True, order=True)
class Fault:
    """What goes wrong: the ``number``-th step at its start ("submit") or end ("result"), the numbers that its first
    draw comes from ("logits"), or the ``number``-th block to be swapped in ("swap")."""

    kind: str
    number: int


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: of itself, per row, per position read, per swapped block; all of it up to ``noise`` more."""

    step: float
    token: float
    position: float
    swap: float
    noise: float


@dataclass(frozen=True)
class World:
    capacity: Capacity
    settings: Settings
    costs: Costs
    policy: str = "chunked"
    admission: str = "optimistic"
    order: str = "fcfs"
    weights: Mapping[str, float] | None = None  # of tenants; None: no fairness
    depth: int = 1
    vocab_size: int = 50
    stop_rate: float = 0.0
    most_live: int = 8  # beyond that, jobs wait outside
    script: tuple[Act, ...] = ()
    faults: tuple[Fault, ...] = ()
    restart: int = (
        0  # so many acts belong to a first life of the engine, whose disk the second finds; 0: there is but one
    )
    seed: int = 0  # of the noise

    @property
    def jobs(self) -> list[Job]:
        return [act.what for act in self.script if isinstance(act.what, Job)]

    @property
    def reserves(self) -> bool:
        return self.policy == "static" or self.admission in ("reserve", "peak")

    @property
    def swaps(self) -> bool:
        return self.capacity.num_host_blocks + self.capacity.num_disk_blocks > 0

    def max_len(self, job: Job, most: int) -> int:
        """The greatest length of a job, where that of all requests is ``most``."""
        return most if job.params.max_tokens is None else min(most, len(job.prompt) + job.params.max_tokens)

    def blocks(self, job: Job, most: int) -> int:
        """The smallest pool in which a job is accepted, from first principles (with windows it may be smaller)."""
        size, groups = self.capacity.block_size, len(self.capacity.windows)
        whole, width = -(-self.max_len(job, most) // size), job.params.width
        if not self.reserves and not job.params.use_beam_search:
            return whole * groups
        shared, rest = divmod(len(job.prompt), size)
        return (shared + width * (whole - shared) + (width > 1 and rest > 0)) * groups


def draw_world(seed: int) -> World:
    """The world of a seed."""
    rng = Random(seed)
    costs = Costs(*(rng.choice(c) for c in ((0.01,), (0.0, 1e-4, 1e-3), (0.0, 1e-6), (1e-5, 1e-3), (0.0, 0.1, 0.5))))
    policy = rng.choice(("chunked", "chunked", "chunked", "continuous", "static"))
    capacity = _capacity(rng)
    settings = _settings(rng, policy, capacity, costs)
    caching = settings.enable_prefix_caching
    orders = ["fcfs", "priority", "priority", "shortest-prefill", "deadline", *["longest-prefix"] * caching]
    tenants = rng.choice((("",), ("", "b"), ("", "b", "c/d")))
    fair = policy != "static" and len(tenants) > 1 and rng.random() < 0.6
    world = World(
        capacity,
        settings,
        costs,
        policy,
        rng.choice(("optimistic", "optimistic", "optimistic", "reserve", "peak")) if policy != "static" else "reserve",
        rng.choice(orders) if policy != "static" else "fcfs",
        rng.choice(({}, {"b": 3.0}, {"": 0.5, "d": 2.0})) if fair else None,
        depth=rng.choice((1, 2)),
        vocab_size=rng.choice((4, 20)),
        stop_rate=rng.choice((0.0, 0.1)),
        most_live=rng.choice((3, 6, 10, 16)),
        seed=seed,
    )
    script = tuple(_Script(rng, world, tenants).acts())
    restart = len(script) // 2 if capacity.num_disk_blocks and caching and rng.random() < 0.3 else 0
    world = replace(world, script=script, restart=restart, faults=_faults(rng, world))
    return _with_drafts(Random(f"drafts {seed}"), world)


def _with_drafts(rng: Random, world: World) -> World:
    """With speculation, where it is allowed. Drawn by itself, so that seeds stay the worlds they were."""
    most = rng.choice((0, 0, 1, 3, 7))
    if not most or world.policy == "static" or world.admission == "peak":
        return world
    return replace(world, depth=1, settings=replace(world.settings, num_speculative_tokens=most))


def _capacity(rng: Random) -> Capacity:
    block_size, max_model_len = rng.choice((1, 2, 3, 4, 4, 8)), rng.choice((16, 24, 32, 48))
    windows = rng.choice(((0,), (0,), (0,), (0,), (5,), (0, 3, 3), (0, 8, 1)))
    longest = -(-max_model_len // block_size) * len(windows)
    num_blocks = max(2, int(longest * rng.choice((0.6, 1, 1, 1, 1.3, 1.3, 2, 4)))) + rng.choice((0, 0, 1, 2))
    host = disk = 0
    if rng.random() < 0.6:
        host = rng.choice((0, 1, longest // 2 + 1, 3 * longest))
        disk = rng.choice((0, 0, 1, longest)) if host else rng.choice((1, longest))
    return Capacity(num_blocks, block_size, max_model_len, host, disk, windows)


def _settings(rng: Random, policy: str, capacity: Capacity, costs: Costs) -> Settings:
    max_num_seqs = rng.choice((2, 3, 4, 4, 8))
    if policy == "chunked":
        budget = max(max_num_seqs, rng.choice((1, 5, 8, 16, 64)))
    else:
        budget = capacity.max_model_len + rng.choice((0, 5, 100))
    return Settings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=rng.random() < 0.65,
        preemption_mode=rng.choice(("auto", "swap", "swap", "recompute")),
        max_preemptions=rng.choice((0, 1, 3, 3, 100)),
        slo_itl=costs.step * rng.choice((0.9, 1.2, 2, 5)) if policy == "chunked" and rng.random() < 0.25 else None,
        max_batch_delay=costs.step * rng.choice((0.5, 3, 20)) if rng.random() < 0.2 else 0.0,
    )


def _faults(rng: Random, world: World) -> tuple[Fault, ...]:
    faults: set[Fault] = set()
    if rng.random() < 0.25:
        for _ in range(rng.choice((1, 5, 20))):
            first, kind = rng.randrange(400), rng.choice(("submit", "result", "result"))
            faults |= {Fault(kind, first + i) for i in range(rng.choice((1, 1, 2, 3, 4, 8)))}
    if rng.random() < 0.1:
        faults |= {Fault("logits", rng.randrange(400)) for _ in range(10)}
    if world.swaps and rng.random() < 0.4:
        often = rng.choice((0.05, 0.3))
        faults |= {Fault("swap", number) for number in range(200) if rng.random() < often}
    return tuple(sorted(faults))


@dataclass
class _Script:
    """Draws what clients do. ``base`` is how most prompts begin."""

    rng: Random
    world: World
    tenants: Sequence[str]
    base: tuple[int, ...] = ()
    recent: list[str] = field(default_factory=list)  # ids
    urgent: float = 0.0  # how many of the jobs have deadlines
    pace: float = 0.0  # seconds between two jobs of a trickle

    def acts(self) -> list[Act]:
        rng, capacity, step = self.rng, self.world.capacity, self.world.costs.step
        self.base = tuple(rng.randrange(self.world.vocab_size) for _ in range(capacity.max_model_len))
        self.urgent = rng.choice((0.0, 0.0, 0.05, 0.5))
        self.pace = step * rng.choice((0.5, 2, 6))
        acts: list[Act] = []
        if self.world.settings.enable_prefix_caching and rng.random() < 0.2:
            acts += self._prefix()
        cancels, others = rng.choice((0.0, 0.1, 0.4)), rng.choice((0.02, 0.1))
        jobs, number = rng.choice((40, 80, 160)), 0
        while number < jobs:
            gaps = self._gaps()
            for gap in gaps:
                acts.append(Act(gap, self._job(number)))
                number += 1
                if rng.random() < cancels:
                    acts.append(Act(self._soon(), self._cancel()))
                if rng.random() < others:
                    acts.append(Act(self._soon(), self._other()))
        return acts

    def _gaps(self) -> list[float]:
        """Times between some jobs: a burst, a trickle, or one after a long time in which nobody came."""
        rng = self.rng
        match rng.choice(("burst", "trickle", "idle")):
            case "burst":
                return [self._soon(), *[0.0] * rng.randint(1, 12)]
            case "trickle":
                return [rng.expovariate(1.0) * self.pace for _ in range(rng.randint(3, 20))]
        return [100 * self.world.costs.step]

    def _soon(self) -> float:
        return self.rng.choice((0.0, self.rng.random(), self.rng.random(), 4 * self.rng.random())) * 3 * self.pace

    def _prefix(self) -> list[Act]:
        """One that takes at most half of the cache, and leaves room for the request that computes it."""
        size, rows = self.world.capacity.block_size, self.world.capacity.num_blocks // len(self.world.capacity.windows)
        most = min(size * (rows // 2) - 2, self.world.capacity.max_model_len - 2)
        return [Act(0.0, Prefix(self.base[: self.rng.randint(1, most)]))] if most > 0 else []

    def _cancel(self) -> Cancel:
        rng = self.rng
        name = rng.choice((*self.recent[-4:], *self.recent[-2:], "nobody"))
        return Cancel(name, rng.choice((None, None, 0, 1, 2)), in_flight=rng.random() < 0.3)

    def _other(self) -> Ask | Jump:
        if self.rng.random() < 0.8:
            return Ask(self.rng.choice((None, None, "nobody", *self.recent[-3:])))
        return Jump(self.rng.choice((1000.0, 10.0, -10.0, -1000.0, self.world.costs.step)))

    def _job(self, number: int) -> Job:
        rng = self.rng
        again = bool(self.recent) and rng.random() < 0.06
        name = rng.choice(self.recent[-6:]) if again else f"r{number}"
        self.recent.append(name)
        max_tokens = rng.choice((None, *(1, 2, 4, 6, 8) * 2, *(rng.randint(1, 16) for _ in range(4))))
        draw = self._beams if rng.random() < 0.05 else self._sampling
        params, limits = draw(max_tokens), self._limits()
        if params.use_beam_search:
            limits.pop("ttft_ms", None)  # a search has no first token
        params = replace(params, **limits)
        return Job(
            name,
            self._prompt(),
            params,
            seed=rng.randrange(2**32),
            stop_ids=frozenset(rng.choice(((), (0,), (0, 2)))),
            tenant=rng.choice(self.tenants),
            priority=rng.choice((0, 0, 0, 1, -1)),
            lag=rng.choice((0.0, 0.0, self.world.costs.step)),
            takes_over=again and rng.random() < 0.5,
        )

    def _prompt(self) -> tuple[int, ...]:
        rng, most = self.rng, self.world.capacity.max_model_len - 1
        draw = rng.random()
        if draw < 0.8:
            length = rng.randint(1, max(1, most // 4))
        elif draw < 0.995:
            length = rng.randint(1, most)
        else:
            length = rng.choice((0, most + 1, most + 20))  # never fits
        shared = rng.choice((0, length, rng.randint(0, length)))
        prompt = (*self.base[:shared], *(rng.randrange(self.world.vocab_size) for _ in range(length - shared)))
        return prompt[:length]

    def _limits(self) -> dict[str, Any]:
        """Of time, for those who have any."""
        if self.rng.random() >= self.urgent:
            return {}
        ms = 1000 * self.world.costs.step
        ttft, deadline = self.rng.choice((None, 0.5, 3, 10, 40)), self.rng.choice((None, 2, 10, 40, 200))
        return {"ttft_ms": ttft and ttft * ms, "deadline_ms": deadline and deadline * ms}

    def _beams(self, max_tokens: int | None) -> SamplingParams:
        width = self.rng.choice((1, 2, 3))
        return SamplingParams(
            n=self.rng.randint(1, width),
            best_of=width,
            use_beam_search=True,
            max_tokens=max_tokens,
            temperature=0.0,
            length_penalty=self.rng.choice((0.0, 1.0, -1.0)),
        )

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        rng = self.rng
        n = rng.choice((*(1,) * 36, *(2, 3, 4) * 3, 9))
        return SamplingParams(
            n=n,
            best_of=rng.choice((None, None, None, n + 1)) if n > 1 else None,
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, min(3, max_tokens or 3)),
            temperature=rng.choice((0.0, 1.0, 1.0)),
            logprobs=rng.choice((None, None, None, None, None, None, 0, 2)),
            prompt_logprobs=1 if rng.random() < 0.08 else None,
            presence_penalty=1.0 if rng.random() < 0.15 else 0.0,
        )
