"""Plans submitted before the step before is done: the order of steps, tokens not yet known, and failures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chairlift.config import EngineConfig
from chairlift.core.plan import BAD_LOGITS, BlockOp, BlockOpKind, StepItem, StepPlan, StepResult
from chairlift.core.request import SamplingParams
from chairlift.errors import StepFailed
from chairlift.models.spec import Checkpoint
from chairlift.runners.native import NativeRunner

PROMPT = tuple(np.random.default_rng(4).integers(0, 259, 50).tolist())
SAMPLED = SamplingParams(temperature=0.9, logprobs=2, repetition_penalty=1.3, frequency_penalty=0.2)


def config(**given: Any) -> EngineConfig:
    return EngineConfig(**({"threads": 2, "max_num_seqs": 8} | given))


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "in a thread"])
def runner(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[NativeRunner]:
    runner = NativeRunner(checkpoint, config(async_scheduling=request.param))
    runner.start()
    yield runner
    runner.close()


def submit(runner: NativeRunner, *items: StepItem, ops: tuple[BlockOp, ...] = ()) -> Any:
    return runner.submit(StepPlan(3, items, ops))


def run(runner: NativeRunner, *items: StepItem, ops: tuple[BlockOp, ...] = ()) -> StepResult:
    return runner.result(submit(runner, *items, ops=ops))


def test_draws_of_the_step_before(runner: NativeRunner, step_item: Any) -> None:
    """C2: `-1 - j` stands for draw j, counted over all items, in tokens and in the history alike."""
    tables = [tuple(range(4 * i, 4 * i + 4)) for i in range(3)]

    def decode(i: int, start: int, token: int, history: tuple[int, ...]) -> StepItem:
        return step_item((token,), start, SAMPLED, seed=i, block_table=tables[i], history=history, num_prompt=20)

    def prompts() -> list[StepItem]:
        first = step_item(PROMPT[:20], 0, SAMPLED, block_table=tables[0], num_samples=3, history=PROMPT[:20])
        chunk = step_item(PROMPT[:9], block_table=tuple(range(20, 24)), num_samples=0)
        scored = SamplingParams(prompt_logprobs=0)
        other = step_item(PROMPT[5:25], 0, scored, block_table=tables[1], prompt_targets=PROMPT[6:25], discard=True)
        return [first, chunk, other]

    known = run(runner, *prompts()).tokens
    assert [len(tokens) for tokens in known] == [3, 0, 1]
    draws = known[0] + known[2]
    expected = []
    for i, draw in ((0, 1), (1, 3)):
        history = (*(PROMPT[:20], PROMPT[5:25])[i], draws[draw])
        expected.append(run(runner, decode(i, 20, draws[draw], history)).logprobs[0])

    handles = [submit(runner, *prompts())]
    unknown = [
        decode(0, 20, -1 - 1, (*PROMPT[:20], -1 - 1)),
        decode(1, 20, -1 - 3, (*PROMPT[5:25], -1 - 3)),
    ]
    handles.append(submit(runner, *unknown))
    last = decode(1, 21, -1 - 1, (*PROMPT[5:25], draws[3], -1 - 1))
    handles.append(submit(runner, last))
    results = [runner.result(handle) for handle in handles]
    assert results[0].tokens == known
    assert list(results[1].logprobs) == expected
    second = expected[1][0].token_id
    assert run(runner, decode(1, 21, second, (*PROMPT[5:25], draws[3], second))).logprobs == results[2].logprobs


def test_draws_that_were_not_made(runner: NativeRunner, step_item: Any) -> None:
    run(runner, step_item(PROMPT), step_item((1,), block_table=(20,)))
    with pytest.raises(ValueError, match="token -3: the step before drew 2 tokens"):
        run(runner, step_item((-3,), 50))
    run(runner)
    with pytest.raises(ValueError, match="drew 0 tokens"):
        run(runner, step_item((-1,), 50))


def test_a_draw_from_broken_logits_stands_for_any_token(specs: Any, tensors: Any, stored: Any, step_item: Any) -> None:
    """C4: the request has failed, and its neighbours are computed."""
    values = tensors(specs["llama"])
    values["embed"][17] = np.nan
    broken = Checkpoint("tiny", specs["llama"], {name: stored(array) for name, array in values.items()})
    runner = NativeRunner(broken, config(async_scheduling=True))
    runner.start()
    alone = run(runner, step_item((5,), 3, block_table=(20,))).tokens[0]
    first = submit(runner, step_item((1, 17)), step_item((1, 2, 3), block_table=(20,)))
    second = submit(runner, step_item((-1,), 2), step_item((-2,), 3, block_table=(20,)))
    assert runner.result(first).tokens[0] == (BAD_LOGITS,)
    good = runner.result(first).tokens[1][0]
    ahead = runner.result(second).tokens[1]
    assert ahead == run(runner, step_item((good,), 3, block_table=(20,))).tokens[0]
    assert len(alone) == len(ahead) == 1
    runner.close()


def test_steps_run_one_by_one_in_their_order(checkpoint: Checkpoint, step_item: Any) -> None:
    """Submitting returns before the step is done, and a step may use what the one before it wrote."""
    runner = NativeRunner(checkpoint, config(async_scheduling=True))
    runner.start()
    expected = [run(runner, step_item(PROMPT[:9], num_samples=0)), *(run(runner, step_item((t,), 9)) for t in range(6))]
    gate = threading.Event()
    store = runner._store
    assert store is not None
    apply = store.apply
    store.apply = lambda ops: (gate.wait(10), apply(ops))[1]  # type: ignore[method-assign]
    nothing = (BlockOp(BlockOpKind.COPY, 100, 101),)
    handles = [submit(runner, step_item(PROMPT[:9], num_samples=0), ops=nothing)]
    handles += [submit(runner, step_item((t,), 9)) for t in range(6)]
    assert not any(handle.done() for handle in handles)
    gate.set()
    assert [runner.result(handle).tokens for handle in handles] == [result.tokens for result in expected]
    runner.close()


def test_close_waits_for_the_step_that_runs(checkpoint: Checkpoint, step_item: Any) -> None:
    runner = NativeRunner(checkpoint, config(async_scheduling=True))
    runner.start()
    before = threading.active_count()
    handle = submit(runner, step_item(PROMPT * 5))
    assert isinstance(handle, Future)
    runner.close()
    assert handle.done()
    assert threading.active_count() < before + 1
    with pytest.raises(RuntimeError, match="after close"):
        submit(runner, step_item(PROMPT))
    runner.close()  # once more does no harm


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")])
def test_a_step_that_fails(
    runner: NativeRunner, step_item: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The failure comes out of this step, in words, and of one that would continue its tokens; the runner goes on."""
    expected = run(runner, step_item(PROMPT)).tokens
    with monkeypatch.context() as patch:

        def fail(*args: Any) -> None:
            raise error

        patch.setattr(runner, "_model", SimpleNamespace(run=fail))
        with pytest.raises(StepFailed, match=r"step 3 could not be computed: (out of memory|.*No space left)"):
            run(runner, step_item(PROMPT))
    with pytest.raises(StepFailed, match="the step before failed"):
        run(runner, step_item((-1,), 50))
    assert run(runner, step_item(PROMPT)).tokens == expected


