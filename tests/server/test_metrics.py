"""The metrics: names are a contract (O2), there from the first scrape (O1), and right."""

from __future__ import annotations

import subprocess
import sys

from chairlift.core.plan import Capacity, StepStats
from chairlift.server.metrics import Metrics

NAMES = {
    "requests_received_total": "counter",
    "requests_finished_total": "counter",
    "requests_refused_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "step_seconds": "histogram",
    "step_tokens": "histogram",
    "engine_up": "gauge",
    "engine_restarts_total": "counter",
    "requests_running": "gauge",
    "requests_waiting": "gauge",
    "requests_preempted": "gauge",
    "kv_blocks_total": "gauge",
    "kv_blocks_free": "gauge",
    "kv_cache_usage_ratio": "gauge",
    "kv_host_blocks_total": "gauge",
    "kv_host_blocks_free": "gauge",
    "kv_disk_blocks_total": "gauge",
    "kv_disk_blocks_free": "gauge",
    "step_budget_tokens": "gauge",
    "waiting_reason": "gauge",
    "goodput_requests_total": "counter",
    "swaps_total": "counter",
    "recomputed_tokens_total": "counter",
    "preemptions_total": "counter",
    "draft_tokens_total": "counter",
    "accepted_draft_tokens_total": "counter",
    "prefix_cache_hit_tokens_total": "counter",
    "prefix_cache_lookup_tokens_total": "counter",
}


def test_all_are_there_at_zero():
    text = Metrics().expose().decode()
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert types == {f"chairlift_{name}": kind for name, kind in NAMES.items()}
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert {name for name, value in samples if float(value) != 0} == set()
    for reason in ("stop", "length", "deadline", "abort", "error"):
        assert f'chairlift_requests_finished_total{{reason="{reason}"}} 0.0' in text
    for outcome in ("good", "late_ttft", "late_itl", "late_deadline"):
        assert f'chairlift_goodput_requests_total{{outcome="{outcome}"}} 0.0' in text
    for reason in ("slots", "tokens", "blocks", "gate", "fairness", "delay", "slo", "order"):
        assert f'chairlift_waiting_reason{{reason="{reason}"}} 0.0' in text


def test_totals_of_the_engine_are_added_up_over_restarts():
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    metrics.step(StepStats(step_id=0, num_blocks=10, free_blocks=4, total_preemptions=3))
    metrics.step(StepStats(step_id=0, num_blocks=10, free_blocks=4, total_preemptions=5))
    metrics.step(StepStats(step_id=0, num_blocks=10, free_blocks=10, total_preemptions=1))
    assert value("chairlift_preemptions_total") == 6
    assert value("chairlift_kv_cache_usage_ratio") == 0
    assert value("chairlift_step_seconds_count") == 1, "an abort between steps is no step"


def gauges(metrics):
    """What all gauges say, but those of another value than 0 alone."""
    said = {}
    for family in metrics.registry.collect():
        if family.type == "gauge":
            said |= {(s.name.removeprefix("chairlift_"), *s.labels.values()): s.value for s in family.samples}
    return {name[0] if len(name) == 1 else name: value for name, value in said.items() if value}


STATS = StepStats(
    step_id=0,
    num_running=2,
    num_waiting=1,
    num_preempted=3,
    num_blocks=10,
    free_blocks=4,
    num_host_blocks=20,
    free_host_blocks=5,
    num_disk_blocks=40,
    free_disk_blocks=6,
    budget=512,
    binding="blocks",
)


def test_an_engine_that_is_gone_holds_nothing():
    metrics = Metrics()
    metrics.ready(Capacity(10, 16, 64, num_host_blocks=20, num_disk_blocks=40))
    metrics.step(STATS)
    metrics.engine_gone()
    assert gauges(metrics) == {}


def test_the_engines_state_is_copied():
    metrics = Metrics()
    metrics.ready(Capacity(10, 16, 64, num_host_blocks=20, num_disk_blocks=40))
    blocks = {"kv_blocks_total": 10, "kv_host_blocks_total": 20, "kv_disk_blocks_total": 40, "engine_up": 1}
    free = {"kv_blocks_free": 10, "kv_host_blocks_free": 20, "kv_disk_blocks_free": 40}
    assert gauges(metrics) == blocks | free
    metrics.step(STATS)
    assert gauges(metrics) == blocks | {
        "requests_running": 2,
        "requests_waiting": 1,
        "requests_preempted": 3,
        "kv_blocks_free": 4,
        "kv_cache_usage_ratio": 0.6,
        "kv_host_blocks_free": 5,
        "kv_disk_blocks_free": 6,
        "step_budget_tokens": 512,
        ("waiting_reason", "blocks"): 1,
    }


