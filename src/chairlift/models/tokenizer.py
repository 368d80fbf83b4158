"""`Tokenizer`: text to tokens and back, chat messages to a prompt, and the ids that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.errors import ModelError, ParameterError
from chairlift.models import detokenize
from chairlift.models.chat import ChatTemplate
from chairlift.models.checkpoint import read_config
from chairlift.models.detokenize import TextStream, Vocabulary
from chairlift.models.families import config_family
from chairlift.models.fields import foreign_errors
from chairlift.models.gguf import GGUFFile
from chairlift.models.gguf_tokenizer import GGUFVocabulary
from chairlift.models.hf_tokenizer import FolderTokenizer
from chairlift.models.hub import Progress, resolve

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        eos_token_ids: tokens that end an answer.
        bos_token_id: the token that begins a text, or None.
        vocab_size: number of token ids; a model's output may be padded to more.
        max_positions: the model's context, in tokens.
    """

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
        *,
        eos_token_ids: frozenset[int],
        bos_token_id: int | None,
        max_positions: int,
        template: ChatTemplate | None,
    ) -> None:
        self._encoder, self._vocabulary, self._template = encoder, vocabulary, template
        self.eos_token_ids, self.bos_token_id, self.max_positions = eos_token_ids, bos_token_id, max_positions
        self.vocab_size = len(vocabulary)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled out in it are recognised.

        Args:
            add_special_tokens: put the beginning token in front, if the model is used with one.

        Raises:
            ParameterError: the text is not valid Unicode (param "prompt").
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ParameterError("prompt", f"the text holds a lone surrogate at position {error.start}") from None
        with foreign_errors("the tokenizer fails on this text"):
            # The batch call, unlike `encode`, lets other threads run meanwhile; and it computes no offsets.
            ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens. Bytes that form no character become U+FFFD; ids without a token are left out."""
        return detokenize.decode(self._vocabulary, ids, skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> TextStream:
        """Decodes tokens as they come, without ever emitting half a character."""
        return TextStream(self._vocabulary, skip_special_tokens, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's are those of its name."""
        return self._vocabulary.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; bytes that are only part of a character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of so many bytes or less may be a single token, and a longer one is at
        least its length over this. (Of a text that the tokenizer shortens first, as by composing characters, this
        holds for what is left.)"""
        return self._vocabulary.longest

    def token_id(self, piece: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, e.g. "<|im_end|>"."""
        return self._encoder.token_to_id(piece)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation. ``variables`` reach the template (tools, enable_thinking, ...).

        Raises:
            ParameterError: the template refuses the messages (param "messages").
            ModelError: there is no template, or it is broken.
        """
        if self._template is None:
            raise ModelError(
                "this model has no chat template, so it was probably not trained to chat; "
                "use /v1/completions (or generate) with a plain prompt"
            )
        return self._template.render(messages, add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation's prompt. The template alone decides about special tokens, as everywhere in this
        field, so none is added in front of the one it writes."""
        text = self.apply_chat_template(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(model: str, *, progress: Progress | None = None) -> Tokenizer:
    """A model's tokenizer. No weights are read.

    Args:
        model, progress: as for `load_checkpoint`.
    """
    path = resolve(model, progress)
    return from_folder(path) if path.is_dir() else from_gguf(path)


def from_gguf(path: Path) -> Tokenizer:
    """The tokenizer in a GGUF file."""
    file = GGUFFile(path)
    stored = GGUFVocabulary(file)
    architecture = file.fields.text("general.architecture")
    template = file.fields.text("tokenizer.chat_template", None)
    names = {f"{name}_token": stored.token(short) for name, short in _GGUF_NAMES.items()}
    special = {name: stored.pieces[token] for name, token in names.items() if token is not None}
    return Tokenizer(
        stored.build(),
        stored.vocabulary(),
        eos_token_ids=stored.end_tokens,
        bos_token_id=stored.token("bos"),
        max_positions=file.fields.whole(f"{architecture}.context_length", low=1),
        template=None if template is None else ChatTemplate(template, str(path), special),
    )


_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder."""
    config = read_config(folder)
    stored = FolderTokenizer(folder, config)
    template = stored.template()
    return Tokenizer(
        stored.encoder,
        stored.vocabulary(),
        eos_token_ids=stored.end_tokens,
        bos_token_id=stored.bos_token_id,
        max_positions=config_family(config).spec_from_config(config).max_positions,
        template=None if template is None else ChatTemplate(template, str(folder), stored.special_tokens),
    )
