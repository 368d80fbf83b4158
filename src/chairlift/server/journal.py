"""What a live request has been given so far: enough to go on with it in another engine.

The end of an engine is a preemption of everything it ran: what was drawn is known here, so the next engine gets each
sample as its prompt and those tokens. What it draws then depends on nothing else, so the client sees a pause and no
other difference.
"""

from __future__ import annotations

from chairlift.core.plan import Output
from chairlift.core.request import Request, Status


class Entry:
    """One live request. The event loop's thread alone touches it.

    Attributes:
        request: as it was submitted; never changed here.
        gained: whether the present engine has said anything of it.
        deaths: engines in a row that ended while they had it, and had said nothing of it since they got it.
        blame: how much speaks for it as the cause; grows with ends while it was the only one they had.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.gained = False
        self.deaths = 0
        self.blame = 0.0
        self._drawn: dict[int, list[int]] = {index: [] for index in request.outputs}  # of the samples still open
        self._forked = False  # the samples are sequences of their own
        self._num_cached = 0
        self._num_prompt_logprobs = 0

    @property
    def open(self) -> list[int]:
        """Samples that have not ended."""
        return list(self._drawn)

    @property
    def is_open(self) -> bool:
        return bool(self._drawn)

    def feed(self, output: Output) -> bool:
        """Notes what the engine said. False if the sample has ended here, and nobody wants to hear of it."""
        drawn = self._drawn.get(output.index)
        if drawn is None:
            return False
        self.gained = True
        drawn += output.new_token_ids
        self._forked = self._forked or bool(output.new_token_ids)
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        self._num_prompt_logprobs += len(output.prompt_logprobs)
        if output.finish_reason is not None:
            self.end(output.index)
        return True

    def end(self, index: int | None = None) -> None:
        """One sample, or all of them, say nothing more."""
        if index is None:
            self._drawn.clear()
        else:
            self._drawn.pop(index, None)

    def died(self, blame: float) -> None:
        """The engine that had this request has ended. One that gained something is not what it died of: at least it
        is no more suspect than all others."""
        self.deaths = 1 if self.gained else self.deaths + 1
        self.blame = 0.0 if self.gained else self.blame + blame
        self.gained = False

    def requests(self) -> list[Request]:
        """What to send to an engine that knows nothing of it."""
        request = self.request
        whole = not self._forked and len(self._drawn) == len(request.outputs)
        if whole or request.params.use_beam_search:  # of a beam search nothing is known before its end
            return [self._sequence(Status.WAITING, request.index, [], request.num_samples)] if self._drawn else []
        return [self._sequence(Status.PREEMPTED, index, drawn, 1) for index, drawn in self._drawn.items()]

    def _sequence(self, status: Status, index: int, drawn: list[int], num_samples: int) -> Request:
        request = self.request
        return Request(
            id=request.id,
            index=index,
            num_samples=num_samples,
            token_ids=[*request.token_ids, *drawn],
            num_prompt=request.num_prompt,
            params=request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            tenant=request.tenant,
            priority=request.priority,
            arrival=request.arrival,
            status=status,
            num_cached_tokens=self._num_cached,
            # The prompt's are told once, with the first sample.
            num_prompt_logprobs=self._num_prompt_logprobs if index == request.index else request.num_prompt,
        )
