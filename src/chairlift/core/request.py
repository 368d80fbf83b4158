"""What a client asks for (`SamplingParams`) and one sequence on its way through the engine (`Request`)."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.core.lookup import Lookup
from chairlift.errors import ParameterError, show

MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_SEED = 2**64 - 1
MAX_BEAMS = 64
MAX_MILLISECONDS = 1e9


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names and defaults are those of vLLM; a value out of range raises `ParameterError`.

    Fields:
        n: independent continuations of the prompt, 1 to 128.
        max_tokens: most tokens to generate; None means up to the context's end.
        min_tokens: no stop token is sampled before this many tokens.
        temperature: 0 is greedy; else logits are divided by it, at most 2.
        top_p, top_k, min_p: keep the smallest set of mass top_p, the top_k best (0 or -1: all), and tokens at least
            min_p times as likely as the best; applied in the order top_k, top_p, min_p, after the temperature.
        seed: 0 to 2**64 - 1. Sampling noise depends on (seed, sample index, position) alone. None: drawn at random.
        stop: strings that end the text, at most 16; not part of it unless include_stop_str_in_output.
        stop_token_ids: token ids that end it, at most 1024, besides the model's own end tokens.
        ignore_eos: do not stop at the model's end tokens.
        logprobs: return the log-probability of each sampled token and of this many best ones, 0 to 20. They are those
            of the model itself, before penalties, bias and temperature.
        prompt_logprobs: the same for each prompt token but the first.
        repetition_penalty: above 0; 1 is off. Divides (multiplies, if negative) the logits of all tokens seen so far.
        presence_penalty, frequency_penalty: -2 to 2; subtracted once, or per occurrence, for generated tokens.
        logit_bias: token id to a value, -100 to 100, added to its logit.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string that ended the text.
        best_of: draw this many samples and return the n with the best mean logprob; None means n.
        use_beam_search: return the n best of a beam search of width best_of (n if None). Temperature, top_p, top_k,
            min_p, penalties, bias and seed play no part in it and must be left alone (temperature may be 0).
        length_penalty: a beam's score is its logprob over its number of tokens to this power.
        ttft_ms, deadline_ms: the first token, and the last, must come within so many milliseconds of the request's
            arrival; a request that is late, or certain to be, ends with the finish reason ``deadline``.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    ttft_ms: float | None = None
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # vLLM and OpenAI accept a single string
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _items("stop", self.stop, "strings"))
        object.__setattr__(
            self,
            "stop_token_ids",
            _items("stop_token_ids", self.stop_token_ids, f"whole numbers from 0 to {2**31 - 1}"),
        )
        if not isinstance(self.logit_bias, Mapping | None):
            shown = show(self.logit_bias)
            raise ParameterError("logit_bias", f"logit_bias must map token ids to numbers, got {shown}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        _whole("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens", f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})"
            )
        _real("temperature", self.temperature, 0.0, 2.0)
        _real("top_p", self.top_p, 0.0, 1.0, above=True)
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _whole(name, count, 0, MAX_LOGPROBS)
        check_count("stop", len(self.stop), MAX_STOP, "strings")
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise ParameterError("stop", f"stop must hold non-empty strings, got {show(stop)}")
        check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "tokens")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)
        check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "tokens")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, 2**31 - 1)
            _real("logit_bias", bias, -100.0, 100.0)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "use_beam_search"):
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise ParameterError(name, f"{name} must be true or false, got {show(flag)}")
        for name, limit in (("ttft_ms", self.ttft_ms), ("deadline_ms", self.deadline_ms)):
            if limit is not None:
                _real(name, limit, 0.0, MAX_MILLISECONDS, above=True)
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n, MAX_N)
        _real("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.use_beam_search:
            self._check_beams()
        elif self.length_penalty != 1.0:
            raise ParameterError("length_penalty", "length_penalty has no effect without use_beam_search; leave it out")

    def _check_beams(self) -> None:
        """A beam search takes the likeliest tokens of the model itself: whatever else shapes a draw is an error."""
        _whole("best_of" if self.best_of else "n", self.width, 1, MAX_BEAMS)
        plain = SamplingParams()
        for name in _NOT_FOR_BEAMS:
            value = getattr(self, name)
            if value != getattr(plain, name) and not (name == "temperature" and value == 0):
                raise ParameterError(
                    name, f"{name} has no effect with use_beam_search; leave it out, got {show(value)}"
                )

    @property
    def width(self) -> int:
        """Sequences that run for a prompt: samples, of which the best n are returned, or beams."""
        return self.best_of or self.n

    @property
    def uses_history(self) -> bool:
        """Whether the logits depend on the tokens seen so far (penalties)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_NOT_FOR_BEAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "logprobs",
    "prompt_logprobs",
    "ttft_ms",
)


