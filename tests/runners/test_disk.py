"""The swap file: round trips, restarts, who may open it, and every path and disk that cannot work."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from chairlift import log
from chairlift.errors import ConfigError
from chairlift.runners import disk
from chairlift.runners.disk import DiskFile

BYTES = 5000  # of a block; no multiple of anything
SIZE = 100_000
MODEL = b"a model"


def opened(path: Path, size: int = SIZE, block_bytes: int = BYTES, fingerprint: bytes = MODEL) -> DiskFile:
    return DiskFile.open(path, size, block_bytes, fingerprint)


def block(seed: int, size: int = BYTES) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def blank() -> NDArray[np.uint8]:
    return np.full(BYTES, 7, np.uint8)


def failure(call: Callable[[], object]) -> str:
    """The text of the ConfigError that a call raises; always one line that names the setting."""
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "--disk-swap" in text
    return text


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the swap file's logger says, whether or not the log has been set up."""
    handler, logger = _Lines(), log.get("disk")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "swap"


@pytest.fixture
def file(path: Path) -> Iterator[DiskFile]:
    opened_file = opened(path)
    yield opened_file
    opened_file.close()


def test_blocks_come_back(file: DiskFile) -> None:
    for i in range(file.num_blocks):
        file.write(i, block(i), bytes([i]) * (i % 33))
    for i in reversed(range(file.num_blocks)):
        out = blank()
        assert file.read(i, out, bytes([i]) * (i % 33))
        assert (out == block(i)).all()
        assert file.read(i, out)  # whatever its name


def test_rewritten(file: DiskFile) -> None:
    out = blank()
    file.write(3, block(1), b"one")
    file.write(3, block(2), b"two")
    assert file.read(3, out, b"two") and (out == block(2)).all()
    file.write(3, block(3))
    assert file.read(3, out) and (out == block(3)).all()
    assert file.contents() == []


@pytest.mark.parametrize("written", [None, b"", b"another", b"name\0"])
def test_refused(file: DiskFile, lines: list[str], written: bytes | None) -> None:
    if written is not None:
        file.write(1, block(1), written)
    for _ in range(3):
        out = blank()
        assert not file.read(1, out, b"name")
        assert not out.any()
    assert len(lines) == 1 and "does not hold what was written" in lines[0]


def test_contents_over_a_restart(path: Path, lines: list[str]) -> None:
    first = opened(path)
    secret = first.secret
    names = {i: bytes([i]) * 32 for i in range(0, first.num_blocks, 3)}
    for i in range(first.num_blocks):
        first.write(i, block(i), names.get(i, b""))
    assert first.contents() == list(names.items())
    first.close()
    first.close()

    again = opened(path)
    assert again.secret == secret and len(secret) == 32
    assert again.contents() == list(names.items())
    for i, name in names.items():
        out = blank()
        assert again.read(i, out, name) and (out == block(i)).all()
    again.close()
    assert lines == []


def test_every_file_has_its_own_secret(tmp_path: Path) -> None:
    """Nobody can foretell the hash of a prefix in another's file."""
    files = [opened(tmp_path / name) for name in "ab"]
    assert files[0].secret != files[1].secret
    for file in files:
        file.close()


def test_private_and_of_the_size_given(path: Path) -> None:
    old = os.umask(0)
    try:
        opened(path).close()
    finally:
        os.umask(old)
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert SIZE - 2 * 8192 < status.st_size <= SIZE
    assert status.st_blocks * 512 >= status.st_size  # no holes
    path.chmod(0o644)
    opened(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 23_552])
