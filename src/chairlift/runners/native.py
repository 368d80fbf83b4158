"""`NativeRunner`: the executor on the CPU. It turns a `StepPlan` into flat arrays for one call of the C++ core."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift import _native, log
from chairlift.config import EngineConfig
from chairlift.core.plan import Capacity, StepItem, StepPlan, StepResult, TokenLogprob
from chairlift.errors import ConfigError, ModelError
from chairlift.models.spec import Checkpoint
from chairlift.runners.memory import MemoryPlan, available_cpus, available_memory, check_weights, plan_memory

_SMALLEST = 1.2e-38  # a divisor below it would be 0 in the core's f32


class NativeRunner:
    """Runs plans on this machine's processors. Nothing is kept per request.

    Args:
        checkpoint: the model; its tensors are needed only until `start` returns.
        config: sizes, threads, instruction set, formats.
        report: told of the phases of `start`.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, *, report: log.Report | None = None) -> None:
        self._checkpoint: Checkpoint | None = checkpoint
        self._config = config
        self._report: log.Report = report or (lambda name, seconds: None)
        self._vocab_size = checkpoint.spec.vocab_size
        self._model: _native.Model | None = None
        self.memory: MemoryPlan | None = None
        self.threads = config.threads or available_cpus()
        self.isa = _choose_isa(config.isa)

    def start(self) -> Capacity:
        """Packs the weights and reserves the KV cache and the workspace.

        Raises ConfigError when settings and memory do not go together, ModelError when the weights are not as they
        should be.
        """
        checkpoint, config = self._checkpoint, self._config
        if checkpoint is None:
            raise RuntimeError("NativeRunner.start() is called once")
        spec = checkpoint.spec
        kv_dtype = "f16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        free = available_memory()
        check_weights(config, free, _packed_bytes(checkpoint, config.weights))

        with log.phase("weights", self._report):
            model = _load(checkpoint, self.threads, self.isa, config.weights)
        self._checkpoint = None
        with log.phase("kv cache", self._report):
            plan = plan_memory(
                config,
                max_positions=spec.max_positions,
                free=free,
                weights=model.weight_bytes,
                block_bytes=model.kv_block_bytes(config.block_size, kv_dtype),
                workspace=lambda rows: model.workspace_bytes(rows, _max_samples(rows, config)),
            )
            try:
                model.reserve(
                    plan.num_blocks, config.block_size, kv_dtype, plan.max_rows, _max_samples(plan.max_rows, config)
                )
            except MemoryError:
                raise ConfigError(
                    f"the system gave no {plan.kv_cache + plan.workspace} bytes for KV cache and workspace; "
                    "lower --kv-cache-memory or --max-num-batched-tokens"
                ) from None
        self._model, self.memory = model, plan
        return Capacity(
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            max_model_len=plan.max_model_len,
            device=f"cpu ({self.isa}, {self.threads} threads)",
            details=(
                ("weights", plan.weights),
                ("kv_cache", plan.kv_cache),
                ("workspace", plan.workspace),
                ("free_at_start", plan.free),
                ("budget", plan.budget),
            ),
        )

    def submit(self, plan: StepPlan) -> StepResult:
        """Computes the step at once; the handle is the result itself."""
        if self._model is None:
            raise RuntimeError("NativeRunner.submit() before start() or after close()")
        begin = time.perf_counter()
        arrays, draws = _pack(plan, self._vocab_size)
        out = self._model.step(**arrays, sampling=draws.arrays())
        return _unpack(plan, draws, out, begin)

    def result(self, handle: StepResult) -> StepResult:
        return handle

    def profile(self, reset: bool = False) -> dict[str, float]:
        """Seconds by part of the steps since the last reset."""
        if self._model is None:
            raise RuntimeError("NativeRunner.profile() before start() or after close()")
        return self._model.profile(reset)

    def close(self) -> None:
        self._model = None


def _choose_isa(wanted: str) -> str:
    isas = _native.available_isas()
    if wanted == "auto":
        return isas[0]
    if wanted not in isas:
        raise ConfigError(f"--isa {wanted} cannot run on this processor; give --isa auto or one of {', '.join(isas)}")
    return wanted


def _packed_bytes(checkpoint: Checkpoint, weights: str) -> int:
    """About what the weights will take, known before they are read."""
    if weights == "f32":
        return sum(4 * int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
    return sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())


def _load(checkpoint: Checkpoint, threads: int, isa: str, weights: str) -> _native.Model:
    try:
        model = _native.Model(dataclasses.asdict(checkpoint.spec), threads, isa, weights)
        for name, tensor in checkpoint.tensors.items():
            model.set_tensor(name, tensor.type, tensor.shape, tensor.data)
        model.finalize()
    except ValueError as error:
        raise ModelError(f"{checkpoint.name}: {error}") from error
    except RuntimeError as error:  # threads that the system does not give
        raise ConfigError(str(error)) from error
    return model


def _max_samples(rows: int, config: EngineConfig) -> int:
    """Most draws of a step: each row may be scored for prompt_logprobs, and each sequence draws one token. (A prompt
    that will fork n ways counts as n sequences from the start.)"""
    return rows + config.max_num_seqs


