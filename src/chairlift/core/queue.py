"""The waiting requests, in the order in which they board. Nothing here walks all of them in a step."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from chairlift.core.kv import KVManager
from chairlift.core.order import Order, SortKey
from chairlift.core.request import Request, Status
from chairlift.core.shares import Shares

Rank = tuple[float, SortKey, int, int]
"""Who goes first: the tenant's counter, the order's key, the ticket, the sample's index."""

Entry = tuple[SortKey, int, int, Request]


class Line:
    """Requests of one tenant, sorted: a list, since moving some thousand pointers is cheaper than any tree here."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in self._entries)

    def push(self, key: SortKey, request: Request) -> None:
        insort(self._entries, (key, request.ticket, request.index, request))

    def remove(self, key: SortKey, request: Request) -> None:
        del self._entries[self.position(key, request)]

    def position(self, key: SortKey, request: Request) -> int:
        at = bisect_left(self._entries, (key, request.ticket, request.index), key=lambda entry: entry[:3])
        assert self._entries[at][3] is request, f"{request.key} is not where its key says"
        return at


class WaitingQueue:
    """All waiting requests. Without ``shares`` one line; with them one a tenant, and the least served goes first."""

    def __init__(self, order: Order, shares: Shares | None = None) -> None:
        self._order = order
        self._shares = shares
        self._lines: dict[str, Line] = {}
        self._least_served: list[tuple[float, str]] = []  # a heap; an entry may be out of date, never too large
        self._keys: dict[tuple[str, int], SortKey] = {}
        self.num_preempted = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        """About in the order in which they will board: as if each tenant were charged for its prompts one by one."""
        entries: list[tuple[float, int, Request]] = []
        for name, line in self._lines.items():
            served = self._counter(name)
            for request in line:
                entries.append((served, len(entries), request))
                served += request.num_prompt / self._shares.weight(name) if self._shares else 0.0
        return (request for _, _, request in sorted(entries))

    def peek(self) -> Request:
        """The first by the keys alone. There must be somebody."""
        return next(iter(self._lines[self._next_line()]))

    def first(self, kv: KVManager, now: float) -> Request:
        """Who boards next. There must be somebody."""
        return self._order.choose(self._lines[self._next_line()], kv, now)

    def rank(self, request: Request) -> Rank:
        return self._counter(request.tenant), self._order.key(request), request.ticket, request.index

    def push(self, request: Request) -> None:
        name = self._line_of(request)
        if name not in self._lines:
            self._lines[name] = Line()
            self._enter_heap(name)
        self._keys[request.key] = key = self._order.key(request)
        self._lines[name].push(key, request)
        self.num_preempted += request.status is Status.PREEMPTED

    def remove(self, request: Request) -> None:
        name = self._line_of(request)
        self._lines[name].remove(self._keys.pop(request.key), request)
        if not self._lines[name]:
            del self._lines[name]
        self.num_preempted -= request.status is Status.PREEMPTED

    def _line_of(self, request: Request) -> str:
        return request.tenant if self._shares else ""

    def _counter(self, tenant: str) -> float:
        return self._shares.counter(tenant) if self._shares else 0.0

    def _next_line(self) -> str:
        """The tenant served least. Counters only grow, so an entry that is out of date comes too early: it is then put
        right, and the next one tried."""
        heap = self._least_served
        while True:
            counter, name = heap[0]
            now = self._counter(name)
            if name not in self._lines:
                heapq.heappop(heap)
            elif now > counter:
                heapq.heapreplace(heap, (now, name))
            else:
                return name

    def _enter_heap(self, name: str) -> None:
        """A line is new. Entries of former lines stay in the heap, but not too many."""
        heapq.heappush(self._least_served, (self._counter(name), name))
        if len(self._least_served) > 2 * len(self._lines) + 64:
            self._least_served = [(self._counter(line), line) for line in self._lines]
            heapq.heapify(self._least_served)
