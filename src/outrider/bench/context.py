"""What drafting costs as the text grows: seconds of a round's drafting, and memory, by length of the context.

A drafter with a state of constant size draws flat lines; one that attends to everything pays for every token of the text.
Texts are random tokens, and so are the hidden states that a feature head reads: neither changes what a step costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.machine import settle
from outrider.picture import mark_lengths, picture

CHUNK = 64  # tokens fed at once on the way to a context, as drafting does


@dataclass(frozen=True)
class Point:
    """One drafter at one length.

    Args:
        seconds: median of drafting a chain.
        bytes: memory of the drafter's state.
    """

    drafter: str
    length: int
    seconds: float
    bytes: int


def measure(
    drafters: dict[str, Any],
    lengths: Sequence[int],
    depth: int = 5,
    repeats: int = 15,
    tell: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[Point]:
    """Draft chains behind contexts of growing length; drafters take turns.

    Args:
        drafters: by name; each must have a model of its own.
        lengths: tokens of the context.

    Raises:
        ValueError: for drafters without a model, and lengths that are none or that a drafter's context does not hold.
    """
    for name, drafter in drafters.items():
        model = getattr(drafter, "model", None)
        if model is None:
            raise ValueError(
                f"drafter {name!r} has no model, so its context costs nothing; give a head, a mamba or a model"
            )
        if model.context is not None and max(lengths, default=0) + depth >= model.context:
            raise ValueError(f"drafter {name!r} holds {model.context} tokens; give shorter --lengths")
    if not lengths or min(lengths) < 1 or depth < 1 or repeats < 1:
        raise ValueError("lengths, depth and repeats must be 1 or more")
    found = []
    for number, length in enumerate(lengths):
        tell(number, len(lengths), f"contexts, now {length} tokens")
        states = {name: _fill(drafter, length, depth) for name, drafter in drafters.items()}
        spent: dict[str, list[float]] = {name: [] for name in drafters}
        for _ in range(repeats + 2):
            for name, state in states.items():
                start = time.perf_counter()
                _draft(state, depth)
                settle(drafters[name].model.device)
                spent[name].append(time.perf_counter() - start)
        for name, state in states.items():
            found.append(Point(name, length, statistics.median(spent[name][2:]), state.bytes()))
    tell(len(lengths), len(lengths), "contexts")
    return found


@torch.inference_mode()
def _fill(drafter: Any, length: int, depth: int) -> Any:
    """A state that has read `length` random tokens."""
    model, generator = drafter.model, torch.Generator().manual_seed(length)
    tokens = torch.randint(0, model.vocab, (length,), generator=generator).tolist()
    taps = getattr(drafter, "taps", ())
    if not taps:
        return model.begin([tokens], room=depth + 2)
    state = model.begin([tokens], room=depth + 2)  # a head begins with nothing: its features come from the target
    width = len(taps) * model.head.config.width
    for at in range(0, length, CHUNK):
        part = tokens[at : at + CHUNK]
        state.see([torch.randn(len(part), width, generator=generator).to(model.device, model.dtype)])
        state.extend([part], [range(-1, len(part) - 1)])
        state.commit([range(len(part))])
    return state


def _draft(state: Any, depth: int) -> None:
    """A chain behind the committed text, forgotten afterwards."""
    for level in range(depth):
        state.extend([[1 + level]], [[level - 1]])
    state.commit([[]])


# ---- for people ------------------------------------------------------------------------------------------------------


def to_json(points: Sequence[Point], depth: int) -> dict[str, Any]:
    """Plain data."""
    rows = [
        {"drafter": p.drafter, "length": p.length, "ms_per_step": 1000 * p.seconds / depth, "state_bytes": p.bytes}
        for p in points
    ]
    return {"depth": depth, "points": rows, "threads": torch.get_num_threads(), "torch": torch.__version__}


def render(points: Sequence[Point], depth: int, console: Console) -> None:
    """A row a length, two columns a drafter."""
    names = list(dict.fromkeys(point.drafter for point in points))
    table = Table("context", *(f"{name}: {what}" for name in names for what in ("ms a step", "state MB")))
    for length in dict.fromkeys(point.length for point in points):
        here = {point.drafter: point for point in points if point.length == length}
        cells = [(f"{1000 * here[n].seconds / depth:.2f}", f"{here[n].bytes / 1e6:.2f}") for n in names]
        table.add_row(str(length), *(cell for pair in cells for cell in pair))
    console.print(table)


def plot(points: Sequence[Point], depth: int, path: Path) -> None:
    """Time of a step and memory against the length of the context."""
    with picture(path, 2) as (left, right):
        for name in dict.fromkeys(point.drafter for point in points):
            mine = [point for point in points if point.drafter == name]
            lengths = [point.length for point in mine]
            left.plot(lengths, [1000 * point.seconds / depth for point in mine], marker="o", label=name)
            right.plot(lengths, [point.bytes / 1e6 for point in mine], marker="o", label=name)
        left.set(xlabel="tokens of context", ylabel="milliseconds of a drafting step", xscale="log", ylim=(0, None))
        right.set(xlabel="tokens of context", ylabel="MB of the drafter's state", xscale="log", ylim=(0, None))
        left.legend()
        for axes in (left, right):
            mark_lengths(axes, [point.length for point in points])
            axes.grid(alpha=0.3)
