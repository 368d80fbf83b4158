"""``chairlift explain``: what a running server's requests wait for, and the life of one."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from chairlift.errors import ChairliftError, show

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TIMEOUT_SECONDS = 30.0
UNLIMITED = 10_000  # columns; more than any line has


def explain(
    request: Annotated[
        str | None, typer.Argument(metavar="ID", help="A request's id, such as cmpl-...; without one, all that live.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
) -> None:
    """Ask a running server what its requests wait for, or how one of them has fared, step by step."""
    console = _console()
    try:
        if request is None:
            live = _get(url, "/v1/requests")["data"]
            for line in _live_lines(live, console.width) if live else ["nothing runs or waits"]:
                console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
        elif "/" in request or request in ("", ".", ".."):
            # No id is so, and the server would not see one: to HTTP this is another path, however it is quoted.
            raise ChairliftError(f"no request {show(request)} is known at {url}; chairlift explain lists all that live")
        else:
            answer = _get(url, f"/v1/requests/{quote(request, safe='')}")
            for line in _states(answer["requests"]):
                console.print(line, markup=False, highlight=False)
            console.print(_life_table(answer["life"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ChairliftError(f"what answers at {url} is no chairlift server; name one with --url") from None


def _console() -> Console:
    """Lines are folded for a terminal alone: what reads a pipe wants them whole."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=UNLIMITED)


def _get(url: str, path: str) -> Any:
    """The JSON that the server answers. Raises ChairliftError, with the server's own words if it has any."""
    import httpx

    try:
        answer = httpx.get(url.rstrip("/") + path, timeout=TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChairliftError(
            f"no server answers at {url} ({error}); start one with chairlift serve, or name another with --url"
        ) from None
    content = answer.json()
    if answer.status_code != 200:
        raise ChairliftError(plain(content["error"]["message"]))
    return content


def plain(text: object) -> str:
    """What a terminal may be sent: whatever a client named itself, it does not move the cursor."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def _why(reason: str | None) -> str:
    from chairlift.core.recorder import EXPLANATIONS

    return "" if reason is None else EXPLANATIONS.get(reason, reason)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"


def _states(views: list[dict[str, Any]]) -> list[str]:
    """What each live sequence of a request does now."""
    lines = []
    for view in views:
        parts = [
            f"{view['num_prompt']} prompt tokens",
            f"{view['num_output']} generated",
            f"{view['num_blocks']} KV blocks",
        ]
        if view["num_host_blocks"]:
            parts.append(f"{view['num_host_blocks']} swapped out")
        if view["num_preemptions"]:
            parts.append(f"preempted {view['num_preemptions']} times")
        state = view["state"]
        if view["position"] is not None:
            state += f", number {view['position']} in the queue"
        if view["estimated_start"] is not None:
            state += f", boards in about {view['estimated_start']:.1f} s"
        if view["reason"] is not None:
            state += f": {_why(view['reason'])}"
        lines.append(plain(f"prompt {view['prompt']}, sample {view['index']}: {state} ({', '.join(parts)})"))
    return lines or ["it has ended"]


_COLUMNS: dict[str, Callable[[dict[str, Any]], object]] = {
    "Request": lambda view: view["id"],
    "Sample": lambda view: f"{view['prompt']}.{view['index']}",
    "State": lambda view: view["state"],
    "Age": lambda view: _seconds(view["waited"]),
    "Position": lambda view: view["position"] or "",
    "Boards in": lambda view: _seconds(view["estimated_start"]),
    "Prompt": lambda view: view["num_prompt"],
    "Output": lambda view: view["num_output"],
    "Blocks": lambda view: view["num_blocks"],
    "Swapped out": lambda view: view["num_host_blocks"],
    "Preempted": lambda view: view["num_preemptions"],
    "Priority": lambda view: view["priority"],
    "Waits, since": lambda view: _why(view["reason"]),
    "Tenant": lambda view: view["tenant"],
}
_FIRST_LINE = ("Request", "Sample", "State", "Age")  # where one line is too narrow; 80 columns hold the longest ids
_NOTHING = ("", "0", "0.0")


def _live_lines(views: list[dict[str, Any]], width: int) -> list[str]:
    """A line for each, with the columns in which anybody has something; or, where that is wider than ``width``, a line
    that tells them apart and below it the rest, folded between words."""
    rows = [{head: plain(cell(view)) for head, cell in _COLUMNS.items()} for view in views]
    columns = [head for head in _COLUMNS if any(row[head] not in _NOTHING for row in rows)]
    lines = _aligned(columns, rows)
    if max(map(len, lines)) <= width:
        return lines
    first, *others = _aligned([head for head in columns if head in _FIRST_LINE], rows)
    return [first, *(line for other, row in zip(others, rows, strict=True) for line in (other, *_rest(row, width)))]


def _aligned(columns: list[str], rows: list[dict[str, str]]) -> list[str]:
    """The heading, and a line for each row."""
    table = [columns, *([row[head] for head in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]


def _rest(row: dict[str, str], width: int) -> list[str]:
    """What the first line of a row leaves out. Words are never cut: the terminal may fold one that is too long."""
    facts = [f"{head.lower()} {text}" for head, text in row.items() if head not in _FIRST_LINE and text not in _NOTHING]
    return textwrap.wrap(
        "; ".join(facts),
        width,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _life_table(life: list[dict[str, Any]]) -> Table:
    rows = []
    for line in life:
        first, last = line["step"], line["last_step"]
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        sample = f"{line['prompt']}.{line['index']}"
        rows.append([_seconds(line["seconds"]), steps, sample, line["what"], _detail(line)])
    return _table(["Time", "Steps", "Sample", "What", "Detail"], rows)


def _detail(line: dict[str, Any]) -> object:
    if line["what"] == "waits":
        return _why(line["detail"])
    return "alone" if line["detail"] == "beside 0 others" else line["detail"]


def _table(columns: list[str], rows: list[list[Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table
