"""Beam search: the texts of a search that keeps whole token lists and knows of no blocks, steps or early ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import Any

import pytest

from chairlift.core.beams import BeamSearch, num_candidates
from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.order import make_order
from chairlift.core.plan import BlockOp, BlockOpKind, Capacity, Output, StepPlan, StepStats
from chairlift.core.policy import make_policy
from chairlift.core.ports import Abort, Add, Message, Report
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.core.scheduler import Scheduler
from chairlift.core.settings import Settings
from chairlift.sim.shadow import ShadowExecutor, context_of, logprob

MakeRequest = Callable[..., Request]
MakeRig = Callable[..., Any]

MAX_MODEL_LEN = 40
Text = tuple[tuple[int, ...], float, FinishReason]  # tokens, their logprob, how it ended


# -- the reference


def search(request: Request, vocab_size: int) -> list[Text]:
    """The results, best first, of a search that goes on until all beams are at their greatest length."""
    params, stop_ids = request.params, request.stop_ids
    prompt = tuple(request.token_ids[: request.num_prompt])
    most = min(MAX_MODEL_LEN - len(prompt), params.max_tokens or MAX_MODEL_LEN)
    offered = num_candidates(params.width, len(stop_ids))
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[float, Text]] = []

    def end(tokens: tuple[int, ...], total: float, reason: FinishReason) -> None:
        ended.append((total / len(tokens) ** params.length_penalty, (tokens, total, reason)))

    for length in range(1, most + 1):
        choices: list[tuple[tuple[int, ...], float]] = []
        for tokens, before in beams:
            context = context_of((*prompt, *tokens))
            best = sorted(range(vocab_size), key=lambda token: -logprob(context, token))
            for rank, token in enumerate(best):
                longer, total = (*tokens, token), before + logprob(context, token)
                if token not in stop_ids:
                    choices.append((longer, total))
                elif rank < offered:
                    end(longer, total, FinishReason.STOP)
        beams = sorted(choices, key=lambda choice: -choice[1])[: params.width]
        if length == most:
            for tokens, total in beams:
                end(tokens, total, FinishReason.LENGTH)
    ended.sort(key=lambda entry: -entry[0])
    return [text for _, text in ended[: params.n]]


# -- a run


class Unlucky(ShadowExecutor):
    """Steps fail and swapped blocks are damaged, now and then."""

    rng = Random(0)
    failing = damaged = 0.0

    def fails(self, plan: StepPlan) -> bool:
        return self.rng.random() < self.failing

    def damages(self, op: BlockOp) -> bool:
        return self.rng.random() < self.damaged


@dataclass
class World:
    """An engine, and requests that arrive before given steps. Source and sink at once."""

    capacity: Capacity
    settings: Settings
    policy: str = "chunked"
    admission: str = "optimistic"
    depth: int = 1
    vocab_size: int = 10
    failing: float = 0.0
    damaged: float = 0.0
    seed: int = 0
    events: list[tuple[int, Message]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    now: int = 0
    biggest: int = 0  # beams that ran at once

    def __post_init__(self) -> None:
        self.executor = Unlucky(self.capacity, vocab_size=self.vocab_size)
        self.executor.rng = Random(self.seed)
        self.executor.failing, self.executor.damaged = self.failing, self.damaged
        policy = make_policy(self.policy, admission=self.admission, order=make_order("fcfs"))
        self.scheduler = Scheduler(self.capacity, policy, self.settings)
        self.engine = Engine(self.scheduler, self.executor, self, self, VirtualClock(), depth=self.depth)

    def take(self, idle: bool, until: float | None = None) -> list[Message]:
        if idle and self.events:
            self.now = max(self.now, min(step for step, _ in self.events))
        due = [message for step, message in self.events if step <= self.now]
        self.events = [(step, message) for step, message in self.events if step > self.now]
        self.now += 1
        for message in due:
            if isinstance(message, Add):
                self.executor.expect(message.request)
        return due

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        self.outputs += outputs

    def answer(self, report: Report) -> None:
        raise AssertionError("nobody asked")

    def run(self) -> None:
        """Until nobody is left; then nothing may be."""
        steps = 0
        while self.engine.step() or self.events:
            steps += 1
            assert steps < 5000, "no progress"
            self.check_sharing()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0)
        assert stats.free_blocks == stats.num_blocks and stats.reserved_blocks == 0
        if self.admission == "reserve" and not (self.failing or self.damaged):
            assert stats.total_preemptions == 0, "what was promised was not there"
        self.scheduler.check()
        assert self.scheduler.boarding.slots_used == 0

    def check_sharing(self) -> None:
        """Beams share what is the same in both, and nothing else: there are as many blocks as there are different
        beginnings, cut at the ends of blocks."""
        searches: dict[str, list[Request]] = {}
        for request in self.scheduler.sequences:
            if request.params.use_beam_search and request.block_table:
                searches.setdefault(request.id, []).append(request)
        for beams in searches.values():
            self.biggest = max(self.biggest, len(beams))
            held = [self.beginnings(beam) for beam in beams]
            for one, other in combinations(held, 2):
                assert {one[x] == other[x] for x in one.keys() & other.keys()} <= {True}, "the same, in two blocks"
            blocks = {block for blocks in held for block in blocks.values()}
            assert len(blocks) == len({beginning for blocks in held for beginning in blocks})

    def beginnings(self, beam: Request) -> dict[tuple[int, tuple[int, ...]], int]:
        """Of each block with tokens in it, or in the step in flight: its group, and the tokens up to its end."""
        groups, size = len(self.capacity.windows), self.capacity.block_size
        return {
            (at % groups, tuple(beam.token_ids[: min(beam.num_planned, (at // groups + 1) * size)])): block
            for at, block in enumerate(beam.block_table)
            if block >= 0 and at // groups * size < beam.num_planned
        }

    def texts(self, request_id: str) -> list[Text]:
        """The results of a search, best first."""
        outputs = sorted((o for o in self.outputs if o.request_id == request_id), key=lambda output: output.index)
        assert [output.index for output in outputs] == list(range(len(outputs))), "one output a result"
        texts: list[Text] = []
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                assert output.error
                continue
            assert output.finish_reason is not None and output.cumulative_logprob is not None
            stop = output.new_token_ids[-1] if output.finish_reason is FinishReason.STOP else None
            assert output.stop_token_id == stop
            texts.append((output.new_token_ids, output.cumulative_logprob, output.finish_reason))
        return texts


def beam_request(rng: Random, id: str, vocab_size: int, base: Sequence[int]) -> Request:
    """Most prompts begin like ``base``, for a random length."""
    width = rng.randint(1, 6)
    length = rng.randint(1, 14)
    shared = rng.randint(0, length)
    prompt = [*base[:shared], *(rng.randrange(vocab_size) for _ in range(length - shared))]
    params = SamplingParams(
        n=rng.randint(1, width),
        best_of=width,
        use_beam_search=True,
        temperature=rng.choice((0.0, 1.0)),
        max_tokens=rng.choice((1, 2, rng.randint(1, 12))),
        length_penalty=rng.choice((-1.0, 0.0, 0.5, 1.0, 1.0, 2.0)),
    )
    stop_ids = frozenset(rng.sample(range(vocab_size), rng.choice((0, 1, 1, 2))))
    return Request(
        id=id,
        token_ids=prompt,
        num_prompt=length,
        params=params,
        seed=rng.randrange(2**32),
        stop_ids=stop_ids,
        num_samples=params.width,
    )


def sampling_request(rng: Random, id: str, vocab_size: int, base: Sequence[int]) -> Request:
    length = rng.randint(1, 14)
    params = SamplingParams(n=rng.choice((1, 1, 2)), max_tokens=rng.randint(1, 12))
    return Request(
        id=id, token_ids=list(base[:length]), num_prompt=length, params=params, seed=1, num_samples=params.width
    )


def draw_world(seed: int) -> tuple[World, list[Request]]:
    """A world in which the largest search just fits, or nearly, and the searches in it."""
    rng = Random(seed)
    vocab_size = rng.choice((2, 3, 5, 10, 40))
    base = [rng.randrange(vocab_size) for _ in range(14)]
    requests = [beam_request(rng, f"b{i}", vocab_size, base) for i in range(rng.randint(1, 3))]
    requests += [sampling_request(rng, f"s{i}", vocab_size, base) for i in range(rng.randint(0, 3))]
    block_size, windows = rng.choice((1, 2, 3, 4, 8)), rng.choice(((0,), (0,), (0,), (4,), (0, 7), (3, 0)))
    policy = rng.choice(("chunked", "chunked", "continuous"))
    settings = Settings(
        max_num_seqs=rng.choice((6, 8, 12)),
        max_num_batched_tokens=MAX_MODEL_LEN if policy == "continuous" else rng.choice((12, 13, 40)),
        enable_prefix_caching=rng.random() < 0.7,
        check=True,
    )
    whole = -(-MAX_MODEL_LEN // block_size)
    roomy = Scheduler(Capacity(100 * whole, block_size, MAX_MODEL_LEN, windows=windows), make_policy(policy), settings)
    for request in requests:
        request.max_len = min(MAX_MODEL_LEN, request.num_prompt + (request.params.max_tokens or MAX_MODEL_LEN))
    needed = max(roomy.kv.layout.full_blocks(request) for request in requests)
    world = World(
        Capacity(
            needed + rng.choice((0, 0, 1, 3, needed)),
            block_size,
            MAX_MODEL_LEN,
            num_host_blocks=rng.choice((0, 0, 5)),
            num_disk_blocks=rng.choice((0, 0, 5)),
            windows=windows,
        ),
        settings,
        policy,
        admission=rng.choice(("optimistic", "optimistic", "reserve", "peak")),
        depth=rng.choice((1, 2)),
        vocab_size=vocab_size,
        failing=rng.choice((0.0, 0.0, 0.04)),
        damaged=rng.choice((0.0, 0.3)),
        seed=seed,
    )
    world.events = [(rng.choice((0, 0, rng.randint(0, 12))), Add(request)) for request in requests]
    return world, [request for request in requests if request.params.use_beam_search]


@pytest.mark.parametrize("block", range(20))
def test_the_results_are_those_of_a_plain_search(block: int) -> None:
    """Tokens, order, logprobs and how they ended; in small pools, beside others, with one step in flight or two, when
    steps fail and when blocks are damaged. A seed that fails can be run alone."""
    beams = 0
    for seed in range(50 * block, 50 * block + 50):
        world, searches = draw_world(seed)
        expected = {request.id: search(request, world.vocab_size) for request in searches}
        world.run()
        beams = max(beams, world.biggest)
        for request in searches:
            outputs = [output for output in world.outputs if output.request_id == request.id]
            failed = any(output.error and "failed 3 times" in output.error for output in outputs)
            assert failed <= bool(world.failing)
            assert len(outputs) == request.params.n, f"seed {seed}"
            assert failed or world.texts(request.id) == expected[request.id], f"seed {seed}: {request}"
    assert beams >= 5, "what this is to test"


@pytest.mark.parametrize("seed", range(60))
def test_an_abort_in_the_middle_frees_everything(seed: int) -> None:
    """M5, M12: whether it waits, computes its prompt or its beams are at any length. One result cannot be aborted."""
    world, searches = draw_world(seed)
    rng = Random(seed)
    for request in searches:
        world.events.append((rng.randint(0, 15), Abort(request.id, 0)))
        world.events.append((rng.randint(0, 15), Abort(request.id)))
    expected = {request.id: search(request, world.vocab_size) for request in searches}
    world.run()
    for request in searches:
        outputs = [output for output in world.outputs if output.request_id == request.id]
        assert len(outputs) == request.params.n, "one output a result, whatever was aborted"
        aborted = [output.finish_reason is FinishReason.ABORT for output in outputs]
        assert all(aborted) or not any(aborted)
        if not any(aborted) and not world.failing:
            assert world.texts(request.id) == expected[request.id]


def test_beams_to_come_keep_their_memory(make_rig: MakeRig) -> None:
    """With a vocabulary of two, four beams are there after two rounds only. Until then nobody gets what the missing
    ones will need."""
    rig = make_rig(admission="reserve", num_blocks=30, block_size=1)
    rig.executor.vocab_size = 2
    request = rig.add("a", 4, n=4, use_beam_search=True, temperature=0.0, max_tokens=6)
    assert rig.kv.layout.full_blocks(request) == 28
    other = rig.add("b", 4, max_tokens=4)
    for _ in range(2):
        rig.step()
        assert other.num_planned == 0
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_a_beam_that_got_a_damaged_block_by_chance_goes_on(make_rig: MakeRig) -> None:
    """A request swaps a prefix in, and is aborted in flight; a beam gets its block, and writes there. Then
    the step tells that what was swapped in was damaged, which is nobody's concern any more."""
    rig = make_rig("continuous", num_blocks=24, block_size=1, host_blocks=24, executor=Unlucky)
    rig.executor.damaged = 1.0
    rig.executor.vocab_size = 10
    rig.add("a", range(4), max_tokens=1)
    rig.run()
    rig.add("filler", 23, max_tokens=1)
    rig.run()
    beams = rig.add("b", range(5, 8), n=2, use_beam_search=True, temperature=0.0, max_tokens=6)
    rig.step()
    rig.step()
    rig.add("r", range(4), max_tokens=1)
    first = rig.scheduler.schedule(0.0)
    assert any(op.kind is BlockOpKind.SWAP_IN for op in first.block_ops)
    first_handle = rig.executor.submit(first)
    rig.abort("r")
    second = rig.scheduler.schedule(0.0)
    bad = {op.dst for op in first.block_ops if op.kind is BlockOpKind.SWAP_IN}
    assert any(bad & set(item.block_table) for item in second.items), "what this is to test"
    second_handle = rig.executor.submit(second)
    for plan, handle in ((first, first_handle), (second, second_handle)):
        rig.outputs += rig.scheduler.commit(plan, rig.executor.result(handle), 0.0)
    rig.run()
    texts = [rig.tokens("b", index) for index in range(2)]
    assert texts == [list(tokens) for tokens, _, _ in search(beams, 10)]
    assert rig.scheduler.stats().total_preemptions == 0