def test_one_reason_binds_at_a_time():
    """S8: also one that is new here."""
    metrics = Metrics()
    for binding in ("slots", "blocks", "weather", "slots", ""):
        metrics.step(StepStats(binding=binding))
        assert gauges(metrics) == ({("waiting_reason", binding): 1} if binding else {})


def test_totals_of_preemptions():
    metrics = Metrics()
    metrics.step(StepStats(step_id=0, total_preemptions=3, total_swaps=2, total_recomputed_tokens=70))
    metrics.step(StepStats(step_id=1, total_preemptions=4, total_swaps=2, total_recomputed_tokens=90))
    names = ("preemptions", "swaps", "recomputed_tokens")
    assert [metrics.registry.get_sample_value(f"chairlift_{name}_total") for name in names] == [4, 2, 90]


def test_requests_are_counted(server):
    """O3: what was received has ended, by some reason, or is open."""
    before = {name: server.metric(name) for name in ("requests_received_total", "generation_tokens_total")}
    server.post("/v1/completions", prompt="hello", n=2, max_tokens=5)
    server.post("/v1/completions", prompt="hello", temperature=0, max_tokens=50, stop="lift")
    server.post("/v1/completions", prompt="hello", logit_bias={"255": -100})
    assert server.metric("requests_received_total") - before["requests_received_total"] == 4
    assert server.metric("generation_tokens_total") - before["generation_tokens_total"] == 10 + 15
    ended = {r: server.metric(f'requests_finished_total{{reason="{r}"}}') for r in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 1, "length": 2, "abort": 0, "error": 1}
    assert server.metric("time_to_first_token_seconds_count") == 3
    assert server.metric("inter_token_latency_seconds_count") == 4 + 4 + 14
    assert server.metric("e2e_request_latency_seconds_count") == 3
    assert server.metric('goodput_requests_total{outcome="good"}') == 3
    assert server.metric("engine_up") == 1
    assert server.metric("kv_blocks_free") == server.metric("kv_blocks_total") == 64


def test_liveness_and_readiness_are_separate(server):
    """D8"""
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}


def test_probes_may_ask_for_the_head_alone(server):
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/toy"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == server.http.get(path).headers["content-type"]
    assert server.http.head("/v1/completions").status_code == 405


def test_not_ready_names_the_phase(toy):
    """I4: alive while it loads, not ready, and requests are told to come back."""
    from fastapi.testclient import TestClient

    from chairlift.config import EngineConfig
    from chairlift.server import ipc
    from chairlift.server.app import create_app
    from chairlift.server.client import EngineClient
    from chairlift.server.service import Service

    client = EngineClient(None)
    service = Service(client, EngineConfig(), ["toy"], Metrics())
    http = TestClient(create_app(service))
    client._receive(ipc.Phase(0, "weights"))
    assert http.get("/health").status_code == 200
    assert (http.get("/ready").status_code, http.get("/ready").json()["phase"]) == (503, "weights")
    answer = http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503 and "weights" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    client._receive(ipc.Ready(0, Capacity(4, 16, 64), {}))
    assert http.get("/ready").json()["phase"] == "tokenizer"
    service.tokenizer = toy.ToyTokenizer()
    assert http.get("/ready").status_code == 200
    client._die("it broke")
    assert http.get("/health").status_code == http.get("/ready").status_code == 503
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503


def test_the_api_process_loads_no_runner():
    """DESIGN 2: neither models nor runners, numpy nor torch come with the server."""
    program = (
        "import sys, chairlift.server.main, chairlift.server.app, chairlift.server.client\n"
        "bad = ('chairlift.models', 'chairlift.runners', 'chairlift._native', 'numpy', 'torch', 'transformers')\n"
        "print([name for name in sys.modules if name.startswith(bad)])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_nothing_heavy_is_imported_before_the_engine_runs():
    """The start is quick because the engine is spawned before FastAPI is imported."""
    program = (
        "import sys, chairlift.server.main\n"
        "print([name for name in ('fastapi', 'uvicorn', 'pydantic', 'prometheus_client') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
