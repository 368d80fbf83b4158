"""--pin-prefix: a file's text as the tokens that prompts begin with."""

from __future__ import annotations

import os
import stat

from chairlift.core.layout import most_held
from chairlift.core.plan import Capacity
from chairlift.errors import ConfigError
from chairlift.log import exact_bytes, short_bytes
from chairlift.server.text import Tokenizer

MAX_BYTES = 16 * 2**20  # of the file, whatever the model


def read_prefix(path: str) -> str:
    """The file's text. Raises ConfigError if it has none, or is no regular file of at most `MAX_BYTES`."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened, which sets off some devices
            raise ConfigError(f"--pin-prefix {path} is not a regular file; give a file of text")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # should it be a pipe by now
        with open(descriptor, "rb") as file:
            content = file.read(MAX_BYTES + 1) or b""
        if len(content) > MAX_BYTES:
            raise ConfigError(f"--pin-prefix {path} has more than {short_bytes(MAX_BYTES)}; shorten it")
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"--pin-prefix {path} cannot be read: {error.strerror or error}") from None
    except ValueError:  # also of a path that holds a null byte
        raise ConfigError(f"--pin-prefix must name a file of UTF-8 text, and {path!r} is none") from None
    if not text:
        raise ConfigError(f"--pin-prefix {path} is empty; it must hold the text that prompts begin with")
    return text


def fitting_tokens(text: str, tokenizer: Tokenizer, capacity: Capacity, chunk: int) -> list[int]:
    """The text's tokens. Raises ConfigError, untokenised, for a text that can never fit, and as `check_prefix` does."""
    size, most = len(text.encode()), capacity.max_model_len * tokenizer.longest_token
    if size > most:
        raise ConfigError(
            f"--pin-prefix holds {exact_bytes(size)}, and the context of {capacity.max_model_len} tokens at most "
            f"{exact_bytes(most)}; shorten it, or start with a larger --max-model-len"
        )
    token_ids = tokenizer.encode(text)
    check_prefix(token_ids, capacity, chunk)
    return token_ids


def check_prefix(token_ids: list[int], capacity: Capacity, chunk: int = 0) -> None:
    """Raises ConfigError if to keep these tokens would have no effect, or leave no room: by the same rule as
    `Scheduler.pin`, which would end the engine.

    Args:
        chunk: most tokens that a step computes.
    """
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
    blocks = most_held(capacity.windows, length, block, 0)
    to_compute = most_held(capacity.windows, length + 2, block, chunk)
    if blocks + to_compute > capacity.num_blocks:
        raise ConfigError(
            f"--pin-prefix needs {blocks} KV blocks for good, and a prompt that begins with it {to_compute} more, but "
            f"there are {capacity.num_blocks}; shorten it, or give a larger --kv-cache-memory"
        )
