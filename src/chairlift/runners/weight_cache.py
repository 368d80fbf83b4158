"""`WeightCache`: packed weights in a file, so that the next start reads them instead of packing.

| bytes     | what they hold                                                          |
|-----------|-------------------------------------------------------------------------|
| 0 .. 4096 | `_HEADER` and its checksum, then zeros                                  |
| the rest  | the packed matrices, as `_native.Model.packed` has them, to the file's end |

The key in the header stands for all on which these bytes depend: the model's files, the format that each tensor gets
(--weights, --quantization), and the code that packs. A file with another key, or that is not whole, is never used, but
written anew. Who can write here can also change the models beside it; so the checksums are against accidents, not
against malice.

There is one file for each place of a model and each way to pack it, so a model that changes replaces its own. Files
that were used longest ago make room for others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from chairlift import _native, log
from chairlift.config import EngineConfig, cache_dir
from chairlift.log import short_bytes
from chairlift.models.fields import printable
from chairlift.models.spec import Checkpoint, SourceFile, TensorType
from chairlift.versions import installed

_MAGIC = b"CHAIRLIFT PACK\r\n"  # the line end shows what a transfer as text would do
_VERSION = 1
_HEADER = struct.Struct("<16sI32sQQ")  # magic, version, key, bytes and checksum of the matrices
_CHECKSUM = 16
_PAGE = 4096
_LEAST = 32 * 2**20  # bytes of weights that are worth a file: fewer are packed in less time than anybody notices
_PIECE = 16 * 2**20  # bytes written at once, between looks at whether to stop
_SAMPLE = 4096  # bytes at each end of a tensor that tell it from another
_SUFFIX = ".packed"
_log = log.get("weights")


class _Unusable(Exception):
    """Why a file is not used."""


def folder() -> Path:
    """Where the files are kept."""
    return cache_dir() / "packed"


def content_digest(checkpoint: Checkpoint, types: Mapping[str, TensorType]) -> blake2b:
    """Of the code that runs a model, its kernels included, of the model as far as can be told at a glance, and of the
    formats that its tensors have in memory."""
    digest = blake2b(Path(str(_native.__file__)).read_bytes(), digest_size=32)
    digest.update(repr((installed(), checkpoint.spec)).encode())
    for name, tensor in checkpoint.tensors.items():  # in the order in which they lie in memory
        digest.update(repr((name, tensor.type, types[name], tensor.shape)).encode())
        digest.update(tensor.data[:_SAMPLE].tobytes())  # all of it would take as long as loading it
        digest.update(tensor.data[-_SAMPLE:].tobytes())
    return digest


class WeightCache:
    """The file for one model, packed in one way. Made by `of`; used by one start.

    Attributes:
        path: the file.
        hit: whether `read` found the weights in it.
    """

    def __init__(self, path: Path, key: bytes, sources: tuple[SourceFile, ...], most: int) -> None:
        self.path = path
        self.hit = False
        self._key = key
        self._sources = sources
        self._most = most
        self._name = printable(str(path))
        self._writer: threading.Thread | None = None
        self._stopped = threading.Event()

    @classmethod
    def of(cls, checkpoint: Checkpoint, types: Mapping[str, TensorType], config: EngineConfig) -> WeightCache | None:
        """For tensors packed as ``types`` says. None if there is to be no file: switched off, a model without files, or
        one of which it is not certain what is in them, since they change, or did so just now."""
        sources = checkpoint.files
        if not config.weight_cache or not sources or not all(source.settled for source in sources):
            return None
        if not _unchanged(sources):
            return None
        digest = content_digest(checkpoint, types)
        for source in sources:
            digest.update(repr((source.path.name, source.size, source.mtime_ns, source.ctime_ns)).encode())
        place = blake2b(repr((str(sources[0].path), sorted(types.items()))).encode(), digest_size=8).hexdigest()
        name = re.sub(r"[^\w.-]", "_", checkpoint.name)[-80:]
        path = folder() / f"{name}-{place}{_SUFFIX}"
        return cls(path, digest.digest(), sources, int(config.weight_cache * 2**30))

    def read(self, model: _native.Model) -> bool:
        """Sets the model's matrices, which are laid out, and returns True; or sets none. Why a file that is there is
        not used is told in one line of the log."""
        try:
            file = _open(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.warning("packed weights %s cannot be read (%s)", self._name, error.strerror)
            return False
        except _Unusable as error:
            return self._ignore(error)
        try:
            checksum = _read_header(file, self._key, model.packed().nbytes)
            if not model.read_packed(file, _PAGE, checksum):
                raise _Unusable("it is damaged")
            with contextlib.suppress(OSError):  # a folder that is read-only
                os.utime(file)  # the last use
        except _Unusable as error:
            return self._ignore(error)
        finally:
            os.close(file)
        _log.info("packed weights read from %s", self._name)
        self.hit = True
        return True

    def _ignore(self, why: _Unusable) -> bool:
        _log.warning("packed weights %s are not used, and written anew: %s", self._name, why)
        return False

    def write(self, model: _native.Model) -> None:
        """Keeps the model's matrices, which are set, in a thread in the background."""
        image = model.packed()
        size = _PAGE + image.nbytes
        if image.nbytes < _LEAST:
            return
        if size > self._most:
            wanted = math.ceil(size / 2**30)
            _log.info("packed weights take %s; --weight-cache %d would keep them", short_bytes(size), wanted)
            return
        checksum = model.packed_checksum()
        header = _HEADER.pack(_MAGIC, _VERSION, self._key, image.nbytes, checksum)
        head = (header + _header_checksum(header)).ljust(_PAGE, b"\0")

        def write() -> None:
            try:
                self._write(head, image.data)
            except OSError as error:
                why = error.strerror or error
                _log.warning("packed weights cannot be kept in %s: %s (--weight-cache 0: never)", self._name, why)

        self._writer = threading.Thread(target=write, name="chairlift-weight-cache")
        self._writer.start()

    def close(self) -> None:
        """Ends the writing, if need be before it is done, which leaves no file."""
        self._stopped.set()
        if self._writer is not None:
            self._writer.join()

    def _write(self, head: bytes, image: memoryview) -> None:
        size = len(head) + len(image)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        with _only_writer(self.path.parent) as alone:
            if not alone:  # who may write the same; if not, the next start does
                return
            _make_room(self.path, size, self._most)
            try:
                if self._put(part, head, image) and _unchanged(self._sources):
                    os.replace(part, self.path)
                    _log.info("packed weights kept in %s (%s)", self._name, short_bytes(size))
            finally:
                part.unlink(missing_ok=True)

    def _put(self, part: Path, head: bytes, image: memoryview) -> bool:
        """Writes the file and brings it to the disk; False if it was stopped."""
        pieces: list[bytes | memoryview] = [head, *(image[at : at + _PIECE] for at in range(0, len(image), _PIECE))]
        with open(part, "wb", buffering=0) as file:
            for piece in pieces:
                if self._stopped.is_set():
                    return False
                if file.write(piece) != len(piece):  # in part only when there is no more room
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fdatasync(file.fileno())  # each by itself: a sync of all of it could not be stopped
        return True


