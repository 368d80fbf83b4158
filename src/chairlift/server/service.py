"""Between HTTP and the engine: tokenising, limits, seeds, and the life of one generation. No FastAPI here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from chairlift.config import EngineConfig
from chairlift.core.plan import Capacity
from chairlift.core.request import FinishReason, Request, SamplingParams, make_request
from chairlift.errors import (
    ChairliftError,
    ContextTooLong,
    GenerationFailed,
    ModelNotFound,
    NotReady,
    ParameterError,
    RequestRefused,
    show,
)
from chairlift.server.choices import best, chooses, engine_params, mean_logprob
from chairlift.server.client import EngineClient, News, ShuttingDown, Stream
from chairlift.server.goodput import Timing, outcome
from chairlift.server.inspection import Requests, engine_id
from chairlift.server.metrics import Metrics
from chairlift.server.tenants import check_priority
from chairlift.server.text import Delta, Tokenizer, Transcript

LONG_TEXT = 4096  # characters of a request; longer texts are tokenised off the event loop
DEFAULT_MAX_TOKENS = 16  # of /v1/completions


T = TypeVar("T")


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Service:
    """One served model.

    Attributes:
        names: names of the model that clients may use; the first is the one shown.
        tokenizer: None until it is loaded.
        requests: those of this server, for a person who asks how they fare.
    """

    def __init__(self, client: EngineClient, config: EngineConfig, names: Sequence[str], metrics: Metrics) -> None:
        self.client = client
        self.config = config
        self.names = tuple(names)
        self.metrics = metrics
        self.tokenizer: Tokenizer | None = None
        self.requests = Requests(client)
        self.started = int(time.time())

    @property
    def phase(self) -> str | None:
        """What the start is waiting for; None when ready."""
        if self.client.failure is not None:
            return str(self.client.failure)
        if self.client.ready is None:
            return self.client.phase
        if self.client.restarting:
            return f"replacing the engine: {self.client.phase}"
        return "tokenizer" if self.tokenizer is None else None

    def require_ready(self) -> tuple[Tokenizer, Capacity]:
        """Raises NotReady, or ShuttingDown. While an engine is replaced requests are taken: the next one gets them."""
        if isinstance(self.client.failure, ShuttingDown):
            self.client.require_alive()
        if self.client.failure is not None or self.tokenizer is None or self.client.ready is None:
            raise NotReady(f"the server is not ready: {self.phase}")
        return self.tokenizer, self.client.ready.capacity

    def require_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ModelNotFound(f"the model {show(name)} does not exist; this server has {self.names[0]!r}")

    # -- prompts

    async def encode(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
        """Token ids of completion prompts. Raises ContextTooLong, untokenised, for one that can never fit."""
        tokenizer, capacity = self.require_ready()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]

        def encode() -> list[list[int]]:
            for text in texts:
                _check_size([text], "prompt", tokenizer, capacity)
            return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

        return await _maybe_in_thread(sum(map(len, texts)), encode)

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation. Raises as `encode` does."""
        tokenizer, capacity = self.require_ready()
        if not tokenizer.has_chat_template:
            raise ParameterError("messages", "this model has no chat template; use /v1/completions")

        def encode() -> list[int]:
            _check_size([message["content"] for message in messages], "messages", tokenizer, capacity)
            return tokenizer.encode_chat(messages)

        try:
            return await _maybe_in_thread(sum(len(text) for message in messages for text in message.values()), encode)
        except ContextTooLong:
            raise
        except ChairliftError as error:
            raise ParameterError("messages", str(error)) from error

    # -- generation

    def generate(
        self,
        request_id: str,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        arrival: float,
        prompt_param: str,
        limit_param: str | None,
        tenant: str = "",
        priority: int = 0,
    ) -> Generation:
        """Sends the prompts to the engine.

        ``limit_param`` names the parameter by which the client asked for a number of tokens, None if it did not: then
        params.max_tokens is a wish that is cut to what the context has room for. A number that was asked for and does
        not fit is refused, never cut.
        """
        tokenizer, _ = self.require_ready()
        if params.width > self.config.max_num_seqs:
            name, limit = "n" if params.best_of is None else "best_of", self.config.max_num_seqs
            raise ParameterError(
                name, f"{name} must be a whole number from 1 to {limit} (max-num-seqs), got {params.width}"
            )
        check_priority(priority, self.config)
        requests = []
        for i, prompt in enumerate(prompts):
            self._check_room(prompt, params, prompt_param, limit_param)
            requests.append(
                make_request(
                    engine_id(request_id, i),
                    list(prompt),
                    engine_params(params),
                    vocab_size=tokenizer.vocab_size,
                    eos_token_ids=tokenizer.eos_token_ids,
                    seed=self.config.seed,
                    arrival=arrival,
                    tenant=tenant,
                    priority=priority,
                )
            )
        transcripts = [
            Transcript(tokenizer.stream(params.skip_special_tokens, request.token_ids), params, request.stop_ids)
            for request in requests
            for _ in request.outputs
        ]
        stream = self.client.submit(requests)
        self.requests.remember(request_id, len(requests))
        return Generation(stream, requests, transcripts, arrival, self.metrics, self.config)

    def _check_room(
        self,
        prompt: list[int],
        params: SamplingParams,
        prompt_param: str,
        limit_param: str | None,
    ) -> None:
        ready = self.client.ready
        assert ready is not None
        capacity = ready.capacity
        limit, length, wanted = capacity.max_model_len, len(prompt), params.max_tokens
        if not prompt:
            raise ParameterError(prompt_param, f"{prompt_param} is empty; it must hold at least one token")
        if length >= limit:
            raise _prompt_too_long(prompt_param, f"{length} tokens", limit)
        if limit_param is not None and wanted is not None and length + wanted > limit:
            raise ContextTooLong(
                limit_param,
                f"the prompt's {length} tokens and {limit_param} of {wanted} make {length + wanted}, more than this "
                f"model's context of {limit}; lower {limit_param} to {limit - length} or shorten the prompt",
            )
        total = limit if wanted is None else min(limit, length + wanted)
        needed = ready.held(total)
        if needed > capacity.num_blocks:
            raise ContextTooLong(
                limit_param or prompt_param,
                f"prompt and output may take {total} tokens, which need {needed} KV blocks, and the whole cache has "
                f"{capacity.num_blocks}; ask for less, or start the server with a larger --kv-cache-memory",
            )


