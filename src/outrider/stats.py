"""What a run did: counts, clocks, and how many rounds emitted how many tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = ("prefill", "draft", "verify", "commit")


@dataclass
class Stats:
    """Counts of one sequence (clocks are those of the whole call that it was part of).

    Tokens emitted = accepted + rounds, but for those of the last round that a stop rule or the budget cut.
    """

    rounds: int = 0
    drafted: int = 0
    tried: int = 0
    accepted: int = 0
    emitted: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    histogram: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "total"), 0.0))

    def add_round(self, shape: str, drafted: int, accepted: int, tried: int, emitted: int) -> None:
        """Count a round.

        Args:
            tried: levels of the walk that held a drafted token: those accepted, and the one where it found none right.
            emitted: tokens that were kept of accepted + 1.
        """
        self.rounds += 1
        self.drafted += drafted
        self.accepted += min(accepted, emitted)
        self.tried += min(tried, emitted)
        self.emitted += emitted
        self.shapes[shape] += 1
        self.histogram[emitted] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, the correction or bonus included (N)."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Levels accepted / levels tried along the walked paths, a ratio."""
        return self.accepted / self.tried if self.tried else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of rounds, prefill left out."""
        busy = self.seconds["total"] - self.seconds["prefill"]
        return self.emitted / busy if busy > 0 else 0.0


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a block towards a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Seconds by phase of a round that began when the clock stood at `before`."""
        return {name: self.seconds[name] - before[name] for name in PHASES if name != "prefill"}
