"""The two exact rules by which drafted tokens become text. Pure functions: no model, no cache, no clock.

Coupled: the target's token at a node is fixed by its law and by noise keyed to the position, whatever was drafted; the walk
follows it while a child carries it. Multi-step speculative sampling (SpecInfer, ASPLOS'24, Algorithm 2): children are tried
in draw order against the law they were drawn from, and each rejection leaves the residual. p is the target, q the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.tree import TokenTree


@dataclass(frozen=True)
class Verdict:
    """What a round keeps: the path (node 0 first, always kept) and the token that follows it."""

    path: list[int]
    next_token: int

    @property
    def accepted(self) -> int:
        """Drafted tokens kept in the round, a."""
        return len(self.path) - 1


@dataclass(frozen=True)
class Law:
    """The law that a drafted token was drawn from: q, with tokens drawn before it taken out.

    Args:
        q_V: drafter probabilities, or None for a token that was chosen without chance (one-hot).
        without: tokens that this draw could no longer give (drawing without replacement).
    """

    q_V: Tensor | None = None
    without: tuple[int, ...] = ()

    def probs(self, token: int, like_V: Tensor) -> Tensor:
        """The law as a vector of the length, dtype and device of `like_V`."""
        if self.q_V is None:
            law_V = torch.zeros_like(like_V)
            law_V[token] = 1.0
            return law_V
        law_V = torch.zeros_like(like_V)
        size = min(len(law_V), len(self.q_V))  # vocabularies may be padded to different lengths
        law_V[:size] = self.q_V[:size].to(law_V)
        if self.without:
            law_V[list(self.without)] = 0.0
        return _normalised(law_V, law_V)


ONE_HOT = Law()


@dataclass(frozen=True)
class Trial:
    """One drawn child: the node that carries the token, and the law that it was drawn from."""

    node: int
    law: Law = ONE_HOT


@dataclass(frozen=True)
class Draft:
    """A tree and, per parent, its children in draw order. Two drawers of one token are two trials of one node.

    Args:
        beyond: who drafted it, where that was not held to the shape that was asked for; else "".
        beliefs: per drafted node the drafter's probability of the path to it; empty where the drafter has none.
        fed: nodes and tokens of the text that were fed to a model to draft this; None: the nodes with children.
        levels: steps that this took; None: as many as the tree is deep.
        reading: seconds of these that went into text far behind, such as a prompt.
        matched: tokens of the text that what was looked up follows, as far as they were counted; 0: nothing was found.
        unused: what was looked up and not drafted, as it is not trusted.
    """

    tree: TokenTree
    trials: dict[int, list[Trial]]
    beyond: str = ""
    beliefs: Mapping[int, float] = field(default_factory=dict)
    fed: int | None = None
    levels: int | None = None
    reading: float = 0.0
    matched: int = 0
    unused: Sequence[int] = ()


def verify_coupled(tree: TokenTree, pick: Callable[[int], int], ends: Container[int] = frozenset()) -> Verdict:
    """Walk down while a child carries the target's own token.

    Args:
        tree: what was drafted.
        pick: the target's token after a node; called once per node of the walked path.
        ends: tokens behind which there is no text, so that nobody is asked for what would follow; the last token is given twice.
    """
    path = [0]
    while True:
        token = pick(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Verdict(path, token)
        path.append(child)
        if token in ends:
            return Verdict(path, token)


def acceptance(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """min(1, p/q) at the token: how likely it is kept. A token that q could not have drawn is never kept."""
    p, q = torch.stack([p_V[token], q_V[token]]).tolist()
    return min(1.0, p / q) if q > 0 else 0.0


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(p - q, 0)): the law to go on with after a rejection; p itself where rounding leaves nothing."""
    return _normalised((p_V - q_V).clamp_(min=0), p_V)


def _normalised(weights_V: Tensor, otherwise_V: Tensor) -> Tensor:
    """Weights as a law, or the other one where they are all zero: decided where they are, so that nobody waits for them."""
    total = weights_V.sum()
    return torch.where(total > 0, weights_V / total, otherwise_V)


def verify_mss(
    tree: TokenTree,
    trials: dict[int, Sequence[Trial]] | dict[int, list[Trial]],
    law: Callable[[int], Tensor],
    uniform: Callable[[int, int], float],
    draw: Callable[[int, Tensor], int],
    ends: Container[int] = frozenset(),
) -> Verdict:
    """Multi-step speculative sampling down the tree.

    Args:
        tree: what was drafted.
        trials: per parent its children in draw order.
        law: the target's processed law p after a node, float [V].
        uniform: a fresh uniform number in [0, 1) for (node, trial), independent of the drafter's streams.
        draw: a token from a law after a node, from a stream of its own.
        ends: as of `verify_coupled`.
    """
    path = [0]
    while True:
        node = path[-1]
        p_V = law(node)
        for number, trial in enumerate(trials.get(node, ())):
            token = tree.tokens[trial.node]
            q_V = trial.law.probs(token, p_V)
            if uniform(node, number) < acceptance(p_V, q_V, token):
                path.append(trial.node)
                if token in ends:
                    return Verdict(path, token)
                break
            p_V = residual(p_V, q_V)
        else:
            return Verdict(path, draw(node, p_V))
