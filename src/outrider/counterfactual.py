"""A controller that learns about every shape from every round, whichever was drafted.

One verified tree tells what each smaller shape inside it would have emitted, and acceptance by depth and rank what larger ones
may expect; clocks of a few shapes tell, by nodes and levels, what every other would take. So shapes need not be tried in turn:
the fastest by these estimates is drafted, and only what the rounds so far cannot tell is explored, within a share of the time.
Where a drafter's branches and levels end within a round follows from the same rounds (`stopping.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.clocks import LARGEST_UNIT, Clocks
from outrider.cost import Fit, beyond, drafted_by, fastest_tree, reached, tails
from outrider.knowledge import Knowledge, from_data, to_data
from outrider.rounds import Round, Walked
from outrider.stopping import Stops, levels_behind, levels_of, stops
from outrider.tree import OFF, Shape

REFRESH, SOON = 32, 8  # rounds between updates of what unseen parts of trees may bring; after a new shape was tried
REGROW = 256  # rounds between searches for a better tree
TREE_NODES, TREE_DEPTHS = 12, (2, 3, 5, 8)
BELIEVED = 2.0  # rounds that a shape's first estimate is worth
TRUST = 16.0  # rounds that a prior is worth
BETTER = 1.03  # a new tree takes the place of the one before when it promises to be faster by this factor
OPTIMISM, ENOUGH = 0.5, 20.0  # of a shape of which one round is known; rounds after which a shape is known well enough
CHEAP = 0.05  # trials that cost less than this share of a round are as good as one that does
PURSE = 10.0  # most that exploring may have saved up, in plain rounds
FORGET = 0.15  # weight left to rounds before a change of the text
SLACK, ALARM, CLIP, LEAST_SPREAD = 0.5, 6.0, 3.0, 0.4  # of the two-sided cumulative sum that notices such a change


class _Arm:
    """A shape and what is thought of it. Sums are weighted; the newest round weighs one unit of the controller."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.weight = self.emitted = self.nodes = self.levels = 0.0
        self.hoped = 0.0  # tokens expected where rounds did not tell what this shape would have met,
        self.open: dict[tuple[int, int, int], float] = {}  # and where that was: (node, its depth, children known wrong)
        self.known = 0.0  # rounds in which it is certain what this shape would have emitted
        self.tails: list[float] = []
        self.speed = self.seconds = self.length = 0.0

    def scale(self, factor: float) -> None:
        self.weight *= factor
        self.emitted *= factor
        self.nodes *= factor
        self.levels *= factor
        self.hoped *= factor
        self.known *= factor
        self.open = {place: weight * factor for place, weight in self.open.items()}

    def expect(self, chances: Sequence[Sequence[float]]) -> None:
        """Think again about what was not told."""
        self.tails = tails(self.shape, chances)
        self.hoped = sum(
            weight * beyond(self.shape, *place, self.tails, chances) for place, weight in self.open.items()
        )

    def hear(self, row: Walked, unit: float, chances: Sequence[Sequence[float]], going: Sequence[float]) -> None:
        """What this shape would have emitted and had verified in a round of whatever shape."""
        emitted, node, width = reached(self.shape, row)
        self.weight += unit
        self.emitted += unit * emitted
        self.nodes += unit * drafted_by(self.shape, row)
        self.levels += unit * levels_of(self.shape.depth, row, going)
        if width is None:
            self.known += unit
        else:
            place = (node, emitted - 1, width)
            self.open[place] = self.open.get(place, 0.0) + unit
            self.hoped += unit * beyond(self.shape, *place, self.tails, chances)


