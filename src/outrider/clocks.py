"""What rounds of about so many rows take: plain passes, passes over trees, drafting. Newer rounds weigh more."""

from __future__ import annotations

from typing import Any, ClassVar

from outrider.cost import Fit
from outrider.rounds import Round
from outrider.tree import Shape

LARGEST_UNIT = 1e9
OWN, ODD = 4.0, 1.5  # rounds before a shape's own clock counts as much as what is expected, and how far off one may be
Prices = tuple[float, float, float, float]


class Clocks:
    """Seconds of rounds by shape, as far as measured, and by nodes and levels, where not.

    Args:
        discount: weight that a round keeps with every later one.
    """

    SIZES: ClassVar = {"rounds": 4, "passes": 6, "drafts": 6}  # of the lists of `state`

    def __init__(self, discount: float = 0.98) -> None:
        self.discount, self.unit = discount, 1.0  # the newest round weighs one unit
        self.total = self.weight = 0.0  # of plain passes
        self.passes, self.drafts = Fit(0.02), Fit(0.05)
        self.asked = self.empty = 0.0  # rounds that asked for drafts, and those that got none
        self.believed: tuple[dict[str, list[float]], float] | None = None  # what was measured elsewhere, and its worth
        self.own: dict[str, list[float]] = {}  # rounds of a shape, and their seconds over those expected

    @property
    def plain(self) -> float:
        """Seconds of a plain pass; 0 before the first."""
        return self.total / self.weight if self.weight else 0.0

    def hear(self, done: Round) -> None:
        """Count a round."""
        self._age()
        rest = done.verify + done.commit
        if not done.drafted:
            weight = self.unit if self.weight else 0.25 * self.unit  # the first passes of a process are slow
            self.total += weight * (min(rest, Fit.CLIP * self.plain) if self.weight else rest)
            self.weight += weight
            self._scale_beliefs()
        if not done.shape.depth:
            return
        levels = done.levels
        further = max(done.fed - levels, 0)
        self.asked += self.unit
        self.drafts.see(levels, further, done.draft, self.unit)
        if not done.drafted:
            self.empty += self.unit
            return
        self.passes.see(1.0, done.drafted, rest, self.unit)
        a, b = self.passes.solve(self.unit)
        level, node = self.drafts.solve(self.unit)
        own = self.own.setdefault(done.shape.name, [0.0, 0.0])
        expected = a + b * done.drafted + level * levels + node * further
        own[0] += self.unit
        own[1] += self.unit * min(max(done.seconds / expected, 1 / ODD), ODD)

    def _age(self) -> None:
        """Let earlier rounds fade, by making a new one weigh more."""
        self.unit /= self.discount
        if self.unit > LARGEST_UNIT:
            self.scale(1.0 / self.unit)

    def scale(self, factor: float) -> None:
        """Count all weights in other units."""
        self.unit *= factor
        self.total *= factor
        self.weight *= factor
        self.asked *= factor
        self.empty *= factor
        self.passes.scale(factor)
        self.drafts.scale(factor)
        self.own = {name: [rounds * factor, ratio * factor] for name, (rounds, ratio) in self.own.items()}

    def prices(self) -> Prices:
        """Seconds of a round that asks for drafts, and more for each node verified, level drafted, and further node fed."""
        plain = self.plain
        a, b = self.passes.solve(self.unit) if self.passes.count else (plain, plain * self.passes.share)
        empty = self.empty / self.asked if self.asked else 0.0
        return empty * plain + (1.0 - empty) * a, b, *self.drafts.solve(self.unit)

    def seconds(self, shape: Shape, nodes: float, levels: float, rows: int, prices: Prices) -> float:
        """Of a round.

        Args:
            nodes: drafted in each row, on average.
            levels: drafted, on average.
            rows: number of rows.
            prices: what `prices` says.
        """
        base, node, level, further = prices
        fed = shape.feeds * levels / shape.depth if shape.depth else 0.0
        expected = base + node * rows * nodes + level * levels + further * (rows * fed - levels)
        if shape.name not in self.own:
            return expected
        rounds, ratio = self.own[shape.name]
        lean = OWN * self.unit
        return expected * (lean + ratio) / (lean + rounds)

    # -- what outlives a process -----------------------------------------------------------------------------------

    def state(self) -> dict[str, list[float]]:
        """What was measured, as plain data; shapes' own clocks are left out."""
        factor = 1.0 / self.unit
        fits = {name: [value * factor for value in fit.sums()] for name, fit in self._fits().items()}
        rounds = [self.total, self.weight, self.asked, self.empty]
        return {"rounds": [value * factor for value in rounds], **fits}

    def believe(self, times: dict[str, list[float]], rounds: float) -> None:
        """Take times of elsewhere for so many rounds of here, in plain passes; they count from the first plain pass on.

        Args:
            times: what `state` gave there.
        """
        self.believed = times, rounds

    def _scale_beliefs(self) -> None:
        """Translate what is believed to this machine, now that a plain pass is timed."""
        if self.believed is None:
            return
        times, worth = self.believed
        self.believed = None
        total, weight, asked, empty = times["rounds"]
        seconds = self.plain * weight / total if total else 1.0
        factor = min(1.0, worth / max(asked, 1.0)) * self.unit
        self.asked, self.empty = asked * factor, empty * factor
        for name, fit in self._fits().items():
            counts, sums = times[name][:4], times[name][4:]
            fit.restore([*(value * factor for value in counts), *(value * factor * seconds for value in sums)])

    def restore(self, rounds: list[float], **fits: list[float]) -> None:
        """Go on from what `state` gave."""
        self.total, self.weight, self.asked, self.empty = rounds
        for name, fit in self._fits().items():
            fit.restore(fits[name])

    def _fits(self) -> dict[str, Any]:
        return {"passes": self.passes, "drafts": self.drafts}