def _whole(param: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(param, f"{param} must be a whole number from {low} to {high}, got {show(value)}")


def _real(param: str, value: object, low: float, high: float, above: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low < value if above else low <= value) or not value <= high:  # type: ignore[operator]
        span = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ParameterError(param, f"{param} must be a number {span}, got {show(value)}")


def check_count(param: str, count: int, most: int, things: str) -> None:
    """Raises ParameterError if a parameter holds too much; checked before anything looks at what it holds."""
    if count > most:
        raise ParameterError(param, f"{param} holds {count} {things}; at most {most} are allowed")


def _items(param: str, value: object, things: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple | set | frozenset | None):
        raise ParameterError(param, f"{param} must be a list of {things}, got {show(value)}")
    return tuple(value or ())


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What a runner must know of a sequence and never changes.

    Fields:
        request_id, index: which sequence this is (`Request.key`).
        params: the request's.
        seed: the request's; with the sample's index and its position it fixes the noise.
        num_prompt: prompt length.
        stop_ids: the model's end tokens (unless ignore_eos) and params.stop_token_ids.
        num_logprobs: best tokens whose logprobs are wanted with each draw; None for none at all.
    """

    request_id: str
    index: int
    params: SamplingParams
    seed: int
    num_prompt: int
    stop_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None


Key = tuple[str, int]
"""What names a sequence among all live ones: the request's id and the sample's index."""


@dataclass(eq=False, slots=True)
class Reservation:
    """Blocks promised to a request and its samples, which draw on it together. ``left`` are not taken yet.

    ``for_prompt``: it is not enough for the samples, and is kept only until they are forked.
    """

    left: int = 0
    for_prompt: bool = False
    members: list[Request] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence. There is no prefill or decode state: tokens ``num_computed .. len(token_ids) - 1`` are still to do.

    | range of positions          | what it holds                                                                      |
    |-----------------------------|------------------------------------------------------------------------------------|
    | 0 .. num_prompt             | the prompt                                                                         |
    | num_prompt .. len(token_ids)| generated so far; num_pending more are being drawn                                 |
    | 0 .. num_computed           | tokens whose KV is valid                                                           |
    | num_computed .. num_planned | tokens whose KV steps in flight compute (drafts are none); equal when none is      |
    | 0 .. writable_end           | positions that may be written without asking `KVManager.grow`                      |

    Owners: the KV fields (the last group) belong to `KVManager`, which only caches ``table`` where a plan is made; the
    rest belongs to the scheduler and its parts (boarding, batch, shares).
    """

    id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()  # the model's end tokens (unless ignore_eos) and params.stop_token_ids
    index: int = 0  # which of the n samples this is
    num_samples: int = 1  # params.width before the prompt is computed, 1 after the fork
    tenant: str = ""
    priority: int = 0  # lower is served first
    arrival: float = 0.0

    info: SequenceInfo | None = None  # set by Scheduler.add, as are the next four
    plain: bool = False  # draws one token at a time, by its logits alone: the fast path of the scheduler
    max_len: int = 0  # longest that token_ids may become
    ticket: int = 0  # counts requests as they were added; samples share it
    queued_at: float = 0.0  # the engine's time when it was added
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    aborted: set[int] = field(default_factory=set)  # samples that are to end as soon as they are forked
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when first admitted
    num_preemptions: int = 0
    num_failures: int = 0  # steps of it that failed, one after the other
    failed_end: int = 0  # the position that it had not come past when one failed last
    num_prompt_logprobs: int = 0  # of those asked for, how many were already given out
    num_charged: int = 0  # positions that its tenant was charged for
    num_pending: int = 0  # tokens being drawn by a step in flight, 0 or 1
    pending: int = 0  # what stands for that token in the next step's item
    num_planned: int = 0
    lookup: Lookup | None = None  # of drafts; made when the first are wanted

    num_computed: int = 0
    writable_end: int = 0
    block_table: list[int] = field(default_factory=list)
    table: tuple[int, ...] | None = None  # block_table as plans carry it; None when that has changed
    block_hashes: list[bytes] = field(default_factory=list)
    num_indexed: int = 0  # full blocks that were seen to: others can find them, if prefixes are cached
    num_slid: int = 0  # blocks that every window has passed
    host_table: list[int] = field(
        default_factory=list
    )  # like block_table, of host and disk blocks; empty if not swapped
    num_swapped: int = 0  # tokens whose KV is there
    reservation: Reservation | None = None  # blocks promised to this request and its samples

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed; 1 while it decodes."""
        return len(self.token_ids) + self.num_pending - self.num_planned

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def samples(self) -> range:
        """Indexes of the samples that this sequence stands for."""
        return range(self.index, self.index + self.num_samples)

    @property
    def outputs(self) -> range:
        """Indexes under which its client hears of it: its samples, or the results of a beam search."""
        return range(self.params.n) if self.params.use_beam_search else self.samples

    @property
    def key(self) -> Key:
        return self.id, self.index

    def copy(self, index: int, length: int) -> Request:
        """A sequence of its own with the first ``length`` tokens of this one; it has no KV, and waits."""
        return Request(
            id=self.id,
            index=index,
            token_ids=self.token_ids[:length],
            num_prompt=self.num_prompt,
            params=self.params,
            seed=self.seed,
            stop_ids=self.stop_ids,
            max_len=self.max_len,
            ticket=self.ticket,
            queued_at=self.queued_at,
            tenant=self.tenant,
            priority=self.priority,
            arrival=self.arrival,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_charged=self.num_charged,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )

    def prepare(self, num_candidates: int | None = None) -> None:
        """Fills in what is derived from the rest, once index and samples are known. ``num_candidates``: tokens that a
        beam must be offered."""
        params = self.params
        num_logprobs = num_candidates if params.use_beam_search else params.logprobs
        self.info = SequenceInfo(self.id, self.index, params, self.seed, self.num_prompt, self.stop_ids, num_logprobs)
        self.plain = self.num_samples == 1 and not params.uses_history and not params.use_beam_search

    @property
    def deadline(self) -> float | None:
        """When its last token must have come."""
        limit = self.params.deadline_ms
        return None if limit is None else self.arrival + limit / 1000

    @property
    def ttft_deadline(self) -> float | None:
        """When its first token must have come."""
        limits = [limit for limit in (self.params.ttft_ms, self.params.deadline_ms) if limit is not None]
        return self.arrival + min(limits) / 1000 if limits else None


def make_request(
    id: str,
    token_ids: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    seed: int | None = None,
    arrival: float = 0.0,
    tenant: str = "",
    priority: int = 0,
) -> Request:
    """What a client asks for, completed with what the model and the settings say.

    Args:
        seed: for parameters that name none; None draws one at random.
        tenant: on whose behalf; the prefix cache and fairness keep tenants apart.
        priority: lower is served first.
    Raises:
        ParameterError: a token id is outside the vocabulary.
    """
    check_token_ids("prompt", token_ids, vocab_size)
    check_token_ids("logit_bias", params.logit_bias, vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.seed is not None:
        seed = params.seed
    stop_ids = frozenset(params.stop_token_ids)
    return Request(
        id=id,
        token_ids=token_ids,
        num_prompt=len(token_ids),
        params=params,
        seed=secrets.randbits(64) if seed is None else seed,
        stop_ids=stop_ids if params.ignore_eos else stop_ids | eos_token_ids,
        num_samples=params.width,
        arrival=arrival,
        tenant=tenant,
        priority=priority,
    )


def check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises ParameterError, naming ``param``, unless all are ids of tokens."""
    for token in token_ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ParameterError(param, f"{param} must hold token ids from 0 to {vocab_size - 1}, got {show(token)}")
