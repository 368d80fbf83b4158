"""Attention of one KV head with three query heads of 64 numbers, by the type of the cache.

    python benchmarks/attention.py [--threads N] [--isa NAME] [--positions 1000] [--seconds 0.5]

Prints microseconds a head, with all threads at work: of a decode with its keys and values in the caches, of one with
them in memory, and of 32 rows of a prompt. The best of several rounds. Needs CMake, a C++ compiler and nanobind, and
5 GiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess

from kernels import build

CASES = ("cached", "memory", "prompt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    args = parser.parse_args()
    command = [build("attention_bench"), args.isa, str(args.threads), str(args.positions), str(args.seconds)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    _, _, isa = lines[0].split()
    figures = {(kv, case): float(value) for kv, case, value in map(str.split, lines[1:])}
    print(f"instruction set {isa}, {args.positions} positions, microseconds a head")
    print(f"{'':6}" + "".join(f"{case:>10}" for case in CASES))
    for kv in dict.fromkeys(kv for kv, _ in figures):
        print(f"{kv:6}" + "".join(f"{figures[kv, case]:10.1f}" for case in CASES))


if __name__ == "__main__":
    main()