def test_as_many_blocks_as_fit(path: Path, block_bytes: int) -> None:
    """The largest file that is not larger than allowed, for every size."""
    pages = -(-block_bytes // 4096)
    for size in range(8192 + pages * 4096, 700_000, 4096 * 7 + 1):
        layout = disk._Layout.within(size, block_bytes)
        assert layout.size <= size < disk._Layout(block_bytes, layout.num_blocks + 1).size
        assert layout.record(layout.num_blocks) <= layout.block(0)
        assert layout.block(0) % 4096 == layout.block(1) % 4096 == 0


def test_large_tables_are_read_in_pieces(path: Path) -> None:
    file = opened(path, 140 * 2**20, 8)
    assert file.num_blocks > 2 * 2**20 // 64
    marks = [0, 2**20 // 64 - 1, 2**20 // 64, 2**20 // 64 + 1, file.num_blocks - 1]
    for mark in marks:
        file.write(mark, block(mark, 8), b"%d" % mark)
    file.close()
    file = opened(path, 140 * 2**20, 8)
    assert file.contents() == [(mark, b"%d" % mark) for mark in marks]
    for mark in marks:
        out = np.empty(8, np.uint8)
        assert file.read(mark, out, b"%d" % mark) and (out == block(mark, 8)).all()
    file.close()


def test_the_callers_faults(file: DiskFile) -> None:
    for number in (-1, file.num_blocks):
        with pytest.raises(ValueError, match=f"disk block {number}"):
            file.write(number, block(0))
        with pytest.raises(ValueError, match=f"disk block {number}"):
            file.read(number, blank())
    with pytest.raises(ValueError, match="4999 bytes"):
        file.write(0, block(0)[1:])
    with pytest.raises(ValueError, match="4999 bytes"):
        file.read(0, blank()[1:])
    with pytest.raises(ValueError, match="33 bytes"):
        file.write(0, block(0), bytes(33))
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(0, blank())


def test_two_openers(path: Path, file: DiskFile) -> None:
    file.write(0, block(0), b"name")
    assert "in use by another engine" in failure(lambda: opened(path))
    code = (
        "import sys; from pathlib import Path; from chairlift.runners.disk import DiskFile\n"
        f"DiskFile.open(Path(sys.argv[1]), {SIZE}, {BYTES}, {MODEL!r})"
    )
    other = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert other.returncode != 0 and f"--disk-swap {path} is in use" in other.stderr
    assert file.read(0, blank(), b"name")
    file.close()
    opened(path).close()


def test_another_model_or_size_starts_anew(path: Path, lines: list[str]) -> None:
    secrets = set()
    for i, (size, block_bytes, fingerprint) in enumerate(
        [(SIZE, BYTES, MODEL), (SIZE, BYTES, b"b model"), (2 * SIZE, BYTES, b"b model"), (2 * SIZE, 6000, b"b model")]
    ):
        file = opened(path, size, block_bytes, fingerprint)
        assert file.contents() == []
        assert len(lines) == i
        secrets.add(file.secret)
        for number in range(file.num_blocks):
            file.write(number, block(number, block_bytes), b"name")
        file.close()
    assert len(secrets) == 4
    assert all(f"--disk-swap {path} is ignored and starts empty: it " in line for line in lines)
    assert "another model" in lines[0] and "blocks of 5000 bytes" in lines[1] and "of 6000" in lines[2]


def test_a_file_that_others_could_write_is_not_trusted(path: Path, lines: list[str]) -> None:
    file = opened(path)
    file.write(0, block(0), b"name")
    file.close()
    path.chmod(0o620)
    file = opened(path)
    assert file.contents() == [] and "written by others" in lines[0] and len(lines) == 1
    file.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path).close()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert "another user" in failure(lambda: opened(path))


@pytest.mark.parametrize(
    "text", [b"x", b"precious letters\n" * 10_000, b"\0" * 8192, b"CHAIRLIFT SWAP\n" + bytes(9999)]
)
def test_a_file_that_is_not_ours_is_left_alone(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    path.chmod(0o644)
    assert f"{path} exists and is not a swap file; choose another path" in failure(lambda: opened(path))
    assert path.read_bytes() == text
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_bytes(b"")  # which loses nothing
    opened(path).close()


def test_paths_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "plain").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    cases = {
        tmp_path: "not a regular file",
        Path(""): "not a regular file",
        tmp_path / "fifo": "not a regular file",
        Path("/dev/null"): "not a regular file",
        tmp_path / "missing" / "swap": "folder that does not exist",
        tmp_path / "loop": "symbolic links",
        tmp_path / "plain" / "swap": "Not a directory",
        tmp_path / ("long" * 100): "too long",
        tmp_path / "nul\0": "null",
        Path("/proc/swap"): "does not exist",
    }
    for path, reason in cases.items():
        assert reason in failure(partial(opened, path)), path
    failure(lambda: opened(tmp_path / "missing" / "two\nlines"))


def test_a_symlink_to_a_file_works(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    opened(tmp_path / "link").close()
    assert (tmp_path / "target").stat().st_size > 0


@pytest.mark.parametrize("call", ["open", "pread"])
def test_no_permission(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    opened(path).close()

    def refuse(*args: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, call, refuse)
    assert "Permission denied" in failure(lambda: opened(path))


def test_no_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "No locks available" in failure(lambda: opened(path))


@pytest.mark.parametrize("size", [0, 1, 4096, 16383])
def test_too_small_for_a_block(path: Path, size: int) -> None:
    text = failure(lambda: opened(path, size))
    assert not path.exists()
    least = float(text.split("give ")[1].split(" GiB")[0])
    file = opened(path, int(least * 2**30))
    assert file.num_blocks >= 1
    file.close()


def test_disk_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error at start, and neither the file nor its space stays."""

    def full(fd: int, at: int, size: int) -> None:
        os.pwrite(fd, b"taken", size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left on device; give fewer GiB" in failure(lambda: opened(path))
    assert not path.exists()
    monkeypatch.undo()
    opened(path).close()


def test_disk_smaller_than_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not filled to find that out."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: pytest.fail("others have no room meanwhile"))
    assert "are free on that disk" in failure(lambda: opened(path, 2**60, 2**30))
    assert not path.exists()


def test_only_a_file_of_this_start_is_removed(tmp_path: Path) -> None:
    """Not one that was there, nor a link to where it was made."""
    old, link, target = tmp_path / "old", tmp_path / "link", tmp_path / "target"
    old.touch()
    link.symlink_to(target)
    for path in (old, link):
        assert "are free on that disk" in failure(partial(opened, path, 2**60, 2**30))
    assert old.exists() and old.stat().st_size == 0
    assert link.is_symlink() and not target.exists()


def test_removed_by_its_maker_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is locked must be the file that the next start will find."""
    monkeypatch.setattr(fcntl, "flock", lambda *args: path.unlink())
    assert "in use by another engine" in failure(lambda: opened(path))


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_where_space_cannot_be_reserved(path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    """Zeros take it at first, and must not go over the blocks at the next start."""

    def unsupported(*args: object) -> None:
        raise OSError(code, "not supported")

    if code is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    size = 3 * 2**20 + 5
    file = opened(path, size)
    assert path.stat().st_blocks * 512 >= path.stat().st_size > size - 3 * 4096
    last = file.num_blocks - 1
    file.write(last, block(1), b"name")
    file.close()
    file = opened(path, size)
    assert file.contents() == [(last, b"name")] and file.read(last, blank(), b"name")
    file.close()


@pytest.mark.parametrize("fails", range(3))
def test_a_failing_write_loses_the_block(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch, lines: list[str], fails: int
) -> None:
    """And what the block held before is not taken for what was to be written."""
    file.write(2, block(1))
    calls = iter(range(10))

    def failing(*args: object) -> int:
        if next(calls) >= fails:
            raise OSError(errno.EIO, "Input/output error")
        return os_pwrite(*args)  # type: ignore[arg-type]

    os_pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", failing)
    file.write(2, block(2))
    file.write(2, block(2))
    monkeypatch.undo()
    assert len(lines) == 1 and "cannot be written (Input/output error)" in lines[0]
    assert not file.read(2, blank())
    file.write(2, block(3))
    assert file.read(2, blank())


def test_a_short_write_loses_the_block(file: DiskFile, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    os_pwrite = os.pwrite

    def half(fd: int, data: bytes, at: int) -> int:
        return os_pwrite(fd, bytes(data)[: len(data) // 2], at)

    monkeypatch.setattr(os, "pwrite", half)
    file.write(2, block(2))
    assert "No space left" in lines[0]
    monkeypatch.undo()
    assert not file.read(2, blank())


def test_a_failing_read_is_refused(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write(2, block(2))

    def failing(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert not file.read(2, blank())
    assert file.read(2, blank())


def test_cut_short_while_open(path: Path, file: DiskFile) -> None:
    """Somebody empties the file of a running engine: its blocks are lost, and nothing else."""
    for i in range(file.num_blocks):
        file.write(i, block(i), b"name")
    os.truncate(path, 0)
    out = blank()
    assert not any(file.read(i, out) for i in range(file.num_blocks))
    assert file.contents() == []
    file.write(5, block(5))
    assert file.read(5, out) and (out == block(5)).all()


def test_a_name_changed_while_open(path: Path, file: DiskFile) -> None:
    file.write(0, block(0), b"name")
    raw = path.read_bytes()
    path.write_bytes(raw[:4104] + b"N" + raw[4105:])
    assert file.contents() == []
    assert not file.read(0, blank())


def test_an_older_state_while_open(path: Path, file: DiskFile) -> None:
    """A whole block that is not the last one written there, as after a lost write, is not taken for it."""
    file.write(0, block(0))
    before = path.read_bytes()
    file.write(0, block(1))
    path.write_bytes(before)
    assert not file.read(0, blank())
