"""What drafts by prompt lookup give, and what they cost where they are wrong.

    python benchmarks/speculation.py [--batches 1,4,16] [--rounds 3] [--num-speculative-tokens 8]

Three loads, each with and without ``--num-speculative-tokens``, in turn: an edit (a passage with a word to be replaced
by another: the answer repeats most of the prompt), a chat (a question, answered greedily), and noise (random tokens
continued at a high temperature, where next to no draft is right). Printed are medians of tokens a second, their ratio,
and of the drafts how many were right. The answers must be the same to the token.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from importlib import resources
from statistics import median

from chairlift import LLM, SamplingParams

WORDS = 110  # of a passage
TOKENS = 160  # of each answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", default="1,4,16", help="requests at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    options = parser.parse_args()
    settings = {"model": options.model, "enable_prefix_caching": False, "kv_cache_memory": "512MiB", "max_num_seqs": 64}
    off = LLM(**settings)
    on = LLM(**settings, num_speculative_tokens=options.num_speculative_tokens, tokenizer=off.get_tokenizer())
    print("load      at once   off, token/s   on, token/s   ratio   drafts right")
    for name, make in {"edit": edits, "chat": chats, "noise": noise}.items():
        for batch in map(int, options.batches.split(",")):
            prompts = make(batch)
            params = sampling(name, batch)
            rates: dict[str, list[float]] = {"off": [], "on": []}
            tried, right = counts(on)
            for _ in range(options.rounds):
                answers = {which: run(llm, prompts, params, rates[which]) for which, llm in (("off", off), ("on", on))}
                if answers["on"] != answers["off"]:
                    raise SystemExit(f"{name}, {batch} at once: drafts have changed an answer")
            before, after = median(rates["off"]), median(rates["on"])
            more_tried, more_right = counts(on)
            share = f"{(more_right - right) / (more_tried - tried):.0%}" if more_tried > tried else "none tried"
            print(
                f"{name:9} {batch:7}   {before:12.1f}   {after:11.1f}   {after / before:5.2f}   {share:>12}", flush=True
            )


Prompt = list[int] | str
"""Tokens to continue, or what a user says to the model."""


def run(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], rates: list[float]) -> list[list[int]]:
    begin = time.perf_counter()
    if isinstance(prompts[0], str):
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompts], list(params), use_tqdm=False)
    else:
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    answers = [output.outputs[0].token_ids for output in outputs]
    rates.append(sum(map(len, answers)) / (time.perf_counter() - begin))
    return answers


def counts(llm: LLM) -> tuple[int, int]:
    stats = llm.engine.scheduler.stats()
    return stats.total_drafts, stats.total_accepted_drafts


def sampling(name: str, batch: int) -> list[SamplingParams]:
    temperature = 1.5 if name == "noise" else 0.0
    return [
        SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=i, ignore_eos=name == "noise")
        for i in range(batch)
    ]


def edits(batch: int) -> list[Prompt]:
    """Each has a passage of its own."""
    words = resources.files("chairlift").joinpath("english.txt").read_text(encoding="utf-8").split()
    passages = [" ".join(words[40 + i * WORDS : 40 + (i + 1) * WORDS]) for i in range(batch)]
    return [f"Repeat this text, with every 'the' replaced by 'a':\n\n{passage}" for passage in passages]


def chats(batch: int) -> list[Prompt]:
    things = ("a kettle", "snow", "a violin", "a harbour", "salt", "a lighthouse", "bread", "a compass")
    return [f"Tell me about {things[i % len(things)]}, in {5 + i} sentences." for i in range(batch)]


def noise(batch: int) -> list[Prompt]:
    rng = random.Random(1)
    return [[rng.randrange(100, 40_000) for _ in range(128)] for _ in range(batch)]


if __name__ == "__main__":
    main()
