"""A drafter of known quality, for measurement and tests: it proposes the target's own next token at a given rate.

The target's text is written once, before the round loop, by plain decoding; under the coupled rule no draft can change it.
Drafting itself then costs nothing, so a run shows what speculation would buy at this acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider import noise
from outrider.models.protocol import TreeModel
from outrider.sampling import Sampler
from outrider.tree import Shape, TokenTree
from outrider.verify import Draft, Trial, Verdict


class OracleDrafter:
    """Knows the target.

    Args:
        target: the model whose text is foretold.
        rate: chance that a proposed token is the target's own, independently at every position.
        seed: keys these chances.
    """

    def __init__(self, target: TreeModel, rate: float, seed: int = 0) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"an oracle with rate {rate} is impossible; give a rate between 0 and 1")
        self.target, self.rate, self.seed = target, rate, seed
        self.name = f"oracle:{rate:g}"

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> OracleDraftState:
        """Write each row's text ahead by plain decoding."""
        if any(sampler.options.rule == "mss" and not sampler.greedy for sampler in samplers):
            raise ValueError(
                "an oracle cannot draft under rule 'mss', where the text depends on the drafts; use rule 'coupled'"
            )
        texts = [self._write(list(p), s, s.options.max_new_tokens) for p, s in zip(prompts, samplers)]
        return OracleDraftState(self, texts)

    def _write(self, ids: list[int], sampler: Sampler, count: int) -> list[int]:
        state = self.target.begin([ids[:-1]], count)
        limit = self.target.context
        for _ in range(count):
            if limit is not None and len(ids) >= limit:
                break
            logits_V = state.extend([ids[-1:]], [[-1]])[0, 0]
            state.commit([[0]])
            ids.append(sampler.pick(ids, logits_V))
            if ids[-1] in sampler.eos:  # behind it nothing is asked for, and a grammar's processor knows no next token
                break
        return ids


class OracleDraftState:
    """Texts of B rows, written ahead."""

    def __init__(self, drafter: OracleDrafter, texts: list[list[int]]) -> None:
        self.drafter, self.texts = drafter, texts

    def _token(self, row: int, position: int) -> int | None:
        """The proposed token: the target's own with chance `rate`, else its neighbour."""
        if position >= len(self.texts[row]):
            return None
        token = self.texts[row][position]
        if noise.uniform(self.drafter.seed, noise.DRAFT, position) < self.drafter.rate:
            return token
        return (token + 1) % self.drafter.target.vocab

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """The first child of every node along the first path is the oracle's; its siblings are other wrong tokens."""
        return [self._draw(row, c, s) for row, (c, s) in enumerate(zip(contexts, shapes))]

    def _draw(self, row: int, context: Sequence[int], shape: Shape) -> Draft:
        tree, trials, frontier = TokenTree(context[-1]), dict[int, list[Trial]](), [0]
        for depth, level in enumerate(shape.levels):
            token = self._token(row, len(context) + depth)
            if token is None:
                break
            following = []
            for node, count in zip(frontier, level):
                for rank in range(count):
                    if shape.budget and tree.drafted >= shape.budget:
                        break
                    child = tree.add(node, (token + 2 * rank) % self.drafter.target.vocab)
                    trials.setdefault(node, []).append(Trial(child))
                    following.append(child)
            frontier = following
        return Draft(tree, trials)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to do: the text is known."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.texts = [self.texts[row] for row in rows]
