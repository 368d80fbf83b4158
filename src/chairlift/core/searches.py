"""Beam searches under way: each beam a sequence of its own, on the blocks of its parent as far as the tokens are the
same. Which beams live on is `BeamSearch`'s decision."""

from __future__ import annotations

from collections.abc import Iterator

from chairlift.core.beams import BeamSearch
from chairlift.core.boarding import Boarding
from chairlift.core.kv import KVManager
from chairlift.core.plan import Output, TokenLogprob
from chairlift.core.request import FinishReason, Request, Status
from chairlift.core.sequences import Sequences


class Searches:
    """A search is here from the first token of its prompt on."""

    def __init__(self, kv: KVManager, boarding: Boarding, sequences: Sequences) -> None:
        self._kv = kv
        self._boarding = boarding
        self._sequences = sequences
        self._searches: dict[str, BeamSearch] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._searches

    def __iter__(self) -> Iterator[str]:
        return iter(self._searches)

    @property
    def width(self) -> int:
        """Slots that all searches have."""
        return sum(search.width for search in self._searches.values())

    def offer(self, beam: Request, logprobs: TokenLogprob) -> list[Output]:
        """A beam has its candidates. When all have, the best go on; when the search is over, its results come."""
        search = self._searches.get(beam.id)
        if search is None:
            search = self._searches[beam.id] = BeamSearch(beam)
            beam.num_samples = 1
        if not search.offer(beam.index, logprobs.top):
            return []
        beams = dict(self._sequences.by_id[beam.id])
        choices = search.advance({index: beam.token_ids for index, beam in beams.items()})
        if not choices:
            return self.end(beam.id, _results(beam, search))
        indexes = search.begin_round(choices)
        chosen = [
            beams[choice.parent] if index in beams else self._sequences.fork(beams[choice.parent], index)
            for index, choice in zip(indexes, choices, strict=True)
        ]
        for index, loser in beams.items():  # after the forks, so that no block of theirs is lost
            if index not in indexes:
                self._sequences.drop(loser)
        for winner, choice in zip(chosen, choices, strict=True):
            winner.token_ids.append(choice.token)
        self._kv.settle(chosen[0])
        return []

    def end(self, request_id: str, outputs: list[Output]) -> list[Output]:
        """Ends a search with these outputs, the same."""
        search = self._searches.pop(request_id)
        first, *others = self._sequences.of(request_id)
        for beam in others:
            self._sequences.drop(beam)
        first.num_samples = search.width  # it gives all the slots back
        first.finish_reason = outputs[0].finish_reason
        self._sequences.end(first)
        return outputs

    def restart(self, request_id: str) -> None:
        """Beams that lost their KV: the search begins again with the prompt, and comes to the same results."""
        search = self._searches.pop(request_id)
        beams = self._sequences.of(request_id)
        again = beams[0].copy(0, beams[0].num_prompt)
        again.num_samples, again.status = search.width, Status.PREEMPTED
        again.failed_end = max(beam.failed_end for beam in beams)
        again.num_failures = max(beam.num_failures for beam in beams)
        for beam in beams:
            self._sequences.drop(beam)
        self._boarding.give_back_slots(again)
        self._sequences.begin(again, "preempted", "the search begins again")


def _results(request: Request, search: BeamSearch) -> list[Output]:
    found = len(search.results)
    missing = f"the search found {found} texts, not {search.num_results}; ask for fewer"
    return [
        Output(request.id, rank, finish_reason=FinishReason.ERROR, error=missing)
        for rank in range(found, search.num_results)
    ] + [
        Output(
            request.id,
            rank,
            result.token_ids,
            result.reason,
            num_cached_tokens=request.num_cached_tokens,
            stop_token_id=result.stop_token_id,
            cumulative_logprob=result.logprob,
        )
        for rank, result in enumerate(search.results)
    ]
