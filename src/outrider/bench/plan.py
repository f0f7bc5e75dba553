"""What speculation will bring for a measured pair, and what another drafter would bring.

From a pair's rounds (`probe.py`): tokens per second of every shape, where speculation breaks even, what-ifs, and a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.bench.probe import Measured
from outrider.bench.starts import Brought
from outrider.cost import DEPTHS, RANKS, best_trees, tails
from outrider.drafters.catalog import default_arms
from outrider.tree import OFF, Shape, parse_shape

if TYPE_CHECKING:
    from outrider.api import Engine

CHAINS, NODES, TREE_DEPTHS = (*range(1, 13), 15), 24, (1, 2, 3, 4, 6, 8)
WORTH, NOTHING = 1.03, 0.01  # a predicted speed-up below this is none; shapes that differ by this share are as fast

# ---- predicting ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A drafter that differs from the measured one.

    Args:
        text: as the user wrote it.
        factor: of all drafting times.
        level: seconds of a drafting step instead of the measured ones.
        acceptance: chance of the first child of the root, instead of the measured one.
        gain: added to that chance.
    """

    text: str = "as measured"
    factor: float = 1.0
    level: float | None = None
    acceptance: float | None = None
    gain: float = 0.0


def parse_change(text: str) -> Change:
    """Read "latency=0.5x", "latency=2ms", "acceptance=0.8" or "acceptance=+0.1", or both kinds joined by a comma.

    Raises:
        ValueError: for anything else.
    """
    change = Change(text)
    for part in text.replace(" ", "").split(","):
        if match := re.fullmatch(r"latency=(\d+(?:\.\d+)?)x", part):
            change = replace(change, factor=float(match[1]))
        elif match := re.fullmatch(r"latency=(\d+(?:\.\d+)?)ms", part):
            change = replace(change, level=float(match[1]) / 1e3)
        elif match := re.fullmatch(r"acceptance=([01](?:\.\d+)?|\.\d+)", part):
            change = replace(change, acceptance=float(match[1]))
        elif match := re.fullmatch(r"acceptance=([+-](?:[01](?:\.\d+)?|\.\d+))", part):
            change = replace(change, gain=float(match[1]))
        else:
            raise ValueError(
                f"--what-if {text!r} is not understood; write latency=0.5x or latency=2ms, acceptance=0.8 or acceptance=+0.1"
            )
    if change.acceptance is not None and change.acceptance > 1:
        raise ValueError(f"--what-if {text!r} asks for an acceptance above 1; give a number from 0 to 1")
    return change


@dataclass(frozen=True)
class Predicted:
    """A shape's prediction.

    Args:
        length: tokens a round, N.
        seconds: of a round.
        speedup: over plain decoding.
    """

    shape: Shape
    length: float
    seconds: float
    speedup: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the prompt."""
        return self.length / self.seconds


class Model:
    """Predicts any shape of a measured pair, or of one with a changed drafter."""

    def __init__(self, measured: Measured, change: Change = Change()) -> None:
        self.measured, self.change = measured, change
        self.chances = _changed(measured.chances, change)

    @property
    def plain(self) -> float:
        """Seconds of a plain round."""
        return self.measured.plain + self.measured.overhead

    def draft_seconds(self, shape: Shape) -> float:
        """Of drafting; measured where this very shape was."""
        measured = self.measured
        if self.change.level is not None:
            return self.change.level * shape.depth
        between = measured.levels(shape.depth) + measured.feed * (shape.feeds - shape.depth)
        return self.change.factor * measured.drafts.get(shape.name, between)

    def _brought(self, shape: Shape) -> Brought:
        """By rounds of this shape, as the changed drafter has more or fewer of its nodes kept."""
        found = self.measured.starts.brought(shape)
        before, after = (tails(shape, chances)[0] for chances in (self.measured.chances, self.chances))
        return replace(found, length=1.0 + _moved(found.length - 1.0, before, after, shape.depth))

    def predict(self, shape: Shape) -> Predicted:
        """Of a shape."""
        if not shape.depth:
            return Predicted(shape, 1.0, self.plain, 1.0)
        measured, found = self.measured, self._brought(shape)
        verify = found.empty * measured.plain + (1.0 - found.empty) * measured.verify(shape)
        seconds = verify + self.draft_seconds(shape) + measured.overhead
        return Predicted(shape, found.length, seconds, found.length / seconds * self.plain)

    def ranking(self, arms: Sequence[Shape]) -> list[Predicted]:
        """Shapes, chains and the best trees of every size, the fastest first."""
        shapes = {OFF.name: OFF} | {arm.name: arm for arm in arms}
        shapes |= {f"chain{length}": parse_shape(length) for length in CHAINS}
        for depth in TREE_DEPTHS:
            shapes |= {shape.name: shape for _, shape in best_trees(self.chances, NODES, depth)}
        return sorted((self.predict(shape) for shape in shapes.values()), key=lambda one: -one.speedup)


def _changed(chances: Sequence[Sequence[float]], change: Change) -> list[list[float]]:
    """Chances of children when the first one is right more or less often; those after it share what it leaves as before."""
    first = chances[0][0]
    wanted = min(max((first if change.acceptance is None else change.acceptance) + change.gain, 0.0), 1.0)
    table = []
    for row in chances:
        # the same ratio of odds at every depth, so that chances stay chances
        new = wanted if row is chances[0] else _shifted(row[0], first, wanted)
        left, leaves = 1.0 - row[0], 1.0 - new
        table.append([new, *(chance * leaves / left if left > 0 else 0.0 for chance in row[1:])])
    return table


def _moved(kept: float, before: float, after: float, most: float) -> float:
    """Tokens kept a round where others are expected than before: of those that were kept a share is lost, or of those that were
    lost a share is won, so that neither less than none nor more than all are kept."""
    if after <= before:
        return kept * after / before if before else kept
    return most - (most - kept) * (most - after) / (most - before)


def _shifted(chance: float, first: float, wanted: float) -> float:
    if wanted in (0.0, 1.0) or first in (0.0, 1.0) or chance in (0.0, 1.0):
        return wanted
    odds = chance / (1 - chance) * (wanted / (1 - wanted)) / (first / (1 - first))
    return odds / (1 + odds)


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What to expect.

    Args:
        ranking: every shape's prediction, the fastest first; plain decoding among them.
        speculate: whether it pays.
        verdict: one sentence.
        break_even_acceptance: chance of every first child at which the best chain is as fast as plain decoding; None: even
            perfect drafts would not pay.
        break_even_draft: factor of the drafting times at which the best shape is as fast as plain decoding; None: even
            free drafts would not pay.
        what_if: the same for changed drafters: (change, its fastest shape).
    """

    measured: Measured
    ranking: list[Predicted]
    speculate: bool
    verdict: str
    break_even_acceptance: float | None
    break_even_draft: float | None
    what_if: list[tuple[Change, Predicted]]


