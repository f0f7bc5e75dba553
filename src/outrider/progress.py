"""Progress: a bar for people at a terminal, a line now and then in a log file, silence for scripts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS = 30.0  # between lines where there is no terminal

Tell = Callable[[int, int, str], None]


@contextmanager
def progress(label: str, quiet: bool = False) -> Iterator[Tell]:
    """Progress on standard error while the block runs; yields `tell(done, total, what)`."""
    console = Console(stderr=True)
    if quiet:
        yield _silence
        return
    if not console.is_terminal:
        yield _lines(label, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(label, total=None)

        def tell(done: int, total: int, what: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{label} {what}".rstrip())

        yield tell


def _silence(done: int, total: int, what: str = "") -> None:
    """Tells nobody."""


def _lines(label: str, console: Console) -> Tell:
    """Tells in whole lines, not more often than people can read a log."""
    last = time.monotonic()

    def tell(done: int, total: int, what: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS:
            last = time.monotonic()
            console.print(f"{label} {done}/{total} {what}".rstrip(), markup=False, highlight=False, soft_wrap=True)

    return tell
