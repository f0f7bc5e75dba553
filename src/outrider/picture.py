"""One figure, written as a PNG file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path, columns: int = 1) -> Iterator[tuple[Any, ...]]:
    """Axes side by side; written to `path` at the end of the block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(5.5 * columns, 4), squeeze=False, layout="constrained")
    try:
        yield tuple(axes[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def mark_lengths(axes: Any, lengths: Sequence[int]) -> None:
    """Mark an axis of lengths where they were measured, and nowhere else."""
    places = sorted(set(lengths))
    axes.set_xticks(places, [f"{length:,}" for length in places])
    axes.minorticks_off()