# -- single decisions


def make_search(
    make_request: MakeRequest, *, max_tokens: int = 3, stop_ids: Sequence[int] = (), **params: Any
) -> BeamSearch:
    """Of a prompt of two tokens, width 2 unless said otherwise."""
    request = make_request("a", [1, 2], **{"n": 2, "use_beam_search": True, "max_tokens": max_tokens} | params)
    request.max_len, request.stop_ids = 2 + max_tokens, frozenset(stop_ids)
    return BeamSearch(request)


def test_a_round_ends_when_all_beams_have_offered(make_request: MakeRequest) -> None:
    beams = make_search(make_request)
    assert beams.offer(0, [(5, -1.0), (6, -2.0)])
    choices = beams.advance({0: [1, 2]})
    assert [(choice.parent, choice.token, choice.logprob) for choice in choices] == [(0, 5, -1.0), (0, 6, -2.0)]
    assert beams.begin_round(choices) == [0, 1], "a parent's best goes on in its place"
    assert not beams.offer(1, [(7, -0.1), (8, -3.0)])
    assert beams.offer(0, [(5, -0.2), (6, -0.3)])
    choices = beams.advance({0: [1, 2, 5], 1: [1, 2, 6]})
    assert [(choice.parent, choice.token) for choice in choices] == [(0, 5), (0, 6)], "both of the same parent"
    assert beams.begin_round(choices) == [0, 2], "an index is not given twice"


