"""What clients may send: the bodies of /v1/completions and /v1/chat/completions.

Nothing is ignored in silence. A field is one of three: supported; known to OpenAI or vLLM clients but not
supported, which is accepted with a value that asks for nothing and refused by name with any other; or unknown, and
refused. Types and structure are checked here; the ranges of sampling parameters belong to `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from chairlift.core.request import SamplingParams
from chairlift.errors import ParameterError

MAX_PROMPTS = 256
MAX_CHOICES = 512  # prompts times n
MAX_MESSAGES = 4096
MAX_STOP_LENGTH = 256  # characters of a stop string

_ANY = object()  # any value asks for nothing here

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "user": (_ANY,),
    "metadata": (_ANY,),
    "safety_identifier": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_logprobs": (),
    "priority": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "echo": (False,),
    "add_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
}
"""Known, not supported, by the values that ask for nothing (null always does)."""

_NEUTRAL_COMPLETION = {"suffix": ("",)}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
_NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "tool_calls": ([],),
    "function_call": (),
    "reasoning_content": (),
    "reasoning": (),
}


def drop_neutral(data: Any, known: dict[str, tuple[Any, ...]]) -> Any:
    """The data without known fields whose value asks for nothing. Raises ParameterError for any other value."""
    if not isinstance(data, dict):
        return data
    rest = {}
    for name, value in data.items():
        if name not in known:
            rest[name] = value
        elif value is not None and _ANY not in known[name] and not any(_same(value, other) for other in known[name]):
            allowed = ", ".join(repr(other) for other in known[name])
            hint = f"leave it out, or send {allowed}" if allowed else "leave it out"
            raise ParameterError(name, f"{name} is not supported by this server; {hint}")
    return rest


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _check_unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    return value


Text = Annotated[str, AfterValidator(_check_unicode)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _check_stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(stop, str) for stop in strings):
        raise ParameterError("stop", "stop must be a string or a list of strings")
    if any(len(stop) > MAX_STOP_LENGTH for stop in strings):
        raise ParameterError("stop", f"a stop string may have at most {MAX_STOP_LENGTH} characters")
    return value


def _check_logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ParameterError("logit_bias", "logit_bias must be an object of token ids and numbers from -100 to 100")
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise ParameterError("logit_bias", f"the keys of logit_bias must be token ids, got {token!r}")
    return value


def _optional(check: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else check(value))


class Sampling(Body):
    """What completions and chat have in common. The first group is OpenAI's, the second vLLM's."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Annotated[Text | list[Text] | None, _optional(_check_stop)] = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _optional(_check_logit_bias)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return drop_neutral(data, _NEUTRAL)

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "stream_options is only allowed together with stream: true")
        return self

    @property
    def limit_param(self) -> str | None:
        """The name under which the client asked for a number of tokens, if it did."""
        return None if self.max_tokens is None else "max_tokens"

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Raises ParameterError, naming the parameter and the allowed range."""
        names = Sampling.model_fields.keys() - {"model", "stream", "stream_options", "logit_bias"}
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams(**(given | more))


def _check_prompt(value: Any) -> Any:
    """One of: a string, a list of strings, token ids, a list of lists of token ids."""

    def tokens(value: Any) -> bool:
        return isinstance(value, list) and all(type(token) is int for token in value)

    if isinstance(value, str) or (value and tokens(value)):
        return value
    if not isinstance(value, list) or not (
        all(isinstance(prompt, str) for prompt in value) or all(tokens(prompt) for prompt in value)
    ):
        raise ParameterError(
            "prompt", "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise ParameterError("prompt", f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(value)}")
    return value


class CompletionRequest(Sampling):
    """POST /v1/completions. max_tokens defaults to 16, as with OpenAI."""

    prompt: Annotated[Text | list[Text] | list[int] | list[list[int]], BeforeValidator(_check_prompt)]
    logprobs: int | None = None
    best_of: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_here(cls, data: Any) -> Any:
        return drop_neutral(data, _NEUTRAL_COMPLETION)

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise ParameterError("best_of", f"best_of other than n ({n}) is not supported, got {self.best_of}")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def params(self) -> SamplingParams:
        more = {} if self.logprobs is None else {"logprobs": self.logprobs}
        params = self.sampling_params(**more)
        if params.n * len(self.prompts) > MAX_CHOICES:
            raise ParameterError("n", f"n times the number of prompts must be at most {MAX_CHOICES}")
        return params


class TextPart(Body):
    type: Literal["text"]
    text: Text


def _check_content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"only parts of type 'text' are supported, got {str(kind)[:40]!r}")
    return value


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | list[TextPart], BeforeValidator(_check_content)]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        try:
            return drop_neutral(data, _NEUTRAL_MESSAGE)
        except ParameterError as error:
            raise ValueError(str(error)) from None  # pydantic knows which message it was

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it. "developer" is OpenAI's newer name for "system"."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(Sampling):
    """POST /v1/chat/completions. Without max_tokens it generates up to the context's end."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_here(cls, data: Any) -> Any:
        return drop_neutral(data, _NEUTRAL_CHAT)

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs", "top_logprobs is only allowed together with logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ParameterError(
                "max_tokens", "max_tokens and max_completion_tokens mean the same and differ; send one of them"
            )
        return self

    @property
    def limit_param(self) -> str | None:
        return super().limit_param if self.max_completion_tokens is None else "max_completion_tokens"

    def params(self) -> SamplingParams:
        more: dict[str, Any] = {"logprobs": (self.top_logprobs or 0)} if self.logprobs else {}
        renamed = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            more["max_tokens"] = self.max_completion_tokens
            renamed["max_tokens"] = "max_completion_tokens"
        elif self.max_tokens is None:
            more["max_tokens"] = None
        try:
            return self.sampling_params(**more)
        except ParameterError as error:
            name = renamed.get(error.param, error.param)
            raise ParameterError(name, str(error).replace(error.param, name)) from None
