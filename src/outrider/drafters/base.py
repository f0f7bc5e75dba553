"""What every drafter offers: begin a set of sequences, propose trees for them, hear what became of them.

Drafters are told the whole text so far (`contexts`, each ending with the root), so that a round without drafting needs no
special care: what a drafter has not seen yet is simply the rest of its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.sampling import Sampler
from outrider.tree import Shape
from outrider.verify import Draft, Verdict


class DraftState(Protocol):
    """A drafter's side of B sequences in flight."""

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """One tree per row, rooted at the last token of its context, no deeper than its shape."""
        ...

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """What was kept of the last proposal of each row."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...


class Drafter(Protocol):
    """Proposes tokens; may hold a model, an index, or nothing."""

    name: str

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> DraftState:
        """Start B sequences that may grow by `room` tokens or nodes.

        Args:
            stream: keys the drafter's own random draws; drafters that are merged must have different ones, since their
                draws must be independent.
        """
        ...
