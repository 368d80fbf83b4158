"""The shapes of OpenAI's answers: whole, and as chunks of a stream. A chunk also says how many tokens it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.core.plan import TokenLogprob
from chairlift.server.service import Usage
from chairlift.server.text import Delta, Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class Format:
    """How one endpoint puts things; the endpoints' own classes are below."""

    object = ""
    chunk_object = ""

    def __init__(
        self, request_id: str, model: str, created: int, tokenizer: Tokenizer, *, logprobs: bool, include_usage: bool
    ) -> None:
        self._id = request_id
        self._model = model
        self._created = created
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self.include_usage = include_usage

    def whole(self, choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        body = self._head(self.object)
        body["choices"] = [self._whole_choice(index, delta) for index, delta in enumerate(choices)]
        body["usage"] = usage_body(usage)
        return body

    def chunk(self, choice: int, delta: Delta) -> dict[str, Any]:
        body = self._head(self.chunk_object)
        body["choices"] = [self._chunk_choice(choice, delta)]
        if self.include_usage:
            body["usage"] = None
        body["chairlift"] = {"tokens": len(delta.token_ids)}
        return body

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head(self.chunk_object) | {"choices": [], "usage": usage_body(usage)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError


class CompletionFormat(Format):
    object = chunk_object = "text_completion"

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._legacy_logprobs(delta) if self._logprobs else None,
            "finish_reason": _reason(delta),
        }

    _chunk_choice = _whole_choice

    def _legacy_logprobs(self, delta: Delta) -> dict[str, Any]:
        text = self._tokenizer.token_text
        tops: list[dict[str, float]] = []
        for entry in delta.logprobs:
            top: dict[str, float] = {}
            for token, logprob in ((entry.token_id, entry.logprob), *entry.top):
                top.setdefault(text(token), clamp(logprob))  # of two tokens with one text, the likelier or the chosen
            tops.append(top)
        return {
            "tokens": [text(entry.token_id) for entry in delta.logprobs],
            "token_logprobs": [clamp(entry.logprob) for entry in delta.logprobs],
            "top_logprobs": tops,
            "text_offset": delta.offsets,
        }


class ChatFormat(Format):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._introduced: set[int] = set()  # choices whose role has been told

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._chat_logprobs(delta.logprobs) if self._logprobs else None,
            "finish_reason": _reason(delta),
        }

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        gained: dict[str, Any] = {"content": delta.text}
        if index not in self._introduced:
            self._introduced.add(index)
            gained = {"role": "assistant"} | gained
        return {
            "index": index,
            "delta": gained,
            "logprobs": self._chat_logprobs(delta.logprobs) if self._logprobs and delta.logprobs else None,
            "finish_reason": _reason(delta),
        }

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = []
        for entry in entries:
            top = [self._token(token, logprob) for token, logprob in entry.top]
            content.append(self._token(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token),
            "bytes": list(self._tokenizer.token_bytes(token)),
            "logprob": clamp(logprob),
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def clamp(logprob: float) -> float:
    """A log-probability as a JSON number."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # also for NaN, which compares as false


def _reason(delta: Delta) -> str | None:
    return None if delta.finish_reason is None else delta.finish_reason.value