def test_a_bad_plan_is_a_bug(runner: NativeRunner, step_item: Any) -> None:
    """Not a failure of the step: nobody is to go on after it as if the plans could be trusted."""
    with pytest.raises(ValueError, match="bad step: token 259"):
        run(runner, step_item((259,)))
    with pytest.raises(ValueError, match="32 bits"):
        run(runner, step_item((2**40,)))
    assert len(run(runner, step_item((1,))).tokens[0]) == 1


def test_a_new_sequence_is_not_taken_for_one_that_left(runner: NativeRunner, step_item: Any) -> None:
    """C2: what a sequence draws by is kept from step to step, and sequences come and go at the same address."""

    def draw(seed: int) -> StepItem:
        return step_item(PROMPT[:20], 0, SamplingParams(temperature=2.0), seed=seed, block_table=tuple(range(4)))

    together = [run(runner, *(draw(seed) for seed in range(12))).tokens[seed] for seed in range(12)]
    assert len(set(together)) > 6
    for _ in range(2):
        assert [run(runner, draw(seed)).tokens[0] for seed in range(12)] == together


def test_a_sequence_that_left_is_let_go(runner: NativeRunner, step_item: Any) -> None:
    item = step_item((5,), 3)
    counts = [sys.getrefcount(item.sequence)]
    for items in ((item,), ()):
        run(runner, *items)
        counts.append(sys.getrefcount(item.sequence))
    assert counts[1] > counts[0] == counts[2]
