"""The cache of packed weights: a second start reads what the first packed; nothing else is ever taken for it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chairlift import LLM, SamplingParams, _native, log
from chairlift.config import EngineConfig
from chairlift.core.plan import StepPlan
from chairlift.models import load_checkpoint
from chairlift.models.spec import Checkpoint, SourceFile, TensorType
from chairlift.runners import weight_cache
from chairlift.runners.native import NativeRunner
from chairlift.runners.weight_cache import WeightCache

HEADER = 84  # bytes, its checksum included
MATRICES = 4096  # where they begin


class Counting(_native.Model):
    """Knows which tensors were packed."""

    names: list[str]

    def set_tensor(self, name: str, *rest: Any) -> None:
        self.__dict__.setdefault("names", []).append(name)
        super().set_tensor(name, *rest)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Also for the tiny models of these tests a file is worth it."""
    monkeypatch.setenv("CHAIRLIFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(weight_cache, "_LEAST", 0)
    monkeypatch.setattr(_native, "Model", Counting)
    return tmp_path / "home"


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The warnings of the cache, whether or not the log has been set up."""
    handler, logger = _Lines(), log.get("weights")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Stands for the file that the tensors are from."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"some model")
    return path


@pytest.fixture
def checkpoint(specs: Any, tensors: Any, stored: Any, source: Path) -> Checkpoint:
    """Of matrices in q8_0, some of which do not end where the next begins."""
    spec = specs["gemma"]
    values = {name: stored(array, array.ndim == 2) for name, array in tensors(spec).items()}
    return Checkpoint("tiny", spec, values, (settled(source),))


@pytest.fixture
def floats(specs: Any, tensors: Any, stored: Any, source: Path) -> Checkpoint:
    """Of matrices in f32, for --quantization."""
    spec = specs["gemma"]
    return Checkpoint("tiny", spec, {key: stored(values) for key, values in tensors(spec).items()}, (settled(source),))


def settled(path: Path) -> SourceFile:
    """As if its last change were long ago."""
    return dataclasses.replace(SourceFile.of(path), settled=True)


def config(**given: Any) -> EngineConfig:
    return EngineConfig(**({"threads": 2, "max_num_seqs": 2, "kv_cache_memory": "1MiB", "max_model_len": 64} | given))


@dataclasses.dataclass
class Start:
    runner: NativeRunner
    packed: list[str]  # names of the matrices that were packed
    image: bytes  # all of them
    drawn: Any

    @property
    def hit(self) -> bool:
        return not self.packed


@pytest.fixture
def start(checkpoint: Checkpoint, step_item: Any) -> Callable[..., Start]:
    """Starts an engine, lets it compute a step, and waits for the file."""

    def started(of: Checkpoint | None = None, **given: Any) -> Start:
        of = of or checkpoint
        runner = NativeRunner(of, config(**given))
        runner.start()
        model: Any = runner._model
        item = step_item((5, 6, 7), params=SamplingParams(temperature=0.0, logprobs=3))
        result = runner.result(runner.submit(StepPlan(0, (item,), ())))
        if runner.weight_cache is not None and runner.weight_cache._writer is not None:
            runner.weight_cache._writer.join()
        packed = [name for name in model.names if len(of.tensors[name].shape) == 2]
        assert runner.weight_cache is None or runner.weight_cache.hit == (not packed)
        begun = Start(runner, packed, model.packed().tobytes(), (result.tokens, result.logprobs))
        runner.close()
        return begun

    return started


def kept(home: Path) -> list[Path]:
    """All files in the cache but the lock."""
    return sorted(path for path in (home / "packed").glob("*") if path.name != ".lock")


# -- what it is for


def test_the_second_start_packs_nothing_and_computes_the_same_bits(
    start: Any, home: Path, lines: list[str], checkpoint: Checkpoint
) -> None:
    first, second, without = start(), start(), start(weight_cache=0.0)
    assert first.packed == without.packed == [n for n, t in checkpoint.tensors.items() if len(t.shape) == 2]
    assert second.packed == []
    assert first.image == second.image == without.image and any(first.image)
    assert first.drawn == second.drawn == without.drawn
    assert first.runner.memory.weights == second.runner.memory.weights == without.runner.memory.weights
    (path,) = kept(home)
    assert path.stat().st_size == MATRICES + len(first.image)
    assert not lines


def test_a_real_model(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """By its GGUF file, whose rows are reordered, and with the default threshold."""
    monkeypatch.undo()
    monkeypatch.setenv("CHAIRLIFT_HOME", str(home))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2)
    hits, answers = [], []
    for _ in range(2):
        llm = LLM(smollm2_path, kv_cache_memory="64MiB", max_model_len=256)
        runner: Any = llm.engine.executor
        runner.weight_cache._writer and runner.weight_cache._writer.join()
        hits.append(runner.weight_cache.hit)
        answers.append(llm.generate(["Once upon a time", "The capital of France is"], params))
    assert hits == [False, True]
    first, second = ([output.outputs for output in answer] for answer in answers)
    assert first == second


def test_each_way_to_pack_has_its_file(start: Any, home: Path) -> None:
    assert not start().hit and not start(weights="f32").hit
    assert len(kept(home)) == 2
    assert start().hit and start(weights="f32").hit
    assert start(threads=1, isa="portable").hit  # on which packing does not depend


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_was_quantised_is_read(
    start: Any, home: Path, lines: list[str], floats: Checkpoint, quantization: str
) -> None:
    """The same bits, and no more memory."""
    first, second = start(floats, quantization=quantization), start(floats, quantization=quantization)
    without = start(floats, quantization=quantization, weight_cache=0.0)
    assert not first.hit and second.hit and not without.hit
    assert first.image == second.image == without.image and any(first.image)
    assert first.drawn == second.drawn == without.drawn
    assert first.runner.memory.weights == second.runner.memory.weights
    assert start(floats, quantization=quantization, threads=1, isa="portable").image == first.image
    assert len(kept(home)) == 1 and not lines


def test_each_quantization_has_its_file(start: Any, home: Path, lines: list[str], floats: Checkpoint) -> None:
    """And none is taken for another's, even in its place."""
    settings: list[dict[str, Any]] = [{}, {"quantization": "int8"}, {"quantization": "int4"}]
    images, paths = [], []
    for given in settings:
        begun = start(floats, **given)
        assert not begun.hit
        images.append(begun.image)
        paths += set(kept(home)) - set(paths)
    assert len(set(images)) == len(paths) == 3
    assert all(start(floats, **given).image == image for given, image in zip(settings, images, strict=True))
    assert all(start(floats, **given).hit for given in settings) and not lines
    shutil.copy(paths[1], paths[2])
    again = start(floats, quantization="int4")
    assert not again.hit and again.image == images[2] and str(paths[2]) in lines[0] and len(lines) == 1
    assert start(floats, weights="f32").hit  # what these floats are packed as in any case


def test_formats_of_one_size_are_not_mixed(checkpoint: Checkpoint) -> None:
    """Matrices that exchange their formats, in one place each and with a key each."""
    types: dict[str, TensorType] = {name: tensor.type for name, tensor in checkpoint.tensors.items()}
    found = []
    for first, second in (("q8_0", "q4_1"), ("q4_1", "q8_0")):
        cache = WeightCache.of(checkpoint, types | {"layers.0.q": first, "layers.1.q": second}, config())
        assert cache is not None
        found.append(cache)
    assert found[0].path != found[1].path and found[0]._key != found[1]._key


def test_the_order_of_tensors_is_in_the_key(checkpoint: Checkpoint) -> None:
    """They lie in memory one after the other, as the checkpoint names them."""
    types = {name: tensor.type for name, tensor in checkpoint.tensors.items()}
    backwards = dataclasses.replace(checkpoint, tensors=dict(reversed(checkpoint.tensors.items())))
    one, other = (WeightCache.of(each, types, config()) for each in (checkpoint, backwards))
    assert one is not None and other is not None
    assert one.path == other.path and one._key != other._key


def test_off(start: Any, home: Path) -> None:
    assert start(weight_cache=0.0).runner.weight_cache is None
    assert not kept(home)


def test_too_little_to_be_worth_it(start: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(start().image)
    shutil.rmtree(home)
    monkeypatch.setattr(weight_cache, "_LEAST", size + 1)
    assert not start().hit and not start().hit and not kept(home)
    monkeypatch.setattr(weight_cache, "_LEAST", size)
    assert not start().hit and start().hit


# -- what is in the way


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 16

    return change


def replace(begin: int, data: bytes) -> Callable[[bytearray], None]:
    return lambda file: file.__setitem__(slice(begin, begin + len(data)), data)


def cut(length: int) -> Callable[[bytearray], None]:
    return lambda data: data.__delitem__(slice(length, None))


def exchange(data: bytearray) -> None:
    a, b = MATRICES + 640, MATRICES + 6400
    assert data[a : a + 64] != data[b : b + 64]
    data[a : a + 64], data[b : b + 64] = data[b : b + 64], data[a : a + 64]


DAMAGES: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "magic": (flip(0), "not a file of packed weights"),
    "version": (flip(16), "format"),
    "key": (flip(20), "header is damaged"),
    "size": (flip(52), "header is damaged"),
    "checksum": (flip(60), "header is damaged"),
    "checksum of the header": (flip(HEADER - 1), "header is damaged"),
    "first number": (flip(MATRICES), "damaged"),
    "a number in the middle": (flip(MATRICES + 20_001), "damaged"),
    "last number": (flip(-1), "damaged"),
    "lines exchanged": (exchange, "damaged"),
    "zeros": (replace(MATRICES, bytes(10_000)), "damaged"),
    "cut in the matrices": (cut(30_000), "30000 bytes long"),
    "cut by a byte": (cut(-1), "bytes long"),
    "without matrices": (cut(MATRICES), "4096 bytes long"),
    "cut in the header": (cut(40), "40 bytes long"),
    "empty": (cut(0), "not a file"),
    "longer": (lambda data: data.append(0), "bytes long"),
    "another file": (lambda data: data.__setitem__(slice(None), b"GGUF" * 5000), "not a file of packed weights"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged(start: Any, home: Path, lines: list[str], damage: str) -> None:
    """One line says which file and why, and it is written anew, byte for byte as it was."""
    first = start()
    (path,) = kept(home)
    whole = path.read_bytes()
    data = bytearray(whole)
    change, why = DAMAGES[damage]
    change(data)
    path.write_bytes(data)
    second = start()
    assert not second.hit and (second.image, second.drawn) == (first.image, first.drawn)
    (line,) = lines
    assert str(path) in line and why in line
    assert path.read_bytes() == whole
    assert start().hit and len(lines) == 1


def test_the_file_of_another_model(
    start: Any, home: Path, lines: list[str], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Whole, and of the same size."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"one more  ")
    assert not start(dataclasses.replace(checkpoint, files=(settled(other),))).hit
    (path,) = kept(home)
    assert not start().hit
    (mine,) = set(kept(home)) - {path}
    shutil.copy(path, mine)
    assert not start().hit
    (line,) = lines
    assert str(mine) in line and "another model" in line
    assert start().hit


def test_not_a_file(start: Any, home: Path, lines: list[str]) -> None:
    """A folder stays as it is; a pipe, which nobody waits at, makes room."""
    start()
    (path,) = kept(home)
    path.unlink()
    path.mkdir()
    assert not start().hit
    assert "not a regular file" in lines[0] and "cannot be kept" in lines[1] and len(lines) == 2
    assert all(str(path) in line for line in lines) and kept(home) == [path]
    path.rmdir()
    os.mkfifo(path)
    assert not start().hit
    assert "not a regular file" in lines[2] and len(lines) == 3
    assert start().hit


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of the administrator, who may read and write everything."""
    administrator = os.geteuid() == 0
    if administrator:
        os.seteuid(65534)
    try:
        yield
    finally:
        if administrator:
            os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that leads nobody through a private folder."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def test_no_permission(checkpoint: Checkpoint, open_folder: Path, lines: list[str]) -> None:
    """To read the file, or to write in its folder: one line each, and the start goes on."""

    def laid_out() -> Any:
        model = _native.Model(dataclasses.asdict(checkpoint.spec), 1)
        model.lay_out([(name, tensor.type) for name, tensor in checkpoint.tensors.items()])
        return model

    def cache(path: Path) -> WeightCache:
        return WeightCache(path, bytes(32), checkpoint.files, 2**30)

    def write(path: Path) -> None:
        writer = cache(path)
        writer.write(laid_out())
        assert writer._writer is not None
        writer._writer.join()

    path = open_folder / "a.packed"
    write(path)
    assert cache(path).read(laid_out())
    path.chmod(0)
    open_folder.chmod(0o755 if os.geteuid() == 0 else 0o555)
    with as_nobody():
        assert not cache(path).read(laid_out())
        (line,) = lines
        assert str(path) in line and os.strerror(errno.EACCES) in line
        write(open_folder / "b.packed")
    assert "b.packed" in lines[1] and os.strerror(errno.EACCES) in lines[1] and len(lines) == 2
    open_folder.chmod(0o777)


def test_a_folder_that_cannot_be(start: Any, home: Path, lines: list[str]) -> None:
    home.write_text("a file")
    assert not start().hit and not start().hit
    assert len(lines) == 4 and all(os.strerror(errno.ENOTDIR) in line or "File exists" in line for line in lines)


# -- the model's own file changes


def test_a_changed_model_replaces_its_file(
    start: Any, home: Path, lines: list[str], checkpoint: Checkpoint, source: Path
) -> None:
    """Of the same size and with the same tensors, as far as samples of them show: newer, or made to look as old."""
    assert not start().hit
    for as_old in (False, True):
        before = source.stat()
        time.sleep(0.02)  # of which the clock of the file system takes note
        source.write_bytes(b"SOME MODEL")
        if as_old:
            os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (source.stat().st_mtime_ns == before.st_mtime_ns) == as_old
        changed = dataclasses.replace(checkpoint, files=(settled(source),))
        assert not start(changed).hit
        assert "another model" in lines.pop() and not lines
        assert start(changed).hit and len(kept(home)) == 1


def test_another_content_that_nothing_else_shows(
    start: Any, lines: list[str], checkpoint: Checkpoint, stored: Any, tensors: Any
) -> None:
    """As on a file system that keeps no times."""
    values = tensors(checkpoint.spec, seed=1)
    other = {name: stored(array, array.ndim == 2) for name, array in values.items()}
    start()
    assert not start(dataclasses.replace(checkpoint, tensors=other)).hit and "another model" in lines[0]


def test_a_model_that_changes_meanwhile_is_not_kept(
    start: Any, home: Path, checkpoint: Checkpoint, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WeightCache.write

    def write_late(cache: WeightCache, model: Any) -> None:
        time.sleep(0.02)
        source.write_bytes(b"SOME MODEL")
        write(cache, model)

    monkeypatch.setattr(WeightCache, "write", write_late)
    assert not start().hit and not kept(home)
    assert start().runner.weight_cache is None  # nor is one used: the file is no longer the one that was loaded


def test_a_model_that_changed_just_now_is_not_kept(
    start: Any, home: Path, checkpoint: Checkpoint, source: Path
) -> None:
    """Since another change would not show in its times where the file system's clock is coarse."""
    assert not SourceFile.of(source).settled
    assert start(dataclasses.replace(checkpoint, files=(SourceFile.of(source),))).runner.weight_cache is None
    assert not kept(home)


def test_where_checkpoints_are_from(smollm2_path: Path, tiny_checkpoint: Any, tmp_path: Path) -> None:
    (file,) = load_checkpoint(str(smollm2_path)).files
    assert file == SourceFile.of(smollm2_path) and file.settled and file.size == smollm2_path.stat().st_size
    link = tmp_path / "link"
    link.symlink_to(smollm2_path)
    assert SourceFile.of(link) == file
    folder, _ = tiny_checkpoint("llama-sharded")
    files = load_checkpoint(str(folder)).files
    assert {each.path.name for each in files} == {path.name for path in folder.glob("model*")} and len(files) > 2


# -- room


def test_what_was_used_longest_ago_makes_room(
    start: Any, home: Path, checkpoint: Checkpoint, tmp_path: Path, lines: list[str]
) -> None:
    models = []
    for name in "abc":
        path = tmp_path / f"{name}.gguf"
        path.write_text(name)
        models.append(dataclasses.replace(checkpoint, name=name, files=(settled(path),)))
    room = 2.5 * (MATRICES + len(start(models[0]).image)) / 2**30  # for two
    start(models[1], weight_cache=room)
    for age, path in zip((200, 300), kept(home), strict=True):  # a, then b
        os.utime(path, (time.time() - age,) * 2)
    start(models[2], weight_cache=room)
    assert [path.name[0] for path in kept(home)] == ["a", "c"]
    os.utime(kept(home)[1], (time.time() - 100,) * 2)
    assert start(models[0], weight_cache=room).hit  # is a use
    start(models[1], weight_cache=room)
    assert [path.name[0] for path in kept(home)] == ["a", "b"]
    assert not start(models[2], weight_cache=room / 5).hit
    assert [path.name[0] for path in kept(home)] == ["a", "b"] and not lines


def test_a_disk_with_little_room_is_left_alone(
    start: Any, home: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = MATRICES + len(start(weight_cache=0.0).image)
    for free, written in ((2 * size - 1, False), (2 * size, True)):
        room = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=1)
        monkeypatch.setattr(os, "statvfs", lambda path, room=room: room)
        assert not start().hit
        assert bool(kept(home)) == written
    assert "are free on that disk" in lines[0] and "--weight-cache" in lines[0] and len(lines) == 1
    # Nor does a file that does not come about cost another's its place.
    before = kept(home)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=1, f_blocks=1))
    assert not start(weights="f32", weight_cache=4 * size / 2**30).hit  # would fit in place of what is there
    assert kept(home) == before


# -- several processes, and their ends

PROGRAM = """
import sys, threading, time
from hashlib import sha256
from chairlift import log
from chairlift.config import EngineConfig
from chairlift.models import load_checkpoint, spec
from chairlift.runners import weight_cache
from chairlift.runners.native import NativeRunner

folder, mode = sys.argv[1:]
spec._COARSEST_CLOCK = weight_cache._LEAST = 0
log.setup("warning", "test")

class Slow(threading.Event):
    def is_set(self):
        time.sleep(0.05)
        return False

write = weight_cache.WeightCache.write

def write_slowly(cache, model):
    cache._stopped = Slow()
    write(cache, model)

if mode == "slow":
    weight_cache._PIECE = 4096
    weight_cache.WeightCache.write = write_slowly
if mode == "full":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
runner = NativeRunner(load_checkpoint(folder), EngineConfig(threads=1, kv_cache_memory="1MiB", max_model_len=64))
print("loaded", flush=True)
sys.stdin.readline()
runner.start()
if runner.weight_cache._writer:
    runner.weight_cache._writer.join()
print(runner.weight_cache.hit, sha256(runner._model.packed()).hexdigest())
"""


def process(folder: Path, mode: str = "") -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), mode], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[bool, str, str]:
    """Whether it found the weights, the hash of them, and its log."""
    out, err = process.communicate("\n", timeout=120)
    assert process.returncode == 0, err
    hit, digest = out.replace("loaded", "").split()
    return hit == "True", digest, err


