"""The queues: refusals, aborts, preemption, forks, and how a request ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from chairlift.core.plan import BAD_LOGITS, BlockOpKind, Output, StepItem, StepPlan, StepResult, TokenLogprob
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import FinishReason, Request, Status
from chairlift.errors import RequestRefused

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]
Share = Callable[[StepPlan], dict[str, int]]

POLICIES = ("static", "continuous", "chunked")


# -- refusals at the door


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("request_args", "parts"),
    [
        ({"prompt": 0}, ["prompt is empty", "at least one token"]),
        ({"prompt": 64}, ["64 tokens", "max-model-len is 64", "shorten the prompt to 63", "raise --max-model-len"]),
        ({"prompt": 500}, ["500 tokens", "max-model-len is 64"]),
        ({"n": 9}, ["n is 9", "at most 8", "lower n (or best_of) to 8", "--max-num-seqs"]),
        (
            {"prompt": 30, "max_tokens": 11},
            ["11 KV blocks of 4 tokens", "cache has 10", "lower max_tokens", "--kv-cache-memory"],
        ),
        ({"prompt": 30, "max_tokens": None}, ["16 KV blocks", "cache has 10"]),
    ],
)
def test_what_can_never_run_is_refused(
    make_rig: MakeRig, policy: str, request_args: dict[str, Any], parts: list[str]
) -> None:
    """M1, rule 10: at once, naming the limit and what to change; and it leaves no trace."""
    rig = make_rig(policy, num_blocks=10)
    with pytest.raises(RequestRefused) as caught:
        rig.add("a", **request_args)
    for part in parts:
        assert part in str(caught.value)
    rig.check_empty()
    rig.add("a", 30, max_tokens=10)
    rig.run()
    assert len(rig.tokens("a")) == 10


@pytest.mark.parametrize("policy", POLICIES)
def test_what_exactly_fits_runs(make_rig: MakeRig, policy: str) -> None:
    rig = make_rig(policy, num_blocks=16)
    rig.add("a", 63, max_tokens=1)
    rig.add("b", 1, max_tokens=63)
    rig.add("c", 1, max_tokens=11, n=5)  # three blocks each, and one that is copied
    rig.run()
    assert [len(rig.tokens(id)) for id in "abc"] == [1, 63, 11]


def test_reserving_counts_all_samples_when_refusing(make_rig: MakeRig) -> None:
    """Optimistic, the samples may take turns in a small pool; reserved, they have to fit together."""
    rig = make_rig("chunked", admission="optimistic", num_blocks=10)
    rig.add("a", 4, max_tokens=36, n=3)
    rig.run()
    assert [len(rig.tokens("a", i)) for i in range(3)] == [36] * 3
    rig = make_rig("chunked", admission="reserve", num_blocks=10)
    with pytest.raises(RequestRefused, match="28 KV blocks"):
        rig.add("a", 4, max_tokens=36, n=3)


def test_an_id_that_is_still_live_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 4, max_tokens=2)
    with pytest.raises(RequestRefused, match="the id 'a' is already here"):
        rig.scheduler.add(next(iter(rig.scheduler.waiting)))
    rig.run()
    rig.add("a", 4, max_tokens=2)
    rig.run()


def test_output_ends_at_the_context_end(make_rig: MakeRig) -> None:
    """C9: without max_tokens, or with more than fits, generation goes to the end of the context."""
    rig = make_rig(max_model_len=20)
    rig.add("open", 5, max_tokens=None)
    rig.add("more", 5, max_tokens=100)
    rig.run()
    for id in ("open", "more"):
        assert len(rig.tokens(id)) == 15
        assert rig.ends(id) == [FinishReason.LENGTH]


# -- ends


def test_stop_tokens_are_the_schedulers_business(make_rig: MakeRig) -> None:
    """Rule 12: the stop token is the last one, and named."""
    rig = make_rig(stop_rate=0.2)
    rig.add("a", 4, max_tokens=None, stop_ids=[7])
    rig.run()
    tokens = rig.tokens("a")
    assert tokens.index(7) == len(tokens) - 1
    last = rig.outputs[-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 7)


def test_min_tokens_are_generated_before_a_stop(make_rig: MakeRig) -> None:
    """The runner is told which tokens it must not draw, and for how long."""
    for min_tokens in (0, 1, 5):
        rig = make_rig(stop_rate=1.0)
        rig.add("a", 4, max_tokens=9, min_tokens=min_tokens, stop_ids=[7])
        rig.run()
        assert len(rig.tokens("a")) == min_tokens + 1
        assert rig.ends("a") == [FinishReason.STOP]


def test_a_stop_token_at_the_last_position_is_a_stop(make_rig: MakeRig) -> None:
    rig = make_rig(stop_rate=1.0)
    rig.add("a", 4, max_tokens=3, min_tokens=2, stop_ids=[7])
    rig.run()
    assert rig.ends("a") == [FinishReason.STOP]


def commit_bad_logits(rig: Any, bad: Callable[[Any], bool]) -> list[Output]:
    """One step in which the chosen items have logits that are not finite."""
    plan = rig.scheduler.schedule(0.0)
    result = rig.executor.submit(plan)
    tokens = [
        (BAD_LOGITS,) * len(drawn) if bad(item) else drawn
        for item, drawn in zip(plan.items, result.tokens, strict=True)
    ]
    outputs = rig.scheduler.commit(plan, replace(result, tokens=tuple(tokens)), 0.0)
    rig.outputs += outputs
    return outputs


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", [0, 3])
def test_bad_logits_end_a_request_with_an_error(make_rig: MakeRig, policy: str, n: int, steps: int) -> None:
    """C4: it fails, nothing is streamed in its place, and its neighbours go on."""
    rig = make_rig(policy)
    rig.add("bad", 6, max_tokens=9, n=n)
    rig.add("good", 6, max_tokens=9)
    for _ in range(steps):
        rig.step()
    outputs = commit_bad_logits(rig, lambda item: item.request_id == "bad")
    for index in range(n):
        (end,) = [output for output in outputs if (output.request_id, output.index) == ("bad", index)]
        assert end.finish_reason is FinishReason.ERROR
        assert end.error and "not finite" in end.error
        assert end.new_token_ids == ()
        assert len(rig.tokens("bad", index)) == steps
    rig.run()
    assert len(rig.tokens("good")) == 9


@pytest.mark.parametrize("n", [1, 3])
def test_bad_logits_in_a_scored_prompt_end_the_request(make_rig: MakeRig, n: int) -> None:
    """C4, C5: no stand-in for a log-probability is given out."""
    rig = make_rig(budget=8)
    rig.add("bad", 10, max_tokens=3, n=n, prompt_logprobs=0)
    plan = rig.scheduler.schedule(0.0)
    result = rig.executor.submit(plan)
    scored = tuple(tuple(replace(entry, token_id=BAD_LOGITS) for entry in row) for row in result.prompt_logprobs)
    outputs = rig.scheduler.commit(plan, replace(result, prompt_logprobs=scored), 0.0)
    assert [(output.index, output.finish_reason) for output in outputs] == [(k, FinishReason.ERROR) for k in range(n)]
    assert not any(output.prompt_logprobs for output in outputs)
    rig.check_empty()


# -- abort


@pytest.mark.parametrize("index", [None, 0])
@pytest.mark.parametrize("policy", POLICIES)
def test_abort_while_waiting(make_rig: MakeRig, policy: str, index: int | None) -> None:
    """M12, M5"""
    rig = make_rig(policy)
    rig.add("a", 4)
    assert rig.abort("a", index) == [Output("a", 0, finish_reason=FinishReason.ABORT)]
    rig.check_empty()


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_abort_at_any_step(make_rig: MakeRig, policy: str, n: int, steps: int) -> None:
    """M12, D7: between chunks, at the fork, while decoding. All is free before the next step."""
    rig = make_rig(policy, budget=8 if policy == "chunked" else 64)
    rig.add("a", 26, max_tokens=20, n=n)
    for _ in range(steps):
        rig.step()
    outputs = rig.abort("a")
    assert [(output.index, output.finish_reason) for output in outputs] == [(i, FinishReason.ABORT) for i in range(n)]
    rig.check_empty()


@pytest.mark.parametrize("n", [1, 3])
def test_abort_while_preempted(make_rig: MakeRig, n: int) -> None:
    rig = make_rig("chunked", num_blocks=8, caching=False)
    rig.add("first", 12, max_tokens=18)
    rig.add("a", 12, max_tokens=18, n=n)
    while not rig.scheduler.waiting.num_preempted:
        rig.step()
    assert [output.index for output in rig.abort("a")] == list(range(n))
    assert rig.scheduler.stats().num_preempted == 0
    rig.run()
    assert len(rig.tokens("first")) == 18


@pytest.mark.parametrize("again", [False, True])
def test_abort_in_flight_is_ignored_at_commit(make_rig: MakeRig, again: bool) -> None:
    """Rule 11: what ended while a step ran gets no tokens, and its blocks may already be another's."""
    rig = make_rig("chunked", num_blocks=4)
    rig.add("a", 12, max_tokens=4)
    plan = rig.scheduler.schedule(0.0)
    result = rig.executor.submit(plan)
    rig.abort("a")
    if again:
        rig.add("b", 12, max_tokens=4)
    assert rig.scheduler.commit(plan, result, 0.0) == []
    rig.run()
    assert rig.tokens("a") == []


