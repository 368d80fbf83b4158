"""Loads: who asks for how many tokens, and when. Data and its builders; nothing here runs anything."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from chairlift.errors import ParameterError

MAX_SCALE = 64.0


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One request of a load.

    Fields:
        id: its name in reports.
        prompt_tokens, output_tokens: exact lengths; the output is neither cut short nor ended early.
        arrival_s: when it is sent, in seconds after its phase began. Without meaning in a closed loop.
        after_tokens: if not 0, the seconds count instead from when the answers of the phase have so many tokens, or all
            others are answered: a moment that does not depend on how fast the machine is. Not in a closed loop.
        shared_tokens: so many of the prompt's first tokens are those of all others that share some.
        tenant: who asks.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    after_tokens: int = 0
    shared_tokens: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a load; it begins when the one before has been answered in full.

    ``clients`` None: an open loop, each request is sent at its ``arrival_s``. Else a closed loop: that many clients
    take the requests in order, each sending its next one as soon as its last was answered.
    """

    label: str
    requests: tuple[WorkRequest, ...]
    clients: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A load and the number of slots that it is meant for. Request ids are unique over all phases."""

    name: str
    phases: tuple[Phase, ...]
    max_num_seqs: int

    @property
    def requests(self) -> tuple[WorkRequest, ...]:
        return tuple(request for phase in self.phases for request in phase.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)


FOUR_PROMPT = 64
FOUR_OUTPUTS = {"A": 200, "B": 50, "C": 30, "D": 10, "E": 100, "F": 45}


def four_requests() -> Workload:
    """A, B, C and D in a batch of four, while E and F wait.

    Static batching keeps four slots for the 200 steps of A, and 290 of these 800 slot-steps give a token that somebody
    asked for. E and F are chosen so that their batch has the same share, (100 + 45) / (4 * 100) = 290/800; so the
    whole run has it too: 435/1200 = 290/800 = 0.3625.
    """
    requests = tuple(WorkRequest(name, FOUR_PROMPT, output) for name, output in FOUR_OUTPUTS.items())
    return Workload("four-requests", (Phase("four slots, six requests", requests),), max_num_seqs=4)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of lengths, rounded and clipped. ``sigma`` is that of the logarithm."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return min(self.high, max(self.low, round(rng.lognormvariate(math.log(self.median), self.sigma))))

    def scaled(self, factor: float) -> Lengths:
        """The same shape, longer or shorter, and never below one token."""
        low = max(1, round(self.low * factor))
        return replace(self, median=self.median * factor, low=low, high=max(low, round(self.high * factor)))


# A code assistant: prompts hold the lines around the cursor or a question, with some context; most outputs are a few
# lines, and some are whole functions, up to the service's limit. Log-normal lengths have this shape: a mean well above
# the median, and a long tail.
#
# The migration table fixes the rest. Its throughput is that of outputs, as serving systems report it, and their mean
# length follows by Little's law: 50 clients that always wait for an answer, for 8.2 s each, at 1200 token/s, get
# 1200 * 8.2 / 50 = 197 tokens a request; 3850 * 2.4 / 50 = 185 after the migration. And its static batches were 35 %
# useful: the spread and the limit of the outputs are chosen so that batches of 32 that wait for their longest come to
# about that. Of prompts the table says nothing; here they are somewhat longer than the answers.
PEAK_PROMPT = Lengths(median=200, sigma=0.6, low=32, high=640)
PEAK_OUTPUT = Lengths(median=150, sigma=0.8, low=12, high=560)
PEAK_CLIENTS = (50, 80)
PEAK_SLOTS = 32
# Requests of a phase: a multiple of the slots, so that static batching never runs a batch that is not full.
PEAK_REQUESTS = {50: 3 * PEAK_SLOTS, 80: 5 * PEAK_SLOTS}


def check_scale(scale: float) -> None:
    """Raises ParameterError for a scale that is not above 0 and at most 64."""
    if not 0 < scale <= MAX_SCALE:
        raise ParameterError("scale", f"scale must be a number above 0 and at most {MAX_SCALE:g}, got {scale:g}")


def peak(seed: int = 0, scale: float = 1.0) -> Workload:
    """The migration table: 50, then 80 clients in a closed loop on 32 slots. The same seed gives the same lengths.

    Raises ParameterError for a scale that is not above 0 and at most 64.
    """
    check_scale(scale)
    rng = random.Random(seed)
    prompt, output = PEAK_PROMPT.scaled(scale), PEAK_OUTPUT.scaled(scale)
    phases = []
    for clients in PEAK_CLIENTS:
        requests = tuple(
            WorkRequest(f"{clients}-{i + 1}", prompt.draw(rng), output.draw(rng)) for i in range(PEAK_REQUESTS[clients])
        )
        phases.append(Phase(f"{clients} clients", requests, clients))
    return Workload("peak", tuple(phases), PEAK_SLOTS)