def test_starts_at_the_same_time(tiny_checkpoint: Any, home: Path) -> None:
    folder, _ = tiny_checkpoint("llama")
    both = [process(folder) for _ in range(3)]
    for each in both:
        assert each.stdout is not None and each.stdout.readline() == "loaded\n"
    for each in both:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    ends = [finish(each) for each in both]
    assert len({digest for _, digest, _ in ends}) == 1 and not any(err for *_, err in ends)
    assert len(kept(home)) == 1
    assert finish(process(folder)) == (True, ends[0][1], "")


def test_one_writer_at_a_time(start: Any, home: Path, lines: list[str]) -> None:
    (home / "packed").mkdir(parents=True)
    with open(home / "packed" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not start().hit and not kept(home)
    assert not start().hit and len(kept(home)) == 1 and not lines


def test_killed_while_it_writes(tiny_checkpoint: Any, home: Path) -> None:
    """What is left behind is never taken for the file, and goes."""
    folder, _ = tiny_checkpoint("llama")
    writer = process(folder, "slow")
    assert writer.stdin is not None
    writer.stdin.write("\n")
    writer.stdin.flush()
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 2 * MATRICES for path in kept(home)):
        assert time.monotonic() < deadline and writer.poll() is None
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    (left,) = kept(home)
    assert left.suffix == ".part"
    left.rename(left.with_name("another.packed.part"))  # as if it had been of a model that never comes again
    hit, digest, err = finish(process(folder))
    assert not hit and not err
    (path,) = kept(home)
    assert path.suffix == ".packed"
    assert finish(process(folder)) == (True, digest, "")


