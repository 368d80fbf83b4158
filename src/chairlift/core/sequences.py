"""The life of sequences: how one begins, forks and ends, and which are live."""

from __future__ import annotations

from collections.abc import Iterator

from chairlift.core.beams import num_candidates
from chairlift.core.boarding import Boarding, Tell
from chairlift.core.failures import Failures
from chairlift.core.kv import KVManager
from chairlift.core.request import FinishReason, Request, Status
from chairlift.core.shares import Shares


class Sequences:
    """All live sequences.

    Attributes:
        by_id: request id -> sample index -> sequence.
    """

    def __init__(
        self, kv: KVManager, boarding: Boarding, failures: Failures, shares: Shares | None, tell: Tell
    ) -> None:
        self.by_id: dict[str, dict[int, Request]] = {}
        self._kv = kv
        self._boarding = boarding
        self._failures = failures
        self._shares = shares
        self._tell = tell
        self._finished_ids: list[str] = []

    def __iter__(self) -> Iterator[Request]:
        return (request for samples in self.by_id.values() for request in samples.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_id

    def of(self, request_id: str) -> list[Request]:
        """The live sequences of a request; none if it is not here."""
        return list(self.by_id.get(request_id, {}).values())

    def begin(self, request: Request, what: str, detail: str) -> None:
        """A sequence takes its place in the queue. What happened to it is told with its life's events."""
        self._enter(request)
        self._tell(request, what, detail)
        self._boarding.waiting.push(request)

    def fork(self, parent: Request, index: int) -> Request:
        """Another sample with the tokens and the KV of this one; it runs at once, on a slot that it has already."""
        child = parent.copy(index, len(parent.token_ids))
        child.num_charged = min(child.num_charged, len(child.token_ids))  # what only the parent was charged for
        self._enter(child)
        self._kv.fork(parent, child)
        self._boarding.join(child)
        return child

    def end(self, request: Request) -> None:
        """Frees all that a sequence holds, whatever its state. Its finish_reason is set."""
        assert request.finish_reason is not None
        self._tell(request, "ended", f"{request.finish_reason.value} after {request.num_output} tokens")
        self._kv.release(request)
        if request.status is Status.RUNNING:
            self._boarding.leave(request)
        else:
            self._boarding.leave_queue(request)
        self._leave(request)
        if not self.by_id[request.id]:
            del self.by_id[request.id]
            self._failures.forget(request.id)
            self._finished_ids.append(request.id)

    def drop(self, request: Request) -> None:
        """Ends a running sequence that nobody hears of. The request is not over, and keeps its slots."""
        request.finish_reason = FinishReason.ABORT  # for what is still in flight
        self._kv.release(request)
        self._boarding.drop(request)
        self._leave(request)

    def take_finished_ids(self) -> tuple[str, ...]:
        """Requests that ended since the last call."""
        finished, self._finished_ids = tuple(self._finished_ids), []
        return finished

    def _enter(self, request: Request) -> None:
        params = request.params
        request.prepare(num_candidates(params.width, len(request.stop_ids)) if params.use_beam_search else None)
        self.by_id.setdefault(request.id, {})[request.index] = request
        if self._shares:
            self._shares.join(request.tenant)

    def _leave(self, request: Request) -> None:
        request.status = Status.FINISHED
        del self.by_id[request.id][request.index]
        if self._shares:
            self._shares.leave(request.tenant)
