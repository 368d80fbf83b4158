"""`NativeRunner`: plans in, results out, on a tiny checkpoint; what it reserves and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from chairlift.config import EngineConfig
from chairlift.core.plan import BAD_LOGITS, BlockOp, BlockOpKind, StepItem, StepPlan, StepResult
from chairlift.core.request import SamplingParams
from chairlift.errors import ConfigError, ModelError
from chairlift.models.spec import Checkpoint
from chairlift.runners.native import NativeRunner

PROMPT = tuple(np.random.default_rng(4).integers(0, 259, 50).tolist())
GREEDY = SamplingParams(temperature=0.0)


def config(**given: Any) -> EngineConfig:
    return EngineConfig(**({"kv_cache_dtype": "f32", "threads": 2, "max_num_seqs": 8} | given))


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> NativeRunner:
    runner = NativeRunner(checkpoint, config())
    runner.start()
    return runner


@pytest.fixture(scope="module")
def item(step_item: Any) -> Any:
    return step_item


def run(runner: NativeRunner, *items: StepItem, ops: tuple[BlockOp, ...] = ()) -> StepResult:
    return runner.result(runner.submit(StepPlan(3, items, ops)))


def test_capacity(checkpoint: Checkpoint, item: Any) -> None:
    """I4, M10: phases are reported with their seconds, and the memory in bytes by purpose."""
    phases: list[tuple[str, float | None]] = []
    runner = NativeRunner(checkpoint, config(block_size=8), report=lambda *phase: phases.append(phase))
    capacity = runner.start()
    details = dict(capacity.details)
    assert capacity.block_size == 8
    assert capacity.max_model_len == 256
    assert capacity.num_blocks == 8 * 256 // 8  # what all sequences at full length can use
    assert details["kv_cache"] == capacity.num_blocks * 8 * 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, bytes
    numbers = sum(int(np.prod(shape)) for shape in checkpoint.spec.tensor_shapes().values())
    assert 4 * numbers <= details["weights"] < 1.3 * 4 * numbers
    used = details["weights"] + details["kv_cache"] + details["workspace"]
    assert used < details["budget"] < details["free_at_start"]
    assert [name for name, _ in phases] == ["weights", "weights", "kv cache", "kv cache"]
    for (_, begun), (_, seconds) in zip(phases[::2], phases[1::2], strict=True):
        assert begun is None and seconds is not None and seconds >= 0
    assert "2 threads" in capacity.device
    runner.close()
    with pytest.raises(RuntimeError):
        run(runner, item((1,)))


def test_greedy_tokens(runner: NativeRunner, checkpoint: Checkpoint, reference: Any, tensors: Any, item: Any) -> None:
    """A prompt in two chunks and a decode; a chunk that does not reach the end draws nothing."""
    first = run(runner, item(PROMPT[:30], num_samples=0))
    assert first.tokens == ((),)
    assert first.logprobs == ((),)
    assert first.prompt_logprobs == ()
    second = run(runner, item(PROMPT[30:], 30))
    assert second.step_id == 3
    assert second.seconds > 0
    logits = reference(checkpoint.spec, tensors(checkpoint.spec), PROMPT)
    assert second.tokens == ((int(logits[-1].argmax()),),)
    third = run(runner, item(second.tokens[0], 50))
    logits = reference(checkpoint.spec, tensors(checkpoint.spec), PROMPT + second.tokens[0])
    assert third.tokens == ((int(logits[-1].argmax()),),)


def test_logprobs(runner: NativeRunner, checkpoint: Checkpoint, reference: Any, tensors: Any, item: Any) -> None:
    params = SamplingParams(temperature=0.0, logprobs=3)
    result = run(runner, item(PROMPT, params=params), item((5,), block_table=(20,)))
    logits = reference(checkpoint.spec, tensors(checkpoint.spec), PROMPT)[-1]
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    (entry,) = result.logprobs[0]
    best = np.argsort(-logits)[:3]
    assert (entry.token_id, entry.rank) == (best[0], 1)
    assert [token for token, _ in entry.top] == best.tolist()
    np.testing.assert_allclose([value for _, value in entry.top], logprobs[best], atol=1e-4)
    assert entry.logprob == entry.top[0][1]
    assert result.logprobs[1] == ()  # the other item did not ask


def test_logprobs_without_alternatives(runner: NativeRunner, item: Any) -> None:
    none, five = (SamplingParams(temperature=0.0, logprobs=count) for count in (0, 5))
    both = run(runner, item(PROMPT, params=none), item(PROMPT[:9], params=five, block_table=(20,)))
    assert both.logprobs[0][0].top == ()
    assert len(both.logprobs[1][0].top) == 5


@pytest.mark.parametrize("chunk", [50, 17, 1])
def test_prompt_logprobs_do_not_depend_on_chunks(
    runner: NativeRunner, checkpoint: Checkpoint, reference: Any, tensors: Any, chunk: int, item: Any
) -> None:
    """C6: one value a prompt token but the first, equal to a plain forward pass."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    entries = []
    for start in range(0, len(PROMPT), chunk):
        tokens = PROMPT[start : start + chunk]
        last = start + len(tokens) == len(PROMPT)
        result = run(
            runner,
            item(
                tokens,
                start,
                params,
                num_samples=int(last),
                prompt_targets=PROMPT[start + 1 : start + 1 + len(tokens)],
            ),
            item((9,), block_table=(20,)),
        )
        if len(tokens) > 1 or not last:
            entries += result.prompt_logprobs[0]
            assert result.prompt_logprobs[1:] == ((),)
        else:
            assert result.prompt_logprobs == ()  # the last token has no successor in the prompt
        assert len(result.tokens[0]) == last
        assert len(result.tokens[1]) == 1
    assert [entry.token_id for entry in entries] == list(PROMPT[1:])
    logits = reference(checkpoint.spec, tensors(checkpoint.spec), PROMPT)[:-1]
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= logits.max(-1, keepdims=True)
    expected = logprobs[np.arange(49), list(PROMPT[1:])]
    np.testing.assert_allclose([entry.logprob for entry in entries], expected, atol=1e-4)
    assert [entry.rank for entry in entries] == (1 + (logprobs > expected[:, None]).sum(1)).tolist()
    assert all(len(entry.top) == 2 for entry in entries)


