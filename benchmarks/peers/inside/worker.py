"""What engines in a process of their own and the harness say to each other, in lines of JSON.

The worker says {} when it is ready. Then the harness sends lists of requests, in the order of their arrival, each
{"ids": prompt, "output": number of tokens, "due": seconds after the start}, and the worker answers each list with one
of {"times": seconds after the start at which tokens came, "tokens": all of them}. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(run: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
