"""Drafts: when they are tried, and that they change no answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.lookup import Lookup
from chairlift.core.plan import BAD_LOGITS, StepItem, StepPlan, StepResult
from chairlift.core.request import FinishReason
from chairlift.core.speculation import how_many
from chairlift.errors import ConfigError
from chairlift.sim.shadow import ShadowExecutor

MakeRig = Callable[..., Any]

SONG = [5, 6, 7, 8, 9]


class Parrot(ShadowExecutor):
    """Says `SONG` over and over, whatever was said before, but for the positions ``strays``. A step takes a second, and
    ``row`` for each row."""

    row = 0.0
    strays: Sequence[int] = ()

    def _draw(self, item: StepItem, cells: list[tuple[int, int]], index: int) -> int:
        position = len(cells)
        return 3 if position in self.strays else SONG[position % len(SONG)]

    def result(self, handle: StepResult | StepPlan) -> StepResult:
        result = super().result(handle)
        plan = self.plan
        return replace(result, seconds=1.0 + self.row * plan.num_tokens)

    def submit(self, plan: StepPlan) -> StepResult | StepPlan:
        self.plan = plan
        return super().submit(plan)


@pytest.fixture
def parrots(make_rig: MakeRig) -> MakeRig:
    def make(row: float = 0.0, strays: Sequence[int] = (), **given: Any) -> Any:
        executor = type("Told", (Parrot,), {"row": row, "strays": strays})
        return make_rig(**({"num_speculative_tokens": 4, "max_model_len": 256, "executor": executor} | given))

    return make


def drafts(plan: StepPlan) -> list[int]:
    return [item.num_drafts for item in plan.items]


def sung(rig: Any, id: str, prompt: int) -> bool:
    tokens = rig.tokens(id)
    strays = rig.executor.strays
    return tokens == [3 if p in strays else SONG[p % len(SONG)] for p in range(prompt, prompt + len(tokens))]


# -- how many


@given(st.floats(0, 1), st.floats(0, 2), st.integers(0, 9))
def test_drafts_are_tried_while_they_are_likely_enough(likelihood: float, needed: float, most: int) -> None:
    count = how_many(likelihood, needed, most)
    wanted = [likelihood**i >= needed for i in range(1, most + 1)]
    for i, wants in enumerate(wanted, 1):
        if abs(likelihood**i - needed) > 1e-9:
            assert (i <= count) == wants


def test_the_estimate_is_finite() -> None:
    """Whatever the rates say, a number of drafts comes out."""
    assert how_many(1.0, inf, 4) == 0 and how_many(0.5, -inf, 4) == 4
    assert how_many(1.5, 0.5, 4) == 4 and how_many(0.0, 0.5, 4) == 0


# -- in a step


def test_a_step_yields_a_token_more_than_drafts_were_right(parrots: MakeRig) -> None:
    """C1: the same tokens, in fewer steps."""
    rig = parrots()
    rig.add("a", SONG * 2, max_tokens=60, logprobs=1)
    rig.run()
    assert sung(rig, "a", 10) and len(rig.tokens("a")) == 60
    assert rig.ends("a") == [FinishReason.LENGTH]
    assert [len(output.logprobs) for output in rig.outputs] == [len(output.new_token_ids) for output in rig.outputs]
    slow, fast = rig.plans[1:8], rig.plans[8:-1]
    assert all(drafts(plan) == [0] for plan in slow), "before the engine knows what a row costs"
    assert {drafts(plan)[0] for plan in fast} == {4}
    assert len(fast) <= 11
    stats = rig.scheduler.stats()
    assert stats.total_drafts == stats.total_accepted_drafts == sum(sum(drafts(plan)) for plan in rig.plans)


def test_wrong_drafts_change_nothing(parrots: MakeRig) -> None:
    """C1: from a stray on the drafts of a step are lost, and their place is written anew."""
    strays = range(30, 100, 7)
    rig = parrots(strays=strays)
    for id in "ab":
        rig.add(id, SONG * 2, max_tokens=80, logprobs=0)
    rig.run()
    assert sung(rig, "a", 10) and sung(rig, "b", 10)
    stats = rig.scheduler.stats()
    assert 0 < stats.total_accepted_drafts < stats.total_drafts


@pytest.mark.parametrize("max_tokens", range(9, 20))
def test_drafts_end_where_the_request_ends(parrots: MakeRig, max_tokens: int) -> None:
    rig = parrots(max_model_len=10 + max_tokens + 3, num_blocks=8)
    rig.add("a", SONG * 2, max_tokens=max_tokens)
    rig.run()
    assert sung(rig, "a", 10) and len(rig.tokens("a")) == max_tokens
    assert max(item.start + len(item.token_ids) for plan in rig.plans for item in plan.items) <= 10 + max_tokens - 1


@pytest.mark.parametrize("stop_at", range(30, 40))
def test_a_stop_token_ends_the_request_whatever_drafts_follow(parrots: MakeRig, stop_at: int) -> None:
    """C5: what was drawn after it is not given out, and its KV can be found by nobody."""
    rig = parrots(strays=[stop_at], block_size=1, num_blocks=200)
    rig.add("a", SONG * 2, stop_ids=[3], max_tokens=100)
    rig.run()
    assert rig.tokens("a")[-1] == 3 and rig.tokens("a").count(3) == 1 and len(rig.tokens("a")) == stop_at - 9
    assert rig.ends("a") == [FinishReason.STOP]
    again = rig.add("b", [*SONG * 2, *rig.tokens("a"), 1, 1, 1], max_tokens=1)
    rig.step()
    assert again.num_cached_tokens in (stop_at, stop_at + 1)


def test_numbers_that_are_none_after_some_drafts(parrots: MakeRig) -> None:
    """C4: the tokens before them are good, and given out."""
    rig = parrots()
    rig.add("a", SONG * 2, max_tokens=60)
    while not drafts(rig.step())[0]:
        pass
    plan = rig.scheduler.schedule(rig.now)
    result = rig.executor.result(rig.executor.submit(plan))
    tokens = (*result.tokens[0][:3], BAD_LOGITS)
    before = len(rig.tokens("a"))
    rig.outputs += rig.scheduler.commit(plan, replace(result, tokens=(tokens,)), rig.now)
    assert len(rig.tokens("a")) == before + 3 and sung(rig, "a", 10)
    assert rig.ends("a") == [FinishReason.ERROR]
    rig.check_empty()


def test_sequences_without_drafts_beside_them(parrots: MakeRig) -> None:
    """Penalties need the tokens before a draw, a prompt is computed in pieces, and a search chooses its own tokens."""
    rig = parrots(budget=16, max_num_seqs=8)
    rig.add("a", SONG * 2, max_tokens=40)
    for _ in range(9):
        rig.step()
    rig.add("penalty", SONG * 2, max_tokens=20, presence_penalty=0.5)
    rig.add("long", SONG * 20, max_tokens=2)
    rig.add("n", SONG * 2, max_tokens=12, n=2)
    rig.run()
    for id, prompt in (("a", 10), ("penalty", 10), ("long", 100), ("n", 10)):
        assert sung(rig, id, prompt)
    tried = {item.request_id for plan in rig.plans for item in plan.items if item.num_drafts}
    assert "a" in tried and "penalty" not in tried
    assert max(plan.num_tokens for plan in rig.plans) <= 16


def test_prompts_get_at_least_half_of_the_step(parrots: MakeRig) -> None:
    """S1: drafts, however good, do not keep others waiting."""
    rig = parrots(budget=12, max_num_seqs=4, num_speculative_tokens=8)
    for id in "abc":
        rig.add(id, SONG * 2, max_tokens=200)
    for _ in range(12):
        rig.step()
    rig.add("late", SONG * 4, max_tokens=2)
    for _ in range(4):
        if rig.tokens("late"):
            break
        plan = rig.step()
        assert sum(drafts(plan)) <= 6
    rig.step()
    assert rig.tokens("late")


# -- memory


@pytest.mark.parametrize("num_blocks", [16, 18, 20, 22, 24])
def test_drafts_take_no_block_that_others_need(parrots: MakeRig, num_blocks: int) -> None:
    """M3: there is still one for the next token of each who runs; else drafts go only where there is room already."""
    rig = parrots(num_blocks=num_blocks, max_num_seqs=4, caching=False)
    for id, tokens in zip("abcd", (14, 12, 10, 8), strict=True):
        rig.add(id, SONG * 2, max_tokens=tokens)  # 21 blocks of 4 in all, at most
        rig.step()
    while rig.scheduler.has_work:
        running = len(rig.scheduler.running)
        plan = rig.scheduler.schedule(rig.now)
        ahead = any(-(-(item.start + len(item.token_ids)) // 4) > -(-item.end // 4) for item in plan.items)
        assert not ahead or rig.kv.num_available >= running
        rig.outputs += rig.scheduler.commit(plan, rig.executor.result(rig.executor.submit(plan)), rig.now)
    assert all(sung(rig, id, 10) for id in "abcd")
    assert rig.scheduler.stats().total_accepted_drafts > 0


def test_a_promise_holds_with_drafts(parrots: MakeRig) -> None:
    rig = parrots(admission="reserve", num_blocks=30, max_num_seqs=8)
    for i in range(8):
        rig.add(str(i), SONG * 2, max_tokens=30)
    rig.run()
    assert all(sung(rig, str(i), 10) for i in range(8))
    assert rig.scheduler.stats().total_preemptions == 0 < rig.scheduler.stats().total_accepted_drafts


def test_samples_that_share_a_block_write_their_drafts_into_copies(parrots: MakeRig) -> None:
    rig = parrots(block_size=8)
    taught(rig)
    rig.add("a", SONG * 2, max_tokens=60, n=3, temperature=1.0)
    rig.run()
    first = next(plan for plan in rig.plans if sum(drafts(plan)))
    assert first.items[0].start == 10, "they begin in the block that all share"
    assert all(rig.tokens("a", i) == rig.tokens("a") and len(rig.tokens("a", i)) == 60 for i in range(3))
    assert rig.scheduler.stats().total_accepted_drafts > 0


@pytest.mark.parametrize("windows", [(5,), (0, 3, 3), (0, 8, 1)])
def test_drafts_and_sliding_windows(parrots: MakeRig, windows: tuple[int, ...]) -> None:
    rig = parrots(windows=windows, strays=range(20, 90, 9), num_blocks=60 * len(windows))
    for id in "ab":
        rig.add(id, SONG * 2, max_tokens=80)
    rig.run()
    assert sung(rig, "a", 10) and sung(rig, "b", 10)
    assert rig.scheduler.stats().total_accepted_drafts > 0


# -- what it costs


def taught(rig: Any) -> None:
    """Steps of many sizes, from which the engine learns what a row costs."""
    for i in range(20):
        rig.add(f"t{i}", [100 + i] * (2 + 5 * i), max_tokens=1)
        rig.step()
    rig.outputs.clear()


@pytest.mark.parametrize(("batch", "pays"), [(1, True), (40, False)])
def test_drafts_that_are_often_wrong_are_tried_in_small_batches_only(parrots: MakeRig, batch: int, pays: bool) -> None:
    """S7: where a row costs as much as in any other step, a draft that is right half the time costs more than it
    gives."""
    rig = parrots(row=0.1, strays=range(0, 250, 3), budget=512, max_num_seqs=64, num_blocks=3000)
    taught(rig)
    for i in range(batch):
        rig.add(str(i), [*SONG * 2, 50 + i], max_tokens=200)
    rig.run()
    plans = rig.plans[21:]  # after the prompts
    tried = sum(sum(drafts(plan)) for plan in plans)
    gained = sum(len(output.new_token_ids) for output in rig.outputs)
    seconds = sum(1.0 + 0.1 * plan.num_tokens for plan in plans)
    without = (gained / batch - 1) * (1.0 + 0.1 * batch)
    if pays:
        assert tried > 0 and seconds < 0.95 * without
    else:
        assert seconds < 1.03 * without


def test_a_hopeless_sequence_is_given_up_and_tried_again(parrots: MakeRig) -> None:
    """S7: what costs is bounded, whatever the sequence says: each token is wrongly foreseen."""

    class Contrary(Parrot):
        row = 0.2

        def _draw(self, item: StepItem, cells: list[tuple[int, int]], index: int) -> int:
            tokens = [token for token, _ in cells]
            lookup = Lookup()
            drafts = [lookup.draft(tokens, 1) for _ in range(0, len(tokens) + 1, 256)][-1]  # it learns so many at once
            token = SONG[len(cells) % 4]
            return token + 10 if drafts and drafts[0] == token else token

    rig = parrots(executor=Contrary, max_model_len=1000, num_blocks=400, budget=512)
    taught(rig)
    rig.add("a", SONG * 4, max_tokens=900)
    rig.run()
    plans = rig.plans[30:]
    rows, tried = sum(plan.num_tokens for plan in plans), sum(sum(drafts(plan)) for plan in plans)
    assert tried > 0
    with_drafts = len(plans) + 0.2 * rows
    assert with_drafts <= 1.03 * (with_drafts - 0.2 * tried)


def test_drafts_keep_the_target_for_the_time_between_tokens(parrots: MakeRig) -> None:
    """S2: with room for three rows in the target, a step has three."""
    rig = parrots(row=0.25, slo_itl=1.76, num_speculative_tokens=8, budget=512)
    taught(rig)
    rig.add("a", SONG * 4, max_tokens=100)
    rig.run()
    decodes = [plan for plan in rig.plans[30:] if plan.items[0].start > 20]
    assert max(plan.num_tokens for plan in decodes) == 3
    assert sung(rig, "a", 20)


def test_drafts_leave_prompts_half_of_the_time(parrots: MakeRig) -> None:
    """S1, S2: with a target, too, a prompt comes aboard beside a sequence whose drafts are all right."""
    rig = parrots(row=0.1, slo_itl=2.0, num_speculative_tokens=8, budget=512)
    taught(rig)
    rig.add("a", SONG * 4, max_tokens=200)
    for _ in range(4):
        rig.step()
    assert rig.plans[-1].num_tokens > 6
    rig.add("b", [77] * 30, max_tokens=2)
    steps = 0
    while not rig.tokens("b"):
        plan, steps = rig.step(), steps + 1
        assert 1.0 + 0.1 * plan.num_tokens <= 2.0
    assert steps <= 10


def test_drafts_are_charged_like_all_that_is_computed(parrots: MakeRig) -> None:
    """S5: who gains many tokens a step pays for each of them."""
    counters = {}
    for most in (0, 4):
        rig = parrots(fair=True, num_speculative_tokens=most)
        rig.add("a", SONG * 2, max_tokens=100, tenant="x")
        rig.run()
        counters[most] = rig.scheduler._shares.counter("x")
        assert (rig.scheduler.stats().total_accepted_drafts > 0) == (most > 0)
    assert counters[4] == pytest.approx(counters[0], rel=0.05)


def test_none_without_the_setting(parrots: MakeRig) -> None:
    rig = parrots(num_speculative_tokens=0)
    request = rig.add("a", SONG * 4, max_tokens=60)
    rig.run()
    assert not any(sum(drafts(plan)) for plan in rig.plans) and request.lookup is None


# -- what it does not go with


@pytest.mark.parametrize(("policy", "admission"), [("static", "reserve"), ("chunked", "peak"), ("continuous", "peak")])
def test_policies_that_count_on_one_token_a_step(make_rig: MakeRig, policy: str, admission: str) -> None:
    with pytest.raises(ConfigError, match="num-speculative-tokens does not go with"):
        make_rig(policy, admission=admission, num_speculative_tokens=2)


def test_one_step_at_a_time(make_rig: MakeRig) -> None:
    rig = make_rig(num_speculative_tokens=2)
    with pytest.raises(ValueError, match="depth must be 1"):
        Engine(rig.scheduler, rig.executor, None, None, VirtualClock(), depth=2)  # type: ignore[arg-type]
