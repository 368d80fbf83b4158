"""The comparison on a toy executor and a virtual clock: what the article says, to the step."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest

from chairlift.bench.compare import POLICIES, Bench, Comparison, engine_config, make_workload
from chairlift.bench.lab import check_lengths
from chairlift.bench.metrics import slot_utilization
from chairlift.bench.trace import State, Trace
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, ParameterError
from chairlift.sim.workloads import FOUR_OUTPUTS, Phase, Workload, WorkRequest, four_requests, peak


def run_of(comparison: Comparison, policy: str) -> Trace:
    (trace,) = comparison.traces[policy]
    return trace


def test_static_keeps_everyone_until_the_longest_ends(four: Comparison) -> None:
    requests = run_of(four, "static").requests
    leave = requests["A"].finish
    for name in "BCD":
        assert requests[name].finish == leave
        assert requests[name].token_times[-1] < leave
    for name in "EF":
        assert requests[name].stays[0].board >= leave
        assert requests[name].token_times[0] > leave
        assert requests[name].finish == requests["E"].finish


def test_static_uses_290_of_800_slot_steps(four: Comparison) -> None:
    trace = run_of(four, "static")
    assert len(trace.steps) == 300
    assert slot_utilization(trace.steps[:200], 4) == Fraction(290, 800)
    assert slot_utilization(trace.steps, 4) == Fraction(290, 800)


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_otherwise_each_leaves_at_its_own_length(four: Comparison, policy: str) -> None:
    requests = run_of(four, policy).requests
    for request in requests.values():
        assert request.finish == request.token_times[-1]
    leaving = sorted(requests.values(), key=lambda request: request.finish)
    assert [request.id for request in leaving] == ["D", "C", "B", "F", "E", "A"]
    assert requests["E"].stays[0].board == requests["D"].finish
    assert requests["F"].stays[0].board == requests["C"].finish
    assert (requests["E"].stays[0].slot, requests["F"].stays[0].slot) == (3, 2), "they take the slots of D and C"


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_otherwise_all_six_are_answered_sooner(four: Comparison, policy: str) -> None:
    static = run_of(four, "static").requests
    for name, request in run_of(four, policy).requests.items():
        assert request.finish < static[name].finish


def test_whole_prompts_pause_the_others_and_chunks_do_not(four: Comparison) -> None:
    def states(policy: str) -> list[State]:
        return [segment.state for segment in run_of(four, policy).requests["A"].stays[0].segments]

    assert states("continuous") == [
        State.PREFILL, State.DECODE, State.PAUSED, State.DECODE, State.PAUSED, State.DECODE,
    ]  # fmt: skip
    assert states("chunked") == [State.PREFILL, State.DECODE]
    assert states("static") == [State.PREFILL, State.DECODE]


def test_a_held_row_is_held_from_its_last_token_on(four: Comparison) -> None:
    request = run_of(four, "static").requests["B"]
    assert [segment.state for segment in request.stays[0].segments] == [State.PREFILL, State.DECODE, State.HELD]
    assert request.stays[0].segments[-1].start == request.token_times[-1]
    assert request.stays[0].leave == request.finish


def test_static_wastes_kv_on_rows_that_have_ended(four: Comparison) -> None:
    static, continuous = run_of(four, "static"), run_of(four, "continuous")
    halfway = static.steps[120]  # only A is unfinished; B, C and D still hold their blocks
    assert halfway.kv_useful == 64 + 120
    assert halfway.kv_held == 16 * (17 + 8 + 6 + 5)
    assert all(step.kv_useful <= step.kv_held < step.kv_useful + 16 * 4 for step in continuous.steps)


def test_answers_do_not_depend_on_the_policy(four: Comparison) -> None:
    assert four.identical
    for trace in (run_of(four, policy) for policy in POLICIES):
        assert {name: len(request.token_ids) for name, request in trace.requests.items()} == FOUR_OUTPUTS


def test_a_different_answer_is_noticed(bench_of: Callable[..., Bench]) -> None:
    comparison = bench_of(four_requests()).compare()
    run_of(comparison, "chunked").requests["F"].token_ids[-1] += 1
    assert not comparison.identical


def assert_consistent(trace: Trace) -> None:
    """Slots are never shared, bars have no gaps, and waiting and riding add up to a request's life."""
    for slot in range(trace.max_num_seqs):
        stays = [stay for request in trace.requests.values() for stay in request.stays if stay.slot == slot]
        for earlier, later in pairwise(sorted(stays, key=lambda stay: stay.board)):
            assert earlier.leave <= later.board
    for request in trace.requests.values():
        for stay in request.stays:
            assert all(a.end == b.start and a.state is not b.state for a, b in pairwise(stay.segments))
        spans = [*request.waits, *((stay.board, stay.leave) for stay in request.stays)]
        assert sum(end - start for start, end in spans) == pytest.approx(request.finish - request.arrival)
        assert request.waits[0][0] == request.arrival
        assert request.stays[-1].leave == request.finish


