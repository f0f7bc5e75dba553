"""What the next node of a tree is worth: how often it is there, and how often it is kept.

Nodes are taken in the order of the drafter's belief in them, tokens of a lookup in the order of the text. A tree of the n best
nodes holds that of the n - 1 best ones: so one round tells what every smaller budget would have brought, and a pass that gets
dearer in steps is filled up to the step that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

# before anything was seen: how often the first node is kept, and each next one by that of the one before
FIRST, NEXT = 0.6, 0.8
BELIEF = 2.0  # rounds that this is worth
FARTHEST = 128  # copied tokens behind which nobody looks


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


def passes(chances: Sequence[tuple[float, float]], reach: int) -> float:
    """Passes that one stretch of copied text takes where lookups go `reach` deep: one that is kept whole, and the target's own
    token behind it, are followed by another lookup of the same."""
    going, lasting = 1.0, [1.0]  # how often so many tokens are copied
    for there, kept in chances:
        going = min(going, kept / there if there > 0 else 0.0)
        lasting.append(going)
    last, half = len(lasting) - 1, len(lasting) // 2
    ratio = (lasting[last] / lasting[half]) ** (1.0 / (last - half)) if lasting[half] else 0.0
    total, tokens = 1.0, reach + 1
    while tokens < FARTHEST:
        total += lasting[tokens] if tokens <= last else lasting[last] * ratio ** (tokens - last)
        tokens += reach + 1
    return total
