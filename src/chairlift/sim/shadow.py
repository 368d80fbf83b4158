"""An executor without a model that finds every fault of bookkeeping.

Where a runner keeps the keys and values of a token, it keeps a cell: the position, the token, and a hash of all tokens
up to there, since real keys and values depend on the whole context too. Each plan is executed as a runner would, block
copies first, then all writes, then all reads; each read must find the cells of the sequence's true tokens. The truth is
the executor's own: the prompts as the client gave them to `expect`, and the tokens it has drawn itself.

"Sampling" hashes the context, so a sequence's tokens and logprobs depend on nothing but its prompt, parameters and
seed, as promised of a real runner; whatever else changes them is a fault of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

from chairlift.core.plan import BlockOp, BlockOpKind, Capacity, StepItem, StepPlan, StepResult, TokenLogprob
from chairlift.core.request import Request, SamplingParams

Cell = tuple[int, int, int]  # position, token, hash of all tokens up to and including this one
Key = tuple[str, int]
NOTHING: Cell = (-1, -1, -1)  # a slot never written
GARBAGE = -1  # in place of the hash: a cell written by a discarded item, which nobody may read
_POSITIVE = 2**63 - 1


class ShadowFault(AssertionError):
    """A plan that a real runner would have computed wrong answers from. The message names the sequence and why."""


@dataclass
class _Truth:
    """A request as its client knows it. ``samples`` holds the cells of each sequence that exists, by index."""

    params: SamplingParams
    seed: int
    num_prompt: int
    num_samples: int
    stop_ids: frozenset[int]
    samples: dict[int, list[Cell]]


class ShadowExecutor:
    """Implements `chairlift.core.ports.Executor`.

    Args:
        vocab_size: tokens are drawn from ``0 .. vocab_size - 1``. Small ones make prefixes coincide more often.
        stop_rate: how often, from 0 to 1, a stop token is drawn for a request that has any; else they never are.
    """

    def __init__(self, capacity: Capacity, *, vocab_size: int = 1000, stop_rate: float = 0.0) -> None:
        self.capacity = capacity
        self.vocab_size = vocab_size
        self.stop_rate = stop_rate
        self._device = [[NOTHING] * capacity.block_size for _ in range(capacity.num_blocks)]
        self._host = [[NOTHING] * capacity.block_size for _ in range(capacity.num_host_blocks)]
        self._truths: dict[str, _Truth] = {}
        self._last_step: int | None = None

    def start(self) -> Capacity:
        return self.capacity

    def expect(self, request: Request) -> None:
        """Tells what a request is, before it is given to the scheduler."""
        cells: list[Cell] = []
        _extend(cells, request.token_ids)
        self._truths[request.id] = _Truth(
            request.params,
            request.seed,
            request.num_prompt,
            request.num_samples,
            request.stop_ids,
            {request.index: cells},
        )

    def submit(self, plan: StepPlan) -> StepResult:
        """Checks and executes a whole step. Raises `ShadowFault`."""
        if not plan.items or (self._last_step is not None and plan.step_id != self._last_step + 1):
            raise ShadowFault(f"step {plan.step_id} after step {self._last_step}, with {len(plan.items)} items")
        self._last_step = plan.step_id
        for request_id in plan.finished_ids:
            if request_id not in self._truths:
                raise ShadowFault(f"{request_id!r} is said to have finished, and never was here")
        for op in plan.block_ops:
            self._apply(op)
        self._check_items(plan.items)
        self._write(plan.items)
        results = [self._compute(item) for item in plan.items]
        return StepResult(
            plan.step_id,
            tokens=tuple(tokens for tokens, _, _ in results),
            logprobs=tuple(logprobs for _, logprobs, _ in results),
            prompt_logprobs=tuple(prompt_logprobs for _, _, prompt_logprobs in results),
        )

    def result(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        pass

    # -- memory

    def _apply(self, op: BlockOp) -> None:
        source = self._host if op.kind is BlockOpKind.SWAP_IN else self._device
        target = self._host if op.kind is BlockOpKind.SWAP_OUT else self._device
        if not (0 <= op.src < len(source) and 0 <= op.dst < len(target)):
            raise ShadowFault(f"{op} names a block that does not exist")
        if op.kind is BlockOpKind.COPY and op.src == op.dst:
            raise ShadowFault(f"{op} copies a block onto itself")
        target[op.dst] = list(source[op.src])

    def _write(self, items: Sequence[StepItem]) -> None:
        """All items write before any reads. No block that is written may be another sequence's in the same step."""
        users: dict[int, Key] = {}
        shared: set[int] = set()
        for item in items:
            if not item.discard:
                for block in item.block_table[: self._blocks_for(item)]:
                    if users.setdefault(block, _key(item)) != _key(item):
                        shared.add(block)
        for item in items:
            for block in item.block_table[item.start // self.capacity.block_size : self._blocks_for(item)]:
                if block in shared or users.setdefault(block, _key(item)) != _key(item):
                    _fail(item, f"writes into block {block}, which another sequence uses in the same step")
            for cell in self._written(item):
                block, slot = divmod(cell[0], self.capacity.block_size)
                self._device[item.block_table[block]][slot] = cell

    def _written(self, item: StepItem) -> list[Cell]:
        if item.discard:
            return [(item.start + i, token, GARBAGE) for i, token in enumerate(item.token_ids)]
        return self._cells(item)[item.start : _end(item)]

    def _read(self, item: StepItem) -> None:
        """Attention reads positions 0 .. end - 1, each where the block table says."""
        end = _end(item)
        found = list(chain.from_iterable(self._device[block] for block in item.block_table[: self._blocks_for(item)]))
        truth = self._cells(item)
        if found[:end] != truth[:end]:
            p = next(p for p in range(end) if found[p] != truth[p])
            block = item.block_table[p // self.capacity.block_size]
            _fail(item, f"reads {found[p]} for {truth[p]} (position, token, context) at position {p} in block {block}")

    def _blocks_for(self, item: StepItem) -> int:
        return -(-_end(item) // self.capacity.block_size)

    # -- checks of one plan

    def _check_items(self, items: Sequence[StepItem]) -> None:
        keys = [_key(item) for item in items if not item.discard]
        if len(set(keys)) != len(keys):
            raise ShadowFault(f"a sequence twice in one step: {keys}")
        for item in items:
            table = item.block_table
            if not item.token_ids or item.start < 0:
                _fail(item, "computes nothing")
            if self._blocks_for(item) > len(table) or len(set(table)) != len(table):
                _fail(item, f"has too few blocks, or one twice: {table}")
            if not all(0 <= block < self.capacity.num_blocks for block in table):
                _fail(item, f"names a block that does not exist: {table}")
            if not item.discard:
                self._check_item(item)

    def _check_item(self, item: StepItem) -> None:
        cells, end = self._cells(item), _end(item)
        truth, tokens = self._truths[item.request_id], tuple(token for _, token, _ in cells[item.start : end])
        if item.token_ids != tokens:
            _fail(item, f"computes {item.token_ids} where its tokens are {tokens}")
        unsampled = len(truth.samples) == 1 and len(cells) == truth.num_prompt
        due = (truth.num_samples if unsampled else 1) if end == len(cells) else 0
        if item.num_samples != due:
            _fail(item, f"draws {item.num_samples} samples instead of {due}")
        given = (item.params, item.seed, item.num_prompt, item.stop_ids)
        if given != (truth.params, truth.seed, truth.num_prompt, truth.stop_ids):
            _fail(item, f"has other parameters than its request: {given}")
        history = cells[:end] if item.params.uses_history else []
        if item.history != tuple(token for _, token, _ in history):
            _fail(item, f"has the history {item.history}")
        followed = cells[item.start + 1 : min(end + 1, item.num_prompt)]
        targets = followed if item.params.prompt_logprobs is not None else []
        if item.prompt_targets != tuple(token for _, token, _ in targets):
            _fail(item, f"has the prompt targets {item.prompt_targets}")

    def _cells(self, item: StepItem) -> list[Cell]:
        truth = self._truths.get(item.request_id)
        if truth is None or item.index not in truth.samples:
            _fail(item, "is unknown")
        return truth.samples[item.index]

    # -- "the model"

    def _compute(self, item: StepItem) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]:
        """Tokens, their logprobs and the prompt's. A discarded item's tokens are outside the vocabulary."""
        if item.discard:
            return (self.vocab_size,) * item.num_samples, (), ()
        self._read(item)
        cells, samples = self._cells(item), self._truths[item.request_id].samples
        count = item.params.prompt_logprobs
        prompt_logprobs = [
            self._logprob(cells[item.start + i], target, count or 0) for i, target in enumerate(item.prompt_targets)
        ]
        tokens = [self._draw(item, cells, item.index + i) for i in range(item.num_samples)]
        count = item.params.logprobs
        logprobs = [] if count is None else [self._logprob(cells[-1], token, count) for token in tokens]
        context = list(cells)
        for i, token in enumerate(tokens):
            _extend(samples.setdefault(item.index + i, list(context)), [token])
        return tuple(tokens), tuple(logprobs), tuple(prompt_logprobs)

    def _draw(self, item: StepItem, cells: list[Cell], index: int) -> int:
        """The next token: a hash of the context and, unless greedy, of (seed, sample index, position)."""
        position, _, context = cells[-1]
        noise = (item.seed, index, position) if item.params.temperature else ()
        number = hash((context, *noise)) & _POSITIVE
        number, chance = divmod(number, 1000)
        may_stop = len(cells) - item.num_prompt >= item.params.min_tokens
        if item.stop_ids and may_stop and chance < self.stop_rate * 1000:
            return min(item.stop_ids)
        tokens = (token % self.vocab_size for token in range(number, number + self.vocab_size))
        return next(token for token in tokens if token not in item.stop_ids)

    def _logprob(self, cell: Cell, token: int, count: int) -> TokenLogprob:
        """The logprob of ``token`` after the context that ends in ``cell``, with ``count`` alternatives."""
        numbers = [hash((cell[2], candidate)) & 0xFFFF for candidate in (token, *range(count))]
        value, *others = [-number / 4096 for number in numbers]
        return TokenLogprob(token, value, 1 + numbers[0] % self.vocab_size, tuple(enumerate(others)))


def _extend(cells: list[Cell], tokens: Iterable[int]) -> None:
    context = cells[-1][2] if cells else 0
    for token in tokens:
        context = hash((context, token))  # of integers only, so the same in every process
        cells.append((len(cells), token, context))


def _end(item: StepItem) -> int:
    return item.start + len(item.token_ids)


def _key(item: StepItem) -> Key:
    return item.request_id, item.index


def _fail(item: StepItem, what: str) -> NoReturn:
    raise ShadowFault(f"{item.request_id!r}[{item.index}], positions {item.start} .. {_end(item) - 1}: {what}")