def test_equal_logprobs_stay_in_the_order_of_their_parents(make_request: MakeRequest) -> None:
    beams = make_search(make_request)
    beams.offer(0, [(6, -1.0), (5, -1.0)])
    choices = beams.advance({0: [1, 2]})
    assert [choice.token for choice in choices] == [6, 5]
    beams.begin_round(choices)
    beams.offer(1, [(7, -1.0), (8, -1.0)])
    beams.offer(0, [(5, -1.0), (4, -1.0)])
    choices = beams.advance({0: [1, 2, 6], 1: [1, 2, 5]})
    assert [(choice.parent, choice.token) for choice in choices] == [(0, 5), (0, 4)]


@pytest.mark.parametrize(
    ("penalty", "logprob_beam", "over"),
    [
        (1.0, -2.9, False),  # at its greatest length, 3, it would have -0.97
        (1.0, -3.0, True),  # -1, no better than the result
        (0.0, -1.1, True),
        (0.0, -0.9, False),
        (-1.0, -0.4, False),  # at the next length, 2, it would have -0.8
        (-1.0, -0.5, True),
        (2.0, -8.9, False),
        (2.0, -9.0, True),
    ],
)
def test_a_search_ends_as_soon_as_no_beam_can_become_better(
    make_request: MakeRequest, penalty: float, logprob_beam: float, over: bool
) -> None:
    """There is a result of length 1 and logprob -1."""
    beams = make_search(make_request, n=1, best_of=2, stop_ids=[9], length_penalty=penalty)
    beams.offer(0, [(9, -1.0), (5, logprob_beam), (6, -20.0)])
    assert (beams.advance({0: [1, 2]}) == []) is over
    assert [(result.token_ids, result.score, result.stop_token_id) for result in beams.results] == [((9,), -1.0, 9)]


