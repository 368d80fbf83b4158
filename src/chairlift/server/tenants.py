"""On whose behalf a request comes, and how urgently."""

from __future__ import annotations

import hashlib

from chairlift.config import EngineConfig
from chairlift.errors import ParameterError, show

MAX_PRIORITY = 2**31


def tenant_of(authorization: str | None, user: str | None) -> str:
    """The tenant of a request: a digest of its API key, and its `user` after a slash, as far as they are given.

    The prefix cache keeps tenants apart, so whoever has another API key can never time this one's cache; and fairness
    shares the engine among them, so the users of one key are told apart, too. The digest holds no slash: no `user` can
    pass for another key's. Clients that all send one made-up key ("none", "EMPTY") are one tenant. What a client says
    of its `user` is taken on trust: where that is no good, whoever gives out the keys must drop the field.

    Args:
        authorization: the header of that name, of which "Bearer KEY" counts.
    """
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"chairlift-tenant").hexdigest() if key else ""
    return f"{digest}/{user}" if user else digest


def check_priority(priority: object, config: EngineConfig) -> None:
    """Raises ParameterError for a priority that is none, or would have no effect."""
    least, most = -MAX_PRIORITY, MAX_PRIORITY - 1
    if not isinstance(priority, int) or isinstance(priority, bool) or not least <= priority <= most:
        raise ParameterError(
            "priority", f"priority must be a whole number from {least} to {most}, lower first, got {show(priority)}"
        )
    own_policy = config.scheduler_policy not in ("chunked", "continuous", "static")  # which may look at it
    if priority and config.order != "priority" and not own_policy:
        raise ParameterError(
            "priority",
            f"priority has no effect with --order {config.order}; leave it out, or start with --order priority",
        )
