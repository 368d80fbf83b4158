"""Whose steps fail. A request that makes them fail must not take the others with it.

Of a failed step nobody knows who is to blame, so all of it is computed again. Whoever was in several failed steps in a
row is a suspect and computed alone, and whoever goes on failing alone is guilty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chairlift.core.batch import Flight
from chairlift.core.request import Request

_MOST_TOGETHER = 2  # steps of a sequence in a row that fail before its request is a suspect
MOST_ALONE = 3  # and then before it is guilty

Samples = Mapping[int, Request]


class Failures:
    """Attributes:
    suspects: ids of requests that are to be computed one by one, the first first.
    """

    def __init__(self) -> None:
        self.suspects: dict[str, None] = {}

    def note(self, flight: Flight) -> None:
        """A step has failed."""
        for item, request in zip(flight.plan.items, flight.requests, strict=True):
            if request is not None:
                request.num_failures += 1
                request.failed_end = item.end

    def acquit(self, request: Request, samples: Samples) -> None:
        """A sequence has come past where it failed. When all ``samples`` of its request have, it is no suspect."""
        request.num_failures = request.failed_end = 0
        if not any(sample.failed_end for sample in samples.values()):
            self.forget(request.id)

    def judge(self, live: Mapping[str, Samples]) -> list[str]:
        """After a failure: names new suspects, or returns the ids of those who are guilty."""
        failures = {id: max(sample.num_failures for sample in samples.values()) for id, samples in live.items()}
        if self.suspects:
            return [id for id, times in failures.items() if times >= MOST_ALONE]
        for id in [id for id, times in failures.items() if times >= _MOST_TOGETHER]:
            self.suspects[id] = None
            _start_again(live[id].values())
        return []

    def forget(self, request_id: str) -> None:
        """It is a suspect no longer, if it was."""
        self.suspects.pop(request_id, None)


def _start_again(samples: Iterable[Request]) -> None:
    for sample in samples:
        sample.num_failures = 0