def test_samples_of_one_prompt_are_those_of_forks(runner: NativeRunner, item: Any) -> None:
    """C2: sample i of a prompt draws what a request with index i draws at that place."""
    params = SamplingParams(temperature=1.5, n=5)
    together = run(runner, item(PROMPT, params=params, num_samples=5)).tokens[0]
    single = [run(runner, item(PROMPT, params=params, index=i)).tokens[0][0] for i in range(5)]
    assert list(together) == single
    assert len(set(together)) > 1
    later = run(runner, item(PROMPT, params=params, index=2, num_samples=2)).tokens[0]
    assert later == together[2:4]


def test_stop_tokens_wait_for_min_tokens(runner: NativeRunner, item: Any) -> None:
    (stop,) = run(runner, item(PROMPT)).tokens[0]
    params = SamplingParams(temperature=0.0, min_tokens=2)
    stops = frozenset({stop, 10**9})  # an id outside the vocabulary is none that could be drawn
    assert run(runner, item(PROMPT, params=params, stop_ids=stops)).tokens[0] != (stop,)
    prompt = len(PROMPT)
    assert run(runner, item(PROMPT, params=params, stop_ids=stops, num_prompt=prompt - 1)).tokens[0] != (stop,)
    assert run(runner, item(PROMPT, params=params, stop_ids=stops, num_prompt=prompt - 2)).tokens[0] == (stop,)


def test_penalties_and_bias(runner: NativeRunner, item: Any) -> None:
    (best,) = run(runner, item(PROMPT)).tokens[0]
    biased = SamplingParams(temperature=0.0, logit_bias={best: -100.0, 2**31 - 1: 100.0})
    (second,) = run(runner, item(PROMPT, params=biased)).tokens[0]
    assert second != best
    wanted = SamplingParams(temperature=0.0, logit_bias={33: 100.0})
    assert run(runner, item(PROMPT, params=wanted)).tokens[0] == (33,)
    repeated = SamplingParams(temperature=0.0, repetition_penalty=100.0)
    assert run(runner, item(PROMPT, params=repeated, history=(*PROMPT, best))).tokens[0][0] not in {*PROMPT, best}
    absurd = SamplingParams(temperature=0.0, repetition_penalty=1e-300)  # 0 as f32
    assert run(runner, item(PROMPT, params=absurd, history=(33,))).tokens[0][0] >= 0
    frequent = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    history = (*PROMPT[:-9], *[best] * 9)
    generated = item(PROMPT, params=frequent, history=history, num_prompt=len(PROMPT) - 9)
    assert run(runner, generated).tokens[0] != (best,)
    assert run(runner, item(PROMPT, params=frequent, history=history)).tokens[0] == (best,)