def _check_size(texts: Sequence[str], param: str, tokenizer: Tokenizer, capacity: Capacity) -> None:
    """Refuses a prompt that is too long for the context however few tokens it becomes, before the work is done."""
    if sum(map(len, texts)) > LONG_TEXT:
        least = -(-sum(len(text.encode()) for text in texts) // tokenizer.longest_token)
        if least >= capacity.max_model_len:
            raise _prompt_too_long(param, f"at least {least} tokens", capacity.max_model_len)


def _prompt_too_long(param: str, length: str, limit: int) -> ContextTooLong:
    return ContextTooLong(
        param,
        f"the prompt has {length}, and this model's context is {limit} tokens with at least one of output; "
        f"shorten the prompt to {limit - 1} tokens, or start the server with a larger --max-model-len",
    )


async def _maybe_in_thread(length: int, encode: Callable[[], T]) -> T:
    return await asyncio.to_thread(encode) if length > LONG_TEXT else encode()


class Generation:
    """All samples of one HTTP request, of which some or all are its choices. Close it when done with it.

    Prompt i's sample k is sample ``i * w + k``, where w is how many the engine tells of for each prompt.
    """

    def __init__(
        self,
        stream: Stream,
        requests: list[Request],
        transcripts: list[Transcript],
        arrival: float,
        metrics: Metrics,
        config: EngineConfig,
    ) -> None:
        self._stream = stream
        self._transcripts = transcripts
        self._metrics = metrics
        self._config = config
        self._params = requests[0].params
        self._width = len(requests[0].outputs)
        self._first_sample = {request.id: i * self._width for i, request in enumerate(requests)}
        self._timings = [Timing(arrival) for _ in transcripts]
        self._logprobs = [0.0] * len(transcripts)  # summed, of those that the engine was asked for
        self._cached: dict[str, int] = {}
        self.usage = Usage(prompt_tokens=sum(request.num_prompt for request in requests))
        metrics.received.inc(len(transcripts))
        metrics.prompt_tokens.inc(self.usage.prompt_tokens)

    async def deltas(self) -> AsyncIterator[dict[int, Delta]]:
        """Per wake-up what each sample gained, until all have ended. Raises GenerationFailed, RequestRefused,
        EngineDead or ShuttingDown if they cannot."""
        while news := await self._stream.read():
            gained: dict[int, Delta] = {}
            for item in news:
                sample = self._first_sample[item.output.request_id] + item.output.index
                delta = self._take(sample, item)
                if sample in gained:
                    gained[sample].extend(delta)
                else:
                    gained[sample] = delta
            yield gained

    async def choices(self) -> list[Delta]:
        """When all samples have ended, the choices, each whole: n a prompt. Raises as `deltas` does."""
        samples = [Delta() for _ in self._transcripts]
        async for gained in self.deltas():
            for sample, delta in gained.items():
                samples[sample].extend(delta)
        if not chooses(self._params):
            return samples
        chosen: list[Delta] = []
        for first in self._first_sample.values():
            together = range(first, first + self._width)
            means = [mean_logprob(self._logprobs[k], self._timings[k].num_tokens) for k in together]
            chosen += [samples[together[k]] for k in best(means, self._params.n)]
        return chosen

    def _take(self, sample: int, news: News) -> Delta:
        output, transcript = news.output, self._transcripts[sample]
        if transcript.finish_reason is not None:
            return Delta()
        self._cached[output.request_id] = max(self._cached.get(output.request_id, 0), output.num_cached_tokens)
        self.usage.cached_tokens = sum(self._cached.values())
        delta = transcript.feed(output)
        self._count(sample, news.arrived, len(delta.token_ids))
        self._logprobs[sample] += sum(entry.logprob for entry in output.logprobs[: len(delta.token_ids)])
        if delta.finish_reason is not None:
            self._end(sample, news, delta.finish_reason)
        return delta

    def _count(self, sample: int, arrived: float, tokens: int) -> None:
        if not tokens:
            return
        timing = self._timings[sample]
        self.usage.completion_tokens += tokens
        self._metrics.generation_tokens.inc(tokens)
        between, last = tokens, timing.last
        if last is None:
            self._metrics.ttft.observe(arrived - timing.arrival)
            between, last = 0 if self._params.use_beam_search else tokens - 1, arrived  # beams come all at once
        for _ in range(between):
            self._metrics.itl.observe((arrived - last) / between)
        timing.add(tokens, arrived)

    def _end(self, sample: int, news: News, reason: FinishReason) -> None:
        output, timing = news.output, self._timings[sample]
        self._metrics.finished.labels(reason.value).inc()
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            message = output.error or "the engine ended this request"
            raise RequestRefused(message) if output.refused else GenerationFailed(message)
        if output.finish_reason is None:  # a stop string, which the engine knows nothing of
            self._stream.end(output.request_id, output.index)
        self._metrics.e2e.observe(news.arrived - timing.arrival)
        self._metrics.goodput.labels(outcome(self._config, self._params, timing, reason, news.arrived)).inc()

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends what still runs, counting it as ended by ``reason``. Call it always, however the answer ended."""
        self._stream.close()
        for transcript in self._transcripts:
            if transcript.finish_reason is None:
                transcript.finish_reason = reason
                self._metrics.finished.labels(reason.value).inc()
