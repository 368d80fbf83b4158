"""Builds a tokenizer from the vocabulary in a GGUF file's metadata."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from chairlift.models.detokenize import SPACE, Vocabulary
from chairlift.models.fields import foreign_errors
from chairlift.models.gguf import GGUFFile, Strings

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENS = 2**22
MAX_PIECE = 256  # characters of a SentencePiece piece: the work grows with its square
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# Regular expressions that cut text into words before byte-pair merging, by family of pre-tokenizer.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# name in tokenizer.ggml.pre -> the expressions, applied one after the other
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
}
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3")  # a word that is itself a token is never cut

# Tokens that end a turn or a text whatever the metadata say; files often name only one of them.
_END_TOKENS = {
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
    "<|endofturn|>", "<EOT>", "_<EOT>",
}  # fmt: skip


class GGUFVocabulary:
    """The tokenizer metadata of a GGUF file, checked.

    Attributes:
        pieces, kinds: per token its spelling and its type (normal, unknown, control, user defined, unused, byte).
    """

    def __init__(self, file: GGUFFile) -> None:
        self.fields = file.fields
        self.model = self.fields.text("tokenizer.ggml.model")
        self.pieces = self._strings("tokenizer.ggml.tokens")
        if not 1 <= len(self.pieces) <= MAX_TOKENS:
            raise self.fields.fail(f"tokenizer.ggml.tokens must hold 1 to {MAX_TOKENS} tokens, got {len(self.pieces)}")
        self.kinds = self._numbers("tokenizer.ggml.token_type", _NORMAL)
        self.pre = self.fields.text("tokenizer.ggml.pre", "default")

    def _strings(self, key: str) -> list[str]:
        value = self.fields.raw(key)
        if not isinstance(value, Strings):
            raise self.fields.wrong(key, value, "an array of strings")
        return value.decode()

    def _numbers(self, key: str, default: float | None = None) -> np.ndarray:
        """One number a token."""
        count = len(self.pieces)
        value = self.fields.raw(key, np.full(count, default) if default is not None else None)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.fields.wrong(key, value, f"an array of {count} numbers, one a token")
        return value

    def token(self, name: str) -> int | None:
        """A special token's id, e.g. of "bos"; None if there is none or it is not in the vocabulary."""
        token = self.fields.whole(f"tokenizer.ggml.{name}_token_id", None, high=2**32 - 1)
        return token if token is not None and token < len(self.pieces) else None

    @property
    def special(self) -> list[int]:
        return np.flatnonzero((self.kinds == _CONTROL) | (self.kinds == _UNKNOWN)).tolist()

    @property
    def end_tokens(self) -> frozenset[int]:
        named = {self.token(name) for name in ("eos", "eot", "eom")} - {None}
        marked = np.flatnonzero((self.kinds == _CONTROL) | (self.kinds == _USER_DEFINED))
        return frozenset(named | {i for i in marked.tolist() if self.pieces[i] in _END_TOKENS})  # type: ignore[arg-type]

    @property
    def adds_bos(self) -> bool:
        expected = self.model == "llama" or self.pre in _IGNORE_MERGES
        return self.fields.flag("tokenizer.ggml.add_bos_token", expected) and self.token("bos") is not None

    @property
    def adds_eos(self) -> bool:
        return self.fields.flag("tokenizer.ggml.add_eos_token", False) and self.token("eos") is not None

    def vocabulary(self) -> Vocabulary:
        """What decoding needs."""
        if self.model == "gpt2":
            return Vocabulary(self.pieces, self.special, "byte_level")
        return Vocabulary(self.pieces, self.special, "sentencepiece", strip_space=self.adds_space)

    @property
    def adds_space(self) -> bool:
        return self.model == "llama" and self.fields.flag("tokenizer.ggml.add_space_prefix", True)

    def build(self) -> tokenizers.Tokenizer:
        """The encoder."""
        builders = {"gpt2": _byte_level, "llama": _sentencepiece}
        if self.model not in builders:
            raise self.fields.fail(
                f"tokenizer model {self.model!r:.60} is not supported (supported: {', '.join(builders)})"
            )
        with foreign_errors(f"{self.fields.where}: its tokenizer cannot be built"):
            encoder = builders[self.model](self)
            _add_special_tokens(encoder, self)
        return encoder


