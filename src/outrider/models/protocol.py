"""What every model offers, target or drafter: begin, extend, commit.

The engine and the drafters know these two protocols and no class behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

from torch import Tensor

from outrider.scores import Scores

Rows = Sequence[Sequence[int]]


class TreeState(Protocol):
    """B sequences in flight: committed prefixes, and pending nodes behind them."""

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        ...

    @property
    def pending(self) -> int:
        """Pending nodes of each row, padding included: the index that the next node gets."""
        ...

    features: list[Tensor] | None
    """Hidden states at the taps that were asked for, [tokens, taps * D] per row: of the prompts after `begin`, then of the
    nodes of the last `extend`."""

    def extend(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes and return logits after each, [B, N, V] with N the longest row.

        Reads the committed state and never writes it. Parents are indices of pending nodes of the row, or -1 for the
        committed prefix; rows may bring different numbers of nodes, down to none.
        """
        ...

    def commit(self, paths: Rows) -> None:
        """Per row, a path of pending nodes joins the committed state; every other node is forgotten."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...

    def bytes(self) -> int:
        """Memory of the state."""
        ...


@runtime_checkable
class Follower(Protocol):
    """A `TreeState` that can leave out the logits that nobody asks for."""

    def follow(self, tokens: Rows) -> Tensor:
        """Feed a chain to every row, at least one token each, and return logits after its last token, [B, V]."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """A `TreeState` that can leave out logits where no more than the highest is asked for."""

    def score(self, tokens: Rows, parents: Rows) -> Sequence[Scores]:
        """`extend`, with the scores of each row."""
        ...


def scored(state: TreeState, tokens: Rows, parents: Rows) -> Sequence[Scores]:
    """Feed nodes to a state and return the scores of each row."""
    if hasattr(state, "score"):
        return cast(Scorer, state).score(tokens, parents)
    return [Scores(logits_NV) for logits_NV in state.extend(tokens, parents)]


class TreeModel(Protocol):
    """A language model that can score trees."""

    vocab: int
    """Size of the logits."""

    context: int | None
    """Most tokens of a sequence; None is unlimited."""

    way: str
    """How trees are scored, for people to read."""

    def begin(self, prompts: Rows, room: int = 0, taps: Sequence[int] = ()) -> TreeState:
        """Prefill B prompts (they may be empty) and make room for `room` more tokens or nodes a row.

        Args:
            taps: layers whose outputs the state hands out as `features`.

        Raises:
            ValueError: when the model cannot give them.
        """
        ...
