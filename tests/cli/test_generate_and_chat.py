"""`chairlift generate` and `chairlift chat` as a person runs them, on the real model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from chairlift import LLM, SamplingParams


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chairlift.cli", *arguments, "--kv-cache-memory", "100MiB"]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=300, env=os.environ | {"TERM": "dumb"}
    )


def test_generate_continues_a_prompt(smollm2_path: Path) -> None:
    arguments = ("generate", "The capital of France is", "--model", str(smollm2_path), "--max-tokens", "8")
    greedy = run(*arguments, "--temperature", "0")
    assert greedy.returncode == 0, greedy.stderr
    assert "Paris" in greedy.stdout
    seeded = [run(*arguments, "--temperature", "1.5", "--sampling-seed", "7").stdout for _ in range(2)]
    assert seeded[0] == seeded[1] != greedy.stdout


def test_generate_reads_standard_input(smollm2_path: Path) -> None:
    result = run(
        "generate", "-", "--model", str(smollm2_path), "--max-tokens", "4", "--temperature", "0", stdin="1, 2, 3,"
    )
    assert result.returncode == 0, result.stderr
    assert "4" in result.stdout


def test_a_bad_sampling_option_is_one_line(smollm2_path: Path) -> None:
    result = run("generate", "x", "--model", str(smollm2_path), "--temperature", "9")
    assert result.returncode == 1
    assert result.stderr == "error: temperature must be a number from 0 to 2, got 9.0\n"


def test_chat_keeps_the_conversation(smollm2_path: Path) -> None:
    """Each answer is the one that the whole conversation so far gives."""
    questions = ["Name a colour.", "Why that one?"]
    result = run(
        "chat", str(smollm2_path), "--temperature", "0", "--max-tokens", "24", stdin="\n".join(questions) + "\n"
    )
    assert result.returncode == 0, result.stderr
    llm = LLM(smollm2_path, kv_cache_memory="100MiB")
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
    assert result.stdout == "".join(message["content"] + "\n" for message in messages if message["role"] == "assistant")


def test_chat_forgets_its_oldest_turns_rather_than_end(smollm2_path: Path) -> None:
    """A long conversation outgrows the context; it goes on, and only a question that is too long alone is refused."""
    questions = ["Tell me of the sea. " * 6] * 4
    result = run(
        "chat", str(smollm2_path), "--max-model-len", "200", "--max-tokens", "20", stdin="\n".join(questions) + "\n"
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 4
    result = run("chat", str(smollm2_path), "--max-model-len", "200", stdin="sea " * 300 + "\n")
    assert result.returncode == 1
    assert result.stderr.startswith("error: the prompt has ")


def test_chat_needs_a_model_made_for_it(gemma3_path: Path) -> None:
    result = run("chat", str(gemma3_path), stdin="hello\n")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and "chairlift generate" in result.stderr
    assert result.stderr.count("\n") == 1
