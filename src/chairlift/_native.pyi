"""The C++ core: kernels, the decoder's forward pass over a paged KV cache, and the sampler."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.core.plan import StepItem, TokenLogprob

def available_isas() -> list[str]:
    """Instruction sets this processor can run, best first, e.g. ["amx", "avx512", "avx2", "portable"]."""

def dequantize(type: str, rows: int, cols: int, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[rows, cols] float32 values of a stored tensor (any TensorType)."""

def matmul(
    x: NDArray[np.float32],
    type: str,
    rows: int,
    cols: int,
    data: NDArray[np.uint8],
    isa: str,
    threads: int,
    packed: str | None = None,
) -> NDArray[np.float32]:
    """x [m, cols] times the transposed weight [rows, cols], through packing and the kernels that a model uses.

    ``packed`` as for `Model.set_tensor`.
    """

def quantize(values: NDArray[np.float32], type: str) -> NDArray[np.uint8]:
    """The stored form of [rows, cols] values as "q8_0" or "q4_1", as packing makes it.

    ValueError for another type, and for values that are not finite or too large for f16 scales.
    """

def packed_bytes(type: str, rows: int, cols: int) -> int:
    """What a matrix of this type takes in memory."""

class Model:
    """A decoder with its weights, KV cache and workspace. Not re-entrant: one step at a time."""

    def __init__(self, spec: dict[str, Any], threads: int, isa: str = "auto") -> None:
        """``spec`` is dataclasses.asdict(DecoderSpec)."""

    def set_tensor(
        self, name: str, type: str, shape: tuple[int, ...], data: NDArray[np.uint8], packed: str | None = None
    ) -> None:
        """Packs one tensor (canonical name of DecoderSpec.tensor_shapes); the data is not needed afterwards.

        packed: the type in memory: by default ``type``; "f32", or "q8_0" or "q4_1" for a matrix of floats.
        """

    def lay_out(self, tensors: Sequence[tuple[str, str]]) -> None:
        """Puts all matrices, of which the names and the types in memory are given, into one piece of memory, which is
        faster than one piece for each. Once, before the tensors are set; vectors, which lie elsewhere, are left out."""

    def packed(self) -> NDArray[np.uint8]:
        """That memory, read-only and not a copy: the packed matrices once they are set."""

    def packed_checksum(self) -> int:
        """64 bits that a fault or an accident changes with the packed matrices."""

    def read_packed(self, file: int, offset: int, checksum: int) -> bool:
        """Sets all matrices by what `packed` was, from a byte of an open file on. False, and none is set, if the file
        ends before, cannot be read, or what it holds has another checksum."""

    def finalize(self) -> None:
        """Checks that every tensor is there. Once, before reserve."""

    @property
    def weight_bytes(self) -> int: ...
    def kv_block_bytes(self, block_size: int, kv_dtype: str, groups: Sequence[Sequence[int]]) -> int:
        """Bytes of one KV block; kv_dtype is "f32", "f16", "bf16" or "int8"; the arguments are those of `reserve`."""

    def workspace_bytes(self, max_rows: int, max_samples: int, kv_dtype: str) -> int: ...
    def reserve(
        self,
        num_blocks: int,
        block_size: int,
        kv_dtype: str,
        groups: Sequence[Sequence[int]],
        max_rows: int,
        max_samples: int,
    ) -> None:
        """Allocates the KV cache, whose pages a thread in the background maps, and the workspace. A step allocates only
        its results.

        groups: the layers of each group, each layer once. A block holds block_size positions, K and V, for the layers
        of one group; the largest group decides its size. A group sees as far back as the widest window of its layers.
        """

    def cache(self) -> NDArray[np.uint8]:
        """The KV cache itself, [num_blocks, block_bytes], not a copy. Not to be touched during a step."""

    def step(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        item_rows: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        table_offsets: NDArray[np.int32],
        sampling: dict[str, NDArray[Any]],
        return_logits: bool = False,
    ) -> dict[str, NDArray[Any]]:
        """One model step, GIL released: forward pass and sampling, with everything as flat arrays. For tests and tools;
        a runner uses `run`.

        tokens, positions [T]: all rows, item after item. item_rows [I+1]: row range of each item.
        block_tables: all items' tables, item i's at table_offsets[i]..[i+1]. With G groups, position p of group g lives
        in entry p // block_size * G + g; entries before a window, and past the last row, may be anything.
        sampling: S draws; any number may share a row. Arrays:
            row i32[S] (row of T), forced i32[S] (>= 0: only score this token, draw nothing), seed u64[S],
            index i32[S], position i32[S] (of the token to be drawn), temperature f32[S], top_k i32[S], top_p f32[S],
            min_p f32[S], repetition f32[S], presence f32[S], frequency f32[S], num_logprobs i32[S] (-1: none),
            history i32[...], history_offsets i32[S+1], history_prompt i32[S] (how many of it are prompt),
            bias_ids i32[...], bias_values f32[...], bias_offsets i32[S+1],
            banned i32[...], banned_offsets i32[S+1].
        Returns token i32[S] (-1: logits not finite), logprob f32[S], rank i32[S], top_ids i32[S, K], top_logprobs
        f32[S, K] with K the largest num_logprobs (unused entries: -1, 0), and with return_logits logits f32[S, vocab]
        (raw, after the soft-cap only).
        """

    def run(
        self,
        items: tuple[StepItem, ...],
        previous: tuple[tuple[int, ...], ...],
        scored: Callable[[int, float, int, tuple[tuple[int, float], ...]], TokenLogprob],
        logits: NDArray[np.float32] | None = None,
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[TokenLogprob, ...], ...], tuple[tuple[TokenLogprob, ...], ...]]:
        """The same for the items of a plan: the tokens, logprobs and prompt_logprobs of its `StepResult`.

        ``previous`` are the tokens of the step before, for those that were not known when this one was planned.
        ``scored`` makes a `TokenLogprob` of its fields. ``logits`` [draws, vocab] takes the raw logits of each draw:
        item after item those scored, those sampled, and those of drafts. What a `SequenceInfo` holds is read once, and
        kept until a plan comes without it. TypeError for what is no `StepItem`;
        ValueError for a token that was never drawn, a number that does not fit 32 bits, and whatever `step` raises it
        for.
        """

    def profile(self, reset: bool = False) -> dict[str, float]:
        """Seconds since the last reset, by the first thread: matmul, attention, sampling, other, total; and steps."""
