"""Who a request comes from: API keys are kept apart, and the users of one (S5)."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ParameterError
from chairlift.server.tenants import check_priority, tenant_of


def test_keys_and_users_are_told_apart():
    given = [(None, None), ("Bearer a", None), ("Bearer b", None), (None, "u"), (None, "v"), ("Bearer a", "u")]
    assert len({tenant_of(*one) for one in given}) == len(given)
    assert tenant_of(None, None) == tenant_of("Basic a", None) == tenant_of("Bearer ", "") == ""
    assert tenant_of("Bearer a", "u") == tenant_of("bearer a ", "u")


def test_no_user_can_pass_for_another_key():
    """The prefix cache keeps tenants apart by this name alone."""
    victim = tenant_of("Bearer secret", "u")
    digest = tenant_of("Bearer secret", None)
    assert "/" not in digest and "secret" not in victim
    for user in (victim, digest, f"{digest}/", f"/{victim}", "u"):
        for key in (None, "Bearer other"):
            assert tenant_of(key, user) not in (victim, digest)


def test_priority():
    ordered = EngineConfig(order="priority")
    for priority in (0, -(2**31), 2**31 - 1):
        check_priority(priority, ordered)
    check_priority(0, EngineConfig())
    with pytest.raises(ParameterError, match="--order fcfs; leave it out, or start with --order priority"):
        check_priority(1, EngineConfig())
    for wrong in (2**31, -(2**31) - 1, 1.0, True, "1", None, [], {}):
        with pytest.raises(ParameterError, match="priority must be a whole number from -2147483648 to 2147483647"):
            check_priority(wrong, ordered)