def test_a_search_goes_on_while_it_lacks_results(make_request: MakeRequest) -> None:
    beams = make_search(make_request, stop_ids=[9])
    beams.offer(0, [(9, -1.0), (5, -50.0), (6, -60.0)])
    assert len(beams.advance({0: [1, 2]})) == 2


def test_a_search_without_beams_is_over(make_request: MakeRequest) -> None:
    """However few results it has: a vocabulary of ends only."""
    beams = make_search(make_request, stop_ids=[8, 9])
    beams.offer(0, [(9, -1.0), (8, -2.0)])
    assert beams.advance({0: [1, 2]}) == []
    assert [result.token_ids for result in beams.results] == [(9,), (8,)]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("num_stop_ids", [0, 1, 2, 9])
def test_enough_tokens_are_offered_however_many_of_them_end_the_text(width: int, num_stop_ids: int) -> None:
    assert num_candidates(width, num_stop_ids) - num_stop_ids >= width


def test_results_that_there_are_not_are_errors(make_rig: MakeRig) -> None:
    """M8: two tokens, of which one ends the text, and one token to generate: two texts, and three are asked for."""
    rig = make_rig()
    rig.executor.vocab_size = 2
    rig.add("a", 4, n=3, use_beam_search=True, temperature=0.0, max_tokens=1, stop_ids=[1])
    rig.run()
    ends = {output.index: output.finish_reason for output in rig.outputs}
    assert sorted(ends) == [0, 1, 2] and ends[2] is FinishReason.ERROR
    assert {ends[0], ends[1]} == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(output.error and "found 2 texts, not 3" in output.error for output in rig.outputs)
