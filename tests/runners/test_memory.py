"""The division of memory, its errors, and the reading of control groups."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.runners import memory
from chairlift.runners.groups import KVGroups
from chairlift.runners.memory import available_cpus, available_memory, batch_tokens, plan_memory

MIB = 2**20
FULL = KVGroups(windows=(0,), layers=((0, 1),))
BLOCK = MIB  # one block of 16 tokens takes 1 MiB in these tests


def divide(
    config: EngineConfig, *, free: int = 1000 * MIB, max_positions: int = 4096, **given: Any
) -> memory.MemoryPlan:
    sizes: dict[str, Any] = {"weights": 100 * MIB, "block_bytes": BLOCK, "workspace": lambda rows: rows * 1024}
    sizes |= {"groups": FULL} | given
    return plan_memory(config, max_positions=max_positions, free=free, **sizes)


def test_shares_add_up() -> None:
    plan = divide(EngineConfig(max_num_seqs=32))
    assert plan.budget == 900 * MIB
    assert plan.max_rows == 256
    assert plan.workspace == 256 * 1024
    assert plan.kv_cache == plan.num_blocks * BLOCK
    assert plan.num_blocks == 799  # 900 - 100 - 0.5 MiB, in whole blocks
    assert plan.weights + plan.workspace + plan.kv_cache <= plan.budget
    assert plan.max_model_len == 4096


def test_no_more_than_all_sequences_can_use() -> None:
    plan = divide(EngineConfig(max_num_seqs=2, max_model_len=100))
    assert plan.num_blocks == 2 * 7


def test_default_limit_of_the_kv_cache() -> None:
    free = 100 * 2**30
    assert divide(EngineConfig(max_num_seqs=1000), free=free).kv_cache == 4 * 2**30
    whole = divide(EngineConfig(max_num_seqs=1000, gpu_memory_utilization=0.5), free=free)
    assert 49 * 2**30 < whole.kv_cache <= 50 * 2**30


def test_given_kv_cache_memory_is_used_in_whole_blocks() -> None:
    plan = divide(EngineConfig(kv_cache_memory="100.5MiB", max_num_seqs=4))
    assert plan.num_blocks == 100
    assert plan.max_model_len == 1600


def test_context_shrinks_to_the_pool() -> None:
    """F2: without --max-model-len the context is what fits."""
    assert divide(EngineConfig(), free=200 * MIB).max_model_len == 79 * 16


@pytest.mark.parametrize("share", [{"kv_cache_memory": "100MiB"}, {"gpu_memory_utilization": 0.201}])
def test_a_context_below_the_models_is_a_warning(
    share: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory._log, "handlers", [caplog.handler])
    monkeypatch.setattr(memory._log, "propagate", False)  # others may have set up the log of a process, or not
    length = divide(EngineConfig(**share)).max_model_len
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the context is {length} tokens, not the model's 4096: ")
    assert line.endswith(f"raise --{next(iter(share)).replace('_', '-')}")
    divide(EngineConfig(**share, max_model_len=length))
    divide(EngineConfig())
    assert len(caplog.records) == 1, "who asked for it, or has all, is not told"


def test_windows_leave_room_for_longer_contexts() -> None:
    """Layers with a window take as many blocks as it needs, however long the context; the rest of it needs one more."""
    groups = KVGroups(windows=(0, 64, 64, 64), layers=((0,), (1,), (2,), (3,)))
    config = EngineConfig(kv_cache_memory="100MiB", max_num_batched_tokens=32)
    windowed = divide(config, groups=groups)
    # 64 positions begin and end anywhere in 5 blocks, the chunk takes 2, and a step in flight keeps one more.
    assert windowed.max_model_len == (100 - 3 * 8) * 16
    every = KVGroups(windows=(0,) * 4, layers=groups.layers)
    assert divide(config, groups=every).max_model_len == 100 // 4 * 16
    with pytest.raises(ConfigError, match=r"needs 101\.0 MiB .*--max-model-len 1216 or less.*--kv-cache-memory 101MiB"):
        divide(replace(config, max_model_len=1217), groups=groups)
    assert divide(EngineConfig(max_num_seqs=2, max_model_len=1265), groups=groups).num_blocks == 2 * (80 + 3 * (6 + 16))


def swapped(gib: float, **given: Any) -> memory.MemoryPlan:
    return divide(EngineConfig(swap_space=gib, **given), free=1000 * MIB)


def test_swap_space_is_a_share_of_the_memory() -> None:
    plan = swapped(0.25, max_num_seqs=32)
    assert plan.num_host_blocks == 256
    assert plan.swap_space == 256 * BLOCK
    assert plan.num_blocks == 799 - 256
    assert plan.weights + plan.workspace + plan.kv_cache + plan.swap_space <= plan.budget
    assert swapped(0.0).num_host_blocks == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--swap-space 2 does not fit: .*give --swap-space"),
        ({"max_model_len": 4096}, "--swap-space 2 does not fit: .*give --swap-space"),
        ({"kv_cache_memory": "700MiB"}, "--swap-space 2 does not fit: .*give --swap-space"),
    ],
)
def test_swap_space_that_does_not_fit(given: dict[str, Any], message: str) -> None:
    """F2: the message gives a value that works."""
    with pytest.raises(ConfigError, match=message) as error:
        swapped(2.0, **given)
    assert swapped(float(str(error.value).split("give --swap-space ")[1].split()[0]), **given).num_host_blocks > 90


def test_swap_space_where_there_is_none_or_too_little() -> None:
    with pytest.raises(ConfigError, match=r"--swap-space 0\.1 does not fit: .*leave --swap-space out"):
        swapped(0.1, kv_cache_memory="799MiB")
    with pytest.raises(ConfigError, match=r"--swap-space 0\.0005 is less than one KV block") as error:
        swapped(0.0005)
    assert swapped(float(str(error.value).split("give --swap-space ")[1].split()[0])).num_host_blocks == 1


def test_an_error_that_is_not_about_swap_space() -> None:
    """The cache itself is too small for the context; with it, swap space would be no trouble."""
    with pytest.raises(ConfigError, match="--max-model-len 4096 needs"):
        swapped(0.1, kv_cache_memory="50MiB", max_model_len=4096)
    with pytest.raises(
        ConfigError, match=r"--kv-cache-memory 900MiB does not fit: .*swap space \(102.0 MiB\).* 697MiB"
    ):
        swapped(0.1, kv_cache_memory="900MiB")
    assert swapped(0.1, kv_cache_memory="697MiB").num_blocks == 697


def test_context_above_the_models_is_refused() -> None:
    """F1: both numbers and a value that works."""
    with pytest.raises(ConfigError, match=r"--max-model-len 5000 .* 4096 positions.* --max-model-len 4096"):
        divide(EngineConfig(max_model_len=5000))


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"kv_cache_memory": "50MiB"}, r"--kv-cache-memory 50MiB holds 800 tokens.*--kv-cache-memory 256MiB"),
        ({}, r"holds 1264 tokens.*--max-model-len 1264"),
        ({"gpu_memory_utilization": 0.8}, r"holds 944 tokens.*raise --gpu-memory-utilization"),
    ],
)
def test_context_above_the_pool_names_the_largest_that_fits(config: dict[str, Any], advice: str) -> None:
    """F2: the message gives the largest length that fits, and that length works."""
    with pytest.raises(ConfigError, match=advice) as error:
        divide(EngineConfig(max_model_len=4096, **config), free=200 * MIB)
    largest = int(str(error.value).split(" tokens;")[0].rsplit(" ", 1)[1])
    assert divide(EngineConfig(max_model_len=largest, **config), free=200 * MIB).max_model_len == largest
    with pytest.raises(ConfigError):
        divide(EngineConfig(max_model_len=largest + 1, **config), free=200 * MIB)


@pytest.mark.parametrize(
    ("config", "free", "message"),
    [
        ({}, 105, "the weights take 100.0 MiB and only 94.5 MiB may be used"),
        ({}, 112, "no memory for the KV cache: one token takes 1.0 MiB in blocks"),
        (
            {"kv_cache_memory": "1000"},
            1000,
            "--kv-cache-memory 1000 is less than the KV blocks of one token.* 1MiB or more",
        ),
        ({"kv_cache_memory": "900MiB"}, 1000, "--kv-cache-memory 900MiB does not fit: .* 799MiB or less"),
    ],
)
def test_too_little_memory(config: dict[str, Any], free: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        divide(EngineConfig(**config), free=free * MIB)


def test_workspace_of_whole_prompts_limits_the_context() -> None:
    """Policies without chunks need a row per token of the longest prompt, which takes memory from the KV cache."""
    plan = divide(EngineConfig(scheduler_policy="continuous"), workspace=lambda rows: rows * MIB)
    assert plan.max_rows == plan.max_model_len
    assert plan.workspace + plan.kv_cache + plan.weights <= plan.budget
    assert 700 < plan.max_model_len < 800


def test_batch_tokens() -> None:
    assert batch_tokens(EngineConfig(), 8192) == 256
    assert batch_tokens(EngineConfig(max_num_seqs=1000), 8192) == 1000
    assert batch_tokens(EngineConfig(max_num_batched_tokens=16), 8192) == 16
    assert batch_tokens(EngineConfig(scheduler_policy="static"), 8192) == 8192
    whole = EngineConfig(scheduler_policy="continuous", max_num_batched_tokens=100)
    assert batch_tokens(whole, 100) == 100
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 100 .*--max-model-len 101.*continuous"):
        batch_tokens(whole, 101)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_memory_of_a_v2_group_counts_the_parents(tmp_path: Path) -> None:
    """M7: the tightest limit on the way to the root holds; file pages out of use count as free."""
    member = tmp_path / "self"
    member.write_text("0::/pod/container\n")
    write(tmp_path / "fs/pod", memory__max=str(100 * MIB), memory__current=str(60 * MIB))
    write(tmp_path / "fs/pod/container", memory__max="max", memory__current=str(50 * MIB))
    write(tmp_path / "fs/pod", memory__stat=f"anon 1\ninactive_file {20 * MIB}\n")
    assert available_memory(tmp_path / "fs", member) == 60 * MIB


def test_memory_of_a_v1_group(tmp_path: Path) -> None:
    member = tmp_path / "self"
    member.write_text("5:cpu,cpuacct:/box\n4:memory:/box\n")
    write(tmp_path / "fs/memory/box", memory__limit_in_bytes=str(64 * MIB), memory__usage_in_bytes=str(MIB))
    write(tmp_path / "fs/memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="5")
    assert available_memory(tmp_path / "fs", member) == 63 * MIB


def test_memory_without_groups_is_the_machines(tmp_path: Path) -> None:
    available = available_memory(tmp_path / "nothing", tmp_path / "nothing")
    assert abs(available - psutil.virtual_memory().available) < 2**30


@pytest.mark.parametrize(
    ("quota", "expected"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("6400000 100000", None)]
)
def test_processors_of_a_v2_group(tmp_path: Path, quota: str, expected: int | None) -> None:
    """I3: the quota of the control group limits the threads."""
    member = tmp_path / "self"
    member.write_text("0::/\n")
    write(tmp_path / "fs", cpu__max=quota)
    own = len(os.sched_getaffinity(0))
    assert available_cpus(tmp_path / "fs", member) == min(own, expected or own)


def test_processors_of_a_v1_group(tmp_path: Path) -> None:
    member = tmp_path / "self"
    member.write_text("3:cpu:/box\n")
    write(tmp_path / "fs/cpu/box", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert available_cpus(tmp_path / "fs", member) == 1
