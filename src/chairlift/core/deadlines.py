"""Which requests must be looked at because their time may be over. Nothing here walks all requests in a step."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from chairlift.core.request import Request

_SLACK = 64  # entries of requests that have ended in time, beyond as many as live


class Deadlines:
    """A heap of the times that requests have set."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def watch(self, request: Request, live: Mapping[str, Mapping[int, Request]]) -> None:
        """Notes a request's times, if it has any. Those of whom no sample is among the ``live`` ones, by id and index,
        are forgotten now and then."""
        for time in {request.ttft_deadline, request.deadline} - {None}:
            assert time is not None
            heapq.heappush(self._entries, (time, request.ticket, request))
        if len(self._entries) > 4 * len(live) + _SLACK:
            tickets = {sample.ticket for samples in live.values() for sample in samples.values()} | {request.ticket}
            self._entries = [entry for entry in self._entries if entry[1] in tickets]
            heapq.heapify(self._entries)

    def due(self, now: float) -> Iterator[Request]:
        """Requests one of whose times has come, each once a time."""
        while self._entries and self._entries[0][0] <= now:
            yield heapq.heappop(self._entries)[2]


def is_late(request: Request, now: float) -> bool:
    """Whether a sequence has missed a time that still matters to it."""
    due = request.deadline if request.num_output else request.ttft_deadline
    return due is not None and due <= now
