"""The Gemma 3 family (text): norms before and after each part, normalised queries and keys, scaled embeddings, and
sliding windows in most layers, which have a rope of their own."""

from __future__ import annotations

import math

import numpy as np

from chairlift.models.checks import MAX_HEAD_DIM, MAX_LAYERS
from chairlift.models.fields import Fields
from chairlift.models.gguf import GGUFFile
from chairlift.models.llama import GGUF_LAYER, HF_LAYER, gguf_vocab_size, layer_names
from chairlift.models.rope import rope_from_config, rope_from_gguf
from chairlift.models.spec import DecoderSpec, RopeSpec

NAME = "gemma3"
GGUF_ARCHITECTURES = ("gemma3",)
HF_ARCHITECTURES = ("Gemma3ForCausalLM",)
HF_MODEL_TYPES = ("gemma3_text",)
HF_NORM_OFFSET = 1.0  # Hugging Face stores weight - 1; GGUF files already hold the weight
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PATTERN = 6  # every sixth layer is full
DEFAULT_HEAD_DIM = 256
LAYERS_OF_27B = 62

_NORMS_GGUF = {
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
}
_NORMS_HF = {
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_attn_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
}
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def gguf_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical tensor name to the name in a GGUF file."""
    names = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
    return layer_names(names, GGUF_LAYER | _NORMS_GGUF, "blk", spec.num_layers)


def hf_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical tensor name to the name in a Hugging Face checkpoint."""
    names = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    return layer_names(names, HF_LAYER | _NORMS_HF, "model.layers", spec.num_layers)


def gguf_ignored(name: str) -> bool:
    return False


def hf_ignored(name: str) -> bool:
    """Buffers that old checkpoints hold, and the output matrix of one that is tied all the same."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def spec_from_gguf(file: GGUFFile) -> DecoderSpec:
    """The spec that a GGUF file of architecture ``gemma3`` describes."""
    fields = Fields(file.metadata, str(file.path), "gemma3.")
    hidden = fields.whole("embedding_length", low=1)
    heads = fields.whole("attention.head_count", low=1)
    layers = fields.whole("block_count", low=1, high=MAX_LAYERS)
    head_dim = fields.whole("attention.key_length", DEFAULT_HEAD_DIM, low=2, high=MAX_HEAD_DIM)
    if (value_dim := fields.whole("attention.value_length", head_dim)) != head_dim:
        raise fields.fail(f"keys of {head_dim} and values of {value_dim} dimensions are not supported")
    max_positions = fields.whole("context_length", low=1)
    window = fields.whole("attention.sliding_window", 0)
    local_theta = fields.real("rope.freq_base_swa", LOCAL_THETA)
    # The file does not say what queries are divided by; of the published sizes only 27B has another than head_dim.
    scaled_by = hidden // heads if layers == LAYERS_OF_27B else head_dim
    return _spec(
        vocab_size=gguf_vocab_size(file, fields),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=fields.whole("attention.head_count_kv", heads, low=1),
        head_dim=head_dim,
        ffn_size=fields.whole("feed_forward_length", low=1),
        max_positions=max_positions,
        norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope=rope_from_gguf(fields, head_dim, "half", GLOBAL_THETA, max_positions),
        rope_local=RopeSpec(theta=local_theta, dims=head_dim, style="half"),
        attn_scale=fields.real("attention.scale", scaled_by**-0.5),
        windows=_gguf_windows(fields, layers, window),
        attn_softcap=fields.real("attn_logit_softcapping", 0.0),
        logit_softcap=fields.real("final_logit_softcapping", 0.0),
        tied="output.weight" not in file.tensors,
    )


def _gguf_windows(fields: Fields, layers: int, window: int) -> tuple[int, ...]:
    """Per layer the window, or 0. The pattern is a period (the last layer of each is full) or one boolean a layer."""
    pattern = fields.raw("attention.sliding_window_pattern", PATTERN)
    if isinstance(pattern, int):
        period = fields.whole("attention.sliding_window_pattern", PATTERN, low=1)
        return tuple(window if (i + 1) % period else 0 for i in range(layers))
    if not isinstance(pattern, np.ndarray) or len(pattern) != layers:
        raise fields.wrong("attention.sliding_window_pattern", pattern, f"a number, or {layers} booleans")
    return tuple(window if sliding else 0 for sliding in pattern)


def spec_from_config(config: Fields) -> DecoderSpec:
    """The spec that a Hugging Face ``config.json`` describes. Absent keys have transformers' defaults."""
    layers = config.whole("num_hidden_layers", 26, low=1, high=MAX_LAYERS)
    head_dim = config.whole("head_dim", DEFAULT_HEAD_DIM, low=2, high=MAX_HEAD_DIM)
    max_positions = config.whole("max_position_embeddings", 131_072, low=1)
    if (activation := config.text("hidden_activation", "gelu_pytorch_tanh")) not in _ACTIVATIONS:
        raise config.fail(
            f"hidden_activation {activation!r:.60} is not supported in this family (supported: gelu_pytorch_tanh)"
        )
    if config.flag("use_bidirectional_attention", False):
        raise config.fail("use_bidirectional_attention makes an encoder of the model, which cannot generate text")
    full, local = _ropes(config, head_dim, max_positions)
    bias = config.flag("attention_bias", False)
    return _spec(
        vocab_size=config.whole("vocab_size", 262_208, low=1),
        hidden=config.whole("hidden_size", 2304, low=1),
        layers=layers,
        heads=config.whole("num_attention_heads", 8, low=1),
        kv_heads=config.whole("num_key_value_heads", 4, low=1),
        head_dim=head_dim,
        ffn_size=config.whole("intermediate_size", 9216, low=1),
        max_positions=max_positions,
        norm_eps=config.real("rms_norm_eps", 1e-6),
        rope=full,
        rope_local=local,
        attn_scale=_inverse_root(config, config.real("query_pre_attn_scalar", 256.0)),
        windows=_config_windows(config, layers),
        attn_softcap=config.real("attn_logit_softcapping", 0.0),
        logit_softcap=config.real("final_logit_softcapping", 0.0),
        tied=config.flag("tie_word_embeddings", True),
        bias=bias,
    )


