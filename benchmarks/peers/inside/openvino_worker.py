"""Runs in the environment `openvino`: OpenVINO GenAI's continuous batching, in process.

    openvino_worker.py IR_FOLDER SLOTS THREADS [NAME=VALUE ...]

Names in lower case are fields of its SchedulerConfig, those in upper case are properties of the CPU plugin. Its
scheduler starts every prompt that it is given, whatever max_num_seqs says, so requests are held back here. A token's
time is the end of the step that gave it. On standard input and output: see worker.py.
"""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker import serve

SCHEDULER = {"cache_size": 2, "max_num_batched_tokens": 256, "enable_prefix_caching": False}


def value(text: str) -> Any:
    return int(text) if text.isdigit() else text


def make_pipeline(folder: str, slots: int, threads: int, settings: list[str]) -> genai.ContinuousBatchingPipeline:
    given = {name: value(text) for name, text in (setting.split("=", 1) for setting in settings)}
    config = genai.SchedulerConfig()
    config.max_num_seqs = slots
    for name, chosen in (SCHEDULER | {name: v for name, v in given.items() if name.islower()}).items():
        setattr(config, name, chosen)
    properties = {name: v for name, v in given.items() if not name.islower()}
    return genai.ContinuousBatchingPipeline(folder, config, "CPU", {"INFERENCE_NUM_THREADS": threads} | properties)


def greedy(tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


class Load:
    """The requests of one run, at most ``slots`` of them in the pipeline at a time."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline, slots: int, requests: list[dict[str, Any]]) -> None:
        self.pipeline, self.slots, self.requests = pipeline, slots, requests
        self.answers: list[dict[str, Any]] = [{"times": [], "tokens": []} for _ in requests]
        self.sent = 0
        self.live: list[tuple[Any, int]] = []

    def run(self) -> list[dict[str, Any]]:
        begin = time.perf_counter()
        while self.live or self.sent < len(self.requests):
            if not self.live:
                time.sleep(max(0.0, begin + self.requests[self.sent]["due"] - time.perf_counter()))
            self.send(time.perf_counter() - begin)
            self.pipeline.step()
            self.collect(time.perf_counter() - begin)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return self.answers

    def send(self, now: float) -> None:
        while len(self.live) < self.slots and self.sent < len(self.requests) and self.requests[self.sent]["due"] <= now:
            request = self.requests[self.sent]
            ids = ov.Tensor(np.array([request["ids"]], dtype=np.int64))
            self.live.append((self.pipeline.add_request(next(IDS), ids, greedy(request["output"])), self.sent))
            self.sent += 1

    def collect(self, now: float) -> None:
        for handle, index in self.live:
            while handle.can_read():
                for output in handle.read().values():
                    if output.generated_ids:
                        self.answers[index]["times"].append(now)
                        self.answers[index]["tokens"] += output.generated_ids
        self.live = [(h, i) for h, i in self.live if len(self.answers[i]["tokens"]) < self.requests[i]["output"]]


IDS = count()

if __name__ == "__main__":
    folder, slots, threads, *settings = sys.argv[1:]
    pipeline = make_pipeline(folder, int(slots), int(threads), settings)
    serve(lambda requests: Load(pipeline, int(slots), requests).run())