@pytest.mark.parametrize("policy", POLICIES)
def test_peak_is_consistent_and_keeps_its_clients_busy(bench_of: Callable[..., Bench], policy: str) -> None:
    load = peak(1, 0.1)
    trace = bench_of(load, chunk_tokens=64).run(policy)
    assert_consistent(trace)
    assert trace.num_preemptions == 0
    assert trace.num_cached_tokens == 0, "Q4: prompts are unique and the prefix cache is off"
    for phase in load.phases:
        assert phase.clients is not None
        changes = sorted(
            change
            for request in phase.requests
            for change in (
                (trace.requests[request.id].arrival, 1),
                (trace.requests[request.id].finish, -1),
            )
        )
        present, most = 0, 0
        for _, change in changes:
            present += change
            most = max(most, present)
        assert most == phase.clients
    first, second = ({request.id for request in phase.requests} for phase in load.phases)
    assert max(trace.requests[i].finish for i in first) <= min(trace.requests[i].arrival for i in second)


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_preempted_requests_leave_their_slot_and_board_again(bench_of: Callable[..., Bench], policy: str) -> None:
    trace = bench_of(four_requests(), num_blocks=22).run(policy)
    assert trace.num_preemptions > 0
    assert sum(len(request.stays) - 1 for request in trace.requests.values()) == trace.num_preemptions
    assert_consistent(trace)


def test_requests_arrive_when_they_are_due(bench_of: Callable[..., Bench]) -> None:
    requests = (WorkRequest("x", 8, 4), WorkRequest("y", 8, 4, arrival_s=10.0))
    trace = bench_of(Workload("two", (Phase("", requests),), max_num_seqs=2)).run("chunked")
    assert trace.requests["y"].arrival == pytest.approx(10.0)
    assert trace.requests["x"].finish < 1.0 < trace.requests["y"].stays[0].board < 10.1


def test_phases_follow_each_other(bench_of: Callable[..., Bench]) -> None:
    phases = tuple(Phase(name, (WorkRequest(name, 8, 4, arrival_s=1.0),)) for name in ("x", "y"))
    trace = bench_of(Workload("two", phases, max_num_seqs=2)).run("static")
    assert trace.requests["x"].arrival == pytest.approx(1.0)
    assert trace.requests["y"].arrival == pytest.approx(trace.requests["x"].finish + 1.0)


def test_the_policies_take_turns_on_one_executor(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(four_requests())
    runs: list[str] = []
    last: dict[str, tuple[int, int]] = {}

    def progress(run: str, done: int, total: int) -> None:
        if run not in last:
            runs.append(run)
        last[run] = (done, total)

    comparison = bench.compare(reps=2, progress=progress)
    assert runs == [f"{policy}, {rep} of 2" for rep in (1, 2) for policy in POLICIES]
    assert set(last.values()) == {(435, 435)}
    assert all(len(traces) == 2 for traces in comparison.traces.values())
    measured = sum(len(trace.steps) for traces in comparison.traces.values() for trace in traces)
    plans = bench.lab.executor.plans  # type: ignore[attr-defined]
    assert len(plans) == measured + 16, "warm-up: four, then two requests of eight tokens"
    assert all(item.request_id.startswith("warm-up-") for plan in plans[:16] for item in plan.items)


def test_all_policies_share_the_sizes_and_differ_in_the_budget() -> None:
    load = peak(0)
    config = engine_config(load, EngineConfig(max_num_seqs=7, model="m"), chunk_tokens=256)
    assert config.model == "m"
    assert config.max_num_seqs == 32
    assert config.max_model_len is not None and config.max_model_len >= load.longest
    assert config.max_num_batched_tokens == max(config.max_model_len, 256)
    assert not config.enable_prefix_caching


def test_a_cut_answer_is_an_error(bench_of: Callable[..., Bench]) -> None:
    bench = bench_of(four_requests())
    trace = bench.run("chunked")
    trace.requests["A"].token_ids.pop()
    with pytest.raises(ChairliftError, match="request A of the load got 199 tokens, not 200"):
        check_lengths(trace, bench.workload)


@pytest.mark.parametrize(
    ("case", "scale", "message"),
    [
        ("five", 1.0, "--case must be one of four-requests, peak, got 'five'"),
        ("four-requests", 2.0, "--scale 2 has no effect on four-requests"),
        ("peak", -1.0, "scale must be a number above 0"),
    ],
)
def test_cases_that_cannot_be(case: str, scale: float, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_workload(case, seed=0, scale=scale)


@pytest.mark.parametrize("reps", [0, 101])
def test_repetitions_out_of_range(bench_of: Callable[..., Bench], reps: int) -> None:
    with pytest.raises(ParameterError, match="--reps must be a whole number from 1 to 100"):
        bench_of(four_requests()).compare(reps=reps)