def test_results_are_the_same_bits_under_any_grouping(runner: NativeRunner, checkpoint: Checkpoint, item: Any) -> None:
    """C1, C10: alone, and among others in any place."""
    params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=4)
    items = [
        item(PROMPT[: 5 + 3 * i], params=params, seed=i, block_table=tuple(range(4 * i, 4 * i + 4))) for i in range(8)
    ]
    alone = [run(runner, one) for one in items]
    for order in (range(8), reversed(range(8)), (3, 1, 7)):
        places = list(order)
        together = run(runner, *(items[i] for i in places))
        assert together.tokens == tuple(alone[i].tokens[0] for i in places)
        assert together.logprobs == tuple(alone[i].logprobs[0] for i in places)
    single = NativeRunner(checkpoint, config(threads=1))
    single.start()
    assert [run(single, one).logprobs for one in items] == [result.logprobs for result in alone]


def test_padding_of_a_static_batch(runner: NativeRunner, item: Any) -> None:
    kept = run(runner, item(PROMPT[:4])).tokens[0]
    result = run(runner, item((1,), block_table=(30,), discard=True), item(PROMPT[:4]))
    assert len(result.tokens[0]) == 1
    assert result.tokens[1] == kept


def test_copied_blocks(runner: NativeRunner, item: Any) -> None:
    expected = run(runner, item(PROMPT), item((4,), 50)).tokens[1]
    copies = tuple(BlockOp(BlockOpKind.COPY, i, 40 + i) for i in range(4))
    assert run(runner, item((4,), 50, block_table=(40, 41, 42, 43)), ops=copies).tokens[0] == expected


def test_logits_that_are_not_finite(checkpoint: Checkpoint, specs: Any, tensors: Any, stored: Any, item: Any) -> None:
    """C4: the request with broken logits gets no token; its neighbour is not touched."""
    values = tensors(specs["llama"])
    values["embed"][17] = np.nan
    runner = NativeRunner(
        dataclasses.replace(checkpoint, tensors={name: stored(array) for name, array in values.items()}), config()
    )
    runner.start()
    good = run(runner, item((1, 2, 3))).tokens[0]
    params = SamplingParams(temperature=1.0, logprobs=2)
    result = run(runner, item((1, 17, 3), params=params), item((1, 2, 3), block_table=(20,)))
    assert result.tokens == ((BAD_LOGITS,), good)
    assert np.isfinite(result.logprobs[0][0].logprob)


@pytest.mark.parametrize("quantized", [False, True])
def test_broken_numbers_show_in_quantized_products_too(
    checkpoint: Checkpoint, specs: Any, tensors: Any, stored: Any, quantized: bool, item: Any
) -> None:
    """C4: an infinite weight anywhere ends in no token rather than in filler."""
    spec = dataclasses.replace(specs["llama"], num_layers=1)
    values = tensors(spec)
    values["layers.0.ffn_norm"][5] = np.inf
    runner = NativeRunner(
        Checkpoint("tiny", spec, {name: stored(array, quantized) for name, array in values.items()}), config()
    )
    runner.start()
    assert run(runner, item(PROMPT)).tokens[0] == (BAD_LOGITS,)


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("tensor", ["layers.1.k", "layers.1.v"])
def test_broken_keys_and_values(
    checkpoint: Checkpoint, tensors: Any, stored: Any, item: Any, kv: str, tensor: str
) -> None:
    """C4: NaN goes into the cache and comes out as NaN, whatever the cache's format."""
    values = tensors(checkpoint.spec)
    values[tensor][3] = np.nan
    broken = {name: stored(array) for name, array in values.items()}
    runner = NativeRunner(dataclasses.replace(checkpoint, tensors=broken), config(kv_cache_dtype=kv))
    runner.start()
    assert run(runner, item(PROMPT)).tokens[0] == (BAD_LOGITS,)
    runner.close()


