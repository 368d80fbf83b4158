"""The shadow executor finds what it is there to find. Each fault is one that a scheduler might make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift.core.plan import BlockOp, BlockOpKind, Capacity, StepItem, StepPlan, StepResult
from chairlift.core.request import Request, SamplingParams, SequenceInfo
from chairlift.errors import StepFailed
from chairlift.sim.shadow import ShadowExecutor, ShadowFault, context_of, logprob

PROMPT = (5, 6, 7, 8, 9, 10)


class Unlucky(ShadowExecutor):
    """What goes wrong is said beforehand."""

    failing: tuple[int, ...] = ()  # steps
    broken: tuple[int, ...] = ()  # host and disk blocks

    def fails(self, plan: StepPlan) -> bool:
        return plan.step_id in self.failing

    def damages(self, op: BlockOp) -> bool:
        return op.src in self.broken


def make_shadow(
    n: int = 1, *, windows: tuple[int, ...] = (0,), stop_ids: frozenset[int] = frozenset(), **params: Any
) -> tuple[Unlucky, StepItem]:
    """Eight blocks of four tokens, two in host memory and two on disk; a request of six tokens, and the item that
    computes its prompt."""
    shadow = Unlucky(Capacity(8, 4, 32, num_host_blocks=2, num_disk_blocks=2, windows=windows))
    request = Request(
        id="a",
        token_ids=list(PROMPT),
        num_prompt=6,
        params=SamplingParams(n=n, **params),
        seed=3,
        num_samples=n,
        stop_ids=stop_ids,
    )
    shadow.expect(request)
    info = SequenceInfo("a", 0, request.params, 3, 6, stop_ids, request.params.logprobs)
    return shadow, StepItem(info, 0, PROMPT, tuple(range(2 * len(windows))), n)


def of(item: StepItem, **changes: Any) -> StepItem:
    """The same item of another sequence."""
    return item._replace(sequence=replace(item.sequence, **changes))


def decode(item: StepItem, token: int, *, index: int = 0) -> StepItem:
    """The item that computes the first generated token."""
    return of(item._replace(start=6, token_ids=(token,), num_samples=1, prompt_targets=()), index=index)


def plan(step_id: int, *items: StepItem, ops: tuple[BlockOp, ...] = ()) -> StepPlan:
    return StepPlan(step_id, items, ops)


def draw(shadow: ShadowExecutor, step: StepPlan) -> int:
    """The token of a step of one item."""
    ((token,),) = shadow.result(shadow.submit(step)).tokens
    return token


def test_a_correct_run_passes() -> None:
    shadow, item = make_shadow()
    token = draw(shadow, plan(0, item))
    result = shadow.submit(plan(1, decode(item, token)))
    assert isinstance(result, StepResult) and shadow.result(result) is result
    assert result.step_id == 1 and 0 <= result.tokens[0][0] < shadow.vocab_size
    shadow.close()


def test_answers_depend_only_on_prompt_parameters_seed_and_index() -> None:
    """Alone, in chunks, or in other blocks: the same tokens and logprobs; with another seed or index: others."""
    shadow, item = make_shadow(logprobs=2, prompt_logprobs=1)
    item = item._replace(prompt_targets=PROMPT[1:])
    whole = shadow.result(shadow.submit(plan(0, item)))
    shadow, _ = make_shadow(logprobs=2, prompt_logprobs=1)
    first = item._replace(token_ids=PROMPT[:3], num_samples=0, block_table=(7, 2), prompt_targets=PROMPT[1:4])
    second = item._replace(start=3, token_ids=PROMPT[3:], block_table=(7, 2), prompt_targets=PROMPT[4:])
    parts = [shadow.result(shadow.submit(plan(step, part))) for step, part in enumerate((first, second))]
    assert parts[1].tokens == whole.tokens and parts[1].logprobs == whole.logprobs
    assert parts[0].prompt_logprobs[0] + parts[1].prompt_logprobs[0] == whole.prompt_logprobs[0]
    assert parts[0].tokens == parts[0].logprobs == ((),)

    shadow, item = make_shadow(n=3)
    assert len(set(shadow.result(shadow.submit(plan(0, item))).tokens[0])) == 3
    shadow, item = make_shadow(n=3, temperature=0.0)
    assert len(set(shadow.result(shadow.submit(plan(0, item))).tokens[0])) == 1


def test_logprobs_are_of_the_whole_vocabulary_best_first() -> None:
    shadow, item = make_shadow(logprobs=3)
    result = shadow.result(shadow.submit(plan(0, item)))
    ((entry,),) = result.logprobs
    context = context_of(PROMPT)
    best = sorted(range(shadow.vocab_size), key=lambda token: -logprob(context, token))
    assert entry.top == tuple((token, logprob(context, token)) for token in best[:3])
    assert (entry.token_id, entry.logprob) == (result.tokens[0][0], logprob(context, result.tokens[0][0]))


def test_stop_tokens_come_at_the_rate_asked_for_and_not_before_min_tokens() -> None:
    for rate, min_tokens, stops in ((1.0, 0, True), (0.0, 0, False), (1.0, 1, False)):
        shadow, item = make_shadow(min_tokens=min_tokens, stop_ids=frozenset({4}))
        shadow.stop_rate = rate
        assert (draw(shadow, plan(0, item)) == 4) is stops
    shadow, item = make_shadow(stop_ids=frozenset({0, 1}))
    shadow.vocab_size = 2
    assert draw(shadow, plan(0, item)) in (0, 1), "where there is nothing else"


Change = Callable[[StepItem], StepItem]

PROMPT_FAULTS: dict[str, tuple[Change, str]] = {
    "wrong token": (lambda item: item._replace(token_ids=(5, 6, 7, 8, 9, 99)), "where its tokens are"),
    "wrong start": (lambda item: item._replace(start=1, token_ids=PROMPT[:5]), "where its tokens are"),
    "beyond the end": (lambda item: item._replace(token_ids=(*PROMPT, 1)), "where its tokens are"),
    "no tokens": (lambda item: item._replace(token_ids=()), "computes nothing"),
    "skipped": (lambda item: item._replace(start=2, token_ids=PROMPT[2:]), "at position 0 in block 0"),
    "too few samples": (lambda item: item._replace(num_samples=1), "draws 1 samples instead of 3"),
    "samples too early": (lambda item: item._replace(token_ids=PROMPT[:5]), "draws 3 samples instead of 0"),
    "no block": (lambda item: item._replace(block_table=(0,)), "too few blocks"),
    "block twice": (lambda item: item._replace(block_table=(0, 0)), "or one twice"),
    "unknown block": (lambda item: item._replace(block_table=(0, 8)), "does not exist"),
    "no block where it writes": (lambda item: item._replace(block_table=(0, -1)), "no block for what group 0 reads"),
    "other seed": (lambda item: of(item, seed=4), "other parameters"),
    "other stop ids": (lambda item: of(item, stop_ids=frozenset({1})), "other parameters"),
    "other prompt length": (lambda item: of(item, num_prompt=5), "other parameters"),
    "history unasked": (lambda item: item._replace(history=PROMPT), "history"),
    "targets unasked": (lambda item: item._replace(prompt_targets=PROMPT[1:]), "prompt targets"),
    "unknown request": (lambda item: of(item, request_id="b"), "is unknown"),
    "sample before the fork": (lambda item: of(item, index=1), "is unknown"),
}


@pytest.mark.parametrize("name", PROMPT_FAULTS)
def test_a_fault_in_the_item_is_found(name: str) -> None:
    change, message = PROMPT_FAULTS[name]
    shadow, item = make_shadow(n=3)
    with pytest.raises(ShadowFault, match=message):
        shadow.submit(plan(0, change(item)))


def test_missing_history_and_targets_are_found() -> None:
    shadow, item = make_shadow(presence_penalty=1.0)
    with pytest.raises(ShadowFault, match="history"):
        shadow.submit(plan(0, item))
    shadow, item = make_shadow(prompt_logprobs=0)
    with pytest.raises(ShadowFault, match="prompt targets"):
        shadow.submit(plan(0, item))


def test_a_read_of_anything_but_the_own_context_is_found() -> None:
    """A wrong block, a block that was overwritten, and one with the same tokens after another beginning."""
    shadow, item = make_shadow()
    token = draw(shadow, plan(0, item))
    with pytest.raises(ShadowFault, match="at position 0 in block 2"):
        shadow.submit(plan(1, decode(item, token)._replace(block_table=(2, 1))))

    shadow, item = make_shadow()
    token = draw(shadow, plan(0, item))
    thief = Request(id="b", token_ids=[1, 6, 7, 8, 9, 10], num_prompt=6, params=item.params, seed=3)
    shadow.expect(thief)
    other = of(item, request_id="b")._replace(token_ids=tuple(thief.token_ids))
    shadow.submit(plan(1, other._replace(block_table=(4, 1))))
    with pytest.raises(ShadowFault, match="at position 4 in block 1"):
        shadow.submit(plan(2, decode(item, token)))


def test_writing_into_a_block_in_use_is_found() -> None:
    """Two samples that share a block, without the copy; with it, all is well."""
    for ops, passes in (((), False), ((BlockOp(BlockOpKind.COPY, 1, 3),), True)):
        shadow, item = make_shadow(n=2)
        ((first, second),) = shadow.result(shadow.submit(plan(0, item))).tokens
        items = [decode(item, first), decode(item, second, index=1)]
        if passes:
            items[1] = items[1]._replace(block_table=(0, 3))
            shadow.submit(plan(1, *items, ops=ops))
        else:
            with pytest.raises(ShadowFault, match="another sequence uses in the same step"):
                shadow.submit(plan(1, *items, ops=ops))


def test_a_copy_missing_in_an_earlier_step_is_found() -> None:
    """The samples run in different steps, and the second overwrites what the first one wrote."""
    shadow, item = make_shadow(n=2)
    ((first, second),) = shadow.result(shadow.submit(plan(0, item))).tokens
    first_item = decode(item, first)
    ((third,),) = shadow.submit(plan(1, first_item)).tokens
    shadow.submit(plan(2, decode(item, second, index=1)))
    with pytest.raises(ShadowFault, match="at position 6"):
        shadow.submit(plan(3, first_item._replace(start=7, token_ids=(third,))))


def test_discarded_items_write_and_are_not_checked() -> None:
    shadow, item = make_shadow()
    padding = item._replace(start=6, token_ids=(10, 10), num_samples=0, discard=True)
    ((token,), nothing) = shadow.submit(plan(0, item, padding)).tokens
    assert nothing == ()
    shadow.submit(plan(1, decode(item, token)))
    held = decode(item, 99)._replace(discard=True)
    ((filler,),) = shadow.submit(plan(2, held)).tokens
    assert filler == shadow.vocab_size, "no token that could pass for a real one"
    shadow, item = make_shadow()
    with pytest.raises(ShadowFault, match="at position 5"):
        shadow.submit(plan(0, item, padding._replace(start=5)))


def test_ops_run_in_order_and_between_the_right_memories() -> None:
    """Out to the host, over the device blocks, and back into others."""
    shadow, item = make_shadow()
    token = draw(shadow, plan(0, item))
    kinds = BlockOpKind
    ops = (
        BlockOp(kinds.SWAP_OUT, 0, 1),
        BlockOp(kinds.SWAP_OUT, 1, 0),
        BlockOp(kinds.COPY, 7, 0),
        BlockOp(kinds.COPY, 7, 1),
        BlockOp(kinds.SWAP_IN, 1, 5),
        BlockOp(kinds.SWAP_IN, 0, 4),
    )
    shadow.submit(plan(1, decode(item, token)._replace(block_table=(5, 4)), ops=ops))


@pytest.mark.parametrize(
    "op",
    [
        BlockOp(BlockOpKind.COPY, 0, 8),
        BlockOp(BlockOpKind.COPY, -1, 0),
        BlockOp(BlockOpKind.COPY, 1, 1),
        BlockOp(BlockOpKind.SWAP_OUT, 0, 4),
        BlockOp(BlockOpKind.SWAP_IN, 4, 0),
    ],
)
def test_ops_on_blocks_that_do_not_exist_are_found(op: BlockOp) -> None:
    shadow, item = make_shadow()
    with pytest.raises(ShadowFault, match=r"BlockOp\("):
        shadow.submit(plan(0, item, ops=(op,)))


def test_faults_of_the_whole_plan_are_found() -> None:
    shadow, item = make_shadow()
    with pytest.raises(ShadowFault, match="twice in one step"):
        shadow.submit(plan(0, item, item))
    shadow, item = make_shadow()
    with pytest.raises(ShadowFault, match="step 0 is empty"):
        shadow.submit(plan(0))
    shadow, item = make_shadow()
    shadow.submit(plan(4, item))
    with pytest.raises(ShadowFault, match="step 6 after step 4"):
        shadow.submit(plan(6, item))
    shadow, item = make_shadow()
    with pytest.raises(ShadowFault, match="never was here"):
        shadow.submit(StepPlan(0, (item,), finished_ids=("b",)))


def test_a_plan_may_only_move_blocks() -> None:
    shadow, item = make_shadow()
    token = draw(shadow, plan(0, item))
    result = shadow.result(shadow.submit(plan(1, ops=(BlockOp(BlockOpKind.SWAP_OUT, 0, 3, b"x"),))))
    assert result.tokens == result.logprobs == ()
    shadow.submit(plan(2, decode(item, token)))


# -- groups of layers, and windows


def test_each_group_has_blocks_of_its_own() -> None:
    """Positions 0 to 3 are in blocks 0 and 1, the rest in 2 and 3: of the first group, and of the second."""
    for table, message in (
        ((0, 1, 2, 3), None),
        ((1, 0, 2, 3), "at position 0 in block 1"),
        ((0, 0, 2, 3), "one twice"),
    ):
        shadow, item = make_shadow(windows=(0, 0))
        token = draw(shadow, plan(0, item))
        item = decode(item, token)._replace(block_table=table)
        if message:
            with pytest.raises(ShadowFault, match=message):
                shadow.submit(plan(1, item))
        else:
            shadow.submit(plan(1, item))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_a_window_reads_its_last_positions_and_no_more(window: int) -> None:
    """The query at position 6 reads position 3, in the first block, if its window is at least four."""
    missing = window <= 3
    for table, passes in (
        ((0, 1, -1, 3), missing),
        ((0, 1, 2, -1), False),
        ((-1, 1, 2, 3), False),
        ((0, 1, 4, 3), missing),
    ):
        shadow, item = make_shadow(windows=(0, window))
        token = draw(shadow, plan(0, item._replace(block_table=(0, 2, 1, 3))))
        table = (table[0], table[2], table[1], table[3])
        item = decode(item, token)._replace(block_table=table)
        if passes:
            shadow.submit(plan(1, item))
        else:
            with pytest.raises(ShadowFault, match=r"no block for what group|at position [0-3] in block 4"):
                shadow.submit(plan(1, item))


# -- steps in flight


def test_a_token_that_is_still_being_drawn_is_filled_in() -> None:
    """By its number among the draws of the step before; in the history, too."""
    shadow, item = make_shadow(n=2, presence_penalty=1.0)
    handle = shadow.submit(plan(0, item._replace(history=PROMPT)))
    items = [
        decode(item, -2, index=1)._replace(block_table=(0, 3), history=(*PROMPT, -2)),
        decode(item, -1)._replace(history=(*PROMPT, -1)),
    ]
    shadow.submit(plan(1, *items, ops=(BlockOp(BlockOpKind.COPY, 1, 3),)))
    assert len(set(shadow.result(handle).tokens[0])) == 2
    shadow, item = make_shadow(n=2)
    shadow.submit(plan(0, item))
    with pytest.raises(ShadowFault, match="waits for draw 2 of a step with 2"):
        shadow.submit(plan(1, decode(item, -3)))
    shadow, item = make_shadow(n=2)
    shadow.submit(plan(0, item))
    with pytest.raises(ShadowFault, match="where its tokens are"):
        shadow.submit(plan(1, decode(item, -1, index=1)))


# -- what goes wrong


def test_a_failed_step_and_those_after_it_never_were() -> None:
    """What was drawn is drawn again, the same; nothing is left in device and host memory."""
    shadow, item = make_shadow(n=2)
    shadow.failing = (1,)
    ((token, other),) = shadow.result(shadow.submit(plan(0, item))).tokens
    out = BlockOp(BlockOpKind.SWAP_OUT, 0, 0)
    failed = shadow.submit(plan(1, decode(item, token), ops=(out,)))
    behind = shadow.submit(plan(2, decode(item, -1)._replace(start=7)))
    with pytest.raises(StepFailed, match="step 1 failed"):
        shadow.result(failed)
    shadow.result(behind)
    again = item._replace(token_ids=(*PROMPT, token), num_samples=1)
    with pytest.raises(ShadowFault, match="at position 0 in block 0"):
        shadow.submit(plan(3, again._replace(start=6, token_ids=(token,))))
    shadow._last_step = 2
    ((second,),) = shadow.result(shadow.submit(plan(3, again))).tokens
    twin = of(again, index=1)._replace(token_ids=(*PROMPT, other), block_table=(4, 5))
    shadow.submit(plan(4, twin, decode(item, second)._replace(start=7)))


def test_a_prompt_whose_step_failed_is_sampled_anew() -> None:
    shadow, item = make_shadow(n=3)
    shadow.failing = (0,)
    with pytest.raises(StepFailed):
        shadow.result(shadow.submit(plan(0, item)))
    assert len(shadow.result(shadow.submit(plan(1, item))).tokens[0]) == 3


def test_a_damaged_block_is_told_and_taints_what_comes_of_it() -> None:
    """Its reader's answer is nonsense, and so is that of who reads its reader's block, until it is written anew."""
    shadow, item = make_shadow()
    shadow.broken = (1,)
    token = draw(shadow, plan(0, item))
    ops = (BlockOp(BlockOpKind.SWAP_OUT, 0, 1), BlockOp(BlockOpKind.SWAP_OUT, 1, 0), BlockOp(BlockOpKind.SWAP_IN, 1, 4))
    result = shadow.result(shadow.submit(plan(1, decode(item, token)._replace(block_table=(4, 1)), ops=ops)))
    assert result.damaged == (1,) and result.tokens == ((shadow.vocab_size,),)
    copied = decode(item, token)._replace(block_table=(5, 1))
    result = shadow.result(shadow.submit(plan(2, copied, ops=(BlockOp(BlockOpKind.COPY, 4, 5),))))
    assert result.damaged == () and result.tokens == ((shadow.vocab_size,),), "a copy is no better"
    again = item._replace(token_ids=(*PROMPT, token), block_table=(4, 5))
    assert draw(shadow, plan(3, again)) < shadow.vocab_size


def test_what_a_failed_step_wrote_to_disk_is_damaged() -> None:
    """Host memory is lost anyway, and must not be read; a block that is written again is whole."""
    shadow, item = make_shadow()
    shadow.failing = (1,)
    token = draw(shadow, plan(0, item, ops=(BlockOp(BlockOpKind.SWAP_OUT, 7, 3),)))
    out = (BlockOp(BlockOpKind.SWAP_OUT, 0, 2), BlockOp(BlockOpKind.SWAP_OUT, 0, 3))
    with pytest.raises(StepFailed):
        shadow.result(shadow.submit(plan(1, decode(item, token), ops=out)))
    into = tuple(BlockOp(BlockOpKind.SWAP_IN, address, 6) for address in (2, 3))
    assert shadow.result(shadow.submit(plan(2, ops=into))).damaged == (2, 3)
    anew = (BlockOp(BlockOpKind.SWAP_OUT, 7, 2), into[0])
    assert shadow.result(shadow.submit(plan(3, ops=anew))).damaged == ()


# -- beams


def beam(item: StepItem, tokens: tuple[int, ...], *, index: int = 0, table: tuple[int, ...] = (0, 1)) -> StepItem:
    """The item that computes the last token of a beam."""
    start = len(PROMPT) + len(tokens) - 1
    return of(item._replace(start=start, token_ids=tokens[-1:], block_table=table), index=index)


def test_beams_go_on_with_tokens_of_the_schedulers_choice() -> None:
    """One draw an item, of any index, and the KV of one sequence that begins with the prompt."""
    shadow, item = make_shadow(n=2, use_beam_search=True, temperature=0.0)
    item = item._replace(num_samples=1)
    shadow.submit(plan(0, item))
    copy = BlockOp(BlockOpKind.COPY, 1, 3)
    shadow.submit(plan(1, beam(item, (70,)), beam(item, (80,), index=5, table=(0, 3)), ops=(copy,)))
    shadow.submit(plan(2, beam(item, (80, 81), table=(0, 3)), beam(item, (70, 71), index=1)))
    shadow.submit(
        plan(3, of(item, index=1)._replace(block_table=(5, 6))),
    )


def test_a_beam_on_the_blocks_of_nobody_is_found() -> None:
    for start, table, message in ((7, (0, 4), "no beam of its request"), (8, (0, 1, 5), "at position 7|no beam")):
        shadow, item = make_shadow(n=2, use_beam_search=True, temperature=0.0)
        item = item._replace(num_samples=1)
        shadow.submit(plan(0, item))
        shadow.submit(plan(1, beam(item, (70,))))
        wrong = item._replace(start=start, token_ids=(71,), block_table=table)
        with pytest.raises(ShadowFault, match=message):
            shadow.submit(plan(2, wrong))
