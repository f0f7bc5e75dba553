"""Progress bars for people; silence for scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress(label: str, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error while the block runs; yields `tell(done, total, what)`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        def tell(done: int, total: int, what: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{label} {what}".rstrip())

        yield tell
