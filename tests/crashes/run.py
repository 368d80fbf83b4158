"""The engine of a real server is ended again and again under load, and every answer is compared.

    python tests/crashes/run.py [--how kill] [--ends 100] [--streams 32]

Starts `chairlift serve` on SmolLM2, asks each request once without any trouble, and then all of them over and over,
while the engine is ended every few seconds: by SIGKILL (kill), by SIGABRT as a failed check in C++ does (abort),
or held by SIGSTOP until the watchdog ends it (stop). Each answer must be what it is without; no stream may pause for
longer than the engine's start and five seconds; nothing may be left behind. Prints counts, and exits with 1 if anything
was otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

HOW = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}
MOST_PAUSE = 5.0  # seconds, beyond the engine's start
TEXTS = (
    "The chairlift never stops, and",
    "Once upon a time in the mountains",
    "def fibonacci(n):",
    "The three most important things about snow are",
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 11},
    {"temperature": 0.8, "seed": 12, "n": 3},
    {"temperature": 1, "seed": 13, "top_p": 0.9, "presence_penalty": 1.0, "logprobs": 1},
)


def requests(count: int) -> list[dict[str, Any]]:
    """Each is another one."""
    return [
        {"prompt": f"{i}. {TEXTS[i % len(TEXTS)]}", "max_tokens": 96 + 8 * (i % 9), "stream": True}
        | PARAMS[(i // len(TEXTS)) % len(PARAMS)]
        for i in range(count)
    ]


@dataclass
class Answer:
    """What a stream gave: texts and ends by choice. ``pause``: the longest time between two events, in seconds."""

    choices: dict[int, list[str]] = field(default_factory=dict)
    error: str = ""
    pause: float = 0.0
    done: bool = False


def ask(url: str, body: dict[str, Any]) -> Answer:
    answer, last = Answer(), time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if not line:
                continue
            now = time.monotonic()
            answer.pause, last = max(answer.pause, now - last), now
            if line == "data: [DONE]":
                answer.done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.error = str(event["error"])
            for choice in event.get("choices", ()):
                parts = answer.choices.setdefault(choice["index"], ["", ""])
                parts[0] += choice["text"]
                parts[1] = choice["finish_reason"] or parts[1]
    return answer


class Server:
    """`chairlift serve`, with a folder of its own for temporary files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.log: list[str] = []
        self.url = ""
        listening = threading.Event()
        command = [sys.executable, "-m", "chairlift.cli", "serve", "--port", "0", *arguments]
        environment = {**os.environ, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.log.append(line.rstrip())
                if "Listening on " in line:
                    self.url = line.split("Listening on ")[1].strip()
                    listening.set()
            listening.set()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        if not listening.wait(300) or not self.url:
            sys.exit("\n".join(["the server does not start:", *self.log]))

    @property
    def engine(self) -> psutil.Process:
        (engine,) = psutil.Process(self.process.pid).children()
        return engine

    def metric(self, name: str) -> float:
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith(f"chairlift_{name} "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(60)
        return code


@dataclass
class Tally:
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=HOW, default="kill")
    parser.add_argument("--ends", type=int, default=100, help="of the engine")
    parser.add_argument("--streams", type=int, default=32, help="at once")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seed", type=int, default=0, help="of the times between two ends")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return campaign(args, Path(folder))


def campaign(args: argparse.Namespace, folder: Path) -> int:
    server = Server(folder, args.model)
    bodies, tally, over = requests(args.streams), Tally(), threading.Event()
    try:
        expected = [ask(server.url, body).choices for body in bodies]
        blocks = server.metric("kv_blocks_free")

        def client(i: int) -> None:
            while not over.is_set():
                answer = ask(server.url, bodies[i])
                tally.answers += 1
                tally.pauses.append(answer.pause)
                if answer.choices != expected[i] or answer.error or not answer.done:
                    tally.wrong.append(f"{bodies[i]}: {answer.error or answer.choices} instead of {expected[i]}")

        clients = [threading.Thread(target=client, args=(i,)) for i in range(args.streams)]
        for thread in clients:
            thread.start()
        rng = random.Random(args.seed)
        for end in range(args.ends):
            time.sleep(rng.uniform(0.0, 4.0))
            tally.starts.append(end_engine(server, HOW[args.how]))
            print(
                f"\r{end + 1} of {args.ends} ends, {tally.answers} answers, {len(tally.wrong)} wrong",
                end="",
                flush=True,
            )
        over.set()
        for thread in clients:
            thread.join()
        print()
        return judge(server, tally, blocks, folder)
    finally:
        over.set()
        if server.process.poll() is None:
            server.end()


def end_engine(server: Server, number: signal.Signals) -> float:
    """Returns the seconds from the end of the engine to the next one's readiness."""
    engine, before = server.engine, server.metric("engine_restarts_total")
    engine.send_signal(number)
    while server.metric("engine_restarts_total") == before:
        time.sleep(0.02)
    begin = time.monotonic()
    while not server.metric("engine_up"):
        time.sleep(0.02)
    return time.monotonic() - begin


def judge(server: Server, tally: Tally, blocks: float, folder: Path) -> int:
    free, code = server.metric("kv_blocks_free"), server.end()
    left = [*map(str, folder.rglob("*"))]
    longest = max(tally.pauses)
    bound = max(tally.starts) + MOST_PAUSE
    ordered = sorted(tally.starts)
    middle = ordered[len(ordered) // 2]
    print(f"ends of the engine {len(tally.starts)}, its starts {middle:.2f} s, at most {ordered[-1]:.2f} s")
    print(f"answers {tally.answers}, wrong {len(tally.wrong)}")
    print(f"longest pause of a stream {longest:.2f} s, allowed {bound:.2f} s")
    print(f"KV blocks free {free:.0f}, before {blocks:.0f}; exit code {code}; left behind: {left or 'nothing'}")
    for line in tally.wrong[:3]:
        print(line[:2000])
    return int(bool(tally.wrong or longest > bound or free != blocks or code or left))


if __name__ == "__main__":
    sys.exit(main())
