"""Matrix products of every weight format against the machine's own limits, measured in the same run.

    python benchmarks/kernels.py [--threads N] [--isa NAME] [--out 1536] [--inner 576] [--seconds 0.5] [--json FILE]

Prints G multiply-adds/s of [m x inner] x [inner x out] for m = 1, 4, 8, 32, 128. For m = 1 the weights come from
memory, not from a cache, and the rate at which they are read is printed as well. Limits are those of register loops:
int8 of vpmaddubsw and a sum of 16 bits, signed of bytes with signs and sums of 32 bits, as Q8_0 needs them where there
is no VNNI. Figures are the best of several rounds: on a busy machine still too low. Needs CMake, a C++ compiler and
nanobind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks"
BATCHES = (1, 4, 8, 32, 128)


def build(program: str = "kernel_bench") -> Path:
    """Compiles the measuring program (a minute the first time) and returns its path."""
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    configure: list[str | Path] = ["cmake", "-S", ROOT, "-B", BUILD, *options]
    compile_: list[str | Path] = ["cmake", "--build", BUILD, "--target", program, "--parallel"]
    for command in (configure, compile_):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return BUILD / program


def measure(isa: str, threads: int, out: int, inner: int, seconds: float) -> dict[str, dict[str, float | str]]:
    """Tables by name: "run", "limit" (stream: bytes/s, else multiply-adds/s) and each type (by batch size)."""
    command: list[str | Path] = [build(), isa, str(threads), str(out), str(inner), str(seconds)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    results: dict[str, dict[str, float | str]] = {}
    for name, key, value in (line.split() for line in lines):
        table = results.setdefault(name, {})
        if name == "limit":  # measured before and after: the better one
            table[key] = max(float(value), float(table.get(key, 0)))
        else:
            table[key] = value if key == "isa" else float(value)
    return results


def report(results: dict[str, dict[str, float | str]]) -> str:
    limit = {key: float(value) / 1e9 for key, value in results["limit"].items()}
    lines = [
        f"instruction set {results['run']['isa']}, barrier {float(results['run']['barrier']) * 1e6:.2f} us",
        "limits: "
        + "".join(
            f"{key} {limit[key]:.0f} G multiply-adds/s, " for key in ("int8", "signed", "vnni", "float") if key in limit
        )
        + f"streaming {limit['stream']:.1f} GB/s",
        "",
        f"{'':6}" + "".join(f"{f'm={m}':>8}" for m in BATCHES) + f"{'of limit':>10}{'m=1 GB/s':>10}{'of limit':>10}",
    ]
    for name, table in results.items():
        if name in ("run", "limit"):
            continue
        speeds = [float(table[str(m)]) / 1e9 for m in BATCHES]
        peak = limit.get("int8" if name.startswith("q") else "float")
        # Bytes per multiply-add of a single row: those of the matrix over its weights.
        streamed = speeds[0] * float(table["bytes"]) / float(table["weights"])
        share = f"{speeds[-1] / peak:10.0%}" if peak else f"{'-':>10}"
        lines.append(
            f"{name:6}" + "".join(f"{speed:8.1f}" for speed in speeds) + share
            + f"{streamed:10.1f}{streamed / limit['stream']:10.0%}"
        )  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--out", type=int, default=1536, help="outputs of the weight matrix")
    parser.add_argument("--inner", type=int, default=576, help="inputs, a multiple of 32 (K types: rounded up to 256s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument("--json", type=Path, help="write the raw figures here as well")
    args = parser.parse_args()
    results = measure(args.isa, args.threads, args.out, args.inner, args.seconds)
    print(report(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
