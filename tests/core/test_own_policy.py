"""Policies and orders of somebody's own: whatever they decide, answers stay right, or an error says who is to blame."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, nan
from typing import Any

import pytest

from chairlift.core.gates import Optimistic
from chairlift.core.order import Order
from chairlift.core.own_policy import Checked
from chairlift.core.plan import StepPlan
from chairlift.core.policy import Chunked, Continuous, Group, Static
from chairlift.core.request import FinishReason, Request
from chairlift.errors import ConfigError

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]
Share = Callable[[StepPlan], dict[str, int]]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])


# -- policies


class Everybody(Chunked):
    """Names all that run as decodes, also those whose prompts are not computed yet, and those that wait for a draw."""

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        yield Group(running, boards=True)


class AllOrNothing(Chunked):
    """A prompt that exceeds the budget would wait for ever."""

    def quota(self, need: int, left: int) -> int:
        return need if need <= left else 0


class Lazy(Chunked):
    def quota(self, need: int, left: int) -> int:
        return 0


class Nobody(Chunked):
    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        return iter(())


class Greedy(Chunked):
    def quota(self, need: int, left: int) -> int:
        return 10**9


class MyStatic(Static):
    """A generator with work between its groups."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


class MyOrder(Order):
    """Does what its class attributes say."""

    place: Any = None
    chosen: Any = None
    pushed: Any = "default"

    def key(self, request: Request) -> Any:
        return request.ticket if self.place is None else self.place

    def choose(self, waiting: Iterable[Request], kv: Any, now: float) -> Any:
        return self.chosen(waiting) if self.chosen else next(iter(waiting))

    def victim(self, candidates: Iterable[Request]) -> Any:
        known = list(candidates)
        return super().victim(known) if self.pushed == "default" else self.pushed


class Ordered(Chunked):
    """Own order, default policy."""

    def __init__(self, gate: Any, order: Any) -> None:
        super().__init__(gate, MyOrder())


def run_all(rig: Any) -> None:
    """Some that need more than a step for their prompts, and more memory than there is."""
    for i in range(5):
        rig.add(f"r{i}", 3 + 7 * i, max_tokens=6, n=1 + i % 2)
    rig.run()
    for i in range(5):
        assert rig.ends(f"r{i}") == [FinishReason.LENGTH] and len(rig.tokens(f"r{i}")) == 6


@pytest.mark.parametrize("policy", ["Everybody", "AllOrNothing", "Lazy", "Nobody", "Greedy", "MyStatic", "Ordered"])
def test_no_policy_changes_an_answer_or_stops_the_engine(make_rig: MakeRig, policy: str) -> None:
    """DESIGN, promise 1; the shadow executor fails on any token that is computed where it does not belong."""
    budget = 64 if policy == "MyStatic" else 8
    run_all(make_rig(f"mine.{policy}", num_blocks=20, budget=budget, max_num_seqs=6))


def test_a_policy_may_hold_something_back_while_others_run(make_rig: MakeRig, share: Share) -> None:
    """The default decides only when nothing else would be computed."""
    rig = make_rig("mine.AllOrNothing", budget=8, max_num_seqs=4)
    rig.add("a", 4, max_tokens=3)
    rig.step()
    rig.add("long", 20, max_tokens=1)
    assert share(rig.step()) == {"a": 1} == share(rig.step())
    assert share(rig.step()) == {"long": 8}
    rig.run()


def test_a_policy_may_wait_for_what_is_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig("mine.AllOrNothing", budget=8)
    rig.add("a", 4, max_tokens=1)
    plan = rig.scheduler.schedule(0.0)
    handle = rig.executor.submit(plan)
    rig.add("long", 20, max_tokens=1)
    assert rig.scheduler.schedule(0.0) is None
    rig.outputs += rig.scheduler.commit(plan, rig.executor.result(handle), 0.0)
    rig.run()


def test_groups_are_asked_for_one_by_one(make_rig: MakeRig, share: Share) -> None:
    """A generator goes on when its last group came to nothing, as it does for a policy of the engine."""
    plans = []
    for policy in ("static", "mine.MyStatic"):
        rig = make_rig(policy, max_num_seqs=6)
        for i in range(6):
            rig.add(f"r{i}", 4 + i, max_tokens=3 + i)
        rig.run()
        plans.append([share(plan) for plan in rig.plans])
    assert plans[0] == plans[1]


class Odd(Chunked):
    """Does whatever it is told to."""

    named: Sequence[Request] = ()
    pad: Any = 0

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        yield Group(self.named)

    def padding(self, request: Request) -> int:
        return self.pad


def test_a_policy_names_only_who_runs(make_request: MakeRequest) -> None:
    odd = Odd(Optimistic(), Order())
    checked, (runs, strange) = Checked(odd, "odd.Odd"), (make_request(id, 1) for id in "ab")
    odd.named = [runs]
    assert list(next(checked.groups([], [runs], 4)).running) == [runs]
    for named in ([runs, strange], [runs, runs]):
        odd.named = named
        with pytest.raises(ConfigError, match=r"odd\.Odd.*twice, or one that does not run"):
            list(checked.groups([], [runs], 4))