def test_abort_of_one_sample_leaves_the_others(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 6, max_tokens=5, n=3)
    rig.step()
    (output,) = rig.abort("a", 1)
    assert (output.index, output.finish_reason) == (1, FinishReason.ABORT)
    rig.run()
    assert [len(rig.tokens("a", i)) for i in range(3)] == [5, 1, 5]


@pytest.mark.parametrize("aborted", [(0,), (1,), (0, 2), (2, 2)])
def test_abort_of_one_sample_before_the_fork(make_rig: MakeRig, aborted: tuple[int, ...]) -> None:
    """The samples still share one sequence; those aborted end when it is forked, the others do not notice."""
    rig = make_rig(budget=8)
    rig.add("a", 14, max_tokens=3, n=3)
    rig.step()
    for index in aborted:
        assert rig.abort("a", index) == []
    rig.run()
    for index in range(3):
        gone = index in aborted
        assert len(rig.tokens("a", index)) == (0 if gone else 3)
        assert rig.ends("a", index) == [FinishReason.ABORT if gone else FinishReason.LENGTH]


def test_aborts_of_samples_before_and_after_the_fork(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 14, max_tokens=4, n=4)
    rig.abort("a", 1)
    rig.step()
    assert [output.index for output in rig.abort("a", 2)] == [2]
    assert [output.index for output in rig.abort("a", 0)] == [0]
    rig.run()
    assert [len(rig.tokens("a", i)) for i in range(4)] == [1, 0, 1, 4]
    assert [len(rig.ends("a", i)) for i in range(4)] == [1, 1, 1, 1]


