"""The clients of a world: they send what its script says, and hold every output against the answer that must come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from chairlift.core.plan import Output, StepStats
from chairlift.core.ports import Abort, Add, Inspect, Message, Pin, Report
from chairlift.core.recorder import EXPLANATIONS
from chairlift.core.request import FinishReason, SamplingParams, Status
from chairlift.core.scheduler import Scheduler

from .answers import Answer, Text, prompt_logprobs, search
from .clock import Clock
from .draw import Act, Ask, Cancel, Job, Jump, Prefix, World
from .executor import Executor


class Awaited:
    """An output that a client waits for. ``doomed``: it was aborted, and nothing more may come but its end."""

    __slots__ = ("answer", "doomed", "num_prompt_logprobs")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.doomed = False
        self.num_prompt_logprobs = 0


class Life:
    """A request from its Add to its last end. ``open`` are the outputs without an end."""

    __slots__ = (
        "deepest",
        "failed_at",
        "failures",
        "first_due",
        "job",
        "last_due",
        "max_len",
        "open",
        "prompt_logprobs",
        "texts",
    )

    def __init__(self, job: Job, world: World, now: float, longest: int) -> None:
        self.job = job
        self.first_due, self.last_due = job.limits(now)
        self.max_len = length = world.max_len(job, longest)
        self.open = {i: Awaited(Answer(job, i, length, world.vocab_size, world.stop_rate)) for i in job.outputs}
        self.prompt_logprobs = prompt_logprobs(job, world.vocab_size)
        self.texts: list[Text] | None = None  # of a search, once computed
        self.failures: Counter[int] = Counter()  # steps failed since it came past one, by index (a search has but 0)
        self.failed_at: dict[int, int] = {}  # how far it would have come, had the last of them not failed
        self.deepest = 0  # positions computed

    @property
    def is_over(self) -> bool:
        """For the engine: what is left are ends on their way."""
        return all(sequence.doomed for sequence in self.open.values())


class Client:
    """Source and sink of the engine."""

    def __init__(
        self, world: World, script: Iterable[Act], clock: Clock, executor: Executor, coverage: Counter[str]
    ) -> None:
        self.live: dict[str, Life] = {}
        self.num_received = self.num_ended = 0
        self.coverage = coverage
        self.stalled = 0  # steps of the engine since anything last moved
        self.taken_at = 0.0  # the engine's time at which it looked for late requests
        self.scheduler: Scheduler
        self._world = world
        self._clock = clock
        self._executor = executor
        self._script = iter(script)
        self._next: Act | None = next(self._script, None)
        self._next_at = clock.true + self._next.gap if self._next else inf
        self._ending: dict[str, list[Life]] = {}  # aborted as a whole just now, the end still to come
        self._refusals: Counter[str] = Counter()  # of second requests with the id of a live one
        self._in_flight: list[Cancel] = []
        self._questions: dict[int, str | None] = {}
        self._num_questions = 0

    @property
    def is_done(self) -> bool:
        return self._next is None and not self.live and not self._ending

    # -- source

    def take(self, idle: bool, until: float | None = None) -> list[Message]:
        if idle:
            due = inf if self._is_full else self._next_at
            if until is not None and until - self._clock.offset < due:
                self._clock.show(until)
            elif due != inf:
                self._clock.pass_until(due)
                self.stalled = 0
        messages: list[Message] = []
        sent: set[str] = set()
        while self._next is not None and self._next_at <= self._clock.true and not self._is_full:
            what = self._next.what
            if messages and (isinstance(what, Prefix) or (isinstance(what, Job) and self._depends(what, sent))):
                break  # what becomes of the messages before it must be known first
            if isinstance(what, Job):
                sent.add(what.id)
            self._next = next(self._script, None)
            self._next_at = self._clock.true + self._next.gap if self._next else inf
            messages += self._messages(what)
            if isinstance(what, Prefix):
                break  # since it bounds the length of those after it
        self.taken_at = max(self._clock.latest, self._clock.shown)
        return messages

    def _depends(self, job: Job, sent: set[str]) -> bool:
        """Whether messages just sent decide what becomes of a job: an abort may end all of a static batch."""
        return job.id in sent or (job.id in self.live and not job.takes_over)

    @property
    def _is_full(self) -> bool:
        return self._next is None or (isinstance(self._next.what, Job) and len(self.live) >= self._world.most_live)

    def _messages(self, what: Job | Cancel | Ask | Prefix | Jump) -> list[Message]:
        match what:
            case Job():
                return self._send(what)
            case Cancel(name, index, in_flight):
                if in_flight:
                    self._in_flight.append(what)
                    return []
                self._doom(name, index)
                return [Abort(name, index)]
            case Ask(name):
                self._num_questions += 1
                self._questions[self._num_questions] = name
                return [Inspect(self._num_questions, name)]
            case Prefix(tokens):
                return self._pin(tokens)
            case Jump(seconds):
                self._clock.offset += seconds
                self.coverage["clock forward" if seconds > 0 else "clock back"] += 1
        return []

    def _send(self, job: Job) -> list[Message]:
        request = job.request(self._clock.shown)
        before: list[Message] = []
        if job.id in self.live:
            if not job.takes_over:
                self.coverage["duplicate of a live id"] += 1
                self._refusals[job.id] += len(job.outputs)
                self.num_received += 1
                return [Add(request)]
            before = [Abort(job.id)]
            self._doom(job.id, None)
            self.coverage["id taken over"] += 1
            self.coverage["id taken over from a step in flight"] += self._executor.is_running(job.id)
        elif self._executor.knows(job.id):
            self.coverage["id used again"] += 1
        self._executor.expect(request)
        self._enter(job)
        return [*before, Add(request)]

    def _enter(self, job: Job) -> None:
        self.live[job.id] = Life(job, self._world, self._clock.shown, self.scheduler._longest)
        self.num_received += 1
        self.stalled = 0

    def _pin(self, tokens: tuple[int, ...]) -> list[Message]:
        """The engine makes a request of its own of the prefix."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        job = Job(f"pin-{self.scheduler._next_ticket}", (*tokens, tokens[-1]), params)
        self._executor.expect(job.request(0.0))
        self._enter(job)
        self.coverage["pinned prefixes"] += 1
        return [Pin(tokens)]

    # -- aborts

    def cancels_in_flight(self) -> Iterable[Cancel]:
        """Aborts that come between a step and its commit."""
        while self._in_flight:
            cancel = self._in_flight.pop(0)
            self._doom(cancel.id, cancel.index)
            self.coverage["abort while a step is in flight"] += self._executor.is_running(cancel.id)
            yield cancel

    def _doom(self, name: str, index: int | None) -> None:
        life = self.live.get(name)
        if life is None:
            self.coverage["abort of an unknown id"] += 1
            return
        if index is not None and life.job.params.use_beam_search:
            self.coverage["abort of one beam"] += 1
            return  # of a search nothing ends alone
        self._describe_abort(name, index)
        for i, sequence in life.open.items():
            sequence.doomed |= index in (None, i)
        if life.is_over:
            self._ending.setdefault(name, []).append(self.live.pop(name))

    def _describe_abort(self, name: str, index: int | None) -> None:
        if name.startswith("pin-"):
            return
        for request in [*self.scheduler.waiting, *self.scheduler.running.values()]:
            if request.id == name and (index is None or index in request.samples):
                self.coverage[f"abort {request.status.value}"] += 1
                self.coverage["abort between chunks"] += 0 < request.num_computed < request.num_prompt
                self.coverage["abort before the fork"] += index is not None and request.num_samples > 1
                self.coverage["abort of a held row"] += request.finish_reason is not None
                self.coverage["abort of what is swapped out"] += bool(request.host_table)
                self.coverage["abort of a search"] += request.params.use_beam_search

    # -- sink

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        for output in outputs:
            self._hear(output)

    def _hear(self, output: Output) -> None:
        self.stalled = 0
        name, index, reason = output.request_id, output.index, output.finish_reason
        if output.refused and self._refusals[name] and "already here" in (output.error or ""):
            self._refusals[name] -= 1
            self.num_ended += self._refusals[name] == 0
            return
        life = next((life for life in self._ending.get(name, ()) if index in life.open), None) or self.live.get(name)
        assert life is not None and index in life.open, f"for nobody, or after the end: {output}"
        assert output.new_token_ids or output.prompt_logprobs or reason, f"no news: {output}"
        sequence = life.open[index]
        if life.job.params.use_beam_search:
            self._check_text(life, output)
        else:
            self._check_tokens(life, sequence, output)
        if reason is not None:
            self._check_reason(life, sequence, output)
            self.coverage[f"ended by {reason.value}"] += 1
            del life.open[index]
            if not life.open:
                self._leave(name, life)

    def _leave(self, name: str, life: Life) -> None:
        self.num_ended += 1
        if self.live.get(name) is life:
            del self.live[name]
            return
        self._ending[name].remove(life)
        if not self._ending[name]:
            del self._ending[name]

    def _check_tokens(self, life: Life, sequence: Awaited, output: Output) -> None:
        job, answer = life.job, sequence.answer
        known = life.prompt_logprobs
        done = sequence.num_prompt_logprobs
        sequence.num_prompt_logprobs += len(output.prompt_logprobs)
        assert list(output.prompt_logprobs) == known[done : sequence.num_prompt_logprobs], "other prompt logprobs"
        assert not (sequence.doomed and output.new_token_ids), f"tokens after the abort: {output}"
        for i, token in enumerate(output.new_token_ids):
            assert answer.reason is None, f"more tokens than there are: {output}"
            assert (token, output.logprobs[i] if output.logprobs else None) == answer.next(), f"other tokens: {output}"
        assert output.num_cached_tokens < max(1, len(job.prompt)), f"all is cached: {output}"
        if output.num_cached_tokens:
            assert self._world.settings.enable_prefix_caching, f"cached without a cache: {output}"
            self.coverage["prefix hits"] += answer.num_tokens == 1
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert output.finish_reason is answer.reason, f"ends after {answer.num_tokens} tokens: {output}"
            if output.index == 0:
                assert sequence.num_prompt_logprobs == len(known), "prompt logprobs are missing"
            stopped = output.finish_reason is FinishReason.STOP
            assert (output.stop_token_id is not None) == stopped, f"{output}"
        else:
            assert output.finish_reason or not answer.reason or self._world.policy == "static", f"no end: {output}"

    def _check_text(self, life: Life, output: Output) -> None:
        """One of a search's results, complete."""
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            assert not output.new_token_ids, f"{output}"
            return
        text = self._text(life, output.index)
        assert text is not None, f"no such text: {output}"
        got = (output.new_token_ids, output.cumulative_logprob, output.finish_reason)
        assert got == (text.tokens, text.logprob, text.reason), f"{output} is not {text}"
        assert output.stop_token_id == (text.tokens[-1] if text.reason is FinishReason.STOP else None)

    def _text(self, life: Life, rank: int) -> Text | None:
        if life.texts is None:
            life.texts = search(life.job, life.max_len, self._world.vocab_size)
        return life.texts[rank] if rank < len(life.texts) else None

    # -- ends before the answer's

    def _check_reason(self, life: Life, sequence: Awaited, output: Output) -> None:
        match output.finish_reason:
            case FinishReason.ABORT:
                assert sequence.doomed, f"nobody aborted it: {output}"
            case FinishReason.DEADLINE:
                self._check_deadline(life, sequence, output)
            case FinishReason.ERROR:
                self._check_error(life, output)
            case _:
                assert not (sequence.doomed and output.new_token_ids), f"aborted, and went on: {output}"
                assert self._world.capacity.windows != (0,) or not self.never_fits(life.job), f"fits not: {output}"
                self.coverage["searches done"] += life.job.params.use_beam_search
                self.coverage["samples done"] += len(life.job.outputs) > 1

    def _check_deadline(self, life: Life, sequence: Awaited, output: Output) -> None:
        """Its time has come, or it waits and could not make it any more."""
        due = life.last_due if sequence.answer.num_tokens else life.first_due
        assert due != inf, f"has no deadline: {output}"
        if due > self._clock.latest:
            length = len(life.job.prompt) + sequence.answer.num_tokens
            needed = self._executor.seconds(length, length * (length + 1) // 2)
            assert due - self._clock.latest < 1.5 * needed, f"could make it: {output}"
            self.coverage["hopeless"] += 1

    def _check_error(self, life: Life, output: Output) -> None:
        error, job = output.error or "", life.job
        assert error and not output.new_token_ids, f"no reason: {output}"
        if output.refused:
            assert self.never_fits(job), f"it fits: {output}"
            self.coverage["refused: " + " ".join(word for word in error.split()[:3] if word.isalpha())] += 1
        elif "fewer" in error:
            assert job.params.use_beam_search and self._text(life, output.index) is None, f"there is one: {output}"
        elif "failed" in error:
            assert max(life.failures.values(), default=0) >= 3, f"after {life.failures} failures: {output}"
            self.coverage["ended by failures"] += 1
        else:
            assert "finite" in error and self._executor.broke(output.request_id), f"an unknown error: {output}"
            self.coverage["ended by bad logits"] += 1

    def never_fits(self, job: Job) -> bool:
        """Whether a job must be refused (with sliding windows, or a pinned prefix: may be)."""
        world = self._world
        most, slots = self.scheduler._longest, world.settings.max_num_seqs
        static_search = job.params.use_beam_search and world.policy == "static"
        wrong = not 1 <= len(job.prompt) < most or job.params.width > slots or static_search
        return wrong or world.blocks(job, most) > world.capacity.num_blocks - self.scheduler.kv.num_pinned

    # -- questions

    def answer(self, report: Report) -> None:
        name = self._questions.pop(report.question)
        running = [r for r in self.scheduler.running.values() if name in (None, r.id)]
        waiting = [r for r in self.scheduler.waiting if name in (None, r.id)]
        views = report.requests
        assert [(v.id, v.index) for v in views] == [r.key for r in (*running, *waiting)]
        for view in views[: len(running)]:
            assert (view.state, view.position, view.reason) == (Status.RUNNING.value, None, None)
        positions = [view.position or 0 for view in views[len(running) :]]
        assert positions == sorted(set(positions)) and (not positions or positions[0] >= 1)
        for view in views[len(running) :]:
            assert view.state in (Status.WAITING.value, Status.PREEMPTED.value)
            assert not view.reason or view.reason in EXPLANATIONS, view
        assert all(line.seconds >= 0 and line.step <= line.last_step for line in report.life), report.life
        assert name or not report.life
        self.coverage["questions"] += 1
        self.coverage["lives told"] += bool(report.life)

    # -- after each step of the engine

    def check(self) -> None:
        """Every request is where it must be, as told by messages and outputs alone."""
        assert not self._questions and not self._ending and not +self._refusals, "a message got no answer"
        live, scheduler = self.live, self.scheduler
        assert self.num_received == self.num_ended + len(live), "received is not live and ended"
        places = [*scheduler.running.values(), *scheduler.waiting]
        for place, request in enumerate(places):
            runs = place < len(scheduler.running)
            assert request.status in ((Status.RUNNING,) if runs else (Status.WAITING, Status.PREEMPTED)), request.key
        preempted = sum(request.status is Status.PREEMPTED for request in places)
        assert preempted == scheduler.waiting.num_preempted, f"{preempted} are preempted"
        found = {request.id for request in places}
        assert found == live.keys(), f"the scheduler has {found}, and {set(live)} live"
        sequences = [(r.id, index) for r in places if not r.params.use_beam_search for index in r.samples]
        awaited = {
            (name, index) for name, life in live.items() if not life.job.params.use_beam_search for index in life.open
        }
        assert len(sequences) == len(awaited) and awaited == set(sequences), f"{sequences} for {awaited}"
        for name, life in live.items():
            if life.first_due <= self.taken_at:
                self._check_in_time(name, life)
        running = scheduler.running.values()
        slots = sum(len(request.samples) for request in running if not request.params.use_beam_search)
        slots += sum(live[name].job.params.width for name in {r.id for r in running if r.params.use_beam_search})
        assert slots <= self._world.settings.max_num_seqs, f"{slots} slots are used"

    def _check_in_time(self, name: str, life: Life) -> None:
        """Whoever is late ends at once, unless all its tokens have come (a row of a static batch may be held)."""
        late = life.last_due <= self.taken_at
        if late or not life.job.params.use_beam_search:  # of which nothing is heard before the end
            for sequence in life.open.values():
                served = sequence.answer.reason is not None or (sequence.answer.num_tokens and not late)
                assert served, f"{name} is late and lives"
