"""The C++ runner computes what Hugging Face transformers computes: real models, and tiny random ones of each family.

All in F32. For the real models, transformers gets weights that the `gguf` package dequantised, under a mapping and
settings written down here, so that nothing but the bytes of the file is shared with what is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from chairlift import _native
from chairlift.config import EngineConfig
from chairlift.core.plan import StepItem, StepPlan
from chairlift.core.request import SamplingParams, SequenceInfo
from chairlift.models import load_checkpoint, load_tokenizer
from chairlift.models.gguf import GGUFFile
from chairlift.models.spec import Checkpoint, DecoderSpec
from chairlift.quality import bundled_text
from chairlift.runners.native import NativeRunner

TOLERANCE = 1e-3  # of a logit
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 64, 16
BLOCK = 16


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Torch's threads spin while they wait, which on a busy machine costs several times what they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tap:
    """Stands between a runner and the C++ model and keeps the last step's logits, which a runner does not ask for."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self.logits = np.zeros((0, 0), np.float32)

    def run(self, items: tuple[StepItem, ...], *args: Any) -> Any:
        draws = sum(len(item.prompt_targets) + item.num_samples for item in items)
        self.logits = np.zeros((draws, self._vocab_size), np.float32)
        return self._model.run(items, *args, self.logits)


