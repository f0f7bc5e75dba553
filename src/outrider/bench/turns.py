"""Methods that write one text in turns of a few tokens, and what those turns say of one method's speed over another's.

A machine whose speed drifts, or that stalls now and then, deceives whoever runs one method after the other. Here all methods
write the same stretch of a text within about a second, in an order drawn anew for every stretch, so that drift meets all alike.
A round that took far longer than the rounds like it was stalled by the machine, and counts as the median of those; a stretch in
which everything took far longer counts for nobody. A speed is then all tokens over all seconds, and a ratio is one of speeds; its
interval is what resampled stretches give (bootstrap).

Whoever picks the fastest of many noisy methods and reads its speed off the same numbers flatters it. So the fastest is picked on
one half of the stretches, its speed is read off the other half, and the other way round (cross-fitting).
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.controller import Controller
from outrider.rounds import Round
from outrider.tree import Shape

TURN = 16  # tokens
STALL = 1.6  # times the median of rounds like it, from which on a round was stalled
FEW = 5  # rounds of a kind that are too few to call one of them stalled
TOGETHER = 8  # rows whose passes are alike
RESAMPLED, INSIDE = 1000, 0.95  # how often for an interval, and how much of that is inside
Clock = Callable[[], float]

# ---- writing in turns ------------------------------------------------------------------------------------------------


class Heard:
    """A controller whose last round is kept."""

    def __init__(self, inner: Controller) -> None:
        self.inner = inner
        self.last: Round | None = None

    def choose(self) -> Shape:
        """As the controller does."""
        return self.inner.choose()

    def reward(self, done: Round) -> None:
        """Keep the round, and tell the controller."""
        self.last = done
        self.inner.reward(done)


@dataclass(frozen=True)
class Timed:
    """A round.

    Args:
        tokens: written.
        seconds: of wall clock, all included.
        busy: of these, seconds of its phases.
        kind: what rounds that take about as long have in common.
    """

    tokens: int
    seconds: float
    busy: float
    kind: Hashable


@dataclass
class Text:
    """A text on its way by one method.

    Args:
        pieces: what an engine streams.
        heard: the controller that it streams with.
        read: whether the time of the prompt counts.
    """

    pieces: Any
    heard: Heard
    read: bool = False
    rounds: list[Timed] = field(default_factory=list)
    tokens: int = 0
    result: Any = None

    def write(self, until: int, clock: Clock = time.perf_counter) -> None:
        """Go on until there are so many tokens, or the text has ended."""
        while self.result is None and self.tokens < until:
            self.heard.last, start = None, clock()
            try:
                next(self.pieces)
                written = 1
            except StopIteration as end:
                self.result, written = end.value, 0
            spent, done = clock() - start, self.heard.last
            self.tokens += written
            if done is not None:
                rows = len(done.rows) + done.drafted
                kind = ((rows - 1) // TOGETHER, done.levels if done.drafted else 0)
                self.rounds.append(Timed(written, spent, done.seconds, kind))
            elif self.rounds:  # a round hands out its tokens one by one
                last = self.rounds[-1]
                self.rounds[-1] = replace(last, tokens=last.tokens + written, seconds=last.seconds + spent)
        if self.result is not None and self.rounds and not self.read:
            first = self.rounds[0]
            self.rounds[0] = replace(first, seconds=first.seconds - self.result.stats.seconds["prefill"])
            self.read = True


@dataclass
class Written:
    """A prompt that every method has continued.

    Args:
        rounds: of every method.
        results: what an engine's `generate` would have returned.
        text: which text it is, where texts are written more than once; None is a text of its own.
    """

    task: str
    rounds: dict[str, list[Timed]]
    results: dict[str, Any]
    text: int | None = None


def take_turns(
    task: str,
    begin: Mapping[str, Callable[[], Text]],
    max_new_tokens: int,
    chance: random.Random,
    clock: Clock = time.perf_counter,
) -> Written:
    """Let methods write one text, stretch by stretch.

    Args:
        begin: how every method begins; the prompt is read in its first turn.
        chance: draws the order of every stretch.
    """
    texts, order = dict[str, Text](), list(begin)
    until = 0
    while any(name not in texts or texts[name].result is None for name in order):
        until += TURN
        chance.shuffle(order)
        for name in order:
            if name not in texts:
                texts[name] = begin[name]()
            # the last turn hears the end of the text
            texts[name].write(until if until < max_new_tokens else max_new_tokens + 1, clock)
    rounds = {name: texts[name].rounds for name in begin}
    return Written(task, rounds, {name: texts[name].result for name in begin})


# ---- what turns say --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """An estimate and its interval, whose ends are not numbers where there were too few stretches to tell."""

    value: float
    low: float
    high: float

    @property
    def between(self) -> str:
        """The interval in words."""
        return "too little text" if math.isnan(self.low) else f"{self.low:.3f} to {self.high:.3f}"

    @property
    def told(self) -> str:
        """The estimate, unless there was too little text: half of a few turns says nothing of the other half."""
        return "-" if math.isnan(self.low) else f"{self.value:.3f}"

    def __str__(self) -> str:
        return self.between if math.isnan(self.low) else f"{self.told} ({self.between})"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"value": self.value, "interval": None if math.isnan(self.low) else [self.low, self.high]}


class Turns:
    """Tokens and seconds by stretch and method: what was written in turns, without what the machine lost by itself.

    Args:
        written: texts; all by the same methods.
    """

    def __init__(self, written: Sequence[Written]) -> None:
        self.methods = list(written[0].rounds)
        self.tasks, self.prompts, halves, laps = list[str](), list[int](), list[int](), list[Lap]()
        known = dict[Hashable, int]()
        self.numbers = list[int]()  # which stretch of its text each is
        for place, one in enumerate(written):
            prompt = known.setdefault(("alone", place) if one.text is None else one.text, len(known))
            by_method = [_stretches(rounds) for rounds in one.rounds.values()]
            for number in range(max(map(len, by_method))):
                self.tasks.append(one.task)
                self.prompts.append(prompt)
                self.numbers.append(number)
                halves.append((prompt + number) % 2)  # every other stretch; prompts begin in either half
                laps.append([found[number] if number < len(found) else [] for found in by_method])
        self.half_L = np.array(halves)
        found, self.stalled = without_stalls(laps)
        table = np.array(found)  # [stretches, methods, 2]
        self.tokens_LM, self.seconds_LM = table[..., 0], table[..., 1]

    def speed(self, method: str, task: str | None = None) -> float:
        """Tokens per second."""
        chosen_L, column = self._of(task), self.methods.index(method)
        return float(self.tokens_LM[chosen_L, column].sum() / self.seconds_LM[chosen_L, column].sum())

    def ratio(self, method: str, others: Sequence[str], task: str | None = None) -> Spread:
        """Speed of a method over that of the best of the others, which is picked on one half and read off the other."""
        return self._spread(self._of(task), lambda w_RL: self._seconds(others, w_RL) / self._seconds([method], w_RL))

    def room(self, others: Sequence[str], prompts: bool = False) -> Spread:
        """Speed of the best of each task, or of each prompt, over that of the best single one; picked and read likewise."""
        labels_L = (
            np.array(self.prompts) if prompts else np.array([[*dict.fromkeys(self.tasks)].index(t) for t in self.tasks])
        )
        groups = [labels_L == label for label in np.unique(labels_L)]

        def found(weights_RL: np.ndarray) -> np.ndarray:
            best = sum(self._seconds(others, weights_RL * group_L) for group_L in groups)
            return np.asarray(self._seconds(others, weights_RL) / best)

        return self._spread(self._of(None), found)

    def _of(self, task: str | None) -> np.ndarray:
        """Which stretches."""
        return np.array([task in (None, one) for one in self.tasks])

    def _spread(self, chosen_L: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Spread:
        """A statistic of weighted stretches, and its interval: stretches are drawn again within each task and half. A stretch
        that was written more than once is one: it is drawn with all its times, for they say nothing of other texts."""
        weights_RL = np.zeros((1 + RESAMPLED, len(self.tasks)))
        weights_RL[0] = chosen_L
        rng, fewest = np.random.default_rng(0), len(self.tasks)
        for task, half in sorted({*zip(self.tasks, self.half_L.tolist())}):
            places = np.flatnonzero(chosen_L & self._of(task) & (self.half_L == half))
            same = [(self.prompts[place], self.numbers[place]) for place in places]
            column = {stretch: number for number, stretch in enumerate(dict.fromkeys(same))}
            if count := len(column):
                drawn_RS = rng.multinomial(count, np.full(count, 1.0 / count), RESAMPLED)
                weights_RL[1:, places] = drawn_RS[:, [column[stretch] for stretch in same]]
                fewest = min(fewest, count)
        with np.errstate(divide="ignore", invalid="ignore"):
            value, *again = statistic(weights_RL)
        if fewest < 2:
            return Spread(float(value), math.nan, math.nan)
        low, high = np.nanquantile(again, [(1.0 - INSIDE) / 2, (1.0 + INSIDE) / 2])
        return Spread(float(value), float(low), float(high))

    def _seconds(self, methods: Sequence[str], weights_RL: np.ndarray) -> np.ndarray:
        """Seconds for the text by the method that is fastest in the other half, of each resampling."""
        columns = [self.methods.index(method) for method in methods]
        halves = [weights_RL * (self.half_L == half) for half in (0, 1)]
        tokens, seconds = ([half @ table[:, columns] for half in halves] for table in (self.tokens_LM, self.seconds_LM))
        # a method's tokens are those of all in the end, but not in every stretch: so the text is counted by one of them
        lengths = [half @ self.tokens_LM[:, 0] for half in halves]
        total = np.zeros(len(weights_RL))
        for half, other in ((0, 1), (1, 0)):
            with np.errstate(divide="ignore", invalid="ignore"):
                price, elsewhere = seconds[half] / tokens[half], seconds[other] / tokens[other]
            elsewhere = np.where(np.isfinite(elsewhere), elsewhere, price)  # there is no other half
            best = np.nan_to_num(elsewhere, nan=np.inf, posinf=np.inf).argmin(1)
            paid = lengths[half] * price[np.arange(len(best)), best]
            total += np.where(lengths[half] > 0, paid, 0.0)
        return total


# ---- what the machine lost -------------------------------------------------------------------------------------------

Lap = list[list[Timed]]
"""The rounds of every method in one stretch of a text."""


def without_stalls(laps: Sequence[Lap]) -> tuple[list[list[tuple[int, float]]], float]:
    """Tokens and seconds by stretch and method. Stalled rounds take their kind's median; stretches in which everything took so
    long, whoever drafted, count for nobody.

    Returns:
        These, and the share of all time that is gone.
    """
    kinds = defaultdict[Hashable, list[float]](list)
    for done in (done for lap in laps for turn in lap for done in turn):
        kinds[done.kind].append(done.busy)
    usual = {kind: statistics.median(found) for kind, found in kinds.items() if len(found) >= FEW}
    away = [_is_away(lap, usual) for lap in laps]
    if all(away):  # a few rounds on a busy machine: these are better than none
        away = [False] * len(laps)
    found, total, left = list[list[tuple[int, float]]](), 0.0, 0.0
    for lap, gone in zip(laps, away):
        turns = [(0, 0.0) if gone else _mended(turn, usual) for turn in lap]
        total += sum(done.seconds for turn in lap for done in turn)
        left += sum(seconds for _, seconds in turns)
        found.append(turns)
    return found, 1.0 - left / total if total else 0.0


def _is_away(lap: Lap, usual: Mapping[Hashable, float]) -> bool:
    """Whether the machine was taken away during a stretch."""
    slower = [_slower(turn, usual) for turn in lap if turn]
    return bool(slower) and statistics.median(slower) > STALL


def _slower(turn: Sequence[Timed], usual: Mapping[Hashable, float]) -> float:
    """How many times as long as usual a turn took."""
    return sum(done.busy for done in turn) / sum(usual.get(done.kind, done.busy) for done in turn)


def _mended(turn: Sequence[Timed], usual: Mapping[Hashable, float]) -> tuple[int, float]:
    """Tokens and seconds of a turn, stalls taken out."""
    seconds = 0.0
    for done in turn:
        median = usual.get(done.kind, done.busy)
        seconds += done.seconds - (done.busy - median if done.busy > STALL * median else 0.0)
    return sum(done.tokens for done in turn), seconds


def _stretches(rounds: Sequence[Timed]) -> list[list[Timed]]:
    """The rounds that began in each stretch of a text."""
    found, written = list[list[Timed]](), 0
    for done in rounds:
        while len(found) <= written // TURN:
            found.append([])
        found[written // TURN].append(done)
        written += done.tokens
    return found
