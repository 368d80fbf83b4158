"""Orders: who of the waiting boards next, and who of the running makes room.

An order is a key that a request keeps for as long as it waits, smallest first. That makes the queue a sorted list, and
ageing a constant: who has waited for ``a`` seconds longer is ahead by ``a`` for ever, so a key that adds the time of
arrival starves nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from chairlift.core.kv import KVManager
from chairlift.core.request import Request
from chairlift.errors import ConfigError

SortKey = float | int

SECONDS_PER_TOKEN = 0.01
"""How long a request of one prompt token more waits before it counts as much as one without (shortest-prefill)."""

PATIENCE = 60.0
"""Seconds after which one without a deadline counts as due (deadline), or is no longer passed over (longest-prefix)."""


class Order:
    """First come, first served; the base of all others.

    Attributes:
        preempts: a waiting request may outrank a running one.
    """

    preempts = False

    def key(self, request: Request) -> SortKey:
        """The request's place among the waiting, smallest first; equal ones go in the order in which they came."""
        return request.ticket

    def choose(self, waiting: Iterable[Request], kv: KVManager, now: float) -> Request:
        """Who boards next. ``waiting`` comes in the order of the keys, and is not empty."""
        return next(iter(waiting))

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether the running one is to make room for the waiting one. Must hold for no two requests both ways."""
        return False

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        """Who makes room when memory runs out, None if there are none. ``candidates`` come from who boarded last to who
        boarded first."""
        return next(iter(candidates), None)


class ByPriority(Order):
    """Lower classes of priority first. Waiting for ``ageing`` seconds counts as much as one class."""

    preempts = True

    def __init__(self, ageing: float = 30.0) -> None:
        self._ageing = ageing

    def key(self, request: Request) -> SortKey:
        return request.queued_at + request.priority * self._ageing

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and self.key(waiting) < self.key(running)

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        return max(candidates, key=lambda request: request.priority, default=None)


class ShortestPrefill(Order):
    """Fewest prompt tokens first; who was preempted comes before all newer ones."""

    def key(self, request: Request) -> SortKey:
        return request.queued_at + (0 if request.num_preemptions else request.num_prompt * SECONDS_PER_TOKEN)


class EarliestDeadline(Order):
    """Who must be served first. ``slo_ttft``: seconds that a request without a time of its own may wait."""

    def __init__(self, slo_ttft: float | None = None) -> None:
        self._patience = PATIENCE if slo_ttft is None else slo_ttft

    def key(self, request: Request) -> SortKey:
        due = request.ttft_deadline if request.num_output == 0 else request.deadline
        return request.queued_at + self._patience if due is None else due


class LongestPrefix(Order):
    """Most tokens in the prefix cache first, among those who came first: who needs least is served soonest, and what
    is cached is used before it is pushed out."""

    DEPTH = 32  # so many are looked at, so that a long queue costs no more than a short one

    def choose(self, waiting: Iterable[Request], kv: KVManager, now: float) -> Request:
        candidates = list(islice(waiting, self.DEPTH))
        if now - candidates[0].queued_at > PATIENCE:
            return candidates[0]
        resumed = next((request for request in candidates if request.num_preemptions), None)
        return resumed or max(candidates, key=lambda request: kv.lookup(request).num_tokens)


def make_order(name: str, *, priority_ageing: float = 30.0, slo_ttft: float | None = None) -> Order:
    """An order by its name in the configuration. Both times in seconds."""
    orders: dict[str, Callable[[], Order]] = {
        "fcfs": Order,
        "priority": lambda: ByPriority(priority_ageing),
        "shortest-prefill": ShortestPrefill,
        "longest-prefix": LongestPrefix,
        "deadline": lambda: EarliestDeadline(slo_ttft),
    }
    if name not in orders:
        raise ConfigError(f"--order must be one of {', '.join(orders)}, got {name!r}")
    return orders[name]()
