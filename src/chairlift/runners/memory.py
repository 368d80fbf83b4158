"""How much memory and how many processors there are, and how the memory is shared out before anything is allocated.

All sizes are bytes. Limits come from the machine and from the control group (v2 or v1) this process lives in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift import log
from chairlift.config import EngineConfig, parse_bytes
from chairlift.errors import ConfigError
from chairlift.log import short_bytes as show
from chairlift.runners.groups import KVGroups

DEFAULT_UTILIZATION = 0.9
DEFAULT_KV_LIMIT = 4 * 2**30
DEFAULT_CHUNK = 256
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_OF_SELF = Path("/proc/self/cgroup")
_GIB_DIGITS = 10**4
_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"
_log = log.get("memory")


def batch_tokens(config: EngineConfig, max_model_len: int) -> int:
    """Most tokens of one step, for the scheduler's budget and the runner's workspace alike.

    Raises ConfigError when a policy that computes whole prompts could not compute the longest one.
    """
    budget = config.max_num_batched_tokens
    if config.scheduler_policy not in ("continuous", "static"):
        return budget or max(DEFAULT_CHUNK, config.max_num_seqs)
    if budget is not None and budget < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is less than --max-model-len {max_model_len}, and --scheduler-policy "
            f"{config.scheduler_policy} computes a prompt in one step; give --max-num-batched-tokens {max_model_len}, "
            f"--max-model-len {budget}, or --scheduler-policy chunked"
        )
    return budget or max(max_model_len, config.max_num_seqs)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a runner reserves. ``free`` is the memory free at start, ``budget`` the part of it that may be used."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_rows: int
    weights: int
    kv_cache: int
    workspace: int
    swap_space: int
    free: int
    budget: int


def plan_memory(
    config: EngineConfig,
    *,
    max_positions: int,
    free: int,
    weights: int,
    groups: KVGroups,
    block_bytes: int,
    workspace: Callable[[int], int],
) -> MemoryPlan:
    """Divides the memory into weights, workspace, KV cache and swap space, and finds the context length this allows.

    ``block_bytes`` is the size of a block (of one group's layers), ``workspace(max_rows)`` that of the step's buffers.
    Raises ConfigError when it cannot work, naming the flags and a value that does.
    """
    wanted = config.max_model_len
    if wanted is not None and wanted > max_positions:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {max_positions} positions of this model; "
            f"give --max-model-len {max_positions} or less"
        )
    budget = check_weights(config, free, weights)
    num_host_blocks = _host_blocks(config, block_bytes)
    swap_space = num_host_blocks * block_bytes
    given = None if config.kv_cache_memory is None else parse_bytes(config.kv_cache_memory, "--kv-cache-memory")

    def rest(length: int) -> int:
        """Bytes left by weights and workspace when the context is this long."""
        return budget - weights - workspace(_rows(config, length))

    def needed(length: int) -> int:
        """Bytes of the KV blocks of a single sequence of this length."""
        return groups.blocks(length, config.block_size, min(_rows(config, length), length)) * block_bytes

    def pool(length: int) -> int:
        """Bytes for KV blocks when the context is this long; below 0 if not even the workspace fits."""
        most = rest(length) - swap_space
        if given is not None:
            return given if given <= most else min(most, 0)
        return min(most, DEFAULT_KV_LIMIT) if config.gpu_memory_utilization is None else most

    def fits(length: int) -> bool:
        return pool(length) >= needed(length)

    swappable = rest(wanted or 1) - max(given or 0, needed(wanted or 1))
    if 0 <= swappable < swap_space:
        raise ConfigError(_too_much_swap(config, budget, weights, swappable, block_bytes))
    longest = _largest(fits, max_positions)
    if longest == 0:
        raise ConfigError(_no_room(config, budget, weights, workspace(_rows(config, 1)), swap_space, needed(1)))
    if wanted is not None and wanted > longest:
        raise ConfigError(_too_long(config, wanted, longest, needed(wanted)))
    length = wanted or longest
    if wanted is None and length < max_positions:
        _log.warning(
            "the context is %d tokens, not the model's %d: the KV cache holds no longer request; raise %s",
            length,
            max_positions,
            "--gpu-memory-utilization" if config.gpu_memory_utilization is not None else "--kv-cache-memory",
        )
    most = config.max_num_seqs * needed(length) // block_bytes
    num_blocks = pool(length) // block_bytes
    if given is None:
        num_blocks = min(num_blocks, most)  # more could never be used at once
    max_rows = batch_tokens(config, length)
    return MemoryPlan(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=length,
        max_rows=max_rows,
        weights=weights,
        kv_cache=num_blocks * block_bytes,
        workspace=workspace(max_rows),
        swap_space=swap_space,
        free=free,
        budget=budget,
    )


def check_weights(config: EngineConfig, free: int, weights: int) -> int:
    """The bytes that may be used in all; ConfigError when the weights alone exceed them."""
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION
    budget = int(free * share)
    if weights >= budget:
        raise ConfigError(
            f"the weights take {show(weights)} and only {show(budget)} may be used ({share:g} of the {show(free)} "
            "free, --gpu-memory-utilization); free some memory, raise the container's limit, or use a smaller model"
        )
    return budget


def _host_blocks(config: EngineConfig, block_bytes: int) -> int:
    """KV blocks that the swap space holds."""
    count = int(config.swap_space * 2**30) // block_bytes
    if config.swap_space and not count:
        raise ConfigError(
            f"--swap-space {config.swap_space:g} is less than one KV block, which takes {show(block_bytes)}; "
            f"give --swap-space {_gib(block_bytes + 2**30 // _GIB_DIGITS - 1)} or more"
        )
    return count


def _rows(config: EngineConfig, length: int) -> int:
    """Rows to reserve while lengths are still being tried; unlike `batch_tokens` it does not judge the settings."""
    if config.scheduler_policy not in ("continuous", "static"):
        return batch_tokens(config, length)
    return config.max_num_batched_tokens or max(length, config.max_num_seqs)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest length from 1 to ``most`` that fits (what fits, fits shorter too); 0 when none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _no_room(config: EngineConfig, budget: int, weights: int, workspace: int, swap_space: int, least: int) -> str:
    """``least``: bytes of KV cache for a single token."""
    rest = max(0, budget - weights - workspace - swap_space)
    others = f"weights ({show(weights)})" + (f", swap space ({show(swap_space)})" if swap_space else "")
    if config.kv_cache_memory is None:
        return (
            f"no memory for the KV cache: one token takes {show(least)} in blocks, and {show(rest)} of the usable "
            f"{show(budget)} remains after {others} and workspace ({show(workspace)}); "
            "free some memory, or lower --block-size or --max-num-batched-tokens"
        )
    given = parse_bytes(config.kv_cache_memory, "--kv-cache-memory")
    if given < least:
        return (
            f"--kv-cache-memory {config.kv_cache_memory} is less than the KV blocks of one token, which take "
            f"{show(least)} with --block-size {config.block_size}; give --kv-cache-memory {_mib(least)} or more"
        )
    return (
        f"--kv-cache-memory {config.kv_cache_memory} does not fit: {show(rest)} of the usable {show(budget)} remains "
        f"after {others} and workspace ({show(workspace)}); "
        f"give --kv-cache-memory {rest // 2**20}MiB or less"
    )


def _too_much_swap(config: EngineConfig, budget: int, weights: int, most: int, block_bytes: int) -> str:
    """``most``: bytes that swap space may have beside the KV cache that was asked for."""
    gib = _gib(most)
    advice = f"give --swap-space {gib} or less" if float(gib) * 2**30 >= block_bytes else "leave --swap-space out"
    return (
        f"--swap-space {config.swap_space:g} does not fit: of the usable {show(budget)}, {show(most)} remain after "
        f"weights ({show(weights)}), workspace and KV cache; {advice}"
    )


def _too_long(config: EngineConfig, wanted: int, longest: int, needed: int) -> str:
    what = f"--kv-cache-memory {config.kv_cache_memory}" if config.kv_cache_memory is not None else "the memory for it"
    more = (
        f"give --kv-cache-memory {_mib(needed)} or more"
        if config.kv_cache_memory is not None or config.gpu_memory_utilization is None
        else "raise --gpu-memory-utilization"
    )
    return (
        f"--max-model-len {wanted} needs {show(needed)} of KV cache, and {what} holds {longest} tokens; "
        f"give --max-model-len {longest} or less (or leave it out to use what fits), or {more}"
    )


def _gib(size: int) -> str:
    """GiB as --swap-space takes them, rounded down."""
    return f"{size * _GIB_DIGITS // 2**30 / _GIB_DIGITS:.4f}"


def _mib(size: int) -> str:
    return f"{-(-size // 2**20)}MiB"


def available_memory(root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_OF_SELF) -> int:
    """Bytes this process may still take: what the machine has available, and no more than its control group allows."""
    import psutil

    available = int(psutil.virtual_memory().available)
    for folder in _cgroup_folders(root, membership, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= _UNLIMITED:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # File pages that nobody uses are dropped under pressure, so they count as free.
        available = min(available, limit - max(0, used - _inactive_file(folder)))
    return max(0, available)


def available_cpus(root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_OF_SELF) -> int:
    """Processors this process may use: its affinity mask, cut to the control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(root, membership, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota and period:
            count = min(count, quota // period)  # a part of a processor would only stall the others at a barrier
    return max(1, count)


def _cgroup_folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Folders whose limits hold for this process: its own group and all above it, v2 or v1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        folder = base / path.lstrip("/")
        yield from (base / part for part in (folder.relative_to(base), *folder.relative_to(base).parents))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _inactive_file(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """(quota, period) in microseconds, zeros when there is none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (0, 0) if quota == "max" else (int(quota), int(period))
    except (OSError, ValueError):
        pass
    quota_v1 = _number(folder / "cpu.cfs_quota_us") or 0
    return (quota_v1, _number(folder / "cpu.cfs_period_us") or 0) if quota_v1 > 0 else (0, 0)
