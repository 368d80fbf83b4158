"""Settings: what each may be, and which contradict each other (F1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig, parse_disk_swap, parse_tenant_weights
from chairlift.config_checks import never_preempts
from chairlift.errors import ConfigError

SWAP = {"swap_space": 1.0}
NO_CACHE = {"enable_prefix_caching": False}

CONFLICTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"priority_ageing": 5.0}, ("--priority-ageing", "--order fcfs", "--order priority")),
    ({"priority_ageing": 5.0, "order": "deadline"}, ("--priority-ageing", "--order deadline")),
    ({"tenant_weights": "a=2"}, ("--tenant-weights", "--fair-tenants")),
    ({"preemption_mode": "swap"}, ("--preemption-mode swap", "--swap-space 4", "--disk-swap")),
    ({"preemption_mode": "auto"}, ("--preemption-mode auto", "--swap-space 4", "--disk-swap")),
    ({"preemption_mode": "recompute"}, ("--preemption-mode recompute", "--swap-space", "--disk-swap", "leave it out")),
    ({"admission": "reserve", "max_preemptions": 3}, ("--max-preemptions", "--admission reserve", "optimistic")),
    ({"admission": "peak", "max_preemptions": 3}, ("--max-preemptions", "--admission peak", "optimistic")),
    ({"admission": "peak", "preemption_mode": "swap"} | SWAP, ("--preemption-mode", "--admission peak")),
    ({"pin_prefix": "f"} | NO_CACHE, ("--pin-prefix", "--no-enable-prefix-caching")),
    ({"order": "longest-prefix"} | NO_CACHE, ("--order longest-prefix", "--no-enable-prefix-caching", "fcfs")),
    (
        {"preemption_mode": "recompute"} | SWAP | NO_CACHE,
        ("--swap-space", "--preemption-mode recompute", "--no-enable-prefix-caching"),
    ),
    ({"admission": "reserve"} | SWAP | NO_CACHE, ("--swap-space", "--admission reserve", "--no-enable-prefix-caching")),
    (
        {"scheduler_policy": "static", "disk_swap": "f,1"} | NO_CACHE,
        ("--disk-swap", "static", "--no-enable-prefix-caching"),
    ),
    (
        {"kv_cache_memory": "1GiB", "gpu_memory_utilization": 0.5},
        ("--kv-cache-memory", "--gpu-memory-utilization"),
    ),
    *(
        ({"num_speculative_tokens": 4, name: value}, ("--num-speculative-tokens", given, instead))
        for name, value, given, instead in (
            ("async_scheduling", True, "--async-scheduling", "leave out one"),
            ("scheduler_policy", "static", "--scheduler-policy static", "chunked"),
            ("admission", "peak", "--admission peak", "reserve"),
        )
    ),
    ({"weights": "f32", "quantization": "int4"}, ("--weights f32", "--quantization int4", "give one")),
    *(
        ({"scheduler_policy": policy, "slo_itl": 50.0}, ("--slo-itl", f"--scheduler-policy {policy}", "chunked"))
        for policy in ("static", "continuous")
    ),
    *(
        ({"scheduler_policy": "static", name: value}, (f"--{name.replace('_', '-')}", "static", "chunked"))
        for name, value in (
            ("admission", "reserve"),
            ("order", "priority"),
            ("fair_tenants", True),
            ("max_preemptions", 1),
        )
    ),
    ({"scheduler_policy": "static", "preemption_mode": "swap"} | SWAP, ("--preemption-mode", "static")),
]


@pytest.mark.parametrize(("settings", "names"), CONFLICTS, ids=lambda value: str(value)[:60])
def test_settings_that_contradict_each_other(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    """F1: the error is one line that names both sides and something that works."""
    with pytest.raises(ConfigError) as error:
        EngineConfig(**settings)
    message = str(error.value)
    assert "\n" not in message
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    "settings",
    [
        {"order": "priority", "priority_ageing": 5},
        {"fair_tenants": True, "tenant_weights": "a=2,b=1"},
        {"preemption_mode": "swap", "disk_swap": "f,0.5"},
        {"preemption_mode": "recompute"} | SWAP,
        {"admission": "optimistic", "max_preemptions": 0},
        {"admission": "peak", "order": "priority", "max_preemptions": 1},
        {"admission": "reserve", "fair_tenants": True, "preemption_mode": "swap"} | SWAP,
        {"slo_itl": 50, "slo_ttft": 0.5},
        {"scheduler_policy": "mypkg.MyPolicy", "slo_itl": 50.0, "order": "deadline"},
        {"scheduler_policy": "mypkg.policies:MyPolicy"},
        {"scheduler_policy": "static", "max_batch_delay_ms": 5, "swap_space": 1},
        {"scheduler_policy": "continuous", "admission": "peak"},
        SWAP | NO_CACHE,
        {"weights": "auto", "quantization": "int8"},
        {"swap_space": 0, "max_batch_delay_ms": 0.0},
        {"num_speculative_tokens": 8, "admission": "reserve", "scheduler_policy": "continuous"},
        {"num_speculative_tokens": 0, "admission": "peak", "async_scheduling": True},
    ],
    ids=str,
)
def test_settings_that_agree(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("swap_space", (-1, 2**21, float("nan"), float("inf"), "4", None, True)),
        ("max_batch_delay_ms", (-0.1, 1e6, float("nan"), None, "1ms")),
        ("slo_ttft", (0, -1.0, float("nan"), float("inf"), 1e10, "1s", True)),
        ("slo_itl", (0, -1.0, float("nan"), "1s")),
        ("priority_ageing", (0.0, -1.0, float("nan"), "x")),
        ("max_preemptions", (-1, 2**17, 1.5, True, "3")),
        ("num_speculative_tokens", (-1, 65, 1.5, True, None, "4")),
        ("gpu_memory_utilization", (0, 0.0, 1.01, True)),
        ("order", ("fifo", None, 1)),
        ("admission", ("greedy", 1)),
        ("preemption_mode", ("move", 1)),
        ("fair_tenants", (1, None, "yes")),
        ("async_scheduling", (0, None)),
        ("kv_cache_dtype", ("fp8", None)),
        ("quantization", ("awq", "int3", 8)),
        ("pin_prefix", (1, Path("f"))),
        ("disk_swap", ("f", "f,", ",1", "f,x", "f,0", "f,-1", "f,nan", "f,inf", "f,1e9", "", "f\0,1", 5)),
        ("tenant_weights", ("", "a", "a=", "=1", "a=0", "a=-1", "a=nan", "a=inf", "a=1,", "a=1,a=2", 5)),
        ("scheduler_policy", ("", "fcfs", ".", "a.", ".a", "a..b", "a b.c", "a.1", "os.system()", 1)),
    ],
)
def test_values_that_none_may_be(name: str, values: tuple[object, ...]) -> None:
    """A7: whatever comes, the error names the flag, and shows the value if it is not too long."""
    needs: dict[str, Any] = {"fair_tenants": True} if name == "tenant_weights" else {}
    for value in values:
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} ") as error:
            EngineConfig(**needs | {name: value})
        assert len(str(error.value)) < 300


def test_the_range_of_a_number_says_whether_zero_is_in_it() -> None:
    with pytest.raises(ConfigError, match=r"--slo-itl must be a number above 0 and at most 1e\+09, got 0"):
        EngineConfig(slo_itl=0)
    with pytest.raises(ConfigError, match=r"--swap-space must be a number from 0 to 1e\+06, got -1"):
        EngineConfig(swap_space=-1)


def test_disk_swap() -> None:
    assert parse_disk_swap("/var/tmp/kv,8") == (Path("/var/tmp/kv"), 8 * 2**30)
    assert parse_disk_swap("a,b,0.5") == (Path("a,b"), 2**29)


def test_tenant_weights() -> None:
    assert parse_tenant_weights("alice=2, bob=0.5,a=b=1") == {"alice": 2.0, "bob": 0.5, "a=b": 1.0}
    assert parse_tenant_weights("least=1e-6,most=1e6") == {"least": 1e-6, "most": 1e6}


@pytest.mark.parametrize("part", ["a=1e-320", "a=9e-7", "a=1000001", "a=1e308"])
def test_a_weight_that_arithmetic_would_not_survive(part: str) -> None:
    """Tokens are divided by it: of 1e-320 they would be infinite, and all such tenants equal."""
    with pytest.raises(ConfigError, match=f"shares from 0.000001 to 1000000, .*, got '{part}'$"):
        parse_tenant_weights(f"b=1,{part}")


def test_who_never_preempts() -> None:
    """Priorities and fairness make somebody leave even where room for everybody is kept."""
    assert never_preempts(EngineConfig(scheduler_policy="static"))
    assert never_preempts(EngineConfig(admission="reserve")) and never_preempts(EngineConfig(admission="peak"))
    assert not never_preempts(EngineConfig())
    assert not never_preempts(EngineConfig(admission="reserve", order="priority"))
    assert not never_preempts(EngineConfig(admission="peak", fair_tenants=True))
