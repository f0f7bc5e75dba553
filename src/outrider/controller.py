"""Which shape to draft in the next round: what every controller does, a fixed shape, and a bandit over several.

"auto" is neither, but `counterfactual.py`, which learns about all shapes from every round. Whatever a controller does, the text
stays the same: a shape may depend only on what was emitted and on clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from outrider.rounds import Round
from outrider.tree import OFF, Shape


class Controller(Protocol):
    """Chooses a shape and hears what it brought."""

    def choose(self) -> Shape:
        """The shape of the next round."""
        ...

    def reward(self, done: Round) -> None:
        """What a round drafted, emitted and took."""
        ...


class Fixed:
    """Always the same shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def choose(self) -> Shape:
        """The shape."""
        return self.shape

    def reward(self, done: Round) -> None:
        """Nothing to learn."""


class Bandit:
    """UCB over shapes, as in Mamba Drafters, section 3.2; one arm is always "off".

    argmax mean + exploration * sqrt(2 ln t / n). Counts are discounted so that they follow the text, and means are measured in
    units of the best arm's, so that `exploration` is a share of its speed. Each arm is tried once.

    A round in which the drafter proposed nothing says what plain decoding costs, whatever arm was drawn.

    Args:
        arms: shapes; "off" is added if missing.
        exploration: weight of uncertainty.
        discount: weight that a round loses with every later round.
        form: "clock" rewards tokens per second of wall clock; "paper" the negative inverse speed-up of the paper,
            -(1 + lambda_gamma * depth) / N, where lambda_gamma is a drafter's step over a plain pass, both measured.
    """

    def __init__(
        self, arms: Sequence[Shape], exploration: float = 0.05, discount: float = 0.98, form: str = "clock"
    ) -> None:
        if form not in ("clock", "paper"):
            raise ValueError(f"a bandit's reward has no form {form!r}; use 'clock' or 'paper'")
        self.arms = {arm.name: arm for arm in [*arms, OFF]}
        self.exploration, self.discount, self.form = exploration, discount, form
        self.tokens = dict.fromkeys(self.arms, 0.0)
        self.seconds = dict.fromkeys(self.arms, 0.0)
        self.pulls = dict.fromkeys(self.arms, 0.0)
        self.inverse = dict.fromkeys(self.arms, 0.0)  # sums of 1 / N
        self.drafting = self.levels = 0.0  # seconds and steps of the drafter

    def speed(self, name: str) -> float:
        """Tokens per second of an arm."""
        return self.tokens[name] / self.seconds[name] if self.seconds[name] else 0.0

    def mean(self, name: str) -> float:
        """Mean reward of an arm that was pulled."""
        if self.form == "clock":
            return self.speed(name)
        plain = self.seconds[OFF.name] / self.pulls[OFF.name] if self.pulls[OFF.name] else 0.0
        step = self.drafting / self.levels if self.levels else 0.0
        ratio = step / plain if plain else 0.0
        return -(1.0 + ratio * self.arms[name].depth) * self.inverse[name] / self.pulls[name]

    def choose(self) -> Shape:
        """Each arm once, then the best upper bound."""
        for name, arm in self.arms.items():
            if not self.pulls[name]:
                return arm
        means = {name: self.mean(name) for name in self.arms}
        best = abs(max(means.values()))
        total = math.log(1.0 + sum(self.pulls.values()))

        def bound(name: str) -> float:
            return means[name] / best + self.exploration * math.sqrt(2 * total / self.pulls[name])

        return self.arms[max(self.arms, key=bound)]

    def reward(self, done: Round) -> None:
        """Count a round towards its arm."""
        shape, seconds = done.shape, done.seconds
        name = shape.name if done.drafted else OFF.name
        if name not in self.arms or seconds <= 0:
            return
        if shape.name != name and shape.name in self.arms and not self.pulls[shape.name]:
            return  # an arm that had nothing to draft is still to be tried
        # every arm fades, so that one that was bad long ago becomes uncertain and is tried again
        inverse = len(done.rows) / done.emitted
        for table, value in (
            (self.tokens, done.emitted),
            (self.seconds, seconds),
            (self.pulls, 1.0),
            (self.inverse, inverse),
        ):
            for arm in table:
                table[arm] *= self.discount
            table[name] += value
        self.drafting = self.drafting * self.discount + done.draft
        self.levels = self.levels * self.discount + shape.depth
