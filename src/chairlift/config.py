"""Settings, as frozen dataclasses. The command line is derived from these fields: name, default, type and help."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from chairlift.errors import ConfigError, show

DEFAULT_MODEL = "smollm2-135m"

# The greatest are beyond any sense, and small enough that no size computed from them leaves the C++ core's integers.
_RANGES = {
    "max_model_len": (1, 2**27),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**24),
    "block_size": (1, 1024),
    "threads": (1, 1024),
    "seed": (0, 2**64 - 1),
}


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
        "running requests more. Default: 512 when chunked, else max-model-len.",
    )
    scheduler_policy: Literal["chunked", "continuous", "static"] = option(
        "chunked",
        "chunked: prompts are computed in pieces beside running requests. continuous: whole prompts first, then "
        "decodes. static: a batch boards together and leaves together (the baseline, for comparison only).",
    )
    admission: Literal["optimistic", "reserve"] | None = option(
        None,
        "optimistic (default): board while blocks last, preempt if they run out. reserve: board only with room for the "
        "request's greatest length; never preempts, runs fewer at once.",
    )
    block_size: int = option(16, "Tokens per KV block. Smaller wastes less memory, larger costs less bookkeeping.")
    kv_cache_memory: str | None = option(
        None, "Memory for the KV cache, e.g. 512MiB or 2GiB. Default: a share of what is free, at most 4GiB on a CPU."
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's memory for everything. On a CPU: of the memory free at start and allowed by the cgroup. "
        "Default 0.9. Not together with kv-cache-memory.",
    )
    kv_cache_dtype: Literal["auto", "f16", "f32"] = option("auto", "auto is f16. f32 doubles the memory of the cache.")
    enable_prefix_caching: bool = option(True, "Reuse the KV of equal prompt beginnings. Costs next to nothing.")
    weights: Literal["auto", "f32"] = option(
        "auto", "auto keeps the weights as the file has them. f32 dequantises them: slow, large, for checking."
    )
    threads: int | None = option(None, "Threads that compute. Default: the processors this process may use.")
    isa: str = option("auto", "Instruction set of the kernels: auto, avx2 or portable.")
    seed: int | None = option(None, "Seed of requests that name none. Default: random.")
    debug: bool = option(False, "Check every invariant of the KV manager after each step. Slow.")

    def __post_init__(self) -> None:
        _check_values(self)
        if self.admission is not None and self.scheduler_policy == "static":
            raise ConfigError("--admission has no effect with --scheduler-policy static, which always reserves")
        if self.gpu_memory_utilization is not None:
            if not 0.0 < self.gpu_memory_utilization <= 1.0:
                raise ConfigError(
                    f"--gpu-memory-utilization must be above 0 and at most 1, got {self.gpu_memory_utilization:g}"
                )
            if self.kv_cache_memory is not None:
                raise ConfigError(
                    "--gpu-memory-utilization and --kv-cache-memory both set the size of the KV cache; give one of them"
                )
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "--kv-cache-memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the API process."""

    host: str = option("127.0.0.1", "Address to listen on. Anything but loopback exposes the server to the network.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    served_model_name: str | None = option(None, "Name of the model in the API. Default: the model's own name.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least severity that is logged.")


def _check_values(config: EngineConfig) -> None:
    """Every field has the type it says, or is None where that is its default; whole numbers are in their range."""
    for name, hint in get_type_hints(EngineConfig).items():
        value = getattr(config, name)
        choices = [
            choice for part in (hint, *get_args(hint)) if get_origin(part) is Literal for choice in get_args(part)
        ]
        if name in _RANGES:
            least, most = _RANGES[name]
            good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            wanted = f"a whole number from {least} to {most}"
        elif choices:
            good, wanted = value in choices, " or ".join(choices)
        else:
            types = get_args(hint) or (hint,)
            good = isinstance(value, (*types, int) if float in types else types)
            wanted = f"of type {types[0].__name__}"
        if not good and not (value is None and type(None) in get_args(hint)):
            raise ConfigError(f"{_flag(name)} must be {wanted}, got {show(value)}")


_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of "512MiB", "2GiB", "2g" or "1048576" (all units are powers of 1024)."""
    cleaned = text.strip().lower()
    digits = cleaned.rstrip("kmgtib ")
    unit = cleaned[len(digits) :].strip().removesuffix("b").removesuffix("i")
    try:
        value = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        raise ConfigError(f"{flag} must be a size such as 512MiB or 2GiB, got {text!r}") from None
    if not 0 < value < 2**62:
        raise ConfigError(f"{flag} must be a size above 0 and below 2^62 bytes, got {text!r}")
    return int(value)


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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
