"""The plain data that passes between scheduler, runner and client. Immutable, free of tensors, easy to record."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chairlift.core.request import FinishReason, SamplingParams


class BlockOpKind(enum.IntEnum):
    COPY = 0  # device block src to device block dst
    SWAP_OUT = 1  # device to host
    SWAP_IN = 2  # host to device


@dataclass(frozen=True, slots=True)
class BlockOp:
    """One block copy. A plan's ops run in order, before its forward pass."""

    kind: BlockOpKind
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class StepItem:
    """One request's share of a step: compute ``token_ids`` at positions ``start ..`` and perhaps sample.

    Fields:
        request_id, index: the sequence (`Request.key`).
        start: position of the first token.
        token_ids: tokens to compute.
        block_table: device blocks; position p lives in ``block_table[p // block_size]``.
        num_samples: tokens to draw from the last row's logits: 0 for a chunk that does not reach the end, n for the
            last chunk of an n-way prompt (sample i of it draws with index ``index + i``).
        params: the request's.
        seed: the request's; with the sample's index and its position it fixes the noise.
        num_prompt: prompt length. Generated tokens so far: ``start + len(token_ids) - num_prompt``.
        stop_ids: must not be sampled while fewer than ``params.min_tokens`` tokens were generated.
        history: all tokens up to the end of this item, when ``params.uses_history``; else empty.
        prompt_targets: with prompt_logprobs, the token that follows each of ``token_ids`` in the prompt; shorter by
            one when the prompt ends here, else empty.
        discard: padding of a static batch: computed, and its result thrown away.
    """

    request_id: str
    index: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    num_samples: int
    params: SamplingParams
    seed: int
    num_prompt: int
    stop_ids: frozenset[int] = frozenset()
    history: tuple[int, ...] = ()
    prompt_targets: tuple[int, ...] = ()
    discard: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a runner does in one step.

    ``finished_ids`` are the requests that ended since the last plan, for runners that keep something per request.
    """

    step_id: int
    items: tuple[StepItem, ...]
    block_ops: tuple[BlockOp, ...] = ()
    finished_ids: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, and the best alternatives as (token id, logprob), best first. Natural logarithm."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...] = ()


BAD_LOGITS = -1
"""In place of a token, drawn or scored: the logits held NaN or infinity; the request must fail, not stream filler."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner returns. All tuples run parallel to ``plan.items``.

    Fields:
        tokens: per item, ``num_samples`` token ids (or BAD_LOGITS).
        logprobs: per item, one `TokenLogprob` a sample, or empty when not asked for.
        prompt_logprobs: per item, one a prompt target, or empty. The outer tuple is empty when no item asked.
        seconds: time of the step on the device.
    """

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Output:
    """News of one sequence: tokens it gained in a step, and how it ended if it did.

    A stop token that ended the sequence is the last of new_token_ids, and ``stop_token_id`` names it.
    """

    request_id: str
    index: int = 0
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    stop_token_id: int | None = None
    error: str | None = None  # with FinishReason.ERROR: why, in words for the client
    refused: bool = False  # with FinishReason.ERROR: the request asked for what can never run; nothing is broken


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a runner has reserved, returned from its start().

    ``details`` is the memory in bytes by purpose (weights, kv_cache, workspace, ...), for the start report.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    num_host_blocks: int = 0
    device: str = "cpu"
    details: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StepStats:
    """The engine's state after a step, for metrics. Totals count from the start of the engine."""

    step_id: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0  # waiting again after a preemption; not part of num_waiting
    free_blocks: int = 0  # those still holding cached prefixes included
    reserved_blocks: int = 0  # of the free ones, promised to running requests
    num_blocks: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    total_preemptions: int = 0
    total_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    total_lookup_tokens: int = 0  # prompt tokens looked up there


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything about one step, for whoever records the engine. Times are those of the engine's clock."""

    plan: StepPlan
    result: StepResult
    outputs: tuple[Output, ...]
    stats: StepStats
    started: float
    ended: float
