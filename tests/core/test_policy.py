"""What shares a step under each policy, and whom an admission gate lets in."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.core.gates import Optimistic
from chairlift.core.plan import Capacity, StepPlan
from chairlift.core.policy import make_policy
from chairlift.core.request import FinishReason, Status
from chairlift.core.scheduler import Scheduler, Settings
from chairlift.errors import ConfigError

MakeRig = Callable[..., Any]
Share = Callable[[StepPlan], dict[str, int]]

FOUR = {"A": 200, "B": 50, "C": 30, "D": 10}
"""The four requests of the article on static batching, with their output tokens."""


def board_four(rig: Any, more: tuple[str, ...] = ()) -> None:
    for id, output in FOUR.items():
        rig.add(id, 8, max_tokens=output)
    for id in more:
        rig.add(id, 8, max_tokens=20)


def rows(plans: list[StepPlan]) -> tuple[int, int]:
    """Rows that sampled for somebody, and all rows that sampled."""
    sampling = [item for plan in plans for item in plan.items if item.num_samples]
    return sum(not item.discard for item in sampling), len(sampling)


# -- static


def test_static_rows_leave_together(make_rig: MakeRig) -> None:
    """B, C and D are done long before A, and leave with it; E and F start after that."""
    rig = make_rig("static", max_num_seqs=4, max_model_len=256, budget=1024, num_blocks=300)
    board_four(rig, more=("E", "F"))
    ended_at: dict[str, int] = {}
    started_at: dict[str, int] = {}
    while rig.scheduler.has_work:
        step = len(rig.plans)
        before = len(rig.outputs)
        for item in rig.step().items:
            started_at.setdefault(item.request_id, step)
        for output in rig.outputs[before:]:
            if output.finish_reason:
                ended_at[output.request_id] = step
    assert started_at == {"A": 0, "B": 0, "C": 0, "D": 0, "E": 200, "F": 200}
    assert ended_at == {"A": 199, "B": 199, "C": 199, "D": 199, "E": 219, "F": 219}
    for id, output in FOUR.items():
        assert len(rig.tokens(id)) == output
        assert rig.ends(id) == [FinishReason.LENGTH]
    rig.check_empty()


def test_static_slot_utilization_of_the_four_is_290_of_800(make_rig: MakeRig) -> None:
    rig = make_rig("static", max_num_seqs=4, max_model_len=256, budget=1024, num_blocks=300)
    board_four(rig)
    rig.run()
    assert rows(rig.plans) == (290, 800)


def test_continuous_rows_leave_at_their_own_length(make_rig: MakeRig) -> None:
    rig = make_rig("continuous", max_num_seqs=4, max_model_len=256, budget=1024, num_blocks=300)
    board_four(rig, more=("E", "F"))
    rig.run()
    useful, all_rows = rows(rig.plans)
    assert useful == all_rows == 290 + 40
    first_steps: dict[str, int] = {}
    for i, plan in enumerate(rig.plans):
        for item in plan.items:
            first_steps.setdefault(item.request_id, i)
    assert first_steps == dict.fromkeys("ABCD", 0) | {"E": 10, "F": 30}, "E boards when D has left, and F when E has"
    assert len(rig.plans) == 202, "A's 200, and two in which E and F boarded"


def test_static_tokens_of_held_rows_are_given_out_at_once(make_rig: MakeRig) -> None:
    """What waits for the batch is the end of the request, not its tokens."""
    rig = make_rig("static", max_num_seqs=2)
    rig.add("long", 4, max_tokens=8)
    rig.add("short", 4, max_tokens=2)
    rig.step()
    rig.step()
    assert len(rig.tokens("short")) == 2 and rig.ends("short") == []
    rig.run()
    assert len(rig.tokens("short")) == 2 and rig.ends("short") == [FinishReason.LENGTH]


def test_static_pads_to_the_longest_prompt(make_rig: MakeRig) -> None:
    rig = make_rig("static", max_num_seqs=3, budget=64)
    for id, length in (("a", 3), ("b", 10), ("c", 7), ("next batch", 20)):
        rig.add(id, length, max_tokens=2)
    plan = rig.step()
    padding = {item.request_id: len(item.token_ids) for item in plan.items if item.discard}
    assert padding == {"a": 7, "c": 3}
    assert plan.num_tokens == 30
    rig.run()


def test_static_padding_never_makes_a_request_too_large(make_rig: MakeRig) -> None:
    """The short request needs one block and has room for two; its neighbour's prompt fills seven."""
    rig = make_rig("static", num_blocks=8)
    rig.add("short", 2, max_tokens=2)
    rig.add("long", 28, max_tokens=4)
    rig.run(most_steps=10)


