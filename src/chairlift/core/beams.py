"""Beam search: which continuations of a prompt live on. The scheduler gives each beam its sequence and its blocks.

Each round every beam offers its best next tokens. Those that end a text become results; of the others the best
``width``, whichever beams they come from, are the beams of the next round. The search is over when the beams are at
their greatest length, or none of them can still become better than the results there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chairlift.core.request import FinishReason, Request

Candidates = Sequence[tuple[int, float]]  # token and its logprob, best first


@dataclass(frozen=True, slots=True)
class Choice:
    """A beam of the next round: ``parent`` goes on with ``token``."""

    parent: int
    token: int
    logprob: float  # of all its tokens


@dataclass(frozen=True, slots=True)
class Result:
    """A text that has ended."""

    score: float
    logprob: float
    token_ids: tuple[int, ...]
    reason: FinishReason
    stop_token_id: int | None = None


class BeamSearch:
    """One request's search. Beams are known by the index of their sequence; the first is that of the prompt."""

    def __init__(self, request: Request) -> None:
        params = request.params
        self.width = params.width
        self.num_results = params.n
        self.results: list[Result] = []
        self._penalty = params.length_penalty
        self._stop_ids = request.stop_ids
        self._num_prompt = request.num_prompt
        self._most = request.max_len - request.num_prompt  # tokens
        self._beams: dict[int, float] = {request.index: 0.0}  # their logprobs
        self._offers: dict[int, Candidates] = {}
        self._next_index = request.index + 1

    def offer(self, beam: int, candidates: Candidates) -> bool:
        """Takes a beam's best next tokens, ``num_candidates`` of them; True when all beams have offered."""
        self._offers[beam] = candidates
        return len(self._offers) == len(self._beams)

    def advance(self, token_ids: Mapping[int, Sequence[int]]) -> list[Choice]:
        """Ends the round: the beams of the next one, or none when the search is over.

        ``token_ids`` are the prompt and tokens of each beam, to which the chosen tokens are still to be added.
        """
        choices: list[Choice] = []
        for parent, before in self._beams.items():
            for token, logprob in self._offers[parent]:
                if token in self._stop_ids:
                    self._end(token_ids[parent], token, before + logprob, FinishReason.STOP)
                else:
                    choices.append(Choice(parent, token, before + logprob))
        choices.sort(key=lambda choice: -choice.logprob)  # equal ones stay in the order of their parents
        choices = choices[: self.width]
        self._offers = {}
        length = len(next(iter(token_ids.values()))) + 1 - self._num_prompt
        if length >= self._most:
            for choice in choices:
                self._end(token_ids[choice.parent], choice.token, choice.logprob, FinishReason.LENGTH)
            return []
        return [] if self._is_over(choices, length) else choices

    def begin_round(self, choices: Sequence[Choice]) -> list[int]:
        """The indexes of the next round's beams: a parent's first choice keeps its own, each other gets a new one."""
        beams: dict[int, float] = {}
        for choice in choices:
            index = choice.parent
            if index in beams:
                index, self._next_index = self._next_index, self._next_index + 1
            beams[index] = choice.logprob
        self._beams = beams
        return list(beams)

    def _is_over(self, choices: Sequence[Choice], length: int) -> bool:
        """Whether no beam can come to a better score than the last of the results. A logprob only falls, so a beam's
        best score is that of its present one at the length that favours it most."""
        if not choices:
            return True
        if len(self.results) < self.num_results:
            return False
        best_length = self._most if self._penalty > 0 else length + 1
        return self.results[-1].score >= self._score(choices[0].logprob, best_length)

    def _end(self, before: Sequence[int], token: int, logprob: float, reason: FinishReason) -> None:
        tokens = (*before[self._num_prompt :], token)
        stop = token if reason is FinishReason.STOP else None
        self.results.append(Result(self._score(logprob, len(tokens)), logprob, tokens, reason, stop))
        self.results.sort(key=lambda result: -result.score)
        del self.results[self.num_results :]

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._penalty)


MOST_CANDIDATES = 1024
"""Best tokens that a runner lists at most."""


def num_candidates(width: int, num_stop_ids: int) -> int:
    """How many tokens each beam must offer, so that ``width`` of them go on however many of them would end it."""
    return min(width + num_stop_ids, MOST_CANDIDATES)
