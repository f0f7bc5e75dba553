"""What the rounds of a pair have told: acceptance, what beliefs are worth, how many levels are drafted; also as plain data.

Plain data comes from files, so it is read as if it might be anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outrider.clocks import Clocks, can_be
from outrider.cost import Acceptance
from outrider.rounds import Round, Walked
from outrider.stopping import Calibration, Going, Table
from outrider.tree import MATCHES, Shape, match_class
from outrider.worth import Copies, Instead, Worth

MOST_NODES, MOST_LOOKED_UP = 32, 16  # places of nodes that are told apart


class Knowledge:
    """What rounds of one drafter brought; weights are the caller's. Acceptance by depth and rank tells of trees of a fixed shape,
    the worth of nodes of those that grow best first; of lookups it counts how far they are kept, and what is brought instead."""

    def __init__(self) -> None:
        self.acceptance, self.calibration, self.going = Acceptance(), Calibration(), Going()
        self.nodes, self.lookups = Worth(MOST_NODES), [Copies(MOST_LOOKED_UP) for _ in MATCHES]
        self.instead = Instead(len(MATCHES))

    def hear(self, done: Round, weight: float = 1.0) -> None:
        """Count a round that asked for drafts.

        Args:
            weight: of each row.
        """
        for row in done.rows:
            self.see(row, done.shape, weight)

    def see(self, row: Walked, shape: Shape, weight: float = 1.0) -> None:
        """Count a walk down a tree that was grown by a shape."""
        if row.matched:
            copied = row.unused if row.unused[0] or not row.beyond else (row.drafted, len(row.ranks))
            self.lookups[match_class(row.matched)].see(*copied, weight)
        if row.beyond:
            return
        self.instead.see(match_class(row.matched) if row.matched else len(MATCHES), row.emitted, weight)
        self.calibration.see(row, weight)
        self.going.see(row, weight)
        if shape.budget:
            self.nodes.see([kept for _, kept in sorted(row.beliefs, reverse=True)], shape.budget, weight)
        else:
            self.acceptance.see(row, weight)

    def scale(self, factor: float) -> None:
        """Let all that was seen weigh `factor` times as much."""
        for part in (self.acceptance, self.calibration, self.going):
            part.scale(factor)
        for counts in (self.nodes, *self.lookups, self.instead):
            counts.scale(factor)

    def settle(self) -> None:
        """Take what was counted of lookups for what is to be expected before anything is seen."""
        for copies in self.lookups:
            copies.settle()
        self.instead.settle()

    def expect(self, other: Knowledge) -> None:
        """Expect of lookups what another expects."""
        for mine, copies in zip(self.lookups, other.lookups):
            mine.believed = copies.believed
        self.instead.ratios = other.instead.ratios

    def _tables(self) -> dict[str, Table]:
        return {"kept": self.calibration.kept, "on": self.calibration.on, "going": self.going.table}

    def _counts(self) -> dict[str, list[float]]:
        """Every row of counts by its name."""
        acceptance, rows = self.acceptance, dict[str, list[float]]()
        for depth in range(len(acceptance.tries)):
            rows |= {f"tries.{depth}": acceptance.tries[depth], f"hits.{depth}": acceptance.hits[depth]}
        for name, table in self._tables().items():
            rows |= {f"{name}.tries": table.tries, f"{name}.hits": table.hits}
        for name, part in (("nodes", self.nodes), ("instead", self.instead)):
            rows |= {f"{name}.{key}": row for key, row in part.rows().items()}
        for matched, copies in zip(MATCHES, self.lookups):
            rows |= {f"lookups.{matched}.{key}": row for key, row in copies.rows().items()}
        return rows


def to_data(knowledge: Knowledge, clocks: Clocks, unit: float = 1.0) -> dict[str, Any]:
    """All of it as plain data for JSON.

    Args:
        unit: weight of one observation of now.
    """
    counts = {name: [value / unit for value in row] for name, row in knowledge._counts().items()}
    return {"counts": counts, "clocks": clocks.state()}


def from_data(data: Mapping[str, Any]) -> tuple[Knowledge, dict[str, list[float]]]:
    """What `to_data` wrote: knowledge, and what `Clocks.restore` takes.

    Raises:
        ValueError: when it is no such thing.
    """
    counts, clocks = _part(data, "counts"), _part(data, "clocks")
    found = Knowledge()
    for name, row in found._counts().items():
        row[:] = _checked(counts.get(name), len(row), 0.0)
    for name, row in found._counts().items():
        tried = re.sub(r"hits|there$|(?<=\.)kept$", "tries", name)
        tries = found._counts().get(tried, row)
        if any(hit > tried * 1.0001 for hit, tried in zip(row, tries)):
            raise ValueError("its numbers do not fit each other")
    if any(tokens < rounds * 0.9999 for rounds, tokens in zip(found.instead.rounds, found.instead.emitted)):
        raise ValueError("its rounds emitted less than a token each")
    times = {name: _checked(clocks.get(name), size, 0.0) for name, size in Clocks.SIZES.items()}
    if not can_be(**times):
        raise ValueError("its numbers do not fit each other")
    return found, times


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    if not isinstance(part, Mapping):
        raise ValueError(f"{name} is no table")
    return part


def _checked(values: Any, size: int, least: float) -> list[float]:
    if not isinstance(values, list) or len(values) != size:
        raise ValueError("a list has the wrong length")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 1e18:
            raise ValueError(f"{value!r} is no such number")
    return [float(value) for value in values]
