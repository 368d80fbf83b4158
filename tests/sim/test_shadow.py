"""The shadow executor finds what it is there to find. Each fault is one that a scheduler might make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift.core.plan import BlockOp, BlockOpKind, Capacity, StepItem, StepPlan
from chairlift.core.request import Request, SamplingParams
from chairlift.sim.shadow import ShadowExecutor, ShadowFault

PROMPT = (5, 6, 7, 8, 9, 10)


def make_shadow(n: int = 1, **params: Any) -> tuple[ShadowExecutor, StepItem]:
    """Eight blocks of four tokens, a request of six tokens, and the item that computes its prompt."""
    shadow = ShadowExecutor(Capacity(8, 4, 32, num_host_blocks=2))
    request = Request(
        id="a", token_ids=list(PROMPT), num_prompt=6, params=SamplingParams(n=n, **params), seed=3, num_samples=n
    )
    shadow.expect(request)
    return shadow, StepItem("a", 0, 0, PROMPT, (0, 1), n, request.params, 3, 6)


def decode(shadow: ShadowExecutor, item: StepItem, token: int, *, index: int = 0) -> StepItem:
    """The item that computes the first generated token."""
    return replace(item, index=index, start=6, token_ids=(token,), num_samples=1, prompt_targets=())


def plan(step_id: int, *items: StepItem, ops: tuple[BlockOp, ...] = ()) -> StepPlan:
    return StepPlan(step_id, items, ops)


def test_a_correct_run_passes() -> None:
    shadow, item = make_shadow()
    ((token,),) = shadow.submit(plan(0, item)).tokens
    result = shadow.submit(plan(1, decode(shadow, item, token)))
    assert shadow.result(result) is result
    assert result.step_id == 1 and 0 <= result.tokens[0][0] < shadow.vocab_size
    shadow.close()


def test_answers_depend_only_on_prompt_parameters_seed_and_index() -> None:
    """Alone, in chunks, or in other blocks: the same tokens and logprobs; with another seed or index: others."""
    shadow, item = make_shadow(logprobs=2, prompt_logprobs=1)
    item = replace(item, prompt_targets=PROMPT[1:])
    whole = shadow.submit(plan(0, item))
    shadow, _ = make_shadow(logprobs=2, prompt_logprobs=1)
    first = replace(item, token_ids=PROMPT[:3], num_samples=0, block_table=(7, 2), prompt_targets=PROMPT[1:4])
    second = replace(item, start=3, token_ids=PROMPT[3:], block_table=(7, 2), prompt_targets=PROMPT[4:])
    parts = [shadow.submit(plan(0, first)), shadow.submit(plan(1, second))]
    assert parts[1].tokens == whole.tokens and parts[1].logprobs == whole.logprobs
    assert parts[0].prompt_logprobs[0] + parts[1].prompt_logprobs[0] == whole.prompt_logprobs[0]
    assert parts[0].tokens == parts[0].logprobs == ((),)

    shadow, item = make_shadow(n=3)
    assert len(set(shadow.submit(plan(0, item)).tokens[0])) == 3
    shadow, item = make_shadow(n=3, temperature=0.0)
    assert len(set(shadow.submit(plan(0, item)).tokens[0])) == 1


def test_stop_tokens_come_at_the_rate_asked_for_and_not_before_min_tokens() -> None:
    for rate, min_tokens, stops in ((1.0, 0, True), (0.0, 0, False), (1.0, 1, False)):
        shadow, item = make_shadow(min_tokens=min_tokens)
        shadow.stop_rate = rate
        shadow._truths["a"].stop_ids = frozenset({4})
        ((token,),) = shadow.submit(plan(0, replace(item, stop_ids=frozenset({4})))).tokens
        assert (token == 4) is stops


Change = Callable[[StepItem], StepItem]

PROMPT_FAULTS: dict[str, tuple[Change, str]] = {
    "wrong token": (lambda item: replace(item, token_ids=(5, 6, 7, 8, 9, 99)), "where its tokens are"),
    "wrong start": (lambda item: replace(item, start=1, token_ids=PROMPT[:5]), "where its tokens are"),
    "beyond the end": (lambda item: replace(item, token_ids=(*PROMPT, 1)), "where its tokens are"),
    "no tokens": (lambda item: replace(item, token_ids=()), "computes nothing"),
    "skipped": (lambda item: replace(item, start=2, token_ids=PROMPT[2:]), "at position 0 in block 0"),
    "too few samples": (lambda item: replace(item, num_samples=1), "draws 1 samples instead of 3"),
    "samples too early": (lambda item: replace(item, token_ids=PROMPT[:5]), "draws 3 samples instead of 0"),
    "no block": (lambda item: replace(item, block_table=(0,)), "too few blocks"),
    "block twice": (lambda item: replace(item, block_table=(0, 0)), "or one twice"),
    "unknown block": (lambda item: replace(item, block_table=(0, 8)), "does not exist"),
    "negative block": (lambda item: replace(item, block_table=(0, -1)), "does not exist"),
    "other seed": (lambda item: replace(item, seed=4), "other parameters"),
    "other stop ids": (lambda item: replace(item, stop_ids=frozenset({1})), "other parameters"),
    "other prompt length": (lambda item: replace(item, num_prompt=5), "other parameters"),
    "history unasked": (lambda item: replace(item, history=PROMPT), "history"),
    "targets unasked": (lambda item: replace(item, prompt_targets=PROMPT[1:]), "prompt targets"),
    "unknown request": (lambda item: replace(item, request_id="b"), "is unknown"),
    "sample before the fork": (lambda item: replace(item, index=1), "is unknown"),
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
    ((token,),) = shadow.submit(plan(0, item)).tokens
    with pytest.raises(ShadowFault, match="at position 0 in block 2"):
        shadow.submit(plan(1, replace(decode(shadow, item, token), block_table=(2, 1))))

    shadow, item = make_shadow()
    ((token,),) = shadow.submit(plan(0, item)).tokens
    thief = Request(id="b", token_ids=[1, 6, 7, 8, 9, 10], num_prompt=6, params=item.params, seed=3)
    shadow.expect(thief)
    other = replace(item, request_id="b", token_ids=tuple(thief.token_ids))
    shadow.submit(plan(1, replace(other, block_table=(4, 1))))
    with pytest.raises(ShadowFault, match="at position 4 in block 1"):
        shadow.submit(plan(2, decode(shadow, item, token)))


def test_writing_into_a_block_in_use_is_found() -> None:
    """Two samples that share a block, without the copy; with it, all is well."""
    for ops, passes in (((), False), ((BlockOp(BlockOpKind.COPY, 1, 3),), True)):
        shadow, item = make_shadow(n=2)
        ((first, second),) = shadow.submit(plan(0, item)).tokens
        items = [decode(shadow, item, first), decode(shadow, item, second, index=1)]
        if passes:
            items[1] = replace(items[1], block_table=(0, 3))
            shadow.submit(plan(1, *items, ops=ops))
        else:
            with pytest.raises(ShadowFault, match="another sequence uses in the same step"):
                shadow.submit(plan(1, *items, ops=ops))


def test_a_copy_missing_in_an_earlier_step_is_found() -> None:
    """The samples run in different steps, and the second overwrites what the first one wrote."""
    shadow, item = make_shadow(n=2)
    ((first, second),) = shadow.submit(plan(0, item)).tokens
    first_item = decode(shadow, item, first)
    ((third,),) = shadow.submit(plan(1, first_item)).tokens
    shadow.submit(plan(2, decode(shadow, item, second, index=1)))
    with pytest.raises(ShadowFault, match="at position 6"):
        shadow.submit(plan(3, replace(first_item, start=7, token_ids=(third,))))


def test_discarded_items_write_and_are_not_checked() -> None:
    shadow, item = make_shadow()
    padding = replace(item, start=6, token_ids=(10, 10), num_samples=0, discard=True)
    ((token,), nothing) = shadow.submit(plan(0, item, padding)).tokens
    assert nothing == ()
    shadow.submit(plan(1, decode(shadow, item, token)))
    held = replace(decode(shadow, item, 99), discard=True)
    ((filler,),) = shadow.submit(plan(2, held)).tokens
    assert filler == shadow.vocab_size, "no token that could pass for a real one"
    shadow, item = make_shadow()
    with pytest.raises(ShadowFault, match="at position 5"):
        shadow.submit(plan(0, item, replace(padding, start=5)))


def test_ops_run_in_order_and_between_the_right_memories() -> None:
    """Out to the host, over the device blocks, and back into others."""
    shadow, item = make_shadow()
    ((token,),) = shadow.submit(plan(0, item)).tokens
    kinds = BlockOpKind
    ops = (
        BlockOp(kinds.SWAP_OUT, 0, 1),
        BlockOp(kinds.SWAP_OUT, 1, 0),
        BlockOp(kinds.COPY, 7, 0),
        BlockOp(kinds.COPY, 7, 1),
        BlockOp(kinds.SWAP_IN, 1, 5),
        BlockOp(kinds.SWAP_IN, 0, 4),
    )
    shadow.submit(plan(1, replace(decode(shadow, item, token), block_table=(5, 4)), ops=ops))


@pytest.mark.parametrize(
    "op",
    [
        BlockOp(BlockOpKind.COPY, 0, 8),
        BlockOp(BlockOpKind.COPY, -1, 0),
        BlockOp(BlockOpKind.COPY, 1, 1),
        BlockOp(BlockOpKind.SWAP_OUT, 0, 2),
        BlockOp(BlockOpKind.SWAP_IN, 2, 0),
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
    with pytest.raises(ShadowFault, match="0 items"):
        shadow.submit(plan(0))
    shadow, item = make_shadow()
    shadow.submit(plan(4, item))
    with pytest.raises(ShadowFault, match="step 6 after step 4"):
        shadow.submit(plan(6, item))
    shadow, item = make_shadow()
    with pytest.raises(ShadowFault, match="never was here"):
        shadow.submit(StepPlan(0, (item,), finished_ids=("b",)))