def _byte_level(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """Byte-level BPE: merges are given, and the pre-tokenizer is named."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if vocabulary.pre not in PRE_TOKENIZERS:
        raise vocabulary.fields.fail(
            f"pre-tokenizer {vocabulary.pre!r:.60} is not supported (supported: {', '.join(PRE_TOKENIZERS)})"
        )
    merges = [tuple(merge.split(" ")) for merge in vocabulary._strings("tokenizer.ggml.merges")]
    if bad := next((merge for merge in merges if len(merge) != 2), None):
        raise vocabulary.fields.fail(f"tokenizer.ggml.merges holds {' '.join(bad)!r:.60}, which is not a pair")
    ids = {piece: i for i, piece in reversed(list(enumerate(vocabulary.pieces)))}
    encoder = Tokenizer(models.BPE(ids, merges, ignore_merges=vocabulary.pre in _IGNORE_MERGES))  # type: ignore[arg-type]
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[vocabulary.pre]]
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    encoder.decoder = decoders.ByteLevel()
    return encoder


def _sentencepiece(vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: what may be merged follows from the pieces, and in which order from their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {piece: i for i, piece in reversed(list(enumerate(vocabulary.pieces)))}
    unknown = vocabulary.token("unknown")
    model = models.BPE(
        ids,
        _merges_from_scores(vocabulary, ids),
        unk_token=None if unknown is None else vocabulary.pieces[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    encoder = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if vocabulary.adds_space else spaces
    encoder.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return encoder


def _merges_from_scores(vocabulary: GGUFVocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, the best third first.

    This is exact: SentencePiece always joins the pair whose result has the highest score, and a piece comes about in
    one way only, whatever surrounds it, since until it is whole nothing outside it takes part. So the order among the
    ways to make one piece does not matter. (Pieces of equal score would; real vocabularies have none.)
    """
    normal = np.flatnonzero(vocabulary.kinds == _NORMAL)
    scores = vocabulary._numbers("tokenizer.ggml.scores")[normal]
    if not np.isfinite(scores).all():
        raise vocabulary.fields.fail("tokenizer.ggml.scores holds values that are not finite")
    pieces = [vocabulary.pieces[i] for i in normal[np.argsort(-scores, kind="stable")].tolist()]
    longest = max((len(piece) for piece in pieces), default=0)
    if longest > MAX_PIECE:
        raise vocabulary.fields.fail(f"a token is {longest} characters long; at most {MAX_PIECE} are allowed")
    with _no_garbage_collection():
        return [
            (piece[:cut], piece[cut:])
            for piece in pieces
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids
        ]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Half a million new tuples make the collector search the heap many times, for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _add_special_tokens(encoder: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Makes control and user-defined pieces tokens that are found in a text before anything else, and the encoder add
    a beginning token (and an end token) where the metadata ask for it."""
    from tokenizers import AddedToken, processors

    pieces, kinds = vocabulary.pieces, vocabulary.kinds
    special = set(vocabulary.special)
    encoder.add_special_tokens(
        [AddedToken(pieces[i], special=True, normalized=False) for i in sorted(special) if pieces[i]]
    )
    user_defined = [i for i in np.flatnonzero(kinds == _USER_DEFINED).tolist() if pieces[i]]
    # GGUF spells them as they stand in a text, with real spaces, so they are looked for before normalisation.
    encoder.add_tokens([AddedToken(pieces[i], normalized=False) for i in user_defined])
    bos, eos = vocabulary.token("bos"), vocabulary.token("eos")
    before = [("bos", bos)] if vocabulary.adds_bos else []
    after = [("eos", eos)] if vocabulary.adds_eos else []
    if before or after:
        first = [name for name, _ in before] + ["$A"] + [name for name, _ in after]
        pair = first + [f"{name}:1" for name, _ in before] + ["$B:1"] + [f"{name}:1" for name, _ in after]
        encoder.post_processor = processors.TemplateProcessing(
            single=" ".join(first), pair=" ".join(pair), special_tokens=before + after
        )