@pytest.mark.parametrize("num_blocks", [16, 18])
def test_static_padding_takes_nothing_from_the_samples(make_rig: MakeRig, num_blocks: int) -> None:
    """Padding beyond a request's greatest length takes blocks of its own, on top of those promised to its samples.
    Where there is room for the padding or for the samples, not for both, somebody waits."""
    rig = make_rig("static", num_blocks=num_blocks)
    rig.add("three", 3, n=3, max_tokens=5)
    rig.add("long", 32, max_tokens=1)
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_static_boards_a_large_batch_in_several_steps(make_rig: MakeRig, share: Share) -> None:
    rig = make_rig("static", budget=64, max_num_seqs=4)
    for id in "abcd":
        rig.add(id, 30, max_tokens=3)
    rig.add("later", 30, max_tokens=3)
    assert [share(rig.step()) for _ in range(3)] == [
        {"a": 30, "b": 30},
        {"c": 30, "d": 30},
        dict.fromkeys("abcd", 1),
    ]
    rig.run()


def test_static_nobody_boards_while_a_batch_runs(make_rig: MakeRig, share: Share) -> None:
    rig = make_rig("static")
    rig.add("a", 4, max_tokens=4)
    rig.step()
    rig.step()
    rig.add("b", 4, max_tokens=2)
    while rig.ends("a") == []:
        assert "b" not in share(rig.step())
    assert share(rig.step()) == {"b": 4}
    rig.run()


def test_static_an_abort_frees_a_row_at_once(make_rig: MakeRig) -> None:
    """D7: held or not, and the rest of the batch goes on."""
    rig = make_rig("static")
    for id, output in (("a", 9), ("held", 1), ("b", 9)):
        rig.add(id, 4, max_tokens=output)
    rig.step()
    for id in ("held", "a"):
        rig.abort(id)
        assert rig.ends(id) == [FinishReason.ABORT]
        assert {request.id for request in rig.scheduler.running.values()}.isdisjoint({id})
    rig.run()
    assert len(rig.tokens("b")) == 9


def test_static_held_rows_leave_when_the_last_live_one_is_aborted(make_rig: MakeRig) -> None:
    rig = make_rig("static")
    rig.add("a", 4, max_tokens=9)
    rig.add("held", 4, max_tokens=1)
    rig.step()
    rig.abort("a")
    assert rig.ends("held") == [FinishReason.LENGTH], "it computes a step more, for nobody"
    rig.check_empty()


# -- continuous and chunked


def test_continuous_boards_first_with_whole_prompts(make_rig: MakeRig, share: Share) -> None:
    rig = make_rig("continuous", budget=64)
    rig.add("a", 20, max_tokens=5)
    assert share(rig.step()) == {"a": 20}
    assert share(rig.step()) == {"a": 1}
    rig.add("b", 30, max_tokens=5)
    rig.add("c", 30, max_tokens=5)
    rig.add("d", 30, max_tokens=5)
    assert share(rig.step()) == {"b": 30, "c": 30}, "d is 30 more, and the budget 64"
    assert share(rig.step()) == {"d": 30}
    assert share(rig.step()) == dict.fromkeys("abcd", 1)
    rig.run()


def test_chunked_serves_decodes_first_and_fills_up_with_prompts(make_rig: MakeRig, share: Share) -> None:
    """S1: a long prompt takes only what the decodes leave."""
    rig = make_rig("chunked", budget=16)
    rig.add("a", 8, max_tokens=20)
    rig.add("b", 8, max_tokens=20)
    rig.step()
    rig.add("long", 40, max_tokens=4)
    rig.add("c", 4, max_tokens=4)
    assert share(rig.step()) == {"a": 1, "b": 1, "long": 14}
    assert share(rig.step()) == {"a": 1, "b": 1, "long": 14}
    assert share(rig.step()) == {"a": 1, "b": 1, "long": 12, "c": 2}
    assert share(rig.step()) == {"a": 1, "b": 1, "long": 1, "c": 2}
    rig.run()


