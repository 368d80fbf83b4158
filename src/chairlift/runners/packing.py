"""From a plan's items to the flat arrays of one call of the C++ core, and from what that returns to a `StepResult`.

Arrays are made column by column from lists, and lists of numbers are joined in C++: a step of hundreds of decodes, with
a block table each, must not cost more here than a small part of its computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift import _native
from chairlift.core.plan import StepItem, TokenLogprob
from chairlift.errors import StepFailed

_SMALLEST = 1.2e-38  # a divisor below it would be 0 in the core's f32
Tokens = tuple[tuple[int, ...], ...]  # those drawn in a step, by item


class Draws(NamedTuple):
    """The draws of a step, of each item first its scores, then its samples. One entry a draw in each field.

    Fields:
        items: whose it is.
        rows: from which row's logits.
        forced: the token to be scored, -1 to draw one.
        indexes: of the sample.
        num_logprobs: best tokens wanted, -1 for no log-probabilities at all.
    """

    items: list[StepItem]
    rows: list[int]
    forced: list[int]
    indexes: list[int]
    num_logprobs: list[int]


def pack(items: Sequence[StepItem], vocab_size: int, previous: Tokens | None) -> tuple[dict[str, Any], Draws]:
    """The arguments of `Model.step`.

    ``previous`` are the tokens drawn in the step before, for those that were not known when this one was planned; None
    if that step failed. Raises StepFailed when they are needed then, and ValueError for one that was never drawn.
    """
    tokens, item_rows = _native.join([item.token_ids for item in items])
    block_tables, table_offsets = _native.join([item.block_table for item in items])
    starts = np.array([item.start for item in items], np.int32)
    draws = _draws(items, item_rows.tolist())
    arguments = {
        "tokens": _known(tokens, previous),
        "positions": starts if len(tokens) == len(items) else _positions(starts, item_rows),
        "item_rows": item_rows,
        "block_tables": block_tables,
        "table_offsets": table_offsets,
        "sampling": _sampling(draws, vocab_size, previous),
    }
    return arguments, draws


def _positions(starts: NDArray[np.int32], item_rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Of each row, counted up from its item's start."""
    counts = np.diff(item_rows)
    return np.repeat(starts - item_rows[:-1], counts) + np.arange(item_rows[-1], dtype=np.int32)


def _only_draws(items: Sequence[StepItem]) -> bool:
    """Whether each item draws one token and scores none, as decodes do."""
    return all(item.num_samples == 1 and not item.prompt_targets for item in items)


def _draws(items: Sequence[StepItem], item_rows: list[int]) -> Draws:
    if _only_draws(items):
        sequences = [item.sequence for item in items]
        return Draws(
            list(items),
            [end - 1 for end in item_rows[1:]],
            [-1] * len(items),
            [sequence.index for sequence in sequences],
            [-1 if sequence.num_logprobs is None else sequence.num_logprobs for sequence in sequences],
        )
    draws = Draws([], [], [], [], [])
    for item, first, end in zip(items, item_rows, item_rows[1:], strict=False):
        sequence, scores, samples = item.sequence, len(item.prompt_targets), item.num_samples
        draws.items.extend([item] * (scores + samples))
        draws.rows.extend((*range(first, first + scores), *[end - 1] * samples))
        draws.forced.extend((*item.prompt_targets, *[-1] * samples))
        draws.indexes.extend((*[0] * scores, *range(sequence.index, sequence.index + samples)))
        of_sample = -1 if sequence.num_logprobs is None else sequence.num_logprobs
        draws.num_logprobs.extend((*[sequence.params.prompt_logprobs or 0] * scores, *[of_sample] * samples))
    return draws


