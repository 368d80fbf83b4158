"""The plain data that passes between scheduler, runner and client. Immutable, free of tensors, easy to record."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from chairlift.core.request import FinishReason, SamplingParams, SequenceInfo


class BlockOpKind(enum.IntEnum):
    COPY = 0  # device block src to device block dst
    SWAP_OUT = 1  # device to host or disk
    SWAP_IN = 2  # host or disk to device


@dataclass(frozen=True, slots=True)
class BlockOp:
    """One block copy. A plan's ops run in order, before its forward pass.

    Host and disk blocks share one range of numbers: ``0 .. num_host_blocks - 1`` lie in memory, the next
    ``num_disk_blocks`` in the file. ``content`` is the hash of what the block holds, if it has one: a block on disk is
    found by it after a restart, and one that turns out to hold anything else is damaged.
    """

    kind: BlockOpKind
    src: int
    dst: int
    content: bytes = b""


class StepItem(NamedTuple):
    """One sequence's share of a step: compute ``token_ids`` at positions ``start ..`` and perhaps sample.

    A named tuple, since one is made for each sequence in each step, and this is the cheapest thing to make.

    Fields:
        sequence: what is the same in all items of the sequence.
        start: position of the first token.
        token_ids: tokens to compute. A negative one, ``-1 - j``, stands for the j-th draw of the step before (items in
            order, each with its ``num_samples`` draws), which is still in flight when this step is planned.
        block_table: device blocks; with G groups of KV layers, position p of group g lives in
            ``block_table[p // block_size * G + g]``. -1 where a group's window has passed: nobody reads there.
        num_samples: tokens to draw from the last row's logits: 0 for a chunk that does not reach the end, n for the
            last chunk of an n-way prompt (sample i of it draws with index ``index + i``). 1 with drafts.
        history: all tokens up to the end of this item, when ``params.uses_history``; else empty.
        prompt_targets: with prompt_logprobs, the token that follows each of ``token_ids`` in the prompt; shorter by
            one when the prompt ends here, else empty.
        discard: padding of a static batch: computed, and its result thrown away.
        num_drafts: the last so many of ``token_ids`` are guesses. One token is drawn after the last that is none, and
            one after each draft that turned out to be what was drawn before it.
    """

    sequence: SequenceInfo
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    num_samples: int
    history: tuple[int, ...] = ()
    prompt_targets: tuple[int, ...] = ()
    discard: bool = False
    num_drafts: int = 0

    @property
    def end(self) -> int:
        """The position after the last token that is no draft."""
        return self.start + len(self.token_ids) - self.num_drafts

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def index(self) -> int:  # type: ignore[override]
        return self.sequence.index

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def seed(self) -> int:
        return self.sequence.seed

    @property
    def num_prompt(self) -> int:
        """Prompt length. Tokens generated up to this item's end: ``end - num_prompt``."""
        return self.sequence.num_prompt

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that must not be sampled while fewer than ``params.min_tokens`` tokens were generated."""
        return self.sequence.stop_ids

    @property
    def num_logprobs(self) -> int | None:
        """Best tokens whose log-probabilities are wanted with each draw; None for none at all."""
        return self.sequence.num_logprobs


new_item = partial(tuple.__new__, StepItem)
"""Makes a `StepItem` of all its fields, in half the time."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a runner does in one step.

    ``finished_ids`` are the requests that ended since the last plan, for runners that keep something per request. A
    plan without items only moves blocks.
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
        tokens: per item, ``num_samples`` token ids (or BAD_LOGITS), and one more for each draft that was right.
        logprobs: per item, one `TokenLogprob` a token, or empty when not asked for.
        prompt_logprobs: per item, one a prompt target, or empty. The outer tuple is empty when no item asked.
        seconds: time of the step on the device.
        swap_seconds: the part of it that the swaps took.
        damaged: host or disk blocks that were to be swapped in and did not hold what they should; what was computed
            from them is worthless.
    """

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    seconds: float = 0.0
    swap_seconds: float = 0.0
    damaged: tuple[int, ...] = ()


class Output(NamedTuple):
    """News of one sequence: tokens it gained in a step, and how it ended if it did.

    A stop token that ended the sequence is the last of new_token_ids, and ``stop_token_id`` names it. Of a beam search
    there is one output a result, best first, with all its tokens.
    """

    request_id: str
    index: int = 0  # type: ignore[assignment]
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    stop_token_id: int | None = None
    error: str | None = None  # with FinishReason.ERROR: why, in words for the client
    refused: bool = False  # with FinishReason.ERROR: the request asked for what can never run; nothing is broken
    cumulative_logprob: float | None = None  # of a beam's tokens


new_output = partial(tuple.__new__, Output)
"""Makes an `Output` of all its fields, in half the time."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a runner has reserved, returned from its start().

    Fields:
        windows: per group of KV layers its sliding window in positions, 0 for all of the context. A block holds the
            keys and values of ``block_size`` positions for the layers of one group; all groups draw from one pool.
        num_host_blocks, num_disk_blocks: where blocks can be swapped to.
        details: the memory in bytes by purpose (weights, kv_cache, workspace, ...), for the start report.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    windows: tuple[int, ...] = (0,)
    device: str = "cpu"
    details: tuple[tuple[str, int], ...] = ()


class StepStats(NamedTuple):
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
    num_host_blocks: int = 0
    free_host_blocks: int = 0
    num_disk_blocks: int = 0
    free_disk_blocks: int = 0
    total_swaps: int = 0  # of the preemptions, those whose KV was kept in host memory or on disk
    total_recomputed_tokens: int = 0  # tokens whose KV preemptions threw away
    total_drafts: int = 0  # tokens guessed for speculative decoding
    total_accepted_drafts: int = 0  # those that were right
    budget: int = 0  # tokens that the step could have taken
    binding: str = ""  # the resource for want of which the head of the queue waits; empty if none waits


class Event(NamedTuple):
    """A turn in a request's life. ``what`` is one of the words that `chairlift.core.recorder` explains.

    ``step`` is the one that was planned, or the next to be, at ``time`` of the engine's clock.
    """

    step: int
    time: float
    request_id: str
    index: int  # type: ignore[assignment]
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything about one step, for whoever records the engine. Times are those of the engine's clock."""

    plan: StepPlan
    result: StepResult
    outputs: tuple[Output, ...]
    stats: StepStats
    started: float
    ended: float
    events: tuple[Event, ...] = ()