class _Draws:
    """The draws of a step, column by column; what is rare (history, bias, bans) is kept ragged."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.ints: list[tuple[int, int, int, int, int, int, int]] = []
        self.floats: list[tuple[float, float, float, float, float, float]] = []
        self.seeds: list[int] = []
        self.history = _Ragged()
        self.bias_ids = _Ragged()
        self.bias_values: list[float] = []
        self.banned = _Ragged()

    def score(self, row: int, token: int, num_logprobs: int) -> None:
        """Asks for the log-probability of ``token`` under the logits of ``row``."""
        self.ints.append((row, token, 0, 0, 0, num_logprobs, 0))
        self.floats.append((0.0, 1.0, 0.0, 1.0, 0.0, 0.0))
        self.seeds.append(0)
        self._end()

    def sample(self, row: int, item: StepItem, end: int) -> None:
        """Draws ``item.num_samples`` tokens for position ``end`` from the logits of ``row``."""
        params = item.params
        top_k = max(params.top_k, 0)
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        floats = (
            params.temperature,
            params.top_p,
            params.min_p,
            max(params.repetition_penalty, _SMALLEST),
            params.presence_penalty,
            params.frequency_penalty,
        )
        # Ids past the vocabulary are never drawn, so there is nothing to ban or favour.
        bans: list[int] = []
        if item.stop_ids and end - item.num_prompt < params.min_tokens:
            bans = sorted(token for token in item.stop_ids if token < self._vocab_size)
        bias = [(token, value) for token, value in params.logit_bias.items() if token < self._vocab_size]
        history_prompt = min(item.num_prompt, len(item.history))
        for index in range(item.index, item.index + item.num_samples):
            self.ints.append((row, -1, index, end, top_k, num_logprobs, history_prompt))
            self.floats.append(floats)
            self.seeds.append(item.seed)
            self.history.values.extend(item.history)
            for token, value in bias:
                self.bias_ids.values.append(token)
                self.bias_values.append(value)
            self.banned.values.extend(bans)
            self._end()

    def _end(self) -> None:
        self.history.end()
        self.bias_ids.end()
        self.banned.end()

    def arrays(self) -> dict[str, NDArray[Any]]:
        count = len(self.seeds)
        ints = np.array(self.ints, np.int32).reshape(count, 7).T.copy()
        floats = np.array(self.floats, np.float32).reshape(count, 6).T.copy()
        return {
            "row": ints[0],
            "forced": ints[1],
            "index": ints[2],
            "position": ints[3],
            "top_k": ints[4],
            "num_logprobs": ints[5],
            "history_prompt": ints[6],
            "temperature": floats[0],
            "top_p": floats[1],
            "min_p": floats[2],
            "repetition": floats[3],
            "presence": floats[4],
            "frequency": floats[5],
            "seed": np.array(self.seeds, np.uint64),
            "history": _int32(self.history.values),
            "history_offsets": _int32(self.history.offsets),
            "bias_ids": _int32(self.bias_ids.values),
            "bias_values": np.array(self.bias_values, np.float32),
            "bias_offsets": _int32(self.bias_ids.offsets),
            "banned": _int32(self.banned.values),
            "banned_offsets": _int32(self.banned.offsets),
        }


class _Ragged:
    """Lists of different lengths, end to end."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.offsets = [0]

    def end(self) -> None:
        self.offsets.append(len(self.values))


def _int32(values: Sequence[Any]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _pack(plan: StepPlan, vocab_size: int) -> tuple[dict[str, Any], _Draws]:
    """The arrays of `Model.step` but ``sampling``, and the draws: of each item first its scores, then its samples."""
    tokens: list[int] = []
    positions: list[int] = []
    item_rows = [0]
    tables = _Ragged()
    draws = _Draws(vocab_size)
    for item in plan.items:
        first, count = len(tokens), len(item.token_ids)
        end = item.start + count
        tokens.extend(item.token_ids)
        positions.extend(range(item.start, end))
        item_rows.append(first + count)
        tables.values.extend(item.block_table)
        tables.end()
        if item.prompt_targets:
            for row, target in enumerate(item.prompt_targets, first):
                draws.score(row, target, item.params.prompt_logprobs or 0)
        if item.num_samples:
            draws.sample(first + count - 1, item, end)
    ops = [(int(op.kind), op.src, op.dst) for op in plan.block_ops]
    arrays = {
        "tokens": _int32(tokens),
        "positions": _int32(positions),
        "item_rows": _int32(item_rows),
        "block_tables": _int32(tables.values),
        "table_offsets": _int32(tables.offsets),
        "block_ops": _int32(ops).reshape(len(ops), 3),
    }
    return arrays, draws


def _unpack(plan: StepPlan, draws: _Draws, out: dict[str, NDArray[Any]], begin: float) -> StepResult:
    drawn = out["token"].tolist()
    scored = _logprobs(out, drawn) if any(ints[5] >= 0 for ints in draws.ints) else []
    tokens: list[tuple[int, ...]] = []
    logprobs: list[tuple[TokenLogprob, ...]] = []
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = []
    at = 0
    for item in plan.items:
        first = at + len(item.prompt_targets)
        last = first + item.num_samples
        tokens.append(tuple(drawn[first:last]))
        logprobs.append(tuple(scored[first:last]) if item.params.logprobs is not None else ())
        prompt_logprobs.append(tuple(scored[at:first]))
        at = last
    return StepResult(
        step_id=plan.step_id,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompt_logprobs) if any(prompt_logprobs) else (),
        seconds=time.perf_counter() - begin,
    )


def _logprobs(out: dict[str, NDArray[Any]], tokens: list[int]) -> list[TokenLogprob]:
    """One `TokenLogprob` a draw (of those not asked for, without meaning)."""
    values, ranks = out["logprob"].tolist(), out["rank"].tolist()
    ids, tops = out["top_ids"].tolist(), out["top_logprobs"].tolist()
    return [
        TokenLogprob(token, value, rank, tuple(pair for pair in zip(best, top, strict=True) if pair[0] >= 0))
        for token, value, rank, best, top in zip(tokens, values, ranks, ids, tops, strict=True)
    ]
