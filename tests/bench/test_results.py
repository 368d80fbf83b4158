"""The comparison as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console

from chairlift.bench.compare import POLICIES, Bench, Comparison
from chairlift.bench.metrics import Metrics, measure
from chairlift.bench.results import LINES, Part, Setting, parts, rows, to_json, to_table, typical
from chairlift.sim.workloads import FOUR_OUTPUTS, four_requests, peak

METRICS = {
    "output_tokens_per_s", "total_tokens_per_s", "mean_e2e_s", "p50_e2e_s", "p99_e2e_s", "mean_ttft_s", "p99_ttft_s",
    "mean_itl_s", "p99_itl_s", "slot_utilization", "kv_waste", "steps",
}  # fmt: skip
REQUEST = {"id", "prompt_tokens", "output_tokens", "arrival_s", "first_token_s", "finish_s"}


def test_json_has_all_that_was_promised(four: Comparison, setting: Setting) -> None:
    """Q2: version, configuration, seed, warm-up and raw records are there."""
    found = json.loads(json.dumps(to_json(four, setting), allow_nan=False))
    assert {"case", "model", "machine", "policies", "version", "config", "seed", "warm_up"} <= found.keys()
    assert (found["case"], found["model"]) == ("four-requests", "toy")
    assert list(found["policies"]) == list(POLICIES)
    assert found["config"]["max_num_batched_tokens"] == {"static": 512, "continuous": 512, "chunked": 512}
    assert found["identical_outputs"] is True
    for policy in found["policies"].values():
        assert policy.keys() >= METRICS
        assert all(request.keys() >= REQUEST for request in policy["requests"])
        assert {request["id"]: request["output_tokens"] for request in policy["requests"]} == FOUR_OUTPUTS
        assert len(policy["step_records"]) == policy["steps"]
        assert all(len(record) == len(policy["step_columns"]) for record in policy["step_records"])
        assert policy["cached_tokens"] == 0
        for request in policy["requests"]:
            times = [request[f"{name}_s"] for name in ("arrival", "board", "first_token", "last_token", "finish")]
            assert times == sorted(times)


def test_static_s_utilization_is_exact(four: Comparison, setting: Setting) -> None:
    assert to_json(four, setting)["policies"]["static"]["slot_utilization"] == 290 / 800


def test_json_numbers_follow_from_its_own_requests(four: Comparison, setting: Setting) -> None:
    for policy in to_json(four, setting)["policies"].values():
        requests = policy["requests"]
        seconds = max(r["finish_s"] for r in requests) - min(r["arrival_s"] for r in requests)
        assert policy["output_tokens_per_s"] == pytest.approx(435 / seconds, rel=1e-4)
        assert policy["total_tokens_per_s"] == pytest.approx((435 + 6 * 64) / seconds, rel=1e-4)
        assert policy["mean_e2e_s"] == pytest.approx(
            sum(r["finish_s"] - r["arrival_s"] for r in requests) / 6, rel=1e-4
        )
        assert policy["slot_utilization"] == pytest.approx(435 / (4 * policy["steps"]))


def test_phases_stand_alone_and_together(bench_of: Callable[..., Bench], setting: Setting) -> None:
    comparison = bench_of(peak(0, 0.04), chunk_tokens=64).compare()
    assert [part.label for part in parts(comparison)] == ["50 clients", "80 clients", "whole run"]
    for policy in to_json(comparison, setting)["policies"].values():
        first, second = policy["phases"]
        assert (first["label"], second["label"]) == ("50 clients", "80 clients")
        assert first["steps"] + second["steps"] == policy["steps"]
        assert first["duration_s"] + second["duration_s"] == pytest.approx(policy["duration_s"])


def test_medians_and_a_typical_run_of_several(bench_of: Callable[..., Bench], setting: Setting) -> None:
    comparison = bench_of(four_requests()).compare(reps=3)
    fast, middle, slow = comparison.traces["static"]
    for trace, factor in ((fast, 0.5), (slow, 3.0)):
        for request in trace.requests.values():
            request.finish *= factor
    assert typical((slow, middle, fast)) is middle
    (part,) = parts(comparison)
    assert part.metrics["static"].p99_e2e_s == pytest.approx(measure(middle).p99_e2e_s)
    assert len(to_json(comparison, setting)["policies"]["static"]["repetitions"]) == 3


def test_table_shows_each_policy_and_the_change(four: Comparison) -> None:
    (part,) = parts(four)
    static, continuous = part.metrics["static"], part.metrics["continuous"]
    console = Console(width=80, record=True, file=StringIO())
    console.print(to_table(part))
    lines = {line[:21].strip(): line[21:].replace(" %", "%").split() for line in console.export_text().splitlines()}
    change = (continuous.mean_e2e_s / static.mean_e2e_s - 1) * 100
    assert lines["Response mean, s"][0] == f"{static.mean_e2e_s:.2f}"
    assert lines["Response mean, s"][3] == f"\N{MINUS SIGN}{-change:.1f}%"
    assert lines["Slot utilisation, %"][0] == "36.25"
    assert "…" not in console.export_text()
    for line in LINES:
        assert len(lines[line.label]) == 5


def test_gains_and_losses_are_told_apart(four: Comparison) -> None:
    (part,) = parts(four)
    base = part.metrics["static"]
    other = replace(
        base, output_tokens_per_s=base.output_tokens_per_s * 2, mean_e2e_s=base.mean_e2e_s * 2, kv_waste=0.0
    )
    found = {row.label: row.changes for row in rows(Part("", {"static": base, "continuous": other}))}
    assert found["Output, token/s"] == (("+100 %", True),)
    assert found["Response mean, s"] == (("+100 %", False),)
    assert found["KV waste, %"] == (("\N{MINUS SIGN}100 %", True),)
    assert found["Steps"] == (("0 %", None),)
    nothing = {row.label: row.changes for row in rows(Part("", {"static": replace(base, kv_waste=0.0), "x": base}))}
    assert nothing["KV waste, %"] == (("n/a", None),)


def test_table_of_a_slow_or_fast_machine_fits_80_columns(four: Comparison) -> None:
    (part,) = parts(four)
    base = part.metrics["static"]
    for factor in (1e-3, 1.0, 1e3):
        scaled = Metrics(**{name: factor * value for name, value in asdict(base).items()} | {"steps": 99999})
        console = Console(width=80, record=True, file=StringIO())
        console.print(to_table(Part("", {"static": scaled, "continuous": base, "chunked": scaled})))
        assert "…" not in console.export_text()