def _unchanged(sources: tuple[SourceFile, ...]) -> bool:
    try:
        return all(SourceFile.of(source.path) == source for source in sources)
    except OSError:
        return False


def _open(path: Path) -> int:
    # Before it is opened, which is enough to set off some devices, or to wait for ever at a pipe.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise _Unusable("it is not a regular file")
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _read_header(file: int, key: bytes, size: int) -> int:
    """The checksum of the matrices, which take ``size`` bytes. Raises _Unusable."""
    try:
        head, found = os.pread(file, _HEADER.size + _CHECKSUM, 0), os.fstat(file).st_size
    except OSError as error:
        raise _Unusable(f"it cannot be read ({error.strerror})") from None
    if not head.startswith(_MAGIC):
        raise _Unusable("it is not a file of packed weights")
    if len(head) < _HEADER.size + _CHECKSUM:
        raise _Unusable(f"it is only {found} bytes long")
    header, seal = head[: _HEADER.size], head[_HEADER.size :]
    _, version, stored_key, stored_size, checksum = _HEADER.unpack(header)
    if version != _VERSION:
        raise _Unusable(f"it has format {version} instead of {_VERSION}")
    if seal != _header_checksum(header):
        raise _Unusable("its header is damaged")
    if stored_key != key or stored_size != size:
        raise _Unusable("it is of another model file, or packed by another version of Chairlift")
    if found != _PAGE + size:
        raise _Unusable(f"it is {found} bytes long instead of {_PAGE + size}")
    return int(checksum)


def _header_checksum(header: bytes) -> bytes:
    return blake2b(header, digest_size=_CHECKSUM, person=b"packed").digest()


@contextlib.contextmanager
def _only_writer(where: Path) -> Iterator[bool]:
    """Whether nobody else writes in this folder, and nobody else will before the block ends."""
    with open(where / ".lock", "w") as lock:  # its end frees the lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _make_room(path: Path, size: int, most: int) -> None:
    """Removes what was there, what writers left that were killed, and what was used longest ago, until a file of
    ``size`` bytes at ``path`` makes all together at most ``most``. For its one writer.

    Raises OSError if the disk would have less room left than the file takes: a cache must not be what fills it.
    """
    for part in path.parent.glob(f"*{_SUFFIX}.part"):
        part.unlink(missing_ok=True)
    files = {file: file.stat() for file in path.parent.glob(f"*{_SUFFIX}") if file.is_file()}
    sizes = {file: files[file].st_size for file in sorted(files, key=lambda file: files[file].st_mtime_ns)}
    gone = {path: sizes.pop(path, 0)}
    while sizes and size + sum(sizes.values()) > most:
        oldest = next(iter(sizes))
        gone[oldest] = sizes.pop(oldest)
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize + sum(gone.values())
    if room.f_blocks and free < 2 * size:
        raise OSError(errno.ENOSPC, f"{short_bytes(free)} are free on that disk, and they take {short_bytes(size)}")
    for file in gone:
        file.unlink(missing_ok=True)
