"""Chat templates: Jinja2 programs that come with a model, run in Jinja2's sandbox.

A template is hostile until shown otherwise, and the sandbox alone does not stop one that loops for ever or builds a
string that fills the memory. So each loop and macro counts its rounds and looks at the clock, all output is counted,
and what makes text or lists longer is measured before it happens.
"""

from __future__ import annotations

import contextvars
import datetime
import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.filters
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from chairlift.errors import ModelError, ParameterError
from chairlift.models.fields import one_line

MAX_TEMPLATE = 2**20  # characters of a template's source
MAX_PROMPT = 2**23  # characters that a value or a prompt may have
MAX_WRITTEN = 8 * MAX_PROMPT  # characters that one rendering may write or join, intermediate values included
MAX_ROUNDS = 2**18  # of all loops and macros together, in one rendering
MAX_SECONDS = 10.0  # of one rendering; honest ones take milliseconds
MAX_BITS = 4096  # of an integer
_ITEM = 16  # what an item of a list counts, in characters

# String methods that templates use; none makes a string much longer, but for replace and join, which are measured.
_STRING_METHODS = {
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
    "islower", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper",
}  # fmt: skip
_FILTERS_LEFT_OUT = ("center", "format", "indent", "pprint", "slice", "batch", "sum", "urlize", "wordwrap", "xmlattr")


class _Refused(jinja2.TemplateError):
    """The template itself refuses the messages."""


class _TooMuch(jinja2.TemplateError):
    """The template does more than any honest one does."""


class _Meter:
    """Counts what one rendering does."""

    def __init__(self) -> None:
        self.rounds = self.written = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        """One round of a loop, or one call of a macro."""
        self.rounds += 1
        if self.rounds > MAX_ROUNDS:
            raise _TooMuch(f"more than {MAX_ROUNDS} rounds of its loops")
        if time.monotonic() > self.deadline:
            raise _TooMuch(f"more than {MAX_SECONDS:g} seconds of work")

    def write(self, length: int) -> None:
        """Text that is written, captured (in a set block or a macro) or joined."""
        self.written += length
        if self.written > MAX_WRITTEN:
            raise _TooMuch(f"more than {MAX_WRITTEN} characters of output and intermediate text")


_METER: contextvars.ContextVar[_Meter | None] = contextvars.ContextVar("chairlift chat template meter", default=None)


@jinja2.pass_context  # which also keeps the compiler from evaluating it once and for all
def _tick(context: Any, value: Any) -> str:
    if meter := _METER.get():
        meter.tick()
    return ""


def weigh(value: Any) -> int:
    """Characters that a value has as text, at least; raises `_TooMuch` beyond the limit.

    Lists that hold the same list many times are counted as often as they would be written.
    """
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            total += _ITEM * len(item)
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, range)):
            total += _ITEM * len(item)
            if total <= MAX_PROMPT and not isinstance(item, range):
                stack.extend(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
        else:
            total += 1
        if total > MAX_PROMPT:
            raise _TooMuch(f"a value of more than {MAX_PROMPT} characters")
    return total


def _at_most(length: int) -> None:
    """Allows a value of so many characters to be made."""
    if length > MAX_PROMPT:
        raise _TooMuch(f"a value of more than {MAX_PROMPT} characters")
    if meter := _METER.get():
        meter.write(length)


class _Generation(Extension):
    """``{% generation %}`` marks the answers for training; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guard(NodeTransformer):
    """Makes loops and macros count, and measures what ``~`` joins."""

    def _with_tick(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.Filter(nodes.Const(""), "tick", [], [], None, None)  # a filter: no variable can take its place
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_tick

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalize
        )
        del self.globals["lipsum"]
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        self.filters |= {"tojson": _tojson, "join": _join, "replace": _replace, "string": _string, "indent": _indent}
        self.filters |= {"list": _list, "tick": _tick}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        guarded: nodes.Template = _Guard().visit(super()._parse(source, name, filename))
        return guarded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise _TooMuch("powers are not allowed")
        if operator == "%" and isinstance(left, str):
            raise _TooMuch("formatting with % is not allowed")
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise _TooMuch(f"a number of more than {MAX_BITS} bits")
        elif operator == "*":
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            _at_most(_size(sequence) * max(count, 0) if isinstance(count, int) else 0)
        else:
            _at_most(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """None: str.format is no safe attribute here, so it needs no safe version."""

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # named as in Jinja2
        owner, method = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and method == "replace":
            return _replace(owner, *args)
        if isinstance(owner, str) and method == "join":
            return _join(args[0], owner)
        return super().call(__context, __obj, *args, **kwargs)


def _size(value: Any) -> int:
    """What a string or list counts by itself, without what is in the list."""
    return len(value) if isinstance(value, str) else _ITEM * len(value) if isinstance(value, (list, tuple)) else 1


def _finalize(value: Any) -> Any:
    """Sees every value before it is written as text."""
    _at_most(weigh(value))
    return value


def _join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    weigh(values)
    values = list(values)
    if attribute is not None:
        values = [value.get(attribute, "") if isinstance(value, Mapping) else "" for value in values]
    _at_most(weigh(values) + len(values) * weigh(separator))
    return str(separator).join(map(str, values))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text, old, new = _string(text), _string(old), _string(new)
    found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
    _at_most(len(text) + found * len(new))
    return str(text.replace(old, new, found))


def _string(value: Any) -> str:
    weigh(value)
    return str(value)


def _list(value: Any) -> list[Any]:
    weigh(value)
    return list(value)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    width = width if isinstance(width, str) else min(max(width, 0), 1024)
    pad = len(width) if isinstance(width, str) else width
    _at_most(weigh(text) + (str(text).count("\n") + 1) * pad)
    return jinja2.filters.do_indent(str(text), width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: unlike Jinja2's own filter, without escapes for HTML."""
    weigh(value)
    if indent is not None:
        indent = min(max(indent, 0), 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format[:256])


class ChatTemplate:
    """One model's template.

    Args:
        source: the Jinja2 text.
        where: the file it is from, for errors.
        special_tokens: variables such as bos_token and eos_token.
    """

    def __init__(self, source: str, where: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.where, self.special_tokens = source, where, dict(special_tokens)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """Compiled at the first use: a model whose template is broken can still complete text."""
        if len(self.source) > MAX_TEMPLATE:
            raise ModelError(
                f"{self.where}: its chat template is {len(self.source)} characters long; "
                f"at most {MAX_TEMPLATE} are allowed"
            )
        try:
            return _Environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise ModelError(f"{self.where}: its chat template is broken: {one_line(error)}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation.

        Raises:
            ParameterError: the template refuses the messages, or fails on them.
            ModelError: the template is broken or does what no template may.
        """
        template = self._template
        names = {"tools": None, "documents": None} | self.special_tokens | variables
        names |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        pieces, length, meter = [], 0, _METER.set(_Meter())
        try:
            for piece in template.generate(names):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_PROMPT:
                    raise _TooMuch(f"a prompt of more than {MAX_PROMPT} characters")
        except _Refused as error:
            raise ParameterError("messages", f"the chat template refuses these messages: {one_line(error)}") from None
        except (_TooMuch, SecurityError, RecursionError, MemoryError) as error:
            raise ModelError(f"{self.where}: its chat template does what is not allowed: {one_line(error)}") from None
        except Exception as error:  # whatever an expression of the template may raise on these messages
            raise ParameterError("messages", f"the chat template fails on these messages: {one_line(error)}") from None
        finally:
            _METER.reset(meter)
        return "".join(pieces)
