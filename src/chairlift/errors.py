"""Errors that reach a person. Each says what was wrong, which value, and what to change."""

from __future__ import annotations

import reprlib


class ChairliftError(Exception):
    """Base class. ``str(error)`` is one clear line, fit to be shown to a user."""


class ConfigError(ChairliftError):
    """Settings that cannot work, alone or together."""


class ModelError(ChairliftError):
    """A model file, tokenizer or template that is missing, damaged, hostile or not supported."""


class ParameterError(ChairliftError):
    """A request parameter out of its range.

    Attributes:
        param: the parameter's name, as the client spelled it.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(ParameterError):
    """Prompt and asked output do not fit the context."""


class RequestRefused(ChairliftError):
    """A request that can never run in this configuration (too long, too many samples)."""


class GenerationFailed(ChairliftError):
    """The engine could not finish a request that was sound; other requests go on."""


class StepFailed(ChairliftError):
    """A runner could not compute a step, and can go on: what the step was to compute is lost, and so is the contents
    of all its KV blocks."""


class EngineDead(ChairliftError):
    """The engine process has ended, so the request cannot be answered."""


class NotReady(ChairliftError):
    """The server is starting; the message names the phase."""


class ModelNotFound(ChairliftError):
    """The request names a model that is not served here."""


MAX_SHOWN = 80  # characters of a value in a message


def show(value: object) -> str:
    """A value in a message: short, and soon written, whatever a client may send."""
    try:
        text = _shortener.repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxlong = _shortener.maxother = MAX_SHOWN
