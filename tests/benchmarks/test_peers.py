"""benchmarks/peers.py without any peer: its workloads, client, figures and table, and Chairlift measured through it."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peers import make_workload, quality
from peers.client import Stream
from peers.command import ABOUT_MODEL, main
from peers.engines import ENGINES
from peers.figures import FIGURES, Answer, Figure, measure
from peers.install import Installer, Unavailable
from peers.limit import ModelCosts, Work
from peers.results import Results, Row, Run
from peers.workloads import FILE, Request, Workload, all_workloads

FASTER = Figure("W-batch", "output_per_s", "token/s", lower=False, target=2.2)
SOONER = Figure("W-prefill", "seconds", "s", lower=True, target=2.0)
SHARE = Figure("W-rate-2", "itl_p99", "P99 ITL, s", lower=True, target=0.4)


# -- workloads


def test_the_workloads_are_as_documented() -> None:
    found = {
        name: (workload.slots, len(workload.requests), sum(len(r.ids) for r in workload.requests),
               sum(r.output for r in workload.requests))
        for name, workload in all_workloads().items()
    }  # fmt: skip
    rate = (32, 60, 7481, 5910)
    assert found == {
        "W-single": (32, 1, 128, 256),
        "W-prefill": (32, 1, 2048, 1),
        "W-batch": (32, 64, 7533, 6718),
        "W-long": (32, 16, 16384, 2048),
        "W-seed": (4, 6, 192, 370),
        "W-rate-1": rate,
        "W-rate-2": rate,
        "W-rate-4": rate,
    }


def test_stored_lengths_are_those_of_the_prompts() -> None:
    stored = json.loads(FILE.read_text())
    for name in ("W-single", "W-prefill", "W-batch", "W-long", "W-seed", "W-rate"):
        assert all(request["prompt_len"] == len(request["ids"]) for request in stored[name])


def test_the_file_is_what_its_maker_makes(smollm2_path: Path) -> None:
    made = json.dumps(make_workload.make(make_workload.words_of(str(smollm2_path))))
    assert hashlib.sha256(made.encode()).digest() == hashlib.sha256(FILE.read_bytes()).digest()


def test_a_rate_divides_the_arrivals() -> None:
    one, four = (all_workloads()[name].requests for name in ("W-rate-1", "W-rate-4"))
    assert one[0].due == 0 and one[-1].due == pytest.approx(4 * four[-1].due) and 30 < one[-1].due < 120


def test_no_two_rounds_begin_alike() -> None:
    workload = all_workloads()["W-batch"]
    rounds = [workload.salted(i) for i in range(5)]
    for of_request in zip(*(salted.requests for salted in rounds), strict=True):
        assert len({request.ids[0] for request in of_request}) == 5
        assert len({request.ids[1:] for request in of_request}) == 1


def test_scaled_to_a_share() -> None:
    assert len(all_workloads()["W-batch"].scaled(0.1).requests) == 7
    assert [r.output for r in all_workloads()["W-single"].scaled(0.1).requests] == [26]
    assert all_workloads()["W-prefill"].scaled(0.1) == all_workloads()["W-prefill"]


# -- the client


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_a_stream_counts_what_brings_text() -> None:
    stream = Stream()
    stream.feed(event(choices=[{"text": " one"}]), 1.0)
    stream.feed(event(choices=[{"text": " two"}], usage=None) + event(choices=[{"text": ""}]), 2.0)
    stream.feed(event(choices=[], usage={"completion_tokens": 3}) + b": a comment\n\n", 3.0)
    assert not stream.done
    stream.feed(b"data: [DONE]\n\n", 4.0)
    assert stream.done and (stream.times, stream.text, stream.tokens) == ([1.0, 2.0], " one two", 3)


def test_an_event_may_come_in_pieces() -> None:
    stream, whole = Stream(), event(choices=[{"text": "word"}])
    for i in range(len(whole)):
        stream.feed(whole[i : i + 1], float(i))
    assert stream.text == "word" and len(stream.times) == 1


def test_an_error_within_a_stream_is_raised() -> None:
    with pytest.raises(RuntimeError, match="too long"):
        Stream().feed(event(error={"message": "too long"}), 1.0)


# -- figures


def test_figures_of_known_times() -> None:
    workload = Workload("W", 2, (Request((1, 2), 3), Request((3,), 2, due=1.0)))
    figures = measure(workload, [Answer(0.0, (1.0, 2.0, 4.0), 3), Answer(1.0, (2.0, 5.0), 2)])
    assert figures["seconds"] == 5.0 and figures["output_per_s"] == 1.0
    assert figures["ttft_p99"] == pytest.approx(1.0)
    assert figures["itl_p50"] == 2.0 and figures["itl_p99"] == pytest.approx(2.98)


def test_a_wrong_length_is_no_measurement() -> None:
    workload = Workload("W", 1, (Request((1,), 3),))
    with pytest.raises(ValueError, match="3 tokens got 2"):
        measure(workload, [Answer(0.0, (1.0, 2.0), 2)])


@pytest.mark.parametrize(
    ("figure", "chairlift", "peer", "ratio", "met"),
    [
        (FASTER, 220.0, 100.0, 2.2, True),
        (FASTER, 210.0, 100.0, 2.1, False),
        (SOONER, 2.0, 4.0, 2.0, True),
        (SOONER, 3.0, 4.0, 4 / 3, False),
        (SHARE, 0.4, 1.0, 0.4, True),
        (SHARE, 0.5, 1.0, 0.5, False),
    ],
)
def test_a_ratio_and_its_target(figure: Figure, chairlift: float, peer: float, ratio: float, met: bool) -> None:
    assert figure.ratio(chairlift, peer) == pytest.approx(ratio)
    assert figure.met(figure.ratio(chairlift, peer)) is met


def test_each_workload_has_its_targets() -> None:
    assert {figure.workload for figure in FIGURES} == set(all_workloads())
    assert all(figure.target == 0.4 for figure in FIGURES if figure.workload.startswith("W-rate"))


# -- the table


def results(workload: str, **values: list[float]) -> Results:
    """Rounds of one figure; b16 stands for a peer in bf16."""
    key = {"W-batch": "output_per_s", "W-prefill": "seconds"}[workload]
    rows = [Row("chairlift", own=True), Row("in-process", own=True), Row("a"), Row("b"), Row("b16", exact=False)]
    runs = [Run(name, workload, i, {key: v}) for name, each in values.items() for i, v in enumerate(each)]
    return Results(rows, [workload], runs=runs)


def test_medians_and_the_best_exact_peer() -> None:
    found = results("W-batch", chairlift=[300.0, 100.0, 290.0], a=[99.0, 100.0, 1000.0], b=[90.0] * 3, b16=[145.0])
    (verdict,) = found.verdicts()
    assert verdict.medians == {"chairlift": 290.0, "in-process": None, "a": 100.0, "b": 90.0, "b16": 145.0}
    assert (verdict.best, verdict.ratio, verdict.ratio_to_all, verdict.met) == ("a", 2.9, 2.0, True)


def test_of_times_the_shortest_is_the_best() -> None:
    (verdict,) = results("W-prefill", chairlift=[3.0], a=[6.5], b=[4.5]).verdicts()
    assert (verdict.best, verdict.ratio, verdict.met) == ("b", 1.5, False)


def test_without_a_peer_or_chairlift_there_is_no_verdict() -> None:
    for found in (results("W-batch", chairlift=[1.0], b16=[1.0]), results("W-batch", a=[1.0])):
        assert found.verdicts()[0].met is None


def test_the_table_shows_everything() -> None:
    found = results("W-batch", chairlift=[250.0], a=[100.0])
    found.problems.append(("b", "", "cannot be installed"))
    found.agreement["a"] = "8 of 8 texts whole"
    found.limits = [{"vnni": 2e11, "stream": 9e9}, {"vnni": 1e11, "stream": 1e10}]
    text = found.as_markdown()
    (line,) = (line for line in text.splitlines() if line.startswith("| W-batch"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["W-batch, token/s", "250", "-", "**100**", "-", "-", "2.50", "2.50", "at least 2.2", "met", ""]
    assert "not measured: cannot be installed" in text and "8 of 8 texts whole" in text
    assert "vnni 200 G multiply-adds/s; reading memory 10.0 GB/s" in text
    assert found.as_json()["table"][0]["met"] is True
    assert found.as_json()["problems"] == [{"engine": "b", "workload": "", "reason": "cannot be installed"}]


def test_what_a_workload_cannot_do_without() -> None:
    model = ModelCosts(row_products=100, draw_products=10, weight_bytes=7)
    alone = Workload("w", 4, (Request((1, 2, 3), 5),))
    assert Work.of(alone, model) == Work(products=(3 + 5 - 1) * 100 + 5 * 10, bytes=5 * 7)
    crowd = Workload("w", 2, tuple(Request((1,), 4) for _ in range(5)))  # 20 tokens, two a step
    assert Work.of(crowd, model) == Work(products=5 * 4 * 100 + 20 * 10, bytes=10 * 7)


@pytest.mark.parametrize(
    ("work", "shown"),
    [(Work(products=1000, bytes=90), "vpmaddubsw 50%"), (Work(products=100, bytes=150), "reading 75%")],
)
def test_the_limit_that_binds_is_shown(work: Work, shown: str) -> None:
    found = results("W-prefill", chairlift=[20.0, 1.0, 20.0], a=[100.0])
    found.limits = [{"int8": 50.0, "stream": 10.0}, {"int8": 100.0, "stream": 5.0}]
    assert shown not in found.as_markdown()
    found.works["W-prefill"] = work
    assert shown in found.as_markdown()
    assert found.as_json()["table"][0]["share_of_limit"] == list(found.share_of_limit("W-prefill") or ())


def test_what_a_model_costs(smollm2_path: Path) -> None:
    asked = [sys.executable, str(ABOUT_MODEL), str(smollm2_path)]
    found = json.loads(subprocess.run(asked, check=True, stdout=subprocess.PIPE).stdout)
    layers, head = 30 * (576 * (576 + 2 * 192 + 576) + 3 * 576 * 1536), 49152 * 576
    assert (found["row_products"], found["draw_products"]) == (layers, head)
    assert found["weight_bytes"] == layers // 32 * 20 + head // 32 * 34
    assert Path(found["path"]).samefile(smollm2_path)


# -- quality


EXPECTED = {"prompt": [1], "ids": [5, 6, 7], "texts": ["a", "ab", "abc"], "margins": [0.5, 0.25, 0.125]}


@pytest.mark.parametrize(
    ("answer", "same", "margins"),
    [
        (Answer(0, (1,), 3, text="abcd"), 3, ()),
        (Answer(0, (1,), 3, text="abx"), 2, (0.125,)),
        (Answer(0, (1,), 3, text=""), 0, (0.5,)),
        (Answer(0, (1,), 3, ids=(5, 6, 7)), 3, ()),
        (Answer(0, (1,), 3, ids=(5, 9, 7)), 1, (0.25,)),
    ],
)
def test_where_texts_part(answer: Answer, same: int, margins: tuple[float, ...]) -> None:
    found = quality.compare([answer], [EXPECTED])
    assert (found.same, found.margins) == ((same,), margins)


# -- installation


def refuse(installer: Installer, command: Any) -> None:
    raise Unavailable("no such package")


def test_what_failed_is_said_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def fail(installer: Installer, command: Any) -> None:
        tried.append(command)
        refuse(installer, command)

    monkeypatch.setattr(Installer, "_run", fail)
    installer = Installer(tmp_path, tmp_path / "model.gguf")
    for _ in range(2):
        with pytest.raises(Unavailable, match="no such package"):
            installer.openvino_ir()
    assert len(tried) == 1


# -- Chairlift itself, for real


def test_chairlift_is_measured(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served and in process, a small share of the workloads. What peers need, the reference too, is not to be had."""
    monkeypatch.setattr(Installer, "_run", refuse)
    output = tmp_path / "out" / "peers"
    arguments = ["--engines", "chairlift,chairlift-in-process,openvino-fp32", "--workloads", "W-single,W-seed,W-rate-4"]
    arguments += ["--rounds", "1", "--scale", "0.02", "--quiet-wait", "0", "--no-limits", "--model", str(smollm2_path)]
    main("", [*arguments, "--cache", str(tmp_path / "cache"), "--output", str(output)])
    found = json.loads(output.with_name("peers.json").read_text())
    measured = {(run["engine"], run["workload"]) for run in found["runs"]}
    names = ("chairlift", "chairlift-in-process")
    assert measured == {(name, workload) for name in names for workload in ("W-single", "W-seed", "W-rate-4")}
    for run in found["runs"]:
        # Tokens that come together are one piece of text, and one that ends no character is none.
        assert 0 < run["pieces"] <= run["output_tokens"] and run["seconds"] > 0
        assert all(math.isfinite(value) for value in run.values() if isinstance(value, float))
    assert [problem["engine"] for problem in found["problems"]] == ["openvino-fp32"]
    assert all(engine["name"] in ENGINES for engine in found["engines"])
    assert "openvino-fp32" in output.with_name("peers.md").read_text()
