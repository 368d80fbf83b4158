"""The loads: lengths, determinism, bounds."""

from __future__ import annotations

from fractions import Fraction
from statistics import fmean

import pytest

from chairlift.errors import ParameterError
from chairlift.sim.workloads import PEAK_OUTPUT, PEAK_PROMPT, WorkRequest, four_requests, peak


def static_batches(requests: tuple[WorkRequest, ...], slots: int) -> list[tuple[WorkRequest, ...]]:
    return [requests[i : i + slots] for i in range(0, len(requests), slots)]


def static_share(requests: tuple[WorkRequest, ...], slots: int) -> Fraction:
    """Useful slot-steps of batches that wait for their longest."""
    steps = sum(max(request.output_tokens for request in batch) for batch in static_batches(requests, slots))
    return Fraction(sum(request.output_tokens for request in requests), slots * steps)


def test_four_requests_are_the_article_s() -> None:
    load = four_requests()
    assert load.max_num_seqs == 4
    assert [(request.id, request.output_tokens) for request in load.requests] == [
        ("A", 200), ("B", 50), ("C", 30), ("D", 10), ("E", 100), ("F", 45),
    ]  # fmt: skip
    assert static_share(load.requests[:4], 4) == Fraction(290, 800)
    assert static_share(load.requests[4:], 4) == Fraction(290, 800)
    assert static_share(load.requests, 4) == Fraction(290, 800)


def test_peak_depends_on_its_seed_alone() -> None:
    assert peak(3) == peak(3)
    assert peak(3) != peak(4)


@pytest.mark.parametrize("seed", range(5))
def test_peak_is_within_its_bounds(seed: int) -> None:
    load = peak(seed)
    assert [phase.clients for phase in load.phases] == [50, 80]
    assert load.max_num_seqs == 32
    assert len({request.id for request in load.requests}) == len(load.requests)
    for phase in load.phases:
        assert phase.clients is not None and len(phase.requests) > phase.clients
        assert len(phase.requests) % load.max_num_seqs == 0, "static's last batch would not be full"
    for request in load.requests:
        assert PEAK_PROMPT.low <= request.prompt_tokens <= PEAK_PROMPT.high
        assert PEAK_OUTPUT.low <= request.output_tokens <= PEAK_OUTPUT.high
    assert load.longest <= PEAK_PROMPT.high + PEAK_OUTPUT.high
    outputs = sorted(request.output_tokens for request in load.requests)
    assert outputs[-1] > 3 * outputs[len(outputs) // 2], "the tail is not long"


def test_peak_has_the_migration_table_s_outputs_and_static_share() -> None:
    loads = [peak(seed) for seed in range(20)]
    mean = fmean(request.output_tokens for load in loads for request in load.requests)
    assert 3850 * 2.4 / 50 < mean < 1200 * 8.2 / 50, "between what it had after and before"
    assert 0.30 < fmean(static_share(load.requests, load.max_num_seqs) for load in loads) < 0.40


def test_scale_multiplies_lengths_and_keeps_them_positive() -> None:
    small, whole, large = peak(0, 0.01), peak(0), peak(0, 2.0)
    assert len(small.requests) == len(whole.requests)
    assert all(request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in small.requests)
    assert large.output_tokens == pytest.approx(2 * whole.output_tokens, rel=0.02)


@pytest.mark.parametrize("scale", [0.0, -1.0, 65.0, float("nan"), float("inf")])
def test_scale_out_of_range_is_refused(scale: float) -> None:
    with pytest.raises(ParameterError, match="scale must be a number above 0 and at most 64"):
        peak(0, scale)