def _inverse_root(config: Fields, value: float) -> float:
    if value <= 0:
        raise config.wrong("query_pre_attn_scalar", value, "above 0")
    return float(value**-0.5)


def _ropes(config: Fields, head_dim: int, max_positions: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of the full layers and that of the sliding ones.

    ``rope_parameters`` holds one object per layer type; the older ``rope_scaling`` is for the full layers alone.
    """
    both = config.section("rope_parameters", None)
    full, local = both.section("full_attention", None), both.section("sliding_attention", None)
    if "rope_scaling" in config:
        full = Fields(dict(full.values) | dict(config.section("rope_scaling").values), full.where)
    return (
        rope_from_config(full, config.real("rope_theta", GLOBAL_THETA), head_dim, "half", max_positions),
        rope_from_config(local, config.real("rope_local_base_freq", LOCAL_THETA), head_dim, "half", max_positions),
    )


def _config_windows(config: Fields, layers: int) -> tuple[int, ...]:
    window = config.whole("sliding_window", 4096, low=1)
    period = config.whole("sliding_window_pattern", config.whole("_sliding_window_pattern", PATTERN, low=1), low=1)
    kinds = config.raw("layer_types", None)
    if kinds is None:
        return tuple(window if (i + 1) % period else 0 for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _LAYER_TYPES for kind in kinds):
        raise config.wrong("layer_types", kinds, f"{layers} of {' and '.join(_LAYER_TYPES)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _spec(
    *,
    vocab_size: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn_size: int,
    max_positions: int,
    norm_eps: float,
    rope: RopeSpec,
    rope_local: RopeSpec,
    attn_scale: float,
    windows: tuple[int, ...],
    attn_softcap: float,
    logit_softcap: float,
    tied: bool,
    bias: bool = False,
) -> DecoderSpec:
    """What all Gemma 3 models share, with the sizes of one."""
    return DecoderSpec(
        family=NAME,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn_size,
        max_positions=max_positions,
        norm_eps=norm_eps,
        rope=rope,
        rope_local=rope_local,
        attn_scale=attn_scale,
        layer_windows=windows,
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        attn_bias=bias,
        attn_out_bias=bias,
        tied_embeddings=tied,
        embed_scale=math.sqrt(hidden),
        attn_softcap=attn_softcap,
        logit_softcap=logit_softcap,
    )
