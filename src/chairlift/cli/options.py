"""Command-line options, derived from the fields of the settings' dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, get_type_hints

import typer

from chairlift.errors import ConfigError

ModelArgument = Annotated[str, typer.Argument(help="A known name, a GGUF file, a Hugging Face folder, or a hub name.")]

FOREIGN = {
    "--enable-chunked-prefill": "chunked prefill is the default; leave this out, or choose with --scheduler-policy",
    "--no-enable-chunked-prefill": "use --scheduler-policy continuous",
    "--tensor-parallel-size": "one process computes everything; leave this out, and see --threads",
    "--pipeline-parallel-size": "one process computes everything; leave this out, and see --threads",
    "--data-parallel-size": "one process computes everything; leave this out, and see --threads",
    "--scheduling-policy": "use --order",
    "--schedule-policy": "use --order",
    "--scheduler-cls": "use --scheduler-policy with the import path of your class",
    "--cpu-offload-gb": "weights stay in memory; leave this out",
    "--enforce-eager": "there is no graph to capture, so nothing to switch off; leave this out",
    "--dtype": "weights keep the format of the file; see --weights and --quantization",
    "--tokenizer": "the tokenizer is the model's own; leave this out",
    "--trust-remote-code": "code that comes with a model is never run; leave this out",
    "--no-enable-log-requests": "requests are not logged; leave this out",
    "--disable-log-requests": "requests are not logged; leave this out",
}
"""Options that users of other engines may bring along: what to do instead."""


def refuse_foreign(arguments: list[str]) -> None:
    """Raises ConfigError for an option of another engine that has no effect here."""
    for argument in arguments:
        name = argument.split("=", 1)[0].replace("_", "-")
        if name in FOREIGN:
            raise ConfigError(f"{name} has no effect here: {FOREIGN[name]}")


def config_options(command: Callable[..., Any], *, only: Collection[str] = ()) -> Callable[..., Any]:
    """Decorates a command: each parameter that is a dataclass becomes options, one a field, or for ``only`` these.

    A field that the command has as a parameter of its own gets no second option, and takes that parameter's value.
    """
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    configs: dict[str, Any] = {p.name: p.annotation for p in parameters if dataclasses.is_dataclass(p.annotation)}
    own = [p for p in parameters if p.name not in configs]
    names = {p.name for p in own}
    fields = {
        name: [field for field in dataclasses.fields(config) if not only or field.name in only]
        for name, config in configs.items()
    }
    derived = [_option(field, configs[name]) for name, chosen in fields.items() for field in chosen]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        built = {
            name: config(**{field.name: values[field.name] for field in fields[name]})
            for name, config in configs.items()
        }
        return command(**{p.name: values[p.name] for p in own}, **built)

    options = [p for p in derived if p.name not in names]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
    )
    return run


def _option(field: dataclasses.Field[Any], config: type) -> inspect.Parameter:
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.default,
        annotation=Annotated[get_type_hints(config)[field.name], typer.Option(help=field.metadata["help"])],
    )
