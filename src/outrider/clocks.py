"""What rounds of about so many rows take: plain passes, passes over trees, drafting. Newer rounds weigh more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from outrider.cost import Fit
from outrider.rounds import Round

LARGEST_UNIT = 1e9
TOGETHER = 8  # rows that kernels and matrix units take together: one more begins another group of them
GROUPS = 8  # wider passes count as the last group
# a row more within a group, as a share of a plain pass, and the squared rows that this is worth
NODE, NODE_TRUST = 0.01, 0.1
STEP = 0.1  # of another group, as a share of a plain pass, before any was seen
KNOWN = 0.002  # weight, in observations of now, from which on a group was seen: a step forgotten would be tried again and again
TOLD = 0.05  # weight of a pass that tells of the slope among those before
PROPOSAL = 0.5  # levels that a proposal takes besides those that it drafts
PLAIN_CLIP = 1.3  # most that a plain round counts, in those before: what drafting gains is measured by them
NEW_CLIP = 2.0  # most that the first pass over about so many rows counts, in those expected: it may be a stall, and decides much
SLOW_START = 0.25  # weight of the very first rounds of a process
FORGOTTEN = 1e-12  # weight, in observations of now, below which a group is as if it was never seen
# seconds of a pass, and weight of all passes of a kind, that clocks may have: one is divided by the other, and others by both
SHORTEST, LIGHTEST = 1e-9, 1e-30


class Passes:
    """Seconds of a pass by its rows: every group of eight has a mean of its own, all groups share a slope.

    On most machines a pass gets dearer in steps: eight rows cost little more than one, and the ninth costs a share of a pass.
    """

    def __init__(self) -> None:
        self.weight, self.rows, self.total = ([0.0] * GROUPS for _ in range(3))
        # of rows, and of rows and seconds together, within groups: means over the passes that tell
        self.spread = self.rise = 0.0

    def see(self, rows: int, seconds: float, weight: float) -> None:
        """Count a pass; one that took far longer than expected saw other processes, and counts as far as `Fit.CLIP` allows."""
        group = _group(rows)
        if known := self.weight[group]:
            seconds = min(seconds, Fit.CLIP * self.total[group] / known)
            aside = rows - self.rows[group] / known
            told = TOLD * min(aside * aside, 1.0)  # passes over as many rows as ever tell nothing of the slope
            self.spread += told * (aside * aside - self.spread)
            self.rise += told * (aside * (seconds - self.total[group] / known) - self.rise)
        self.weight[group] += weight
        self.rows[group] += weight * rows
        self.total[group] += weight * seconds

    def knows(self, rows: int) -> bool:
        """Whether a pass over about as many rows was seen."""
        return self.weight[_group(rows)] > 0

    def curve(self, plain: float, unit: float) -> Callable[[int], float]:
        """Seconds of a pass over so many rows.

        Args:
            plain: seconds of a plain pass.
            unit: weight of one observation of now.
        """
        slope, seen = self.slope(plain), [g for g in range(GROUPS) if self.weight[g] > KNOWN * unit]
        step = STEP * plain
        if len(seen) > 1:  # as between the groups that were seen
            (x0, y0), (x1, y1) = (self._mean(g) for g in (seen[0], seen[-1]))
            step = max(0.0, (y1 - y0 - slope * (x1 - x0)) / (seen[-1] - seen[0]))
        # of each group: rows and seconds of a point on its line
        starts, near = list[tuple[float, float]](), (1.0, plain)
        for group in range(GROUPS):
            if group in seen:
                near = self._mean(group)
            elif group:  # what is not next to any that was seen is not to be tried yet
                near = near[0], near[1] + (step if group == 1 or group - 1 in seen else max(step, plain))
            starts.append(near)

        def seconds(rows: int) -> float:
            x, y = starts[_group(rows)]
            return max(y + slope * (rows - x), plain)

        return seconds

    def _mean(self, group: int) -> tuple[float, float]:
        return self.rows[group] / self.weight[group], self.total[group] / self.weight[group]

    def least(self, weight: float) -> float:
        """Mean seconds of the cheapest group that weighs more than this."""
        return min((self._mean(g)[1] for g in range(GROUPS) if self.weight[g] > weight), default=math.inf)

    def slope(self, plain: float) -> float:
        """Seconds of a further row within a group."""
        return max(0.0, (self.rise + NODE_TRUST * NODE * plain) / (self.spread + NODE_TRUST))

    def sums(self) -> list[float]:
        """What is remembered of groups."""
        return [*self.weight, *self.rows, *self.total]

    def restore(self, sums: Sequence[float]) -> None:
        """Remember what `sums` gave."""
        self.weight, self.rows, self.total = (list(sums[GROUPS * i : GROUPS * (i + 1)]) for i in range(3))

    def scale(self, factor: float) -> None:
        """Let all that was seen weigh `factor` times as much. What weighs next to nothing is forgotten, before its seconds are
        too small a number to be any."""
        kept = [weight * factor >= FORGOTTEN for weight in self.weight] * 3
        self.restore([value * factor * keep for value, keep in zip(self.sums(), kept)])


def _group(rows: int) -> int:
    return min((rows - 1) // TOGETHER, GROUPS - 1)


class Clocks:
    """Seconds of plain rounds, of passes over trees, and of drafting.

    Args:
        discount: weight that a round keeps with every later one.
    """

    SIZES: ClassVar = {"rounds": 4, "passes": 3 * GROUPS, "drafts": 6}  # of the lists of `state`

    def __init__(self, discount: float = 0.98) -> None:
        self.discount, self.unit = discount, 1.0  # the newest round weighs one unit
        self.total = self.weight = 0.0  # of plain passes
        self.plain = 0.0
        """Seconds of a plain pass; 0 before the first."""
        self.passes, self.drafts = Passes(), Fit(0.05)
        self.asked = self.empty = 0.0  # rounds that asked for drafts, and those that got none
        self.believed: tuple[dict[str, list[float]], float] | None = None  # what was measured elsewhere, and its worth

    def hear(self, done: Round) -> None:
        """Count a round."""
        self._age()
        rest = done.verify + done.commit
        if not done.drafted:
            weight = self.unit if self.weight else SLOW_START * self.unit
            self.total += weight * (min(rest, PLAIN_CLIP * self.plain) if self.weight else rest)
            self.weight += weight
            self._time_plain()
            if self.believed is not None:
                self._scale_beliefs()
        if done.shape.depth:
            self._hear_drafting(done, rest)
            self._time_plain()

    def _hear_drafting(self, done: Round, rest: float) -> None:
        """Count what a round that asked for drafts took for them, and for all else."""
        if not done.beyond:
            levels = done.levels
            self.asked += self.unit
            self.drafts.see(levels + PROPOSAL, max(done.fed - levels, 0), done.draft, self.unit)
        if done.drafted:
            rows = len(done.rows) + done.drafted
            if self.plain and not self.passes.knows(rows):
                rest = min(rest, NEW_CLIP * self.passes.curve(self.plain, self.unit)(rows))
            self.passes.see(rows, rest, self.unit)
        elif not done.beyond:
            self.empty += self.unit

    def _time_plain(self) -> None:
        """Passes over trees take no less than plain ones: where more is known of them, and they took less, plain rounds were
        stalled."""
        self.plain = min(self.total / self.weight, self.passes.least(self.weight)) if self.weight else 0.0

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

    def verify(self, rows: int) -> Callable[[int], float]:
        """Seconds of a pass over trees of so many drafted nodes in each of the rows, where some rounds get none."""
        plain, empty = self.plain, self.empty / self.asked if self.asked else 0.0
        passes = self.passes.curve(plain, self.unit)
        return lambda nodes: empty * plain + (1.0 - empty) * passes(rows * (1 + nodes))

    def draft(self, levels: float, further: float) -> float:
        """Seconds of drafting so many levels, with so many nodes and tokens fed beyond one a level."""
        level, node = self.drafting()
        return level * (levels + PROPOSAL) + node * further

    def drafting(self) -> tuple[float, float]:
        """Seconds of a level, and of a further node that is fed."""
        return self.drafts.solve(self.unit)

    # -- what outlives a process -----------------------------------------------------------------------------------

    def state(self) -> dict[str, list[float]]:
        """What was measured, as plain data."""
        factor = 1.0 / self.unit
        parts = {name: [value * factor for value in part.sums()] for name, part in self._parts().items()}
        rounds = [self.total, self.weight, self.asked, self.empty]
        return {"rounds": [value * factor for value in rounds], **parts}

    def believe(self, times: dict[str, list[float]], rounds: float) -> None:
        """Take drafting times of elsewhere for so many rounds of here, in plain passes; they count from the first plain pass on.

        Passes over trees are not believed: their steps are those of a machine, and a round or two tell them.

        Args:
            times: what `state` gave there.
        """
        self.believed = times, rounds

    def _scale_beliefs(self) -> None:
        """Translate what is believed to this machine, now that a plain pass is timed."""
        assert self.believed is not None
        times, worth = self.believed
        self.believed = None
        total, weight, asked, empty = times["rounds"]
        seconds = self.plain * weight / total if total else 1.0
        factor = min(1.0, worth / max(asked, 1.0)) * self.unit
        self.asked, self.empty = asked * factor, empty * factor
        counts, sums = times["drafts"][:4], times["drafts"][4:]
        self.drafts.restore([*(value * factor for value in counts), *(value * factor * seconds for value in sums)])

    def restore(self, rounds: list[float], **parts: list[float]) -> None:
        """Go on from what `state` gave; what was believed before is outweighed."""
        self.total, self.weight, self.asked, self.empty = rounds
        self.believed = None
        for name, part in self._parts().items():
            part.restore(parts[name])
        self._time_plain()

    def _parts(self) -> dict[str, Any]:
        return {"passes": self.passes, "drafts": self.drafts}


def can_be(rounds: Sequence[float], passes: Sequence[float], drafts: Sequence[float]) -> bool:
    """Whether clocks can have measured what is said to be their state."""
    seconds, weight, asked, empty = rounds
    if weight < LIGHTEST or seconds < SHORTEST * weight or empty > asked * 1.0001:
        return False
    for counted, rows, spent in zip(*(passes[part * GROUPS : (part + 1) * GROUPS] for part in range(3))):
        if counted and (counted < LIGHTEST or rows < counted * 0.9999 or spent < SHORTEST * counted):
            return False
        if not counted and (rows or spent):
            return False
    _, uu, uv, vv, uy, vy = drafts
    if (uy > LIGHTEST and not uu) or (vy > LIGHTEST and not vv):
        return False
    return uv <= math.sqrt(uu) * math.sqrt(vv) * 1.0001 + LIGHTEST
