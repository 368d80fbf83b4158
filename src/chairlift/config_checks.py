"""What `EngineConfig` and `ServerConfig` may hold: types, ranges, texts that have a form, and settings that contradict
each other.

Every error is a `ConfigError` of one line that names the settings and something that works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from chairlift.errors import ConfigError, show

if TYPE_CHECKING:
    from chairlift.config import EngineConfig, ServerConfig

# The greatest are beyond any sense, and small enough that no size computed from them leaves the C++ core's integers.
_WHOLE = {  # from the first to the second
    "max_model_len": (1, 2**27),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**24),
    "block_size": (1, 1024),
    "threads": (1, 1024),
    "seed": (0, 2**64 - 1),
    "max_preemptions": (0, 2**16),
    "num_speculative_tokens": (0, 64),
    "max_engine_restarts": (0, 2**16),
}
_REAL = {  # from 0, which switches it off, to this
    "swap_space": 1e6,
    "weight_cache": 1e6,
    "watchdog_seconds": 1e6,
    "max_batch_delay_ms": 1e5,
}
_REAL_ABOVE_0 = {  # above 0, at most this
    "gpu_memory_utilization": 1.0,
    "priority_ageing": 1e9,
    "slo_ttft": 1e9,
    "slo_itl": 1e9,
}


def check(config: EngineConfig) -> None:
    """Raises ConfigError for a setting that cannot work, alone or with the others, or that would have no effect."""
    check_values(config)
    for parse, value in _texts(config):
        if value is not None:
            parse(value)
    for problem in _conflicts(config):
        raise ConfigError(problem)


def check_values(config: EngineConfig | ServerConfig) -> None:
    """Every field has the type it says, or is None where that is its default; numbers are in their range."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        wanted = _expected(name, hint, value)
        if wanted is not None and not (value is None and type(None) in get_args(hint)):
            raise ConfigError(f"{flag(name)} must be {wanted}, got {show(value)}")


def check_server(config: ServerConfig) -> None:
    """Raises ConfigError for a setting that cannot work, alone or with the others, or that would have no effect."""
    check_values(config)
    if config.on_crash != "resume" and not config.max_engine_restarts:
        raise ConfigError(
            "--on-crash fail has no effect with --max-engine-restarts 0: there is no next engine; drop one of them"
        )


def flag(name: str) -> str:
    """A field as the command line spells it."""
    return "--" + name.replace("_", "-")


