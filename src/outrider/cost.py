"""What a shape will bring and what it will take: acceptance by depth and rank, seconds by nodes and levels, the best tree.

Tokens per second of a shape = E[N] / (t_draft(levels, fed nodes) + t_target(nodes)), the throughput model of "Decoding
Speculative Decoding" for trees. E[N] is one plus the chance of every drafted node: the product, along its path, of the chance
that the target's token is the child of that rank. Plain Python: these sums are made between two passes of a model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from outrider.rounds import Walked
from outrider.tree import OFF, Shape, from_paths, uniform

DEPTHS, RANKS = 16, 4  # deeper levels count as the last one; children of higher rank count as never right
BELIEF = (0.6, 0.3, 0.2, 0.15)  # before anything was seen: chance of a child, given that those before it are wrong
LEAN = 3.0  # tries that this is worth, and that the level above is


class Acceptance:
    """Chance that the target's token is a node's child of rank r, given that it is none of the children before.

    Walks that ended before a rank or a level could be tried say nothing about it (Kaplan and Meier's estimate). A level that was
    seen little leans on the one above it. Observations have weights, so that later ones can count more.
    """

    def __init__(self) -> None:
        self.tries = [[0.0] * RANKS for _ in range(DEPTHS)]
        self.hits = [[0.0] * RANKS for _ in range(DEPTHS)]

    def see(self, row: Walked, weight: float = 1.0) -> None:
        """Count a walk. Where the drafter had no further child to offer, all that might have been asked for count as wrong."""
        depth = -1
        for depth, rank in enumerate(row.ranks):
            self._count(min(depth, DEPTHS - 1), min(rank + 1, RANKS), weight)
            if rank < RANKS:
                self.hits[min(depth, DEPTHS - 1)][rank] += weight
        self._count(min(depth + 1, DEPTHS - 1), RANKS if row.ended else min(row.width, RANKS), weight)

    def _count(self, depth: int, tried: int, weight: float) -> None:
        tries = self.tries[depth]
        for rank in range(tried):
            tries[rank] += weight

    def scale(self, factor: float) -> None:
        """Let all that was seen weigh `factor` times as much."""
        for table in (*self.tries, *self.hits):
            table[:] = [value * factor for value in table]

    def chances(self, unit: float = 1.0) -> list[list[float]]:
        """Chance that the target's token is the child of rank r of a node at depth d, [DEPTHS][RANKS].

        Args:
            unit: weight of one observation of now.
        """
        lean, above, table = LEAN * unit, list(BELIEF), []
        for hits, tries in zip(self.hits, self.tries):
            left, ratio, row, own = 1.0, 1.0, list[float](), list[float]()
            for hit, tried, before in zip(hits, tries, above):
                chance = (hit + lean * ratio * before) / (tried + lean)
                ratio = (
                    min(chance / before, 1.0) if before else 0.0
                )  # where the first children are bad, so are the next ones
                own.append(chance)
                row.append(left * chance)
                left -= row[-1]
            above = own
            table.append(row)
        return table


def tails(shape: Shape, chances: Sequence[Sequence[float]]) -> list[float]:
    """Per node of a shape, level by level: tokens expected to be accepted below it once it is; E[N] is 1 + that of the root."""
    counts, firsts = shape.flat
    found = [0.0] * len(counts)
    node = len(counts) - sum(shape.levels[-1]) if shape.depth else 0  # leaves of the last level have nothing below them
    for depth in range(shape.depth - 1, -1, -1):
        law = chances[min(depth, DEPTHS - 1)]
        for _ in range(sum(shape.levels[depth - 1]) if depth else 1):
            node -= 1
            first, expected = firsts[node], 0.0
            for rank in range(min(counts[node], RANKS)):
                expected += law[rank] * (1.0 + found[first + rank])
            found[node] = expected
    return found


def leaving(shape: Shape, chances: Sequence[Sequence[float]]) -> list[dict[int, float]]:
    """Per node of a shape, level by level: the chance that a walk which is there ends at a leaf, by the depth of the leaf."""
    counts, firsts = shape.flat
    found = list[dict[int, float]]([{}] * len(counts))
    node = len(counts)
    for depth in range(shape.depth, -1, -1):
        law = chances[min(depth, DEPTHS - 1)]
        for _ in range(sum(shape.levels[depth - 1]) if depth else 1):
            node -= 1
            found[node] = {} if counts[node] else {depth: 1.0}
            for rank in range(min(counts[node], RANKS)):
                for leaf, chance in found[firsts[node] + rank].items():
                    found[node][leaf] = found[node].get(leaf, 0.0) + law[rank] * chance
    return found


def reached(shape: Shape, row: Walked) -> tuple[int, int, int | None]:
    """How far another shape would have got in a round: tokens emitted for certain, and where certainty ends.

    Returns:
        Tokens, node, and the children of the node that are known to be wrong; None where the walk surely ends.
    """
    counts, firsts = shape.flat
    node, emitted = 0, 1
    for rank in row.ranks:
        if rank >= counts[node]:
            return emitted, node, None
        node = firsts[node] + rank
        emitted += 1
    return emitted, node, None if row.ended or counts[node] <= row.width else row.width


def beyond(
    shape: Shape, node: int, depth: int, width: int, found: Sequence[float], chances: Sequence[Sequence[float]]
) -> float:
    """Tokens expected below a node of a shape, given that its first `width` children are wrong.

    Args:
        found: what `tails` says of the shape.
    """
    if not width:
        return found[node]
    return sum(chance * (1.0 + found[child]) for child, chance in following(shape, node, depth, width, chances))


def following(
    shape: Shape, node: int, depth: int, width: int, chances: Sequence[Sequence[float]]
) -> list[tuple[int, float]]:
    """Children of a node with their chances to be right, given that its first `width` ones are wrong."""
    law, first = chances[min(depth, DEPTHS - 1)], shape.flat[1][node]
    left = 1.0 - sum(law[:width])
    ranks = range(width, min(shape.flat[0][node], RANKS))
    return [(first + rank, law[rank] / left) for rank in ranks] if left > 0 else []


def drafted_by(shape: Shape, row: Walked) -> int:
    """Nodes that another shape would have had verified: as many as it has, unless the drafter had no more to offer."""
    return shape.nodes if row.whole else min(row.drafted, shape.nodes)


# ---- seconds ---------------------------------------------------------------------------------------------------------


class Fit:
    """y = a * u + b * v by least squares, a and b never negative.

    Args:
        share: b leans towards this share of a, until observations say otherwise.
        trust: observations of v = 1 that this belief is worth.
    """

    CLIP = 3.0  # an observation counts at most as this many times what was expected: clocks see other processes too

    def __init__(self, share: float, trust: float = 4.0) -> None:
        self.share, self.trust = share, trust
        self.count = self.uu = self.uv = self.vv = self.uy = self.vy = 0.0

    def see(self, u: float, v: float, y: float, weight: float = 1.0) -> None:
        """Count an observation; the very first ones of a process are slow and weigh little."""
        if self.count:
            a, b = self.solve(weight)
            y = min(y, self.CLIP * (a * u + b * v))
        else:
            weight *= 0.25
        self.count += weight
        self.uu += weight * u * u
        self.uv += weight * u * v
        self.vv += weight * v * v
        self.uy += weight * u * y
        self.vy += weight * v * y

    def sums(self) -> list[float]:
        """All that is remembered."""
        return [self.count, self.uu, self.uv, self.vv, self.uy, self.vy]

    def restore(self, sums: Sequence[float]) -> None:
        """Remember what `sums` gave."""
        self.count, self.uu, self.uv, self.vv, self.uy, self.vy = sums

    def scale(self, factor: float) -> None:
        """Let all that was seen weigh `factor` times as much."""
        self.restore([value * factor for value in self.sums()])

    def solve(self, unit: float = 1.0) -> tuple[float, float]:
        """a and b; zeros before the first observation.

        Args:
            unit: weight of one observation of now.
        """
        lean = self.trust * unit
        uu, uv, vv = self.uu + lean * self.share**2, self.uv - lean * self.share, self.vv + lean
        det = uu * vv - uv * uv
        if not self.count or det <= 0:
            return 0.0, 0.0
        a, b = (self.uy * vv - self.vy * uv) / det, (self.vy * uu - self.uy * uv) / det
        if b < 0:
            return (self.uy / self.uu if self.uu else 0.0), 0.0
        return (a, b) if a >= 0 else (0.0, self.vy / self.vv)


class Curve:
    """Measured (x, y), straight lines in between; flat before the first, on in the last slope behind the last."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        if not points:
            raise ValueError("a curve needs a measurement; none was made")
        self.points = sorted(points)

    def __call__(self, x: float) -> float:
        """y at x."""
        if len(self.points) == 1 or x <= self.points[0][0]:
            return self.points[0][1]
        at = min(bisect_left(self.points, (x,)), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[at - 1], self.points[at]
        slope = (y1 - y0) / (x1 - x0)
        return y0 + slope * (x - x0) if x <= x1 else y1 + max(slope, 0.0) * (x - x1)


# ---- the best tree ---------------------------------------------------------------------------------------------------


def best_trees(chances: Sequence[Sequence[float]], nodes: int, depth: int) -> list[tuple[float, Shape]]:
    """For every budget from 1 to `nodes`: E[N] of the best tree no deeper than `depth`, and that tree.

    Sequoia's recursion with chances by depth: the best forest of m nodes for the children of rank r and above of a node at depth
    d takes y nodes for the subtree of child r and m - y for the later ones; a child is only there if those before it are.
    """
    zeros = [0.0] * (nodes + 1)
    below, picks = zeros, list[list[list[int]]]()  # picks[-1 - d][r][m]: nodes given to child r
    for level in range(depth - 1, -1, -1):
        after, of_level = zeros, list[list[int]]()
        for chance in reversed(chances[min(level, DEPTHS - 1)][:RANKS]):
            subtree = [chance * (1.0 + value) for value in below]
            now, pick = [0.0] * (nodes + 1), [0] * (nodes + 1)
            for most in range(1, nodes + 1):
                values = [subtree[given - 1] + after[most - given] for given in range(1, most + 1)]
                best = max(values)
                if best > 0:
                    now[most], pick[most] = best, 1 + values.index(best)
            after = now
            of_level.append(pick)
        picks.append(of_level[::-1])
        below = after
    picks.reverse()
    return [(1.0 + below[count], _shape(picks, count)) for count in range(1, nodes + 1)]


def _shape(picks: Sequence[Sequence[Sequence[int]]], nodes: int) -> Shape:
    """Follow the choices down; a tree that is a chain gets a chain's name."""
    paths: list[list[int]] = []

    def grow(path: list[int], left: int) -> None:
        if len(path) == len(picks):
            return
        for rank, pick in enumerate(picks[len(path)]):
            given = pick[left]
            if not given:
                return
            paths.append([*path, rank])
            grow(paths[-1], given - 1)
            left -= given

    grow([], nodes)
    if not paths:
        return OFF
    return uniform((1,) * len(paths)) if len(paths[-1]) == len(paths) else from_paths(paths)


def fastest_tree(
    chances: Sequence[Sequence[float]], seconds: Callable[[Shape], float], nodes: int, depths: Sequence[int]
) -> tuple[float, Shape]:
    """Tokens per second of the best tree of at most `nodes` nodes, and that tree; every depth in `depths` is a limit tried."""
    options = {shape.name: (expected, shape) for d in depths for expected, shape in best_trees(chances, nodes, d)}
    rated = [(expected / seconds(shape), shape) for expected, shape in options.values() if shape.depth]
    return max(rated, key=lambda pair: pair[0], default=(0.0, OFF))