class Counterfactual:
    """Follows the shape with the most tokens per second, as estimated for all of them after every round.

    Args:
        arms: shapes to choose from; "off" is added, and so is the best tree that acceptance asks for. Where they say that unsure
            branches end, it is learned when: that goes without saying in the names of the shapes drafted.
        discount: weight that a round keeps with every later one.
        explore: share of the time that trying other shapes may cost.
        margin: a shape must promise to be faster than plain decoding by this share.

    Raises:
        ValueError: for a best-first shape, of which other rounds tell nothing.
    """

    def __init__(
        self, arms: Sequence[Shape], discount: float = 0.98, explore: float = 0.015, margin: float = 0.01
    ) -> None:
        for arm in arms:
            if arm.budget:
                raise ValueError(f"{arm.name} grows otherwise in every round and cannot be compared; give fixed shapes")
        self.discount, self.explore, self.margin = discount, explore, margin
        self.knowledge = Knowledge()
        self.unit = 1.0  # weight of the newest round
        self.clocks = Clocks(discount)
        self.sizes = {1: self.clocks}  # by the number of rows, in powers of two
        self.purse: float | None = None  # seconds that exploring may still cost
        self.rows, self.rounds, self.spread, self.up, self.down = 1, 0, 1.0, 0.0, 0.0
        self.due = REFRESH  # the round in which to think again about unseen parts of trees
        self.chances, self.going = self.knowledge.acceptance.chances(), self.knowledge.going.chances()
        self.off = _Arm(OFF)
        self.grown: str | None = None
        least, self.reach = max(((arm.least, arm.reach) for arm in arms), default=(0.0, 0))
        self.stops = Stops(least, 0.0) if least else None
        self.arms: dict[str, _Arm] = {}
        for arm in arms:
            if arm.depth:
                self._add(arm.adapting(0.0, arm.reach, arm.within))

    def _add(self, shape: Shape, rounds: float = BELIEVED) -> _Arm:
        arm = self.arms[shape.name] = _Arm(shape)
        arm.weight = arm.emitted = arm.open[0, 0, 0] = rounds * self.unit
        arm.nodes = arm.weight * shape.nodes
        arm.levels = arm.weight * self._levels(shape)
        arm.expect(self.chances)
        return arm

    def _levels(self, shape: Shape) -> float:
        """That are expected to be drafted of a shape."""
        return 1.0 + levels_behind(1, shape.depth, self.going)

    # -- choosing --------------------------------------------------------------------------------------------------

    def choose(self) -> Shape:
        """The fastest shape, or one worth exploring, with the stops that the rounds so far ask for."""
        shape = self._choose()
        if self.stops is None or not shape.depth:
            return shape
        return replace(shape, least=self.stops.least, enough=self.stops.enough)

    def _choose(self) -> Shape:
        """The first round is plain: all others are compared with it."""
        if not self.clocks.weight or not self.arms:
            return OFF
        self._estimate()
        if not self.clocks.asked:  # nobody knows yet what drafting takes: begin with little
            return min(self.arms.values(), key=lambda arm: arm.shape.depth).shape
        leader = self._leader()
        return (self._curious(leader) or leader).shape

    def _estimate(self) -> None:
        """Tokens per round, seconds per round and speed of every arm."""
        off, clocks, rows, prices = self.off, self.clocks, self.rows, self.clocks.prices()
        off.seconds, off.length = clocks.plain, 1.0
        off.speed = (1.0 + self.margin) / off.seconds
        for arm in self.arms.values():
            arm.length = (arm.emitted + arm.hoped) / arm.weight
            arm.seconds = clocks.seconds(arm.shape, arm.nodes / arm.weight, arm.levels / arm.weight, rows, prices)
            arm.speed = arm.length / arm.seconds

    def _leader(self) -> _Arm:
        best = max(self.arms.values(), key=lambda arm: arm.speed)
        return best if best.speed > self.off.speed else self.off

    def _curious(self, leader: _Arm) -> _Arm | None:
        """Of the arms of which too little is known, and that might be faster than the leader, the one that promises most for what
        a trial is expected to cost, if that can be paid."""
        purse = self.purse or 0.0
        if purse <= 0:
            return None
        chosen, most, floor = None, 0.0, CHEAP * leader.seconds
        for arm in (self.off, *self.arms.values()):
            known = arm.known / self.unit
            if arm is leader or known >= ENOUGH:
                continue
            doubt = OPTIMISM * (1.0 / math.sqrt(known + 1e-3) - 1.0 / math.sqrt(ENOUGH))
            gain, cost = arm.speed * (1.0 + doubt) - leader.speed, arm.seconds - arm.length / leader.speed
            worth = gain / max(cost, floor)
            if cost <= purse and worth > most:
                chosen, most = arm, worth
        return chosen

    # -- learning --------------------------------------------------------------------------------------------------

    def reward(self, done: Round) -> None:
        """Learn from a round about all arms."""
        if done.seconds <= 0 or not done.rows:
            return
        self.rounds += 1
        self._account(done)
        self._age()
        if not done.shape.depth:
            self.off.known += self.unit
        else:
            self._hear(done)
        self.rows = len(done.rows)
        self.clocks = self.sizes.setdefault(self.rows.bit_length(), Clocks(self.discount))
        self.clocks.hear(done)
        if self.rounds <= SOON or self.rounds >= self.due:
            self._refresh()
        if self.rounds % REGROW == REFRESH:
            self._regrow()

    def _age(self) -> None:
        """Let earlier rounds fade, by making a new one weigh more."""
        self.unit /= self.discount
        if self.unit > LARGEST_UNIT:
            factor = 1.0 / self.unit
            self.knowledge.scale(factor)
            for arm in (self.off, *self.arms.values()):
                arm.scale(factor)
            self.unit = 1.0

    def _hear(self, done: Round) -> None:
        """What every arm would have emitted and had verified."""
        unit = self.unit / len(done.rows)
        for row in done.rows:
            self._notice(done.shape, row)
            self.knowledge.see(row, unit)
            for arm in self.arms.values():
                arm.hear(row, unit, self.chances, self.going)

    def _notice(self, shape: Shape, row: Walked) -> None:
        """A cumulative sum of surprises; when it runs over, the text has changed, and what was learned of it weighs little."""
        arm = self.arms.get(shape.name)
        if arm is None:
            return
        surprise = row.emitted - (arm.emitted + arm.hoped) / arm.weight
        z = min(max(surprise / self.spread, -CLIP), CLIP)
        self.spread = max(LEAST_SPREAD, math.sqrt(0.95 * self.spread**2 + 0.05 * surprise * surprise))
        self.up, self.down = max(0.0, self.up + z - SLACK), max(0.0, self.down - z - SLACK)
        if self.up > ALARM or self.down > ALARM:
            self.up = self.down = 0.0
            self.unit /= FORGET
            self.due = self.rounds

    def _account(self, done: Round) -> None:
        """What exploring has cost, against the speed that was expected of the leader, and what it may still cost."""
        limit = PURSE * self.clocks.plain
        if not limit or len(done.rows) != self.rows:
            return
        leader, loss = self._leader(), 0.0
        if leader.shape.name != done.shape.name and leader.speed:
            self.due = min(self.due, self.rounds + SOON)
            mine = self.arms.get(done.shape.name, self.off).seconds
            loss = (
                min(done.seconds, Fit.CLIP * mine) - done.emitted / self.rows / leader.speed
            )  # not a stall of the machine
        before = 0.2 * limit if self.purse is None else self.purse
        self.purse = min(max(before + self.explore * done.seconds - loss, -limit), limit)

    def _refresh(self) -> None:
        self.due = self.rounds + REFRESH
        self.chances = self.knowledge.acceptance.chances(self.unit)
        self.going = self.knowledge.going.chances(self.unit)
        for arm in self.arms.values():
            arm.expect(self.chances)
        self._learn_stops()

    def _learn_stops(self) -> None:
        """When branches and levels are to end, at the speed that is expected."""
        if self.stops is None or not (self.clocks.asked and self.clocks.weight):
            return
        self._estimate()
        _, *prices = self.clocks.prices()
        self.stops = stops(self.knowledge.calibration.worth(self.unit), self._leader().speed, self.rows, *prices)

    def _regrow(self) -> None:
        """Make the best tree for the acceptance seen so far an arm, in the place of the one before."""
        if not self.clocks.passes.count:
            return
        prices = self.clocks.prices()

        def seconds(shape: Shape) -> float:
            return self.clocks.seconds(shape, shape.nodes, self._levels(shape), self.rows, prices)

        speed, shape = fastest_tree(self.chances, seconds, TREE_NODES, TREE_DEPTHS)
        shape = shape.adapting(0.0, self.reach) if shape.depth else shape
        if shape.depth and shape.name not in self.arms:
            if self.grown is not None:
                old = self.arms[self.grown]
                if speed * seconds(old.shape) < BETTER * (1.0 + tails(old.shape, self.chances)[0]):
                    return
                del self.arms[self.grown]
            self.grown = shape.name
            self._add(shape)

    # -- what outlives a process -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learned, as plain data for JSON."""
        return {"rounds": self.rounds, **to_data(self.knowledge, self.sizes[1], self.unit)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what was learned earlier: first choices and first estimates, soon outweighed by new rounds.

        Raises:
            ValueError: when this is not a state.
        """
        knowledge, times = from_data(state)
        self.clocks.restore(**times)
        self._begin_with(knowledge, BELIEVED)

    def believe(self, prior: Mapping[str, Any]) -> None:
        """Begin with what was measured elsewhere, on other prompts and perhaps another machine: it is worth a few rounds, and
        its times count in plain passes.

        Raises:
            ValueError: when this is not a state.
        """
        knowledge, times = from_data(prior)
        knowledge.scale(min(1.0, TRUST / max(times["rounds"][2], 1.0)))
        self.clocks.believe(times, TRUST)
        self._begin_with(knowledge, TRUST)
        for arm in self.arms.values():
            arm.known = TRUST * self.unit

    def _begin_with(self, knowledge: Knowledge, rounds: float) -> None:
        self.knowledge = knowledge
        self.chances, self.going = knowledge.acceptance.chances(), knowledge.going.chances()
        for shape in [arm.shape for arm in self.arms.values()]:
            self._add(shape, rounds)
        self._regrow()
