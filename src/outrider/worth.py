"""What the next node of a tree is worth, how often it is there and kept, and how long copied stretches go on.

Nodes are taken in the order of the drafter's belief in them, tokens of a lookup in the order of the text. A tree of the n best
nodes holds that of the n - 1 best ones: so one round tells what every smaller budget would have brought, and a pass that gets
dearer in steps is filled up to the step that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from outrider.rounds import Walked

# before anything was seen: how often the first node is kept, and each next one by that of the one before
FIRST, NEXT = 0.6, 0.8
BELIEF = 2.0  # rounds that this is worth
REACHES = 3, 7, 11, 15  # of lookups: with the root, groups of rows are full or half full


class Worth:
    """Weighted counts by the place of a node in its order.

    Args:
        size: places; nodes beyond are not counted.
    """

    def __init__(self, size: int) -> None:
        self.tries, self.there, self.kept = ([0.0] * size for _ in range(3))

    def see(self, kept: Sequence[bool], asked: int, weight: float = 1.0) -> None:
        """Count a round.

        Args:
            kept: of every node that was drafted, whether the target kept it.
            asked: nodes that might have been drafted.
        """
        for place in range(min(max(asked, len(kept)), len(self.tries))):
            self.tries[place] += weight
            if place < len(kept):
                self.there[place] += weight
                self.kept[place] += weight * kept[place]

    def rows(self) -> dict[str, list[float]]:
        """Counts by name."""
        return {"tries": self.tries, "there": self.there, "kept": self.kept}

    def scale(self, factor: float) -> None:
        """Let all that was counted weigh `factor` times as much."""
        for row in self.rows().values():
            row[:] = [value * factor for value in row]

    def chances(self, unit: float = 1.0) -> list[tuple[float, float]]:
        """By place: how often a node is there, and how often it is there and kept. What was not seen is as before it.

        Args:
            unit: weight of one observation of now.
        """
        lean, there, kept, found = BELIEF * unit, 1.0, FIRST / NEXT, []
        for tries, seen, right in zip(self.tries, self.there, self.kept):
            there = (seen + lean * there) / (tries + lean)
            kept = min((right + lean * kept * NEXT) / (tries + lean), there)
            found.append((there, kept))
        return found


def totals(chances: Sequence[tuple[float, float]], seconds: Callable[[int], float]) -> list[tuple[float, float]]:
    """For every budget from 0 on: tokens expected of the drafted nodes, and seconds of the pass.

    Args:
        seconds: of a pass over so many drafted nodes.
    """
    times = [seconds(nodes) for nodes in range(len(chances) + 1)]
    steps = [there * (after - before) for (there, _), before, after in zip(chances, times, times[1:])]
    tokens = accumulate((kept for _, kept in chances), initial=0.0)
    return list(zip(tokens, accumulate(steps, initial=times[0])))


class Stretches:
    """How long texts go on to be copied: lookups one after the other, each kept whole but for the last, are one stretch. From its
    tokens follows how many passes it takes where lookups go deeper, or less deep, than they went.

    A lookup that begins a stretch goes as deep as its match is trusted; those behind it have a long match, and go as deep as
    they may.
    """

    def __init__(self) -> None:
        self.count, self.further = [0.0], [0.0] * len(REACHES)
        self.open: list[
            tuple[int, int]
        ] = []  # of every row, in a stretch: its tokens, and how deep its first lookup may go

    def hear(self, rows: Sequence[Walked], reach: int, weight: float = 1.0) -> None:
        """Follow a round that asked for drafts, whether they were looked up or not.

        Args:
            reach: how deep lookups might have gone.
        """
        if len(rows) != len(self.open):
            self.open = [(0, 0)] * len(rows)
        for place, row in enumerate(rows):
            tokens, first = self.open[place]
            if row.beyond:
                first = first or (row.drafted if row.drafted < reach else REACHES[-1])
                tokens += row.emitted
            if tokens and not (row.beyond and len(row.ranks) == row.drafted):
                self._end(tokens, first, weight)
                tokens = first = 0
            self.open[place] = tokens, first

    def _end(self, tokens: int, first: int, weight: float) -> None:
        self.count[0] += weight
        for place, reach in enumerate(REACHES):
            rest = tokens - min(first, reach) - 1
            self.further[place] += weight * max(0, -(-rest // (reach + 1)))

    def rows(self) -> dict[str, list[float]]:
        """Counts by name."""
        return {"count": self.count, "further": self.further}

    def scale(self, factor: float) -> None:
        """Let all that was counted weigh `factor` times as much."""
        for row in self.rows().values():
            row[:] = [value * factor for value in row]

    def passes(self, unit: float = 1.0) -> dict[int, float]:
        """By reach: passes expected of a stretch behind its first one."""
        lean, found = BELIEF * unit, dict[int, float]()
        for reach, further in zip(REACHES, self.further):
            whole = NEXT ** (reach + 1)  # before anything was seen, each token is as likely as the one before it
            found[reach] = (further + lean * whole / (1.0 - whole)) / (self.count[0] + lean)
        return found
