"""What a round of a target costs as the text grows: milliseconds of scoring and committing a chain, and memory by kind.

Recurrent layers keep a state and the factors of pending nodes, whatever the length; attention layers keep keys and values of
every token. Texts are random tokens, which does not change what a round costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.cache.tree_cache import TreeCache
from outrider.machine import settle
from outrider.models.protocol import TreeModel
from outrider.picture import mark_lengths, picture

WARMUP = 2  # rounds that are not counted


@dataclass(frozen=True)
class RoundPoint:
    """A target at one length.

    Args:
        ms: median of a round's pass and commit.
        state_bytes: of the committed states of recurrent layers.
        factor_bytes: of the buffers for pending nodes of these layers.
        attention_bytes: of keys and values.
    """

    length: int
    ms: float
    state_bytes: int
    factor_bytes: int
    attention_bytes: int


def measure_rounds(
    target: TreeModel,
    lengths: Sequence[int],
    depth: int = 5,
    repeats: int = 15,
    tell: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[RoundPoint]:
    """Rounds behind texts of all lengths, in turns; in each all nodes of a chain are scored in one pass and committed.

    Args:
        lengths: tokens of the text.
        depth: levels of the chain below its root.

    Raises:
        ValueError: for lengths that are none or too long for the target, and for targets without a cache of ours.
    """
    rounds = repeats + WARMUP
    if not lengths or min(lengths) < 1 or depth < 1 or repeats < 1:
        raise ValueError("lengths, depth and repeats must be 1 or more")
    room = rounds * (depth + 1)
    if target.context is not None and max(lengths) + room > target.context:
        raise ValueError(
            f"the target holds {target.context} tokens, and {room} of them are for the rounds; give shorter --lengths"
        )
    states: list[Any] = []
    for number, length in enumerate(lengths):
        tell(number, len(lengths), f"reading {length} tokens")
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(0, target.vocab, (length,), generator=generator).tolist()
        states.append(target.begin([tokens], room))
    if not all(isinstance(getattr(state, "cache", None), TreeCache) for state in states):
        raise ValueError(
            "the target's states are its own objects, which cannot be measured; give one that is scored in one pass"
        )
    chain, spent = list(range(depth + 1)), [list[float]() for _ in lengths]
    for number in range(rounds):
        tell(number, rounds, "rounds")
        for state, times in zip(states, spent):
            start = time.perf_counter()
            state.extend([[1 + token for token in chain]], [[node - 1 for node in chain]])
            state.commit([chain])
            settle(state.model.device)
            times.append(time.perf_counter() - start)
    tell(rounds, rounds, "rounds")
    return [_point(*found) for found in zip(lengths, spent, states)]


def _point(length: int, times: list[float], state: Any) -> RoundPoint:
    cache: TreeCache = state.cache
    whole = cache.states.bytes() if cache.states is not None else 0
    kept = sum(t.numel() * t.element_size() for t in cache.states.committed(0).values()) if cache.states else 0
    return RoundPoint(length, 1e3 * statistics.median(times[WARMUP:]), kept, whole - kept, cache.bytes() - whole)


# ---- for people ------------------------------------------------------------------------------------------------------

MEMORY = {"state_bytes": "states", "factor_bytes": "pending nodes", "attention_bytes": "keys and values"}


def to_json(points: Sequence[RoundPoint], depth: int) -> dict[str, Any]:
    """Plain data."""
    return {"depth": depth, "rounds": [asdict(point) for point in points]}


def render(points: Sequence[RoundPoint], depth: int, console: Console) -> None:
    """A row a length."""
    table = Table("text", f"ms a round of {depth + 1} nodes", *(f"{what}, MB" for what in MEMORY.values()))
    for point in points:
        held = (f"{getattr(point, name) / 1e6:.2f}" for name in MEMORY)
        table.add_row(str(point.length), f"{point.ms:.2f}", *held)
    console.print(table)


def plot(points: Sequence[RoundPoint], depth: int, path: Path) -> None:
    """Time of a round, and memory by kind, against the length of the text."""
    lengths = [point.length for point in points]
    with picture(path, 2) as (left, right):
        left.plot(lengths, [point.ms for point in points], marker="o")
        left.set(ylabel=f"milliseconds of a round of {depth + 1} nodes")
        for name, what in MEMORY.items():
            right.plot(lengths, [getattr(point, name) / 1e6 for point in points], marker="o", label=what)
        right.set(ylabel="MB")
        right.legend()
        for axes in (left, right):
            axes.set(xlabel="tokens of text", xscale="log", ylim=(0, None))
            mark_lengths(axes, lengths)
            axes.grid(alpha=0.3)
