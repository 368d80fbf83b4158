"""What a model step costs, and how much of it is matrix products.

    python benchmarks/step.py [MODEL]

For several batches it runs requests that all decode together, and prints per step: the time in matrix products, in
attention, in sampling and in all the rest, as the first thread sees it, the whole step over its products, the time
that Python adds, and tokens per second. The limit: every step reads all weights once, and every row costs one
multiply-add a weight.
"""

from __future__ import annotations

import argparse
import gc
import time

from chairlift import LLM, SamplingParams
from chairlift.config import DEFAULT_MODEL
from chairlift.core.ports import Abort, Add
from chairlift.runners.native import NativeRunner

BATCHES = ((1, 32), (1, 1000), (4, 32), (8, 32), (12, 32), (32, 32), (32, 400))  # sequences, prompt tokens
STEPS = 48


def main(model: str) -> None:
    llm = LLM(model, kv_cache_memory="1GiB", enable_prefix_caching=False)
    runner = llm.engine.executor
    assert isinstance(runner, NativeRunner)
    print(f"{llm.config.model}, {llm.engine.scheduler.capacity.device}; milliseconds a step, prompts not counted")
    gc.freeze()  # as the engine's process does
    names = ("matmul", "attention", "sampling", "other")
    print("seqs  context  " + "".join(f"{name:>10}" for name in names) + "     step  /matmul   python    token/s")
    for sequences, context in BATCHES:
        prompts = [[100 + i] * context for i in range(sequences)]
        profile, seconds = _decode(llm, runner, prompts)
        steps = profile["steps"]
        part = {name: 1000 * profile[name] / steps for name in (*names, "total")}
        step, python = part["total"], 1000 * seconds / steps - part["total"]
        parts = "".join(f"{part[name]:10.2f}" for name in names)
        rate = sequences * steps / seconds
        print(f"{sequences:4} {context:8}  {parts}{step:9.2f} {step / part['matmul']:8.2f} {python:8.2f} {rate:10.0f}")


def _decode(llm: LLM, runner: NativeRunner, prompts: list[list[int]]) -> tuple[dict[str, float], float]:
    """Profile and wall time of the steps in which all decode."""
    steps_of_prompts = sum(map(len, prompts)) // 64 + 1  # more than they will be
    params = SamplingParams(max_tokens=STEPS + steps_of_prompts, temperature=0, ignore_eos=True)
    requests = [llm._request(prompt, params) for prompt in prompts]
    llm._mailbox.messages += [Add(request) for request in requests]
    scheduler = llm.engine.scheduler
    while True:
        llm.engine.step()
        if all(r.num_remaining == 1 for r in scheduler.running.values()) and not scheduler.waiting:
            break
    runner.profile(reset=True)
    begin = time.perf_counter()
    for _ in range(STEPS):
        llm.engine.step()
    seconds = time.perf_counter() - begin
    profile = runner.profile()
    llm._mailbox.messages += [Abort(request.id) for request in requests]
    llm.engine.step()
    return profile, seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    main(parser.parse_args().model)
