"""Nobody waits for ever: pools of exactly the largest request, and company that never stops coming."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

MakeRig = Callable[..., Any]

CONFIGS = [
    ("static", "reserve"),
    ("continuous", "optimistic"),
    ("continuous", "reserve"),
    ("continuous", "peak"),
    ("chunked", "optimistic"),
    ("chunked", "reserve"),
    ("chunked", "peak"),
]


@pytest.mark.parametrize(("policy", "admission"), CONFIGS)
@pytest.mark.parametrize("caching", [False, True])
def test_a_pool_of_exactly_the_largest_request(make_rig: MakeRig, policy: str, admission: str, caching: bool) -> None:
    """M2, M3, M4: each step gives somebody a token, or is a chunk of one who runs alone; so all end."""
    preemptions = 0
    for seed in range(25):
        rng = Random(seed)
        budget = rng.choice((4, 8, 16)) if policy == "chunked" else 48
        num_blocks = 12 if admission == "optimistic" else 26
        rig = make_rig(
            policy, admission=admission, num_blocks=num_blocks, max_model_len=48, max_num_seqs=4, budget=budget,
            caching=caching,
        )  # fmt: skip
        tokens = 0
        for i in range(10):
            prompt = rng.randint(1, 47)
            samples = rng.choice((1, 1, 2)) if i else 1
            prefix = list(range(prompt)) if rng.random() < 0.5 else prompt
            output = rng.randint(1, 48 - prompt) if i else 48 - prompt
            rig.add(f"r{i}", prefix, max_tokens=output, n=samples)
            tokens += samples * output
        rig.run(most_steps=tokens * -(-48 // budget))
        assert sum(len(output.new_token_ids) for output in rig.outputs) == tokens
        preemptions += rig.scheduler.stats().total_preemptions
    assert (preemptions > 100) == (admission == "optimistic")


@pytest.mark.parametrize(("policy", "admission"), CONFIGS)
@pytest.mark.parametrize("caching", [False, True])
def test_nobody_starves_among_endless_others(make_rig: MakeRig, policy: str, admission: str, caching: bool) -> None:
    """S4, S5: more small requests arrive than can be served, and the largest possible one still gets its turn."""
    rig = make_rig(policy, admission=admission, num_blocks=12, max_model_len=48, max_num_seqs=4, budget=48,
                   caching=caching)  # fmt: skip
    for step in range(400):
        rig.add(f"small{step}", 6, max_tokens=8)
        if step == 10:
            rig.add("large", 30, max_tokens=18)
        rig.step()
        if rig.ends("large"):
            break
    assert len(rig.tokens("large")) == 18
    ended = sum(output.finish_reason is not None for output in rig.outputs)
    assert len(rig.scheduler.waiting) > 0 and ended > 10, "it was busy all the time"


def test_samples_that_fit_only_one_at_a_time_take_turns(make_rig: MakeRig) -> None:
    """All samples of one request preempt each other, and each of them ends."""
    rig = make_rig("chunked", num_blocks=8, max_model_len=32, budget=8)
    rig.add("a", 13, max_tokens=19, n=8)
    rig.run(most_steps=8 * 19 * 4)
    assert [len(rig.tokens("a", i)) for i in range(8)] == [19] * 8
    assert rig.scheduler.stats().total_preemptions > 0


def test_a_part_prefilled_prompt_gives_way_and_comes_back(make_rig: MakeRig) -> None:
    """It had room when it boarded; then the decodes beside it took its last blocks. When they have ended, it runs."""
    rig = make_rig("chunked", num_blocks=18, budget=8, caching=False, max_num_seqs=4)
    for id in "abc":
        rig.add(id, 4, max_tokens=20)
    rig.step()
    long = rig.add("long", 42, max_tokens=4)
    rig.run(most_steps=80)
    assert long.num_preemptions > 0
    assert len(rig.tokens("long")) == 4


@pytest.mark.parametrize(("prompt", "output", "n"), [(32, 8, 1), (8, 40, 1), (16, 40, 8)])
@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_preemption_does_not_thrash(make_rig: MakeRig, policy: str, prompt: int, output: int, n: int) -> None:
    """M3, S4: with ten times the demand that the pool holds and no prefix cache, a bounded share is computed twice, and
    nobody is sent back again and again."""
    rig = make_rig(policy, num_blocks=32, max_model_len=64, budget=8 if policy == "chunked" else 64, caching=False)
    requests = [rig.add(f"r{i}", prompt, max_tokens=output, n=n) for i in range(80 // n)]
    rig.run(most_steps=10_000)
    needed = sum(prompt + n * output for _ in requests)
    assert sum(plan.num_tokens for plan in rig.plans) < 2.5 * needed
    assert max(request.num_preemptions for request in requests) <= 6
