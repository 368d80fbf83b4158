"""The clients of a load: when requests are sent, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chairlift.bench.clients import Clients, Prompts
from chairlift.core.clock import VirtualClock
from chairlift.core.plan import Output, StepStats
from chairlift.core.ports import Add, Message
from chairlift.core.request import FinishReason, Request
from chairlift.errors import ChairliftError
from chairlift.sim.workloads import Phase, WorkRequest


def ids(messages: Sequence[Message]) -> list[str]:
    return [message.request.id for message in messages if isinstance(message, Add)]


def start(phase: Phase, clock: VirtualClock) -> tuple[Clients, list[Request]]:
    sent: list[Request] = []
    return Clients(phase, Prompts(1000, 0), clock, clock.advance, sent.append), sent


def finish(request_id: str) -> Output:
    return Output(request_id, finish_reason=FinishReason.LENGTH)


def test_closed_loop_sends_the_next_request_when_one_is_answered() -> None:
    clock = VirtualClock(5.0)
    phase = Phase("", tuple(WorkRequest(str(i), 3, 2) for i in range(4)), clients=2)
    clients, sent = start(phase, clock)
    assert ids(clients.take(idle=True)) == ["0", "1"]
    assert ids(clients.take(idle=False)) == []
    clock.advance(1.0)
    clients.put([Output("0", new_token_ids=(7,))], StepStats())
    assert ids(clients.take(idle=False)) == []
    clients.put([finish("0")], StepStats())
    clock.advance(0.5)  # the engine takes it a moment after it was sent
    assert ids(clients.take(idle=False)) == ["2"]
    assert not clients.done
    clients.put([finish("1"), finish("2")], StepStats())
    assert ids(clients.take(idle=False)) == ["3"]
    assert clients.done
    assert [request.arrival for request in sent] == [5.0, 5.0, 6.0, 6.5]


def test_open_loop_sends_on_time_and_counts_from_when_a_request_was_due() -> None:
    clock = VirtualClock(10.0)
    phase = Phase("", (WorkRequest("late", 3, 2, 3.0), WorkRequest("early", 3, 2, 1.0)))
    clients, sent = start(phase, clock)
    assert ids(clients.take(idle=False)) == []
    assert ids(clients.take(idle=True)) == ["early"], "an idle engine waits for the first request"
    assert clock.now() == 11.0
    clock.advance(5.0)  # a long step
    assert ids(clients.take(idle=False)) == ["late"]
    assert [request.arrival for request in sent] == [11.0, 13.0]


def test_requests_have_their_exact_lengths_and_are_greedy() -> None:
    clients, sent = start(Phase("", (WorkRequest("x", 17, 5),)), VirtualClock())
    clients.take(idle=True)
    (request,) = sent
    assert len(request.token_ids) == request.num_prompt == 17
    assert (request.params.max_tokens, request.params.temperature, request.params.ignore_eos) == (5, 0.0, True)
    assert request.stop_ids == frozenset()


def test_prompts_are_the_seed_s_and_share_no_beginning() -> None:
    """Q4"""
    requests = [WorkRequest(str(i), 16, 1) for i in range(50)]
    prompts = [tuple(Prompts(49152, 1).tokens(request)) for request in requests]
    assert prompts == [tuple(Prompts(49152, 1).tokens(request)) for request in requests]
    assert prompts[0] != tuple(Prompts(49152, 2).tokens(requests[0]))
    assert len({prompt[:2] for prompt in prompts}) == 50
    assert all(0 <= token < 49152 for prompt in prompts for token in prompt)


def test_a_request_that_fails_ends_the_run() -> None:
    clients, _ = start(Phase("", (WorkRequest("x", 3, 2),)), VirtualClock())
    with pytest.raises(ChairliftError, match="request x of the load failed: too long"):
        clients.put([Output("x", finish_reason=FinishReason.ERROR, error="too long")], StepStats())


def test_some_requests_wait_for_tokens_of_others_and_some_seconds_more() -> None:
    clock = VirtualClock(5.0)
    requests = (
        WorkRequest("second", 3, 2, arrival_s=0.5, after_tokens=4),
        WorkRequest("flood", 3, 9),
        WorkRequest("first", 3, 2, after_tokens=3),
    )
    clients, sent = start(Phase("", requests), clock)
    assert ids(clients.take(idle=True)) == ["flood"]
    clients.put([Output("flood", new_token_ids=(7, 7))], StepStats())
    assert ids(clients.take(idle=False)) == []
    clock.advance(1.0)
    clients.put([Output("flood", new_token_ids=(7, 7))], StepStats())
    assert ids(clients.take(idle=False)) == ["first"]
    assert not clients.done
    clock.advance(0.6)
    assert ids(clients.take(idle=False)) == ["second"]
    assert clients.done
    assert [request.arrival for request in sent] == [5.0, 6.0, 6.5]


def test_who_waits_for_tokens_that_nobody_will_give_is_sent_when_all_are_answered() -> None:
    clock = VirtualClock(5.0)
    clients, _ = start(Phase("", (WorkRequest("x", 3, 2), WorkRequest("y", 3, 2, 0.5, after_tokens=100))), clock)
    assert ids(clients.take(idle=True)) == ["x"]
    clients.put([finish("x")], StepStats())
    assert ids(clients.take(idle=False)) == []
    assert ids(clients.take(idle=True)) == ["y"]
    assert clock.now() == 5.5


def test_idle_clients_wait_no_longer_than_the_engine_allows() -> None:
    clock = VirtualClock(10.0)
    clients, _ = start(Phase("", (WorkRequest("x", 3, 2, 3.0),)), clock)
    assert ids(clients.take(idle=True, until=11.0)) == []
    assert clock.now() == 11.0
    assert ids(clients.take(idle=True, until=20.0)) == ["x"]
    assert clock.now() == 13.0
    assert ids(clients.take(idle=True, until=14.0)) == []
    assert clock.now() == 14.0, "with nothing to send, it is the engine that waits for something"


def test_requests_share_just_the_tokens_they_are_to_share_and_name_their_tenant() -> None:
    phase = Phase("", (WorkRequest("x", 9, 1, shared_tokens=5), WorkRequest("y", 12, 1, shared_tokens=5, tenant="T")))
    clients, sent = start(phase, VirtualClock())
    clients.take(idle=True)
    x, y = sent
    assert (len(x.token_ids), len(y.token_ids)) == (9, 12)
    assert x.token_ids[:5] == y.token_ids[:5] and x.token_ids[5:] != y.token_ids[5:9]
    assert (x.tenant, y.tenant) == ("", "T")
