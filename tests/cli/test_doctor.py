"""`chairlift doctor`: what it says is what a runner finds, and what transformers finds of the same text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from chairlift import _native
from chairlift.models import KNOWN
from chairlift.quality import bundled_text
from chairlift.runners.memory import available_cpus


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chairlift.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def test_names_what_the_engine_uses_here() -> None:
    result = run()
    assert result.returncode == 0 and not result.stderr
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["chairlift"].strip().startswith(version("chairlift"))
    assert lines["instruction set"].strip().split(";")[0] == _native.available_isas()[0]
    assert lines["threads"].strip().startswith(f"{available_cpus()} of {os.cpu_count()} ")
    for package in ("numpy", "tokenizers"):
        assert f"{package} {version(package)}" in lines["libraries"]


def test_json_has_the_same() -> None:
    found = json.loads(run("--json").stdout)
    assert found["isas"] == _native.available_isas() and found["isa"] == found["isas"][0]
    assert 0 < found["memory_usable"] < found["memory_free"] <= found["memory"]
    assert found["problems"] == []
    assert set(found["models"]) == set(KNOWN)


def test_a_model_that_is_not_whole_is_not_here(tmp_path: Path) -> None:
    known = KNOWN["smollm2-135m"]
    file = tmp_path / "models" / known.file
    file.parent.mkdir()
    file.write_bytes(b"half")
    for size, seen in ((4, None), (known.size, str(file))):
        os.truncate(file, size)
        assert json.loads(run("--json", CHAIRLIFT_HOME=str(tmp_path)).stdout)["models"][known.name] == seen


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_broken_extension_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """As when it was built for another Python: the rest is still shown."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['chairlift._native'] = None\n")
    result = run(*arguments, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert result.returncode == 1
    assert "python" in result.stdout.lower()
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the C++ extension does not load (")


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a context of 256 tokens, whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("doctor") / "tiny"
    shutil.copytree(tiny_checkpoint("llama")[0], folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def torch_perplexity(model: Any, folder: Path) -> tuple[float, int]:
    """Of the text in windows of 255 tokens, and the number of tokens that count: all but the first of each."""
    import torch
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(bundled_text()).ids
    total, count = 0.0, 0
    for i in range(0, len(ids), 255):
        window = torch.tensor([ids[i : i + 255]])
        with torch.no_grad():
            logprobs = model(window).logits[0, :-1].double().log_softmax(-1)
        total -= float(logprobs.gather(1, window[0, 1:, None]).sum())
        count += window.shape[1] - 1
    return float(torch.tensor(total / count).exp()), count


def test_quality_is_the_perplexity_that_transformers_finds(
    tiny: Path, tiny_checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    expected, tokens = torch_perplexity(tiny_checkpoint("llama")[1], tiny)
    found = {}
    for name in ("int8", "int4"):
        result = run("--quality", "--json", "--model", str(tiny), "--quantization", name)
        assert result.returncode == 0 and not result.stderr, result.stderr
        quality = json.loads(result.stdout)["quality"]
        assert (quality["model"], quality["quantization"], quality["tokens"]) == (str(tiny), name, tokens)
        assert quality["perplexity_f32"] == pytest.approx(expected, rel=1e-5)
        change = 100 * (quality["perplexity"] / quality["perplexity_f32"] - 1)
        assert quality["difference_percent"] == pytest.approx(change)
        assert quality["seconds"] > 0 and quality["seconds_f32"] > 0
        found[name] = quality["perplexity"]
    assert len({*found.values(), expected}) == 3, "some of the three ran with the same weights"
    assert found["int8"] == pytest.approx(expected, rel=0.01)


def test_json_is_printed_when_the_quality_check_fails() -> None:
    result = run("--quality", "--json", "--model", "no-such-model")
    assert result.returncode == 1
    found = json.loads(result.stdout)
    assert found["isas"] == _native.available_isas() and "quality" not in found
    (problem,) = found["problems"]
    assert "no-such-model" in problem and problem in result.stderr


def test_quality_is_a_line_beside_the_others(tiny: Path) -> None:
    result = run("--quality", "--model", str(tiny))
    assert result.returncode == 0 and not result.stderr
    *others, last = result.stdout.splitlines()
    assert others and last.startswith("quality ")
    for part in (f"{tiny}: perplexity ", " as it runs, ", " in f32, ", " %; ", " tokens, ", " s and "):
        assert part in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quantization", "int8"), "--quantization has no effect without --quality; add it"),
        (("--model", "x"), "--model has no effect without --quality; add it"),
        (("--quality", "--model", "no-such-model"), "smollm2-135m"),
        (("--quality", "--quantization", "int4"), "--quantization int4 has no effect: "),
    ],
)
def test_options_that_cannot_work(arguments: tuple[str, ...], message: str, smollm2_path: Path) -> None:
    result = run(*arguments)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line