@pytest.mark.parametrize(("pad", "padding"), [(3, 3), (100, 6), (-2, 0), ("many", 0), (None, 0)])
def test_a_policys_padding_is_held_to_what_there_is(make_request: MakeRequest, pad: Any, padding: int) -> None:
    odd, request = Odd(Optimistic(), Order()), make_request("a", 4)
    odd.pad, request.max_len = pad, 10
    assert Checked(odd, "odd.Odd").padding(request) == padding


def test_a_quota_is_held_to_what_there_is(make_rig: MakeRig) -> None:
    rig = make_rig("mine.Greedy", budget=16)
    rig.add("a", 40, max_tokens=3)
    rig.run()
    assert [plan.num_tokens for plan in rig.plans] == [16, 16, 8, 1, 1]


class Raises(Chunked):
    def quota(self, need: int, left: int) -> int:
        raise KeyError("no such thing")


class Late(Continuous):
    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        yield Group()
        raise ValueError("after the first")


class Texts(Chunked):
    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Any:
        return ["all"]


class Words(Chunked):
    def quota(self, need: int, left: int) -> Any:
        return "all of it"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("Raises", r"mine\.Raises: quota\(\) raised KeyError: 'no such thing'"),
        ("Late", r"mine\.Late: groups\(\) raised ValueError: after the first"),
        ("Texts", r"mine\.Texts: groups\(\) gave 'all', which is no Group"),
        ("Words", r"mine\.Words: quota\(\) gave 'all of it', which is no whole number"),
    ],
)
def test_a_policy_that_fails_is_named(make_rig: MakeRig, policy: str, message: str) -> None:
    rig = make_rig(f"mine.{policy}")
    rig.add("a", 4, max_tokens=3)
    with pytest.raises(ConfigError, match="--scheduler-policy " + message):
        rig.run()
    assert repr(rig.scheduler.policy) == f"mine.{policy}"


class Leaves(Chunked):
    def __init__(self, *_: Any) -> None:
        raise SystemExit(0)


class Gated(Chunked):
    def __init__(self, gate: Any, order: Any) -> None:
        super().__init__(None, order)  # type: ignore[arg-type]


class Unordered(Chunked):
    def __init__(self, gate: Any, order: Any) -> None:
        super().__init__(gate, "fcfs")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("Leaves", r"mine\.Leaves cannot be used: SystemExit: 0"),
        ("Gated", r"mine\.Gated is no policy: its gate must be one of chairlift\.core\.gates"),
        ("Unordered", r"mine\.Unordered is no policy: its order must extend chairlift\.core\.order\.Order"),
        ("Missing", r"mine\.Missing cannot be used: AttributeError"),
        ("Group", r"mine\.Group is no policy: it lacks gate, order, whole, holds, groups, quota, padding"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_at_the_start(make_rig: MakeRig, policy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rig(f"mine.{policy}")


# -- orders


@pytest.mark.parametrize("pushed", ["default", None, "nobody", "the first"])
def test_no_victim_of_an_order_stops_the_engine(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, pushed: Any
) -> None:
    """Whom it may not push out, or who is nobody, is not pushed out; then it is who boarded last."""
    rig = make_rig("mine.Ordered", num_blocks=14, budget=16, max_num_seqs=6)
    for i in range(4):
        rig.add(f"r{i}", 4 + i, max_tokens=20)
    rig.step()
    first = next(iter(rig.scheduler.running.values()))
    monkeypatch.setattr(MyOrder, "pushed", first if pushed == "the first" else pushed)
    rig.run()
    assert rig.scheduler.stats().total_preemptions > 0


@pytest.mark.parametrize("place", [nan, inf, "first", None])
def test_a_key_is_a_finite_number(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    monkeypatch.setattr(MyOrder, "key", lambda self, request: place)
    rig = make_rig("mine.Ordered")
    with pytest.raises(ConfigError, match=r"mine\.Ordered: order\.key\(\) gave .*, which is no finite number"):
        rig.add("a", 4)


class Shorter(Order):
    """Would let the shorter take the place of the longer, whom its key then puts first again."""

    preempts = True

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.num_prompt < running.num_prompt


class Contradicted(Chunked):
    def __init__(self, gate: Any, order: Any) -> None:
        super().__init__(gate, Shorter())


def test_nobody_makes_way_who_would_board_first_again(make_rig: MakeRig) -> None:
    """S4: an order that contradicts itself must not move two requests in and out for ever."""
    rig = make_rig("mine.Contradicted", max_num_seqs=1)
    rig.add("long", 9, max_tokens=5)
    rig.step()
    rig.add("short", 4, max_tokens=2)
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_an_order_chooses_among_those_who_wait(
    make_rig: MakeRig, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("mine.Ordered")
    rig.add("a", 4, max_tokens=2)
    rig.add("b", 4, max_tokens=2)
    monkeypatch.setattr(MyOrder, "chosen", lambda self, waiting: list(waiting)[-1])
    assert rig.step().items[0].request_id == "b"
    rig.run()
    rig.add("c", 4, max_tokens=2)
    for stranger in (lambda self, waiting: make_request("c", 4), lambda self, waiting: None):
        monkeypatch.setattr(MyOrder, "chosen", stranger)
        with pytest.raises(ConfigError, match=r"order\.choose\(\) chose none of those who wait"):
            rig.step()
