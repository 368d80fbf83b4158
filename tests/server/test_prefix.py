"""--pin-prefix: what is no text, has no effect or does not fit is told at the start."""

from __future__ import annotations

import os

import pytest

from chairlift.core.plan import Capacity
from chairlift.core.policy import make_policy
from chairlift.core.scheduler import Scheduler, Settings
from chairlift.errors import ConfigError, RequestRefused
from chairlift.server.prefix import MAX_BYTES, check_prefix, fitting_tokens, read_prefix


def test_the_text_as_given(toy, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Du bist höflich.\n", encoding="utf-8")
    assert read_prefix(str(path)) == "Du bist höflich.\n"
    assert read_prefix(str(path)) == "Du bist höflich.\n"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\x80text"])
def test_no_text(tmp_path, content):
    path = tmp_path / "prompt.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--pin-prefix") as error:
        read_prefix(str(path))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_no_file(tmp_path):
    for path in (str(tmp_path / "missing"), "a\0b"):
        with pytest.raises(ConfigError, match="--pin-prefix"):
            read_prefix(path)


def test_no_regular_file(tmp_path):
    """A pipe that nobody writes to would be waited for, and a device read for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path), str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(ConfigError, match=r"--pin-prefix .* is not a regular file"):
            read_prefix(path)


def test_a_file_that_becomes_a_pipe(tmp_path, monkeypatch):
    """It is opened without waiting for somebody to write."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").touch()
    regular = os.stat(tmp_path / "text")
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: regular)
        with pytest.raises(ConfigError, match="is empty"):
            read_prefix(str(tmp_path / "pipe"))


def test_a_huge_file(tmp_path):
    path = tmp_path / "huge"
    path.touch()
    os.truncate(path, MAX_BYTES)
    assert len(read_prefix(str(path))) == MAX_BYTES
    os.truncate(path, 2**40)  # without a block on disk: it must not even be read
    with pytest.raises(ConfigError, match=r"more than 16\.0 MiB"):
        read_prefix(str(path))


def test_a_text_that_cannot_fit_is_not_tokenised(toy, monkeypatch):
    capacity = Capacity(num_blocks=100, block_size=16, max_model_len=64)
    tokenizer = toy.ToyTokenizer()
    assert len(fitting_tokens("ü" * 31, tokenizer, capacity, 8)) == 62
    monkeypatch.setattr(tokenizer, "encode", lambda text: pytest.fail("in vain"))
    with pytest.raises(ConfigError, match=r"--pin-prefix holds 66 bytes.*--max-model-len"):
        fitting_tokens("ü" * 33, tokenizer, capacity, 8)


def test_length():
    capacity = Capacity(num_blocks=100, block_size=16, max_model_len=64)
    check_prefix([1] * 16, capacity)
    check_prefix([1] * 62, capacity)
    with pytest.raises(ConfigError, match="15 tokens, and only whole KV blocks of 16 are kept"):
        check_prefix([1] * 15, capacity)
    with pytest.raises(ConfigError, match="63 tokens, and the context of 64"):
        check_prefix([1] * 63, capacity)


@pytest.mark.parametrize("windows", [(0,), (0, 0), (0, 20), (0, 20, 64), (20,)])
@pytest.mark.parametrize("policy", ["chunked", "continuous"])
def test_the_room_is_what_the_scheduler_says(windows, policy):
    """What passes here would otherwise end the engine after \"ready\", and what does not would have worked."""
    refused = 0
    for num_blocks in (9, 28, 40):
        capacity = Capacity(num_blocks=num_blocks, block_size=4, max_model_len=96, windows=windows)
        settings = Settings(max_num_seqs=2, max_num_batched_tokens=96 if policy == "continuous" else 8)
        for length in range(4, 95):
            scheduler = Scheduler(capacity, make_policy(policy), settings)
            try:
                scheduler.pin([1] * length)
            except RequestRefused:
                refused += 1
                with pytest.raises(ConfigError, match=r"--pin-prefix needs .* KV blocks") as error:
                    check_prefix([1] * length, capacity, settings.max_num_batched_tokens)
                assert "\n" not in str(error.value)
            else:
                check_prefix([1] * length, capacity, settings.max_num_batched_tokens)
    assert refused
