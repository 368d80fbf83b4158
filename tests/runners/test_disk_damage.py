"""The swap file after damage and crashes: what is read is right, or it is refused."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from chairlift import log
from chairlift.errors import ConfigError
from chairlift.runners import disk
from chairlift.runners.disk import DiskFile

BYTES = 1000
NUM_BLOCKS = 12
SIZE = 8192 + NUM_BLOCKS * 4096
DATA = 8192  # where the blocks begin
MODEL = b"a model"


def opened(path: Path, fingerprint: bytes = MODEL) -> DiskFile:
    return DiskFile.open(path, SIZE, BYTES, fingerprint)


def data_of(content: bytes, size: int = BYTES) -> NDArray[np.uint8]:
    """What hashes to ``content``, as far as these tests are concerned."""
    return np.frombuffer(random.Random(content).randbytes(size), np.uint8)


def name(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=32).digest()


def check_whole(file: DiskFile) -> int:
    """Every block that the file names is right, or refused and zeros; returns how many are right."""
    right = 0
    contents = file.contents()
    assert len({block for block, _ in contents}) == len(contents)
    for block, content in contents:
        out = np.full(BYTES, 7, np.uint8)
        if file.read(block, out, content):
            assert (out == data_of(content)).all()
            right += 1
        else:
            assert not out.any()
    return right


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


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with every block written, each third without a name."""
    path = tmp_path_factory.mktemp("image") / "swap"
    file = opened(path)
    assert file.num_blocks == NUM_BLOCKS
    for i in range(NUM_BLOCKS):
        file.write(i, data_of(name(i)), name(i) if i % 3 else b"")
    file.close()
    return path.read_bytes()


def flip(image: bytearray, rng: random.Random, low: int, high: int) -> None:
    for _ in range(rng.choice([1, 1, 2, 20])):
        image[rng.randrange(low, high)] ^= 1 << rng.randrange(8)


def swap_stretch(image: bytearray, rng: random.Random, start: int, stride: int) -> None:
    a, b = (start + stride * i for i in rng.sample(range(NUM_BLOCKS), 2))
    image[a : a + stride], image[b : b + stride] = image[b : b + stride], image[a : a + stride]


def swap_both(image: bytearray, rng: random.Random) -> None:
    state = rng.getstate()
    swap_stretch(image, rng, DATA, 4096)
    rng.setstate(state)
    swap_stretch(image, rng, 4096, 64)


def scribble(image: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(image))
    image[at : at + rng.randrange(1, 9000)] = rng.randbytes(min(len(image) - at, rng.randrange(1, 9000)))


