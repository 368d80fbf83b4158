"""From tokens to text, step by step: incremental decoding, stop strings, and the end of a sample. Pure logic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from chairlift.core.plan import Output, TokenLogprob
from chairlift.core.request import FinishReason, SamplingParams


class TokenStream(Protocol):
    """Decodes one sequence piece by piece. It never gives out half a character; all pieces together are the text."""

    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def longest_token(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]: ...
    def stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> TokenStream: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def token_text(self, token_id: int) -> str: ...


@dataclass(slots=True)
class Delta:
    """What one sample gained.

    Fields:
        text: new text that is certain: no part of it can turn out to belong to a stop string.
        token_ids: the tokens that were generated, the one that ended the sample included. Their text may follow later.
        logprobs: of the tokens that have a part in the text given out (a token's entry comes with its first character,
            never before).
        offsets: for each of ``logprobs``, where in the whole text the token begins, in characters.
        finish_reason: set in the last delta.
        stop_reason: the stop string or stop token that ended the sample; None for an end-of-text token or the length.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def extend(self, later: Delta) -> None:
        """Appends what came next."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        if later.finish_reason is not None:  # what follows an end says nothing, and must not undo it
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Transcript:
    """The text of one sample as it grows.

    Text that may be the beginning of a stop string is held back until that is decided, so no part of a stop string is
    ever given out, and nothing after it. Of several stop strings, the one that is complete first ends the text. The
    result is the same however the tokens were cut into steps.
    """

    def __init__(self, tokens: TokenStream, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """``stop_ids`` are the request's: tokens that end it, whose own text is left out."""
        self._tokens = tokens
        self._params = params
        self._stop_ids = stop_ids
        self._held = ""  # decoded, not given out
        self._length = 0  # of the text given out, in characters
        self._num_tokens = 0
        self._waiting: list[tuple[int, TokenLogprob]] = []  # where a token begins; those not given out
        self.finish_reason: FinishReason | None = None

    def feed(self, output: Output) -> Delta:
        """Takes a step's news of this sample. After the end it changes nothing. When a stop string ended the sample
        while the output did not, the engine still runs it: the caller must abort it."""
        delta = Delta()
        if self.finish_reason is not None:
            return delta
        for i, token in enumerate(output.new_token_ids):
            delta.token_ids.append(token)
            self._num_tokens += 1
            if token in self._stop_ids and not self._params.include_stop_str_in_output:
                continue
            if output.logprobs:
                self._waiting.append((self._length + len(self._held), output.logprobs[i]))
            if self._append(self._tokens.push([token]), delta):
                return delta
        if output.finish_reason is not None:
            if self._append(self._tokens.flush(), delta):
                return delta
            self._release(len(self._held), delta)
            self._release_logprobs(len(self._waiting), delta)  # the last tokens may have no text
            self._finish(output.finish_reason, self._stop_token(output), delta)
        return delta

    def _append(self, text: str, delta: Delta) -> bool:
        """Adds text, and gives out what is certain. Returns whether a stop string ended the sample."""
        self._held += text
        if not self._params.stop or self._num_tokens <= self._params.min_tokens:
            self._release(len(self._held), delta)
            return False
        found = _first_stop(self._held, self._params.stop)
        if found is None:
            self._release(len(self._held) - _undecided(self._held, self._params.stop), delta)
            return False
        begin, stop = found
        self._release(begin + len(stop) if self._params.include_stop_str_in_output else begin, delta)
        self._finish(FinishReason.STOP, stop, delta)
        return True

    def _release(self, count: int, delta: Delta) -> None:
        delta.text += self._held[:count]
        self._held = self._held[count:]
        self._length += count
        ready = 0
        while ready < len(self._waiting) and self._waiting[ready][0] < self._length:
            ready += 1
        self._release_logprobs(ready, delta)

    def _release_logprobs(self, count: int, delta: Delta) -> None:
        for offset, logprob in self._waiting[:count]:
            delta.offsets.append(offset)
            delta.logprobs.append(logprob)
        del self._waiting[:count]

    def _finish(self, reason: FinishReason, stop_reason: str | int | None, delta: Delta) -> None:
        self.finish_reason = delta.finish_reason = reason
        delta.stop_reason = stop_reason

    def _stop_token(self, output: Output) -> int | None:
        asked_for = output.stop_token_id in self._params.stop_token_ids
        return output.stop_token_id if asked_for else None


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(begin, stop string) of the one that is complete first in ``text``; of those that end together, the longest."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        begin = text.find(stop)
        if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
            best = (begin + len(stop), begin, stop)
    return best and (best[1], best[2])


def _undecided(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0
