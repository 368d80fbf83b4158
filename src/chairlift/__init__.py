"""Chairlift: an LLM serving engine built on continuous batching. Everything here is loaded when first used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.core.request import SamplingParams
    from chairlift.llm import LLM, CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "SamplingParams":
        from chairlift.core.request import SamplingParams

        return SamplingParams
    if name in __all__:
        from chairlift import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
