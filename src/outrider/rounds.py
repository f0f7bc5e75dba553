"""What a round tells the controller: the clock, and along the walked path which child was right and how many were wrong.

That is enough to say what most other shapes would have emitted in the same round. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.tree import Shape
from outrider.verify import Draft, Verdict


@dataclass(frozen=True, slots=True)
class Walked:
    """One row's walk down its tree.

    Args:
        ranks: per accepted level, the place of the kept child among its siblings.
        width: children of the last kept node, all of them wrong; 0: it had none.
        ended: the drafter offered fewer children there than the shape asks for, so no shape would have got further.
        drafted: nodes without the root.
        whole: as many nodes were drafted as the shape asks for.
        levels: how many were drafted; None: as many as the shape has.
        stopped: the drafter ended before the shape's last level.
        fed: nodes and tokens fed to the drafter; None: as the shape asks for.
        beliefs: of every drafted node, the drafter's probability of the path to it, and whether that path was kept; in the order
            of depth, empty where the drafter has no probabilities.
        beyond: the tree was not held to the shape, so it tells nothing of shapes.
        matched: tokens of the text that a lookup follows, drafted or not.
        unused: of a lookup that was not drafted, how many tokens can be compared with what was written, and how many are
            the same from the first one on.
    """

    ranks: tuple[int, ...]
    width: int
    ended: bool
    drafted: int
    whole: bool
    levels: int | None = None
    stopped: bool = False
    fed: int | None = None
    beliefs: Sequence[tuple[float, bool]] = ()
    beyond: bool = False
    matched: int = 0
    unused: tuple[int, int] = (0, 0)

    @property
    def emitted(self) -> int:
        """Tokens that the round adds, N, before stop rules and the budget cut it."""
        return len(self.ranks) + 1


@dataclass(frozen=True, slots=True)
class Round:
    """A round of B rows, and the seconds of its phases."""

    shape: Shape
    rows: Sequence[Walked]
    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    @property
    def drafted(self) -> int:
        """Drafted tokens of all rows."""
        return sum(row.drafted for row in self.rows)

    @property
    def emitted(self) -> int:
        """Tokens emitted by all rows."""
        return sum(row.emitted for row in self.rows)

    @property
    def beyond(self) -> bool:
        """No row was held to the shape."""
        return all(row.beyond for row in self.rows)

    @property
    def levels(self) -> int:
        """Steps of drafting: rows take them together."""
        told = (row.levels for row in self.rows if row.levels is not None and not row.beyond)
        return max(told, default=self.shape.depth)

    @property
    def fed(self) -> int:
        """Nodes and tokens that the drafter was fed, of all rows."""
        return sum(self.shape.feeds if row.fed is None else row.fed for row in self.rows if not row.beyond)

    @property
    def seconds(self) -> float:
        """Wall clock of the round."""
        return self.draft + self.verify + self.commit


def walked(draft: Draft, verdict: Verdict, shape: Shape) -> Walked:
    """The walk of a row.

    Args:
        shape: what its drafter was asked for, cut to what the row may still write.
    """
    tree, path = draft.tree, verdict.path
    children, kept = tree.children, set(path)
    ranks = tuple([children[parent].index(child) for parent, child in pairwise(path)])
    width = len(children[path[-1]])
    # who had nothing to draft may have looked for it as long as for all
    levels = (max(tree.depths) if draft.levels is None else draft.levels) or None
    return Walked(
        ranks,
        width,
        width < _asked(shape, ranks),
        tree.drafted,
        tree.drafted >= shape.nodes,
        levels,
        levels is not None and levels < shape.depth,
        draft.fed if draft.fed is not None else sum(map(bool, children)) or None,
        [(belief, node in kept) for node, belief in sorted(draft.beliefs.items())],
        bool(draft.beyond),
        draft.matched,
        _compared(draft, verdict),
    )


def _compared(draft: Draft, verdict: Verdict) -> tuple[int, int]:
    """A lookup that was not drafted against what was written."""
    if not draft.unused:
        return 0, 0
    written = draft.tree.path_tokens(verdict.path[-1])[1:]
    if not written or written[-1] != verdict.next_token:  # the last token of a text is given twice
        written.append(verdict.next_token)
    pairs = list(zip(draft.unused, written))
    return len(pairs), next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))


def _asked(shape: Shape, ranks: Sequence[int]) -> int:
    """Children that the shape asks for at the node reached by these ranks; best-first shapes name no number."""
    if shape.budget:
        return 0
    counts, firsts = shape.flat
    node = 0
    for rank in ranks:
        if rank >= counts[node]:
            return 0
        node = firsts[node] + rank
    return counts[node]