DAMAGES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "header": lambda image, rng: flip(image, rng, 0, 116),
    "table": lambda image, rng: flip(image, rng, 4096, 4096 + 64 * NUM_BLOCKS),
    "data": lambda image, rng: flip(image, rng, DATA, len(image)),
    "anywhere": lambda image, rng: flip(image, rng, 0, len(image)),
    "truncated": lambda image, rng: image.__delitem__(slice(rng.randrange(len(image)), None)),
    "appended": lambda image, rng: image.extend(rng.randbytes(rng.randrange(1, 10_000))),
    "blocks swapped": lambda image, rng: swap_stretch(image, rng, DATA, 4096),
    "records swapped": lambda image, rng: swap_stretch(image, rng, 4096, 64),
    "blocks and records swapped": swap_both,
    "scribbled": scribble,
    "shifted": lambda image, rng: image.insert(rng.randrange(16, len(image)), rng.randrange(256)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged(tmp_path: Path, image: bytes, lines: list[str], damage: str) -> None:
    """Forty random cases of each kind: opening says in one line what is wrong, or all that is named is checked."""
    path = tmp_path / "swap"
    outcomes = set()
    for seed in range(40):
        rng = random.Random(f"{damage} {seed}")
        damaged = bytearray(image)
        DAMAGES[damage](damaged, rng)
        path.write_bytes(damaged)
        lines.clear()
        try:
            file = opened(path)
        except ConfigError as error:
            assert not damaged.startswith(image[:16]) and "is not a swap file" in str(error)
            assert path.read_bytes() == damaged
            continue
        assert len(lines) <= 1
        if lines and "starts empty" in lines[0]:
            assert file.contents() == []
            outcomes.add("anew")
        else:
            right = check_whole(file)
            outcomes.add("some right" if right else "none right")
            assert right < 8 or damaged[:100] == image[:100]
        file.write(0, data_of(b"new"), b"new")  # and it works again
        assert file.read(0, np.empty(BYTES, np.uint8), b"new")
        file.close()
    if damage in ("header", "truncated", "appended", "shifted"):
        assert outcomes == {"anew"}
    else:
        assert "some right" in outcomes


def test_each_bit_of_a_record(tmp_path: Path, image: bytes) -> None:
    """No bit of a record may change without its block being refused or forgotten, the padding included."""
    path = tmp_path / "swap"
    at = 4096 + 64
    for bit in range(512):
        damaged = bytearray(image)
        damaged[at + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        file = opened(path)
        assert 1 not in dict(file.contents())
        assert check_whole(file) == 7
        assert not file.read(1, np.empty(BYTES, np.uint8))
        file.close()


def test_one_line_for_damaged_records(tmp_path: Path, image: bytes, lines: list[str]) -> None:
    path = tmp_path / "swap"
    path.write_bytes(image[:4096] + b"\xff" * 200 + image[4296:])
    file = opened(path)
    assert len(lines) == 1 and "damaged records" in lines[0]
    assert check_whole(file) == 8 - 2  # of the first four, two had names
    file.close()


def test_records_in_each_others_place(tmp_path: Path, image: bytes) -> None:
    """They are not even named, since the blocks would have to be read to find that out."""
    path = tmp_path / "swap"
    path.write_bytes(image[: 4096 + 64] + image[4096 + 128 : 4096 + 192] + image[4096 + 64 : 4096 + 128] + image[4288:])
    file = opened(path)
    assert [block for block, _ in file.contents()] == [4, 5, 7, 8, 10, 11]
    file.close()


def test_a_later_format(tmp_path: Path, image: bytes, lines: list[str]) -> None:
    path = tmp_path / "swap"
    header = image[:16] + b"\2" + image[17:100]
    path.write_bytes(header + disk._header_checksum(header) + image[116:])
    file = opened(path)
    assert file.contents() == [] and len(lines) == 1 and "format 2 instead of 1" in lines[0]
    file.close()


def test_crash_before_the_record(tmp_path: Path, image: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old name goes before the old data does, so that nobody counts on the block after the restart."""
    path = tmp_path / "swap"
    path.write_bytes(image)
    real = os.pwrite

    class Crash(BaseException):
        pass

    def crash(fd: int, data: bytes, at: int) -> int:
        if len(data) == BYTES:
            raise Crash
        return real(fd, data, at)

    file = opened(path)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(os, "pwrite", crash)
        file.write(1, data_of(b"new"), b"new")
    file.close()
    file = opened(path)
    assert 1 not in dict(file.contents())
    file.close()


def test_another_models_file(tmp_path: Path, image: bytes, lines: list[str]) -> None:
    path = tmp_path / "swap"
    path.write_bytes(image)
    file = opened(path, b"another model")
    assert file.contents() == [] and len(lines) == 1
    assert not any(file.read(i, np.empty(BYTES, np.uint8)) for i in range(NUM_BLOCKS))
    file.close()
    assert image[DATA : DATA + BYTES] not in path.read_bytes()


def test_blocks_of_another_file(tmp_path: Path, image: bytes, lines: list[str]) -> None:
    """Records and blocks from a file with another secret are not believed in this one."""
    path = tmp_path / "swap"
    opened(path).close()
    fresh = path.read_bytes()
    path.write_bytes(fresh[:4096] + image[4096:])
    file = opened(path)
    assert file.contents() == [] and len(lines) == 1
    file.close()


def test_power_loss(tmp_path: Path, image: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has taken any of the sectors written, in any order. Older blocks are whole or refused, too."""
    writes: list[tuple[int, bytes]] = []
    path = tmp_path / "swap"
    path.write_bytes(image)
    rng = random.Random(0)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_put", lambda fd, data, at: writes.append((at, bytes(data))))
        file = opened(path)
        for i in range(40):
            file.write(rng.randrange(NUM_BLOCKS), data_of(name(100 + i)), name(100 + i))
        file.close()
    sectors = [
        (at + cut, data[cut : cut + 512 - (at + cut) % 512])
        for at, data in writes
        for cut in [0, *range(512 - at % 512, len(data), 512)]
    ]
    found: set[bytes] = set()
    for _ in range(150):
        lost = rng.random()
        after = bytearray(image)
        for at, sector in sectors:
            if rng.random() > lost:
                after[at : at + len(sector)] = sector
        path.write_bytes(after)
        file = opened(path)
        check_whole(file)
        found.update(content for _, content in file.contents())
        file.close()
    assert found & {name(i) for i in range(NUM_BLOCKS)} and found & {name(100 + i) for i in range(40)}


@pytest.mark.parametrize("step", range(5))
def test_crash_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Whatever the first start left behind, the second makes a good file of it, unasked."""

    class Crash(BaseException):
        pass

    def crash(*args: object) -> None:
        raise Crash

    path = tmp_path / "swap"
    real = os.pwrite
    with monkeypatch.context() as patch, pytest.raises(Crash):
        if step == 0:
            patch.setattr(os, "pwrite", crash)
        elif step == 1:
            patch.setattr(os, "fsync", crash)
        elif step == 2:
            patch.setattr(os, "posix_fallocate", crash)
        else:  # at the header, or in the zeros that come before it where space cannot be reserved
            patch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data, at) if len(data) != 116 else crash())
            if step == 4:
                patch.delattr(os, "posix_fallocate")
        opened(path)
    file = opened(path)
    assert file.contents() == []
    file.write(0, data_of(b"new"), b"new")
    file.close()
    file = opened(path)
    assert check_whole(file) == 1
    file.close()


WRITER = """
import random, sys
from pathlib import Path
import numpy as np
from chairlift.runners.disk import DiskFile

path, size, block_bytes, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
file = DiskFile.open(path, size, block_bytes, b"a model")
rng = random.Random(seed)
print("writing", flush=True)
while True:
    content = rng.randbytes(32)
    data = np.frombuffer(random.Random(content).randbytes(block_bytes), np.uint8)
    file.write(rng.randrange(file.num_blocks), data, content)
"""


def test_killed_while_writing(tmp_path: Path, lines: list[str]) -> None:
    """kill -9 at twenty random moments, the file carried on from one to the next."""
    path, size, block_bytes = tmp_path / "swap", 2**21, 100_000
    rng = random.Random(1)
    named = refused = 0
    for seed in range(20):
        command = [sys.executable, "-c", WRITER, str(path), str(size), str(block_bytes), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
            time.sleep(rng.random() * 0.04)
            writer.send_signal(signal.SIGKILL)
        file = DiskFile.open(path, size, block_bytes, MODEL)
        for block, content in file.contents():
            out = np.empty(block_bytes, np.uint8)
            named += 1
            if file.read(block, out, content):
                assert (out == data_of(content, block_bytes)).all()
            else:
                refused += 1
        file.close()
    assert named > 20  # and hardly one is refused, since its record goes first
    assert refused == 0
    assert lines == []
