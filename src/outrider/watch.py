"""A live view of a generation: the shapes chosen, how many tokens they bring, and the speed, as they change with the text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.controller import Controller
from outrider.rounds import Round
from outrider.tree import OFF, Shape

BARS = "▁▂▃▄▅▆▇█"
POINTS = 48  # of a line over time
LETTERS = "·abcdefghijklmnopqrstuvwxyz"  # shapes over time; the dot is plain decoding
EVERY = 0.12  # seconds between pictures


class Watching:
    """A controller that passes everything on to another one, and writes the rounds down."""

    def __init__(self, inner: Controller) -> None:
        self.inner, self.rounds = inner, list[Round]()

    def choose(self) -> Shape:
        """The inner controller's choice."""
        return self.inner.choose()

    def reward(self, done: Round) -> None:
        """Write it down and pass it on."""
        self.rounds.append(done)
        self.inner.reward(done)


def follow(pieces: Any, watching: Watching, console: Console) -> Any:
    """Show a stream while it runs, then its text and the last picture; returns what the stream returns."""
    text, last = "", 0.0
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                result = end.value
                break
            text += piece.text
            if console.is_terminal and time.perf_counter() - last > EVERY:
                last = time.perf_counter()
                live.update(Group(_tail(text, console), picture(watching.rounds)), refresh=True)
    console.print(text, markup=False, soft_wrap=True)
    console.print(picture(watching.rounds))
    return result


def _tail(text: str, console: Console) -> Text:
    """As much of the end of a text as leaves room for the picture."""
    lines = Text(text).wrap(console, max(console.width, 1))
    return Text("\n").join(lines[-max(3, console.height - 16) :])


def picture(rounds: Sequence[Round]) -> Panel:
    """Shapes, tokens per pass and speed: so far, and over time from left to right."""
    names = Counter(_name(done) for done in rounds)
    letters = {name: LETTERS[min(i, len(LETTERS) - 1)] for i, name in enumerate(_order(rounds), 1) if name != OFF.name}
    letters[OFF.name] = LETTERS[0]
    groups = in_groups(rounds, POINTS)
    table = Table.grid(padding=(0, 2))
    for label, values, total in (
        ("tokens per pass", [_rate(g, lambda d: len(d.rows)) for g in groups], _rate(rounds, lambda d: len(d.rows))),
        ("tokens a second", [_rate(g, lambda d: d.seconds) for g in groups], _rate(rounds, lambda d: d.seconds)),
    ):
        table.add_row(label, spark(values), f"{total:.2f}" if label.endswith("pass") else f"{total:.1f}")
    most = [Counter(_name(done) for done in group).most_common(1)[0][0] for group in groups]
    table.add_row("shape", "".join(letters[name] for name in most), "")
    shapes = Table.grid(padding=(0, 2))
    for name, count in names.most_common(6):
        share = count / len(rounds)
        shapes.add_row(letters[name], name, "█" * round(24 * share), f"{share:.0%}")
    return Panel(Group(table, "", shapes), title=f"{len(rounds)} rounds", title_align="left")


def _name(done: Round) -> str:
    return done.shape.name if done.drafted else OFF.name


def _order(rounds: Sequence[Round]) -> list[str]:
    """Shapes in the order of their first use."""
    return [name for name in dict.fromkeys(map(_name, rounds)) if name != OFF.name]


def in_groups(rounds: Sequence[Round], count: int) -> list[Sequence[Round]]:
    """Rounds in at most `count` groups of neighbours, as equal as can be."""
    count = min(count, len(rounds))
    return [rounds[i * len(rounds) // count : (i + 1) * len(rounds) // count] for i in range(count)]


def _rate(rounds: Sequence[Round], unit: Any) -> float:
    """Tokens emitted per unit."""
    units = sum(unit(done) for done in rounds)
    return sum(done.emitted for done in rounds) / units if units else 0.0


def spark(values: Sequence[float]) -> str:
    """Values as bars; the highest bar is the largest value, the lowest zero."""
    top = max(values, default=0.0)
    return "".join(BARS[min(int(len(BARS) * value / top), len(BARS) - 1)] if top > 0 else BARS[0] for value in values)
