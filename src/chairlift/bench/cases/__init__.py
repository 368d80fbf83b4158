"""The measured cases; each is a command of ``chairlift bench``."""

from chairlift.bench.case import Case
from chairlift.bench.cases.delay import Delay
from chairlift.bench.cases.fairness import Fairness
from chairlift.bench.cases.long_prompt import LongPrompt
from chairlift.bench.cases.prefix import Prefix
from chairlift.bench.cases.slo import Slo
from chairlift.bench.cases.thrash import Thrash
from chairlift.bench.cases.waste import Waste

CASES: tuple[type[Case], ...] = (Waste, Thrash, Prefix, LongPrompt, Slo, Fairness, Delay)
