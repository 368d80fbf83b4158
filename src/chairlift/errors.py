"""Errors that reach a person. Each says what was wrong, which value, and what to change."""

from __future__ import annotations


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


class RequestRefused(ChairliftError):
    """A request that can never run in this configuration (too long, too many samples)."""


class GenerationFailed(ChairliftError):
    """The engine could not finish a request that was sound; other requests go on."""


class EngineDead(ChairliftError):
    """The engine process has ended, so the request cannot be answered."""
