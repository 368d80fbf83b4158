"""--pin-prefix: a file's text as the tokens that prompts begin with."""

from __future__ import annotations

from pathlib import Path

from chairlift.core.plan import Capacity
from chairlift.errors import ConfigError
from chairlift.server.text import Tokenizer


def prefix_tokens(path: str, tokenizer: Tokenizer) -> list[int]:
    """The file's tokens. Raises ConfigError if it is no text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--pin-prefix {path} cannot be read: {error.strerror or error}") from None
    except ValueError:  # also of a path that holds a null byte
        raise ConfigError(f"--pin-prefix must name a file of UTF-8 text, and {path!r} is none") from None
    if not text:
        raise ConfigError(f"--pin-prefix {path} is empty; it must hold the text that prompts begin with")
    return tokenizer.encode(text)


def check_prefix(token_ids: list[int], capacity: Capacity) -> None:
    """Raises ConfigError if to keep these tokens would have no effect, or leave no room."""
    length, block = len(token_ids), capacity.block_size
    if length < block:
        raise ConfigError(
            f"--pin-prefix holds {length} tokens, and only whole KV blocks of {block} are kept; pin {block} tokens or "
            "more, or give a smaller --block-size"
        )
    if length + 2 > capacity.max_model_len:
        raise ConfigError(
            f"--pin-prefix holds {length} tokens, and the context of {capacity.max_model_len} must have room for two "
            "more; shorten it, or start with a larger --max-model-len"
        )
