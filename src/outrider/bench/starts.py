"""What rounds of one shape would bring, told by rounds of several shapes that took turns.

A round begins anew where a draft failed, or goes on where a tree was kept down to a leaf. Where drafts fail is much the same for
all shapes, but a deep tree is seldom kept down to a leaf, and a shallow one often. So both kinds of rounds are told apart, and
how often each comes in a run of one shape is the balance of going from either kind to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from outrider.cost import Acceptance, beyond, following, leaving, reached, tails
from outrider.rounds import Round, Walked
from outrider.tree import Shape

FEW = 30  # walks that are too few to be choosy
BALANCED = 1 << 20  # steps to the balance: kinds may seldom give way to others


@dataclass(frozen=True)
class Brought:
    """Of a shape's rounds, on average.

    Args:
        length: tokens emitted.
        empty: share of the rounds in which there was nothing to draft.
    """

    length: float
    empty: float


class Kind:
    """Walks that began alike."""

    def __init__(self, rows: Sequence[Walked]) -> None:
        acceptance = Acceptance()
        for row in rows:
            acceptance.see(row)
        self.rows, self.chances = rows, acceptance.chances()

    def walk(self, shape: Shape) -> tuple[float, dict[int, float]]:
        """Tokens that a shape is expected to emit, and the chance that its tree is kept down to a leaf, by the leaf's depth: what
        the walks tell, and expectation where they tell nothing."""
        counts, found, leaves = shape.flat[0], tails(shape, self.chances), leaving(shape, self.chances)
        tokens, whole = 0.0, dict[int, float]()
        for row in self.rows:
            emitted, node, width = reached(shape, row)
            tokens += emitted
            ahead = {node: 1.0} if width == 0 or not counts[node] else dict[int, float]()
            if width is not None:
                tokens += beyond(shape, node, emitted - 1, width, found, self.chances)
                ahead = ahead or dict(following(shape, node, emitted - 1, width, self.chances))
            for child, chance in ahead.items():
                for leaf, out in leaves[child].items():
                    whole[leaf] = whole.get(leaf, 0.0) + chance * out / len(self.rows)
        return tokens / len(self.rows), whole

    @property
    def empty(self) -> float:
        """Share of rounds in which there was nothing to draft."""
        return sum(not row.drafted for row in self.rows) / len(self.rows)


class Starts:
    """Rounds told apart by how they began.

    Args:
        texts: rounds one after the other, of each text; those behind a plain round tell nothing, since nobody knows what was not
            drafted there.

    Raises:
        ValueError: when no round asked for drafts.
    """

    def __init__(self, *texts: Sequence[Round]) -> None:
        anew, self.going_on = list[Walked](), list[tuple[int, Walked]]()
        for before, done in (pair for text in texts for pair in pairwise(text)):
            if not before.shape.depth or not done.shape.depth:
                continue
            for was, row in zip(before.rows, done.rows):
                if was.width or was.ended:
                    anew.append(row)
                else:
                    self.going_on.append((len(was.ranks), row))
        asked = [row for text in texts for done in text if done.shape.depth for row in done.rows]
        if not asked:
            raise ValueError("no round asked for drafts")
        self.anew = Kind(anew or [row for _, row in self.going_on] or asked)
        self.by_depth = dict[int, Kind]()

    def behind(self, depth: int) -> Kind:
        """Rounds that go on behind a path of about so many tokens: who copies goes on the longer, the longer it did."""
        if depth not in self.by_depth:
            close = [row for kept, row in self.going_on if depth <= 2 * kept <= 4 * depth]
            if len(close) < FEW:
                close = [row for _, row in sorted(self.going_on, key=lambda one: abs(one[0] - depth))[:FEW]]
            self.by_depth[depth] = Kind(close) if close else self.anew
        return self.by_depth[depth]

    def brought(self, shape: Shape) -> Brought:
        """Of rounds of this shape alone."""
        kinds = {0: self.anew}
        # all depths of leaves, as rounds that go on may reach some that rounds which begin anew do not
        kinds |= {depth: self.behind(depth) for depth in sorted(leaving(shape, self.anew.chances)[0]) if depth}
        walks = [kind.walk(shape) for kind in kinds.values()]
        onward = np.array([[whole.get(depth, 0.0) for depth in kinds] for _, whole in walks])
        onward[:, 0] = 1.0 - onward[:, 1:].sum(1)
        # half of the way, so that kinds which take turns settle, too
        shares = np.linalg.matrix_power((np.eye(len(kinds)) + onward) / 2, BALANCED)[0]
        length = sum(share * tokens for share, (tokens, _) in zip(shares, walks))
        return Brought(float(length), float(sum(share * kind.empty for share, kind in zip(shares, kinds.values()))))
