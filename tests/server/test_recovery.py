"""What is known of a live request, and who is sent to the next engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chairlift.core.plan import Output
from chairlift.core.request import FinishReason, Request, SamplingParams, Status
from chairlift.server.journal import Entry
from chairlift.server.recovery import Recovery


def entry(id: str = "r", prompt: Sequence[int] = (1, 2), **params: object) -> Entry:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Entry(
        Request(
            id=id,
            token_ids=list(prompt),
            num_prompt=len(prompt),
            params=sampling,
            seed=7,
            num_samples=sampling.width,
            stop_ids=frozenset({9}),
            tenant="t",
            priority=3,
            arrival=5.0,
        )
    )


def test_nothing_was_drawn_so_it_is_sent_as_it_came():
    (request,) = entry(n=3).requests()
    assert (request.token_ids, request.num_samples, request.index) == ([1, 2], 3, 0)
    assert (request.status, request.seed, request.tenant, request.priority) == (Status.WAITING, 7, "t", 3)
    assert (request.arrival, request.stop_ids) == (5.0, {9})


def test_each_sample_goes_on_behind_what_it_drew():
    job = entry(n=3)
    for index in range(3):
        job.feed(Output("r", index, (10 + index,), num_cached_tokens=1))
    job.feed(Output("r", 1, (20,)))
    job.feed(Output("r", 2, (9,), FinishReason.STOP))
    first, second = job.requests()
    assert (first.index, first.token_ids, first.num_samples) == (0, [1, 2, 10], 1)
    assert (second.index, second.token_ids, second.num_samples) == (1, [1, 2, 11, 20], 1)
    assert {(r.num_prompt, r.num_output > 0, r.status, r.num_cached_tokens) for r in (first, second)} == {
        (2, True, Status.PREEMPTED, 1)
    }
    assert job.open == [0, 1]


def test_what_was_sent_is_not_what_is_kept():
    """An engine in this process would append to the tokens."""
    job = entry()
    job.requests()[0].token_ids.append(5)
    assert job.requests()[0].token_ids == [1, 2]


def test_a_sample_that_ended_says_nothing_more():
    job = entry(n=2)
    job.end(0)
    assert not job.feed(Output("r", 0, (5,)))
    (request,) = job.requests()
    assert (request.index, request.num_samples) == (1, 1)
    job.end()
    assert not job.is_open and job.requests() == []


def test_prompt_logprobs_are_not_told_twice():
    job = entry(prompt_logprobs=0)
    job.feed(Output("r", 0, prompt_logprobs=(None,) * 3))  # type: ignore[arg-type]
    assert job.requests()[0].num_prompt_logprobs == 3


def test_a_beam_search_starts_again():
    (request,) = entry(n=1, best_of=2, use_beam_search=True, temperature=0.0).requests()
    assert (request.num_samples, request.token_ids) == (2, [1, 2])


class Rig:
    """A recovery, and what it has sent."""

    def __init__(self, *entries: Entry) -> None:
        self.sent: list[str] = []
        self.recovery = Recovery(lambda request: self.sent.append(request.id))
        self.live = list(entries)
        self.recovery.begin()
        for each in entries:
            self.recovery.submit(each)

    def die(self, killed: bool = False) -> list[str]:
        """The engine ends, and the next one is ready. Returns who is guilty."""
        guilty = self.recovery.died(self.live, killed)
        self.live = [each for each in self.live if each not in guilty]
        self.sent.clear()
        self.recovery.begin()
        return [each.request.id for each in guilty]

    def gain(self, each: Entry) -> None:
        each.feed(Output(each.request.id, 0, (5,)))
        self.recovery.heard(each)


def test_all_go_on_in_the_order_of_their_arrival():
    rig = Rig(entry("a"), entry("b"), entry("c"))
    assert rig.die() == [] and rig.sent == ["a", "b", "c"]


def test_who_comes_between_two_engines_waits_for_the_next():
    rig = Rig(entry("a"))
    rig.recovery.died(rig.live, killed=False)
    rig.recovery.submit(entry("b"))
    assert rig.sent == ["a"]
    rig.recovery.begin()
    assert rig.sent == ["a", "a", "b"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_who_kills_the_engine_at_once_is_found_and_nobody_else(place):
    """Nobody gains a token before the engine ends, so all are suspects. Each gains as soon as it is without the guilty
    one."""
    entries = [entry(name) for name in "abc"]
    killer = entries[place]
    rig, ends, guilty = Rig(*entries), 0, []
    while killer in rig.live:
        assert ends < 6, "not found"
        if ends < 2 or killer.request.id in rig.sent:
            guilty += rig.die()
            ends += 1
        else:
            suspect = next(each for each in entries if each.request.id == rig.sent[-1])
            rig.gain(suspect)
    assert guilty == [killer.request.id]
    for each in rig.live:
        rig.gain(each)
    assert set(rig.sent) == {each.request.id for each in entries} - {killer.request.id}


def test_who_gains_a_token_is_no_suspect():
    job, other = entry("a"), entry("b")
    rig = Rig(job, other)
    for _ in range(10):
        rig.gain(job)
        rig.gain(other)
        assert rig.die() == []
        assert rig.sent == ["a", "b"]


def test_new_requests_wait_while_one_is_tried():
    rig = Rig(entry("a"), entry("b"))
    rig.die()
    rig.die()
    rig.recovery.submit(entry("c"))
    assert rig.sent == ["a"]
    rig.gain(rig.live[0])
    assert rig.sent == ["a", "b"]
    rig.gain(rig.live[1])
    assert rig.sent == ["a", "b", "c"]


def test_who_is_alone_when_the_engine_ends_twice_is_guilty():
    rig = Rig(entry("a"))
    assert rig.die() == [] and rig.sent == ["a"]
    assert rig.die() == ["a"] and rig.sent == []


def test_kills_from_outside_say_less():
    """As of a long prompt, or a beam search, which say nothing for long."""
    rig = Rig(entry("a"))
    assert [rig.die(killed=True) for _ in range(5)] == [[], [], [], [], ["a"]]


def test_a_suspect_that_leaves_makes_way():
    first, second = entry("a"), entry("b")
    rig = Rig(first, second)
    rig.die()
    rig.die()
    assert rig.sent == ["a"]
    first.end()
    rig.recovery.forget(first)
    assert rig.sent == ["a", "b"]


def test_it_knows_whether_anything_was_gained():
    rig = Rig(entry("a"))
    assert not rig.recovery.fruitful and rig.recovery.busy
    rig.gain(rig.live[0])
    assert rig.recovery.fruitful
    rig.die()
    assert not rig.recovery.fruitful
