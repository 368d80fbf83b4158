"""Options derived from dataclasses, and the errors that a person at the command line sees."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from chairlift.cli.options import FOREIGN, refuse_foreign
from chairlift.config import EngineConfig, ServerConfig, parse_bytes
from chairlift.errors import ConfigError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chairlift.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
    )


def test_every_setting_is_an_option_with_help() -> None:
    """I5: each option's help says what it costs and when to change it."""
    shown = run("serve", "--help").stdout
    for config in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config):
            assert len(field.metadata["help"]) > 20
            if field.name != "model":
                assert f"--{field.name.replace('_', '-')}" in shown


def test_the_model_is_an_argument_not_an_option() -> None:
    result = run("serve", "--model", "x")
    assert result.returncode == 2
    assert "--model" in result.stderr


@pytest.mark.parametrize("flag", sorted(FOREIGN))
def test_options_of_other_engines_are_errors_that_say_what_to_do(flag: str) -> None:
    """F4, and no flag without effect is accepted in silence."""
    with pytest.raises(ConfigError, match=flag):
        refuse_foreign(["serve", "m.gguf", f"{flag}=2"])


def test_a_foreign_option_ends_in_one_line_and_exit_code_1() -> None:
    result = run("serve", "--tensor-parallel-size", "2")
    assert result.returncode == 1
    assert result.stderr.startswith("error: --tensor-parallel-size has no effect here")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ("--gpu-memory-utilization", "0.5", "--kv-cache-memory", "1GiB"),
            ("gpu-memory-utilization", "kv-cache-memory"),
        ),
        (("--gpu-memory-utilization", "1.5"), ("gpu-memory-utilization", "1.5")),
        (("--kv-cache-memory", "lots"), ("kv-cache-memory", "'lots'")),
        (("--max-num-seqs", "0"), ("max-num-seqs", "0")),
        (("--block-size", "100000"), ("block-size", "1024")),
        (("--quantization", "int4", "--weights", "f32"), ("--quantization int4", "--weights f32")),
    ],
)
def test_settings_that_cannot_work_name_themselves(arguments: tuple[str, ...], names: tuple[str, ...]) -> None:
    """F1."""
    result = run("serve", *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for name in names:
        assert name in result.stderr


def test_an_unknown_model_is_one_line_that_names_the_known_ones() -> None:
    for command in (("generate", "hello", "--model", "no-such-model"), ("serve", "no-such-model"), ("pull", "no-such")):
        result = run(*command)
        assert result.returncode == 1, result.stderr
        assert result.stderr.startswith("error: ") and "smollm2-135m" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 512 << 20), ("2GiB", 2 << 30), ("2g", 2 << 30), ("1.5 GB", 3 << 29), ("4096", 4096), ("1k", 1024)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--flag") == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "1e400", "nan", "inf", "5 parsecs", "1GiBMiB", "1gg"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--flag"):
        parse_bytes(text, "--flag")


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "threads"])
@pytest.mark.parametrize("value", [-1, 0, 2**31, 2**70])
def test_sizes_out_of_range(name: str, value: int) -> None:
    """Refused with the range, before they reach integers of 32 bits."""
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be a whole number from 1 to "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("max_model_len", "long"),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", None),
        pytest.param("max_num_seqs", 10**5000, id="huge"),
        ("block_size", True),
        ("kv_cache_memory", 16 << 20),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", float("nan")),
        ("enable_prefix_caching", 1),
        ("weights", "q2"),
        ("scheduler_policy", None),
        ("isa", 512),
    ],
)
def test_settings_of_the_wrong_kind(name: str, value: object) -> None:
    """From Python nothing but this checks them; an engine must not start with a setting that kills it later (A7)."""
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be "):
        EngineConfig(**{name: value})


def test_an_admission_gate_has_no_effect_on_static_batches() -> None:
    with pytest.raises(ConfigError, match="--admission has no effect with --scheduler-policy static"):
        EngineConfig(scheduler_policy="static", admission="reserve")