class Native:
    """A started runner, and steps made by hand. Blocks come from all over the cache, and go back when windows pass."""

    def __init__(
        self, checkpoint: Checkpoint, *, rows: int, seqs: int, length: int, weights: str = "f32", isa: str = "auto"
    ) -> None:
        config = EngineConfig(
            model=checkpoint.name,
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=rows,
            block_size=BLOCK,
            kv_cache_dtype="f32",
            weights=weights,  # type: ignore[arg-type]
            threads=2,
            isa=isa,
        )
        self.runner = NativeRunner(checkpoint, config)
        capacity = self.runner.start()
        self._tap = Tap(self.runner._model, checkpoint.spec.vocab_size)
        self.runner._model = self._tap  # type: ignore[assignment]
        self._windows = capacity.windows
        self._free = np.random.default_rng(0).permutation(capacity.num_blocks).tolist()
        self._tables: list[list[int]] = [[] for _ in range(seqs)]

    def _table(self, i: int, start: int, end: int) -> tuple[int, ...]:
        """Sequence i's block table for positions start..end, with -1 for what they do not see."""
        groups, table = len(self._windows), self._tables[i]
        if start == 0:
            self._free += [block for block in table if block >= 0]
            table.clear()
        table += [-1] * (-(-end // BLOCK) * groups - len(table))
        for at, block in enumerate(table):
            window = self._windows[at % groups]
            passed = window > 0 and (at // groups + 1) * BLOCK <= start - window + 1
            if passed and block >= 0:
                self._free.insert(0, block)
                table[at] = -1
            elif not passed and block < 0:
                table[at] = self._free.pop()
        return tuple(table)

    def item(self, i: int, tokens: Sequence[int], start: int, *, samples: int = 0, score: bool = False) -> StepItem:
        """Sequence i's next tokens; ``score`` asks for the logits of each (the targets themselves do not matter)."""
        end = start + len(tokens)
        return StepItem(
            SequenceInfo(str(i), 0, SamplingParams(temperature=0.0), seed=0, num_prompt=end),
            start,
            tuple(tokens),
            self._table(i, start, end),
            samples,
            prompt_targets=tuple(tokens) if score else (),
        )

    def logits(self, tokens: Sequence[int], chunk: int) -> np.ndarray:
        """[len(tokens), vocabulary] raw logits, computed ``chunk`` tokens a step."""
        parts = []
        for start in range(0, len(tokens), chunk):
            item = self.item(0, tokens[start : start + chunk], start, score=True)
            self.runner.submit(StepPlan(step_id=0, items=(item,)))
            parts.append(self._tap.logits)
        return np.concatenate(parts)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The ``count`` most likely tokens after each prompt, all prompts in one batch."""
        sequences = [list(prompt) for prompt in prompts]
        starts = [0] * len(prompts)
        for _ in range(count):
            pairs = zip(sequences, starts, strict=True)
            items = tuple(self.item(i, tokens[start:], start, samples=1) for i, (tokens, start) in enumerate(pairs))
            result = self.runner.submit(StepPlan(step_id=0, items=items))
            starts = [len(tokens) for tokens in sequences]
            for tokens, drawn in zip(sequences, result.tokens, strict=True):
                tokens.extend(drawn)
        return [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]


def reference_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """[len(tokens), vocabulary] logits of transformers, one sequence at once."""
    cap = getattr(model.config, "attn_logit_softcapping", None)
    # Its Gemma 3 reads this setting and then does not give it to its attention function, which would apply it.
    extra = {} if cap is None else {"softcap": cap}
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([list(tokens)]), use_cache=False, **extra).logits[0].numpy()
    return logits


# Real models ----------------------------------------------------------------------------------------------------------

_LAYER = {  # transformers' name to GGUF's, where both families have the tensor
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_LLAMA_LAYER = _LAYER | {"post_attention_layernorm": "ffn_norm"}
_GEMMA_LAYER = _LAYER | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def smollm2_config() -> Any:
    """As published with HuggingFaceTB/SmolLM2-135M-Instruct."""
    kind: Any = transformers.LlamaConfig
    return kind(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )


def gemma3_config() -> Any:
    """As published with google/gemma-3-270m."""
    kind: Any = transformers.Gemma3TextConfig
    return kind(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        query_pre_attn_scalar=256,
        sliding_window=512,
        layer_types=[("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(18)],
        tie_word_embeddings=True,
    )


def from_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF's llama stores the rows of q and k so that rotated pairs are neighbours; transformers has a half apart."""
    rows, cols = weight.shape
    return weight.view(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


def reference_of_gguf(path: Path) -> Any:
    """A transformers model with the weights of a GGUF file, dequantised by the `gguf` package."""
    stored = GGUFFile(path).tensors
    used: set[str] = set()

    def take(name: str) -> torch.Tensor:
        used.add(name)
        tensor = stored[name]
        rows = int(np.prod(tensor.shape[:-1]))
        values = dequantize(tensor.data.reshape(rows, -1), GGMLQuantizationType[tensor.type.upper()])
        return torch.from_numpy(np.array(values, np.float32).reshape(tensor.shape))

    gemma = "gemma" in path.name.lower()
    config = gemma3_config() if gemma else smollm2_config()
    kind: Any = transformers.Gemma3ForCausalLM if gemma else transformers.LlamaForCausalLM
    norm_offset = 1.0 if gemma else 0.0  # transformers' Gemma adds 1 to its norm weights; GGUF files hold the sums
    state = {"model.embed_tokens.weight": take("token_embd.weight")}
    state["model.norm.weight"] = take("output_norm.weight") - norm_offset
    for i in range(config.num_hidden_layers):
        for name, gguf_name in (_GEMMA_LAYER if gemma else _LLAMA_LAYER).items():
            weight = take(f"blk.{i}.{gguf_name}.weight")
            if name.endswith("norm"):
                weight = weight - norm_offset
            elif not gemma and name.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                weight = from_interleaved(weight, heads)
            state[f"model.layers.{i}.{name}.weight"] = weight
    assert used == set(stored)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = kind.from_pretrained(None, config=config, state_dict=state)
    assert model.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, state[name]), f"transformers did not take {name}"
    return model.eval()


@dataclass(frozen=True)
class Pair:
    """A real model in both engines, and the prompts."""

    ours: Native
    theirs: Any
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    path = Path(request.getfixturevalue(f"{request.param}_path"))
    tokenizer = load_tokenizer(str(path))
    text = tokenizer.encode(bundled_text(), add_special_tokens=False)
    first = tokenizer.encode("")  # what the model wants in front, if anything
    size = PROMPT_TOKENS - len(first)
    stride = (len(text) - size) // (PROMPTS - 1)
    prompts = [first + text[i * stride : i * stride + size] for i in range(PROMPTS)]
    length = PROMPT_TOKENS + NEW_TOKENS
    ours = Native(load_checkpoint(str(path)), rows=PROMPTS * PROMPT_TOKENS, seqs=PROMPTS, length=length)
    yield Pair(ours, reference_of_gguf(path), prompts)
    ours.runner.close()


def test_real_models_agree(pair: Pair) -> None:
    """Logits of all positions, and each greedy token is transformers' own unless its best two are almost equal."""
    answers = pair.ours.greedy(pair.prompts, NEW_TOKENS)
    for prompt, answer in zip(pair.prompts, answers, strict=True):
        assert len(prompt) == PROMPT_TOKENS and len(answer) == NEW_TOKENS
        tokens = prompt + answer[:-1]
        theirs = reference_logits(pair.theirs, tokens)
        assert np.abs(pair.ours.logits(tokens, chunk=40) - theirs).max() < TOLERANCE
        rows = theirs[PROMPT_TOKENS - 1 :]
        behind = rows.max(axis=1) - rows[np.arange(NEW_TOKENS), answer]
        assert behind.max() < TOLERANCE, "a greedy token that transformers would not choose"


# Tiny random checkpoints ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiny:
    """A tiny model. ``settings`` change the family's defaults below; ``dtype`` and ``shard`` are those of the files."""

    family: str
    settings: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"
    old_config: bool = False  # config.json as transformers 4 wrote it


_LLAMA = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
_GEMMA = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 24,
    "max_position_embeddings": 256,
    "rope_theta": 100_000.0,
    "rope_local_base_freq": 1_000.0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "factor": 4.0}

TINY = {
    "llama": Tiny("llama", {}),
    "llama, gqa, tied": Tiny("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama, one kv head": Tiny("llama", {"num_key_value_heads": 1, "rope_theta": 500_000.0}),
    "llama, biases": Tiny("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
    "llama, large heads": Tiny("llama", {"head_dim": 48, "num_key_value_heads": 2}),
    "llama, odd sizes": Tiny("llama", {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3,
                                       "intermediate_size": 101, "vocab_size": 97}),
    "llama, llama3 rope": Tiny("llama", {"rope_scaling": _LLAMA3_ROPE}),
    "llama, linear rope": Tiny("llama", {"rope_scaling": _LINEAR}),
    "llama, yarn rope": Tiny("llama", {"rope_scaling": _YARN}),
    "llama, dynamic rope": Tiny("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, sharded, bf16": Tiny("llama", {"num_key_value_heads": 2}, torch.bfloat16, shard="40KB"),
    "llama, f16": Tiny("llama", {}, torch.float16),
    "llama, old config": Tiny("llama", {"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500_000.0}, old_config=True),
    "gemma3": Tiny("gemma3", {}),
    "gemma3, linear rope": Tiny("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3, scaled queries": Tiny("gemma3", {"query_pre_attn_scalar": 56, "num_key_value_heads": 1}),
    "gemma3, untied": Tiny("gemma3", {"tie_word_embeddings": False}),
    "gemma3, soft caps": Tiny("gemma3", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3, own layer types": Tiny("gemma3", {"num_hidden_layers": 3, "layer_types": [
        "full_attention", "sliding_attention", "full_attention"]}),
    "gemma3, window of one": Tiny("gemma3", {"num_hidden_layers": 2, "sliding_window": 1}),
    "gemma3, sharded, bf16": Tiny("gemma3", {}, torch.bfloat16, shard="40KB"),
    "gemma3, old config": Tiny("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, old_config=True),
}  # fmt: skip


def tiny_model(tiny: Tiny) -> Any:
    """A model whose every weight matters: norms and biases are random too, and attention is far from uniform."""
    config_class: Any = {"llama": transformers.LlamaConfig, "gemma3": transformers.Gemma3TextConfig}[tiny.family]
    model_class: Any = {"llama": transformers.LlamaForCausalLM, "gemma3": transformers.Gemma3ForCausalLM}[tiny.family]
    config = config_class(**({"llama": _LLAMA, "gemma3": _GEMMA}[tiny.family] | tiny.settings))
    config._attn_implementation = "eager"  # the only one that knows the soft cap of attention
    model = model_class(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif weight.ndim == 1:
                weight.add_(0.3 * noise)  # around what the norm of this family starts from
            elif "embed_tokens" in name:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)
            weight.data = weight.data.to(tiny.dtype)  # not model.to(): that would round the rope's frequencies as well
    return model.eval()


def in_f32(model: Any) -> Any:
    """The model with its weights, as rounded as they are, in F32."""
    for weight in model.parameters():
        weight.data = weight.data.float()
    return model


def as_old_config(folder: Path) -> None:
    """Rewrites config.json as transformers 4 did: rope_theta and rope_scaling instead of rope_parameters."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    ropes = config.pop("rope_parameters", None)
    if ropes is not None:
        full = dict(ropes.get("full_attention", ropes))
        config["rope_theta"] = full.pop("rope_theta")
        config["rope_scaling"] = full
        if "sliding_attention" in ropes:
            config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
            config.pop("layer_types", None)
            config["sliding_window_pattern"] = config.pop("_sliding_window_pattern", 6)
    path.write_text(json.dumps(config))


def random_tokens(vocab_size: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(vocab_size, size=100).tolist()
    return tokens


@dataclass(frozen=True)
class Answered:
    """A checkpoint as loaded from disk, token sequences, and transformers' logits for them."""

    checkpoint: Checkpoint
    sequences: list[list[int]]
    logits: list[np.ndarray]


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """Saves a tiny model and loads its checkpoint; the logits are those of the files' weights, computed in F32."""
    made = TINY[request.param]
    model, folder = tiny_model(made), tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder, max_shard_size=made.shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (made.shard != "1GB")
    if made.old_config:
        as_old_config(folder)
    sequences = [random_tokens(model.config.vocab_size, seed) for seed in range(2)]
    model = in_f32(model)
    logits = [reference_logits(model, tokens) for tokens in sequences]
    assert all(found.std() > 0.3 for found in logits), "logits too small for a comparison to mean anything"
    return Answered(load_checkpoint(str(folder)), sequences, logits)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("weights", ["f32", "auto"])
def test_tiny_models_agree(tiny: Answered, weights: str, isa: str) -> None:
    """All positions of sequences longer than the windows, in chunks that do not end with blocks. Float weights are
    multiplied in F32, so keeping them as stored may not change more either."""
    ours = Native(tiny.checkpoint, rows=33, seqs=3, length=112, weights=weights, isa=isa)
    for tokens, theirs in zip(tiny.sequences, tiny.logits, strict=True):
        assert np.abs(ours.logits(tokens, chunk=33) - theirs).max() < TOLERANCE
    ours.runner.close()


def without_scaling(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, rope=replace(spec.rope, inv_freq_scale=()))


def wider_windows(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, layer_windows=tuple(window and window + 1 for window in spec.layer_windows))


NOTICED: dict[str, tuple[str, Callable[[DecoderSpec], DecoderSpec]]] = {
    "llama3 scaling": ("llama, llama3 rope", without_scaling),
    "linear scaling": ("llama, linear rope", without_scaling),
    "yarn scaling": ("llama, yarn rope", without_scaling),
    "yarn's factor": ("llama, yarn rope", lambda spec: replace(spec, rope=replace(spec.rope, attention_factor=1.0))),
    "rope base": ("llama, one kv head", lambda spec: replace(spec, rope=replace(spec.rope, theta=400_000.0))),
    "rope style": ("llama", lambda spec: replace(spec, rope=replace(spec.rope, style="interleaved"))),
    "a window longer by one": ("gemma3", wider_windows),
    "local rope": ("gemma3", lambda spec: replace(spec, rope_local=spec.rope)),
    "query scale": ("gemma3, scaled queries", lambda spec: replace(spec, attn_scale=64**-0.5)),
    "attention's soft cap": ("gemma3, soft caps", lambda spec: replace(spec, attn_softcap=0.0)),
    "activation": ("gemma3", lambda spec: replace(spec, activation="silu")),
}


@pytest.mark.parametrize("name", NOTICED)
def test_comparison_notices_small_faults(name: str, tmp_path: Path) -> None:
    """The comparison above is sharp: one detail of the spec wrong, and the logits are far outside the tolerance."""
    case, change = NOTICED[name]
    model = tiny_model(TINY[case])
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    tokens = random_tokens(checkpoint.spec.vocab_size, seed=0)
    wrong = Native(replace(checkpoint, spec=change(checkpoint.spec)), rows=100, seqs=1, length=112)
    assert np.abs(wrong.logits(tokens, chunk=100) - reference_logits(model, tokens)).max() > 10 * TOLERANCE
    wrong.runner.close()
