"""Prompt lookup: what followed the last few tokens before, in the prompt or in the text, is proposed again.

Costs no model pass. Several different continuations of the same n-gram make a tree; the latest occurrence is tried first,
longer matches before shorter ones. Proposals are made without chance, so their laws are one-hot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.sampling import Sampler
from outrider.tree import Shape, TokenTree
from outrider.verify import Draft, Trial, Verdict


class NgramDrafter:
    """Prompt lookup.

    Args:
        longest, shortest: sizes of the n-grams looked up, longest first.
        trust: how deep to draft after a match of so many tokens; sizes that are not named are trusted as deep as asked.
    """

    name = "ngram"
    free = True

    def __init__(self, longest: int = 4, shortest: int = 2, trust: Mapping[int, int] | None = None) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens are impossible; give 1 <= shortest <= longest")
        self.longest, self.shortest, self.trust = longest, shortest, dict(trust or {})

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> NgramDraftState:
        """Start with empty indexes; they read the prompts at the first proposal."""
        return NgramDraftState([NgramIndex(self.longest, self.shortest, self.trust) for _ in prompts])


class NgramIndex:
    """Where each n-gram of one growing text ended: positions right after it, latest last."""

    def __init__(self, longest: int, shortest: int, trust: Mapping[int, int]) -> None:
        self.sizes, self.trust = range(longest, shortest - 1, -1), trust
        self.after: dict[tuple[int, ...], list[int]] = {}
        self.read = 0

    def follow(self, text: Sequence[int]) -> None:
        """Index what is new. An n-gram at the very end has no continuation yet and waits."""
        for end in range(max(self.read, 1), len(text)):
            for size in self.sizes:
                if end >= size:
                    self.after.setdefault(tuple(text[end - size : end]), []).append(end)
        self.read = max(len(text), 1)

    def continuations(self, text: Sequence[int], depth: int, most: int) -> list[list[int]]:
        """Up to `most` different continuations of the end of `text`, each of up to `depth` tokens."""
        found: list[list[int]] = []
        for size in self.sizes:
            if len(text) < size:
                continue
            for end in reversed(self.after.get(tuple(text[-size:]), ())[-64:]):
                branch = self._copy(text, end, min(depth, self.trust.get(size, depth)))
                if not any(branch == other[: len(branch)] for other in found):
                    found.append(branch)
                if len(found) >= most:
                    return found
        return found

    @staticmethod
    def _copy(text: Sequence[int], start: int, depth: int) -> list[int]:
        """`depth` tokens from `start` on; where the text ends, the copy goes on copying itself, as a loop would."""
        branch: list[int] = []
        period = len(text) - start
        while len(branch) < depth:
            at = start + len(branch)
            branch.append(text[at] if at < len(text) else branch[len(branch) - period])
        return branch


class NgramDraftState:
    """Indexes of B texts."""

    def __init__(self, indexes: list[NgramIndex]) -> None:
        self.indexes = indexes

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Up to as many continuations as the shape has leaves; no match proposes nothing."""
        drafts = []
        for index, context, shape in zip(self.indexes, contexts, shapes):
            index.follow(context)
            tree = TokenTree(context[-1])
            trials: dict[int, list[Trial]] = {}
            most = shape.nodes if shape.budget else shape.width
            branches = index.continuations(context, shape.depth, most) if shape.depth else []
            for branch in branches:
                _add_branch(tree, trials, branch, shape)
            drafts.append(Draft(tree, trials))
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to do: the next contexts tell all."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.indexes = [self.indexes[row] for row in rows]


def _add_branch(tree: TokenTree, trials: dict[int, list[Trial]], branch: Sequence[int], shape: Shape) -> None:
    """Merge a continuation into the tree as far as the shape has room."""
    node = 0
    for level, token in zip(shape.levels, branch):
        child = tree.child(node, token)
        if child is None:
            full = len(tree.children[node]) >= max(level)
            if full or tree.drafted >= shape.nodes:
                return
            child = tree.add(node, token)
            trials.setdefault(node, []).append(Trial(child))
        node = child
