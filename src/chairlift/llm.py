"""The engine in this process, for offline use. Names and results are those that vLLM's users expect."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from chairlift import engine_main, models
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.core.clock import WallClock
from chairlift.core.plan import Output, StepStats, TokenLogprob
from chairlift.core.ports import Abort, Add, Message, Pin, Report
from chairlift.core.request import FinishReason, Request, SamplingParams, make_request
from chairlift.errors import ConfigError, GenerationFailed, ParameterError, RequestRefused, show
from chairlift.server.choices import best, chooses, engine_params, mean_logprob
from chairlift.server.prefix import fitting_tokens, read_prefix
from chairlift.server.tenants import check_priority
from chairlift.server.text import Delta, Transcript

if TYPE_CHECKING:
    from chairlift.models.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages such as {"role": "user", "content": "Hello"}."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, its rank (1 is the most likely; None if not known), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n continuations of a prompt.

    Fields:
        cumulative_logprob: of all tokens; None unless logprobs, best_of or a beam search made them known.
        finish_reason: "stop", "length" or "deadline".
        stop_reason: the stop string or the stop token id that ended it; None at the model's own end or the length.
        logprobs: per token, the drawn one and the best alternatives, by token id; None if not asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and all its continuations. ``prompt_logprobs``, if asked for, begins with None: nothing precedes the
    first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0


class _Mailbox:
    """Source and sink of an engine that runs in the caller's own thread.

    ``inboxes``, by request id: who reads a request's outputs. Of a request without one nobody wants to know any more.
    """

    def __init__(self, clock: WallClock) -> None:
        self.messages: list[Message] = []
        self.inboxes: dict[str, list[Output]] = {}
        self._clock = clock

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        if idle and until is not None and not self.messages:  # nobody else can send any meanwhile
            time.sleep(min(engine_main.IDLE_SECONDS, max(0.0, until - self._clock.now())))
        taken, self.messages = self.messages, []
        return taken

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        for output in outputs:
            if output.request_id in self.inboxes:
                self.inboxes[output.request_id].append(output)

    def answer(self, report: Report) -> None:
        """Nobody here has asked."""


class LLM:
    """A model, loaded and ready.

    Args:
        model: as in `EngineConfig.model`.
        tokenizer: the model's, if it has been loaded already.
        settings: any other field of `EngineConfig`.
    Raises:
        ConfigError, ModelError: the settings or the model cannot work; the message says why.
    """

    def __init__(
        self, model: str | Path = DEFAULT_MODEL, *, tokenizer: Tokenizer | None = None, **settings: Any
    ) -> None:
        known = {field.name for field in fields(EngineConfig)}
        for name in settings.keys() - known:
            raise ConfigError(f"LLM() has no setting {name!r}; the settings are {', '.join(sorted(known))}")
        self.config = EngineConfig(model=str(model), **settings)
        self._tokenizer = tokenizer or models.load_tokenizer(self.config.model)
        beginning = None if self.config.pin_prefix is None else read_prefix(self.config.pin_prefix)
        self._clock = WallClock()
        self._mailbox = _Mailbox(self._clock)
        self.engine = engine_main.build_engine(self.config, self._mailbox, self._mailbox, clock=self._clock)
        self._ids = count()
        if beginning is not None:
            scheduler = self.engine.scheduler
            chunk = scheduler.settings.max_num_batched_tokens
            pinned = fitting_tokens(beginning, self._tokenizer, scheduler.capacity, chunk)
            self._mailbox.messages.append(Pin(tuple(pinned)))
            while self.engine.step():
                pass

    def close(self) -> None:
        """Ends the engine, which keeps the prefix cache where it has a disk for it, and frees its memory. Also called
        at the end of a ``with`` block."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continues all prompts, in one continuously batched run; results come in the order of the prompts.

        Args:
            prompts: one or many of `Prompt`.
            sampling_params: for all, or one for each; by default SamplingParams(), which samples at temperature 1.
            use_tqdm: draw a progress bar, if stderr is a terminal.
            priority: for all, or one for each; lower is served first. Only with order="priority".
        Raises:
            ParameterError, RequestRefused: a prompt or parameter cannot work; the others get no answer either.
            GenerationFailed: the engine could not finish a request.
        """
        pairs = [self._encode(prompt) for prompt in _as_list(prompts)]
        texts, token_ids = [text for text, _ in pairs], [ids for _, ids in pairs]
        return self._generate(texts, token_ids, sampling_params, use_tqdm, priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The ``beam_width`` likeliest continuations that a beam search finds, best first. Else like `generate`, which
        does the same with `SamplingParams.use_beam_search`."""
        params = SamplingParams(
            n=beam_width,
            max_tokens=max_tokens,
            use_beam_search=True,
            length_penalty=length_penalty,
            ignore_eos=ignore_eos,
        )
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, through the model's chat template. Else like `generate`."""
        single = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Conversation]", [messages] if single else messages)
        _check_conversations(conversations)
        token_ids = [self._tokenizer.encode_chat([dict(m) for m in conversation]) for conversation in conversations]
        return self._generate([None] * len(token_ids), token_ids, sampling_params, use_tqdm)

    def stream(self, token_ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """The text of one continuation, piece by piece, as it is generated."""
        if params.width > 1 or params.use_beam_search:
            name = "use_beam_search" if params.use_beam_search else "best_of" if params.best_of else "n"
            raise ParameterError(name, f"{name} must be left alone to stream one continuation; use LLM.generate for it")
        request = self._request(list(token_ids), params)
        for _, _, delta in self._run([request]):
            if delta.text:
                yield delta.text

    # -- inside

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        given = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        if isinstance(given, str):
            return given, self._tokenizer.encode(given)
        if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
            raise ParameterError(
                "prompts", f"a prompt must be text, token ids or a mapping of either, got {show(prompt)}"
            )
        return None, list(given)

    def _request(self, token_ids: list[int], params: SamplingParams, priority: int = 0) -> Request:
        return make_request(
            str(next(self._ids)),
            token_ids,
            engine_params(params),
            vocab_size=self._tokenizer.vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
            seed=self.config.seed,
            arrival=self._clock.now(),
            priority=priority,
        )

    def _generate(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        each = _for_each(sampling_params, len(token_ids))
        priorities = _priorities(priority, len(token_ids), self.config)
        requests = [self._request(*given) for given in zip(token_ids, each, priorities, strict=True)]
        results = {
            request.id: RequestOutput(request.id, text, list(ids), [_empty(k, request.params) for k in request.outputs])
            for request, text, ids in zip(requests, texts, token_ids, strict=True)
        }
        with _progress_bar(use_tqdm, sum(len(request.outputs) for request in requests)) as advance:
            for request_id, output, delta in self._run(requests):
                self._record(results[request_id], output, delta)
                advance(delta.finish_reason is not None)
        for result, params in zip(results.values(), each, strict=True):
            if chooses(params):
                result.outputs = _choose(result.outputs, params)
        return list(results.values())

    def _run(self, requests: list[Request]) -> Iterator[tuple[str, Output, Delta]]:
        """Runs requests to their end; yields news as it comes. Whatever ends this early ends the requests, too."""
        transcripts = {
            (request.id, k): Transcript(
                self._tokenizer.stream(request.params.skip_special_tokens, request.token_ids),
                request.params,
                request.stop_ids,
            )
            for request in requests
            for k in request.outputs
        }
        inbox: list[Output] = []
        self._mailbox.inboxes.update((request.id, inbox) for request in requests)
        self._mailbox.messages += [Add(request) for request in requests]
        open_samples = set(transcripts)
        try:
            while open_samples:
                if not inbox:  # else another run, in turns with this one, has stepped the engine
                    self.engine.step()
                outputs = inbox.copy()
                inbox.clear()
                for output in outputs:
                    key = (output.request_id, output.index)
                    if key not in open_samples:
                        continue  # a sample that a stop string ended; the engine was told
                    if output.finish_reason is FinishReason.ERROR:
                        raise (RequestRefused if output.refused else GenerationFailed)(output.error)
                    delta = transcripts[key].feed(output)
                    if delta.finish_reason is not None:
                        open_samples.discard(key)
                        if output.finish_reason is None:
                            self._mailbox.messages.append(Abort(*key))
                    yield output.request_id, output, delta
        finally:
            for request in requests:
                del self._mailbox.inboxes[request.id]
            self._mailbox.messages += [Abort(request_id) for request_id in {key[0] for key in open_samples}]

    def _record(self, result: RequestOutput, output: Output, delta: Delta) -> None:
        completion = result.outputs[output.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            for entry in output.logprobs[: len(delta.token_ids)]:
                completion.logprobs.append(self._logprobs(entry))
                completion.cumulative_logprob += entry.logprob
        if output.cumulative_logprob is not None:
            completion.cumulative_logprob = output.cumulative_logprob
        if output.prompt_logprobs:
            known: list[dict[int, Logprob] | None] = result.prompt_logprobs or [None]
            result.prompt_logprobs = known + [self._logprobs(entry) for entry in output.prompt_logprobs]
        result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
        if delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason.value
            completion.stop_reason = delta.stop_reason
            result.finished = all(completion.finished() for completion in result.outputs)

    def _logprobs(self, entry: TokenLogprob) -> dict[int, Logprob]:
        """The best tokens by rank, and the token itself, which may not be among them."""
        text = self._tokenizer.token_text
        best = {token: Logprob(value, rank, text(token)) for rank, (token, value) in enumerate(entry.top, 1)}
        return best | {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ParameterError("prompts", f"prompts must be a prompt or a list of prompts, got {show(prompts)}")
    single = bool(prompts) and isinstance(prompts[0], int)
    return cast("list[Prompt]", [prompts] if single else list(prompts))


def _check_conversations(conversations: object) -> None:
    for conversation in conversations if isinstance(conversations, Sequence) else (conversations,):
        messages = conversation if isinstance(conversation, Sequence) else ()
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise ParameterError(
                "messages", f"a conversation must be a list of messages with role and content, got {show(conversation)}"
            )


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One `SamplingParams` for each of ``count`` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Sequence) else [params]
    if len(each) != count or not all(isinstance(one, SamplingParams) for one in each):
        raise ParameterError(
            "sampling_params",
            f"sampling_params must be one SamplingParams, or a list with one for each of the {count} prompts, "
            f"got {show(params)}",
        )
    return each


def _priorities(priority: int | Sequence[int], count: int, config: EngineConfig) -> list[int]:
    """One priority for each of ``count`` prompts."""
    each = list(priority) if isinstance(priority, Sequence) else [priority] * count
    if len(each) != count:
        raise ParameterError(
            "priority",
            f"priority must be one number, or a list with one for each of the {count} prompts, got {show(priority)}",
        )
    for one in each:
        check_priority(one, config)
    return each


def _choose(samples: Sequence[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """The best n of best_of, in the order in which they are returned."""
    means = [mean_logprob(sample.cumulative_logprob or 0.0, len(sample.token_ids)) for sample in samples]
    chosen = [samples[k] for k in best(means, params.n)]
    for index, sample in enumerate(chosen):
        sample.index = index
        if params.logprobs is None:
            sample.logprobs = None
    return chosen


def _empty(index: int, params: SamplingParams) -> CompletionOutput:
    if params.logprobs is None:
        return CompletionOutput(index)
    return CompletionOutput(index, cumulative_logprob=0.0, logprobs=[])


class _progress_bar:
    """``with _progress_bar(wanted, total) as advance: advance(steps)``."""

    def __init__(self, wanted: bool, total: int) -> None:
        self._bars = None
        if wanted and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import MofNCompleteColumn, Progress

            self._bars = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True))
            self._task = self._bars.add_task("Generating", total=total)

    def __enter__(self) -> Any:
        if self._bars is None:
            return lambda steps: None
        self._bars.start()
        return lambda steps: self._bars.advance(self._task, steps)

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()