def test_the_disk_is_full(tiny_checkpoint: Any, home: Path) -> None:
    folder, _ = tiny_checkpoint("llama")
    hit, digest, err = finish(process(folder, "full"))
    assert not hit and not kept(home)
    (line,) = err.splitlines()
    assert str(home) in line and "cannot be kept" in line
    assert finish(process(folder))[:2] == (False, digest)
    assert finish(process(folder)) == (True, digest, "")


def test_closing_ends_the_writing(
    checkpoint: Checkpoint, home: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is told to stop does not wait for the disk."""
    monkeypatch.setattr(weight_cache, "_PIECE", 1024)
    waits, goes_on = threading.Event(), threading.Event()

    class Waiting(threading.Event):
        def is_set(self) -> bool:
            waits.set()
            assert goes_on.wait(60)
            return super().is_set()

    def write_when_told(cache: WeightCache, model: Any) -> None:
        cache._stopped = Waiting()
        write(cache, model)

    write = WeightCache.write
    monkeypatch.setattr(WeightCache, "write", write_when_told)
    runner = NativeRunner(checkpoint, config())
    runner.start()
    assert waits.wait(60) and kept(home)
    threading.Timer(0.1, goes_on.set).start()
    runner.close()
    assert not kept(home) and not lines


# -- the C++ model


def test_what_cannot_be_laid_out(checkpoint: Checkpoint) -> None:
    def model() -> Any:
        return _native.Model(dataclasses.asdict(checkpoint.spec), 1)

    with pytest.raises(ValueError, match="no tensor nonsense"):
        model().lay_out([("nonsense", "f32")])
    with pytest.raises(ValueError, match="embed was laid out twice"):
        model().lay_out([("embed", "f32"), ("embed", "f32")])
    laid_out = model()
    laid_out.lay_out([("embed", "f32"), ("final_norm", "f32")])
    with pytest.raises(ValueError, match="once"):
        laid_out.lay_out([("embed", "f32")])
    embed = checkpoint.tensors["embed"]
    with pytest.raises(ValueError, match="embed was laid out for another type"):
        laid_out.set_tensor("embed", embed.type, embed.shape, embed.data)
    assert not laid_out.packed().flags.writeable
    assert laid_out.packed().nbytes == 272 * 96 * 4


def test_the_checksum_sees_each_byte(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """And the order of lines and of pieces: of 2.5 MiB, which several threads read."""
    spec = dataclasses.replace(checkpoint.spec, vocab_size=6826)
    path, rng = tmp_path / "image", np.random.default_rng(0)

    def model() -> Any:
        made = _native.Model(dataclasses.asdict(spec), 3)
        made.lay_out([("embed", "f32")])
        return made

    whole = model()
    values = rng.standard_normal((6826, 96)).astype(np.float32)
    whole.set_tensor("embed", "f32", values.shape, values.view(np.uint8).reshape(-1))
    image, checksum = whole.packed().tobytes(), whole.packed_checksum()
    assert len(image) > 2.4 * 2**20

    def reads(data: bytes | bytearray, offset: int = 0) -> bool:
        path.write_bytes(data)
        with open(path, "rb") as file:
            return model().read_packed(file.fileno(), offset, checksum)

    assert reads(image) and reads(b"x" + image, 1) and reads(image + b"x")
    assert not reads(image, 1) and not reads(image[:-1]) and not reads(b"")
    for at in (0, 2**20 - 1, 2**20, len(image) - 1, *rng.integers(0, len(image), 30).tolist()):
        data = bytearray(image)
        data[at] ^= 1 << int(rng.integers(8))
        assert not reads(data)
    mib = 2**20
    assert not reads(image[mib : 2 * mib] + image[:mib] + image[2 * mib :])
    assert not reads(image[64:128] + image[:64] + image[128:])
