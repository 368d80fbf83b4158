"""What clients may send: the bodies of /v1/completions and /v1/chat/completions.

Nothing is ignored in silence. A field is one of three: supported; known to OpenAI or vLLM clients but not
supported, which is accepted with a value that asks for nothing and refused by name with any other; or unknown, and
refused. Structure is checked here, and how much of anything there may be, always before the elements are looked at.
Types and ranges of sampling parameters are left to `SamplingParams`, whose messages name the allowed range.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, model_validator

from chairlift.core.request import MAX_LOGIT_BIAS, MAX_STOP, SamplingParams, check_count
from chairlift.errors import ParameterError, show
from chairlift.server.choices import chooses

MAX_FIELDS = 128  # of an object
MAX_PROMPTS = 256
MAX_PROMPT_TOKENS = 2**20  # of prompts given as token ids, together
MAX_CHOICES = 512  # prompts times n
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of all messages together
MAX_STOP_LENGTH = 256  # characters of a stop string
MAX_USER_LENGTH = 512  # characters of `user`

_ANY = object()  # any value asks for nothing here

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "metadata": (_ANY,),
    "safety_identifier": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_logprobs": (),
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
    if not isinstance(data, dict) or len(data) > MAX_FIELDS:  # refused by Body
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

# Checked by SamplingParams, and the priority by check_priority
Whole = Annotated[int | None, SkipValidation]
Real = Annotated[float | None, SkipValidation]
Flag = Annotated[bool | None, SkipValidation]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"holds {len(data)} parameters; at most {MAX_FIELDS} are allowed")
        return data


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _check_stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list):
        check_count("stop", len(strings), MAX_STOP, "strings")
    if not isinstance(strings, list) or not all(isinstance(stop, str) for stop in strings):
        raise ParameterError("stop", f"stop must be a string or a list of strings, got {show(value)}")
    if any(len(stop) > MAX_STOP_LENGTH for stop in strings):
        raise ParameterError("stop", f"a stop string may have at most {MAX_STOP_LENGTH} characters")
    return value


def _check_logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ParameterError(
            "logit_bias", f"logit_bias must be an object of token ids and numbers from -100 to 100, got {show(value)}"
        )
    check_count("logit_bias", len(value), MAX_LOGIT_BIAS, "tokens")
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise ParameterError("logit_bias", f"the keys of logit_bias must be token ids, got {show(token)}")
    return value


def _optional(check: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else check(value))


def _check_user(value: Any) -> Any:
    if not isinstance(value, str) or len(value) > MAX_USER_LENGTH:
        raise ParameterError(
            "user", f"user must be a string of at most {MAX_USER_LENGTH} characters, got {show(value)}"
        )
    return value


class Sampling(Body):
    """What completions and chat have in common. The first group is OpenAI's, the second vLLM's, the third our own."""

    model: str | None = None
    n: Whole = None
    max_tokens: Whole = None
    temperature: Real = None
    top_p: Real = None
    stop: Annotated[Text | list[Text] | None, _optional(_check_stop)] = None
    seed: Whole = None
    presence_penalty: Real = None
    frequency_penalty: Real = None
    logit_bias: Annotated[dict[str, float] | None, SkipValidation, _optional(_check_logit_bias)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[Text | None, _optional(_check_user)] = None

    top_k: Whole = None
    min_p: Real = None
    repetition_penalty: Real = None
    min_tokens: Whole = None
    ignore_eos: Flag = None
    stop_token_ids: Annotated[list[int] | None, SkipValidation] = None
    skip_special_tokens: Flag = None
    include_stop_str_in_output: Flag = None
    best_of: Whole = None
    use_beam_search: Flag = None
    length_penalty: Real = None
    priority: Whole = None

    ttft_ms: Real = None
    deadline_ms: Real = None

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
        others = {"model", "stream", "stream_options", "logit_bias", "user", "priority"}
        names = Sampling.model_fields.keys() - others
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        params = SamplingParams(**(given | more))
        if self.stream and (params.use_beam_search or chooses(params)):
            name = "use_beam_search" if params.use_beam_search else "best_of"
            raise ParameterError(
                name,
                f"{name} cannot be streamed, since it is only known at the end which tokens are returned; "
                f"leave out stream or {name}",
            )
        return params


def _check_prompt(value: Any) -> Any:
    """One of: a string, a list of strings, token ids, a list of lists of token ids."""

    def tokens(value: Any) -> bool:
        return isinstance(value, list) and all(type(token) is int for token in value)

    if isinstance(value, str):
        return _check_prompt_text("prompt", value)
    if isinstance(value, list) and value and isinstance(value[0], int):
        check_count("prompt", len(value), MAX_PROMPT_TOKENS, "tokens")
        if tokens(value):
            return value
    elif isinstance(value, list):
        if not 1 <= len(value) <= MAX_PROMPTS:
            raise ParameterError("prompt", f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(value)}")
        if all(isinstance(prompt, str) for prompt in value):
            return [_check_prompt_text(f"prompt[{i}]", prompt) for i, prompt in enumerate(value)]
        if all(isinstance(prompt, list) for prompt in value):
            check_count("prompt", sum(map(len, value)), MAX_PROMPT_TOKENS, "tokens")
            if all(map(tokens, value)):
                return value
    raise ParameterError(
        "prompt",
        f"prompt must be a string, a list of strings, a list of token ids, or a list of such lists, got {show(value)}",
    )


def _check_prompt_text(param: str, text: str) -> str:
    try:
        return _check_unicode(text)
    except ValueError as error:
        raise ParameterError(param, f"{param}: {error}") from None


class CompletionRequest(Sampling):
    """POST /v1/completions. max_tokens defaults to 16, as with OpenAI."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation, BeforeValidator(_check_prompt)]
    logprobs: Whole = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_here(cls, data: Any) -> Any:
        return drop_neutral(data, _NEUTRAL_COMPLETION)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def params(self) -> SamplingParams:
        """Raises as `sampling_params` does."""
        params = self.sampling_params(**({} if self.logprobs is None else {"logprobs": self.logprobs}))
        if params.width * len(self.prompts) > MAX_CHOICES:
            name = "n" if params.best_of is None else "best_of"
            raise ParameterError(name, f"{name} times the number of prompts must be at most {MAX_CHOICES}")
        return params


