"""A drafter around another one: all passes through, but for what a kind of wrapper does otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from torch import Tensor

from outrider.drafters.base import Drafter, DraftState, FeatureDraftState
from outrider.sampling import Sampler
from outrider.tree import Shape
from outrider.verify import Draft, Verdict


class Wrapped(ABC):
    """A drafter around another one."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name = inner, inner.name

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that the drafter reads."""
        return tuple(getattr(self.inner, "taps", ()))

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> DraftState:
        """Begin the drafter."""
        return self.around(self.inner.begin(prompts, samplers, room, stream))

    @abstractmethod
    def around(self, state: DraftState) -> DraftState:
        """What goes around the drafter's side of B sequences."""


W = TypeVar("W", bound=Wrapped)


class WrappedState(Generic[W]):
    """The drafter's side of B sequences, around that of the inner one."""

    def __init__(self, owner: W, inner: DraftState) -> None:
        self.owner, self.inner = owner, inner

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Pass the drafter's proposals on."""
        return self.inner.propose(contexts, shapes)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Pass verdicts on."""
        self.inner.observe(verdicts)

    def see(self, hidden: Sequence[Tensor]) -> None:
        """Pass hidden states on."""
        cast(FeatureDraftState, self.inner).see(hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.inner.keep(rows)