@pytest.mark.parametrize("budget", [8, 9, 13, 64])
def test_chunked_never_exceeds_the_budget_and_fills_it(make_rig: MakeRig, budget: int) -> None:
    rig = make_rig("chunked", budget=budget, num_blocks=40)
    for i in range(12):
        rig.add(f"r{i}", 5 + 3 * i, max_tokens=6)
    while rig.scheduler.has_work:
        plan = rig.step()
        assert plan.num_tokens <= budget
        part = [item for item in plan.items if item.num_samples == 0]
        assert len(part) <= 1, "only the last piece of a step is cut"
        if part:
            assert plan.num_tokens == budget
    rig.check_empty()


def test_chunks_do_not_start_at_block_boundaries(make_rig: MakeRig) -> None:
    rig = make_rig("chunked", budget=8, max_num_seqs=7, block_size=16)
    rig.add("a", 40, max_tokens=2)
    rig.run()
    assert [item.start for plan in rig.plans for item in plan.items] == [0, 8, 16, 24, 32, 40]


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_slots_bound_how_many_run(make_rig: MakeRig, share: Share, policy: str) -> None:
    """An n-way request takes its n slots from the start."""
    rig = make_rig(policy, max_num_seqs=4, budget=64)
    rig.add("a", 4, max_tokens=3, n=3)
    rig.add("b", 4, max_tokens=3, n=2)
    rig.add("c", 4, max_tokens=3)
    assert share(rig.step()) == {"a": 4}, "b needs two slots, and c is behind b"
    while rig.ends("a") == []:
        assert "b" not in share(rig.step())
    assert share(rig.step()) == {"b": 4, "c": 4}
    rig.run()


# -- budgets that cannot work


@pytest.mark.parametrize(
    ("policy", "setting", "values"),
    [
        ("chunked", "max-num-seqs", {"max_num_seqs": 9}),
        ("continuous", "max-num-seqs", {"max_num_seqs": 9}),
        ("static", "max-model-len", {"max_num_seqs": 4}),
        ("continuous", "max-model-len", {"max_num_seqs": 4}),
    ],
)
def test_a_budget_too_small_names_both_settings_and_values_that_work(
    policy: str, setting: str, values: dict[str, int]
) -> None:
    """F1"""
    capacity = Capacity(100, 4, 32)

    def scheduler(budget: int, max_num_seqs: int, max_model_len: int = 32) -> Scheduler:
        return Scheduler(
            Capacity(100, 4, max_model_len),
            make_policy(policy),
            Settings(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        )

    with pytest.raises(ConfigError) as caught:
        scheduler(8, **values)
    needed = values["max_num_seqs"] if setting == "max-num-seqs" else capacity.max_model_len
    message = str(caught.value)
    for part in ("--max-num-batched-tokens (8)", f"--{setting} ({needed})", f"raise the first to {needed}"):
        assert part in message
    assert "lower the second to 8" in message
    scheduler(max(needed, 32), **values)
    scheduler(8, 8, max_model_len=8)


def test_chunked_needs_no_budget_of_the_models_length(make_rig: MakeRig) -> None:
    rig = make_rig("chunked", budget=8, max_model_len=64)
    rig.add("a", 60, max_tokens=3)
    rig.run()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--scheduler-policy must be chunked, continuous, static or an import .*'fifo'"
    ):
        make_policy("fifo")
    with pytest.raises(ConfigError, match=r"--admission must be one of optimistic, reserve, peak, got 'none'"):
        make_policy("chunked", admission="none")


# -- admission gates


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_reserve_never_preempts(make_rig: MakeRig, policy: str) -> None:
    """Demand of a multiple of the pool: with the optimistic gate this preempts, with a reservation it never does."""
    preemptions = {}
    for admission in ("optimistic", "reserve"):
        rig = make_rig(policy, admission=admission, num_blocks=14, budget=64)
        for i in range(8):
            rig.add(f"r{i}", 6, max_tokens=20, n=1 + i % 2)
        rig.run()
        preemptions[admission] = rig.scheduler.stats().total_preemptions
    assert preemptions["optimistic"] > 0 == preemptions["reserve"]


def test_reserve_boards_as_many_as_fit_at_their_greatest_length(make_rig: MakeRig, share: Share) -> None:
    rig = make_rig("chunked", admission="reserve", num_blocks=13)
    for id in "abc":
        rig.add(id, 4, max_tokens=20)  # six blocks each
    assert share(rig.step()) == {"a": 4, "b": 4}
    stats = rig.scheduler.stats()
    assert (stats.free_blocks, stats.reserved_blocks) == (11, 10)
    rig.run()


