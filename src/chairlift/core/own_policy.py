"""A policy of one's own, loaded by its import path and held to what a policy may do: no decision of it changes an
answer or stops the engine. Where it goes beyond, or fails, a ConfigError names it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from typing import TypeVar, cast

from chairlift.core.gates import Gate, Optimistic, Peak, Reserve
from chairlift.core.kv import KVManager
from chairlift.core.order import Order, SortKey
from chairlift.core.policy import Chunked, Group, Policy
from chairlift.core.request import Request
from chairlift.errors import ConfigError

T = TypeVar("T")

_NO_MORE = object()


def load(path: str, gate: Gate, order: Order) -> Policy:
    """An instance of the class at an import path, checked for what a policy must have."""
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module:
        raise ConfigError(
            f"--scheduler-policy must be chunked, continuous, static or an import path such as mypkg.MyPolicy, "
            f"got {path!r}"
        )
    try:
        policy = getattr(importlib.import_module(module), name)(gate, order)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--scheduler-policy {path} cannot be used: {_one_line(error)}") from error
    missing = [part for part in (*Policy.__annotations__, "groups", "quota", "padding") if not hasattr(policy, part)]
    if missing:
        raise ConfigError(f"--scheduler-policy {path} is no policy: it lacks {', '.join(missing)}")
    if type(policy.gate) not in (Optimistic, Reserve, Peak):
        raise ConfigError(f"--scheduler-policy {path} is no policy: its gate must be one of chairlift.core.gates")
    if not isinstance(policy.order, Order):
        raise ConfigError(f"--scheduler-policy {path} is no policy: its order must extend chairlift.core.order.Order")
    return Checked(cast(Policy, policy), path)


class Checked:
    """Somebody's policy, held to what a policy may do: whatever it decides, no answer changes. Raises ConfigError,
    naming it, where it goes beyond."""

    def __init__(self, policy: Policy, path: str) -> None:
        self.gate = policy.gate
        self.order: Order = CheckedOrder(policy.order, path)
        self.whole, self.holds = policy.whole, policy.holds
        self._policy = policy
        self._path = path
        self._fallback = Chunked(self.gate, self.order)
        self._computes_nothing = False  # and nothing is in flight: this step is the fallback's

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        self._computes_nothing = False
        groups = self._ask("groups", lambda: iter(self._policy.groups(waiting, running, slots)))
        while (group := self._ask("groups", lambda: next(groups, _NO_MORE))) is not _NO_MORE:
            if not isinstance(group, Group):
                raise self._error(f"groups() gave {group!r}, which is no Group")
            named = [*group.running, *group.partial]
            if len(set(map(id, named))) != len(named) or not set(map(id, named)) <= set(map(id, running)):
                raise self._error("groups() named a request twice, or one that does not run")
            yield Group(
                [request for request in named if request.num_remaining == 1],
                [request for request in named if request.num_remaining > 1],
                group.boards,
            )
        if not any(request.num_planned > request.num_computed for request in running):
            self._computes_nothing = True
            yield from self._fallback.groups(waiting, running, slots)

    def quota(self, need: int, left: int) -> int:
        if self._computes_nothing:
            return self._fallback.quota(need, left)
        n = self._ask("quota", lambda: self._policy.quota(need, left))
        if not isinstance(n, int):
            raise self._error(f"quota() gave {n!r}, which is no whole number")
        return max(0, min(n, need, left))

    def padding(self, request: Request) -> int:
        if self._computes_nothing:
            return 0
        n = self._ask("padding", lambda: self._policy.padding(request))
        return max(0, min(n, request.max_len - len(request.token_ids))) if isinstance(n, int) else 0

    def __repr__(self) -> str:
        return self._path

    def _ask(self, what: str, question: Callable[[], T]) -> T:
        return _ask(self._path, what, question)

    def _error(self, what: str) -> ConfigError:
        return _error(self._path, what)


class CheckedOrder(Order):
    """Somebody's order, held to what an order may do."""

    def __init__(self, order: Order, path: str) -> None:
        self.preempts = order.preempts
        self._order = order
        self._path = path

    def key(self, request: Request) -> SortKey:
        key = _ask(self._path, "order.key", lambda: self._order.key(request))
        if not isinstance(key, (int, float)) or not isfinite(key):
            raise _error(self._path, f"order.key() gave {key!r}, which is no finite number")
        return key

    def choose(self, waiting: Iterable[Request], kv: KVManager, now: float) -> Request:
        seen: list[Request] = []
        chosen = _ask(self._path, "order.choose", lambda: self._order.choose(_noting(waiting, seen), kv, now))
        if not any(chosen is request for request in seen):
            raise _error(self._path, "order.choose() chose none of those who wait")
        return chosen

    def outranks(self, waiting: Request, running: Request) -> bool:
        return bool(_ask(self._path, "order.outranks", lambda: self._order.outranks(waiting, running)))

    def victim(self, candidates: Iterable[Request]) -> Request | None:
        known = list(candidates)
        victim = _ask(self._path, "order.victim", lambda: self._order.victim(iter(known)))
        return next((request for request in known if request is victim), super().victim(known))


def _noting(requests: Iterable[Request], seen: list[Request]) -> Iterator[Request]:
    for request in requests:
        seen.append(request)
        yield request


def _ask(path: str, what: str, question: Callable[[], T]) -> T:
    try:
        return question()
    except Exception as error:
        raise _error(path, f"{what}() raised {_one_line(error)}") from error


def _error(path: str, what: str) -> ConfigError:
    return ConfigError(f"--scheduler-policy {path}: {what}")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
