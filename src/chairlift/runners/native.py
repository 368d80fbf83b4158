"""`NativeRunner`: the executor on the CPU. It runs a `StepPlan` as block copies and one call of the C++ core."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from chairlift import _native, log
from chairlift.config import EngineConfig, parse_disk_swap
from chairlift.core.plan import BlockOpKind, Capacity, StepPlan, StepResult, TokenLogprob
from chairlift.errors import ConfigError, ModelError, StepFailed
from chairlift.models.spec import Checkpoint, TensorType
from chairlift.runners.disk import DiskFile
from chairlift.runners.groups import KVGroups
from chairlift.runners.memory import MemoryPlan, available_cpus, available_memory, check_weights, plan_memory
from chairlift.runners.tiers import BlockStore
from chairlift.runners.weight_cache import WeightCache, content_digest
from chairlift.runners.weights import packed_bytes, packed_types

Tokens = tuple[tuple[int, ...], ...]  # those drawn in a step, by item


class NativeRunner:
    """Runs plans on this machine's processors, with ``async_scheduling`` in a thread of its own. From one plan to the
    next only the tokens drawn are kept, which the next may refer to, and what its sequences draw by.

    Args:
        checkpoint: the model; its tensors are needed only until `start` returns.
        config: sizes, threads, instruction set, formats.
        report: told of the phases of `start`.

    Attributes:
        disk: the file of ``disk_swap`` once started, if there is one.
        weight_cache: the file that keeps the packed weights, once started, if there is to be one.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, *, report: log.Report | None = None) -> None:
        self._checkpoint: Checkpoint | None = checkpoint
        self._config = config
        self._report: log.Report = report or (lambda name, seconds: None)
        self._model: _native.Model | None = None
        self._store: BlockStore | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._previous: Tokens | None = ()  # drawn in the step before; None if it failed
        self.disk: DiskFile | None = None
        self.weight_cache: WeightCache | None = None
        self.memory: MemoryPlan | None = None
        self.threads = config.threads or available_cpus()
        self.isa = _choose_isa(config.isa)

    def start(self) -> Capacity:
        """Packs the weights, or reads them packed, and reserves the KV cache and the workspace.

        Raises ConfigError when settings and memory do not go together, ModelError when the weights are not as they
        should be.
        """
        checkpoint, config = self._checkpoint, self._config
        if checkpoint is None:
            raise RuntimeError("NativeRunner.start() is called once")
        kv_dtype = _kv_dtype(config, self.isa)
        groups = KVGroups.of(checkpoint.spec)
        free = available_memory()
        types = packed_types(checkpoint, config)
        check_weights(config, free, packed_bytes(checkpoint, types))

        with log.phase("weights", self._report):
            self.weight_cache = WeightCache.of(checkpoint, types, config)
            model = _load(checkpoint, types, self.threads, self.isa, self.weight_cache)
        with log.phase("kv cache", self._report):
            block_bytes = model.kv_block_bytes(config.block_size, kv_dtype, groups.layers)
            plan = plan_memory(
                config,
                max_positions=checkpoint.spec.max_positions,
                free=free,
                weights=model.weight_bytes,
                groups=groups,
                block_bytes=block_bytes,
                workspace=lambda rows: model.workspace_bytes(rows, _max_samples(rows, config), kv_dtype),
            )
            _reserve(model, plan, config, kv_dtype, groups)
            if config.disk_swap is not None:
                path, size = parse_disk_swap(config.disk_swap)
                fingerprint = _fingerprint(checkpoint, types, config, kv_dtype, self.isa)
                self.disk = DiskFile.open(path, size, block_bytes, fingerprint)
            try:
                self._store = BlockStore(model.cache(), plan.num_host_blocks, self.disk)
            except BaseException:
                if self.disk is not None:
                    self.disk.close()
                raise
        if self.weight_cache is not None and not self.weight_cache.hit:
            self.weight_cache.write(model)
        self._checkpoint = None
        self._model, self.memory = model, plan
        if config.async_scheduling:
            self._worker = ThreadPoolExecutor(1, "chairlift-step")
        return Capacity(
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            max_model_len=plan.max_model_len,
            num_host_blocks=plan.num_host_blocks,
            num_disk_blocks=self.disk.num_blocks if self.disk else 0,
            windows=groups.windows,
            device=f"cpu ({self.isa}, {self.threads} threads, KV {kv_dtype})",
            details=(
                ("weights", plan.weights),
                ("kv_cache", plan.kv_cache),
                ("workspace", plan.workspace),
                *([("swap_space", plan.swap_space)] if plan.swap_space else []),
                ("free_at_start", plan.free),
                ("budget", plan.budget),
            ),
        )

    def submit(self, plan: StepPlan) -> Future[StepResult] | StepResult:
        """Computes the step at once, or with ``async_scheduling`` behind those submitted before.

        Raises StepFailed, here or in `result`, when the system has no memory for it or the swap file fails.
        """
        if self._model is None:
            raise RuntimeError("NativeRunner.submit() before start() or after close()")
        return self._worker.submit(self._run, plan) if self._worker else self._run(plan)

    def result(self, handle: Future[StepResult] | StepResult) -> StepResult:
        return handle.result() if isinstance(handle, Future) else handle

    def _run(self, plan: StepPlan) -> StepResult:
        previous, self._previous = self._previous, None
        try:
            result = self._compute(plan, previous)
        except (MemoryError, OSError) as error:
            raise StepFailed(f"step {plan.step_id} could not be computed: {str(error) or 'out of memory'}") from error
        self._previous = result.tokens
        return result

    def _compute(self, plan: StepPlan, previous: Tokens | None) -> StepResult:
        assert self._model is not None and self._store is not None
        begin = time.perf_counter()
        damaged = self._store.apply(plan.block_ops) if plan.block_ops else ()
        swaps = any(op.kind is not BlockOpKind.COPY for op in plan.block_ops)
        swap_seconds = time.perf_counter() - begin if swaps else 0.0
        if previous is None:  # the step before failed
            if any(min(item.token_ids, default=0) < 0 for item in plan.items):
                raise StepFailed("the step before failed, whose tokens this one was to continue")
            previous = ()
        tokens, logprobs, prompt_logprobs = self._model.run(plan.items, previous, TokenLogprob)
        return StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            seconds=time.perf_counter() - begin,
            swap_seconds=swap_seconds,
            damaged=damaged,
        )

    def profile(self, reset: bool = False) -> dict[str, float]:
        """Seconds by part of the steps since the last reset."""
        if self._model is None:
            raise RuntimeError("NativeRunner.profile() before start() or after close()")
        return self._model.profile(reset)

    def close(self) -> None:
        """Waits for the step that runs, drops those behind it, and gives everything back."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()
        if self.weight_cache is not None:
            self.weight_cache.close()
        self._worker = self._store = self._model = self.disk = None


def _choose_isa(wanted: str) -> str:
    isas = _native.available_isas()
    if wanted == "auto":
        return isas[0]
    if wanted not in isas:
        raise ConfigError(f"--isa {wanted} cannot run on this processor; give --isa auto or one of {', '.join(isas)}")
    return wanted


def _load(
    checkpoint: Checkpoint, types: Mapping[str, TensorType], threads: int, isa: str, cache: WeightCache | None
) -> _native.Model:
    try:
        model = _native.Model(dataclasses.asdict(checkpoint.spec), threads, isa)
        model.lay_out([(name, types[name]) for name in checkpoint.tensors])
        cached = cache is not None and cache.read(model)
        for name, tensor in checkpoint.tensors.items():
            if not cached or len(tensor.shape) == 1:
                model.set_tensor(name, tensor.type, tensor.shape, tensor.data, types[name])
        model.finalize()
    except ValueError as error:
        raise ModelError(f"{checkpoint.name}: {error}") from error
    except MemoryError:
        raise ConfigError(
            f"the system gave no memory for the weights of {checkpoint.name}; free some, or give --quantization"
        ) from None
    except RuntimeError as error:  # threads that the system does not give
        raise ConfigError(str(error)) from error
    return model


def _kv_dtype(config: EngineConfig, isa: str) -> str:
    """Tiles multiply bf16 many times faster than vectors multiply what f16 has been converted to."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "bf16" if isa == "amx" else "f16"


def _reserve(model: _native.Model, plan: MemoryPlan, config: EngineConfig, kv_dtype: str, groups: KVGroups) -> None:
    try:
        model.reserve(
            plan.num_blocks,
            config.block_size,
            kv_dtype,
            groups.layers,
            plan.max_rows,
            _max_samples(plan.max_rows, config),
        )
    except MemoryError:
        raise ConfigError(
            f"the system gave no {plan.kv_cache + plan.workspace} bytes for KV cache and workspace; "
            "lower --kv-cache-memory or --max-num-batched-tokens"
        ) from None


def _fingerprint(
    checkpoint: Checkpoint, types: Mapping[str, TensorType], config: EngineConfig, kv_dtype: str, isa: str
) -> bytes:
    """Stands for everything that the contents of a KV block depend on, the kernels' code included."""
    digest = content_digest(checkpoint, types)
    digest.update(repr((kv_dtype, config.block_size, KVGroups.of(checkpoint.spec), isa)).encode())
    return digest.digest()


def _max_samples(rows: int, config: EngineConfig) -> int:
    """Most draws of a step: each row may be scored for prompt_logprobs, and each sequence draws one token. (A prompt
    that will fork n ways counts as n sequences from the start.)"""
    return rows + config.max_num_seqs
