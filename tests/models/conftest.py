"""Small GGUF files made with the `gguf` package's writer, and SentencePiece models to compare with."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

TEXTS = [
    "Hello world",
    " leading",
    "trailing  ",
    "  two   three    four",
    "tab\tx\t\ty\n\n\nlines\r\n end",
    "def f(x):\n    return x ** 2  # doc\n",
    "It's we'll THEY'RE I'd",
    "0 12 345 6789 3.14159 1,000,000",
    "¡Grüße, Jürgen! naïve café ﬁ",
    "你好,世界。日本語のテキスト 한국어",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 n\u0303",
    "مرحبا بالعالم שלום",
    "=====-----<<<>>>!!!???",
    "\u00a0non\u2009breaking\u3000spaces",
    "mixedCASEwords AND_snake_case x2y",
    "",
]

_Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    fields: dict[str, Any] | None = None,
    vocab: int = 40,
    hidden: int = 64,
    ffn: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = True,
    extra: dict[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """A random model; matrices of the feed-forward part in Q8_0, the rest in F32. ``fields`` adds or replaces
    metadata (a value of None leaves the key out); ``extra`` and ``without`` change the tensors."""
    rng = np.random.default_rng(0)
    gemma = architecture == "gemma3"
    prefix = f"{architecture}."
    values: dict[str, Any] = {
        prefix + "block_count": layers,
        prefix + "context_length": 128,
        prefix + "embedding_length": hidden,
        prefix + "feed_forward_length": ffn,
        prefix + "attention.head_count": heads,
        prefix + "attention.head_count_kv": kv_heads,
        prefix + "attention.layer_norm_rms_epsilon": 1e-5,
        prefix + "rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(vocab)],
        "tokenizer.ggml.scores": [-float(i) for i in range(vocab)],
        "tokenizer.ggml.token_type": [1] * vocab,
    }
    head = 32 if gemma else hidden // heads
    if gemma:
        values |= {prefix + "attention.key_length": head, prefix + "attention.value_length": head}
        values |= {prefix + "attention.sliding_window": 16}
    values |= fields or {}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    for i in range(layers):
        layer = {
            "attn_norm": (hidden,),
            "attn_q": (heads * head, hidden),
            "attn_k": (kv_heads * head, hidden),
            "attn_v": (kv_heads * head, hidden),
            "attn_output": (hidden, heads * head),
            "ffn_norm": (hidden,),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }
        if gemma:
            layer |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
            layer |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = {name: data for name, data in (tensors | (extra or {})).items() if name not in without}

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        _add(writer, key, value)
    for name, data in tensors.items():
        if "ffn_" in name and data.ndim == 2:
            writer.add_tensor(name, gguf.quantize(data, _Q8_0), raw_dtype=_Q8_0)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """`write_gguf` to a temporary file."""

    def make(**settings: Any) -> Path:
        return write_gguf(tmp_path / "model.gguf", **settings)

    return make


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _message(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


@pytest.fixture(scope="session")
def sentencepiece_model() -> Callable[..., Any]:
    """Builds a SentencePiece BPE processor from pieces, scores and types, so that the real library can be asked.

    The model is written in protobuf's wire format here: fields as in sentencepiece_model.proto.
    """
    import sentencepiece

    def make(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, prefix: bool) -> Any:
        unknown = list(kinds).index(2)
        body = b"".join(
            _message(
                1,
                _message(1, piece.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _integer(3, kind),
            )
            for piece, score, kind in zip(pieces, scores, kinds, strict=True)
        )
        trainer = _integer(3, 2) + _integer(4, len(pieces)) + _integer(35, 1) + _integer(40, unknown)
        trainer += _integer(41, -1) + _integer(42, -1) + _integer(43, -1)
        normalizer = _message(1, b"identity") + _integer(3, prefix) + _integer(4, 0) + _integer(5, 1)
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(body + _message(2, trainer) + _message(3, normalizer))
        return processor

    return make


@pytest.fixture(scope="session")
def byte_level_fields() -> dict[str, Any]:
    """GGUF metadata of a small byte-level BPE tokenizer, trained here on `TEXTS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=1,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS * 3, trainer)
    state = json.loads(trained.to_str())["model"]
    pieces = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(pieces) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def sentencepiece_fields() -> dict[str, Any]:
    """GGUF metadata of a small SentencePiece BPE tokenizer with byte fallback, trained here on `TEXTS`."""
    import io

    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS if text.strip()] * 20),
        model_writer=out,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<user>"],
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    kinds = []
    for i in range(len(trained)):
        kind = 2 if trained.IsUnknown(i) else 3 if trained.IsControl(i) else 6 if trained.IsByte(i) else 1
        kinds.append(4 if trained.IdToPiece(i) == "<user>" else kind)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [trained.IdToPiece(i) for i in range(len(trained))],
        "tokenizer.ggml.scores": [trained.GetScore(i) for i in range(len(trained))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
