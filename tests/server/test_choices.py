"""best_of and beam search: which samples are returned, whole, and what is counted. The test plays the engine."""

from __future__ import annotations

import asyncio

import pytest

from chairlift.config import EngineConfig
from chairlift.core.plan import Output, StepStats, TokenLogprob
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.errors import GenerationFailed
from chairlift.server import ipc
from chairlift.server.choices import best, chooses, engine_params, mean_logprob
from chairlift.server.client import EngineClient
from chairlift.server.metrics import Metrics
from chairlift.server.service import Generation
from chairlift.server.text import Transcript


class FakeEngine:
    epoch = 0

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def sampled(index, text, logprob, reason=FinishReason.LENGTH):
    """A sample's only output: its bytes are its tokens."""
    entries = tuple(TokenLogprob(token, logprob, 1) for token in text)
    return Output("r", index, tuple(text), reason, entries)


def generation(toy, client, prompts=1, **params):
    params = engine_params(SamplingParams(max_tokens=50, **params))
    requests = [
        Request(id=f"r{i}" if i else "r", token_ids=[1], num_prompt=1, params=params, seed=0, num_samples=params.width)
        for i in range(prompts)
    ]
    transcripts = [
        Transcript(toy.ToyStream(True), params, frozenset()) for request in requests for _ in request.outputs
    ]
    return Generation(client.submit(requests), requests, transcripts, 0.0, Metrics(), EngineConfig())


def run(toy, outputs, **params):
    """The choices that come of what the engine says, and the generation."""

    async def scenario():
        client = EngineClient(FakeEngine())
        job = generation(toy, client, **params)
        client._receive(ipc.Outputs(0, outputs, StepStats()))
        return await job.choices(), job

    return asyncio.run(scenario())


def test_the_best_of_the_samples_are_returned(toy):
    outputs = [sampled(0, b"aa", -3.0), sampled(1, b"bbbb", -1.0), sampled(2, b"c", -2.0)]
    chosen, job = run(toy, outputs, n=2, best_of=3)
    assert [choice.text for choice in chosen] == ["bbbb", "c"]
    assert job.usage.completion_tokens == 7, "all that were drawn count"


def test_the_mean_counts_not_the_sum(toy):
    chosen, _ = run(toy, [sampled(0, b"a", -1.5), sampled(1, b"bbbb", -1.0)], best_of=2)
    assert [choice.text for choice in chosen] == ["bbbb"]


def test_only_tokens_before_a_stop_string_are_judged(toy):
    """The engine goes on for a step after a stop string; what it drew then is no part of the sample."""
    late = TokenLogprob(ord("x"), -100.0, 1)
    first = Output("r", 0, tuple(b"abx"), None, (TokenLogprob(97, -1.0, 1), TokenLogprob(98, -1.0, 1), late))
    chosen, _ = run(toy, [first, sampled(1, b"cc", -2.0)], best_of=2, stop=("b",))
    assert [choice.text for choice in chosen] == ["a"]


def test_each_prompt_has_its_own_best(toy):
    outputs = [sampled(0, b"a", -2.0), sampled(1, b"b", -1.0)]
    outputs += [output._replace(request_id="r1", new_token_ids=(99 + output.index,)) for output in reversed(outputs)]
    chosen, _ = run(toy, outputs, prompts=2, best_of=2)
    assert [choice.text for choice in chosen] == ["b", "d"]


def test_without_best_of_all_samples_are_returned_in_order(toy):
    chosen, _ = run(toy, [sampled(1, b"b", -1.0), sampled(0, b"a", -2.0)], n=2)
    assert [choice.text for choice in chosen] == ["a", "b"]


def test_a_sample_that_fails_fails_the_request(toy):
    with pytest.raises(GenerationFailed, match="not finite"):
        run(toy, [sampled(0, b"a", -1.0), Output("r", 1, (), FinishReason.ERROR, error="not finite")], best_of=2)


def test_a_beam_search_ends_with_its_results(toy):
    """The engine tells of n results, not of the beams; they come best first, each in one piece."""
    outputs = [
        Output("r", k, tuple(text), FinishReason.LENGTH, cumulative_logprob=-float(k))
        for k, text in enumerate((b"best", b"next"))
    ]
    chosen, job = run(toy, outputs, n=2, best_of=5, use_beam_search=True)
    assert [choice.text for choice in chosen] == ["best", "next"]
    value = job._metrics.registry.get_sample_value
    assert value("chairlift_time_to_first_token_seconds_count") == 2
    assert value("chairlift_inter_token_latency_seconds_count") == 0, "no time passes between tokens of one piece"


def test_what_the_engine_is_asked():
    """Its logprobs, if it takes them to choose; what the client asked for is left as it is."""
    assert engine_params(SamplingParams(best_of=2)).logprobs == 0
    for params in (
        SamplingParams(best_of=2, logprobs=3),
        SamplingParams(n=2),
        SamplingParams(n=2, best_of=2),
        SamplingParams(n=2, best_of=4, use_beam_search=True),
    ):
        assert engine_params(params) is params
    assert [chooses(SamplingParams(n=n, best_of=2)) for n in (1, 2)] == [True, False]


def test_order_of_the_best():
    assert best([-1.0, -0.5, -0.5, float("-inf")], 3) == [1, 2, 0], "of equals the earlier"
    assert (mean_logprob(-3.0, 2), mean_logprob(0.0, 0)) == (-1.5, float("-inf"))
