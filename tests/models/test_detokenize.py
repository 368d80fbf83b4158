"""Tokens to text, whole and streamed (`C8`)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.models.detokenize import TextStream, Vocabulary, byte_alphabet, decode

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<s>", "</s>", "\u2581Hello", "\u2581", "ing", "\u2581\u2581", "é", "你好", "<0xZZ>", "🎉", "\u2581a b"]
SENTENCEPIECE = Vocabulary([*PIECES, *BYTES, None], [0, 1], "sentencepiece")
STRIPPING = Vocabulary([*PIECES, *BYTES, None], [0, 1], "sentencepiece", strip_space=True)
_ALPHABET = {byte: char for char, byte in byte_alphabet().items()}
_WORDS = [b"Hello", b" world", "你".encode(), "🎉".encode()[:2], "🎉".encode()[2:], "é".encode()[:1], b"\n\n"]
_LETTERS = ["".join(_ALPHABET[byte] for byte in word) for word in [*(bytes([byte]) for byte in range(256)), *_WORDS]]
BYTE_LEVEL = Vocabulary(["<|end|>", *_LETTERS, "a b"], [0], "byte_level")
VOCABULARIES = {"sentencepiece": SENTENCEPIECE, "stripping": STRIPPING, "byte_level": BYTE_LEVEL}

# Mostly bytes of UTF-8 sequences, so that characters come together and fall apart.
_UTF8 = [0x41, 0x20, 0x80, 0x9F, 0xA0, 0xBD, 0xC3, 0xE4, 0xED, 0xF0, 0xF4, 0xFF, 0x8E, 0x89, 0xC0, 0xE0]


def byte_token(vocabulary: Vocabulary, byte: int) -> int:
    return 1 + byte if vocabulary is BYTE_LEVEL else len(PIECES) + byte


def tokens_of(vocabulary: Vocabulary) -> st.SearchStrategy[list[int]]:
    any_token = st.integers(-1, len(vocabulary) + 1)
    return st.lists(
        st.one_of(any_token, st.sampled_from([byte_token(vocabulary, byte) for byte in _UTF8])), max_size=24
    )


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pushes_and_flush_are_the_whole(name: str, data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[name]
    ids = data.draw(tokens_of(vocabulary))
    skip = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stream, whole = TextStream(vocabulary, skip), decode(vocabulary, ids, skip)
    text = ""
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        text += stream.push(ids[begin:end])
        assert whole.startswith(text)  # nothing is ever taken back, and no character comes in halves
    assert text + stream.flush() == whole


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_prompt_continues_into_its_answer(name: str, data: st.DataObject) -> None:
    """Prompt and answer together give the text of the prompt's complete characters and then the stream's."""
    vocabulary = VOCABULARIES[name]
    prompt, ids = data.draw(tokens_of(vocabulary)), data.draw(tokens_of(vocabulary))
    skip = data.draw(st.booleans())
    before = TextStream(vocabulary, skip).push(prompt)
    stream = TextStream(vocabulary, skip, prompt)
    assert before + stream.push(ids) + stream.flush() == decode(vocabulary, prompt + ids, skip)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_UTF8), max_size=16))
def test_byte_level_bytes_become_what_the_tokenizers_library_makes_of_them(raw: list[int]) -> None:
    from tokenizers import decoders

    pieces = [_ALPHABET[byte] for byte in raw]
    ids = [byte_token(BYTE_LEVEL, byte) for byte in raw]
    assert decode(BYTE_LEVEL, ids, True) == decoders.ByteLevel().decode(pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(_UTF8), st.integers(2, len(PIECES) - 1)), max_size=16))
def test_sentencepiece_bytes_become_characters_or_one_mark_each(parts: list[int]) -> None:
    """Each byte that is no part of a character is one U+FFFD: checked by a decoder written out by hand."""
    ids = [byte_token(SENTENCEPIECE, part) if part in _UTF8 else part for part in parts]
    row = b"".join(SENTENCEPIECE.bytes_of(token) for token in ids)
    text, at = "", 0
    while at < len(row):
        for size in (1, 2, 3, 4):
            try:
                text, at = text + row[at : at + size].decode("utf-8"), at + size
                break
            except UnicodeDecodeError:
                continue
        else:
            text, at = text + "\ufffd", at + 1
    assert decode(SENTENCEPIECE, ids, True) == text


def test_a_character_comes_when_it_is_complete() -> None:
    stream = TextStream(SENTENCEPIECE, True)
    assert [stream.push([byte_token(SENTENCEPIECE, byte)]) for byte in "🎉".encode()] == ["", "", "", "🎉"]
    assert stream.flush() == ""
    assert stream.push([byte_token(SENTENCEPIECE, 0xF0)]) == "" and stream.flush() == "\ufffd"


def test_an_impossible_byte_holds_nothing_up() -> None:
    stream = TextStream(BYTE_LEVEL, True)
    assert stream.push([byte_token(BYTE_LEVEL, 0xFF)]) == "\ufffd"
    assert stream.push([byte_token(BYTE_LEVEL, 0xE4), byte_token(BYTE_LEVEL, 0x41)]) == "\ufffdA"


def test_the_leading_space() -> None:
    hello = [2, 4]
    assert decode(STRIPPING, hello, True) == "Helloing" and decode(SENTENCEPIECE, hello, True) == " Helloing"
    assert decode(STRIPPING, [0, *hello], True) == "Helloing"
    assert decode(STRIPPING, [0, *hello], False) == "<s> Helloing"
    assert TextStream(STRIPPING, True, [4]).push(hello) == " Helloing"
    assert TextStream(STRIPPING, True, [0]).push(hello) == "Helloing"  # a skipped token is no text
    assert decode(STRIPPING, [5, 2], True) == "  Hello"  # only one space is dropped


def test_special_tokens_are_skipped_only_when_asked() -> None:
    assert decode(BYTE_LEVEL, [257, 0], True) == "Hello" and decode(BYTE_LEVEL, [257, 0], False) == "Hello<|end|>"
    assert decode(BYTE_LEVEL, [len(BYTE_LEVEL) - 1], True) == "a b"  # an added token is spelled as text


def test_a_push_looks_only_at_new_tokens() -> None:
    """After a hundred thousand tokens, one more costs what the first cost: counted, not timed."""
    seen = []

    class Counting(Vocabulary):
        def bytes_of(self, token: int) -> bytes:
            seen.append(token)
            return super().bytes_of(token)

    vocabulary = Counting(BYTE_LEVEL.pieces, BYTE_LEVEL.special, "byte_level")
    prompt = [257] * 100_000
    stream = TextStream(vocabulary, True, prompt)
    assert len(seen) < 8
    rng = random.Random(0)
    for _ in range(1000):
        stream.push([rng.randrange(1, len(vocabulary))])
    assert len(seen) < 1008
