"""Where drafting ends within a round: what the drafter's belief in a path is worth, measured, against the time of going on.

How often paths are kept that the drafter holds for so probable, and how often a token behind a kept one is right, say what
a further level is expected to bring. Once that is worth less than its time, the level is left out; a branch is when it is
worth less than its nodes. A drafter that is too sure of itself is believed less; one that says too little goes on longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.rounds import Walked

BINS = 33  # quarter octaves of a path's probability: from 1 to 0.84, from there to 0.71 ... and all below 0.004
LEAN = 6.0  # paths of a bin that the drafter's own belief is worth
ON, ON_WEIGHT = 0.6, 2.0  # chance of a token behind a kept path before any was seen, and its weight
LOWEST, LEAST, ENOUGH = 0.001, 0.3, 0.9  # thresholds are never lower, and never higher for branches and for levels
BRANCH = 0.6  # threshold for branches, as a share of where the next token alone would pay: it may be followed by more
DEPTHS = 16


class Table:
    """Pairs of weighted counts: tries and hits by place."""

    def __init__(self, size: int) -> None:
        self.tries, self.hits = [0.0] * size, [0.0] * size

    def count(self, place: int, hit: bool, weight: float) -> None:
        """Count a try; what lies beyond the last place counts there."""
        place = min(place, len(self.tries) - 1)
        self.tries[place] += weight
        self.hits[place] += weight * hit

    def scale(self, factor: float) -> None:
        """Let all that was counted weigh `factor` times as much."""
        self.tries = [value * factor for value in self.tries]
        self.hits = [value * factor for value in self.hits]

    def pooled(self, belief: float, weight: float) -> float:
        """The rate over all places, with a belief worth `weight` tries."""
        return (sum(self.hits) + weight * belief) / (sum(self.tries) + weight)

    def rates(self, beliefs: Sequence[float], weight: float) -> list[float]:
        """The rate at every place, each with a belief of its own."""
        return [(h + weight * b) / (t + weight) for h, t, b in zip(self.hits, self.tries, beliefs)]


class Calibration:
    """What paths bring, by the probability that the drafter gives to them.

    Also paths that got no children are counted, so a threshold that was too high comes down again.
    """

    def __init__(self) -> None:
        self.kept, self.on = Table(BINS), Table(BINS)

    def see(self, row: Walked, weight: float = 1.0) -> None:
        """Count a walk: every drafted path, and behind those that were kept whether a child was too."""
        kept = list[int]()
        for belief, was_kept in row.beliefs:
            place = _bin(belief)
            self.kept.count(place, was_kept, weight)
            if was_kept:
                kept.append(place)
        for depth, place in enumerate(kept):
            if (further := depth + 1 < len(kept)) or row.width:
                self.on.count(place, further, weight)

    def scale(self, factor: float) -> None:
        """Let all that was seen weigh `factor` times as much."""
        self.kept.scale(factor)
        self.on.scale(factor)

    def worth(self, unit: float = 1.0) -> list[tuple[float, float]]:
        """Tokens that children behind a path are expected to bring, and the weight of such paths: the likeliest first.

        Args:
            unit: weight of one observation of now.
        """
        kept = self.kept.rates([_centre(place) for place in range(BINS)], LEAN * unit)
        common = self.on.pooled(ON, ON_WEIGHT * unit)
        on = self.on.rates([common] * BINS, LEAN * unit)
        return [(k * o, tries + LEAN * unit) for k, o, tries in zip(kept, on, self.kept.tries)]


class Going:
    """How often a drafter that has drafted d levels of a deeper shape drafts another."""

    def __init__(self) -> None:
        self.table = Table(DEPTHS)

    def see(self, row: Walked, weight: float = 1.0) -> None:
        """Count a round's levels."""
        for level in range((row.levels or 1) - 1):
            self.table.count(level, True, weight)
        if row.stopped and row.levels:
            self.table.count(row.levels - 1, False, weight)

    def scale(self, factor: float) -> None:
        """Let all that was seen weigh `factor` times as much."""
        self.table.scale(factor)

    def chances(self, unit: float = 1.0) -> list[float]:
        """Per level the chance of another; 1 before anything was seen."""
        return self.table.rates([self.table.pooled(1.0, ON_WEIGHT * unit)] * DEPTHS, LEAN * unit)


@dataclass(frozen=True)
class Stops:
    """Path probabilities below which branches end, and below which, added up, a level is left out."""

    least: float
    enough: float


def stops(
    worth: Sequence[tuple[float, float]], speed: float, rows: int, node: float, level: float, further: float
) -> Stops:
    """Where going on takes as much time as the tokens that it brings.

    Args:
        worth: what `Calibration.worth` says.
        speed: tokens per second of each row.
        rows: that share a round.
        node, level, further: seconds of a node verified, of a level drafted, and of a further node fed in it.
    """
    branch = rows * speed * (node + further)  # the tokens that all rows could have written in that time
    least, enough = _threshold(worth, branch, LEAST), _threshold(worth, branch + speed * level, ENOUGH)
    return Stops(max(BRANCH * least, LOWEST), enough)


def _threshold(worth: Sequence[tuple[float, float]], needed: float, highest: float) -> float:
    """The path probability down to which going on has gained most, all paths taken together: single rates are noisy."""
    gained, most, place = 0.0, 0.0, 0
    for number, (value, weight) in enumerate(worth):
        gained += weight * (value - needed)
        if gained > most:
            most, place = gained, number + 1
    return min(max(2.0 ** (-place / 4.0), LOWEST), highest)


def _bin(belief: float) -> int:
    return min(int(-4.0 * math.log2(belief)), BINS - 1) if 0.0 < belief < 1.0 else 0 if belief >= 1.0 else BINS - 1


def _centre(place: int) -> float:
    return float(2.0 ** (-(place + 0.5) / 4.0))
