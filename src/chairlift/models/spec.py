"""`DecoderSpec`: everything that distinguishes one decoder from another, as data. Both runners interpret it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np

_COARSEST_CLOCK = 2 * 10**9  # ns: how far apart two changes of a file may be and show the same time (FAT)

TensorType = Literal[
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"
]  # the q* are GGUF's block formats, byte for byte


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding.

    Fields:
        theta: the base.
        dims: rotated dimensions of a head, from its start.
        style: "half" rotates pairs (i, i + dims/2), as Hugging Face stores weights; "interleaved" pairs (2i, 2i+1),
            as GGUF's llama architecture does.
        inv_freq_scale: ``dims / 2`` divisors of the inverse frequencies (linear, llama3 and yarn scaling all reduce
            to such a list when the model is loaded); empty means all 1.
        attention_factor: multiplies cos and sin (yarn).
    """

    theta: float
    dims: int
    style: Literal["half", "interleaved"]
    inv_freq_scale: tuple[float, ...] = ()
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One decoder-only transformer.

    Each layer: x += post_attn_norm(attn(attn_norm(x))); x += post_ffn_norm(ffn(ffn_norm(x))), where the post norms
    exist only with ``post_norms``; ffn(y) = down(act(gate(y)) * up(y)). Norms are RMS norms, y / rms(y) * weight, with
    weights as stored by this package (a family that stores weight - 1 adds the 1 when it loads).

    Fields:
        layer_windows: per layer, the sliding window in positions (a query at p sees p - window + 1 .. p); 0 is full.
        rope, rope_local: rope_local, when given, is for the layers with a window.
        embed_scale: multiplies the embeddings.
        attn_scale: multiplies q.k before the softmax.
        attn_softcap, logit_softcap: cap * tanh(x / cap), 0 for none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    attn_scale: float
    rope_local: RopeSpec | None = None
    layer_windows: tuple[int, ...] = ()
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    attn_bias: bool = False
    attn_out_bias: bool = False
    ffn_bias: bool = False
    tied_embeddings: bool = False
    embed_scale: float = 1.0
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor this decoder needs, by canonical name, with its shape ([out, in] for matrices)."""
        hidden, ffn = self.hidden_size, self.ffn_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden), "final_norm": (hidden,)}
        if not self.tied_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "q": (q, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, q),
            "ffn_norm": (hidden,),
            "gate": (ffn, hidden),
            "up": (ffn, hidden),
            "down": (hidden, ffn),
        }
        if self.qk_norm:
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.post_norms:
            layer |= {"post_attn_norm": (hidden,), "post_ffn_norm": (hidden,)}
        if self.attn_bias:
            layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.attn_out_bias:
            layer["o_bias"] = (hidden,)
        if self.ffn_bias:
            layer |= {"gate_bias": (ffn,), "up_bias": (ffn,), "down_bias": (hidden,)}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight as stored: ``data`` is its bytes (a flat uint8 view, usually of a memory-mapped file), row-major."""

    type: TensorType
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when ``of`` looked at it.

    Fields:
        mtime_ns, ctime_ns: of its last change. The first can be set to any time, the second only to the present.
        settled: the last change was so long ago that another one would show in these times, however coarse they are.
    """

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    settled: bool = field(compare=False)

    @classmethod
    def of(cls, path: Path) -> Self:
        """Raises OSError."""
        path = path.resolve()
        status = path.stat()
        settled = time.time_ns() - status.st_ctime_ns > _COARSEST_CLOCK
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, settled)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model ready to be given to a runner: ``tensors`` holds exactly the names and shapes of ``spec``.

    1-D tensors (norms, biases) are always f32. ``files``: where the tensors come from, as it was before they were
    mapped; empty if they come from nowhere.
    """

    name: str
    spec: DecoderSpec
    tensors: Mapping[str, Tensor] = field(repr=False)
    files: tuple[SourceFile, ...] = ()
