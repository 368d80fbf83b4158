"""An executor without a model that finds every fault of bookkeeping.

Where a runner keeps the keys and values of a token, it keeps a cell: the position, the token, a hash of all tokens up
to there, since real keys and values depend on the whole context too, and the group of layers. Each plan is executed as
a runner would, block ops first, then all writes, then all reads; each read must find the cells of the sequence's true
tokens. The truth is the executor's own: the prompts as the client gave them to `expect`, and the tokens it has drawn
itself.

"Sampling" hashes the context, so a sequence's tokens and logprobs depend on nothing but its prompt, parameters and
seed, as promised of a real runner; whatever else changes them is a fault of the scheduler.

Two things that go wrong with real runners can be made to happen, by a subclass: a step that fails (`fails`), and with
it what it wrote to disk, and a swapped block that is not what it should be (`damages`). What is computed from such a
block is nonsense, and tainted cells show how far it spreads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NoReturn

from chairlift.core.plan import BlockOp, BlockOpKind, Capacity, StepItem, StepPlan, StepResult, TokenLogprob
from chairlift.core.request import Request, SamplingParams
from chairlift.errors import StepFailed

Cell = tuple[int, int, int, int]  # position, token, hash of all tokens up to and including this one, group
Key = tuple[str, int]
NOTHING: Cell = (-1, -1, -1, -1)  # a slot never written
TAINTED: Cell = (-2, -2, -2, -2)  # computed from a damaged block, or such a block itself
GARBAGE = -1  # in place of the hash: a cell written by a discarded item, which nobody may read
_POSITIVE = 2**63 - 1


class ShadowFault(AssertionError):
    """A plan that a real runner would have computed wrong answers from. The message names the sequence and why."""


@dataclass
class _Truth:
    """A request as its client knows it. ``samples`` holds (token, hash of the context) of each sequence, by index."""

    params: SamplingParams
    seed: int
    num_prompt: int
    num_draws: int
    stop_ids: frozenset[int]
    samples: dict[int, list[tuple[int, int]]]
    beams: dict[int, tuple[int, int]] = field(default_factory=dict)  # context -> (its last token, context before it)


@dataclass
class _Undo:
    """What a step drew, so that it can be forgotten should the step fail."""

    step_id: int
    drawn: list[Key] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)  # blocks it wrote on disk


class ShadowExecutor:
    """Implements `chairlift.core.ports.Executor`, for any number of steps in flight.

    Args:
        vocab_size: tokens are drawn from ``0 .. vocab_size - 1``. Small ones make prefixes coincide more often.
        stop_rate: how often, from 0 to 1, a stop token is drawn for a request that has any; else they never are.
    """

    def __init__(self, capacity: Capacity, *, vocab_size: int = 1000, stop_rate: float = 0.0) -> None:
        self.capacity = capacity
        self.vocab_size = vocab_size
        self.stop_rate = stop_rate
        self._device = [[NOTHING] * capacity.block_size for _ in range(capacity.num_blocks)]
        self._host = [
            [NOTHING] * capacity.block_size for _ in range(capacity.num_host_blocks + capacity.num_disk_blocks)
        ]
        self._truths: dict[str, _Truth] = {}
        self._last_step: int | None = None
        self._last_draws: list[int] = []
        self._undo: list[_Undo] = []
        self._tainted: set[int] = set()  # device blocks with tainted cells
        self._unsaved: set[int] = set()  # blocks on disk that a failed step did not write to the end
        self._bad: dict[int, bool] = {}  # of the host and disk blocks read in this step, those found damaged

    # -- what a subclass may let go wrong

    def fails(self, plan: StepPlan) -> bool:
        """Whether this step is to fail, when its result is asked for."""
        return False

    def damages(self, op: BlockOp) -> bool:
        """Whether the block that this op swaps in is to be found damaged."""
        return False

    # -- the executor

    def start(self) -> Capacity:
        return self.capacity

    def expect(self, request: Request) -> None:
        """Tells what a request is, before the scheduler gets it; of one that another engine began, each sample."""
        for undo in self._undo:  # of an earlier request with this id
            undo.drawn = [key for key in undo.drawn if key[0] != request.id]
        cells: list[tuple[int, int]] = []
        _extend(cells, request.token_ids)
        if request.index and request.id in self._truths:
            self._truths[request.id].samples[request.index] = cells
            return
        self._truths[request.id] = _Truth(
            request.params,
            request.seed,
            request.num_prompt,
            1 if request.params.use_beam_search else request.num_samples,
            request.stop_ids,
            {request.index: cells},
        )

    def submit(self, plan: StepPlan) -> StepResult | StepPlan:
        """Checks and executes a whole step. Raises `ShadowFault`."""
        if not (plan.items or plan.block_ops):
            raise ShadowFault(f"step {plan.step_id} is empty")
        if self._last_step is not None and plan.step_id != self._last_step + 1:
            raise ShadowFault(f"step {plan.step_id} after step {self._last_step}")
        self._last_step = plan.step_id
        for request_id in plan.finished_ids:
            if request_id not in self._truths:
                raise ShadowFault(f"{request_id!r} is said to have finished, and never was here")
        self._undo = [*self._undo[-3:], _Undo(plan.step_id)]
        self._bad = {}
        damaged = [op.src for op in plan.block_ops if self._apply(op)]
        items = [self._resolved(item) for item in plan.items]
        tainted = [self._is_tainted(item) for item in items]
        self._check_items([item for item, bad in zip(items, tainted, strict=True) if not bad])
        self._write(items, tainted)
        results = [self._compute(item, bad) for item, bad in zip(items, tainted, strict=True)]
        self._last_draws = [token for tokens, _, _ in results for token in tokens]
        if self.fails(plan):
            return plan
        return StepResult(
            plan.step_id,
            tokens=tuple(tokens for tokens, _, _ in results),
            logprobs=tuple(logprobs for _, logprobs, _ in results),
            prompt_logprobs=tuple(prompt_logprobs for _, _, prompt_logprobs in results),
            damaged=tuple(damaged),
        )

    def result(self, handle: StepResult | StepPlan) -> StepResult:
        if isinstance(handle, StepResult):
            return handle
        self._forget_from(handle.step_id)
        raise StepFailed(f"step {handle.step_id} failed")

    def close(self) -> None:
        pass

    def _forget_from(self, step_id: int) -> None:
        """This step and those after it never were; what device and host hold is lost."""
        for undo in [undo for undo in self._undo if undo.step_id >= step_id]:
            for request_id, index in undo.drawn:
                truth = self._truths[request_id]
                truth.samples[index].pop()
                if len(truth.samples[index]) == truth.num_prompt and index != min(truth.samples):
                    del truth.samples[index]
            self._unsaved.update(undo.saved)
        self._undo = [undo for undo in self._undo if undo.step_id < step_id]
        self._tainted.clear()
        for memory in (self._device, self._host[: self.capacity.num_host_blocks]):
            for cells in memory:
                cells[:] = [NOTHING] * self.capacity.block_size

    # -- memory

    def _apply(self, op: BlockOp) -> bool:
        """Executes an op; True if what it read was damaged."""
        source = self._host if op.kind is BlockOpKind.SWAP_IN else self._device
        target = self._host if op.kind is BlockOpKind.SWAP_OUT else self._device
        if not (0 <= op.src < len(source) and 0 <= op.dst < len(target)):
            raise ShadowFault(f"{op} names a block that does not exist")
        if op.kind is BlockOpKind.COPY and op.src == op.dst:
            raise ShadowFault(f"{op} copies a block onto itself")
        if op.kind is BlockOpKind.SWAP_OUT:
            self._bad.pop(op.dst, None)
            self._unsaved.discard(op.dst)
            if op.dst >= self.capacity.num_host_blocks:
                self._undo[-1].saved.append(op.dst)
        elif op.kind is BlockOpKind.SWAP_IN and (
            op.src in self._unsaved or self._bad.setdefault(op.src, self.damages(op))
        ):
            target[op.dst] = [TAINTED] * self.capacity.block_size
            self._tainted.add(op.dst)
            return True
        target[op.dst] = list(source[op.src])
        if op.kind is not BlockOpKind.SWAP_OUT:
            self._mark(op.dst, TAINTED in target[op.dst])
        return False

    def _resolved(self, item: StepItem) -> StepItem:
        """The item with the tokens that the step before drew in place of what stands for them."""
        if min(item.token_ids, default=0) >= 0 and (not item.history or min(item.history) >= 0):
            return item
        for token in (*item.token_ids, *item.history):
            if -token - 1 >= len(self._last_draws):
                _fail(item, f"waits for draw {-token - 1} of a step with {len(self._last_draws)}")
        tokens, history = (
            tuple(token if token >= 0 else self._last_draws[-token - 1] for token in tokens)
            for tokens in (item.token_ids, item.history)
        )
        return item._replace(token_ids=tokens, history=history)

    def _views(self, item: StepItem) -> Iterator[tuple[int, range]]:
        """Per group, the positions that the item's rows attend to."""
        for g, window in enumerate(self.capacity.windows):
            first = max(0, item.start - window + 1) if window else 0
            yield g, range(first, _end(item))

    def _cell(self, item: StepItem, g: int, position: int) -> Cell:
        block, slot = divmod(position, self.capacity.block_size)
        return self._device[item.block_table[block * len(self.capacity.windows) + g]][slot]

    def _is_tainted(self, item: StepItem) -> bool:
        """Whether something before the item's rows came of a damaged block (read again or not)."""
        if item.discard or not self._tainted:
            return False
        before = -(-item.start // self.capacity.block_size) * len(self.capacity.windows)
        return not self._tainted.isdisjoint(item.block_table[:before])

    def _mark(self, block: int, tainted: bool) -> None:
        if tainted:
            self._tainted.add(block)
        else:
            self._tainted.discard(block)

    def _write(self, items: Sequence[StepItem], tainted: Sequence[bool]) -> None:
        """All items write before any reads. No block that is written may be another sequence's in the same step."""
        users: dict[int, Key] = {}
        shared: set[int] = set()
        for item in items:
            if not item.discard:
                for block in self._used(item):
                    if users.setdefault(block, _key(item)) != _key(item):
                        shared.add(block)
        groups = len(self.capacity.windows)
        for item, bad in zip(items, tainted, strict=True):
            first = item.start // self.capacity.block_size * groups
            for block in self._used(item, first):
                if block in shared or users.setdefault(block, _key(item)) != _key(item):
                    _fail(item, f"writes into block {block}, which another sequence uses in the same step")
            for position in range(item.start, _end(item)):
                token, context = self._written(item, position)
                block, slot = divmod(position, self.capacity.block_size)
                for g in range(groups):
                    number = item.block_table[block * groups + g]
                    if slot == 0 and number in self._tainted:  # somebody else's now
                        self._device[number] = [NOTHING] * self.capacity.block_size
                    self._device[number][slot] = TAINTED if bad else (position, token, context, g)
                    if bad or slot == 0:
                        self._mark(number, bad)

    def _used(self, item: StepItem, first: int = 0) -> list[int]:
        """The blocks of an item's table from entry ``first`` up to its end."""
        last = self._blocks_for(item) * len(self.capacity.windows)
        return [block for block in item.block_table[first:last] if block >= 0]

    def _written(self, item: StepItem, position: int) -> tuple[int, int]:
        token = item.token_ids[position - item.start]
        cells = self._cells_with_drafts(item)
        return (token, GARBAGE) if item.discard or position >= len(cells) else cells[position]

    def _read(self, item: StepItem) -> None:
        """Attention reads the positions in view, each where the block table says."""
        cells = self._cells_with_drafts(item)
        for g, view in self._views(item):
            for position in view:
                found, wanted = self._cell(item, g, position), (position, *cells[position], g)
                if found != wanted:
                    at = position // self.capacity.block_size * len(self.capacity.windows) + g
                    _fail(item, f"reads {found} at position {position} in block {item.block_table[at]}, not {wanted}")

    def _blocks_for(self, item: StepItem) -> int:
        return -(-_end(item) // self.capacity.block_size)

    # -- checks of one plan

    def _check_items(self, items: Sequence[StepItem]) -> None:
        keys = [_key(item) for item in items if not item.discard]
        if len(set(keys)) != len(keys):
            raise ShadowFault(f"a sequence twice in one step: {keys}")
        groups = len(self.capacity.windows)
        for item in items:
            table = [block for block in item.block_table if block >= 0]
            if not item.token_ids or item.start < 0:
                _fail(item, "computes nothing")
            if self._blocks_for(item) * groups > len(item.block_table) or len(set(table)) != len(table):
                _fail(item, f"has too few blocks, or one twice: {item.block_table}")
            if not all(block < self.capacity.num_blocks for block in table):
                _fail(item, f"names a block that does not exist: {table}")
            for g, view in self._views(item):
                first = view.start // self.capacity.block_size
                if any(item.block_table[i * groups + g] < 0 for i in range(first, self._blocks_for(item))):
                    _fail(item, f"has no block for what group {g} reads: {item.block_table}")
            if not item.discard:
                self._check_item(item)

    def _check_item(self, item: StepItem) -> None:
        cells, end = self._cells(item), item.end
        truth, tokens = self._truths[item.request_id], tuple(token for token, _ in cells[item.start : end])
        if item.token_ids[: end - item.start] != tokens:
            _fail(item, f"computes {item.token_ids} where its tokens are {tokens}")
        unsampled = len(truth.samples) == 1 and len(cells) == truth.num_prompt
        due = (truth.num_draws if unsampled else 1) if end == len(cells) else 0
        if item.num_samples != due:
            _fail(item, f"draws {item.num_samples} samples instead of {due}")
        if item.num_drafts and (due != 1 or item.params.uses_history or item.params.use_beam_search):
            _fail(item, "has drafts, and its draws depend on more than the tokens before them")
        if item.num_drafts and not all(0 <= token < self.vocab_size for token in item.token_ids[-item.num_drafts :]):
            _fail(item, f"has drafts that are no tokens: {item.token_ids}")
        given = (item.params, item.seed, item.num_prompt, item.stop_ids)
        if given != (truth.params, truth.seed, truth.num_prompt, truth.stop_ids):
            _fail(item, f"has other parameters than its request: {given}")
        history = cells[:end] if item.params.uses_history else []
        if item.history != tuple(token for token, _ in history):
            _fail(item, f"has the history {item.history}")
        followed = cells[item.start + 1 : min(end + 1, item.num_prompt)]
        targets = followed if item.params.prompt_logprobs is not None else []
        if item.prompt_targets != tuple(token for token, _ in targets):
            _fail(item, f"has the prompt targets {item.prompt_targets}")

    def _cells(self, item: StepItem) -> list[tuple[int, int]]:
        truth = self._truths.get(item.request_id)
        if truth is None or (item.index not in truth.samples and not item.params.use_beam_search):
            _fail(item, "is unknown")
        if not truth.params.use_beam_search:
            return truth.samples[item.index]
        if item.start >= truth.num_prompt and not self._is_tainted(item):
            return self._beam(item, truth)
        return next(iter(truth.samples.values()))

    def _cells_with_drafts(self, item: StepItem) -> list[tuple[int, int]]:
        """As if the drafts were right: their rows read each other, and later ones only those that were."""
        cells = self._cells(item)
        if item.num_drafts:
            cells = list(cells)
            _extend(cells, item.token_ids[-item.num_drafts :])
        return cells

    def _beam(self, item: StepItem, truth: _Truth) -> list[tuple[int, int]]:
        """The tokens of a beam: the scheduler chooses them, so all that can be told is that its KV is that of one
        sequence that begins with the prompt."""
        context = self._cell(item, 0, item.start - 1)[2]
        prompt = next(iter(truth.samples.values()))
        chain: list[tuple[int, int]] = []
        while context != prompt[-1][1]:
            if context not in truth.beams:
                _fail(item, "continues what is no beam of its request")
            token, before = truth.beams[context]
            chain.append((token, context))
            context = before
        cells = [*prompt, *reversed(chain)]
        if len(cells) != item.start:
            _fail(item, f"continues a beam of {len(cells)} tokens")
        _extend(cells, item.token_ids)
        truth.beams[cells[-1][1]] = (cells[-1][0], cells[-2][1])
        return cells

    # -- "the model"

    def _compute(
        self, item: StepItem, tainted: bool
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]:
        """Tokens, their logprobs and the prompt's. Those of a discarded or tainted item are outside the vocabulary."""
        if item.discard or tainted:
            nonsense = TokenLogprob(self.vocab_size, 1.0, 0)
            return (self.vocab_size,) * item.num_samples, (nonsense,) * item.num_samples, ()
        self._read(item)
        cells, samples = self._cells(item), self._truths[item.request_id].samples
        count = item.params.prompt_logprobs
        prompt_logprobs = [
            self._logprob(cells[item.start + i][1], target, count or 0) for i, target in enumerate(item.prompt_targets)
        ]
        wanted = item.num_logprobs
        if item.num_drafts:
            tokens, logprobs = self._verify(item, cells)
            return tuple(tokens), tuple(logprobs), tuple(prompt_logprobs)
        tokens = [self._draw(item, cells, item.index + i) for i in range(item.num_samples)]
        logprobs = [] if wanted is None else [self._logprob(cells[-1][1], token, wanted) for token in tokens]
        if not item.params.use_beam_search:  # whose tokens the scheduler chooses
            context = list(cells)
            for i, token in enumerate(tokens):
                _extend(samples.setdefault(item.index + i, list(context)), [token])
                self._undo[-1].drawn.append((item.request_id, item.index + i))
        return tuple(tokens), tuple(logprobs), tuple(prompt_logprobs)

    def _verify(self, item: StepItem, cells: list[tuple[int, int]]) -> tuple[list[int], list[TokenLogprob]]:
        """Draws as long as the drafts say the same, and adds the tokens to ``cells``, the truth of the sequence."""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        for draft in (*item.token_ids[-item.num_drafts :], None):
            context = cells[-1][1]
            token = self._draw(item, cells, item.index)
            tokens.append(token)
            if item.num_logprobs is not None:
                logprobs.append(self._logprob(context, token, item.num_logprobs))
            _extend(cells, [token])
            self._undo[-1].drawn.append((item.request_id, item.index))
            if token != draft:
                break
        return tokens, logprobs

    def _draw(self, item: StepItem, cells: list[tuple[int, int]], index: int) -> int:
        """The next token: a hash of the context and, unless greedy, of (seed, sample index, position)."""
        position, (_, context) = len(cells) - 1, cells[-1]
        noise = (item.seed, index, position) if item.params.temperature else ()
        number = hash((context, *noise)) & _POSITIVE
        number, chance = divmod(number, 1000)
        may_stop = len(cells) - item.num_prompt >= item.params.min_tokens
        if item.stop_ids and may_stop and chance < self.stop_rate * 1000:
            return min(item.stop_ids)
        tokens = (token % self.vocab_size for token in range(number, number + self.vocab_size))
        return next((token for token in tokens if token not in item.stop_ids), number % self.vocab_size)

    def _logprob(self, context: int, token: int, count: int) -> TokenLogprob:
        """The logprob of ``token`` after a context, with ``count`` alternatives, the best first."""
        value = logprob(context, token)
        others = nlargest(count, range(self.vocab_size), key=lambda other: logprob(context, other)) if count else []
        rank = 1 + (hash((context, token)) & 0xFFFF) % self.vocab_size
        return TokenLogprob(token, value, rank, tuple((other, logprob(context, other)) for other in others))


def logprob(context: int, token: int) -> float:
    """How likely this "model" finds a token after the tokens whose hash is ``context``."""
    return -(hash((context, token)) & 0xFFFF) / 4096


def context_of(tokens: Iterable[int]) -> int:
    """The hash of a sequence of tokens."""
    cells: list[tuple[int, int]] = []
    _extend(cells, tokens)
    return cells[-1][1]


def _extend(cells: list[tuple[int, int]], tokens: Iterable[int]) -> None:
    context = cells[-1][1] if cells else 0
    for token in tokens:
        context = hash((context, token))  # of integers only, so the same in every process
        cells.append((token, context))


def _end(item: StepItem) -> int:
    return item.start + len(item.token_ids)


def _key(item: StepItem) -> Key:
    return item.request_id, item.index


def _fail(item: StepItem, what: str) -> NoReturn:
    raise ShadowFault(f"{item.request_id!r}[{item.index}], positions {item.start} .. {_end(item) - 1}: {what}")
