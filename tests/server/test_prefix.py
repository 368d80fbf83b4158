"""--pin-prefix: what is no text, or has no effect, is told at the start."""

from __future__ import annotations

import pytest

from chairlift.core.plan import Capacity
from chairlift.errors import ConfigError
from chairlift.server.prefix import check_prefix, prefix_tokens


def test_the_text_as_given(toy, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Du bist höflich.\n", encoding="utf-8")
    assert bytes(prefix_tokens(str(path), toy.ToyTokenizer())).decode() == "Du bist höflich.\n"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\x80text"])
def test_no_text(toy, tmp_path, content):
    path = tmp_path / "prompt.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--pin-prefix") as error:
        prefix_tokens(str(path), toy.ToyTokenizer())
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_no_file(toy, tmp_path):
    for path in (str(tmp_path / "missing"), str(tmp_path), "a\0b"):
        with pytest.raises(ConfigError, match="--pin-prefix"):
            prefix_tokens(path, toy.ToyTokenizer())


def test_length():
    capacity = Capacity(num_blocks=100, block_size=16, max_model_len=64)
    check_prefix([1] * 16, capacity)
    check_prefix([1] * 62, capacity)
    with pytest.raises(ConfigError, match="15 tokens, and only whole KV blocks of 16 are kept"):
        check_prefix([1] * 15, capacity)
    with pytest.raises(ConfigError, match="63 tokens, and the context of 64"):
        check_prefix([1] * 63, capacity)
