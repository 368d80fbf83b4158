"""``chairlift explain``: what a running server's requests wait for, and the life of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from rich.table import Table

TIMEOUT_SECONDS = 30.0


def explain(
    request: Annotated[
        str | None, typer.Argument(metavar="ID", help="A request's id, such as cmpl-...; without one, all that live.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
) -> None:
    """Ask a running server what its requests wait for, or how one of them has fared, step by step."""
    from rich.console import Console

    console = Console()
    try:
        if request is None:
            live = _get(url, "/v1/requests")["data"]
            console.print(_live_table(live) if live else "nothing runs or waits", highlight=False)
        else:
            answer = _get(url, f"/v1/requests/{quote(request, safe='')}")
            for line in _states(answer["requests"]):
                console.print(line, markup=False, highlight=False)
            console.print(_life_table(answer["life"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ChairliftError(f"what answers at {url} is no chairlift server; name one with --url") from None


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


def _live_table(views: list[dict[str, Any]]) -> Table:
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "Request": lambda view: view["id"],
        "Sample": lambda view: f"{view['prompt']}.{view['index']}",
        "State": lambda view: view["state"],
        "Position": lambda view: view["position"] or "",
        "Waits, since": lambda view: _why(view["reason"]),
        "Age": lambda view: _seconds(view["waited"]),
        "Boards in": lambda view: _seconds(view["estimated_start"]),
        "Prompt": lambda view: view["num_prompt"],
        "Output": lambda view: view["num_output"],
        "Blocks": lambda view: view["num_blocks"],
        "Preempted": lambda view: view["num_preemptions"],
        "Priority": lambda view: view["priority"],
        "Tenant": lambda view: view["tenant"],
    }
    return _table(list(columns), [[column(view) for column in columns.values()] for view in views])


def _life_table(life: list[dict[str, Any]]) -> Table:
    rows = []
    for line in life:
        first, last = line["step"], line["last_step"]
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        sample = f"{line['prompt']}.{line['index']}"
        detail = _why(line["detail"]) if line["what"] == "waits" else line["detail"]
        rows.append([_seconds(line["seconds"]), steps, sample, line["what"], detail])
    return _table(["Time", "Steps", "Sample", "What", "Detail"], rows)


def _table(columns: list[str], rows: list[list[Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table