def _expected(name: str, hint: Any, value: object) -> str | None:
    """None if the value is fine, else what it must be."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    choices = [choice for part in (hint, *get_args(hint)) if get_origin(part) is Literal for choice in get_args(part)]
    if name in _WHOLE:
        least, most = _WHOLE[name]
        good, wanted = number and isinstance(value, int) and least <= value <= most, "a whole number from {} to {}"
        wanted = wanted.format(least, most)
    elif name in _REAL:
        good = number and 0 <= value <= _REAL[name]  # type: ignore[operator]
        wanted = f"a number from 0 to {_REAL[name]:g}"
    elif name in _REAL_ABOVE_0:
        good = number and 0 < value <= _REAL_ABOVE_0[name]  # type: ignore[operator]
        wanted = f"a number above 0 and at most {_REAL_ABOVE_0[name]:g}"
    elif choices:
        good, wanted = value in choices, " or ".join(choices)
    else:
        kind = (get_args(hint) or (hint,))[0]
        good, wanted = isinstance(value, kind), f"of type {kind.__name__}"
    return None if good else wanted


# -- texts that have a form


def _texts(config: EngineConfig) -> Iterator[tuple[Callable[[str], object], str | None]]:
    yield lambda text: parse_bytes(text, "--kv-cache-memory"), config.kv_cache_memory
    yield parse_disk_swap, config.disk_swap
    yield _check_weights, config.tenant_weights
    yield _check_policy, config.scheduler_policy


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


def parse_disk_swap(text: str) -> tuple[Path, int]:
    """The file and the bytes of "/var/tmp/chairlift.kv,8" (GiB). A comma in the path is fine: the last one counts."""
    path, _, size = text.rpartition(",")
    try:
        gib = float(size)
    except ValueError:
        gib = 0.0
    if not path or not 0 < gib <= 1e6 or "\0" in path:
        raise ConfigError(
            "--disk-swap must be a file and its greatest size in GiB, such as /var/tmp/chairlift.kv,8, "
            f"got {show(text)}"
        )
    return Path(path), int(gib * 2**30)


_LEAST_WEIGHT, _MOST_WEIGHT = 1e-6, 1e6  # a tenant's tokens are divided by it, and added up: that must stay exact


def parse_tenant_weights(text: str) -> dict[str, float]:
    """The shares of "alice=2,bob=1", by tenant."""
    weights: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, share = part.strip().rpartition("=")
        try:
            weight = float(share)
        except ValueError:
            weight = 0.0
        if not name or not _LEAST_WEIGHT <= weight <= _MOST_WEIGHT:
            raise ConfigError(
                f"--tenant-weights must be names with shares from {_LEAST_WEIGHT:f} to {_MOST_WEIGHT:.0f}, such as "
                f"alice=2,bob=1, got {show(part)}"
            )
        if name in weights:
            raise ConfigError(f"--tenant-weights names {show(name)} twice; give it one share")
        weights[name] = weight
    return weights


def _check_weights(text: str) -> None:
    if not parse_tenant_weights(text):
        raise ConfigError("--tenant-weights names nobody; leave it out, or give shares such as alice=2,bob=1")


POLICIES = ("chunked", "continuous", "static")


def _check_policy(name: str) -> None:
    """Of a class by its import path only the form is checked here; the engine process imports it."""
    parts = name.replace(":", ".").split(".")
    if name not in POLICIES and not (len(parts) > 1 and all(part.isidentifier() for part in parts)):
        raise ConfigError(
            f"--scheduler-policy must be {', '.join(POLICIES)}, or the import path of a class such as mypkg.MyPolicy, "
            f"got {show(name)}"
        )


# -- settings that contradict each other


def _conflicts(config: EngineConfig) -> Iterator[str]:
    """What is wrong with the settings together: each line names both sides and what to do."""
    yield from _memory_conflicts(config)
    yield from _weight_conflicts(config)
    yield from _static_conflicts(config)
    yield from _order_conflicts(config)
    yield from _preemption_conflicts(config)
    yield from _cache_conflicts(config)
    yield from _speculation_conflicts(config)


def _memory_conflicts(config: EngineConfig) -> Iterator[str]:
    if config.gpu_memory_utilization is not None and config.kv_cache_memory is not None:
        yield "--gpu-memory-utilization and --kv-cache-memory both set the size of the KV cache; give one of them"


def _weight_conflicts(config: EngineConfig) -> Iterator[str]:
    if config.weights == "f32" and config.quantization is not None:
        yield f"--weights f32 and --quantization {config.quantization} exclude each other; give one of them"


def _static_conflicts(config: EngineConfig) -> Iterator[str]:
    if config.scheduler_policy == "static":
        chosen = {
            "admission": (config.admission is not None, "which always reserves"),
            "order": (config.order != "fcfs", "which takes requests as they come"),
            "fair_tenants": (config.fair_tenants, "which takes requests as they come"),
            "max_preemptions": (config.max_preemptions is not None, "which never preempts"),
            "preemption_mode": (config.preemption_mode is not None, "which never preempts"),
        }
        for name, (given, why) in chosen.items():
            if given:
                yield f"{flag(name)} has no effect with --scheduler-policy static, {why}; leave it out, or use chunked"
    if config.slo_itl is not None and config.scheduler_policy in ("static", "continuous"):
        yield (
            f"--slo-itl has no effect with --scheduler-policy {config.scheduler_policy}, which computes whole prompts; "
            "use --scheduler-policy chunked"
        )


def _order_conflicts(config: EngineConfig) -> Iterator[str]:
    if config.priority_ageing is not None and config.order != "priority":
        yield f"--priority-ageing has no effect with --order {config.order}; use --order priority, or leave it out"
    if config.tenant_weights is not None and not config.fair_tenants:
        yield "--tenant-weights has no effect without --fair-tenants; add it"


def _preemption_conflicts(config: EngineConfig) -> Iterator[str]:
    gate = f"--admission {config.admission}"
    if never_preempts(config):
        for name in ("max_preemptions", "preemption_mode"):
            if getattr(config, name) is not None:
                yield f"{flag(name)} has no effect with {gate}, which never preempts; leave it out, or use optimistic"
    if config.preemption_mode is not None and not swaps(config):
        way = "leave it out" if config.preemption_mode == "recompute" else "add one of them, e.g. --swap-space 4"
        yield (
            f"--preemption-mode {config.preemption_mode} has no effect without --swap-space or --disk-swap: preempted "
            f"requests are then always recomputed; {way}"
        )
    if swaps(config) and not config.enable_prefix_caching:
        given = "--swap-space" if config.swap_space else "--disk-swap"
        if never_preempts(config):
            why = f"{gate}, which never preempts," if config.scheduler_policy != "static" else "static batches"
            yield f"{given} keeps nothing with {why} and --no-enable-prefix-caching; leave out one of them"
        elif config.preemption_mode == "recompute":
            yield (
                f"{given} keeps nothing with --preemption-mode recompute and --no-enable-prefix-caching; "
                "use --preemption-mode auto"
            )


def _cache_conflicts(config: EngineConfig) -> Iterator[str]:
    if config.enable_prefix_caching:
        return
    if config.pin_prefix is not None:
        yield "--pin-prefix has no effect with --no-enable-prefix-caching; leave out one of them"
    if config.order == "longest-prefix":
        yield "--order longest-prefix has no effect with --no-enable-prefix-caching; use --order fcfs"


def _speculation_conflicts(config: EngineConfig) -> Iterator[str]:
    if not config.num_speculative_tokens:
        return
    conflicts = (
        (
            config.async_scheduling,
            "--async-scheduling",
            "how far a step comes must be known before the next is planned",
        ),
        (config.scheduler_policy == "static", "--scheduler-policy static", "a batch goes in step; use chunked"),
        (config.admission == "peak", "--admission peak", "it foresees one token a step for each; use reserve"),
    )
    for given, what, why in conflicts:
        if given:
            yield f"--num-speculative-tokens does not go with {what}: {why}, or leave out one of them"


def swaps(config: EngineConfig) -> bool:
    """Whether there is room outside the device for KV."""
    return config.swap_space > 0 or config.disk_swap is not None


def never_preempts(config: EngineConfig) -> bool:
    """Whether whoever boards is certain to stay: room for all of it is kept, and nobody else's right goes before."""
    if config.scheduler_policy == "static":
        return True
    return config.admission in ("reserve", "peak") and config.order != "priority" and not config.fair_tenants
