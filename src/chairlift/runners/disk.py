"""`DiskFile`: KV blocks in a file, for when host memory is full; as a prefix cache it outlives the engine.

| bytes                   | what they hold                                                                       |
|-------------------------|--------------------------------------------------------------------------------------|
| 0 .. 4096               | the header: `_HEADER` and its checksum                                               |
| 64 a block, whole pages | the table: each block's record, which is `_BODY` and its seal; zeros where none is   |
| whole pages a block     | the blocks                                                                           |

Nothing in the file is believed for being there. A block counts only if its checksum fits its data, its content and its
number; a record only if its seal fits; and in this run only if the seal is the one that was written or found at start.
So the writes need no flushing and may reach the disk in any order: whatever a crash leaves behind is right or refused.

The file is read and written by pread and pwrite. A memory map would be no faster, and with it a failing disk, or
somebody who cuts the file short, would kill the engine with SIGBUS; so it costs the blocks concerned. And what was
verified is the copy that is used, not a map that may change afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chairlift import log
from chairlift.errors import ConfigError
from chairlift.log import exact_bytes, short_bytes
from chairlift.models.fields import printable

MAX_CONTENT = 32  # bytes of a content hash

_MAGIC = b"CHAIRLIFT SWAP\r\n"  # the line end shows what a transfer as text would do
_VERSION = 1
_PAGE = 4096
_HEADER = struct.Struct("<16sI32sQQ32s")  # magic, version, fingerprint, block_bytes, num_blocks, secret
_BODY = struct.Struct("<B7x32s16s")  # length of the content, content, checksum of the block
_SEAL = 8
_RECORD = _BODY.size + _SEAL
_CHECKSUM = 16
_TABLE_PIECE = 2**20  # bytes of the table that are read at once
_log = log.get("disk")


class _Unusable(Exception):
    """Why the contents of a file of ours cannot be used."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things lie in a file of ``num_blocks`` blocks."""

    block_bytes: int
    num_blocks: int

    @classmethod
    def within(cls, size: int, block_bytes: int) -> _Layout:
        """The layout with most blocks that takes at most ``size`` bytes; possibly none."""
        layout = cls(block_bytes, max(0, (size - _PAGE) // (_pages(block_bytes) + _RECORD)))
        # The table fills whole pages, for which a block may have to go.
        return layout if layout.size <= size else cls(block_bytes, max(0, layout.num_blocks - 1))

    @property
    def size(self) -> int:
        return self.block(self.num_blocks)

    def record(self, block: int) -> int:
        return _PAGE + block * _RECORD

    def block(self, block: int) -> int:
        return _PAGE + _pages(self.num_blocks * _RECORD) + block * _pages(self.block_bytes)


class DiskFile:
    """An open file of KV blocks, which no other engine can open meanwhile. Made by `open`.

    Attributes:
        num_blocks: blocks it holds, numbered from 0.
        secret: 32 random bytes, as old as the file: the key of the prefix hashes, without which those of an earlier run
            could not be found again.
    """

    def __init__(self, fd: int, path: str, layout: _Layout, secret: bytes) -> None:
        self._fd = fd
        self._path = path
        self._layout = layout
        self._complaints: set[str] = set()
        self.num_blocks = layout.num_blocks
        self.secret = secret
        # Per block the seal of the record that is valid, as a number; 0 where none is.
        self._seals = array("Q", bytes(8 * layout.num_blocks))

    @classmethod
    def open(cls, path: Path, size: int, block_bytes: int, fingerprint: bytes) -> DiskFile:
        """Opens the file at ``path``, or makes it, and reserves its space.

        A file of ours whose contents cannot be used is made anew, with one line in the log.

        Args:
            size: most bytes that the file may have.
            block_bytes: bytes of a block.
            fingerprint: stands for all on which the bytes of a block depend (model, KV format, block size, ...).

        Raises ConfigError when there can be no such file: no room, no permission, a file that is not ours, ... One that
        was made here is then removed.
        """
        layout = _Layout.within(size, block_bytes)
        name = printable(str(path))
        if layout.num_blocks == 0:
            least = -(-_Layout(block_bytes, 1).size * 10**4 // 2**30) / 10**4
            raise ConfigError(
                f"--disk-swap {name} of {exact_bytes(size)} holds not one KV block, which takes "
                f"{short_bytes(block_bytes)}; give {least:.4f} GiB or more"
            )
        existed = os.path.exists(path)
        fd = _open_locked(path, name)
        try:
            return cls._load(fd, name, layout, _fingerprint(fingerprint))
        except BaseException as error:
            if isinstance(error, ConfigError) and not existed:
                _remove(path, fd)
            os.close(fd)
            raise

    @classmethod
    def _load(cls, fd: int, name: str, layout: _Layout, fingerprint: bytes) -> DiskFile:
        secret = None
        try:
            secret = _read_header(fd, name, layout, fingerprint)
        except _Unusable as error:
            _log.warning("--disk-swap %s is ignored and starts empty: it %s", name, error)
        if secret is None:
            secret = _make(fd, name, layout, fingerprint)
        else:
            _keep(fd, name, layout.size)
        file = cls(fd, name, layout, secret)
        for block, record in file._records():
            file._seals[block] = file._seal_of(block, record)
            if not file._seals[block]:
                file._complain("record", "has damaged records, which are ignored")
        return file

    def contents(self) -> list[tuple[int, bytes]]:
        """(block, content) of the blocks that have a content, by number. Their data is checked only by `read`."""
        found = []
        for block, record in self._records():
            if self._seal_of(block, record) == self._seals[block] != 0:
                length, content, _ = _BODY.unpack_from(record)
                if length:
                    found.append((block, content[:length]))
        return found

    def write(self, block: int, data: NDArray[np.uint8], content: bytes = b"") -> None:
        """Stores ``data`` [block_bytes] as that which hashes to ``content``, or without a name.

        When the disk fails, the block is lost: a later `read` refuses it.
        """
        self._check(block, data)
        if len(content) > MAX_CONTENT:
            raise ValueError(f"a content hash of {len(content)} bytes; at most {MAX_CONTENT} fit")
        self._seals[block] = 0
        body = _BODY.pack(len(content), content, self._checksum(block, data, content))
        seal = self._seal(block, body)
        try:
            # Without its record first, since the old one does not fit what is half written.
            _put(self._fd, bytes(_RECORD), self._layout.record(block))
            _put(self._fd, data.data, self._layout.block(block))
            _put(self._fd, body + seal, self._layout.record(block))
        except OSError as error:
            self._complain("write", f"cannot be written ({error.strerror}); what was to be kept there is lost")
        else:
            self._seals[block] = int.from_bytes(seal, "little")

    def read(self, block: int, out: NDArray[np.uint8], content: bytes = b"") -> bool:
        """Fills ``out`` [block_bytes] with the block; with zeros, and False, if that is not as it was written.

        Nor is it right if ``content`` is not empty and the block was written with another.
        """
        self._check(block, out)
        whole = self._read(block, out, content)
        if not whole:
            out[:] = 0
            self._complain("read", f"does not hold what was written (first seen in block {block}); it is recomputed")
        return whole

    def _read(self, block: int, out: NDArray[np.uint8], content: bytes) -> bool:
        try:
            record = os.pread(self._fd, _RECORD, self._layout.record(block))
            os.preadv(self._fd, [out.data], self._layout.block(block))
        except OSError:
            return False
        if not self._seals[block] or self._seal_of(block, record) != self._seals[block]:
            return False
        length, padded, checksum = _BODY.unpack_from(record)
        stored: bytes = padded[:length]
        return content in (b"", stored) and self._checksum(block, out, stored) == checksum

    def close(self) -> None:
        """Unlocks the file. What was written is the operating system's to bring to the disk."""
        if self._fd >= 0:
            os.close(self._fd)  # and with it goes the lock
            self._fd = -1

    def _check(self, block: int, data: NDArray[np.uint8]) -> None:
        if self._fd < 0:
            raise ValueError("the disk file is closed")
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"disk block {block} of {self.num_blocks}")
        if data.nbytes != self._layout.block_bytes:
            raise ValueError(f"a block of {data.nbytes} bytes instead of {self._layout.block_bytes}")

    def _records(self) -> Iterator[tuple[int, bytes]]:
        """(block, record) of those in the table that are not empty."""
        per_piece = _TABLE_PIECE // _RECORD
        for first in range(0, self.num_blocks, per_piece):
            count = min(per_piece, self.num_blocks - first)
            try:
                piece = os.pread(self._fd, count * _RECORD, self._layout.record(first))
            except OSError:
                continue
            words = np.frombuffer(piece, np.uint64, len(piece) // _RECORD * (_RECORD // 8)).reshape(-1, _RECORD // 8)
            for row in np.flatnonzero(words.any(axis=1)).tolist():
                yield first + row, piece[row * _RECORD : (row + 1) * _RECORD]

    def _checksum(self, block: int, data: NDArray[np.uint8], content: bytes) -> bytes:
        checksum = blake2b(digest_size=_CHECKSUM, key=self.secret, person=b"block")
        checksum.update(struct.pack("<QB", block, len(content)) + content)
        checksum.update(data.data)
        return checksum.digest()

    def _seal(self, block: int, body: bytes) -> bytes:
        number = block.to_bytes(8, "little")
        return blake2b(number + body, digest_size=_SEAL, key=self.secret, person=b"record").digest()

    def _seal_of(self, block: int, record: bytes) -> int:
        """The record's seal as a number; 0 if it does not fit."""
        body, seal = record[: _BODY.size], record[_BODY.size :]
        return int.from_bytes(seal, "little") if seal == self._seal(block, body) else 0

    def _complain(self, about: str, text: str) -> None:
        """One line for the first fault of a kind; more of them would only bury the log."""
        if about not in self._complaints:
            self._complaints.add(about)
            _log.warning("--disk-swap %s %s", self._path, text)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _fingerprint(given: bytes) -> bytes:
    """Blocks hold numbers in this machine's byte order."""
    return blake2b(given, digest_size=32, person=sys.byteorder.encode()).digest()


def _put(fd: int, data: bytes | memoryview, at: int) -> None:
    if os.pwrite(fd, data, at) != len(data):  # a file is written in part only when there is no more room
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _open_locked(path: Path, name: str) -> int:
    """The descriptor of the regular file at ``path``, made if missing, ours alone to read, write and hold."""
    try:
        # Before it is opened, which is enough to set off some devices, or to wait for ever at a pipe.
        if not stat.S_ISREG(_mode(path)):
            raise ConfigError(f"--disk-swap {name} is not a regular file; choose another path")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise ConfigError(
            f"--disk-swap {name} is in a folder that does not exist; make the folder, or give another path"
        ) from None
    except (OSError, ValueError) as error:
        raise _failed(name, "cannot be opened", error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, fd):  # whoever made it, at the same time, has removed it again
            raise BlockingIOError
        return fd
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"--disk-swap {name} is in use by another engine; give each a file of its own") from None
    except OSError as error:
        os.close(fd)
        raise _failed(name, "cannot be locked", error) from None


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove(path: Path, fd: int) -> None:
    """Removes the open file, wherever ``path`` leads to it by links."""
    with contextlib.suppress(OSError):
        if _is_at(path, fd):
            os.unlink(os.path.realpath(path))


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return stat.S_IFREG  # which it will be


def _read_header(fd: int, name: str, layout: _Layout, fingerprint: bytes) -> bytes | None:
    """The secret of a file that can be used; None for an empty file.

    Raises _Unusable for a file of ours that cannot, ConfigError for one that is not ours to overwrite.
    """
    try:
        status = os.fstat(fd)
        header = os.pread(fd, _HEADER.size + _CHECKSUM, 0)
    except OSError as error:
        raise _failed(name, "cannot be read", error) from None
    if status.st_size == 0:
        return None
    if not header.startswith(_MAGIC):
        raise ConfigError(f"--disk-swap {name} exists and is not a swap file; choose another path")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"--disk-swap {name} belongs to another user (uid {status.st_uid}); choose another path")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Unusable("could be written by others")
    if len(header) < _HEADER.size + _CHECKSUM:
        raise _Unusable(f"is only {status.st_size} bytes long")
    secret: bytes
    _, version, stored_fingerprint, block_bytes, num_blocks, secret = _HEADER.unpack_from(header)
    if version != _VERSION:
        raise _Unusable(f"has format {version} instead of {_VERSION}")
    if header[_HEADER.size :] != _header_checksum(header[: _HEADER.size]):
        raise _Unusable("has a damaged header")
    if (block_bytes, num_blocks) != (layout.block_bytes, layout.num_blocks):
        raise _Unusable(
            f"has {num_blocks} blocks of {block_bytes} bytes instead of {layout.num_blocks} of {layout.block_bytes}"
        )
    if stored_fingerprint != fingerprint:
        raise _Unusable("is of another model or of other settings")
    if status.st_size != layout.size:
        raise _Unusable(f"is {status.st_size} bytes long instead of {layout.size}")
    return secret


def _header_checksum(header: bytes) -> bytes:
    return blake2b(header, digest_size=_CHECKSUM, person=b"header").digest()


def _make(fd: int, name: str, layout: _Layout, fingerprint: bytes) -> bytes:
    """Empties the file and makes it anew; returns its secret. If that fails, the file is left empty."""
    secret = os.urandom(32)
    header = _HEADER.pack(_MAGIC, _VERSION, fingerprint, layout.block_bytes, layout.num_blocks, secret)
    try:
        os.ftruncate(fd, 0)
        os.fchmod(fd, 0o600)
        room = os.fstatvfs(fd)
        if room.f_blocks and room.f_bavail * room.f_frsize < layout.size:  # found out before others run out of room
            raise OSError(errno.ENOSPC, f"{short_bytes(room.f_bavail * room.f_frsize)} are free on that disk")
        # The magic is on disk before anything else is, so that a crash from here on leaves a file known to be ours.
        _put(fd, _MAGIC, 0)
        os.fsync(fd)
        if not _allocate(fd, layout.size):
            zeros = bytes(2**20)
            for at in range(_PAGE, layout.size, len(zeros)):
                _put(fd, zeros[: layout.size - at], at)
        _put(fd, header + _header_checksum(header), 0)
    except (OSError, OverflowError) as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        raise _no_room(name, layout.size, error) from None
    return secret


def _keep(fd: int, name: str, size: int) -> None:
    """Makes a file that is used as it is as good as a new one: private, and without holes that need room later."""
    try:
        os.fchmod(fd, 0o600)
        _allocate(fd, size)
    except OSError as error:
        raise _no_room(name, size, error) from None


def _allocate(fd: int, size: int) -> bool:
    """Takes the disk space for ``size`` bytes, whatever is there stays; False where the system cannot do that."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def _no_room(name: str, size: int, error: OSError | OverflowError) -> ConfigError:
    return ConfigError(
        f"--disk-swap {name} cannot be given its {exact_bytes(size)}: {_reason(error)}; give fewer GiB, free some, or "
        "choose another path"
    )


def _failed(name: str, what: str, error: OSError | ValueError) -> ConfigError:
    return ConfigError(f"--disk-swap {name} {what}: {_reason(error)}; choose another path, or leave --disk-swap out")


def _reason(error: Exception) -> str:
    return printable(getattr(error, "strerror", None) or str(error))
