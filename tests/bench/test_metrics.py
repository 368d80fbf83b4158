"""The arithmetic of the numbers, on runs made by hand."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction

import pytest

from chairlift.bench.metrics import (
    Metrics,
    inter_token_latencies,
    kv_waste,
    measure,
    middle,
    percentile,
    slot_utilization,
    states,
    waste_if_reserved,
)
from chairlift.bench.trace import RequestTrace, Segment, State, Stay, StepTrace, Trace


def step(start: float, end: float, sampled: int, held: int = 0, useful: int = 0) -> StepTrace:
    return StepTrace(start, end, 0, 0, sampled, 0, 0, held, useful)


def request(name: str, prompt: int, arrival: float, times: list[float], finish: float) -> RequestTrace:
    return RequestTrace(name, prompt, arrival, finish, times, [1] * len(times))


def trace(requests: list[RequestTrace], steps: list[StepTrace], slots: int = 2) -> Trace:
    made = Trace(0.0, slots, 16)
    made.requests = {r.id: r for r in requests}
    made.steps = steps
    return made


def test_percentiles_interpolate_between_the_nearest_two() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == pytest.approx(3.97)
    assert percentile([float(i) for i in range(101)], 99) == 99.0
    assert percentile([7.0], 99) == 7.0


def test_every_number_of_a_small_run() -> None:
    """Q1: tokens are counted, not messages."""
    run = trace(
        [request("x", 10, 0.0, [1.0, 2.0, 4.0], 5.0), request("y", 20, 1.0, [4.0], 4.0)],
        [
            step(0.0, 1.0, 1, held=16, useful=10),
            step(1.0, 2.0, 1, held=16, useful=11),
            step(2.0, 4.0, 2, held=48, useful=32),
            step(4.0, 5.0, 0),
        ],
    )
    found = measure(run)
    assert found.duration_s == 5.0
    assert found.output_tokens_per_s == pytest.approx(4 / 5)
    assert found.total_tokens_per_s == pytest.approx(34 / 5)
    assert found.mean_e2e_s == pytest.approx((5 + 3) / 2)
    assert found.p50_e2e_s == pytest.approx(4.0)
    assert found.p99_e2e_s == pytest.approx(3 + 2 * 0.99)
    assert found.mean_ttft_s == pytest.approx((1 + 3) / 2)
    assert found.p99_ttft_s == pytest.approx(1 + 2 * 0.99)
    assert found.mean_itl_s == pytest.approx((1 + 2) / 2)
    assert found.p99_itl_s == pytest.approx(1.99)
    assert found.steps == 4
    assert found.slot_utilization == 4 / (2 * 4)
    # 16 held for 1 s, 16 for 2 s, 48 for 1 s; of these useful 10, 11, 32
    assert found.kv_waste == pytest.approx(1 - (10 + 2 * 11 + 32) / (16 + 2 * 16 + 48))


def test_a_phase_has_its_own_requests_and_steps() -> None:
    run = trace(
        [request("x", 10, 0.0, [1.0], 1.0), request("y", 10, 1.0, [3.0, 4.0], 4.0)],
        [step(0.0, 1.0, 1), step(1.0, 3.0, 1), step(3.0, 4.0, 1)],
    )
    first, second = measure(run, {"x"}), measure(run, {"y"})
    assert (first.steps, second.steps) == (1, 2)
    assert second.output_tokens_per_s == pytest.approx(2 / 3)
    assert second.mean_ttft_s == 2.0


def test_single_tokens_have_no_inter_token_latency() -> None:
    run = trace([request("x", 1, 0.0, [1.0], 1.0)], [step(0.0, 1.0, 1)])
    assert measure(run).mean_itl_s == measure(run).p99_itl_s == 0.0


def test_slot_utilization_is_an_exact_fraction() -> None:
    steps = [step(i, i + 1, 4 if i < 10 else 3 if i < 30 else 2 if i < 50 else 1) for i in range(200)]
    assert slot_utilization(steps, 4) == Fraction(290, 800)


def test_kv_waste_of_nothing_held_is_none() -> None:
    assert kv_waste([step(0, 1, 1), step(1, 2, 1)]) == 0.0
    assert kv_waste([step(0, 1, 1, held=32, useful=0), step(1, 2, 1)]) == 1.0


def test_repetitions_give_medians_number_by_number() -> None:
    one = Metrics(**{field.name: 1.0 for field in fields(Metrics)})  # type: ignore[arg-type]
    one = replace(one, steps=10)
    runs = [one, replace(one, mean_e2e_s=5.0, steps=13), replace(one, mean_e2e_s=3.0, steps=12)]
    assert middle(runs).mean_e2e_s == 3.0
    assert middle(runs).steps == 12
    assert middle(runs).p99_itl_s == 1.0


def test_gaps_are_those_that_overlap_with_the_window() -> None:
    requests = [request("x", 1, 0.0, [1.0, 2.0, 4.0, 7.0], 7.0), request("y", 1, 0.0, [6.5], 6.5)]
    assert inter_token_latencies(requests) == [1.0, 2.0, 3.0]
    assert inter_token_latencies(requests, 2.0, 4.0) == [2.0]
    assert inter_token_latencies(requests, 1.5, 4.5) == [1.0, 2.0, 3.0]
    assert inter_token_latencies(requests, 7.0, 9.0) == []


def stayed(name: str, prompt: int, *stays: tuple[float, float], finish: float) -> RequestTrace:
    made = request(name, prompt, 0.0, [], finish)
    made.stays = [Stay(name, 0, [Segment(State.DECODE, board, leave)]) for board, leave in stays]
    return made


def test_reservations_last_while_a_request_is_in_a_slot() -> None:
    run = trace(
        [
            stayed("x", 10, (0.0, 4.0), finish=4.0),
            stayed("y", 20, (0.0, 1.0), (2.0, 7.0), finish=5.0),  # preempted for a second, and held at the end
        ],
        [
            step(0.0, 1.0, 1, useful=10),
            step(1.0, 2.0, 1, useful=11),
            step(2.0, 4.0, 1, useful=32),
            step(4.0, 5.0, 1, useful=0),
            step(5.0, 7.0, 1),
        ],
    )
    found = [(seconds, [request.id for request in requests]) for _, seconds, requests in states(run)]
    assert found == [(1.0, ["x"]), (2.0, ["x"]), (1.0, ["y"]), (2.0, [])]
    # 100 a request: x for 3 s, y for 1 s; useful 10 for 1 s, 11 for 2 s, 32 for 1 s
    assert waste_if_reserved(run, lambda request: 100) == pytest.approx(1 - (10 + 22 + 32) / 400)
    assert waste_if_reserved(run, lambda r: 10 * r.prompt_tokens) == pytest.approx(1 - 64 / 500)
    assert waste_if_reserved(trace([], []), lambda request: 100) == 0.0