def test_abort_of_all_samples_one_by_one_ends_a_request(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 14, n=3)
    assert rig.abort("a", 2) == rig.abort("a", 0) == []
    assert [output.index for output in rig.abort("a", 1)] == [0, 1, 2]
    rig.check_empty()


def test_abort_of_what_is_unknown_or_over_is_ignored(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.abort("nobody") == rig.abort("nobody", 3) == []
    rig.add("a", 4, max_tokens=1, n=2)
    assert rig.abort("a", 2) == rig.abort("a", -1) == []
    rig.run()
    assert rig.abort("a") == []
    assert [rig.ends("a", i) for i in range(2)] == [[FinishReason.LENGTH]] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_runners_are_told_once_who_has_ended(make_rig: MakeRig, policy: str) -> None:
    rig = make_rig(policy, num_blocks=16, max_num_seqs=4)
    for i in range(12):
        rig.add(f"r{i}", 5, max_tokens=3 + i, n=1 + i % 3)
    rig.abort("r7")
    rig.run()
    rig.add("last", 4, max_tokens=1)
    rig.run()
    told = [id for plan in rig.plans for id in plan.finished_ids]
    assert sorted(told) == sorted(f"r{i}" for i in range(12))


# -- preemption


def test_preempted_requests_go_to_the_front_in_their_order(make_rig: MakeRig) -> None:
    """S4: before those who never ran, the one who boarded first before the other."""
    rig = make_rig("chunked", num_blocks=9, caching=False, max_num_seqs=3)
    for id in "abcd":
        rig.add(id, 11, max_tokens=21)  # three blocks each, soon four
    rig.step()
    assert [request.id for request in rig.scheduler.waiting] == ["d"]
    while len(rig.scheduler.waiting) < 2:
        rig.step()
    assert [request.id for request in rig.scheduler.waiting] == ["c", "d"]
    while len(rig.scheduler.waiting) < 3:
        rig.step()
    assert [request.id for request in rig.scheduler.waiting] == ["b", "c", "d"]
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (1, 1, 2)
    rig.run()
    assert [output.request_id for output in rig.outputs if output.finish_reason] == ["a", "b", "c", "d"]


def test_the_victim_is_who_boarded_last(make_rig: MakeRig) -> None:
    rig = make_rig("chunked", num_blocks=9, caching=False)
    requests = [rig.add(id, 11, max_tokens=13) for id in "abc"]
    rig.step()
    while not rig.scheduler.waiting:
        rig.step()
    assert [request.status for request in requests] == [Status.RUNNING, Status.RUNNING, Status.PREEMPTED]
    assert [request.num_preemptions for request in requests] == [0, 0, 1]
    assert requests[2].block_table == [] and requests[2].host_table == [] and requests[2].num_computed == 0
    rig.run()


def test_the_victim_does_not_come_straight_back(make_rig: MakeRig) -> None:
    """M3: it needs room for all it had, and somebody has just taken of that; and nobody overtakes it."""
    rig = make_rig("chunked", num_blocks=9, budget=8, caching=False)
    for id in "abc":
        rig.add(id, 11, max_tokens=13)
    rig.add("small", 1, max_tokens=1)
    boarded = set()
    while rig.scheduler.has_work:
        before = rig.scheduler.stats().total_preemptions
        plan = rig.step()
        starting = {item.request_id for item in plan.items if item.start == 0}
        if rig.scheduler.stats().total_preemptions > before:
            assert not starting
        boarded |= starting
    assert boarded == {"a", "b", "c", "small"}


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_a_preempted_request_loses_and_repeats_no_token(make_rig: MakeRig, policy: str) -> None:
    """C2, M4"""
    alone = {}
    for id in "abcd":
        rig = make_rig(policy, budget=64)
        rig.add(id, 9, max_tokens=20)
        rig.run()
        alone[id] = rig.tokens(id)
    rig = make_rig(policy, num_blocks=8, budget=64)
    for id in "abcd":
        rig.add(id, 9, max_tokens=20)
    rig.run()
    assert rig.scheduler.stats().total_preemptions > 0
    assert {id: rig.tokens(id) for id in "abcd"} == alone


def test_a_preempted_request_may_find_its_own_blocks_again(make_rig: MakeRig, share: Share) -> None:
    """Its freed blocks keep their contents until they are taken, so little is computed twice."""
    rig = make_rig("chunked", num_blocks=12, caching=True)
    rig.add("a", 22, max_tokens=10)
    rig.add("b", 22, max_tokens=10)
    rig.step()
    while not rig.scheduler.waiting:
        rig.step()
    (victim,) = rig.scheduler.waiting
    length = len(victim.token_ids)
    assert rig.kv.lookup(victim).num_tokens >= length - 8
    while rig.ends("a") == []:
        rig.step()
    assert share(rig.step())["b"] < length
    rig.run()


# -- forks


def test_samples_share_their_prompt(make_rig: MakeRig) -> None:
    """The prompt is computed once, and its last block is copied for all but one of those who write into it."""
    rig = make_rig("chunked", num_blocks=30)
    rig.add("a", 10, max_tokens=3, n=3)
    assert rig.step().num_tokens == 10
    assert rig.scheduler.stats().free_blocks == 27
    plan = rig.step()
    assert [op.kind for op in plan.block_ops] == [BlockOpKind.COPY] * 2
    tables = [item.block_table for item in plan.items]
    assert len({table[:2] for table in tables}) == 1 and len({table[2] for table in tables}) == 3
    rig.run()
    drawn = [rig.tokens("a", i) for i in range(3)]
    assert len({tuple(tokens) for tokens in drawn}) == 3, "each sample has noise of its own"


def test_greedy_samples_are_equal(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 10, max_tokens=5, n=3, temperature=0.0)
    rig.run()
    assert rig.tokens("a", 0) == rig.tokens("a", 1) == rig.tokens("a", 2)


def test_a_sample_can_be_resumed_alone_under_its_index(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """After a crash each sample comes back with its prompt and what was delivered, and draws what it would have."""
    rig = make_rig()
    first = rig.add("a", 10, max_tokens=8, n=3)
    prompt = list(first.token_ids)
    rig.run()
    whole = rig.tokens("a", 2)
    rig = make_rig()
    rest = make_request("a", [*prompt, *whole[:3]], max_tokens=8, n=3, index=2)
    rest.num_prompt, rest.num_samples = 10, 1
    rig.executor.expect(rest)
    rig.scheduler.add(rest)
    rig.run()
    assert rig.tokens("a", 2) == whole[3:]


def test_samples_of_a_resumed_request_keep_their_indexes(make_rig: MakeRig, make_request: MakeRequest) -> None:
    rig = make_rig()
    part = make_request("a", 10, max_tokens=2, n=3, index=1)
    part.num_samples = 2
    rig.executor.expect(part)
    rig.scheduler.add(part)
    rig.run()
    assert {(output.index, output.finish_reason) for output in rig.outputs if output.finish_reason} == {
        (1, FinishReason.LENGTH),
        (2, FinishReason.LENGTH),
    }


# -- logprobs


def prompt_logprobs(rig: Any, request_id: str) -> list[TokenLogprob]:
    return [entry for output in rig.outputs if output.request_id == request_id for entry in output.prompt_logprobs]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [3, 8, 64])
@pytest.mark.parametrize("num_blocks", [9, 50])
def test_prompt_logprobs_are_given_once_whatever_the_chunks(
    make_rig: MakeRig, budget: int, num_blocks: int, n: int
) -> None:
    """C6: in pieces as the chunks come, each exactly once, in spite of preemption and a cached prompt."""
    rig = make_rig(budget=64)
    rig.add("a", range(21), max_tokens=14, n=n, prompt_logprobs=2)
    rig.run()
    alone = prompt_logprobs(rig, "a")
    assert [entry.token_id for entry in alone] == list(range(1, 21))
    assert all(len(entry.top) == 2 for entry in alone)

    rig = make_rig(budget=budget, num_blocks=num_blocks, max_num_seqs=3)
    rig.add("same", range(21), max_tokens=1)
    rig.add("other", 5, max_tokens=30)
    rig.run()
    rig.add("other", 9, max_tokens=20, n=3)
    rig.step()
    rig.add("a", range(21), max_tokens=14, n=n, prompt_logprobs=2)
    rig.run()
    assert prompt_logprobs(rig, "a") == alone
    assert prompt_logprobs(rig, "other") == []


def test_prompt_logprobs_survive_a_preemption_in_the_prompt(make_rig: MakeRig) -> None:
    """What was given out before is not given again."""
    rig = make_rig(budget=8, num_blocks=18, caching=False)
    for i in range(3):
        rig.add(f"first{i}", 4, max_tokens=20)
    rig.step()
    a = rig.add("a", range(42), max_tokens=2, prompt_logprobs=0)
    given_before = 0
    while rig.scheduler.has_work:
        rig.step()
        if a.status is Status.PREEMPTED and not a.num_output:
            given_before = len(prompt_logprobs(rig, "a"))
    assert given_before > 0, "it was preempted in the middle of its prompt"
    assert [entry.token_id for entry in prompt_logprobs(rig, "a")] == list(range(1, 42))


def test_logprobs_run_parallel_to_tokens(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 5, max_tokens=4, n=2, logprobs=3)
    rig.add("b", 5, max_tokens=4)
    rig.run()
    for output in rig.outputs:
        assert [entry.token_id for entry in output.logprobs] == (
            list(output.new_token_ids) if output.request_id == "a" else []
        )
        assert all(len(entry.top) == 3 for entry in output.logprobs)


def test_history_is_sent_only_to_those_with_penalties(make_rig: MakeRig) -> None:
    """Rule 14: nobody else pays for it."""
    rig = make_rig()
    rig.add("plain", 6, max_tokens=3)
    rig.add("penalty", 6, max_tokens=3, frequency_penalty=0.5)
    rig.run()
    lengths = {(item.request_id, len(item.history)) for plan in rig.plans for item in plan.items}
    assert lengths == {("plain", 0), ("penalty", 6), ("penalty", 7), ("penalty", 8)}


def test_what_is_made_in_a_hurry_has_all_its_fields(make_rig: MakeRig) -> None:
    """`new_item` and `new_output` do not count them."""
    rig = make_rig()
    rig.add("a", 6, max_tokens=5)
    rig.run()
    assert {len(item) for plan in rig.plans for item in plan.items} == {len(StepItem._fields)}
    assert {len(output) for output in rig.outputs} == {len(Output._fields)}


# -- prefix cache, as seen from outside


def test_cached_tokens_are_reported(make_rig: MakeRig) -> None:
    """Q4: per request and in total; a preempted request's second admission does not count."""
    rig = make_rig()
    rig.add("a", range(22), max_tokens=2)
    rig.run()
    rig.add("b", range(22), max_tokens=2)
    rig.run()
    cached = {output.request_id: output.num_cached_tokens for output in rig.outputs}
    assert cached == {"a": 0, "b": 20}
    stats = rig.scheduler.stats()
    assert (stats.total_cached_tokens, stats.total_lookup_tokens) == (20, 44)


def test_a_shared_prefix_longer_than_the_budget(make_rig: MakeRig, share: Share) -> None:
    """C3: the second begins where the shared blocks end, and its answer is that of a cold cache."""
    answers = []
    for caching in (False, True):
        rig = make_rig(budget=8, caching=caching)
        rig.add("a", [*range(40), 1], max_tokens=2)
        rig.run()
        rig.add("b", [*range(40), 2], max_tokens=2)
        assert share(rig.step()) == {"b": 1 if caching else 8}
        rig.run()
        answers.append(rig.tokens("b"))
    assert answers[0] == answers[1]


# -- the work per step


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_rule_14_nothing_walks_the_waiting_queue(
    make_rig: MakeRig, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(policy, num_blocks=20, budget=64)
    for i in range(30):
        rig.add(f"r{i}", 6, max_tokens=20)
    rig.scheduler.settings = replace(rig.scheduler.settings, check=False)

    def walk(self: WaitingQueue) -> Iterator[Request]:
        raise AssertionError("walks all who wait")

    monkeypatch.setattr(WaitingQueue, "__iter__", walk)
    rig.run()


def test_plans_are_numbered_and_results_are_matched(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 4, max_tokens=3)
    rig.run()
    assert [plan.step_id for plan in rig.plans] == [0, 1, 2]
    assert rig.scheduler.schedule(0.0) is None, "no work, no plan"


def test_stats_count_every_request_in_one_state(make_rig: MakeRig) -> None:
    """O3: waiting, preempted and running add up to those that were added and have not ended."""
    rig = make_rig(num_blocks=12, max_num_seqs=3)
    for i in range(6):
        rig.add(f"r{i}", 10, max_tokens=20)
    while rig.scheduler.has_work:
        stats = rig.scheduler.stats()
        ended = sum(output.finish_reason is not None for output in rig.outputs)
        assert stats.num_running + stats.num_waiting + stats.num_preempted == 6 - ended
        assert stats.free_blocks <= stats.num_blocks == 12
        rig.step()
        stats = rig.scheduler.stats()
        assert (stats.step_id, stats.step_tokens) == (rig.plans[-1].step_id, rig.plans[-1].num_tokens)


def test_step_seconds_are_those_of_the_device(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 4)
    plan = rig.scheduler.schedule(0.0)
    result: StepResult = replace(rig.executor.submit(plan), seconds=0.25)
    rig.scheduler.commit(plan, result, 0.0)
    assert rig.scheduler.stats().step_seconds == 0.25
