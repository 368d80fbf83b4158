"""Settings, as frozen dataclasses. The command line is derived from these fields: name, default, type and help."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chairlift import config_checks
from chairlift.config_checks import parse_bytes, parse_disk_swap, parse_tenant_weights

__all__ = [
    "DEFAULT_MAX_PREEMPTIONS",
    "DEFAULT_MODEL",
    "DEFAULT_PRIORITY_AGEING",
    "EngineConfig",
    "ServerConfig",
    "cache_dir",
    "hub_endpoint",
    "hub_offline",
    "option",
    "parse_bytes",
    "parse_disk_swap",
    "parse_tenant_weights",
]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_PRIORITY_AGEING = 30.0  # seconds
DEFAULT_MAX_PREEMPTIONS = 3


def option(default: Any, help: str) -> Any:
    """A field with the help text that the command line shows: what it does, what it costs, when to change it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs to know."""

    model: str = option(
        DEFAULT_MODEL, "A known name (smollm2-135m, gemma3-270m), a GGUF file, a Hugging Face folder, or a hub name."
    )
    max_model_len: int | None = option(
        None, "Longest prompt plus output, in tokens. Default: the model's own, or what the KV cache can hold if less."
    )
    max_num_seqs: int = option(
        32, "Most sequences that run at once. More raises throughput and the time between a request's tokens."
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens computed in one step. With chunked scheduling a larger budget finishes prompts sooner and delays "
        "running requests more. Default: 256 when chunked, else max-model-len.",
    )
    scheduler_policy: str = option(
        "chunked",
        "chunked: prompts are computed in pieces beside running requests. continuous: whole prompts first, then "
        "decodes. static: a batch boards together and leaves together (the baseline, for comparison only). Or a class "
        "of your own by its import path, e.g. mypkg.MyPolicy.",
    )
    admission: Literal["optimistic", "reserve", "peak"] | None = option(
        None,
        "optimistic (default): board while blocks last, preempt if they run out. reserve: board only with room for the "
        "request's greatest length; never preempts, runs fewer at once. peak: board when the running requests and the "
        "new one fit even at their future peak; never preempts either, and runs more than reserve.",
    )
    order: Literal["fcfs", "priority", "shortest-prefill", "longest-prefix", "deadline"] = option(
        "fcfs",
        "Who boards first. fcfs: who came first. priority: lower `priority` first, and a running request of a higher "
        "number makes room at once, which costs its work anew or a swap. shortest-prefill: fewest tokens to compute; "
        "long prompts wait longer. longest-prefix: most tokens cached; new prefixes wait longer. deadline: earliest "
        "deadline. None starves anybody.",
    )
    priority_ageing: float | None = option(
        None,
        "Seconds of waiting that count as much as one class of priority; less lets low classes in sooner, at the "
        "expense of the high. Default 30. Only with --order priority.",
    )
    fair_tenants: bool = option(
        False,
        "Share the engine evenly among tenants (API keys, or the `user` field): who was served least boards first, and "
        "one that takes more than its share makes room. Costs nothing while there is only one.",
    )
    tenant_weights: str | None = option(
        None,
        "Shares that are not equal, e.g. alice=2,bob=1: by `user`, or by tenant as GET /v1/requests shows it. All "
        "others have 1. Only with --fair-tenants.",
    )
    max_preemptions: int | None = option(
        None,
        "A request preempted this often boards again only with room for its greatest length, and then stays. Less "
        "wastes less work, and makes others wait longer for room. Default 3.",
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory for the KV of preempted requests, and of prefixes pushed out of the cache. Taken at start. "
        "0: preempted requests are recomputed. Give some when the log warns of preemptions, or prompts repeat.",
    )
    disk_swap: str | None = option(
        None,
        "PATH,GiB: a file that takes KV when host memory is full, and keeps the prefix cache over restarts. Slower "
        "than memory; worth it where recomputing a prompt is slower still.",
    )
    preemption_mode: Literal["auto", "recompute", "swap"] | None = option(
        None,
        "What becomes of a preempted request's KV: recomputed, swapped, or (auto, the default) whichever is cheaper by "
        "this machine's measured rates. Only with --swap-space or --disk-swap.",
    )
    slo_ttft: float | None = option(
        None,
        "Target for the time to first token, in ms. Costs nothing: samples that keep it count as good in "
        "chairlift_goodput_requests_total, and --order deadline takes it as the deadline of requests without one.",
    )
    slo_itl: float | None = option(
        None,
        "Target for the time between tokens, in ms. Each step takes only as many prompt tokens, and the engine only as "
        "many requests, as keep it; prompts take longer for it. A sample is good if its mean keeps it. Chunked only.",
    )
    max_batch_delay_ms: float = option(
        0.0,
        "An idle engine waits so long after a request for others to board with it. Costs that much latency when "
        "nobody comes; for loads that come in bursts.",
    )
    pin_prefix: str | None = option(
        None,
        "A text file with a prompt's beginning, e.g. a system prompt, whose KV is computed at start and stays. Takes "
        "its KV blocks for good. For a chat model, as its template puts it.",
    )
    num_speculative_tokens: int = option(
        0,
        "Most tokens of a sequence that are guessed from what it said before, and verified in the step that draws the "
        "next one. Answers stay the same; texts that repeat their prompt, as when one is edited, come faster. Guesses "
        "that do not pay are left out. 0: none; 8 is a good value.",
    )
    async_scheduling: bool = option(
        False,
        "Plan the next step while one runs. Hides the scheduler's time, for many requests on a fast model; a finished "
        "request computes one step more.",
    )
    block_size: int = option(
        16,
        "Tokens per KV block. Smaller wastes less memory, larger costs less bookkeeping; multiples of 16 are computed "
        "fastest.",
    )
    kv_cache_memory: str | None = option(
        None, "Memory for the KV cache, e.g. 512MiB or 2GiB. Default: a share of what is free, at most 4GiB on a CPU."
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's memory for everything. On a CPU: of the memory free at start and allowed by the cgroup. "
        "Default 0.9. Not together with kv-cache-memory.",
    )
    kv_cache_dtype: Literal["auto", "f16", "bf16", "f32", "int8"] = option(
        "auto",
        "auto is bf16 with the instruction set amx, whose tiles multiply it, and f16 with all others. int8 halves the "
        "memory of the cache, for more or longer requests, and loses some precision; f32 doubles it.",
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV of equal prompt beginnings. Costs next to nothing.")
    weights: Literal["auto", "f32"] = option(
        "auto", "auto keeps the weights as the file has them. f32 dequantises them: slow, large, for checking."
    )
    quantization: Literal["int8", "int4"] | None = option(
        None,
        "Quantise matrices of floats (f32, f16, bf16) as they are loaded, in groups of 32: int8 takes half of f16's "
        "memory and loses next to nothing, int4 down to a third (embeddings, the output and v get int8) and loses "
        "more; chairlift doctor --quality measures it. The first load takes longer. Not for models that are quantised.",
    )
    weight_cache: float = option(
        16.0,
        "GiB of disk, in the folder of the pulled models, for weights as the kernels read them, so that the next start "
        "of a model need not pack them. What was used longest ago makes room. 0: none.",
    )
    threads: int | None = option(None, "Threads that compute. Default: the processors this process may use.")
    isa: str = option("auto", "Instruction set of the kernels: auto, amx, avx512, avx2, neon or portable.")
    seed: int | None = option(None, "Seed of requests that name none. Default: random.")
    debug: bool = option(False, "Check every invariant of the KV manager after each step. Slow.")

    def __post_init__(self) -> None:
        config_checks.check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the API process."""

    host: str = option("127.0.0.1", "Address to listen on. Anything but loopback exposes the server to the network.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    served_model_name: str | None = option(None, "Name of the model in the API. Default: the model's own name.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least severity that is logged.")
    on_crash: Literal["resume", "fail"] = option(
        "resume",
        "What becomes of open requests when the engine process ends unasked and is replaced. resume: they go on in the "
        "next one, with the tokens they would have had; their clients see a pause. fail: they end with an error.",
    )
    watchdog_seconds: float = option(
        60.0,
        "An engine that has work and finishes no step for so long is stuck: its stacks are logged, it is replaced. "
        "Must be longer than the longest step; less makes the pause shorter. SIGSTOP is seen sooner. 0: off.",
    )
    max_engine_restarts: int = option(
        5,
        "Engines in a row that may end with nothing done before the server gives up and exits. Raise it where requests "
        "may wait through an outage, lower it where something else restarts the server; 0: the first end is the last.",
    )

    def __post_init__(self) -> None:
        config_checks.check_server(self)


def cache_dir() -> Path:
    """Where pulled models are kept: $CHAIRLIFT_HOME, or chairlift in the user's cache folder."""
    home = os.environ.get("CHAIRLIFT_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift"


def hub_endpoint() -> str:
    """Where the Hugging Face hub, or one that stands in for it, answers."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def hub_offline() -> bool:
    """Whether the user forbids asking the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
