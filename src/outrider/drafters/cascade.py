"""Several drafters in order of preference: the first that has something to propose drafts the round.

Cheap and sure drafters come first: prompt lookup where it matches, else a table, else a model. Unlike a merged drafter only
one of them is asked to do work that costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.drafters.base import Drafter, DraftState, shared_taps
from outrider.drafters.merged import verdict_on
from outrider.noise import mix
from outrider.sampling import Sampler
from outrider.tree import OFF, Shape
from outrider.verify import Draft, Verdict


class CascadeDrafter:
    """Asks its drafters in order."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("an empty cascade of drafters cannot draft; give at least one, or drafter=None")
        self.drafters = list(drafters)
        self.name = ">".join(drafter.name for drafter in drafters)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that drafters read."""
        return shared_taps(self.drafters)

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> CascadeDraftState:
        """Begin all drafters, each with a random stream of its own."""
        states = [d.begin(prompts, samplers, room, mix(stream, i + 1)) for i, d in enumerate(self.drafters)]
        return CascadeDraftState(states)


class CascadeDraftState:
    """The drafters' sides of B sequences."""

    def __init__(self, states: Sequence[DraftState]) -> None:
        self.states = list(states)
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

    def see(self, hidden: Sequence[Tensor]) -> None:
        """Pass hidden states on to those that read them."""
        for state in self.states:
            if hasattr(state, "see"):
                state.see(hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        for state in self.states:
            state.keep(rows)
