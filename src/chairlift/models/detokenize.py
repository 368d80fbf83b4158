"""Tokens to text. One rule serves whole texts and streams, so that the two cannot differ:

every token stands for some bytes (`Vocabulary.bytes_of`), the bytes are put in a row, and the row is decoded as UTF-8.
A stream keeps back the bytes of a character that is not complete yet, at most three of them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

BYTE_LEVEL_ERRORS = "replace"  # one U+FFFD for each unfinished or impossible sequence, as the tokenizers library does
SENTENCEPIECE_ERRORS = "chairlift.bytewise"  # one U+FFFD for each bad byte, as SentencePiece does
SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies

Style = Literal["byte_level", "sentencepiece"]


def _bytewise(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(SENTENCEPIECE_ERRORS, _bytewise)


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies: printable Latin-1 characters stand for
    themselves, the 68 others for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


class Vocabulary:
    """What each token stands for.

    Args:
        pieces: token id to its piece, as the vocabulary spells it; None for an id without a token.
        special: ids that are left out of the text when special tokens are skipped.
        style: byte_level (each character of a piece is a byte) or sentencepiece (U+2581 is a space, and a piece like
            <0x0A> is that byte).
        strip_space: whether one space at the very beginning of a text is left out, since the encoder put it there.
    """

    def __init__(
        self, pieces: Sequence[str | None], special: Iterable[int], style: Style, strip_space: bool = False
    ) -> None:
        self.pieces, self.special, self.style, self.strip_space = pieces, frozenset(special), style, strip_space
        self.errors = BYTE_LEVEL_ERRORS if style == "byte_level" else SENTENCEPIECE_ERRORS
        self._bytes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> str | None:
        return self.pieces[token] if 0 <= token < len(self.pieces) else None

    def bytes_of(self, token: int) -> bytes:
        """The bytes a token stands for; none for an id that has no token."""
        known = self._bytes.get(token)
        if known is None:
            piece = self.piece(token)
            known = b"" if piece is None else self._convert(piece)
            if piece is not None:  # unknown ids are not remembered: there is no end of them
                self._bytes[token] = known
        return known

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token, at least 1."""
        return max((len(self._convert(piece)) for piece in self.pieces if piece), default=1)

    def _convert(self, piece: str) -> bytes:
        if self.style == "byte_level":
            try:
                return bytes([_ALPHABET[char] for char in piece])
            except KeyError:  # an added token, spelled as text
                return piece.encode("utf-8", "replace")
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes.fromhex(piece[3:5])
            except ValueError:
                pass
        return piece.replace(SPACE, " ").encode("utf-8", "replace")


class TextStream:
    """Decodes a sequence of tokens as it grows. Each `push` costs what its new tokens cost.

    The texts of all pushes and of `flush`, joined, are the decoded whole: no half characters, and U+FFFD only for bytes
    that can never become a character.

    Args:
        prompt_ids: the tokens before the first pushed one. They decide whether a leading space is dropped, and complete
            a character that the prompt ends in the middle of; their own text is not returned.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._skip = vocabulary.special if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(vocabulary.errors)
        self._strip = vocabulary.strip_space
        tail = self._last_bytes(prompt_ids)
        if tail:
            self._strip = False
            self._decoder.decode(tail)

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, at least four if it has them: more than an unfinished character can take up."""
        tail = b""
        for token in reversed(prompt_ids):
            if token not in self._skip:
                tail = self._vocabulary.bytes_of(token) + tail
            if len(tail) >= 4:
                break
        return tail

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; perhaps none yet."""
        bytes_of, skip = self._vocabulary.bytes_of, self._skip
        data = b"".join([bytes_of(token) for token in ids if token not in skip])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What was kept back: U+FFFD for a character that never became complete, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def decode(vocabulary: Vocabulary, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of a whole sequence of tokens."""
    stream = TextStream(vocabulary, skip_special_tokens)
    return stream.push(ids) + stream.flush()
