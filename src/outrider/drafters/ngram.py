"""Prompt lookup: what followed the last few tokens before, in the prompt or in the text, is proposed again.

Costs no model pass. Several different continuations of the same n-gram make a tree; longer matches are tried first, of equal ones
the latest. Proposals are made without chance, so their laws are one-hot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.sampling import Sampler
from outrider.tree import CONTESTED, MATCHES, Shape, TokenTree, match_class
from outrider.verify import Draft, Trial, Verdict

CERTAIN = 16  # tokens of a match that says more than what followed shorter ones
MOST_ENDS = 64  # places where a match stood before that are looked at, the latest ones


class NgramDrafter:
    """Prompt lookup.

    Args:
        longest, shortest: sizes of the n-grams looked up, longest first.
        trust: how deep to draft after a match of so many tokens or more, shorter ones as the shortest named; without any as deep
            as asked.
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


@dataclass(frozen=True)
class Continuation:
    """What followed a match.

    Args:
        matched: tokens of the match, as far as they were counted.
        trusted: how many of the tokens to draft.
    """

    matched: int
    tokens: list[int]
    trusted: int

    @property
    def drafted(self) -> list[int]:
        """Tokens to draft."""
        return self.tokens[: self.trusted]


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

    def continuations(self, text: Sequence[int], shape: Shape) -> list[Continuation]:
        """Different continuations of the end of `text`, as many and as deep as a shape has room for."""
        most, found = shape.nodes if shape.budget else shape.width, list[Continuation]()
        for size in self.sizes:
            if len(text) < size:
                continue
            for matched, end in self._matches(text, size):
                tokens = self._copy(text, end, shape.depth)
                new = Continuation(matched, tokens, min(self._trusted(matched, shape), len(tokens)))
                if not any(new.drafted == other.tokens[: new.trusted] for other in found):
                    found.append(new)
                if len(found) >= most:
                    return found
        return found

    def _matches(self, text: Sequence[int], size: int) -> list[tuple[int, int]]:
        """Where the last `size` tokens stood before, and how many tokens match there: most first, of equals the latest. Where the
        text went on in different ways, that counts as less than the shortest match."""
        ends = self.after.get(tuple(text[-size:]), ())[-MOST_ENDS:]
        longer = [m for m in reversed(MATCHES) if m > size and m < len(text)] if size == self.sizes[0] else []
        tails = [(m, text[-m:]) for m in longer]
        found = [(next((m for m, tail in tails if text[max(end - m, 0) : end] == tail), size), end) for end in ends]
        found.sort(reverse=True)
        if found and found[0][0] < CERTAIN and len({text[end] for end in ends}) > 1:
            return [(CONTESTED, end) for _, end in found]
        return found

    def _trusted(self, matched: int, shape: Shape) -> int:
        """How deep to draft after a match."""
        if shape.trust:
            return shape.trust[match_class(matched)]
        if not self.trust:
            return shape.depth
        return self.trust[max((size for size in self.trust if size <= matched), default=min(self.trust))]

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
            found = index.continuations(context, shape) if shape.depth else []
            for one in found:
                _add_branch(tree, trials, one.drafted, shape)
            matched, tokens = (found[0].matched, found[0].tokens) if found else (0, ())
            drafts.append(Draft(tree, trials, matched=matched, unused=() if tree.drafted else tokens))
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