class TextPart(Body):
    type: Literal["text"]
    text: Text


def _check_content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a string or a list of text parts, got {show(value)}")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"only parts of type 'text' are supported, got {show(kind)}")
    return value


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | Annotated[list[TextPart], Field(fail_fast=True)], BeforeValidator(_check_content)]
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


def _check_messages(value: Any) -> Any:
    if not isinstance(value, list):
        raise ParameterError("messages", f"messages must be a list of messages, got {show(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise ParameterError("messages", f"messages must hold 1 to {MAX_MESSAGES} messages, got {len(value)}")
    contents = [message.get("content") for message in value if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    check_count("messages", num_parts, MAX_PARTS, "parts of contents")
    return value


class ChatRequest(Sampling):
    """POST /v1/chat/completions. Without max_tokens it generates up to the context's end."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True), BeforeValidator(_check_messages)]
    max_completion_tokens: Whole = None
    logprobs: bool | None = None
    top_logprobs: Whole = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_here(cls, data: Any) -> Any:
        return drop_neutral(data, _NEUTRAL_CHAT)

    @property
    def limit_param(self) -> str | None:
        return super().limit_param if self.max_completion_tokens is None else "max_completion_tokens"

    def params(self) -> SamplingParams:
        """Raises as `sampling_params` does."""
        more: dict[str, Any] = {}
        renamed = {"logprobs": "top_logprobs"}
        if self.logprobs or self.top_logprobs is not None:
            more["logprobs"] = 0 if self.top_logprobs is None else self.top_logprobs
        if self.max_tokens is None or self.max_completion_tokens is not None:
            more["max_tokens"] = self.max_completion_tokens
            renamed["max_tokens"] = "max_completion_tokens"
        try:
            params = self.sampling_params(**more)
        except ParameterError as error:
            name = renamed.get(error.param, error.param)
            raise ParameterError(name, str(error).replace(error.param, name, 1)) from None
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs", "top_logprobs is only allowed together with logprobs: true")
        if self.max_tokens is not None and not _same(self.max_tokens, params.max_tokens):
            raise ParameterError(
                "max_tokens",
                f"max_tokens and max_completion_tokens mean the same and differ: {show(self.max_tokens)} and "
                f"{params.max_tokens}; send one of them",
            )
        return params
