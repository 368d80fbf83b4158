"""Tokenizers against independent ones: the SentencePiece library, transformers, and plain `tokenizers` pipelines."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ModelError, ParameterError
from chairlift.models import load_tokenizer
from chairlift.models.gguf import GGUFFile
from chairlift.models.tokenizer import Tokenizer

Make = Callable[..., Path]
SENTENCEPIECE_SPACE = "\u2581"


def mixtures(texts: list[str], count: int, seed: int = 0) -> list[str]:
    """Texts, and random ones of scraps that tokenizers trip over."""
    rng = random.Random(seed)
    scraps = [
        "a",
        "b",
        " ",
        "  ",
        "\n",
        "1",
        "23",
        "é",
        "你",
        "🎉",
        "the",
        " of",
        "\t",
        "ing",
        "'s",
        "'LL",
        ".",
        "<",
        "<0x0A>",
    ]

    def scrap() -> str:
        return rng.choice([rng.choice(scraps), chr(rng.randrange(0x20, 0x7F)), chr(rng.randrange(0xA1, 0x3000))])

    return texts + ["".join(scrap() for _ in range(rng.randrange(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(str(smollm2_path))


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return load_tokenizer(str(gemma3_path))


def test_smollm2_equals_a_pipeline_built_by_hand(smollm2: Tokenizer, smollm2_path: Path, texts: list[str]) -> None:
    """Its own pre-tokenizer is: single digits, then GPT-2's words as the library has them built in."""
    from tokenizers import Tokenizer as Plain
    from tokenizers import models, pre_tokenizers

    metadata = GGUFFile(smollm2_path).metadata
    vocab = {piece: i for i, piece in enumerate(metadata["tokenizer.ggml.tokens"].decode())}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"].decode()]
    plain = Plain(models.BPE(vocab, merges))
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in mixtures(texts, 1500):
        assert smollm2.encode(text) == plain.encode(text).ids, text


