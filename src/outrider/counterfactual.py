"""A controller that learns about every shape from every round, whichever was drafted.

A verified tree tells which children the target would have taken, by depth and rank (`cost.py`) or by the drafter's belief in them
(`worth.py`): so it tells of every smaller shape inside it and, as far as levels are alike, of larger ones. Clocks tell by rows
and levels what every shape would take. The fastest by these estimates is drafted; where its branches and levels end within a
round follows from the same rounds (`stopping.py`).

What drafting may lose is bounded by a purse. It holds a share of the time and what drafting gained; every round that took longer
than its tokens would have taken plainly is paid from it. When it is empty drafting ends, and only when it can pay for what a
trial is expected to lose there is one: cheap trials come often, dear ones rarely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.clocks import LARGEST_UNIT, Clocks
from outrider.cost import fastest_tree, tails
from outrider.knowledge import MOST_LOOKED_UP, Knowledge, from_data, to_data
from outrider.rounds import Round, Walked
from outrider.stopping import Stops, stops
from outrider.tree import OFF, Shape
from outrider.worth import totals

SOON, REFRESH = 8, 8  # drafted rounds after each of which shapes are rated again; rounds between two times later on
REGROW = 128  # drafted rounds between searches for the best tree of a fixed shape; one more is after the first few
TREE_NODES, TREE_DEPTHS = 12, (2, 3, 5, 8)
BELIEVED = 16.0  # rounds that a prior is worth
START, PURSE = 2.0, 8.0  # what the purse holds at first and at most, in plain rounds
STALL = 1.5  # most that a drafted round takes from the purse, in those expected
CHECK = 0.005  # share of the speed that plain rounds may cost while drafting pays: they tell what it is compared with
LEAST_PRICE = 0.2  # of a trial, as a share of what it loses when nothing is right
FRUITLESS = 16  # drafted rounds in a row without a token kept, from which on trials may cost half as much
FORGET = 0.03  # weight left to rounds before a change of the text
SLACK, ALARM, CLIP, LEAST_SPREAD = 0.5, 6.0, 3.0, 0.4  # of the two-sided cumulative sum that notices such a change


@dataclass(frozen=True)
class Rating:
    """What a shape is expected to bring and take in a round of each row.

    Args:
        length: tokens.
        seconds: of the round.
        speed: tokens per second, lookups that come in between included.
    """

    shape: Shape
    length: float
    seconds: float
    speed: float


@dataclass
class _Pace:
    """What is known of the time of rounds of about as many rows.

    Args:
        purse: plain rounds whose time drafting may still lose; None before there was one.
        on: whether drafting goes on from round to round, or rounds are trials; None before that was asked.
        since: the last plain round.
    """

    clocks: Clocks
    purse: float | None = None
    on: bool | None = None
    since: int = 0


class Counterfactual:
    """Follows the shape with the most tokens per second, as estimated for all of them.

    Args:
        arms: shapes to choose from; "off" is added, and so is the best tree that acceptance asks for. Where they say that unsure
            branches end, it is learned when: that goes without saying in the names of the shapes drafted.
        discount: weight that a round keeps with every later one.
        share: of the time that may be lost by drafting.
        margin: a shape must promise to be faster than plain decoding by this share.
    """

    def __init__(
        self, arms: Sequence[Shape], discount: float = 0.99, share: float = 0.012, margin: float = 0.01
    ) -> None:
        self.discount, self.share, self.margin = discount, share, margin
        self.knowledge = Knowledge()
        self.unit = 1.0  # weight of the newest round
        self.pace = _Pace(Clocks())
        self.paces = {1: self.pace}  # by the number of rows, in powers of two
        least, self.reach = max(((arm.least, arm.reach) for arm in arms), default=(0.0, 0))
        self.stops = Stops(least, 0.0) if least else None
        self.arms = [arm.adapting(0.0, arm.reach, arm.within) for arm in arms if arm.depth]
        self.tree: Shape | None = None
        self.rows, self.rounds, self.drafted = 1, 0, 0
        self.fruitless = 0  # drafted rounds since a token was kept
        self.regrow, self.waiting = SOON, list[Round]()
        self.best: Rating | None = None
        self.chosen = OFF
        self.going, self.verify = self.knowledge.going.chances(), self.clocks.verify(1)
        self.found = [0.0, 0.0, 0.0]  # tokens and seconds of lookups, and rounds without
        self.fill = [0.0, 0.0]  # nodes that were drafted, and that would have been had no branch ended
        self.spread, self.up, self.down = 1.0, 0.0, 0.0  # of surprises

    @property
    def clocks(self) -> Clocks:
        """Of rounds of about as many rows as now."""
        return self.pace.clocks

    # -- choosing --------------------------------------------------------------------------------------------------

    def choose(self) -> Shape:
        """The fastest shape, with the stops that the rounds so far ask for. The first round is plain: all others are compared
        with it."""
        if not self.arms or not self.clocks.weight:
            return OFF
        if self.best is None:
            self._rate()
        if self.pace.on:
            assert self.best is not None
            gain = 1.0 - 1.0 / (self.best.speed * self.clocks.plain)
            return OFF if self.pace.since > max(gain, 0.0) / CHECK else self.chosen
        return self.chosen if self._affordable() else OFF

    def _affordable(self) -> bool:
        """Whether the purse can pay for what a trial is expected to lose."""
        assert self.best is not None and self.pace.purse is not None
        if not self.clocks.asked:  # nobody knows yet what drafting takes
            return self.pace.purse > 0
        plain, best = self.clocks.plain, self.best
        price = max(best.seconds - best.length * plain, LEAST_PRICE * (best.seconds - plain))
        return self.pace.purse * plain >= price

    def _rate(self) -> None:
        """Compare all shapes, and draft from now on with the best one, or not at all."""
        clocks, plain = self.clocks, self.clocks.plain
        self.verify = clocks.verify(self.rows)
        ratings = self._ratings()
        best = max(ratings, key=lambda rating: rating.speed)
        before, purse = self.pace.on, START if self.pace.purse is None else self.pace.purse
        self.pace.on = best.speed * plain > 1.0 + self.margin and purse >= 0
        # who gives up begins to save anew
        self.pace.purse = min(purse, 0.0) if before is not False and not self.pace.on and clocks.asked else purse
        # a trial is small: it is to tell whether drafts are accepted again
        self.best = best if self.pace.on else min(ratings, key=lambda rating: rating.seconds)
        shape, speed = self.best.shape, max(best.speed, 1.0 / plain)
        if self.stops is not None:
            if clocks.asked:
                nodes = max(shape.nodes, 2)
                node = (self.verify(nodes) - self.verify(1)) / (nodes - 1) / self.rows
                worth = self.knowledge.calibration.worth(self.unit)
                self.stops = stops(worth, speed, self.rows, node, *clocks.drafting())
            shape = replace(shape, least=self.stops.least, enough=self.stops.enough)
        if self.reach:
            shape = replace(shape, reach=self.reach, trust=self._trust(speed))
        self.chosen = shape

    def _ratings(self) -> list[Rating]:
        """Of every shape that may be drafted."""
        self.going = self.knowledge.going.chances(self.unit)
        fixed, grown = [arm for arm in self.arms if not arm.budget], [arm for arm in self.arms if arm.budget]
        if not self.clocks.asked:  # begin with little
            first = min(self.arms, key=lambda shape: (shape.nodes, shape.depth))
            fixed, grown = ([], [first]) if first.budget else ([first], [])
        found = list[Rating]()
        if fixed:
            chances = self.knowledge.acceptance.chances(self.unit)
            if self.clocks.asked and self.drafted >= self.regrow:
                self._grow(chances)
            fixed += [self.tree] if self.tree else []
            found += [self._rating(shape, 1.0 + tails(shape, chances)[0]) for shape in fixed]
        if grown:
            sums = totals(self.knowledge.nodes.chances(self.unit), self.verify)
            found += [self._rating(shape, 1.0 + sums[shape.nodes][0], sums[shape.nodes][1]) for shape in grown]
        return found

    def _rating(self, shape: Shape, length: float, verify: float | None = None) -> Rating:
        """What a shape takes.

        Args:
            length: tokens expected.
            verify: seconds of the target's pass, where they are known already.
        """
        alive, levels, nodes, fed = 1.0, 0.0, 0.0, 0.0
        for depth, level in enumerate(shape.levels):
            alive *= self.going[min(depth - 1, len(self.going) - 1)] if depth else 1.0
            levels += alive
            nodes += alive * sum(level)
            fed += alive * sum(count > 0 for count in level)
        if verify is None:
            # branches that end leave more or fewer nodes in every round: between the smallest pass and the largest one
            share = nodes / shape.nodes * (self.fill[0] / self.fill[1] if self.fill[1] else 1.0)
            first, last = self.verify(1), self.verify(shape.nodes)
            verify = first + share * (last - first)
        seconds = verify + self.clocks.draft(levels, self.rows * fed - levels)
        tokens, spent, rounds = self.found
        speed = (length + tokens / rounds) / (seconds + spent / rounds) if rounds else length / seconds
        return Rating(shape, length, seconds, speed)

    def _grow(self, chances: Sequence[Sequence[float]]) -> None:
        """Make the best tree for the acceptance seen so far an arm, in the place of the one before."""
        _, shape = fastest_tree(chances, lambda shape: self._rating(shape, 1.0).seconds, TREE_NODES, TREE_DEPTHS)
        self.tree, self.regrow = shape.adapting(0.0, self.reach) if shape.depth else None, self.drafted + REGROW

    def _trust(self, speed: float) -> tuple[int, ...]:
        """How deep lookups go, by how long their match is, and where the drafter behind them brings more than they do.

        What a deeper lookup copies, the next one would copy too: so it pays where it takes less time than lookups after longer
        matches do.

        Args:
            speed: tokens a second.
        """
        assert self.best is not None
        depths = range(1, min(self.reach, MOST_LOOKED_UP) + 1)
        passes = [self.verify(depth) for depth in range(depths.stop)]
        others, later, found = self.knowledge.instead.tokens(self.best.length, self.unit), 0.0, list[int]()
        for copies, other in zip(reversed(self.knowledge.lookups), reversed(others)):
            tokens = [1.0 + kept for kept in copies.tokens(self.unit)]
            later = max(later, *(tokens[depth] / passes[depth] for depth in depths))
            best = max(depths, key=lambda depth: tokens[depth] - later * passes[depth])
            gain = tokens[best] - other - speed * (passes[best] - self.best.seconds)
            found.append(best if gain >= 0 else 0)
        return tuple(reversed(found))

    # -- learning --------------------------------------------------------------------------------------------------

    def reward(self, done: Round) -> None:
        """Learn from a round about all shapes: from several at once where nothing hangs on one, since between two passes all code
        is cold."""
        if done.seconds <= 0 or not done.rows:
            return
        self.rounds += len(done.rows) == 1
        if len(done.rows) != self.rows:
            self._learn()
            self.rows, self.best = len(done.rows), None
            self.pace = self.paces.setdefault(self.rows.bit_length(), _Pace(Clocks()))
        self._pay(done)
        self.pace.since = self.pace.since + 1 if done.shape.depth else 0
        self.waiting.append(done)
        if not self._may_wait(done) or len(self.waiting) >= REFRESH:
            self._learn()

    def _may_wait(self, done: Round) -> bool:
        """Whether nothing hangs on a round yet: drafting goes on whatever it says, or ended, and it was plain."""
        if not self.pace.on:
            return self.pace.on is False and not done.shape.depth
        return (self.pace.purse or 0.0) >= 0 and self.drafted >= SOON

    def _learn(self) -> None:
        """Take in the rounds that wait for it, and rate all shapes anew."""
        if self._take_in() and self.clocks.plain:
            self._rate()

    def _take_in(self) -> bool:
        """Hear the rounds that wait; whether one of them was drafted."""
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            self.clocks.hear(done)
            if not done.shape.depth:
                continue
            self._age()
            self.knowledge.hear(done, self.unit / self.rows)
            if done.beyond:
                self.found[0] += self.unit * done.emitted / self.rows
                self.found[1] += self.unit * done.seconds
            else:
                self._hear(done)
        return any(done.shape.depth for done in waiting)

    def _age(self) -> None:
        """Let earlier rounds fade, by making a new one weigh more."""
        self.unit /= self.discount
        if self.unit > LARGEST_UNIT:
            factor = 1.0 / self.unit
            self.knowledge.scale(factor)
            self.found = [value * factor for value in self.found]
            self.fill = [value * factor for value in self.fill]
            self.unit = 1.0

    def _pay(self, done: Round) -> None:
        """What the round gained or lost, and the share of its time."""
        plain = self.clocks.plain
        if not plain:
            return
        before, seconds = START if self.pace.purse is None else self.pace.purse, done.seconds
        if done.shape.depth and self.best is not None and self.clocks.asked:
            # a stall of the machine is no loss by drafting; a drafter that is slow is too dear for the next trial anyway
            seconds = min(seconds, STALL * self.best.seconds)
        gained, share = 0.0, self.share
        if done.shape.depth:
            gained = done.emitted / self.rows * plain - seconds
            self.fruitless += done.drafted > 0
        if done.emitted > len(done.rows):
            self.fruitless = 0
        else:  # nothing was kept: whatever the clock says, that is no gain
            gained = min(gained, 0.0)
        if self.fruitless >= FRUITLESS:
            share /= 2
        self.pace.purse = min(before + (gained + share * seconds) / plain, PURSE)

    def _hear(self, done: Round) -> None:
        for row in done.rows:
            if not row.beyond:
                self._notice(row)
        self.drafted += 1
        self.found[2] += self.unit
        if done.drafted and not done.shape.budget:
            reached = sum(sum(level) for level in done.shape.levels[: done.levels])
            self.fill[0] += self.unit * done.drafted / self.rows
            self.fill[1] += self.unit * reached

    def _notice(self, row: Walked) -> None:
        """A cumulative sum of surprises; when it runs over, the text has changed, and what was learned of it weighs little."""
        if self.best is None:
            return
        surprise = row.emitted - self.best.length
        z = min(max(surprise / self.spread, -CLIP), CLIP)
        self.spread = max(LEAST_SPREAD, math.sqrt(0.95 * self.spread**2 + 0.05 * surprise * surprise))
        self.up, self.down = max(0.0, self.up + z - SLACK), max(0.0, self.down - z - SLACK)
        if self.up > ALARM or self.down > ALARM:
            self.up = self.down = 0.0
            self.unit /= FORGET

    # -- what outlives a process -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learned, as plain data for JSON; times are those of single texts, and only these are counted as rounds."""
        self._take_in()
        return {"rounds": self.rounds, **to_data(self.knowledge, self.paces[1].clocks, self.unit)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what was learned earlier: first choices and first estimates, soon outweighed by new rounds.

        Raises:
            ValueError: when this is not a state.
        """
        knowledge, times = from_data(state)
        knowledge.expect(self.knowledge)
        self.knowledge = knowledge
        self.clocks.restore(**times)

    def believe(self, prior: Mapping[str, Any]) -> None:
        """Begin with what was measured elsewhere, on other prompts and perhaps another machine: it is worth a few rounds, and
        its times count in plain passes.

        Raises:
            ValueError: when this is not a state.
        """
        knowledge, times = from_data(prior)
        knowledge.settle()
        knowledge.scale(min(1.0, BELIEVED / max(times["rounds"][2], 1.0)))
        self.clocks.believe(times, BELIEVED)
        self.knowledge = knowledge
