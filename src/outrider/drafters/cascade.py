"""Several drafters in order of preference: the first that has something to propose drafts the round.

Cheap and sure drafters come first: prompt lookup where it matches, else a table, else a model. Unlike a merged drafter only
one of them is asked to do work that costs. Where a shape has a `reach`, drafters that cost nothing may draft as deep as that, or
as it trusts them (`Shape.trust`): how deep it pays to draft is another question for them than for the model behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
        return CascadeDraftState(states, [d.name if getattr(d, "free", False) else "" for d in self.drafters])


class CascadeDraftState(DraftStateTeam):
    """The drafters' sides of B sequences.

    Args:
        free: the names of drafters that cost nothing, "" for others.
    """

    def __init__(self, states: Sequence[DraftState], free: Sequence[str]) -> None:
        super().__init__(states)
        self.free = free
        self.asked: list[tuple[DraftState, list[Draft]]] = []
        self.chosen: list[Draft] = []

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Per row the first tree that is more than its root."""
        self.asked = []
        chosen: list[Draft | None] = [None] * len(contexts)
        unused = list[Draft | None](chosen)
        for state, free in zip(self.states, self.free):
            mine = [shape.lookup if free and shape.reach else replace(shape, trust=()) for shape in shapes]
            wanted = [shape if draft is None else OFF for shape, draft in zip(mine, chosen)]
            drafts = state.propose(contexts, wanted)
            if free:
                drafts = [replace(d, beyond=free) if s.reach and d.tree.drafted else d for d, s in zip(drafts, shapes)]
                unused = [new if old is None and new.unused else old for old, new in zip(unused, drafts)]
            self.asked.append((state, drafts))
            chosen = [new if old is None and new.tree.drafted else old for old, new in zip(chosen, drafts)]
            if all(draft is not None for draft in chosen):
                break
        last = self.asked[-1][1]
        self.chosen = [draft if draft is not None else last[row] for row, draft in enumerate(chosen)]
        told = [(draft, other) for draft, other in zip(self.chosen, unused)]
        return [replace(d, matched=o.matched, unused=o.unused) if o else d for d, o in told]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Tell those that were asked how far their own tree was followed; the others read it in the next contexts."""
        for state, drafts in self.asked:
            state.observe([verdict_on(d.tree, c.tree, v) for d, c, v in zip(drafts, self.chosen, verdicts)])