def test_smollm2_equals_transformers(smollm2: Tokenizer, smollm2_path: Path, texts: list[str]) -> None:
    """But for digits: transformers' GGUF import leaves out the model's own rule that each stands alone."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    for text in mixtures(texts, 500):
        if not any(char.isnumeric() for char in text):
            assert smollm2.encode(text) == other.encode(text), text
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": ""},
    ]
    prompt = other.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert smollm2.apply_chat_template(messages) == prompt
    assert smollm2.encode_chat(messages) == other.encode(prompt, add_special_tokens=False)
    rng = random.Random(0)
    for _ in range(500):
        ids = [rng.randrange(smollm2.vocab_size) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            assert smollm2.decode(ids, skip) == other.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def test_smollm2_properties(smollm2: Tokenizer) -> None:
    assert smollm2.eos_token_ids == {0, 2} and smollm2.bos_token_id == 1
    assert smollm2.vocab_size == 49152 and smollm2.max_positions == 8192 and smollm2.has_chat_template
    assert smollm2.encode("<|im_start|>user\nHi<|im_end|>")[:2] == [1, 4093]
    assert smollm2.encode("") == []
    assert (
        smollm2.decode([1, 4093, 2]) == "user" and smollm2.decode([1, 4093, 2], False) == "<|im_start|>user<|im_end|>"
    )
    assert smollm2.token_bytes(2) == b"<|im_end|>" and smollm2.token_id("<|im_end|>") == 2
    assert smollm2.decode([10**9, -1]) == "" and smollm2.token_bytes(10**9) == b""


def test_gemma3_equals_sentencepiece(
    gemma3: Tokenizer, gemma3_path: Path, texts: list[str], sentencepiece_model: Callable[..., Any]
) -> None:
    metadata = GGUFFile(gemma3_path).metadata
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    kinds[3] = 2  # the library insists on an unknown token of that type
    pieces = [
        piece.replace(" ", SENTENCEPIECE_SPACE) if kind == 4 else piece  # GGUF spells user-defined ones with spaces
        for piece, kind in zip(metadata["tokenizer.ggml.tokens"].decode(), kinds, strict=True)
    ]
    other = sentencepiece_model(pieces, metadata["tokenizer.ggml.scores"].tolist(), kinds, prefix=False)
    spaces = [" " * count + "x" for count in range(1, 70)] + ["\n" * count for count in range(1, 40)]
    for text in mixtures([*texts, *spaces, "<start_of_image>x", "<h1>a</h1>", "\t\t\t\tx"], 1500):
        assert gemma3.encode(text, add_special_tokens=False) == other.encode(text), text
        assert gemma3.decode(other.encode(text)) == text
    rng = random.Random(0)
    for _ in range(1000):
        ids = [rng.choice([rng.randrange(500, 255000), rng.randrange(238, 494)]) for _ in range(rng.randrange(12))]
        assert gemma3.decode(ids) == other.decode(ids)


def test_gemma3_properties(gemma3: Tokenizer) -> None:
    assert gemma3.bos_token_id == 2 and {1, 106} <= gemma3.eos_token_ids and gemma3.max_positions == 32768
    assert gemma3.encode("Hi")[0] == 2 and gemma3.encode("Hi", add_special_tokens=False)[0] != 2
    assert gemma3.token_bytes(238 + 0xE4) == b"\xe4"
    assert not gemma3.has_chat_template
    with pytest.raises(ModelError, match=r"no chat template.*/v1/completions"):
        gemma3.encode_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_style_equals_sentencepiece(
    make_gguf: Make,
    sentencepiece_fields: dict[str, Any],
    sentencepiece_model: Callable[..., Any],
    texts: list[str],
    prefix: bool,
) -> None:
    pieces, kinds = sentencepiece_fields["tokenizer.ggml.tokens"], sentencepiece_fields["tokenizer.ggml.token_type"]
    other = sentencepiece_model(pieces, sentencepiece_fields["tokenizer.ggml.scores"], kinds, prefix=prefix)
    fields = sentencepiece_fields | {"tokenizer.ggml.add_space_prefix": prefix}
    mine = load_tokenizer(str(make_gguf(vocab=len(pieces), fields=fields)))
    for text in mixtures(texts, 1500):
        assert mine.encode(text, add_special_tokens=False) == other.encode(text), text
        assert mine.decode(mine.encode(text)) == other.decode(other.encode(text)) == text
    assert mine.encode("Hello") == [1, *other.encode("Hello")]  # the model's default is to begin with bos
    user = pieces.index("<user>")
    assert mine.encode("a<user>b").count(user) == 1 and mine.decode([user]) == "<user>" and mine.decode([1, 2]) == ""
    # Not the byte 0x20: no text is ever encoded to it, and at the beginning the libraries disagree about it.
    text_tokens = [i for i, kind in enumerate(kinds) if kind in (1, 4, 6) and pieces[i] != "<0x20>"]
    rng = random.Random(0)
    for _ in range(2000):
        ids = [rng.choice(text_tokens) for _ in range(rng.randrange(8))]
        assert mine.decode(ids) == other.decode(ids)


def test_begin_and_end_tokens_follow_the_metadata(make_gguf: Make, sentencepiece_fields: dict[str, Any]) -> None:
    count = len(sentencepiece_fields["tokenizer.ggml.tokens"])
    plain = sentencepiece_fields | {"tokenizer.ggml.add_bos_token": False}
    assert 1 not in load_tokenizer(str(make_gguf(vocab=count, fields=plain))).encode("Hello")
    both = sentencepiece_fields | {"tokenizer.ggml.add_eos_token": True}
    ids = load_tokenizer(str(make_gguf(vocab=count, fields=both))).encode("Hello")
    assert ids[0] == 1 and ids[-1] == 2


PRE = {
    "gpt-2": ("I'll be 12345 x2!!\n\n  ok", ["I", "'ll", " be", " 12345", " x", "2", "!!", "\n\n ", " ok"]),
    "smollm": ("a 123 b", ["a", " ", "1", "2", "3", " b"]),
    "llama-bpe": ("I'LL 1234567 a.b\n\n x", ["I", "'LL", " ", "123", "456", "7", " a", ".b", "\n\n", " x"]),
    "qwen2": ("I'LL 123 a", ["I", "'LL", " ", "1", "2", "3", " a"]),
    "default": ("a+b 1234567!", ["a", "+", "b", " ", "123", "456", "7", "!"]),
}


@pytest.mark.parametrize("pre", PRE)
def test_each_pre_tokenizer_cuts_as_it_should(make_gguf: Make, byte_level_fields: dict[str, Any], pre: str) -> None:
    text, words = PRE[pre]
    fields = byte_level_fields | {"tokenizer.ggml.pre": pre}
    count = len(fields["tokenizer.ggml.tokens"])
    tokenizer = load_tokenizer(str(make_gguf(vocab=count, fields=fields)))
    cut = tokenizer._encoder.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == words
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_llama3_takes_whole_words_and_begins_with_bos(make_gguf: Make, byte_level_fields: dict[str, Any]) -> None:
    """A word that is a token is never cut, even if the merges would not lead to it."""
    pieces = [*byte_level_fields["tokenizer.ggml.tokens"], "zqj"]
    fields = byte_level_fields | {
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [*byte_level_fields["tokenizer.ggml.token_type"], 1],
    }
    llama3 = load_tokenizer(str(make_gguf(vocab=len(pieces), fields=fields | {"tokenizer.ggml.pre": "llama-bpe"})))
    assert llama3.encode("zqj") == [1, len(pieces) - 1]
    gpt2 = load_tokenizer(str(make_gguf(vocab=len(pieces), fields=fields)))
    assert len(gpt2.encode("zqj")) == 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown pre": ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking' is not supported (supported: default"),
    "unknown model": ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported"),
    "no model": ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens are numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of strings"),
    "no merges": ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    "merge of three": ({"tokenizer.ggml.merges": ["a b c"]}, "'a b c', which is not a pair"),
    "merge of the unknown": ({"tokenizer.ggml.merges": ["a zzzz"]}, "its tokenizer cannot be built"),
    "too few types": ({"tokenizer.ggml.token_type": [1, 1]}, "token_type must be an array of"),
    "no context": ({"llama.context_length": None}, "llama.context_length is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_vocabularies_are_refused(make_gguf: Make, byte_level_fields: dict[str, Any], case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(make_gguf(fields=byte_level_fields | changes)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_broken_scores_and_endless_pieces_are_refused(make_gguf: Make, sentencepiece_fields: dict[str, Any]) -> None:
    fields = dict(sentencepiece_fields)
    fields["tokenizer.ggml.scores"] = [float("nan")] * len(fields["tokenizer.ggml.tokens"])
    with pytest.raises(ModelError, match="scores holds values that are not finite"):
        load_tokenizer(str(make_gguf(fields=fields)))
    fields = dict(sentencepiece_fields)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"][:-1], "a" * 100_000]
    with pytest.raises(ModelError, match="a token is 100000 characters long"):
        load_tokenizer(str(make_gguf(fields=fields)))


def test_the_longest_token(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    for tokenizer in (smollm2, gemma3):
        assert tokenizer.longest_token == max(map(len, map(tokenizer.token_bytes, range(tokenizer.vocab_size))))


def test_other_threads_run_while_a_long_text_is_encoded(smollm2: Tokenizer) -> None:
    """S6: a server's event loop is one of them. The text takes about half a second; a pause, a thousandth."""
    began = threading.Event()
    text = "The quick brown fox, 12 of them. " * 20_000

    def encode() -> None:
        began.set()
        smollm2.encode(text)

    thread = threading.Thread(target=encode)
    thread.start()
    began.wait()
    pauses = 0
    while thread.is_alive():
        time.sleep(0.001)
        pauses += 1
    assert pauses > 10


