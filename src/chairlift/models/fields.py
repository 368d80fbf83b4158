"""Typed reading of settings that come from outside: a Hugging Face config, or GGUF metadata."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from chairlift.errors import ModelError

MAX_JSON_BYTES = 64 * 2**20
_REQUIRED: Any = object()
D = TypeVar("D")  # the type of a default, e.g. None
T = TypeVar("T")


def printable(text: str) -> str:
    """Text with escapes in place of line ends and control characters: names in a file are hostile too."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException) -> str:
    """What an error of some library says, shortened, in one line."""
    return printable(" ".join(str(error).split()) or type(error).__name__)[:200]


class Fields:
    """A mapping whose values are checked as they are read. JSON's null counts as absent.

    Each reader returns ``default`` for an absent key, and raises `ModelError`, naming file, key and value, for a key
    that is absent without a default or whose value is of another type.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def fail(self, message: str) -> ModelError:
        return ModelError(printable(f"{self.where}: {message}"))

    def __contains__(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def raw(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.fail(f"{self.prefix}{key} is missing")
        return default

    def whole(self, key: str, default: int | D = _REQUIRED, low: int = 0, high: int = 2**31 - 1) -> int | D:
        """An integer from ``low`` to ``high``. GGUF allows an array, one value a layer; all must be equal then."""
        value = self.raw(key, default)
        if isinstance(value, np.ndarray) and len(value):
            if (value != value[0]).any():
                raise self.fail(f"{self.prefix}{key} differs from layer to layer, which is not supported")
            value = value[0].item()
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        if value is default and not isinstance(value, int):  # e.g. None
            return value
        raise self.wrong(key, value, f"a whole number from {low} to {high}")

    def real(self, key: str, default: float | D = _REQUIRED) -> float | D:
        """A finite number, as a float."""
        value = self.raw(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value):
            return float(value)
        if value is default and not isinstance(value, (int, float)):
            return value
        raise self.wrong(key, value, "a finite number")

    def flag(self, key: str, default: bool | D = _REQUIRED) -> bool | D:
        return self._of(bool, key, default, "true or false")

    def text(self, key: str, default: str | D = _REQUIRED) -> str | D:
        return self._of(str, key, default, "a string")

    def section(self, key: str, default: Any = _REQUIRED) -> Fields:
        """A nested object; absent with a default of None gives an empty one."""
        value = self._of(dict, key, {} if default is None else default, "an object")
        return Fields(value, f"{self.where}: {key}")

    def _of(self, kind: type[T], key: str, default: Any, wanted: str) -> T | Any:
        value = self.raw(key, default)
        if value is not default and not isinstance(value, kind):
            raise self.wrong(key, value, wanted)
        return value

    def wrong(self, key: str, value: Any, wanted: str) -> ModelError:
        shown = f"an array of {len(value)} values" if hasattr(value, "__len__") and not isinstance(value, str) else None
        return self.fail(f"{self.prefix}{key} must be {wanted}, got {shown or format(repr(value), '.80')}")


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most ``limit`` bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelError(f"{path}: is {size} bytes long; at most {limit} are allowed")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The object in JSON bytes. A key that appears twice is an error: readers disagree about which one counts."""
    try:
        value = json.loads(data, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{where}: must hold a JSON object, got {type(value).__name__}")
    return value


@contextlib.contextmanager
def foreign_errors(message: str) -> Iterator[None]:
    """Turns whatever a library raises on hostile input into a `ModelError`: also a panic in Rust code, which is no
    ordinary exception."""
    try:
        yield
    except (ModelError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelError(f"{message}: {one_line(error)}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r:.80} appears twice")
    return values
