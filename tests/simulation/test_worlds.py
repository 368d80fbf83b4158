"""Deterministic simulation: seeded random worlds through the real scheduler and engine, checked after every step.

A world is an engine's settings, what its clients do and when, and what goes wrong; see `worlds.draw`. As a command:

    python tests/simulation/test_worlds.py SEED ...                 runs these worlds
    python tests/simulation/test_worlds.py --shrink SEED            prints the smallest world that fails like this one
    python tests/simulation/test_worlds.py --steps 10000000 [--processes 2] [--first-seed 0] [--check-every 1]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path

import pytest

from chairlift.core.plan import Output
from chairlift.core.pool import BlockPool
from chairlift.core.request import FinishReason
from chairlift.core.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports this file by its path

from worlds.draw import draw_world
from worlds.run import run
from worlds.shrink import failure, shrink

NUM_STEPS = 200_000

AT_LEAST = {
    **dict.fromkeys(("forks", "chunks", "held rows", "padding", "COPY", "SWAP_OUT", "SWAP_IN", "prefix hits"), 1000),
    **dict.fromkeys(("preempted", "swapped out", "swapped in", "recomputed, no room to swap"), 100),
    **dict.fromkeys(("failed steps", "damaged blocks", "ended by failures", "ended by bad logits"), 50),
    **dict.fromkeys(
        ("abort waiting", "abort running", "abort while a step is in flight", "abort of an unknown id"), 200
    ),
    **dict.fromkeys(("abort preempted", "abort between chunks", "abort before the fork", "abort of one beam"), 20),
    **dict.fromkeys(("abort of a held row", "abort of a search"), 10),
    "abort of what is swapped out": 4,
    **dict.fromkeys(("id used again", "id taken over", "duplicate of a live id"), 200),
    "id taken over from a step in flight": 50,
    **dict.fromkeys(("clock back", "clock forward"), 100),
    **dict.fromkeys((f"ended by {reason.value}" for reason in FinishReason), 1000),
    **dict.fromkeys(("hopeless", "samples done", "searches done"), 500),
    **dict.fromkeys(("questions", "lives told"), 500),
    **dict.fromkeys(("drafts", "accepted drafts"), 1000),
    **dict.fromkeys(("restarts", "pinned prefixes"), 20),
    **dict.fromkeys(("refused: n is", "refused: the request needs", "refused: static batching cannot"), 100),
    **dict.fromkeys(("refused: the prompt has", "refused: the prompt is"), 50),
    **dict.fromkeys(
        (f"waits for {what}" for what in ("slots", "tokens", "blocks", "gate", "slo", "delay", "batch")), 300
    ),
    **dict.fromkeys((f"[policy {name}]" for name in ("static", "continuous", "chunked")), 50),
    **dict.fromkeys(
        (
            f"[policy {name}, admission {gate}]"
            for name in ("continuous", "chunked")
            for gate in ("optimistic", "reserve", "peak")
        ),
        15,
    ),
    **dict.fromkeys(
        (f"[order {name}]" for name in ("fcfs", "priority", "shortest-prefill", "deadline", "longest-prefix")), 30
    ),
    **dict.fromkeys((f"[fair {how}]" for how in ("False", "True", "by weights")), 30),
    **dict.fromkeys((f"[mode {mode}]" for mode in ("auto", "swap", "recompute", "recompute only")), 30),
    **dict.fromkeys((f"[host {host}, disk {disk}]" for host in (False, True) for disk in (False, True)), 30),
    **dict.fromkeys((f"[windows {windows}]" for windows in ((0,), (5,), (0, 3, 3), (0, 8, 1))), 30),
    **dict.fromkeys((f"[max_preemptions {most}]" for most in (0, 1, 3, 100)), 30),
    **dict.fromkeys(
        (f"[{name} {on}]" for name in ("caching", "slo", "delay", "faults", "drafts") for on in (False, True)), 30
    ),
    **dict.fromkeys((f"[depth {depth}]" for depth in (1, 2)), 100),
}
"""What must have happened in so many steps, and how often at least."""


def test_random_worlds() -> None:
    """DESIGN 10.2; C1, C2, C3, C6, C10, M1, M2, M3, M5, M6, M12, S4, S9, S10, O3: whatever happens, every request ends
    once and as it must, with the tokens it would get alone; no step is in vain, and nothing is left behind."""
    total: Counter[str] = Counter()
    steps = 0
    for seed, done, coverage, error in campaign(0, 1, 1):
        if error:
            pytest.fail(f"seed {seed}: {error}\nreplay: python tests/simulation/test_worlds.py {seed}")
        total.update(coverage)
        steps += done
        if steps >= NUM_STEPS:
            break
    missing = {what: total[what] for what, least in AT_LEAST.items() if total[what] < least}
    assert not missing, f"the worlds did not reach enough of: {missing}"


def test_a_seed_is_a_world_in_every_process() -> None:
    """A failure that a seed shows can be shown again: no order of a hash table has a say."""
    command = [sys.executable, __file__, "0", "1", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "77"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for seed in range(3):
        outcome = run(draw_world(seed))
        assert f"seed {seed}: {outcome.num_steps} steps, fingerprint {outcome.fingerprint:x}\n" in told


def nothing(*args: object) -> list[Output]:
    return []


def only_counts(pool: BlockPool, block: int) -> None:
    """Drops a block and never frees it."""
    if pool.refs(block) > 1:
        pool._refs[block] -= 1


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [(Scheduler, "abort", nothing), (Scheduler, "expire", nothing), (BlockPool, "drop", only_counts)],
)
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, where: type, name: str, instead: object) -> None:
    """A scheduler that forgets aborts or deadlines, or leaks a block, fails in one of a few worlds."""
    monkeypatch.setattr(where, name, instead)
    assert any(try_seed(seed)[3] for seed in range(30))


def test_a_failing_world_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a world that fails for want of aborts a request and an abort are left, and what those need at most."""
    monkeypatch.setattr(Scheduler, "abort", nothing)
    world = next(w for w in map(draw_world, count()) if not w.restart and failure(replace(w, script=w.script[:60])))
    small = shrink(replace(world, script=world.script[:60]))
    assert failure(small)
    assert 2 <= len(small.script) <= 3 and not small.faults