def test_optimistic_keeps_a_watermark_for_those_who_run(make_rig: MakeRig, share: Share) -> None:
    rig = make_rig("chunked", num_blocks=10)
    rig.scheduler.policy.gate = Optimistic(watermark=0.2)
    rig.add("a", 28, max_tokens=4)  # seven of ten blocks; two must stay available
    rig.add("b", 8, max_tokens=4)
    assert share(rig.step()) == {"a": 28}
    rig.run()


def test_the_watermark_is_no_wall_for_one_who_is_alone(make_rig: MakeRig) -> None:
    """M2: with nobody running there is nobody to keep blocks for, so whoever fits the pool runs."""
    rig = make_rig("chunked", num_blocks=10)
    rig.scheduler.policy.gate = Optimistic(watermark=0.5)
    rig.add("a", 36, max_tokens=4)
    rig.run()


def test_a_part_of_a_prompt_boards_only_if_the_rest_would_fit(make_rig: MakeRig, share: Share) -> None:
    """M3: else it is pushed out by the decodes beside it, and computed again and again."""
    rig = make_rig("chunked", budget=8, num_blocks=12)
    rig.add("a", 7, max_tokens=8)
    rig.step()
    rig.add("long", 42, max_tokens=2)  # eleven blocks; ten are free
    while rig.ends("a") == []:
        assert set(share(rig.step())) == {"a"}
    assert share(rig.step()) == {"long": 8}
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_the_default_watermark_is_a_hundredth(make_rig: MakeRig) -> None:
    rig = make_rig("chunked", num_blocks=1000)
    assert rig.scheduler.policy.gate.headroom(rig.kv) == 10


def test_admission_is_first_come_first_served(make_rig: MakeRig, share: Share) -> None:
    """S5's ground: a small request does not pass a large one that waits for memory, so nobody starves."""
    rig = make_rig("chunked", num_blocks=10)
    rig.add("a", 20, max_tokens=8)
    rig.step()
    rig.add("large", 30, max_tokens=2)
    rig.add("small", 1, max_tokens=2)
    while rig.ends("a") == []:
        assert set(share(rig.step())) == {"a"}
    assert list(share(rig.step())) == ["large", "small"]
    assert all(request.status is Status.RUNNING for request in rig.scheduler.running.values())
    rig.run()


# -- a policy of one's own


@pytest.fixture(name="own")
def own_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Saves source text as a module of its own, and gives its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def save(source: str) -> str:
        name = f"own_{len(list(tmp_path.iterdir()))}_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return save


def test_the_example_in_the_documentation_runs(make_rig: MakeRig, share: Share, own: Callable[[str], str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for separator in ".:":
        rig = make_rig(f"{own(source)}{separator}SideBySide", max_num_seqs=2)
        rig.add("large", 40, max_tokens=20)
        rig.add("middle", 38, max_tokens=6)
        rig.add("small", 4, max_tokens=6)
        assert share(rig.step()) == {"small": 4, "middle": 32}
        assert share(rig.step()) == {"small": 1, "middle": 6}
        rig.run()
        assert [len(rig.tokens(id)) for id in ("large", "middle", "small")] == [20, 6, 6]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("class Other: ...", ["AttributeError", "Mine"]),
        ("import nothing_of_this_name", ["ModuleNotFoundError", "nothing_of_this_name"]),
        ("class Mine: ...", ["TypeError", "takes no arguments"]),
        (
            "class Mine:\n    def __init__(self, gate, order): raise ValueError('not today')",
            ["ValueError", "not today"],
        ),
        (
            "class Mine:\n    def __init__(self, gate, order): self.gate, self.order = gate, order",
            ["is no policy", "whole, holds, groups, quota, padding"],
        ),
        ("Mine = 5", ["TypeError", "not callable"]),
    ],
)
def test_what_is_no_policy_is_refused(own: Callable[[str], str], source: str, parts: list[str]) -> None:
    """F1: one line that says what is wrong with it."""
    path = f"{own(source)}.Mine"
    with pytest.raises(ConfigError) as caught:
        make_policy(path)
    for part in ("--scheduler-policy", path, *parts):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_to_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--scheduler-policy no_such_package\.Mine cannot be used: ModuleNotFound"):
        make_policy("no_such_package.Mine")
