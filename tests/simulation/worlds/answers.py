"""The answers that must come, without any scheduler: the tokens that the shadow executor's "model" draws."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from chairlift.core.plan import TokenLogprob
from chairlift.core.request import FinishReason
from chairlift.sim.shadow import context_of, logprob

from .draw import Job


class Answer:
    """A sample of a job, token by token. ``max_len`` is the length at which it ends at the latest."""

    __slots__ = ("_context", "_job", "_length", "_max_len", "_rate", "_vocab", "index", "num_tokens", "reason")

    def __init__(self, job: Job, index: int, max_len: int, vocab_size: int, stop_rate: float) -> None:
        self.index = index
        self.num_tokens = 0
        self.reason: FinishReason | None = None  # that the last token gave
        self._job = job
        self._context = context_of(job.prompt) if job.prompt else 0
        self._length = len(job.prompt)
        self._max_len = max_len
        self._vocab = vocab_size
        self._rate = int(stop_rate * 1000)

    def next(self) -> tuple[int, TokenLogprob | None]:
        """The next token and what is to be said of it."""
        job, context = self._job, self._context
        noise = (job.seed, self.index, self._length - 1) if job.params.temperature else ()
        number, chance = divmod(hash((context, *noise)) & 2**63 - 1, 1000)
        if job.stop_ids and self.num_tokens >= job.params.min_tokens and chance < self._rate:
            token, self.reason = min(job.stop_ids), FinishReason.STOP
        else:
            token = number % self._vocab
            while token in job.stop_ids:
                token = (token + 1) % self._vocab
        wanted = job.params.logprobs
        entry = None if wanted is None else scored(context, token, wanted, self._vocab)
        self._context = hash((context, token))
        self._length += 1
        self.num_tokens += 1
        if self._length >= self._max_len and self.reason is None:
            self.reason = FinishReason.LENGTH
        return token, entry


def scored(context: int, token: int, count: int, vocab_size: int) -> TokenLogprob:
    rank = 1 + (hash((context, token)) & 0xFFFF) % vocab_size
    return TokenLogprob(token, logprob(context, token), rank, tuple(offered(context, count, vocab_size)))


def offered(context: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The ``count`` likeliest next tokens with their logprobs, best first."""
    tokens = range(vocab_size) if count else ()
    return sorted(((token, logprob(context, token)) for token in tokens), key=lambda entry: -entry[1])[:count]


def prompt_logprobs(job: Job, vocab_size: int) -> list[TokenLogprob]:
    count = job.params.prompt_logprobs
    if count is None:
        return []
    entries, context = [], 0
    for token, target in pairwise(job.prompt):
        context = hash((context, token))
        entries.append(scored(context, target, count, vocab_size))
    return entries


@dataclass(frozen=True)
class Text:
    """What a beam search finds."""

    tokens: tuple[int, ...]
    logprob: float
    reason: FinishReason


def search(job: Job, max_len: int, vocab_size: int) -> list[Text]:
    """All that a beam search of the job's width comes across, followed to the greatest length; of it the best n.

    The only difference from the engine's is that nothing is left out because it can no longer become good enough.
    """
    width, penalty = job.params.width, job.params.length_penalty
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found: list[Text] = []
    for length in range(1, max_len - len(job.prompt) + 1):
        choices = []
        for before, tokens in beams:
            count = width + len(job.stop_ids)
            for token, value in offered(context_of((*job.prompt, *tokens)), count, vocab_size):
                text = (*tokens, token)
                if token in job.stop_ids:
                    found.append(Text(text, before + value, FinishReason.STOP))
                else:
                    choices.append((before + value, text))
        beams = sorted(choices, key=lambda choice: -choice[0])[:width]
        if length == max_len - len(job.prompt):
            found += [Text(text, value, FinishReason.LENGTH) for value, text in beams]
    found.sort(key=lambda text: -text.logprob / len(text.tokens) ** penalty)
    return found[: job.params.n]
