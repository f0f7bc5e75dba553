"""What every drafter offers: begin a set of sequences, propose trees for them, hear what became of them.

Drafters are told the whole text so far (`contexts`, each ending with the root), so that a round without drafting needs no
special care: what a drafter has not seen yet is simply the rest of its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outrider.noise import mix
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


class FeatureDraftState(DraftState, Protocol):
    """A drafter that reads the target's hidden states."""

    def see(self, hidden: Sequence[Tensor]) -> None:
        """Hidden states [tokens, taps * D] of tokens that the target has just committed, per row: first the prompts."""
        ...


class Drafter(Protocol):
    """Proposes tokens; may hold a model, an index, or nothing.

    A drafter with an attribute `taps` (layers of the target) gets their outputs through `FeatureDraftState.see`. One with
    `priors` (by the name of the drafter that it is, or is a part of) says what its rounds brought elsewhere (`train/prior.py`).
    """

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


def shared_taps(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """The layers that the drafters of a set read.

    Raises:
        ValueError: when they read different ones.
    """
    wanted = {tuple(taps) for drafter in drafters if (taps := getattr(drafter, "taps", ()))}
    if len(wanted) > 1:
        raise ValueError(
            "these drafters read different layers of the target; use one feature head, or heads trained alike"
        )
    return wanted.pop() if wanted else ()


class DrafterTeam:
    """What drafters made of drafters share: how they begin, and what they read of the target."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("an empty list of drafters cannot draft; give at least one, or drafter=None")
        self.drafters = list(drafters)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that drafters read."""
        return shared_taps(self.drafters)

    def begin_all(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int
    ) -> list[DraftState]:
        """Begin all drafters, each with a random stream of its own."""
        return [d.begin(prompts, samplers, room, mix(stream, i + 1)) for i, d in enumerate(self.drafters)]


class DraftStateTeam:
    """The drafters' sides of B sequences."""

    def __init__(self, states: Sequence[DraftState]) -> None:
        self.states = list(states)

    def see(self, hidden: Sequence[Tensor]) -> None:
        """Pass hidden states on to those that read them."""
        for state in self.states:
            if hasattr(state, "see"):
                state.see(hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        for state in self.states:
            state.keep(rows)
