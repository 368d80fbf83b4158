"""Boarding and preemption: who has a slot and memory, who waits for them, and how one becomes the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.core.batch import Batch
from chairlift.core.gates import Gate, Reserve, ReservePrompt
from chairlift.core.kv import Hit, KVManager
from chairlift.core.pace import Pace, Work
from chairlift.core.plan import Capacity
from chairlift.core.policy import Policy
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import Key, Request, Status
from chairlift.core.settings import Settings
from chairlift.core.shares import Shares

_RESERVE = Reserve()
_RESERVE_PROMPT = ReservePrompt()

Tell = Callable[[Request, str, str], None]
"""Notes an event of a request's life: what, and details."""


@dataclass(slots=True)
class Totals:
    """Counts from the start of the engine."""

    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    lookup_tokens: int = 0


class Boarding:
    """Moves requests between those who wait and those who run, and counts the slots.

    Attributes:
        running: in the order of boarding.
        slots_used: a request of n samples takes n slots from the start.
        head: the first in the queue, who could not board; None if nobody waits.
        favoured: for whom others have made way before this step. Whatever its rank it is planned before them.
        binding: for want of what, a word of recorder.REASONS; empty if nobody waits.
    """

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy,
        settings: Settings,
        kv: KVManager,
        pace: Pace,
        shares: Shares | None,
        tell: Tell,
    ) -> None:
        self.waiting = WaitingQueue(policy.order, shares)
        self.running: dict[Key, Request] = {}
        self.slots_used = 0
        self.head: Request | None = None
        self.favoured: Request | None = None
        self.binding = ""
        self.totals = Totals()
        self._capacity = capacity
        self._policy = policy
        self._settings = settings
        self._kv = kv
        self._pace = pace
        self._shares = shares
        self._tell = tell
        self._stuck: Request | None = None  # could not board; pointless to try again until something is given back
        self._stuck_for = ""  # for want of what
        self._tries = 0  # in which it was passed over
        self._in_vain: Request | None = None  # nobody makes way for it, until something is given back
        self._told: tuple[Request | None, str] = (None, "")

    @property
    def room(self) -> int:
        """Blocks that requests can have in all."""
        return self._capacity.num_blocks - self._kv.num_pinned

    # -- memory for the running

    def make_room(self, request: Request, n: int) -> bool:
        """Grows a running request, preempting others if memory runs out; maybe itself. False if it must wait."""
        while not self._kv.grow(request, n):
            others = [r for r in reversed(self.running.values()) if not self._comes_before(r, request)]
            victim = self._policy.order.victim(
                [r for r in others if self._may_leave(r) and (r.reservation is None or r is request)]
            )
            if victim is None or (victim is request and any(self._comes_before(request, r) for r in others)):
                return False  # those who come after it make way at the beginning of the next step
            self.preempt(victim, "blocks")
            if victim is request:
                return False
        self._charge(request)
        return True

    def spare_room(self, request: Request, n: int) -> int:
        """How many of the next ``n`` positions a running request may write, and nobody is the worse for it: a block is
        taken only while there is one for the next token of every other, and nobody counts on blocks to come back."""
        layout = self._kv.layout
        plenty = not layout.windowed and self._kv.num_available > len(self.running) * layout.num_groups
        if request.num_planned + n > request.writable_end and plenty and self._kv.grow(request, n):
            self._charge(request)
        return max(0, min(n, request.writable_end - request.num_planned))

    def _charge(self, request: Request) -> None:
        """For what is now writable, so that a decode is charged once a block."""
        if self._shares:
            self._shares.charge(request, 0, self._chargeable(request))

    def _chargeable(self, request: Request) -> int:
        """Positions up to the end of its blocks that a sequence will compute if it is not cut short."""
        return min(request.writable_end, request.max_len - 1)

    def _comes_before(self, other: Request, request: Request) -> bool:
        """Whether a running request would rather leave itself than push out this other one. Never both ways."""
        if self._shares and other.tenant != request.tenant:  # the order is for those of one tenant
            return self._shares.holds_less(other, request)
        return self._policy.order.outranks(other, request)

    def _may_leave(self, request: Request) -> bool:
        """Who may be preempted: nobody in this step or in flight, preempted often, or searching with beams."""
        return request.num_planned == request.num_computed and not self._protected(request)

    def _protected(self, request: Request) -> bool:
        often = request.num_preemptions >= self._settings.max_preemptions and request.reservation is not None
        return often or request.finish_reason is not None or request.params.use_beam_search

    def preempt(self, request: Request, why: str, lost: bool = False) -> None:
        """Back to the queue. Its KV is swapped out, or dropped and computed again later. ``lost``: there is no KV any
        more, so this is no preemption that counts, only the way back."""
        tokens, blocks = request.num_computed, len(request.block_table)
        swapped = not lost and self._swaps(request) and self._kv.swap_out(request)
        if not swapped:
            self._kv.release(request)
            self.totals.recomputed_tokens += tokens
        self.totals.swaps += swapped
        self.totals.preemptions += not lost
        self.leave(request)
        request.num_planned, request.num_pending = 0, 0
        request.status = Status.PREEMPTED
        request.num_preemptions += not lost
        what = "swapped out" if swapped else "preempted"
        self._tell(request, what, f"for want of {why}: {blocks} blocks, {tokens} tokens")
        self.waiting.push(request)

    def _swaps(self, request: Request) -> bool:
        """Whether to swap a request's KV rather than compute it again."""
        mode = self._settings.preemption_mode
        if not self._kv.tiers or mode == "recompute":
            return False
        if mode == "swap":
            return True
        recompute = self._pace.seconds(Work().plus(0, request.num_computed)) - self._pace.seconds(Work())
        return not self._pace.known or 2 * self._pace.swap_seconds(len(request.block_table)) <= recompute

    # -- boarding

    def next(self, now: float) -> Request | None:
        """Who boards next: somebody for whom others have just made way, or else the first in the queue."""
        if self.favoured is not None and self.favoured.status in (Status.WAITING, Status.PREEMPTED):
            return self.favoured
        if not self.waiting:
            return None
        if self.slots_used >= self._settings.max_num_seqs:  # nobody can: no need to choose well
            return self.waiting.peek()
        return self.waiting.first(self._kv, now)

    def make_way(self, now: float) -> Request | None:
        """Preempts those who come after others that lack what they hold: first for the running, whose next tokens
        would find no memory since decodes are planned before prompts and in the order of boarding; then for the next
        to board, if it outranks them. Nobody makes way in vain.

        To be called before anybody is planned, since whoever is in a step stays. With a step in flight it returns who
        is to be left out of this one, so that it can leave before the next.
        """
        self.favoured = None
        if not (self._shares or self._policy.order.preempts):
            return None
        growing = [  # as num_remaining > 1, which would cost a call for each in each step
            r
            for r in self.running.values()
            if r.num_planned >= r.writable_end or len(r.token_ids) + r.num_pending - r.num_planned > 1
        ]
        for request in growing:
            if request.status is Status.RUNNING and self._needs(request) > self._kv.num_available:
                before = self.totals.preemptions
                leaving = self._push_out(request, self._comes_before, self._lacks_memory)
                if leaving is not None:
                    return leaving
                if self.totals.preemptions > before:
                    self.favoured = self.favoured or request
        head = self.next(now)
        if head is None or head is self._in_vain:
            return None
        before = self.totals.preemptions
        leaving = self._push_out(head, self._outranks, lambda request, without: bool(self._lack(request, without)))
        if self.totals.preemptions > before:
            self.favoured = self.favoured or head
        elif leaving is None and head is self._stuck and not self._shares:  # whose counters change with every step
            self._in_vain = head
        return leaving

    def _push_out(
        self,
        request: Request,
        before: Callable[[Request, Request], bool],
        lacks: Callable[[Request, Sequence[Request]], bool],
    ) -> Request | None:
        """Preempts running requests that ``request`` comes before until it lacks nothing; stops at one in flight, and
        returns it."""
        if not lacks(request, ()):
            return None
        lower = [r for r in reversed(self.running.values()) if not self._protected(r) and before(request, r)]
        if not lower or lacks(request, lower):
            return None
        while lower and lacks(request, ()):
            victim = self._policy.order.victim(lower)
            if victim is None or not self._may_leave(victim):
                return victim
            lower.remove(victim)
            self.preempt(victim, f"a place for {request.id}")
        return None

    def _needs(self, request: Request) -> int:
        """Blocks that a running request still needs for the tokens it has, and was not promised."""
        if request.num_remaining > 1:
            needed = self._kv.layout.held(len(request.token_ids), prefilling=True) - self._kv.num_held(request)
        else:
            needed = self._kv.layout.num_groups if request.num_planned >= request.writable_end else 0
        return needed - (request.reservation.left if request.reservation else 0)

    def _lacks_memory(self, request: Request, without: Sequence[Request]) -> bool:
        return self._needs(request) > self._kv.num_available + self._kv.freed_by(without)

    def _lack(self, request: Request, without: Sequence[Request] = ()) -> str:
        """For want of what a waiting request could not board if those left who are running; empty if it could."""
        slots = self.slots_used - sum(other.num_samples for other in without)
        if slots + request.num_samples > self._settings.max_num_seqs:
            return "slots"
        gate, hit = self._gate(request), self._kv.lookup(request)
        staying = [other for other in self.running.values() if other not in without]
        freed = self._kv.freed_by(without)
        n, headroom = len(request.token_ids) - hit.num_tokens, gate.headroom(self._kv) if staying else 0
        if self._kv.missing(hit, n, gate.total(request, self._kv), headroom) > freed:
            return "blocks"
        fits = self._policy.gate.fits(request, hit, staying, self._kv, promised=gate.promises, freed=freed)
        return "" if fits else "gate"

    def board(self, batch: Batch, request: Request) -> bool:
        """Admits the head of the queue to the step if slots, tokens and memory allow."""
        if request is self._stuck and not self._looks_again():
            self.bind(request, self._stuck_for)
            return False
        why = self._try_to_board(batch, request)
        self.bind(request if why else None, why)
        if why in ("slots", "blocks", "gate"):
            self._stuck, self._stuck_for, self._tries = request, why, 0
        return not why

    def _looks_again(self) -> bool:
        """A gate that looks ahead may see more when those aboard come nearer to their ends: once a block is enough."""
        self._tries += 1
        return self._stuck_for == "gate" and self._tries >= self._kv.block_size

    def _outranks(self, waiting: Request, running: Request) -> bool:
        if self._shares and waiting.tenant != running.tenant:
            outranks = self._shares.outranks(waiting, running)
        else:
            outranks = self._policy.order.outranks(waiting, running)
        # Else it would be the first to board again.
        return outranks and self.waiting.rank(waiting) < self.waiting.rank(running)

    def _try_to_board(self, batch: Batch, request: Request) -> str:
        """Boards the request, or says for want of what it cannot."""
        if self.slots_used + request.num_samples > self._settings.max_num_seqs:
            return "slots"
        if batch.left <= 0:
            return "slo" if batch.paced else "tokens"
        if batch.items and self._settings.slo_itl is not None and self._too_slow_with(request):
            return "slo"
        gate = self._gate(request)
        hit = self._kv.lookup(request)
        total = gate.total(request, self._kv)
        padding = self._padding(request, total)
        n = self._policy.quota(len(request.token_ids) - hit.num_tokens + padding, batch.left) - padding
        if n <= 0:
            return "tokens"
        running = list(self.running.values())
        if not self._policy.gate.fits(request, hit, running, self._kv, promised=gate.promises):
            return "gate"
        total += self._padding_blocks(request, padding)
        headroom = gate.headroom(self._kv) if self.running else 0
        swaps_in = bool(request.host_table)
        if not self._kv.admit(request, hit, n + padding, total=total, promise=gate.promises, headroom=headroom):
            return "blocks"
        self._boarded(request, hit, swaps_in)
        self.take(batch, request, n)
        if padding:
            batch.pad(request, padding)
        return ""

    def take(self, batch: Batch, request: Request, n: int) -> None:
        """A piece of a prompt, or of what is computed again, goes into the step."""
        start = request.num_planned
        if self._shares:
            ends = start + n >= len(request.token_ids)
            self._shares.charge(request, 0, max(start + n, self._chargeable(request)) if ends else start + n)
        batch.take(request, n)
        if n > 1 or start < request.num_prompt - 1:
            self._tell(request, "chunk", f"{n} tokens from {start}")

    def _gate(self, request: Request) -> Gate:
        """The policy's gate, but for those who must not lose their memory. Of many samples only the longest must fit;
        if not all can be promised theirs, their prompt is, and then each of them when it was preempted in its turn."""
        often = request.num_preemptions >= self._settings.max_preemptions
        if not often and not request.params.use_beam_search:
            return self._policy.gate
        return _RESERVE if self._kv.layout.full_blocks(request) <= self.room else _RESERVE_PROMPT

    def _boarded(self, request: Request, hit: Hit, swaps_in: bool) -> None:
        """A request was admitted: it leaves the queue."""
        if request.status is Status.WAITING:
            request.num_cached_tokens = hit.num_tokens
            self.totals.cached_tokens += hit.num_tokens
            self.totals.lookup_tokens += request.num_prompt
        self.waiting.remove(request)
        request.status = Status.RUNNING
        request.num_planned = hit.num_tokens
        self.running[request.key] = request
        self.slots_used += request.num_samples
        if self._shares:
            self._shares.serve(request.tenant)
            request.num_charged = max(request.num_charged, hit.num_tokens)  # what is cached costs nothing
            self._shares.hold(request)
        what = "swapped in" if swaps_in else "boarded"
        self._tell(request, what, f"{hit.num_tokens} of {len(request.token_ids)} tokens known")

    def _too_slow_with(self, request: Request) -> bool:
        """Whether another decode would make the steps slower than their target, even without any prompt."""
        assert self._settings.slo_itl is not None
        decoding = [r for r in self.running.values() if r.num_remaining <= 1]
        if not decoding or not self._pace.known:
            return False
        positions = sum(r.num_planned for r in self.running.values()) + len(request.token_ids)
        work = Work(len(self.running) + request.num_samples, positions)
        return self._pace.safe_seconds(work) > self._settings.slo_itl

    def _padding(self, request: Request, total: int) -> int:
        """Padding that the policy wants, as far as the request would still fit an empty cache."""
        most = self._capacity.max_model_len - len(request.token_ids)
        padding = min(self._policy.padding(request), most)
        while padding > 0 and total + self._padding_blocks(request, padding) > self.room:
            padding -= self._kv.block_size
        return max(0, padding)

    def _padding_blocks(self, request: Request, padding: int) -> int:
        """Blocks that padding takes beyond the greatest length, of no use to the samples."""
        padded = max(request.max_len, len(request.token_ids) + padding)
        return self._kv.layout.held(padded, prefilling=True) - self._kv.layout.held(request.max_len, prefilling=True)

    # -- leaving

    def leave(self, request: Request) -> None:
        """A running request gives back its slots; its memory it has given back."""
        del self.running[request.key]
        self.give_back_slots(request)

    def join(self, sample: Request) -> None:
        """A sample forked from its prompt runs at once: its slot was taken with the prompt."""
        sample.status = Status.RUNNING
        self.running[sample.key] = sample

    def drop(self, sample: Request) -> None:
        """A running one leaves, and its slot stays with its request."""
        del self.running[sample.key]
        self.retry()

    def give_back_slots(self, request: Request) -> None:
        """As many as it has samples."""
        self.slots_used -= request.num_samples
        if self._shares:
            self._shares.give_back(request)
        self.retry()

    def leave_queue(self, request: Request) -> None:
        """A request that waits ends."""
        self.waiting.remove(request)
        self.retry()

    def retry(self) -> None:
        """Something has changed that may let the head of the queue board."""
        self._stuck = self._in_vain = None

    def bind(self, request: Request | None, why: str) -> None:
        """Notes for want of what the head of the queue waits; as an event of its life when that changes."""
        self.head, self.binding = request, why
        if request is not None and self._told != (request, why):
            self._told = (request, why)
            self._tell(request, "waits", why)