def test_special_tokens_are_added_and_recognised_as_by_the_library(gemma3: Tokenizer, smollm2: Tokenizer) -> None:
    texts = [
        "",
        "Hi",
        "<bos>Hi<eos>",
        "<|im_start|>user\nHi<|im_end|>\n",
        "a<start_of_turn>b<unused3>",
        "  \n\n\t x é 🚠",
    ]
    for tokenizer in (gemma3, smollm2):
        for text in texts:
            for add in (True, False):
                assert tokenizer.encode(text, add) == tokenizer._encoder.encode(text, add_special_tokens=add).ids


def test_a_lone_surrogate_is_refused(smollm2: Tokenizer) -> None:
    """JSON can carry one; no tokenizer can."""
    with pytest.raises(ParameterError, match="lone surrogate at position 2") as caught:
        smollm2.encode("ab\ud800")
    assert caught.value.param == "prompt"


class TestFolder:
    """tokenizer.json and its companions."""

    @pytest.fixture
    def folder(self, tmp_path: Path, make_gguf: Make, sentencepiece_fields: dict[str, Any]) -> Path:
        """The SentencePiece-style tokenizer again, as transformers saves it."""
        from tokenizers import decoders, processors

        count = len(sentencepiece_fields["tokenizer.ggml.tokens"])
        encoder = load_tokenizer(str(make_gguf(vocab=count, fields=sentencepiece_fields)))._encoder
        space = SENTENCEPIECE_SPACE
        encoder.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        encoder.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
        )
        encoder.save(str(tmp_path / "tokenizer.json"))
        config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 77, "eos_token_id": 7}
        (tmp_path / "config.json").write_text(json.dumps(config))
        settings = {
            "bos_token": "<s>",
            "eos_token": {"__type": "AddedToken", "content": "</s>"},
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    def edit(self, folder: Path, name: str, **changes: Any) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | changes))

    def test_it_equals_transformers(self, folder: Path, texts: list[str]) -> None:
        from transformers import AutoTokenizer

        other, mine = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
        for text in mixtures(texts, 300):
            assert mine.encode(text) == other.encode(text), text
            assert mine.decode(mine.encode(text)) == text
        rng = random.Random(0)
        valid = [i for i in range(mine.vocab_size) if mine._vocabulary.pieces[i][:3] != "<0x"]  # type: ignore[index]
        for _ in range(500):
            ids = [rng.choice(valid) for _ in range(rng.randrange(8))]
            for skip in (True, False):
                assert mine.decode(ids, skip) == other.backend_tokenizer.decode(ids, skip_special_tokens=skip)

    def test_end_tokens_come_from_all_files(self, folder: Path) -> None:
        assert load_tokenizer(str(folder)).eos_token_ids == {2}
        self.edit(folder, "generation_config.json", eos_token_id=[5, 6])
        tokenizer = load_tokenizer(str(folder))
        assert tokenizer.eos_token_ids == {2, 5, 6} and tokenizer.max_positions == 77 and tokenizer.bos_token_id == 1
        (folder / "generation_config.json").unlink()
        self.edit(folder, "tokenizer_config.json", eos_token=None)
        assert load_tokenizer(str(folder)).eos_token_ids == {7}
        self.edit(folder, "generation_config.json", eos_token_id="x")
        with pytest.raises(ModelError, match="eos_token_id must be a token id or a list"):
            load_tokenizer(str(folder))

    def test_add_bos_token_counts_more_than_the_post_processor(self, folder: Path) -> None:
        assert load_tokenizer(str(folder)).encode("Hi")[0] == 1
        self.edit(folder, "tokenizer_config.json", add_bos_token=False)
        without = load_tokenizer(str(folder)).encode("Hi")
        assert 1 not in without
        self.edit(folder, "tokenizer_config.json", add_bos_token=True)
        assert load_tokenizer(str(folder)).encode("Hi") == [1, *without]

    def test_the_chat_template_is_found_wherever_it_is(self, folder: Path) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        assert not load_tokenizer(str(folder)).has_chat_template
        self.edit(folder, "tokenizer_config.json", chat_template="{{ bos_token }}one {{ messages[0].content }}")
        tokenizer = load_tokenizer(str(folder))
        assert tokenizer.apply_chat_template(messages) == "<s>one Hi"
        assert tokenizer.encode_chat(messages).count(1) == 1  # no doubled bos
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
        self.edit(folder, "tokenizer_config.json", chat_template=named)
        assert load_tokenizer(str(folder)).apply_chat_template(messages) == "two"
        self.edit(folder, "tokenizer_config.json", chat_template=[{"name": ["default"]}, "x", {"template": "no"}])
        assert not load_tokenizer(str(folder)).has_chat_template
        self.edit(folder, "tokenizer_config.json", chat_template=7)
        with pytest.raises(ModelError, match="chat_template must be a string, got 7"):
            load_tokenizer(str(folder))
        (folder / "chat_template.jinja").write_text("three")
        assert load_tokenizer(str(folder)).apply_chat_template(messages) == "three"

    def test_flipped_bytes_never_crash(self, folder: Path) -> None:
        path, rng = folder / "tokenizer.json", random.Random(0)
        whole, results = path.read_bytes(), []
        for _ in range(200):
            damaged = bytearray(whole)
            for _ in range(rng.choice([1, 2, 8])):
                damaged[rng.randrange(len(whole))] = rng.choice(b'0123456789"[]{},:aN\xff')
            path.write_bytes(damaged)
            try:
                load_tokenizer(str(folder)).encode("Hello, wörld")
                results.append(True)
            except ModelError as error:
                assert str(error).isprintable()
                results.append(False)
        assert any(results) and not all(results)

    def test_broken_files_are_refused(self, folder: Path) -> None:
        whole = (folder / "tokenizer.json").read_bytes()
        for damaged in (b"", b"{}", whole[:-40], whole.replace(b'"BPE"', b'"XYZ"')):
            (folder / "tokenizer.json").write_bytes(damaged)
            with pytest.raises(ModelError, match="is not a sound tokenizer"):
                load_tokenizer(str(folder))
        (folder / "tokenizer.json").write_bytes(whole.replace(b'"ByteFallback"', b'"CTC"', 1))
        with pytest.raises(ModelError, match=r"is not a sound tokenizer|is not supported"):
            load_tokenizer(str(folder))
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
            load_tokenizer(str(folder))
