"""The Llama family: Llama 2 and 3, CodeLlama, SmolLM2, TinyLlama, and what else shares their architecture."""

from __future__ import annotations

from chairlift.models.checks import MAX_HEAD_DIM, float_values
from chairlift.models.fields import Fields
from chairlift.models.gguf import GGUFFile, Strings
from chairlift.models.rope import rope_from_config, rope_from_gguf
from chairlift.models.spec import DecoderSpec, RopeSpec

NAME = "llama"
GGUF_ARCHITECTURES = ("llama",)
HF_ARCHITECTURES = ("LlamaForCausalLM",)
HF_MODEL_TYPES = ("llama",)
HF_NORM_OFFSET = 0.0
DEFAULT_THETA = 10_000.0

# canonical layer tensor -> name in a GGUF file, after "blk.N."
GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}

# canonical layer tensor -> name in a Hugging Face checkpoint, after "model.layers.N."
HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}


def gguf_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical tensor name to the name in a GGUF file."""
    names = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
    return layer_names(names, GGUF_LAYER, "blk", spec.num_layers)


def hf_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical tensor name to the name in a Hugging Face checkpoint."""
    names = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    return layer_names(names, HF_LAYER, "model.layers", spec.num_layers)


def layer_names(names: dict[str, str], layer: dict[str, str], prefix: str, num_layers: int) -> dict[str, str]:
    """``names`` and, for every layer, ``layer`` with the layer's number."""
    for i in range(num_layers):
        names |= {f"layers.{i}.{name}": f"{prefix}.{i}.{stored}" for name, stored in layer.items()}
    return names


def gguf_ignored(name: str) -> bool:
    return name == "rope_freqs.weight"  # read into the rope by spec_from_gguf


def hf_ignored(name: str) -> bool:
    """Buffers that old checkpoints hold, and the output matrix of one that is tied all the same."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def spec_from_gguf(file: GGUFFile) -> DecoderSpec:
    """The spec that a GGUF file of architecture ``llama`` describes."""
    fields = Fields(file.metadata, str(file.path), "llama.")
    if fields.whole("expert_count", 0):
        raise fields.fail("mixtures of experts are not supported")
    hidden = fields.whole("embedding_length", low=1)
    heads = fields.whole("attention.head_count", low=1)
    head_dim = gguf_head_dim(fields, hidden, heads)
    max_positions = fields.whole("context_length", low=1)
    dims = fields.whole("rope.dimension_count", head_dim, low=2, high=MAX_HEAD_DIM)
    rope = rope_from_gguf(fields, dims, "interleaved", DEFAULT_THETA, max_positions)
    return DecoderSpec(
        family=NAME,
        vocab_size=gguf_vocab_size(file, fields),
        hidden_size=hidden,
        num_layers=fields.whole("block_count", low=1),
        num_heads=heads,
        num_kv_heads=fields.whole("attention.head_count_kv", heads, low=1),
        head_dim=head_dim,
        ffn_size=fields.whole("feed_forward_length", low=1),
        max_positions=max_positions,
        norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope=_with_rope_factors(rope, file),
        attn_scale=fields.real("attention.scale", head_dim**-0.5),
        attn_bias="blk.0.attn_q.bias" in file.tensors,
        attn_out_bias="blk.0.attn_output.bias" in file.tensors,
        ffn_bias="blk.0.ffn_gate.bias" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
    )


def gguf_vocab_size(file: GGUFFile, fields: Fields) -> int:
    """The number of tokens in the file's tokenizer; without one, what the metadata say."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, Strings) else fields.whole("vocab_size", low=1)


def gguf_head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """The size of a head: given, or the hidden size divided among the heads."""
    if "attention.key_length" not in fields and hidden % heads:
        raise fields.fail(f"the hidden size {hidden} is not a multiple of the number of heads {heads}")
    head_dim = fields.whole("attention.key_length", hidden // heads, low=1, high=MAX_HEAD_DIM)
    value_dim = fields.whole("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise fields.fail(f"keys of {head_dim} and values of {value_dim} dimensions are not supported")
    return head_dim


def _with_rope_factors(rope: RopeSpec, file: GGUFFile) -> RopeSpec:
    """Applies ``rope_freqs.weight``: Llama 3's scaling, precomputed by the file's maker as divisors."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return rope
    values = float_values(tensor)
    if values is None or tensor.shape != (rope.dims // 2,):
        raise file.fields.fail(f"rope_freqs.weight must hold {rope.dims // 2} f32 values, got {tensor.shape}")
    base = rope.inv_freq_scale or (1.0,) * len(values)
    factors = tuple(a * b for a, b in zip(base, values.tolist(), strict=True))
    return RopeSpec(rope.theta, rope.dims, rope.style, factors, rope.attention_factor)


def spec_from_config(config: Fields) -> DecoderSpec:
    """The spec that a Hugging Face ``config.json`` describes. Absent keys have transformers' defaults."""
    hidden, heads = config.whole("hidden_size", 4096, low=1), config.whole("num_attention_heads", 32, low=1)
    if "head_dim" not in config and hidden % heads:
        raise config.fail(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    head_dim = config.whole("head_dim", hidden // heads, low=1, high=MAX_HEAD_DIM)
    max_positions = config.whole("max_position_embeddings", 2048, low=1)
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.fail(f"hidden_act {activation!r:.60} is not supported in this family (supported: silu)")
    scaling = config.section("rope_scaling" if "rope_scaling" in config else "rope_parameters", None)
    theta = config.real("rope_theta", DEFAULT_THETA)
    bias = config.flag("attention_bias", False)
    return DecoderSpec(
        family=NAME,
        vocab_size=config.whole("vocab_size", 32000, low=1),
        hidden_size=hidden,
        num_layers=config.whole("num_hidden_layers", 32, low=1),
        num_heads=heads,
        num_kv_heads=config.whole("num_key_value_heads", heads, low=1),
        head_dim=head_dim,
        ffn_size=config.whole("intermediate_size", 11008, low=1),
        max_positions=max_positions,
        norm_eps=config.real("rms_norm_eps", 1e-6),
        rope=rope_from_config(scaling, theta, head_dim, "half", max_positions),
        attn_scale=head_dim**-0.5,
        attn_bias=bias,
        attn_out_bias=bias,
        ffn_bias=config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )
