"""M11: a warning of preemptions says how often, what it cost and what to change, and comes once a minute at most."""

from __future__ import annotations

import logging

import pytest

from chairlift.config import EngineConfig
from chairlift.core.plan import StepStats
from chairlift.server.preemptions import PreemptionLog, advice


@pytest.fixture
def watch(caplog):
    """``watch(config)`` gives ``step(seconds, preemptions, swaps, tokens)``, which returns the new lines."""
    logger = logging.getLogger("test-preemptions")
    caplog.set_level(logging.WARNING, logger.name)

    def make(config=EngineConfig()):
        now = [0.0]
        log = PreemptionLog(config, logger, lambda: now[0])

        def step(seconds, preemptions, swaps=0, tokens=0):
            caplog.clear()
            now[0] = seconds
            log.step(StepStats(total_preemptions=preemptions, total_swaps=swaps, total_recomputed_tokens=tokens))
            return [record.getMessage() for record in caplog.records]

        return step

    return make


def test_no_preemption_no_word(watch):
    step = watch()
    assert [step(second, 0) for second in range(200)] == [[]] * 200


def test_once_a_minute_with_all_that_came_meanwhile(watch):
    step = watch()
    (first,) = step(1, 1, tokens=500)
    assert first.startswith("1 preemption since the start: 500 tokens to recompute; ")
    assert step(2, 5, tokens=900) == step(59, 1007, swaps=3, tokens=9000) == []
    (second,) = step(101, 1007, swaps=3, tokens=9000)
    cost = "8,500 tokens to recompute, the KV of 3 swapped out"
    assert second.startswith(f"1,006 preemptions in the last 100 s: {cost}; ")
    assert step(300, 1007, swaps=3, tokens=9000) == [], "none came since"


def test_a_new_engine_counts_from_zero(watch):
    step = watch()
    step(0, 10, tokens=100)
    (line,) = step(70, 2, tokens=7)
    assert line.startswith("2 preemptions in the last 70 s: 7 tokens")


def test_advice_is_what_is_not_done_yet():
    assert "--admission peak" in advice(EngineConfig()) and "--swap-space" in advice(EngineConfig())
    done = advice(EngineConfig(admission="peak", swap_space=4, order="priority"))
    assert "--admission" not in done and "--swap-space" not in done
    assert "--kv-cache-memory" in done and "--order priority" in done
    assert "--fair-tenants" in advice(EngineConfig(fair_tenants=True))


@pytest.mark.parametrize("room", [{"swap_space": 4}, {"disk_swap": "kv,1"}, {"swap_space": 4, "disk_swap": "kv,1"}])
def test_advice_knows_where_the_kv_is_kept(room):
    assert "keep the KV" not in advice(EngineConfig(**room))
    assert "keep the KV, by --preemption-mode auto" in advice(EngineConfig(**room, preemption_mode="recompute"))
