"""Rounds as seen along their walked paths, and the figures that follow from many of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.drafters.base import Drafter, DraftState
from outrider.drafters.wrapped import Wrapped, WrappedState
from outrider.tree import Shape
from outrider.verify import Draft, Verdict

MEMBERS = 5  # the first children of a root that membership is asked for
BINS = 10


@dataclass(frozen=True)
class Walk:
    """A round as seen along the walked path.

    Args:
        ranks: per level that held a drafted child, the place of the target's token among the children; None: not there.
        beliefs: where the drafter gave a law, the confidence of its first choice, and whether that was the target's token.
        depth: levels that were drafted.
        drafted: nodes.
    """

    ranks: list[int | None]
    beliefs: list[tuple[float, bool]]
    depth: int
    drafted: int


def walk(draft: Draft, verdict: Verdict) -> Walk:
    """What a round tells."""
    tree, ranks, beliefs = draft.tree, list[int | None](), list[tuple[float, bool]]()
    after = [tree.tokens[node] for node in verdict.path[1:]] + [verdict.next_token]
    for node, token in zip(verdict.path, after):
        children = [tree.tokens[child] for child in tree.children[node]]
        if not children:
            break
        ranks.append(children.index(token) if token in children else None)
        q_V = next((trial.law.q_V for trial in draft.trials.get(node, ()) if trial.law.q_V is not None), None)
        if q_V is not None:
            beliefs.append((float(q_V.max()), int(q_V.argmax()) == token))
    return Walk(ranks, beliefs, max(tree.depths), tree.drafted)


class Watched(Wrapped):
    """A drafter whose rounds are written down in `walks`."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.walks = list[Walk]()

    def around(self, state: DraftState) -> WatchedState:
        """Watch B sequences."""
        return WatchedState(self, state)


class WatchedState(WrappedState[Watched]):
    """The drafter's side of B sequences."""

    drafts: Sequence[Draft] = ()

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Pass the drafter's proposals on."""
        self.drafts = drafts = self.inner.propose(contexts, shapes)
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Write down what became of them."""
        self.owner.walks += [walk(draft, verdict) for draft, verdict in zip(self.drafts, verdicts)]
        self.inner.observe(verdicts)


# ---- figures ---------------------------------------------------------------------------------------------------------


def rates_by_depth(walks: Sequence[Walk]) -> list[float]:
    """Share of the tries at each depth that were accepted."""
    depth = max((len(w.ranks) for w in walks), default=0)
    tried = [sum(len(w.ranks) > d for w in walks) for d in range(depth)]
    return [sum(len(w.ranks) > d and w.ranks[d] is not None for w in walks) / tried[d] for d in range(depth)]


def membership(walks: Sequence[Walk]) -> list[float]:
    """Share of rounds whose next token was among the first k children of the root, k = 1..5."""
    places = [w.ranks[0] if w.ranks and w.ranks[0] is not None else MEMBERS for w in walks]
    return [sum(place < k for place in places) / max(len(places), 1) for k in range(1, MEMBERS + 1)]


def calibration(walks: Sequence[Walk]) -> dict[str, Any] | None:
    """Expected calibration error and its bins of (mean confidence, agreement, count); None without laws."""
    beliefs = [belief for w in walks for belief in w.beliefs]
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for confidence, right in beliefs:
        bins[min(int(confidence * BINS), BINS - 1)].append((confidence, right))
    means = [(_mean(c for c, _ in group), _mean(r for _, r in group), len(group)) for group in bins if group]
    if not means:
        return None
    error = sum(count * abs(agreement - confidence) for confidence, agreement, count in means) / len(beliefs)
    return {"ece": error, "bins": means}


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