def try_seed(seed: int, check_every: int = 1) -> tuple[int, int, Counter[str], str]:
    """Runs the world of a seed: the seed, steps scheduled, what happened, and what is wrong."""
    try:
        outcome = run(draw_world(seed), check_every)
    except Exception as error:
        return seed, 0, Counter(), f"{type(error).__name__}: {error}"
    return seed, outcome.num_steps, outcome.coverage, ""


def campaign(first: int, processes: int, check_every: int) -> Iterator[tuple[int, int, Counter[str], str]]:
    """The results of the worlds from a seed on, without end."""
    attempt, seeds = partial(try_seed, check_every=check_every), count(first)
    if processes == 1:
        yield from map(attempt, seeds)
    with multiprocessing.Pool(processes) as pool:
        while True:
            yield from pool.imap_unordered(attempt, islice(seeds, 32 * processes))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Random worlds for the scheduler.")
    parser.add_argument("seeds", type=int, nargs="*", help="run these, one after the other")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="print the smallest world that fails like this one")
    parser.add_argument("--steps", type=int, help="run worlds until so many steps were scheduled")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=1, metavar="K", help="check each K-th step only")
    options = parser.parse_args(arguments)
    if options.shrink is not None:
        return print_smallest(options.shrink)
    if options.steps:
        return run_many(options.steps, options.processes, options.first_seed, options.check_every)
    for seed in options.seeds:
        outcome = run(draw_world(seed), options.check_every)
        print(f"seed {seed}: {outcome.num_steps} steps, fingerprint {outcome.fingerprint:x}")
        print_coverage(outcome.coverage)
    return 0


def print_smallest(seed: int) -> int:
    world = shrink(draw_world(seed))
    found = failure(world)
    if found is None:
        print(f"the world of seed {seed} does not fail")
        return 0
    print(brief(replace(world, script=())))
    print(*(brief(act) for act in world.script), sep="\n")
    print(f"{found[0]}: {found[1]}")
    return 1


def brief(thing: object) -> str:
    """Like repr, without what is as by default."""
    if not is_dataclass(thing):
        return repr(thing)
    shown = [
        f"{field.name}={brief(value)}"
        for field in fields(thing)
        if (value := getattr(thing, field.name)) != field.default and value not in ({}, frozenset())
    ]
    return f"{type(thing).__name__}({', '.join(shown)})"


def run_many(num_steps: int, processes: int, first_seed: int, check_every: int) -> int:
    steps = worlds = failed = 0
    total: Counter[str] = Counter()
    begin = told = time.monotonic()
    for seed, done, coverage, error in campaign(first_seed, processes, check_every):
        worlds, steps = worlds + 1, steps + done
        total.update(coverage)
        if error:
            failed += 1
            print(f"seed {seed}: {error[:400]}\n  replay: python tests/simulation/test_worlds.py {seed}", flush=True)
        now = time.monotonic()
        if now - told > 10 or steps >= num_steps:
            told, rate = now, steps / (now - begin)
            line = f"{steps} steps, {worlds} worlds, {failed} failed, {now - begin:.0f} s, {rate:.0f} steps/s"
            print(line, file=sys.stderr, flush=True)
        if steps >= num_steps:
            break
    print_coverage(total)
    print(
        f"{steps} steps in {worlds} worlds from seed {first_seed} on, {failed} failed, {time.monotonic() - begin:.0f} s"
    )
    return failed > 0


def print_coverage(coverage: Counter[str]) -> None:
    for what, number in sorted(coverage.items()):
        print(f"{number:10} {what}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
