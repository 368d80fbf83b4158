"""What happened in a run, taken from the engine's step records: requests' times, slots' use, KV memory."""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from chairlift.core.plan import StepItem, StepRecord
from chairlift.core.request import Request


class State(enum.Enum):
    """What a slot does for its request during a step."""

    PREFILL = "prefill"  # computes prompt tokens
    DECODE = "decode"  # computes one token and yields the next
    PAUSED = "paused"  # holds an unfinished request that this step leaves out
    HELD = "held"  # holds a finished request until its batch ends


@dataclass(slots=True)
class Segment:
    """A stretch of time in one state. Seconds since the run began."""

    state: State
    start: float
    end: float


@dataclass(slots=True)
class Stay:
    """A request's time in a slot, from boarding to leaving; a preempted request has several."""

    request_id: str
    slot: int
    segments: list[Segment]

    @property
    def board(self) -> float:
        return self.segments[0].start

    @property
    def leave(self) -> float:
        return self.segments[-1].end


@dataclass(slots=True)
class RequestTrace:
    """One request. Times are seconds since the run began; ``token_times`` has one a token.

    ``cached_tokens`` of its prompt were found in the prefix cache when it boarded.
    """

    id: str
    prompt_tokens: int
    arrival: float
    finish: float = 0.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step, and the memory as it was right after it.

    Fields:
        start, end: seconds since the run began.
        tokens: rows computed, padding and held rows included.
        prefill: of these, rows that compute tokens of prompts.
        sampled: tokens that a request gained.
        running, waiting: requests in slots and in the queue after the step.
        kv_held: token slots of KV blocks that requests hold or were promised, after the step.
        kv_useful: of these, slots with the KV of a request that is not finished.
    """

    start: float
    end: float
    tokens: int
    prefill: int
    sampled: int
    running: int
    waiting: int
    kv_held: int
    kv_useful: int


class Trace:
    """Builds up as the engine runs: `add` is called after each step.

    A request takes the lowest free slot when it first appears in a plan, and frees it when it leaves: at its end, under
    static batching at the end of its batch, or when it is preempted.
    """

    def __init__(self, begin: float, max_num_seqs: int, block_size: int) -> None:
        """``begin`` is the engine's time that becomes 0 here."""
        self.max_num_seqs = max_num_seqs
        self.steps: list[StepTrace] = []
        self.requests: dict[str, RequestTrace] = {}
        self.num_preemptions = 0
        self.num_swaps = 0  # of the preemptions, those whose KV was kept outside the pool
        self.num_recomputed_tokens = 0  # computed already, and thrown away by preemptions
        self.num_cached_tokens = 0
        self._begin = begin
        self._block_size = block_size
        self._free_slots = list(range(max_num_seqs))
        self._aboard: dict[str, Stay] = {}
        self._waiting_since: dict[str, float] = {}

    def sent(self, request: Request) -> None:
        """A client sent a request."""
        arrival = request.arrival - self._begin
        self.requests[request.id] = RequestTrace(request.id, request.num_prompt, arrival)
        self._waiting_since[request.id] = arrival

    def add(self, record: StepRecord, live: Mapping[tuple[str, int], Request]) -> None:
        """Takes one step. ``live`` are the requests in slots after it (`Scheduler.running`), one sample each."""
        start, end = record.started - self._begin, record.ended - self._begin
        finished = {output.request_id for output in record.outputs if output.finish_reason is not None}
        states = _states(record.plan.items)
        for request_id in list(self._aboard):
            if request_id not in states and request_id not in finished and (request_id, 0) not in live:
                self._leave(request_id)  # preempted
                self._waiting_since[request_id] = start
        for request_id in states:
            if request_id not in self._aboard:
                self._board(request_id, start)
        for request_id, stay in self._aboard.items():
            _extend(stay.segments, states.get(request_id, State.PAUSED), start, end)
        sampled = self._take_outputs(record, end)
        for request_id in finished:
            self._leave(request_id)
        self._take_state(record, live, start, end, sampled)

    def _board(self, request_id: str, now: float) -> None:
        slot = self._free_slots.pop(0)
        stay = Stay(request_id, slot, [])
        self._aboard[request_id] = stay
        request = self.requests[request_id]
        request.waits.append((self._waiting_since.pop(request_id), now))
        request.stays.append(stay)

    def _leave(self, request_id: str) -> None:
        insort(self._free_slots, self._aboard.pop(request_id).slot)

    def _take_outputs(self, record: StepRecord, end: float) -> int:
        sampled = 0
        for output in record.outputs:
            request = self.requests[output.request_id]
            request.token_times += [end] * len(output.new_token_ids)
            request.token_ids += output.new_token_ids
            sampled += len(output.new_token_ids)
            request.cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None:
                request.finish = end
        return sampled

    def _take_state(
        self, record: StepRecord, live: Mapping[tuple[str, int], Request], start: float, end: float, sampled: int
    ) -> None:
        stats = record.stats
        self.num_preemptions = stats.total_preemptions
        self.num_swaps = stats.total_swaps
        self.num_recomputed_tokens = stats.total_recomputed_tokens
        self.num_cached_tokens = stats.total_cached_tokens
        held = stats.num_blocks - stats.free_blocks + stats.reserved_blocks
        self.steps.append(
            StepTrace(
                start=start,
                end=end,
                tokens=record.plan.num_tokens,
                prefill=sum(_prompt_tokens(item) for item in record.plan.items),
                sampled=sampled,
                running=stats.num_running,
                waiting=stats.num_waiting + stats.num_preempted,
                kv_held=held * self._block_size,
                kv_useful=sum(request.num_computed for request in live.values() if request.finish_reason is None),
            )
        )


def _prompt_tokens(item: StepItem) -> int:
    return 0 if item.discard else max(0, min(item.start + len(item.token_ids), item.num_prompt) - item.start)


def _states(items: tuple[StepItem, ...]) -> dict[str, State]:
    """What each request in a plan does. Padding after a prompt is a second item of the same request: still prefill."""
    states: dict[str, State] = {}
    for item in items:
        if item.request_id not in states:
            work = State.PREFILL if item.start < item.num_prompt else State.DECODE
            states[item.request_id] = State.HELD if item.discard else work
    return states


def _extend(segments: list[Segment], state: State, start: float, end: float) -> None:
    """Lengthens the last segment or begins a new one, without a gap: the pause between steps belongs to the later."""
    if not segments:
        segments.append(Segment(state, start, end))
    elif segments[-1].state is state:
        segments[-1].end = end
    else:
        segments.append(Segment(state, segments[-1].end, end))
