"""Reads the tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json and the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.errors import ModelError
from chairlift.models.detokenize import SPACE, Style, Vocabulary
from chairlift.models.fields import Fields, foreign_errors, read_json

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_TEMPLATE_BYTES = 4 * 2**20
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class FolderTokenizer:
    """What a Hugging Face folder says about its tokenizer.

    Attributes:
        encoder: the `tokenizers` object.
        special_tokens: bos_token, eos_token and so on, by name.
    """

    def __init__(self, folder: Path, config: Fields) -> None:
        self.folder, self.config = folder, config
        self.settings = _optional_json(folder / "tokenizer_config.json")
        self.generation = _optional_json(folder / "generation_config.json")
        self.encoder = _read_encoder(folder / "tokenizer.json")
        self.special_tokens = self._special_tokens()
        self._apply_add_bos()

    def _special_tokens(self) -> dict[str, str]:
        """Names to spellings; a token is a string or an object with its ``content``."""
        tokens = {}
        for name in _SPECIAL_NAMES:
            value = self.settings.raw(name, None)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
        return tokens

    def _apply_add_bos(self) -> None:
        """An explicit ``add_bos_token`` counts more than what tokenizer.json does, as in transformers."""
        wanted, bos = self.settings.flag("add_bos_token", None), self.bos_token_id
        if wanted is None or bos is None:
            return
        does = self.encoder.encode("", add_special_tokens=True).ids[:1] == [bos]
        if wanted == does:
            return
        from tokenizers import processors

        name = self.special_tokens["bos_token"]
        pattern = (f"{name}:0 $A:0", f"{name}:0 $A:0 {name}:1 $B:1") if wanted else ("$A:0", "$A:0 $B:1")
        self.encoder.post_processor = processors.TemplateProcessing(
            single=pattern[0].split(" "), pair=pattern[1].split(" "), special_tokens=[(name, bos)]
        )

    @property
    def bos_token_id(self) -> int | None:
        if "bos_token" in self.special_tokens:
            return self.encoder.token_to_id(self.special_tokens["bos_token"])
        ids = _ids(self.config, "bos_token_id")
        return min(ids) if ids else None

    @property
    def end_tokens(self) -> frozenset[int]:
        """All that generation_config.json and tokenizer_config.json name, or else config.json's."""
        ends = _ids(self.generation, "eos_token_id")
        if "eos_token" in self.special_tokens:
            token = self.encoder.token_to_id(self.special_tokens["eos_token"])
            ends |= set() if token is None else {token}
        return frozenset(ends or _ids(self.config, "eos_token_id"))

    def vocabulary(self) -> Vocabulary:
        """What decoding needs, from the tokens and the decoder of tokenizer.json."""
        tokens = self.encoder.get_vocab(with_added_tokens=True)
        pieces: list[str | None] = [None] * (max(tokens.values(), default=-1) + 1)
        for piece, token in tokens.items():
            pieces[token] = piece
        added = self.encoder.get_added_tokens_decoder()
        for token, entry in added.items():
            pieces[token] = entry.content
        style, strip = _decoder_style(self.encoder, self.folder / "tokenizer.json")
        return Vocabulary(pieces, [token for token, entry in added.items() if entry.special], style, strip)

    def template(self) -> str | None:
        """The chat template's source, wherever it is kept."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            if path.stat().st_size > MAX_TEMPLATE_BYTES:
                raise ModelError(f"{path}: is too large for a chat template")
            return path.read_text("utf-8", "replace")
        legacy = _optional_json(self.folder / "chat_template.json")
        value = self.settings.raw("chat_template", legacy.raw("chat_template", None))
        if isinstance(value, list):  # several, by name
            entries = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
            value = entries[0].get("template") if entries else None
        if value is not None and not isinstance(value, str):
            raise self.settings.wrong("chat_template", value, "a string")
        return value


def _optional_json(path: Path) -> Fields:
    return Fields(read_json(path) if path.is_file() else {}, str(path))


def _ids(fields: Fields, key: str) -> set[int]:
    """Token ids of a setting that is one id or a list of them."""
    value = fields.raw(key, [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise fields.wrong(key, value, "a token id or a list of token ids")
    return set(ids)


def _read_encoder(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise ModelError(
            f"{path.parent}: has no tokenizer.json; convert its tokenizer with transformers "
            "(AutoTokenizer.from_pretrained, then save_pretrained)"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{path}: is too large for a tokenizer")
    with foreign_errors(f"{path}: is not a sound tokenizer"):
        encoder = Tokenizer.from_file(str(path))
    encoder.no_padding()
    encoder.no_truncation()
    return encoder


def _decoder_style(encoder: tokenizers.Tokenizer, path: Path) -> tuple[Style, bool]:
    """How the decoder of a tokenizer.json turns pieces into bytes, and whether it drops a leading space."""
    state = encoder.decoder.__getstate__() if encoder.decoder is not None else b"null"
    steps = list(_flatten(json.loads(state)))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    strips = [step for step in steps if step.get("type") == "Strip"]
    if (
        set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and {"Replace", "ByteFallback"} <= set(kinds)
        and all(step["pattern"] == {"String": SPACE} and step["content"] == " " for step in steps if "pattern" in step)
        and all(strip["content"] == " " and strip["start"] == 1 and strip["stop"] == 0 for strip in strips)
        and len(strips) <= 1
    ):
        return "sentencepiece", bool(strips)
    raise ModelError(f"{path}: its decoder ({', '.join(map(str, kinds)) or 'none'}) is not supported")


def _flatten(step: Any) -> Iterable[dict[str, Any]]:
    if isinstance(step, dict) and step.get("type") == "Sequence":
        for inner in step.get("decoders", []):
            yield from _flatten(inner)
    elif isinstance(step, dict):
        yield step
