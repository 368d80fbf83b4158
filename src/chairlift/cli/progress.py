"""Progress bars, of downloads and of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int | None], None]
"""Called with what is fetched, the bytes done, and the bytes in all if known."""


@contextmanager
def download_progress() -> Iterator[Progress]:
    """A bar on stderr for each thing fetched; nothing is drawn until the first byte comes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks: dict[str, int] = {}

    def update(name: str, done: int, total: int | None) -> None:
        if name not in tasks:
            bars.start()
            tasks[name] = bars.add_task(name, total=total)
        bars.update(tasks[name], completed=done, total=total)  # type: ignore[arg-type]

    try:
        yield update
    finally:
        if tasks:
            bars.stop()


@contextmanager
def token_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, if that is a terminal, for each run: called with its name, the tokens done, and those in all.

    Redrawn rarely: what draws takes time from what is measured.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    tasks = {}
    with Bars(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as bars:

        def show(run: str, done: int, total: int) -> None:
            if run not in tasks:
                tasks[run] = bars.add_task(run, total=total)
            bars.update(tasks[run], completed=done)

        yield show
