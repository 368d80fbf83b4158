"""A toy model for the server's tests: bytes for tokens, a fixed script for an answer, and trouble on request.

Run as a program it is an engine process; `serve` runs the whole server over it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from chairlift import engine_main
from chairlift.config import EngineConfig, ServerConfig
from chairlift.core.clock import WallClock
from chairlift.core.engine import Engine
from chairlift.core.plan import BAD_LOGITS, Capacity, StepItem, StepPlan, StepResult, TokenLogprob
from chairlift.errors import ModelError
from chairlift.server import main as server_main

EOS = 256
VOCAB = 258
SCRIPT = "Ünï 🚠 lift, never stops; 山 up. ".encode()

CRASH, RAISE, WEDGE = 1, 2, 3  # prompt tokens: the process dies, the step raises, the step never ends

STEP_SECONDS = {"toy": 0.002, "toy-slow": 0.05, "toy-slowest": 0.5}


class ToyExecutor:
    """Greedy: the script, by position. Sampled: a hash of (seed, index, position). ``logit_bias`` steers: a bias of 100
    on EOS ends the text after 3 tokens; one of -100 on token 255 makes the logits bad."""

    def __init__(self, config: EngineConfig, step_seconds: float) -> None:
        self.config = config
        self.step_seconds = step_seconds

    def start(self) -> Capacity:
        return Capacity(
            num_blocks=int(self.config.kv_cache_memory or 64),
            block_size=self.config.block_size,
            max_model_len=self.config.max_model_len or 256,
            device="cpu (toy, 1 threads)",
            details=(("weights", 3 * 2**20), ("kv_cache", 2**20), ("workspace", 1000), ("free_at_start", 2**30)),
        )

    def submit(self, plan: StepPlan) -> StepResult:
        time.sleep(self.step_seconds)
        tokens = tuple(tuple(self._token(item, k) for k in range(item.num_samples)) for item in plan.items)
        logprobs = tuple(
            tuple(self._logprob(item, token) for token in drawn) if item.num_logprobs is not None else ()
            for item, drawn in zip(plan.items, tokens, strict=True)
        )
        return StepResult(plan.step_id, tokens, logprobs, seconds=self.step_seconds)

    def result(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        pass

    def _token(self, item: StepItem, k: int) -> int:
        if CRASH in item.token_ids:
            os.abort()
        if RAISE in item.token_ids:
            raise RuntimeError("the toy was told to fail")
        if WEDGE in item.token_ids:
            time.sleep(1000)
        position = item.start + len(item.token_ids)
        bias = item.params.logit_bias
        if bias.get(255) == -100:
            return BAD_LOGITS
        if bias.get(EOS) == 100 and position - item.num_prompt >= 3:
            return EOS
        if item.params.temperature == 0:
            return SCRIPT[(position - item.num_prompt) % len(SCRIPT)]
        noise = hashlib.sha256(f"{item.seed} {item.index + k} {position}".encode()).digest()
        return ord("a") + noise[0] % 26

    def _logprob(self, item: StepItem, token: int) -> TokenLogprob:
        """Greedy: -0.5 for each token. Sampled: whatever the token makes of it."""
        value = -0.5 if item.params.temperature == 0 else -0.5 - (token * 7 % 26) / 10
        best = ((token, value), *((EOS - i, float("-inf")) for i in range(20)))
        return TokenLogprob(token, value, 1, best[: item.num_logprobs])


def build(config: EngineConfig, source: Any, sink: Any, *, report: Any) -> Engine:
    """Takes the place of `engine_main.build_engine`. The model's name is one of `STEP_SECONDS`, or toy-broken."""
    report("toy weights", None)
    if config.model == "toy-broken":
        raise ModelError("the toy is broken; take another one")
    if sink._epoch:
        time.sleep(float(sys.argv[2]))
    report("toy weights", 0.01)
    executor = ToyExecutor(config, STEP_SECONDS[config.model])
    config = replace(config, max_num_batched_tokens=config.max_num_batched_tokens or 64, debug=True)
    scheduler = engine_main.make_scheduler(config, executor.start())
    return Engine(scheduler, executor, source, sink, WallClock())


class ToyStream:
    def __init__(self, skip: bool) -> None:
        self._bytes, self._skip = b"", skip

    def push(self, ids: Sequence[int]) -> str:
        for token in ids:
            self._bytes += bytes([token]) if token < 256 else b"" if self._skip else b"<end>"
        for cut in range(min(3, len(self._bytes)) + 1):
            head, tail = self._bytes[: len(self._bytes) - cut], self._bytes[len(self._bytes) - cut :]
            try:
                text = head.decode()
            except UnicodeDecodeError:
                continue
            self._bytes = tail
            return text
        text, self._bytes = self._bytes.decode(errors="replace"), b""
        return text

    def flush(self) -> str:
        text, self._bytes = self._bytes.decode(errors="replace"), b""
        return text


class ToyTokenizer:
    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB
    has_chat_template = True
    longest_token = 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))

    def stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> ToyStream:
        return ToyStream(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<end>"

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


def serve(**settings: Any) -> None:
    """The whole server on a free port, with the toy for a model, whose tokenizer takes ``tokenizer_seconds``, and each
    engine but the first ``restart_seconds`` to start."""
    seconds = settings.pop("tokenizer_seconds", 0)
    restart_seconds = settings.pop("restart_seconds", 0)

    def tokenizer() -> ToyTokenizer:
        time.sleep(seconds)
        return ToyTokenizer()

    names = {field.name for field in fields(ServerConfig)}
    server = {name: settings.pop(name) for name in list(settings) if name in names}
    config = EngineConfig(**{"model": "toy"} | settings)
    command = [sys.executable, __file__, "engine", str(restart_seconds)]
    server_main.run(config, ServerConfig(port=0, **server), tokenizer, command=command)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        sys.exit(engine_main.main(build))
    import json

    try:
        serve(**json.loads(sys.argv[2]))
    except Exception as error:
        sys.exit(f"error: {error}")
