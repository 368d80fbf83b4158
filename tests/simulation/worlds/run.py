"""One world through the real scheduler and engine, checked after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from chairlift.core.engine import Engine
from chairlift.core.order import make_order
from chairlift.core.plan import StepRecord
from chairlift.core.policy import make_policy
from chairlift.core.scheduler import Scheduler
from chairlift.core.shares import Shares

from .client import Client
from .clock import Clock
from .draw import Act, World
from .executor import Executor


@dataclass(frozen=True)
class Outcome:
    """Steps that were scheduled, what happened how often, and a fingerprint of all plans."""

    num_steps: int
    coverage: Counter[str]
    fingerprint: int


def run(world: World, check_every: int = 1) -> Outcome:
    """Runs a world to its end, or raises what is wrong. The invariants are checked at each ``check_every``-th step."""
    coverage: Counter[str] = Counter()
    clock = Clock()
    life = _Life(world, world.script[: world.restart or None], clock, coverage)
    life.live(check_every)
    lives = [life]
    if world.restart:
        coverage["restarts"] += 1
        lives.append(_Life(world, world.script[world.restart :], clock, coverage, life.executor))
        lives[1].live(check_every)
    describe(world, coverage)
    fingerprint = hash(tuple(life.fingerprint for life in lives))
    return Outcome(sum(life.executor.num_steps for life in lives), coverage, fingerprint)


class _Life:
    """One engine, from its start to its end."""

    def __init__(
        self,
        world: World,
        script: tuple[Act, ...],
        clock: Clock,
        coverage: Counter[str],
        before: Executor | None = None,
    ) -> None:
        self.world = world
        self.coverage = coverage
        self.fingerprint = 0
        self.executor = Executor(world, clock, before)
        self.scheduler = Scheduler(
            world.capacity,
            make_policy(world.policy, admission=world.admission, order=make_order(world.order)),
            world.settings,
            shares=None if world.weights is None else Shares(world.weights),
            secret=b"the same in every run",
            disk_contents=() if before is None else before.disk_contents,
        )
        self.client = Client(world, script, clock, self.executor, coverage)
        self.client.scheduler = self.executor.scheduler = self.scheduler
        self.executor.client = self.client
        clock.latest = clock.shown
        source = sink = self.client
        self.engine = Engine(self.scheduler, self.executor, source, sink, clock, self._record, depth=world.depth)

    def live(self, check_every: int) -> None:
        client, engine, scheduler = self.client, self.engine, self.scheduler
        most, steps = most_stalled(self.world), 0
        while engine.step() or not client.is_done:
            steps += 1
            client.stalled += 1
            assert client.stalled <= most, f"nothing has moved for {most} steps"
            if steps % check_every == 0:
                client.check()
                scheduler.check()
                check_preemptions(self.world, scheduler)
        check_empty(self.world, scheduler, client)
        engine.close()
        self._check_totals()

    def _record(self, step: StepRecord) -> None:
        for event in step.events:
            self.coverage[f"{event.what} for {event.detail}" if event.what == "waits" else event.what] += 1
        self.coverage["damaged blocks"] += len(step.result.damaged)
        starts = [item.start for item in step.plan.items]
        self.fingerprint = hash((self.fingerprint, step.plan.step_id, step.started, *starts))

    def _check_totals(self) -> None:
        world, stats = self.world, self.scheduler.stats()
        self.coverage["preemptions"] += stats.total_preemptions
        self.coverage["swaps"] += stats.total_swaps
        self.coverage["accepted drafts"] += stats.total_accepted_drafts
        if world.swaps and world.settings.preemption_mode == "swap" and not world.faults:
            self.coverage["recomputed, no room to swap"] += stats.total_preemptions - stats.total_swaps
        if world.reserves and world.order != "priority" and world.weights is None and not world.faults:
            assert stats.total_preemptions == 0, "preempted, though it had its memory for sure"


def most_stalled(world: World) -> int:
    """Steps in which everybody who lives may be preempted and computed again before anybody gains a token."""
    chunks = 1 + world.capacity.max_model_len // world.settings.max_num_batched_tokens
    return 20 + 2 * world.depth * chunks * world.most_live * min(5, 1 + world.settings.max_preemptions)


def check_preemptions(world: World, scheduler: Scheduler) -> None:
    """Who was preempted max_preemptions times stays, unless a step fails."""
    if world.faults:
        return
    for request in scheduler.running.values():
        if request.params.width == 1:
            assert request.num_preemptions <= world.settings.max_preemptions, f"{request.key} is preempted for ever"


def check_empty(world: World, scheduler: Scheduler, client: Client) -> None:
    """Nobody is left, and nothing is held but what is pinned."""
    assert client.num_received == client.num_ended, f"{client.num_received} came, {client.num_ended} ended"
    assert not scheduler.sequences.by_id and not list(scheduler.searches) and not scheduler._in_flight
    assert not scheduler.waiting and not scheduler.running and scheduler.boarding.slots_used == 0
    assert scheduler.waiting.num_preempted == 0
    kv, capacity = scheduler.kv, world.capacity
    if capacity.windows == (0,):  # what is pinned is not for others, so they must be shorter
        room = (capacity.num_blocks - kv.num_pinned) * capacity.block_size
        longest = min(room, capacity.max_model_len) if kv.num_pinned else capacity.max_model_len
        assert scheduler._longest == longest, f"requests may have {scheduler._longest} tokens, not {longest}"
    pinned = sum(block is not None for block in kv._pins.values())
    assert kv.reserved == 0 and kv.pool.num_free == world.capacity.num_blocks - pinned, "leaked"
    assert all(tier.pool.num_free == tier.pool.num_blocks for tier in kv.tiers), "leaked where it swaps to"
    kv.check([])
    shares = scheduler._shares
    assert shares is None or (not +shares._live and not +shares.slots and not -shares.slots), "slots of nobody"


def describe(world: World, coverage: Counter[str]) -> None:
    """Counts the world by its settings."""
    settings, capacity = world.settings, world.capacity
    tiers = f"host {capacity.num_host_blocks > 0}, disk {capacity.num_disk_blocks > 0}"
    for kind in (
        "worlds",
        f"policy {world.policy}",
        f"policy {world.policy}, admission {world.admission}",
        f"order {world.order}",
        f"fair {'by weights' if world.weights else world.weights is not None}",
        f"depth {world.depth}",
        f"caching {settings.enable_prefix_caching}",
        f"mode {settings.preemption_mode}" if world.swaps else "mode recompute only",
        tiers,
        f"windows {capacity.windows}",
        f"max_preemptions {settings.max_preemptions}",
        f"slo {settings.slo_itl is not None}",
        f"delay {settings.max_batch_delay > 0}",
        f"faults {bool(world.faults)}",
        f"drafts {settings.num_speculative_tokens > 0}",
    ):
        coverage[f"[{kind}]"] += 1