def test_layers_with_windows_leave_room_for_longer_contexts(windowed_checkpoint: Checkpoint, item: Any) -> None:
    """The cache that would hold 80 positions of all four layers holds more where three of them have windows."""
    windowed = NativeRunner(
        windowed_checkpoint, config(kv_cache_memory="60KiB", block_size=4, max_num_batched_tokens=8)
    )
    capacity = windowed.start()
    assert capacity.windows == (0, 5, 7, 40)
    assert capacity.num_blocks == 80  # of one layer: 4 positions, K and V, 24 numbers of 4 bytes
    assert windowed.memory is not None and windowed.memory.kv_cache == 80 * 4 * 2 * 24 * 4
    # The windows of 5, 7 and 40 take ceil(4 / 4), ceil(6 / 4) and ceil(39 / 4) blocks; each 2 more, for where it begins
    # and for a step in flight, and 2 for the chunk.
    assert capacity.max_model_len == (80 - (1 + 4) - (2 + 4) - (10 + 4)) * 4
    spec = dataclasses.replace(windowed_checkpoint.spec, layer_windows=())
    plain = NativeRunner(
        dataclasses.replace(windowed_checkpoint, spec=spec), config(kv_cache_memory="60KiB", block_size=4)
    )
    assert plain.start().max_model_len == 80


def test_errors_at_start(checkpoint: Checkpoint) -> None:
    """F1, F2: settings that do not go together, told before anything runs."""
    with pytest.raises(ConfigError, match=r"--max-model-len 257 .* 256 positions"):
        NativeRunner(checkpoint, config(max_model_len=257)).start()
    with pytest.raises(ConfigError, match=r"--max-model-len 256 needs .* holds \d+ tokens"):
        NativeRunner(checkpoint, config(max_model_len=256, kv_cache_memory="100KiB")).start()
    with pytest.raises(ConfigError, match="KV blocks of one token"):
        NativeRunner(checkpoint, config(kv_cache_memory="1KiB")).start()
    with pytest.raises(ConfigError, match="--kv-cache-memory 900GiB does not fit"):
        NativeRunner(checkpoint, config(kv_cache_memory="900GiB")).start()
    with pytest.raises(ConfigError, match=r"--isa avx9000 .* portable"):
        NativeRunner(checkpoint, config(isa="avx9000"))
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 100 .* continuous"):
        NativeRunner(checkpoint, config(max_num_batched_tokens=100, scheduler_policy="continuous")).start()


def test_weights_that_do_not_fit(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.runners.native.available_memory", lambda: 10_000)
    with pytest.raises(ConfigError, match="the weights take"):
        NativeRunner(checkpoint, config()).start()


def test_a_damaged_checkpoint_is_named(checkpoint: Checkpoint) -> None:
    rest = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "layers.1.v"}
    with pytest.raises(ModelError, match=r"tiny: .*layers\.1\.v is missing"):
        NativeRunner(dataclasses.replace(checkpoint, tensors=rest), config()).start()


def test_weights_as_f32(specs: Any, tensors: Any, stored: Any, reference: Any, item: Any) -> None:
    """--weights f32 computes with the numbers that the quantised file stands for, without 8-bit activations."""
    spec = specs["llama"]
    quantized = {name: stored(values, True) for name, values in tensors(spec).items()}
    sizes = {}
    for weights in ("auto", "f32"):
        runner = NativeRunner(Checkpoint("tiny", spec, quantized), config(weights=weights))
        sizes[weights] = dict(runner.start().details)["weights"]
        params = SamplingParams(temperature=0.0, logprobs=0)
        sizes[weights + " logprob"] = run(runner, item(PROMPT, params=params)).logprobs[0][0].logprob
    from chairlift import _native

    values = {
        name: _native.dequantize(t.type, *(t.shape if len(t.shape) == 2 else (1, *t.shape)), t.data).reshape(t.shape)
        for name, t in quantized.items()
    }
    logits = reference(spec, values, PROMPT)[-1]
    expected = logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert abs(sizes["f32 logprob"] - expected) < 1e-5
    assert abs(sizes["auto logprob"] - expected) > 1e-5
    assert sizes["f32"] > 3 * sizes["auto"]
