"""The measured cases on the toy executor: what is counted, to the token and to the step."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from chairlift.bench.case import Case
from chairlift.bench.case_results import to_table
from chairlift.bench.cases import CASES
from chairlift.bench.cases.delay import Delay
from chairlift.bench.cases.fairness import Fairness
from chairlift.bench.cases.long_prompt import DECODES, LONG, OWN_PROMPT, LongPrompt
from chairlift.bench.cases.prefix import Prefix
from chairlift.bench.cases.slo import Slo, parse_times
from chairlift.bench.cases.thrash import TIMES, Thrash
from chairlift.bench.cases.waste import Waste
from chairlift.bench.measure import Measured
from chairlift.errors import ChairliftError, ParameterError
from chairlift.sim.workloads import PEAK_OUTPUT, peak

Run = Callable[..., Measured]


def milliseconds(rows: int) -> float:
    """Of a step of the toy executor, in seconds."""
    return 0.010 + 0.001 * rows


def test_waste_is_the_unfilled_ends_and_reservations_waste_far_more(measured: Run) -> None:
    run = measured(Waste(scale=0.2))
    (variant,) = run.variants
    (numbers,) = run.numbers[variant.label]
    assert variant.config.block_size == 16 and variant.config.admission == "optimistic"
    # one block is never full, and on average half of it is empty
    assert numbers["kv_waste"] == pytest.approx(7.5 / (numbers["mean_tokens"] + 7.5), rel=0.05)
    assert numbers["kv_waste"] < numbers["reserved_output_waste"] < numbers["reserved_context_waste"] < 1
    assert (variant.config.max_model_len or 0) >= variant.workload.longest
    most = max(request.output_tokens for request in variant.workload.requests)
    assert most <= PEAK_OUTPUT.scaled(0.2).high, "a request would not fit what it is said to have reserved"


def test_waste_s_floor_is_7_5_slots_for_each_on_board_of_what_the_run_held(measured: Run) -> None:
    run = measured(Waste(scale=0.2))
    (numbers,), (trace,) = run.numbers["peak"], run.traces["peak"]
    held = aboard = 0.0
    for step, after in pairwise(trace.steps):
        held += step.kv_held * (after.end - step.end)
        aboard += step.running * (after.end - step.end)
    assert numbers["floor"] == pytest.approx(7.5 * aboard / held)


def test_waste_is_below_4_percent_on_the_load_of_compare(measured: Run) -> None:
    run = measured(Waste())
    assert [variant.workload for variant in run.variants] == [peak(0)]
    (target,) = run.targets
    assert (target.value, target.limit, target.at_most) == (run.numbers["peak"][0]["kv_waste"], 0.04, True)
    assert target.met


def test_waste_of_requests_that_end_with_their_first_step_is_nothing(measured: Run) -> None:
    run = measured(Waste(scale=0.0005))
    (numbers,) = run.numbers["peak"]
    assert numbers["kv_waste"] == numbers["floor"] == 0


def test_thrash_demands_what_it_says(measured: Run) -> None:
    """M3"""
    run = measured(Thrash(requests=8))
    once, recompute, swap, reserve = (run.numbers[variant.label][0] for variant in run.variants)
    pools = {variant.num_blocks for variant in run.variants}
    demand = [
        sum(-(-(r.prompt_tokens + r.output_tokens) // 16) for r in variant.workload.requests)
        for variant in run.variants
    ]
    assert pools == {demand[0]}
    assert demand[1:] == [TIMES * demand[0]] * 3
    assert once["preemptions"] == reserve["preemptions"] == 0
    assert recompute["preemptions"] > 0 and recompute["swaps"] == 0 and recompute["recomputed_tokens"] > 0
    assert swap["preemptions"] == swap["swaps"] > 0 and swap["recomputed_tokens"] == 0
    assert all(variant.config.max_num_seqs == TIMES * 8 for variant in run.variants), "slots would be what binds"
    assert [target.value for target in run.targets] == [
        numbers["output_tokens_per_s"] / once["output_tokens_per_s"] for numbers in (recompute, swap)
    ]
    assert all(not target.at_most and target.limit == 0.8 for target in run.targets)


def test_prefix_counts_the_tokens_that_were_computed(measured: Run) -> None:
    run = measured(Prefix(requests=6, shared=100, own=20))
    numbers = {label: runs[0] for label, runs in run.numbers.items()}
    found = 5 * 96  # whole blocks of 100 tokens, by all but the first
    assert numbers["one by one, cache off"]["prefill_tokens"] == numbers["at once, cache off"]["prefill_tokens"] == 720
    assert numbers["one by one, cache off"]["cached_tokens"] == 0
    assert numbers["one by one, cache on"]["prefill_tokens"] == 720 - found
    assert numbers["one by one, cache on"]["cached_tokens"] == found
    at_once = numbers["at once, cache on"]
    assert at_once["prefill_tokens"] + at_once["cached_tokens"] == 720
    assert run.targets[0].value == (720 - found) / 720


def test_those_at_once_find_nothing_while_all_fit_one_step(measured: Run) -> None:
    run = measured(Prefix(requests=6, shared=100, own=20, max_num_batched_tokens=720))
    assert run.medians["at once, cache on"]["cached_tokens"] == 0
    assert not run.targets[1].met and run.targets[1].value == 1


def test_long_prompt_counts_the_gaps_of_the_eight_alone(measured: Run) -> None:
    """S1"""
    run = measured(LongPrompt(prompt=480, output=80))
    alone, slo, small, large, whole = (run.numbers[variant.label][0] for variant in run.variants)
    decode = milliseconds(DECODES)
    assert alone["p99_itl_s"] == alone["max_itl_s"] == pytest.approx(decode)
    assert alone["gaps"] == DECODES * 79
    assert small["prefill_steps"] == 480 / (24 - DECODES)
    assert small["max_itl_s"] == pytest.approx(milliseconds(24))
    assert large["max_itl_s"] == pytest.approx(milliseconds(488))
    assert whole["max_itl_s"] == pytest.approx(milliseconds(480) + decode), "a step of its own, and then theirs"
    assert whole["long_ttft_s"] == pytest.approx(milliseconds(480))
    assert small["gaps"] == DECODES * small["prefill_steps"]
    assert slo["p99_itl_s"] <= 2.5 * decode + 1e-9, "the default target is 2.5 times the median alone"
    assert slo["prefill_steps"] < small["prefill_steps"] * 2
    (target,) = run.targets
    assert target.value == pytest.approx(slo["p99_itl_s"] / decode)


def test_long_prompt_comes_when_all_decode(measured: Run) -> None:
    run = measured(LongPrompt(prompt=480, output=80))
    trace = run.traces["whole prompts"][0]
    long = trace.requests[LONG]
    eight = [request for request in trace.requests.values() if request.id != LONG]
    assert all(request.token_times[0] < long.arrival for request in eight)
    assert all(request.token_times[-1] > long.token_times[0] for request in eight)
    assert {request.prompt_tokens for request in eight} == {OWN_PROMPT}


def test_fairness_compares_the_same_requests_of_b(measured: Run) -> None:
    """S5"""
    run = measured(Fairness(flood=24, singles=6, max_num_seqs=4))
    alone, flood, fair = (run.numbers[variant.label][0] for variant in run.variants)
    assert alone["mean_ttft_s"] == alone["p99_ttft_s"] == pytest.approx(milliseconds(128) + milliseconds(72))
    assert fair["p99_ttft_s"] < flood["mean_ttft_s"]
    assert flood["preemptions"] == 0 < fair["preemptions"]
    assert run.targets[0].value == fair["mean_ttft_s"] / alone["mean_ttft_s"]
    lone, beside, _ = ([r for r in variant.workload.requests if r.tenant == "B"] for variant in run.variants)
    assert lone == beside
    for variant in run.variants[1:]:
        trace = run.traces[variant.label][0]
        ends = {step.end for step in trace.steps}
        arrivals = [trace.requests[request.id].arrival for request in beside]
        assert not ends.intersection(arrivals), "requests that come when a step ends never wait for one"
        assert all(later - earlier > 0.1 for earlier, later in pairwise(sorted(arrivals)))
    alone_trace = run.traces["alone"][0].requests
    for earlier, later in pairwise(lone):
        assert alone_trace[later.id].arrival >= alone_trace[earlier.id].finish


def test_slo_measures_every_target_on_the_same_load(measured: Run) -> None:
    run = measured(Slo(requests=12, clients=4, slo_itl="40,100"))
    free, tight, loose = (run.numbers[variant.label][0] for variant in run.variants)
    assert [variant.config.slo_itl for variant in run.variants] == [None, 40, 100]
    assert len({variant.workload for variant in run.variants}) == 1
    assert tight["p99_itl_s"] <= 0.040 < loose["p99_itl_s"] <= 0.100 < free["p99_itl_s"]
    assert (free["target_s"], tight["target_s"]) == (0.0, 0.040)
    assert "target_s" not in [column.name for column in run.case.columns], "each label says it, and one has none"
    assert 0.99 <= tight["kept"] <= 1
    assert [target.value for target in run.targets] == pytest.approx(
        [tight["p99_itl_s"] / 0.04, loose["p99_itl_s"] / 0.1]
    )


def test_slo_s_own_targets_follow_the_machine(measured: Run) -> None:
    run = measured(Slo(requests=4, clients=4))
    decode = milliseconds(4) * 1000
    assert [variant.config.slo_itl for variant in run.variants[1:]] == pytest.approx(
        [2 * decode, 3 * decode, 5 * decode]
    )


def test_delay_boards_a_burst_in_its_first_step_and_pays_for_it(measured: Run) -> None:
    """The times of a burst of 4, to the step: prompts of 16 tokens, and 4 tokens each."""
    run = measured(Delay(bursts=6, burst=4, prompt=16, output=4))
    none, short, long = (run.numbers[variant.label][0] for variant in run.variants)
    assert (none["first_step"], none["second_step"]) == (1, 4), "who comes during a step boards in the next"
    assert none["first_ttft_s"] == pytest.approx(milliseconds(16))
    assert none["burst_s"] == pytest.approx(
        milliseconds(16) + milliseconds(1 + 3 * 16) + 2 * milliseconds(4) + milliseconds(3)
    )
    assert (long["first_step"], long["second_step"]) == (4, 4)
    assert long["first_ttft_s"] == pytest.approx(0.020 + milliseconds(4 * 16))
    assert long["burst_s"] == pytest.approx(0.020 + milliseconds(4 * 16) + 3 * milliseconds(4))
    within = [
        sum(request.arrival_s <= phase.requests[0].arrival_s + 0.005 for request in phase.requests)
        for phase in run.variants[0].workload.phases
    ]
    assert 1 < short["first_step"] == fmean(within) < 4
    assert [(target.value, target.limit) for target in run.targets] == [(1, 1), (short["first_step"],) * 2, (4, 4)]
    assert all(not target.at_most for target in run.targets)


def test_delay_sends_the_same_bursts_each_to_an_idle_engine(measured: Run) -> None:
    run = measured(Delay(bursts=5, burst=4, prompt=16, output=4, max_batch_delay_ms="1,2,40"))
    assert [variant.config.max_batch_delay_ms for variant in run.variants] == [0, 1, 2, 40]
    (load,) = {variant.workload for variant in run.variants}
    assert len({phase.requests[0].arrival_s for phase in load.phases}) == 5, "drawn anew for each"
    assert all(0 <= request.arrival_s <= 0.010 for request in load.requests)
    for (trace,) in run.traces.values():
        bursts = [[trace.requests[request.id] for request in phase.requests] for phase in load.phases]
        for before, after in pairwise(bursts):
            assert max(request.finish for request in before) <= min(request.arrival for request in after)


def test_a_burst_that_fills_the_slots_ends_the_delay(measured: Run) -> None:
    run = measured(Delay(bursts=6, burst=4, prompt=16, output=4, max_batch_delay_ms="500", max_num_seqs=4))
    spans = [phase.requests[-1].arrival_s - phase.requests[0].arrival_s for phase in run.variants[0].workload.phases]
    assert run.medians["delay of 500 ms"]["first_ttft_s"] == pytest.approx(fmean(spans) + milliseconds(4 * 16))


def test_a_burst_that_comes_all_at_once_needs_no_delay(measured: Run) -> None:
    run = measured(Delay(bursts=2, burst=4, prompt=16, output=1, spread_ms=0.0))
    assert all(numbers["first_step"] == numbers["second_step"] == 4 for (numbers,) in run.numbers.values())
    assert all(target.met for target in run.targets)


@pytest.mark.parametrize("text", ["", "x", "40,", "40,40", "0", "-1", "nan", "inf"])
def test_times_that_cannot_be(text: str) -> None:
    with pytest.raises(ParameterError, match="--slo-itl must be different times in ms, above 0 and at most 1e"):
        parse_times(text, "slo_itl")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Thrash(requests=1), "--requests must be a whole number from 2 to 1024, got 1"),
        (lambda: LongPrompt(output=8), "--output must be a whole number from 33"),
        (lambda: LongPrompt(max_num_batched_tokens=9), "--max-num-batched-tokens must be a whole number from 10"),
        (lambda: LongPrompt(slo_itl=0.0), "--slo-itl must be a number above 0"),
        (lambda: Prefix(own=0), "--own must be a whole number from 1"),
        (lambda: Fairness(singles=0), "--singles must be a whole number from 1"),
        (lambda: Slo(requests=3, clients=4), "--requests must be a whole number from 4"),
        (lambda: Thrash(scale=float("nan")), "scale must be a number above 0"),
        (lambda: Waste(scale=0.0), "scale must be a number above 0 and at most 64, got 0"),
        (lambda: Waste(scale=64.5), "scale must be a number above 0 and at most 64, got 64.5"),
        (lambda: Delay(burst=0), "--burst must be a whole number from 1"),
        (lambda: Delay(max_num_seqs=7), "--max-num-seqs must be a whole number from 8"),
        (lambda: Delay(spread_ms=-1.0), "--spread-ms must be from 0 to 10000, got -1"),
        (lambda: Delay(spread_ms=float("nan")), "--spread-ms must be from 0 to 10000, got nan"),
        (lambda: Delay(max_batch_delay_ms="5,20000"), "--max-batch-delay-ms must be different times in ms, above 0"),
    ],
)
def test_options_that_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()


def test_a_long_prompt_that_outlasts_the_decodes_is_an_error(measured: Run) -> None:
    with pytest.raises(ChairliftError, match="the 8 had all their tokens before the long prompt was computed"):
        measured(LongPrompt(prompt=480, output=40))


@pytest.mark.parametrize("kind", CASES)
def test_the_columns_and_the_numbers_are_the_same(kind: type[Case], measured: Run, small: dict[str, Case]) -> None:
    run = measured(small[kind.name], reps=2)
    for runs in run.numbers.values():
        assert {column.name for column in kind.columns} <= runs[0].keys()
    assert len(run.numbers) == len(run.variants), "two variants have the same label"
    assert run.targets
    console = Console(width=80, record=True, file=StringIO())
    console.print(to_table(run))
    assert "…" not in console.export_text(), "the table does not fit a terminal"
