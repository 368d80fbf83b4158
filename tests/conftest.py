"""Fixtures for all tests: the real models, from the cache or fetched once, and tiny random checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import _native, models
from chairlift.models import llama
from chairlift.models.gguf import GGUFFile
from chairlift.models.gguf_tokenizer import GGUFVocabulary
from chairlift.models.spec import DecoderSpec

# name -> (transformers config class, what differs from the base settings, keyword arguments of save_pretrained)
TINY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}, {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 1}, {}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}, {}),
    "llama-sharded": ("LlamaConfig", {}, {"max_shard_size": "40KB"}),
    "llama-linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}),
    "llama-dynamic": ("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}),
    "llama-llama3": (
        "LlamaConfig",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {},
    ),
    "llama-yarn": (
        "LlamaConfig",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {},
    ),
    "gemma3": ("Gemma3TextConfig", {}, {}),
    "gemma3-scaled": (
        "Gemma3TextConfig",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 40,
            "final_logit_softcapping": 30.0,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2 + ["full_attention"],
            "tie_word_embeddings": False,
        },
        {},
    ),
}
_SIZES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    "Gemma3TextConfig": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
        "max_position_embeddings": 256,
    },
}


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file (98 MB), fetched if it is not in the cache."""
    return models.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270m's GGUF file (253 MB), fetched if it is not in the cache."""
    return models.resolve("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2 as a Hugging Face folder with weights in BF16 (270 MB), as models are published.

    The file's weights are multiples of a 4-bit step, which int4 would find again. So inputs of some matrices are scaled
    here and what they are multiplied with the other way, which leaves the model as it was, but not those multiples.
    """
    folder = tmp_path_factory.mktemp("smollm2") / "smollm2-bf16"
    folder.mkdir()
    checkpoint, file = models.load_checkpoint(str(smollm2_path)), GGUFFile(smollm2_path)
    spec = checkpoint.spec
    weights = {
        name: _native.dequantize(tensor.type, *(1, *tensor.shape)[-2:], tensor.data).reshape(tensor.shape)
        for name, tensor in checkpoint.tensors.items()
    }
    rng = np.random.default_rng(0)
    for i in range(spec.num_layers):
        at = f"layers.{i}."
        for norm, readers in (("attn_norm", "qkv"), ("ffn_norm", ("gate", "up"))):
            factors = rng.uniform(0.9, 1.1, spec.hidden_size).astype(np.float32)
            weights[at + norm] /= factors
            for name in readers:
                weights[at + name] *= factors
        factors = rng.uniform(0.9, 1.1, spec.ffn_size).astype(np.float32)
        weights[at + "up"] *= factors[:, None]
        weights[at + "down"] /= factors
        for name in "qk":  # GGUF rotates neighbours, Hugging Face the two halves of a head
            pairs = weights[at + name].reshape(-1, spec.head_dim // 2, 2, spec.hidden_size)
            weights[at + name] = pairs.swapaxes(1, 2).reshape(-1, spec.hidden_size)
    write_folder(folder, spec, weights)
    GGUFVocabulary(file).build().save(str(folder / "tokenizer.json"))
    yield folder
    shutil.rmtree(folder)


def write_folder(folder: Path, spec: DecoderSpec, weights: dict[str, np.ndarray]) -> None:
    """A Llama's config.json and BF16 safetensors."""
    import torch
    from safetensors.torch import save_file

    names = llama.hf_names(spec)
    save_file(
        {names[name]: torch.from_numpy(np.ascontiguousarray(values)).bfloat16() for name, values in weights.items()},
        folder / "model.safetensors",
    )
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Makes, once each, a random Hugging Face checkpoint of `TINY`: its folder, and transformers' model of it."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            import torch
            import transformers

            kind, differs, saving = TINY[name]
            config = getattr(transformers, kind)(**_SIZES[kind] | differs)
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
            with torch.no_grad():  # the initial norms and biases are all alike, which would hide their mix-up
                for weight in model.parameters():
                    if weight.ndim == 1:
                        weight.add_(torch.randn_like(weight) * 0.1)
            folder = tmp_path_factory.mktemp("tiny") / name
            model.save_pretrained(folder, **saving)
            made[name] = folder, model
        return made[name]

    return make
