"""Specs and tensors: as transformers has them for random checkpoints of each family, and from GGUF metadata."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift.errors import ModelError
from chairlift.models import load_checkpoint
from chairlift.models.checks import float_values
from chairlift.models.spec import Checkpoint, RopeSpec

Make = Callable[..., Path]
Tiny = Callable[[str], tuple[Path, Any]]
NAMES = [
    "llama",
    "llama-tied",
    "llama-biases",
    "llama-sharded",
    "llama-linear",
    "llama-dynamic",
    "llama-llama3",
    "llama-yarn",
    "gemma3",
    "gemma3-scaled",
]

# canonical name -> transformers' module path
_HF = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_LLAMA_NORMS = {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "post_attn_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


def expected(model: Any, name: str, gemma: bool) -> np.ndarray:
    """The value transformers' model computes with for a canonical tensor."""
    top = {"embed": model.model.embed_tokens, "final_norm": model.model.norm, "lm_head": model.lm_head}
    if name in top:
        module, attribute = top[name], "weight"
    else:
        _, layer, short = name.split(".")
        attribute = "bias" if short.endswith("_bias") else "weight"
        path = (_HF | (_GEMMA_NORMS if gemma else _LLAMA_NORMS))[short.removesuffix("_bias")]
        module = model.model.layers[int(layer)].get_submodule(path)
    value = getattr(module, attribute).detach().numpy()
    return value + 1.0 if gemma and name.endswith("norm") else value


def inverse_frequencies(rope: RopeSpec) -> np.ndarray:
    plain = rope.theta ** (-np.arange(0, rope.dims, 2) / rope.dims)
    return plain / np.array(rope.inv_freq_scale) if rope.inv_freq_scale else plain


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_transformers(tiny_checkpoint: Tiny, name: str) -> None:
    folder, model = tiny_checkpoint(name)
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.name == name
    assert set(checkpoint.tensors) == set(checkpoint.spec.tensor_shapes())
    for key, tensor in checkpoint.tensors.items():
        values = float_values(tensor)
        assert values is not None
        np.testing.assert_array_equal(values.reshape(tensor.shape), expected(model, key, "gemma" in name), key)
    if name == "llama-sharded":
        assert len(list(folder.glob("*.safetensors"))) > 2


@pytest.mark.parametrize("name", NAMES)
def test_rope_is_that_of_transformers(tiny_checkpoint: Tiny, name: str) -> None:
    folder, model = tiny_checkpoint(name)
    spec, rotary = load_checkpoint(str(folder)).spec, model.model.rotary_emb
    assert spec.rope.style == "half"
    if "gemma" in name:
        assert spec.rope_local is not None
        pairs = [
            (spec.rope, rotary.full_attention_inv_freq, rotary.full_attention_attention_scaling),
            (spec.rope_local, rotary.sliding_attention_inv_freq, rotary.sliding_attention_attention_scaling),
        ]
    else:
        assert spec.rope_local is None
        pairs = [(spec.rope, rotary.inv_freq, rotary.attention_scaling)]
    for rope, frequencies, factor in pairs:
        np.testing.assert_allclose(inverse_frequencies(rope), frequencies.numpy(), rtol=2e-6)
        assert rope.attention_factor == pytest.approx(factor)
    if name in ("llama-linear", "llama-llama3", "llama-yarn", "gemma3-scaled"):
        assert spec.rope.inv_freq_scale  # the case is not an empty one


def test_spec_of_gemma(tiny_checkpoint: Tiny) -> None:
    spec = load_checkpoint(str(tiny_checkpoint("gemma3")[0])).spec
    assert spec.layer_windows == (16, 16, 16, 16, 16, 0, 16)
    assert spec.embed_scale == 8.0 and spec.attn_scale == pytest.approx(32**-0.5)
    assert spec.activation == "gelu_tanh" and spec.qk_norm and spec.post_norms and spec.tied_embeddings
    scaled = load_checkpoint(str(tiny_checkpoint("gemma3-scaled")[0])).spec
    assert scaled.layer_windows == (0, 16, 16, 0, 16, 16, 0)
    assert scaled.attn_scale == pytest.approx(40**-0.5) and scaled.logit_softcap == 30.0
    assert not scaled.tied_embeddings


def test_spec_of_llama(tiny_checkpoint: Tiny) -> None:
    spec = load_checkpoint(str(tiny_checkpoint("llama-biases")[0])).spec
    assert spec.head_dim == 24 and spec.attn_bias and spec.attn_out_bias and spec.ffn_bias
    assert spec.attn_scale == pytest.approx(24**-0.5) and not spec.tied_embeddings and spec.layer_windows == ()
    tied = load_checkpoint(str(tiny_checkpoint("llama-tied")[0])).spec
    assert tied.tied_embeddings and tied.num_kv_heads == 1


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other settings; a value of None removes one."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


OLD_FORMS = {
    "llama": {"rope_theta": 10000.0},
    "llama-linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama-llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma3": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "layer_types": None, "sliding_window_pattern": 6},
    "gemma3-scaled": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}


@pytest.mark.parametrize("name", OLD_FORMS)
def test_settings_of_older_transformers_mean_the_same(tiny_checkpoint: Tiny, tmp_path: Path, name: str) -> None:
    folder, _ = tiny_checkpoint(name)
    old = edited(folder, tmp_path / "old", rope_parameters=None, **OLD_FORMS[name])
    assert load_checkpoint(str(old)).spec == load_checkpoint(str(folder)).spec


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_as_stored_but_for_norms(tiny_checkpoint: Tiny, tmp_path: Path, dtype: str) -> None:
    import torch

    _, model = tiny_checkpoint("gemma3")
    halved = type(model)(model.config)
    halved.load_state_dict(model.state_dict())
    halved = halved.to(getattr(torch, dtype))
    halved.save_pretrained(tmp_path / "half")
    checkpoint = load_checkpoint(str(tmp_path / "half"))
    down = checkpoint.tensors["layers.1.down"]
    assert down.type == {"float16": "f16", "bfloat16": "bf16"}[dtype]
    weight = halved.model.layers[1].mlp.down_proj.weight.detach()
    assert down.data.tobytes() == weight.view(torch.uint8).numpy().tobytes()
    np.testing.assert_array_equal(float_values(down), weight.float().numpy().reshape(-1))
    norm = checkpoint.tensors["layers.1.q_norm"]
    assert norm.type == "f32"
    stored = halved.model.layers[1].self_attn.q_norm.weight.detach().float().numpy()
    np.testing.assert_array_equal(float_values(norm), 1.0 + stored)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported (supported: Llama"),
    "architecture by type": ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization method 'gptq'"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    "rope type": ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be above 0"),
    "rope factor missing": ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    "rope theta": ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta must be above 0"),
    "rope theta NaN": ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta must be a finite number, got nan"),
    "llama3 factors": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "must be below",
    ),
    "partial rotary": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "NaN eps": ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number, got nan"),
    "zero eps": ({"rms_norm_eps": 0.0}, "norm_eps must be a finite number above 0"),
    "eps beyond floats": ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
    "heads do not divide": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "multiple of the number of key-value",
    ),
    "hidden does not divide": ({"num_attention_heads": 5, "head_dim": None}, "must be a multiple of num_attention"),
    "odd head": ({"head_dim": 15}, "must be even"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
    "2^31 layers": ({"num_hidden_layers": 2**31 - 1}, "num_layers must be from 1 to 1024"),
    "2^63 hidden": ({"hidden_size": 2**63}, "hidden_size must be a whole number"),
    "huge head": ({"head_dim": 2**30}, "head_dim must be a whole number from 1 to 4096"),
    "huge vocabulary": ({"vocab_size": 2**30}, "vocab_size must be from 1 to"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size must be a whole number"),
    "true for a number": ({"hidden_size": True}, "hidden_size must be a whole number"),
    "shape": ({"intermediate_size": 95}, "must have the shape (95, 64), got (96, 64)"),
    "missing tensor": ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
    "unused tensor": ({"num_hidden_layers": 1}, "'model.layers.1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be_are_refused(tiny_checkpoint: Tiny, tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    folder = edited(tiny_checkpoint("llama")[0], tmp_path / "copy", **changes)
    with pytest.raises(ModelError) as caught:
        load_checkpoint(str(folder))
    assert message in str(caught.value) and "\n" not in str(caught.value)


GEMMA_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bidirectional": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "layer types": ({"layer_types": ["full_attention"]}, "layer_types must be 7 of"),
    "odd layer types": ({"layer_types": ["chunked_attention"] * 7}, "layer_types must be 7 of"),
    "window": ({"sliding_window": 0}, "sliding_window must be a whole number from 1"),
    "scalar": ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
    "soft-cap": ({"final_logit_softcapping": -1.0}, "logit_softcap must be a finite number, at least 0"),
    "activation": ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
}


@pytest.mark.parametrize("case", GEMMA_REFUSED)
def test_gemma_settings_that_cannot_be_are_refused(tiny_checkpoint: Tiny, tmp_path: Path, case: str) -> None:
    changes, message = GEMMA_REFUSED[case]
    folder = edited(tiny_checkpoint("gemma3")[0], tmp_path / "copy", **changes)
    with pytest.raises(ModelError) as caught:
        load_checkpoint(str(folder))
    assert message in str(caught.value)


def load_gguf(make_gguf: Make, **settings: Any) -> Checkpoint:
    return load_checkpoint(str(make_gguf(**settings)))


def test_gguf_llama(make_gguf: Make) -> None:
    spec = load_gguf(make_gguf).spec
    assert spec.rope == RopeSpec(theta=5000.0, dims=16, style="interleaved")
    assert spec.norm_eps == pytest.approx(1e-5) and spec.vocab_size == 40 and spec.max_positions == 128
    assert spec.tied_embeddings and not spec.attn_bias
    untied = load_gguf(make_gguf, tied=False)
    assert not untied.spec.tied_embeddings and untied.tensors["lm_head"].shape == (40, 64)
    assert untied.tensors["layers.1.gate"].type == "q8_0" and untied.tensors["layers.1.q"].type == "f32"


def test_gguf_rope_scaling(make_gguf: Make) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert load_gguf(make_gguf, fields=linear).spec.rope.inv_freq_scale == (4.0,) * 8
    assert load_gguf(make_gguf, fields={"llama.rope.scale_linear": 2.0}).spec.rope.inv_freq_scale == (2.0,) * 8
    assert load_gguf(make_gguf, fields=linear | {"llama.rope.scaling.type": "none"}).spec.rope.inv_freq_scale == ()
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    spec = load_gguf(make_gguf, extra={"rope_freqs.weight": factors}).spec
    assert spec.rope.inv_freq_scale == tuple(factors.tolist())
    with pytest.raises(ModelError, match=r"rope_freqs.weight must hold 8 f32 values, got \(9,\)"):
        load_gguf(make_gguf, extra={"rope_freqs.weight": np.ones(9, np.float32)})
    with pytest.raises(ModelError, match="rope factors must be finite numbers above 0"):
        load_gguf(make_gguf, extra={"rope_freqs.weight": np.zeros(8, np.float32)})


def test_gguf_yarn_equals_that_of_transformers(make_gguf: Make, tiny_checkpoint: Tiny) -> None:
    fields = {
        "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    mine, other = load_gguf(make_gguf, fields=fields).spec.rope, load_checkpoint(str(tiny_checkpoint("llama-yarn")[0]))
    assert mine.inv_freq_scale == pytest.approx(other.spec.rope.inv_freq_scale)
    assert mine.attention_factor == pytest.approx(other.spec.rope.attention_factor)


def test_gguf_gemma3(make_gguf: Make) -> None:
    spec = load_gguf(make_gguf, architecture="gemma3", layers=7).spec
    assert spec.layer_windows == (16, 16, 16, 16, 16, 0, 16)
    assert spec.rope == RopeSpec(theta=5000.0, dims=32, style="half")
    assert spec.rope_local == RopeSpec(theta=10000.0, dims=32, style="half")
    assert spec.embed_scale == 8.0 and spec.attn_scale == pytest.approx(32**-0.5)
    fields: dict[str, Any] = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.scaling.factor": 8.0}
    spec = load_gguf(make_gguf, architecture="gemma3", layers=3, fields=fields).spec
    assert spec.layer_windows == (16, 0, 16) and spec.rope.inv_freq_scale == (8.0,) * 16
    assert spec.rope_local is not None and spec.rope_local.inv_freq_scale == ()
    fields = {"gemma3.attention.sliding_window_pattern": [False, True, True]}
    assert load_gguf(make_gguf, architecture="gemma3", layers=3, fields=fields).spec.layer_windows == (0, 16, 16)


def test_gguf_norms_already_hold_the_whole_weight(make_gguf: Make) -> None:
    path = make_gguf(architecture="gemma3", extra={"output_norm.weight": np.full(64, 0.25, np.float32)})
    assert set(float_values(load_checkpoint(str(path)).tensors["final_norm"]).tolist()) == {0.25}  # type: ignore[union-attr]


def test_the_scale_of_27b(make_gguf: Make) -> None:
    """Its queries are divided by the root of hidden / heads, not of the head's size."""
    spec = load_gguf(make_gguf, architecture="gemma3", layers=62, hidden=32, heads=2, ffn=32, vocab=8).spec
    assert spec.attn_scale == pytest.approx(16**-0.5)


GGUF_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "mamba"}, "'mamba' is not supported (supported: llama, gemma3)"),
    "layers missing": ({"fields": {"llama.block_count": None}}, "llama.block_count is missing"),
    "layers 2^31": ({"fields": {"llama.block_count": 2**31 - 1}}, "num_layers must be from 1 to 1024"),
    "layers 0": ({"fields": {"llama.block_count": 0}}, "llama.block_count must be a whole number from 1"),
    "layers as text": ({"fields": {"llama.block_count": "2"}}, "llama.block_count must be a whole number"),
    "layers as list": ({"fields": {"llama.feed_forward_length": [96, 64]}}, "differs from layer to layer"),
    "eps NaN": ({"fields": {"llama.attention.layer_norm_rms_epsilon": math.nan}}, "must be a finite number, got nan"),
    "eps negative": ({"fields": {"llama.attention.layer_norm_rms_epsilon": -1e-5}}, "norm_eps must be a finite number"),
    "theta NaN": ({"fields": {"llama.rope.freq_base": math.nan}}, "rope.freq_base must be a finite number"),
    "theta 0": ({"fields": {"llama.rope.freq_base": 0.0}}, "rope.freq_base must be above 0"),
    "head size": ({"fields": {"llama.attention.key_length": 2**31 - 1}}, "key_length must be a whole number from 1 to"),
    "value size": ({"fields": {"llama.attention.value_length": 8}}, "keys of 16 and values of 8"),
    "rope dims": ({"fields": {"llama.rope.dimension_count": 18}}, "rope dimensions must be even and at most 16"),
    "odd rope dims": ({"fields": {"llama.rope.dimension_count": 7}}, "rope dimensions must be even"),
    "heads": ({"fields": {"llama.attention.head_count": 3}}, "not a multiple of the number of heads 3"),
    "kv heads": ({"fields": {"llama.attention.head_count_kv": 3}}, "multiple of the number of key-value heads"),
    "experts": ({"fields": {"llama.expert_count": 8}}, "mixtures of experts"),
    "scaling": ({"fields": {"llama.rope.scaling.type": "longrope"}}, "rope.scaling.type 'longrope'"),
    "missing tensor": ({"without": ["blk.1.attn_k.weight"]}, "tensor blk.1.attn_k.weight is missing"),
    "wrong shape": (
        {"extra": {"blk.1.attn_k.weight": np.ones((32, 32), np.float32)}},
        "tensor blk.1.attn_k.weight must have the shape (32, 64), got (32, 32)",
    ),
    "transposed": (
        {"extra": {"blk.0.attn_v.weight": np.ones((64, 32), np.float32)}},
        "must have the shape (32, 64), got (64, 32)",
    ),
    "unknown tensor": ({"extra": {"blk.0.extra.weight": np.ones(4, np.float32)}}, "'blk.0.extra.weight' has no place"),
    "norm with NaN": ({"extra": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, "values that are not finite"),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_gguf_models_that_cannot_be_are_refused(make_gguf: Make, case: str) -> None:
    settings, message = GGUF_REFUSED[case]
    with pytest.raises(ModelError) as caught:
        load_gguf(make_gguf, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", [0, 1.5, "six", True, [True], ["a", "b"]])
def test_gguf_window_patterns_that_cannot_be_are_refused(make_gguf: Make, pattern: Any) -> None:
    fields = {"gemma3.attention.sliding_window_pattern": pattern}
    with pytest.raises(ModelError, match=r"gemma3\.attention\.sliding_window_pattern must be"):
        load_gguf(make_gguf, architecture="gemma3", layers=2, fields=fields)


def test_the_default_model(smollm2_path: Path) -> None:
    checkpoint = load_checkpoint(str(smollm2_path))
    spec = checkpoint.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert spec.rope == RopeSpec(theta=100000.0, dims=64, style="interleaved")
    assert checkpoint.tensors["embed"].type == "q8_0" and checkpoint.tensors["layers.29.down"].type == "q4_1"


def test_gemma3_270m(gemma3_path: Path) -> None:
    checkpoint = load_checkpoint(str(gemma3_path))
    spec = checkpoint.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (18, 640, 4, 1, 256)
    assert spec.layer_windows == (512, 512, 512, 512, 512, 0) * 3 and spec.vocab_size == 262144
    assert spec.embed_scale == math.sqrt(640) and spec.attn_scale == 1 / 16
    assert {tensor.type for tensor in checkpoint.tensors.values()} == {"f32", "q4_k", "q5_0", "q6_k", "q8_0"}
