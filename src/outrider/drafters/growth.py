"""A tree in the making: which nodes get children next, what hangs under them, and what of it is proposed in the end.

Who knows the children does not matter: `lm.py` has them from a model, `bench/replay.py` from a recording.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from outrider.tree import Shape, TokenTree
from outrider.verify import Draft, Law, Trial

Found = tuple[int, int, Law, float]
"""A parent in the tree, the child's token, the law it was drawn from, and the cumulative log q of the path to it."""


@dataclass
class Growth:
    """A tree in the making, for one row."""

    tree: TokenTree
    context: list[int]
    fed: dict[int, int]  # tree node -> pending node of the drafter
    chain: list[int]  # pending nodes that lead to the root, the root last
    trials: dict[int, list[Trial]] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [0])
    read: int = 1  # tokens of the text that were fed with the root
    levels: int = 0  # drafted so far
    wanted: dict[int, int] = field(default_factory=dict)  # fed nodes of the frontier -> how many children they get
    scores: dict[int, float] = field(default_factory=lambda: {0: 0.0})  # cumulative log q, where the shape asks for it

    def want(self, shape: Shape, level: int) -> list[int]:
        """Choose the nodes of the frontier that get children at this level."""
        counts = shape.levels[level] if level < shape.depth else ()
        if shape.budget and counts:
            # what is not among the best nodes so far cannot have a child among the best of all
            best = sorted(self.scores, key=lambda n: -self.scores[n])[: shape.budget + 1]
            best = [node for node in best if node in self.frontier][: max(1, shape.budget // 2)]
            self.wanted = {node: counts[0] for node in self.frontier if node in best}
        else:
            scores = [self.scores.get(node, 0.0) for node in self.frontier]
            floor = shape.floor(max(scores, default=0.0))
            every = zip(self.frontier, counts, scores)
            self.wanted = {node: count for node, count, score in every if count and score >= floor}
        if shape.enough and sum(math.exp(self.scores[node]) for node in self.wanted) < shape.enough:
            self.wanted = {}
        return list(self.wanted)

    def hang(self, found: Iterable[Found], shape: Shape, ends: Container[int] = frozenset()) -> list[int | None]:
        """Hang children under the nodes that wanted them, and make them the next frontier.

        Args:
            ends: tokens behind which there is no text, and so nothing to draft.

        Returns:
            The node of every child; None where the branch ends instead.
        """
        found = list(found)
        floor = shape.floor(max((score for *_, score in found), default=0.0)) if shape.budget else -math.inf
        self.frontier, self.levels, nodes = [], self.levels + 1, list[int | None]()
        for parent, token, law, score in found:
            if score < floor:
                nodes.append(None)
                continue
            child = self.tree.add_once(parent, token)
            self.trials.setdefault(parent, []).append(Trial(child, law))
            if child not in self.frontier and token not in ends:
                self.frontier.append(child)
            if shape.believes:
                self.scores[child] = score
            nodes.append(child)
        return nodes

    def finish(self, shape: Shape, reading: float = 0.0) -> Draft:
        """The tree to propose.

        Args:
            reading: seconds that went into text far behind.
        """
        fed = self.read + len(self.fed) - 1  # nodes that are left out were fed, too
        if max(map(len, self.tree.children)) > 1 or (shape.budget and self.tree.drafted > shape.budget):
            self._arrange(shape)
        beliefs = {node: math.exp(score) for node, score in self.scores.items() if node}
        return Draft(self.tree, self.trials, beliefs=beliefs, fed=fed, levels=self.levels, reading=reading)

    def _arrange(self, shape: Shape) -> None:
        """Leave out what a budget has no room for (OPT-Tree: ancestors outrank descendants), and lay every node right behind its
        parent, the first child first: then the likeliest path is one piece, and what is kept of it need not be moved."""
        old, order = self.tree, range(1, len(self.tree))
        if shape.budget and old.drafted > shape.budget:
            kept = set(sorted(order, key=lambda n: (-self.scores[n], n))[: shape.budget])
        else:
            kept = set(order)
        tree, renamed, waiting = TokenTree(old.root), {0: 0}, old.children[0][::-1]
        while waiting:
            node = waiting.pop()
            if node in kept:
                renamed[node] = tree.add(renamed[old.parents[node]], old.tokens[node])
                waiting += old.children[node][::-1]
        self.trials = {
            renamed[parent]: [Trial(renamed[t.node], t.law) for t in tried if t.node in renamed]
            for parent, tried in self.trials.items()
            if parent in renamed
        }
        self.fed = {renamed[node]: at for node, at in self.fed.items() if node in renamed}
        self.scores = {renamed[node]: score for node, score in self.scores.items() if node in renamed}
        self.tree = tree