def _sampling(draws: Draws, vocab_size: int, previous: Tokens | None) -> dict[str, NDArray[Any]]:
    items = draws.items
    params = [item.sequence.params for item in items]
    ends = [item.start + len(item.token_ids) for item in items]
    # What is scored needs nothing of that which shapes a draw. Ids past the vocabulary are never drawn, so there is
    # nothing to ban or favour.
    histories = [() if forced >= 0 else item.history for item, forced in zip(items, draws.forced, strict=True)]
    banned = [
        _banned(item, end, vocab_size) if item.sequence.params.min_tokens and forced < 0 else ()
        for item, end, forced in zip(items, ends, draws.forced, strict=True)
    ]
    biases = [
        {token: bias for token, bias in each.logit_bias.items() if token < vocab_size}
        if each.logit_bias and forced < 0
        else {}
        for each, forced in zip(params, draws.forced, strict=True)
    ]
    history, history_offsets = _native.join(histories)
    banned_ids, banned_offsets = _native.join(banned)
    bias_ids, bias_offsets = _native.join([tuple(bias) for bias in biases])
    return {
        **_columns(
            np.int32,
            row=draws.rows,
            forced=draws.forced,
            index=draws.indexes,
            position=ends,
            top_k=[max(each.top_k, 0) for each in params],
            num_logprobs=draws.num_logprobs,
            history_prompt=[
                min(item.sequence.num_prompt, len(tokens)) for item, tokens in zip(items, histories, strict=True)
            ],
        ),
        **_columns(
            np.float32,
            temperature=[each.temperature for each in params],
            top_p=[each.top_p for each in params],
            min_p=[each.min_p for each in params],
            repetition=[max(each.repetition_penalty, _SMALLEST) for each in params],
            presence=[each.presence_penalty for each in params],
            frequency=[each.frequency_penalty for each in params],
        ),
        "seed": np.array([item.sequence.seed for item in items], np.uint64),
        "history": _known(history, previous),
        "history_offsets": history_offsets,
        "bias_ids": bias_ids,
        "bias_values": np.array([value for bias in biases for value in bias.values()], np.float32),
        "bias_offsets": bias_offsets,
        "banned": banned_ids,
        "banned_offsets": banned_offsets,
    }


def _columns(type_: type[np.generic], **columns: Sequence[float]) -> dict[str, NDArray[Any]]:
    """Columns of one type and length, as the rows of one array: to make an array costs more than to fill it."""
    return dict(zip(columns, np.array(list(columns.values()), type_), strict=True))


def _banned(item: StepItem, end: int, vocab_size: int) -> tuple[int, ...]:
    """The stop tokens, while there are too few others."""
    if end - item.num_prompt >= item.params.min_tokens:
        return ()
    return tuple(sorted(token for token in item.stop_ids if token < vocab_size))


def _known(tokens: NDArray[np.int32], previous: Tokens | None) -> NDArray[np.int32]:
    """Fills in the draws of the step before, which ``-1 - j`` stands for."""
    unknown = tokens < 0
    if not unknown.any():
        return tokens
    if previous is None:
        raise StepFailed("the step before failed, whose tokens this one was to continue")
    drawn = np.fromiter(chain.from_iterable(previous), np.int32)
    which = -1 - tokens[unknown]
    if which.max() >= len(drawn):
        raise ValueError(f"token {-1 - which.max()}: the step before drew {len(drawn)} tokens")
    tokens[unknown] = np.maximum(drawn[which], 0)  # after broken logits any token will do: the result is not used
    return tokens


def unpack(
    items: Sequence[StepItem], draws: Draws, out: dict[str, NDArray[Any]]
) -> tuple[Tokens, tuple[tuple[TokenLogprob, ...], ...], tuple[tuple[TokenLogprob, ...], ...]]:
    """`StepResult`'s tokens, logprobs and prompt_logprobs, from what `Model.step` returned."""
    drawn = out["token"].tolist()
    if max(draws.num_logprobs, default=-1) < 0 and _only_draws(items):
        return tuple(zip(drawn, strict=True)), ((),) * len(items), ()
    scored = _logprobs(out)
    tokens: list[tuple[int, ...]] = []
    logprobs: list[tuple[TokenLogprob, ...]] = []
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = []
    at = 0
    for item in items:
        first = at + len(item.prompt_targets)
        last = first + item.num_samples
        tokens.append(tuple(drawn[first:last]))
        logprobs.append(() if item.num_logprobs is None else tuple(scored[first:last]))
        prompt_logprobs.append(tuple(scored[at:first]))
        at = last
    return tuple(tokens), tuple(logprobs), tuple(prompt_logprobs) if any(prompt_logprobs) else ()


def _logprobs(out: dict[str, NDArray[Any]]) -> list[TokenLogprob]:
    """One `TokenLogprob` a draw (of those not asked for, without meaning)."""
    names = ("token", "logprob", "rank", "top_ids", "top_logprobs")
    return [
        TokenLogprob(token, value, rank, _best(ids, logprobs))
        for token, value, rank, ids, logprobs in zip(*(out[name].tolist() for name in names), strict=True)
    ]


def _best(ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """The pairs, without those at the end that this draw did not ask for: their ids are -1."""
    if ids and ids[-1] < 0:
        return tuple(pair for pair in zip(ids, logprobs, strict=True) if pair[0] >= 0)
    return tuple(zip(ids, logprobs, strict=True))
