"""Owns the progress of commands that measure: drawn when told something, never by a thread that would disturb what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moesim.cli.options import note

Tick = Callable[[str, int, int], None]


@contextmanager
def progress(what: str) -> Iterator[Tick]:
    """Yield what takes (what, done, all): a bar on stderr; where that is no terminal, a line for every tenth.

    The bar is drawn when it is told something, never by a thread of its own, which would disturb what is measured.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        told = -1

        def line(_what: str, done: int, total: int) -> None:
            nonlocal told
            tenth = 10 * done // max(total, 1)
            if tenth > told:
                told = tenth
                note(f"{what}: {10 * tenth} %")

        yield line
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=None)

        def tick(part: str, done: int, total: int) -> None:
            bar.update(task, description=part, completed=done, total=total)
            bar.refresh()

        yield tick
