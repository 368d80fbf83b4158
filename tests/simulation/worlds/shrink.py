"""The smallest world that still fails in the same way."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

from chairlift.core.request import SamplingParams

from .draw import Act, Job, World
from .run import run

Signature = tuple[str, str, int]


def failure(world: World) -> tuple[Signature, str] | None:
    """How a world fails: where in which code, and in what words; None if it does not."""
    try:
        run(world)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (type(error).__name__, frame.filename, frame.lineno or 0), str(error)
    return None


def shrink(world: World) -> World:
    """Leaves out requests, other acts, faults and settings, over and over, as long as the world fails as it did."""
    first = failure(world)
    if first is None:
        return world

    def fails(smaller: World) -> bool:
        found = failure(smaller)
        return found is not None and found[0] == first[0]

    size = -1
    while size != _size(world):
        size = _size(world)
        world = _fewer(world, "script", fails)
        world = _fewer(world, "faults", fails)
        world = _simpler(world, fails)
        print(f"{len(world.script)} acts, {len(world.faults)} faults", file=sys.stderr)
    return world


def _size(world: World) -> int:
    return len(repr(world))


def _fewer(world: World, name: str, fails: Callable[[World], bool]) -> World:
    """Without pieces of a tuple, halves first and single entries last."""
    piece = max(1, len(getattr(world, name)) // 2)
    while piece:
        start = 0
        while start < len(parts := getattr(world, name)):
            smaller = replace(world, **{name: parts[:start] + parts[start + piece :]})
            if fails(smaller):
                world = smaller
            else:
                start += piece
        piece //= 2
    return world


def _simpler(world: World, fails: Callable[[World], bool]) -> World:
    """With plainer settings and requests, each tried by itself."""
    for smaller in _settings(world):
        if smaller(world) != world and fails(smaller(world)):
            world = smaller(world)
    for at in range(len(world.script)):
        for plainer in _plainer(world.script[at]):
            acts = (*world.script[:at], plainer, *world.script[at + 1 :])
            if plainer != world.script[at] and fails(replace(world, script=acts)):
                world = replace(world, script=acts)
                break
    return world


def _settings(world: World) -> Iterator[Callable[[World], World]]:
    yield lambda w: replace(w, depth=1)
    yield lambda w: replace(w, order="fcfs")
    yield lambda w: replace(w, weights=None)
    yield lambda w: replace(w, admission="optimistic") if w.policy != "static" else w
    yield lambda w: replace(w, stop_rate=0.0)
    yield lambda w: replace(w, costs=replace(w.costs, noise=0.0, token=0.0, position=0.0))
    for name, value in (
        ("slo_itl", None),
        ("max_batch_delay", 0.0),
        ("enable_prefix_caching", False),
        ("preemption_mode", "recompute"),
        ("max_preemptions", 3),
        ("max_num_seqs", 1),
        ("num_speculative_tokens", 0),
    ):
        yield lambda w, name=name, value=value: replace(w, settings=replace(w.settings, **{name: value}))  # type: ignore[misc]
    for name in ("num_host_blocks", "num_disk_blocks"):
        yield lambda w, name=name: replace(w, capacity=replace(w.capacity, **{name: 0}))  # type: ignore[misc]
    yield lambda w: replace(w, capacity=replace(w.capacity, windows=(0,)))


def _plainer(act: Act) -> Iterator[Act]:
    yield replace(act, gap=0.0)
    if not isinstance(job := act.what, Job):
        return
    params = job.params
    yield replace(act, what=replace(job, tenant="", priority=0, lag=0.0, stop_ids=frozenset()))
    yield replace(act, what=replace(job, tenant=""))
    yield replace(act, what=replace(job, priority=0))
    yield replace(act, what=replace(job, prompt=job.prompt[: len(job.prompt) // 2 + 1]))
    yield replace(act, what=replace(job, prompt=job.prompt[:-1] or job.prompt))
    if not params.use_beam_search:
        plain = SamplingParams(n=params.n, max_tokens=params.max_tokens)
        yield replace(act, what=replace(job, params=replace(plain, n=1)))
        yield replace(
            act, what=replace(job, params=replace(plain, ttft_ms=params.ttft_ms, deadline_ms=params.deadline_ms))
        )
        yield replace(act, what=replace(job, params=plain))
    if (params.max_tokens or 2) > 1:
        most = params.max_tokens - 1 if params.max_tokens else 8
        yield replace(act, what=replace(job, params=replace(params, max_tokens=most, min_tokens=0)))