def plan(engine: Engine, measured: Measured, changes: Sequence[Change] = ()) -> Plan:
    """From what was measured to what to expect."""
    # as measured: branches that end early, and lookups that go deeper than the shape, are for the rounds to find
    arms = [arm.adapting(0.0, 0) for arm in default_arms(engine.drafter)] if engine.drafter else []
    ranking = Model(measured).ranking(arms)
    rate, factor = break_even_acceptance(measured), break_even_draft(measured, arms)
    speculate, named = ranking[0].speedup >= WORTH, _named(ranking)
    verdict = (
        f"speculate: {named.shape.name} is predicted to be {named.speedup:.2f} times as fast as plain decoding"
        if speculate
        else _refusal(measured, next(one for one in ranking if one.shape.depth), rate, factor)
    )
    what_if = [(change, Model(measured, change).ranking(arms)[0]) for change in changes]
    return Plan(measured, ranking, speculate, verdict, rate, factor, what_if)


def _named(ranking: Sequence[Predicted]) -> Predicted:
    """The fastest shape, or one that is as fast and has a short name."""
    as_fast = [one for one in ranking if one.speedup > (1.0 - NOTHING) * ranking[0].speedup]
    return min(as_fast, key=lambda one: one.shape.name.startswith("tree:"))


def break_even_acceptance(measured: Measured) -> float | None:
    """By bisection over one chance for all depths."""
    model, chains = Model(measured), [parse_shape(length) for length in CHAINS]
    costs = [(shape, model.draft_seconds(shape) + measured.passes(shape.nodes) + measured.overhead) for shape in chains]

    def pays(chance: float) -> bool:
        law = [[chance] + [0.0] * (RANKS - 1)] * DEPTHS
        return any((1.0 + tails(shape, law)[0]) / cost * model.plain >= 1.0 for shape, cost in costs)

    return _threshold(lambda chance: not pays(chance), 0.0, 1.0) if pays(1.0) else None


def break_even_draft(measured: Measured, arms: Sequence[Shape]) -> float | None:
    """By bisection over a factor of the drafting times."""

    def pays(factor: float) -> bool:
        model = Model(measured, Change(factor=factor))
        return any(model.predict(shape).speedup >= 1.0 for shape in shapes)

    shapes = [*arms, *(parse_shape(length) for length in CHAINS)]
    if not pays(0.0):
        return None
    return _threshold(pays, 0.0, 1000.0) if not pays(1000.0) else 1000.0


def _threshold(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that holds at `low` and not at `high` ends."""
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2


def _refusal(measured: Measured, best: Predicted, rate: float | None, factor: float | None) -> str:
    """Which of the three is to blame: drafting, acceptance, or the target's own passes over several tokens."""
    first, step = measured.chances[0][0], Model(measured).draft_seconds(parse_shape(1))
    reached_at = f"the best shape, {best.shape.name}, is predicted at {best.speedup:.2f} times plain"
    if rate is None:
        wide = measured.passes(4) / measured.plain
        blame = (
            f"a pass over five tokens takes {wide:.1f} times a pass over one"
            if wide > 2.5
            else f"drafting a token takes {step * 1e3:.1f} ms and a plain pass {measured.plain * 1e3:.1f} ms"
        )
        return f"do not speculate, because {blame}: even if every draft were right it would not pay"
    if factor is None:
        return (
            f"do not speculate, because drafts are right too rarely: the first token in {first:.0%} of rounds, and from about "
            f"{rate:.0%} on it would pay; {reached_at}"
        )
    return (
        f"do not speculate, because drafting a token takes {step * 1e3:.1f} ms ({step / measured.plain:.0%} of a plain pass) and "
        f"the first is right in {first:.0%} of rounds; it would pay from about {rate:.0%} on, or with drafting at "
        f"{factor:.2f} times its time; {reached_at}"
    )
