"""Fairness between tenants: virtual token counters, and who holds more than others.

Each tenant has a counter of the tokens computed for it, over its weight; whoever has the smallest is served next. A
tenant that comes back after a pause starts at the counter that is being served: it is owed nothing for the time in
which it asked for nothing. Nothing is held back while only one tenant is there. (Sheng et al., "Fairness in Serving
Large Language Models", 2024.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from chairlift.core.request import Request

OUTPUT_COST = 2.0
"""What a generated token counts, in prompt tokens."""

_MOST_IDLE = 1024  # counters kept, or somewhat more, of tenants that have no request here


class Shares:
    """``weights`` by tenant, or by the user that its name ends in after a slash, above 0; others have 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._served = 0.0  # the counter of who was served last
        self._live: Counter[str] = Counter()
        self.slots: Counter[str] = Counter()  # held by each tenant; none is not kept

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant) or self._weights.get(tenant.partition("/")[2], 1.0)

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, self._served)

    def join(self, tenant: str) -> None:
        """A request of the tenant has come."""
        if not self._live[tenant]:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._served)
        self._live[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant has ended."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            if len(self._counters) > len(self._live) + 2 * _MOST_IDLE:
                self._forget_idle()

    def _forget_idle(self) -> None:
        """Of the tenants without a request only those are kept that were served most."""
        idle = sorted(self._counters.keys() - self._live.keys(), key=self._counters.__getitem__)
        for tenant in idle[:-_MOST_IDLE]:
            del self._counters[tenant]

    def hold(self, request: Request) -> None:
        """The request got its slots."""
        self.slots[request.tenant] += request.num_samples

    def give_back(self, request: Request) -> None:
        """The request gives back the slots of the samples it has."""
        self.slots[request.tenant] -= request.num_samples
        if not self.slots[request.tenant]:
            del self.slots[request.tenant]

    def serve(self, tenant: str) -> None:
        """The tenant, having the smallest counter, is served."""
        self._served = max(self._served, self.counter(tenant))

    def holds_less(self, request: Request, other: Request) -> bool:
        """Whether the tenant of a running request has fewer slots for its weight than that of another."""
        mine, others = (self.slots[r.tenant] / self.weight(r.tenant) for r in (request, other))
        return mine < others

    def charge(self, request: Request, start: int, end: int) -> None:
        """Positions ``start .. end - 1`` are computed for a request; what was computed before costs nothing again."""
        start = max(start, request.num_charged)
        if start >= end:
            return
        request.num_charged = end
        prompt = max(0, min(end, request.num_prompt) - start)
        cost = prompt + OUTPUT_COST * (end - start - prompt)
        self._counters[request.tenant] = self.counter(request.tenant) + cost / self.weight(request.tenant)

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether a slot is to pass to another tenant: when afterwards it still holds no more than the giver does, and
        was not served more, for else whoever made way would be the next to board."""
        if waiting.tenant == running.tenant or self.counter(waiting.tenant) > self.counter(running.tenant):
            return False
        taker = (self.slots[waiting.tenant] + waiting.num_samples) / self.weight(waiting.tenant)
        giver = (self.slots[running.tenant] - running.num_samples) / self.weight(running.tenant)
        return taker <= giver
