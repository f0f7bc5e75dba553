"""Several drafters in order of preference: the first that has something to propose drafts the round.

Cheap and sure drafters come first: prompt lookup where it matches, else a table, else a model. Unlike a merged drafter only
one of them is asked to do work that costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import Drafter, DrafterTeam, DraftState, DraftStateTeam
from outrider.drafters.merged import verdict_on
from outrider.sampling import Sampler
from outrider.tree import OFF, Shape
from outrider.verify import Draft, Verdict


class CascadeDrafter(DrafterTeam):
    """Asks its drafters in order."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.name = ">".join(drafter.name for drafter in drafters)

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> CascadeDraftState:
        """Begin all drafters, each with a random stream of its own."""
        states = self.begin_all(prompts, samplers, room, stream)
        return CascadeDraftState(states)


class CascadeDraftState(DraftStateTeam):
    """The drafters' sides of B sequences."""

    def __init__(self, states: Sequence[DraftState]) -> None:
        super().__init__(states)
        self.asked: list[tuple[DraftState, list[Draft]]] = []
        self.chosen: list[Draft] = []

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Per row the first tree that is more than its root."""
        self.asked = []
        chosen: list[Draft | None] = [None] * len(contexts)
        for state in self.states:
            wanted = [shape if draft is None else OFF for shape, draft in zip(shapes, chosen)]
            drafts = state.propose(contexts, wanted)
            self.asked.append((state, drafts))
            chosen = [new if old is None and new.tree.drafted else old for old, new in zip(chosen, drafts)]
            if all(draft is not None for draft in chosen):
                break
        last = self.asked[-1][1]
        self.chosen = [draft if draft is not None else last[row] for row, draft in enumerate(chosen)]
        return self.chosen

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Tell those that were asked how far their own tree was followed; the others read it in the next contexts."""
        for state, drafts in self.asked:
            state.observe([verdict_on(d.tree, c.tree, v) for d, c, v in zip(drafts, self.chosen, verdicts)])
