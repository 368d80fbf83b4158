"""Prometheus metrics of the API process, under chairlift_. All of them exist, at zero, from the first scrape."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from chairlift.core.plan import Capacity, StepStats
from chairlift.core.recorder import REASONS
from chairlift.core.request import FinishReason
from chairlift.server.goodput import OUTCOMES

CONTENT_TYPE = CONTENT_TYPE_LATEST

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_E2E = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Metrics:
    """One registry per server. Requests are counted here; the engine's state is copied from its last step."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # else each counter has a twin with the time of its birth
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"chairlift_{name}", help, labels, registry=registry)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(f"chairlift_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"chairlift_{name}", help, registry=registry, buckets=buckets)

        self.received = counter("requests_received", "Samples accepted for generation (n per prompt).")
        self.finished = counter("requests_finished", "Samples that ended, by reason.", "reason")
        for reason in FinishReason:
            self.finished.labels(reason.value)
        self.refused = counter("requests_refused", "HTTP requests answered with 4xx or 5xx.", "status")
        for status in (400, 404, 405, 413, 500, 503):
            self.refused.labels(str(status))
        self.goodput = counter(
            "goodput_requests",
            "Samples that finished: good, or the first missed of --slo-ttft and ttft_ms, --slo-itl (judged by the "
            "sample's mean time between tokens), and deadline_ms.",
            "outcome",
        )
        for outcome in OUTCOMES:
            self.goodput.labels(outcome)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")

        self.ttft = histogram("time_to_first_token_seconds", "From the request's arrival to its first token.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of a sample.", _ITL)
        self.e2e = histogram("e2e_request_latency_seconds", "From the request's arrival to its end.", _E2E)
        self.step_seconds = histogram("step_seconds", "Time of one model step.", _STEP)
        self.step_tokens = histogram("step_tokens", "Tokens computed in one step.", _TOKENS)

        self.engine_up = gauge("engine_up", "1 while the engine is ready.")
        self.restarts = counter("engine_restarts", "Engines that were started because another one had ended.")
        self.running = gauge("requests_running", "Sequences that are computed now.")
        self.waiting = gauge("requests_waiting", "Requests that never ran yet.")
        self.preempted = gauge("requests_preempted", "Sequences that wait again after a preemption.")
        self.blocks_total = gauge("kv_blocks_total", "KV blocks there are.")
        self.blocks_free = gauge("kv_blocks_free", "KV blocks free, those with a cached prefix included.")
        self.kv_usage = gauge("kv_cache_usage_ratio", "Share of the KV blocks in use, 0 to 1.")
        self.host_blocks_total = gauge("kv_host_blocks_total", "KV blocks in host memory there are.")
        self.host_blocks_free = gauge("kv_host_blocks_free", "KV blocks in host memory that are free.")
        self.disk_blocks_total = gauge("kv_disk_blocks_total", "KV blocks on disk there are.")
        self.disk_blocks_free = gauge("kv_disk_blocks_free", "KV blocks on disk that are free.")
        self.step_budget = gauge("step_budget_tokens", "Tokens that the last step could have taken.")
        self.waiting_reason = gauge("waiting_reason", "1 for what the head of the queue waits for.", "reason")
        for binding in REASONS:
            self.waiting_reason.labels(binding)
        self.preemptions = counter("preemptions", "Preemptions.")
        self.swaps = counter("swaps", "Preemptions whose KV was kept in host memory or on disk.")
        self.recomputed = counter("recomputed_tokens", "Tokens whose KV preemptions threw away.")
        self.cache_hits = counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.")
        self.cache_lookups = counter("prefix_cache_lookup_tokens", "Prompt tokens looked up in the prefix cache.")
        self.drafts = counter("draft_tokens", "Tokens guessed for speculative decoding.")
        self.accepted_drafts = counter("accepted_draft_tokens", "Guessed tokens that were right.")
        self._last = StepStats(step_id=-1)
        self._binding = ""
        self._gauges: dict[Gauge, str] = {  # and the field of `StepStats` that each copies
            self.running: "num_running",
            self.waiting: "num_waiting",
            self.preempted: "num_preempted",
            self.host_blocks_total: "num_host_blocks",
            self.host_blocks_free: "free_host_blocks",
            self.disk_blocks_total: "num_disk_blocks",
            self.disk_blocks_free: "free_disk_blocks",
            self.step_budget: "budget",
            self.blocks_total: "num_blocks",
            self.blocks_free: "free_blocks",
        }
        self._totals: dict[Counter, str] = {
            self.preemptions: "total_preemptions",
            self.swaps: "total_swaps",
            self.recomputed: "total_recomputed_tokens",
            self.cache_hits: "total_cached_tokens",
            self.cache_lookups: "total_lookup_tokens",
            self.drafts: "total_drafts",
            self.accepted_drafts: "total_accepted_drafts",
        }

    def step(self, stats: StepStats) -> None:
        """Takes the engine's state after a step, or after an abort between two steps."""
        last, self._last = self._last, stats
        if stats.step_id != last.step_id:
            self.step_seconds.observe(stats.step_seconds)
            self.step_tokens.observe(stats.step_tokens)
        self._copy(stats)
        for counter, name in self._totals.items():
            counter.inc(gain(getattr(last, name), getattr(stats, name)))

    def _copy(self, stats: StepStats) -> None:
        for gauge, name in self._gauges.items():
            gauge.set(getattr(stats, name))
        if stats.binding != self._binding:
            for reason, binds in ((self._binding, 0), (stats.binding, 1)):
                if reason:
                    self.waiting_reason.labels(reason).set(binds)
            self._binding = stats.binding
        used = stats.num_blocks - stats.free_blocks
        self.kv_usage.set(used / stats.num_blocks if stats.num_blocks else 0.0)

    def ready(self, capacity: Capacity) -> None:
        """The engine is up, and nothing is in use yet."""
        self.engine_up.set(1)
        self._copy(
            StepStats(
                num_blocks=capacity.num_blocks,
                free_blocks=capacity.num_blocks,
                num_host_blocks=capacity.num_host_blocks,
                free_host_blocks=capacity.num_host_blocks,
                num_disk_blocks=capacity.num_disk_blocks,
                free_disk_blocks=capacity.num_disk_blocks,
            )
        )

    def restarted(self) -> None:
        """The engine has ended, and another one is started."""
        self.restarts.inc()
        self.engine_gone()

    def engine_gone(self) -> None:
        """Nothing runs or waits any more, and the KV blocks went with the process."""
        self.engine_up.set(0)
        self._copy(StepStats())

    def expose(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)


def gain(before: int, now: int) -> int:
    """What a total of the engine grew by; a new engine counts from zero again."""
    return now - before if now >= before else now
