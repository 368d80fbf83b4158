"""From the configuration to the scheduler."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig
from chairlift.core.gates import Peak
from chairlift.core.order import ByPriority
from chairlift.core.plan import Capacity
from chairlift.core.policy import Continuous
from chairlift.engine_main import make_scheduler

CAPACITY = Capacity(num_blocks=64, block_size=16, max_model_len=256)


def test_times_are_in_seconds_and_a_step_is_not_all_of_the_time_between_tokens() -> None:
    """S2: planning and what becomes of the tokens come on top of a step's own time."""
    settings = make_scheduler(EngineConfig(slo_itl=40.0, max_batch_delay_ms=5.0), CAPACITY).settings
    assert settings.slo_itl == pytest.approx(0.0368) and settings.max_batch_delay == pytest.approx(0.005)
    assert make_scheduler(EngineConfig(), CAPACITY).settings.slo_itl is None


def test_drafts_are_those_of_the_configuration() -> None:
    assert make_scheduler(EngineConfig(num_speculative_tokens=6), CAPACITY).settings.num_speculative_tokens == 6
    assert make_scheduler(EngineConfig(), CAPACITY).settings.num_speculative_tokens == 0


def test_policy_gate_and_order_are_those_of_the_configuration() -> None:
    config = EngineConfig(
        scheduler_policy="continuous",
        admission="peak",
        order="priority",
        priority_ageing=7.0,
        max_num_batched_tokens=256,
    )
    policy = make_scheduler(config, CAPACITY).policy
    assert type(policy) is Continuous and type(policy.gate) is Peak and type(policy.order) is ByPriority
    assert policy.order._ageing == 7.0
