"""What the next node of a tree is worth, how often it is there and kept; and the next token of a lookup.

Nodes are taken in the order of the drafter's belief in them, tokens of a lookup in the order of the text. A tree of the n best
nodes holds that of the n - 1 best ones: so one round tells what every smaller budget would have brought, and a pass that gets
dearer in steps is filled up to the step that pays.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate

# before anything was seen: how often the first node is kept, and each next one by that of the one before
FIRST, NEXT = 0.6, 0.8
BELIEF = 2.0  # rounds that this is worth
COPIED = 12.0  # lookups that what was counted elsewhere is worth at most


class Counts(ABC):
    """Weighted counts."""

    @abstractmethod
    def rows(self) -> dict[str, list[float]]:
        """Counts by name."""

    def scale(self, factor: float) -> None:
        """Let all that was counted weigh `factor` times as much."""
        for row in self.rows().values():
            row[:] = [value * factor for value in row]


class Worth(Counts):
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


class Copies(Counts):
    """How often the next token of a lookup is kept where those before it were.

    Args:
        size: places; tokens behind are not counted.
    """

    def __init__(self, size: int) -> None:
        self.tries, self.kept = [0.0] * size, [0.0] * size
        self.believed: list[tuple[float, float]] = []  # by place: a chance, and how many lookups it is worth

    def see(self, drafted: int, kept: int, weight: float = 1.0) -> None:
        """Count a lookup: tokens behind the first wrong one tell nothing."""
        for place in range(min(kept + 1, drafted, len(self.tries))):
            self.tries[place] += weight
            self.kept[place] += weight * (place < kept)

    def rows(self) -> dict[str, list[float]]:
        """Counts by name."""
        return {"tries": self.tries, "kept": self.kept}

    def settle(self) -> None:
        """Take what was counted for what is to be expected before anything is seen."""
        self.believed = [(chance, min(COPIED, BELIEF + tries)) for chance, tries in zip(self.chances(), self.tries)]
        self.scale(0.0)

    def chances(self, unit: float = 1.0) -> list[float]:
        """By place: how often a token is kept where those before it were. Without a belief, one that was not reached is as likely
        as the one before it.

        Args:
            unit: weight of one observation of now.
        """
        found = [FIRST]
        for place, (tries, kept) in enumerate(zip(self.tries, self.kept)):
            before, worth = self.believed[place] if self.believed else (found[-1], BELIEF)
            found.append((kept + worth * unit * before) / (tries + worth * unit))
        return found[1:]

    def tokens(self, unit: float = 1.0) -> list[float]:
        """Of lookups of every depth from 0 on: tokens expected to be kept."""
        return [0.0, *accumulate(accumulate(self.chances(unit), operator.mul))]


class Instead(Counts):
    """What the drafter behind lookups brings where one of them was found and left unused, by how long its match is; the last
    place is for rounds in which none was found.

    Args:
        size: lengths of matches that are told apart.
    """

    def __init__(self, size: int) -> None:
        self.rounds, self.emitted = [0.0] * (size + 1), [0.0] * (size + 1)
        self.ratios = [1.0] * size  # to what is brought on average, before anything was seen

    def see(self, place: int, emitted: int, weight: float = 1.0) -> None:
        """Count a round of that drafter."""
        self.rounds[place] += weight
        self.emitted[place] += weight * emitted

    def rows(self) -> dict[str, list[float]]:
        """Counts by name."""
        return {"rounds": self.rounds, "emitted": self.emitted}

    def settle(self) -> None:
        """Take what was counted for what is to be expected before anything is seen."""
        average = sum(self.emitted) / sum(self.rounds) if sum(self.rounds) else 1.0
        self.ratios = [tokens / average for tokens in self.tokens(average)]
        self.scale(0.0)

    def tokens(self, average: float, unit: float = 1.0) -> list[float]:
        """By the length of the match: tokens expected of a round.

        Args:
            average: tokens expected of any round.
            unit: weight of one observation of now.
        """
        lean = COPIED * unit
        each = zip(self.rounds, self.emitted, self.ratios)
        return [(emitted + lean * ratio * average) / (rounds + lean) for rounds, emitted, ratio in each]
