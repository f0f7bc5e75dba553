"""Measure a pair for some seconds: texts are written while a few shapes take turns, each for some rounds.

Their walks say what any shape would have emitted, their clocks what any shape would take (`cost.py`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.bench.starts import Starts
from outrider.cost import Acceptance, Curve
from outrider.rounds import Round
from outrider.tree import Shape, parse_shape

if TYPE_CHECKING:
    from outrider.api import Engine
    from outrider.bench.tasks import Prompt

Tell = Callable[[int, int, str], None]
PROBES = ("off", "chain1", "chain2", "chain4", "chain8", "2x2x1x1", "4x2x1", "chain15")
WARM_UP = 2  # rounds of every shape that are not counted: a machine's first ones are slow
STAY = 3  # rounds of a shape one after the other: what follows a round of its own kind is as in a run
GROUP = 6  # rounds behind every point of the curve of pass times


class Probing:
    """A controller that goes round a few shapes, and writes the rounds down."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes, self.rounds = list(shapes), list[Round]()

    def choose(self) -> Shape:
        """The one whose turn it is."""
        return self.shapes[len(self.rounds) // STAY % len(self.shapes)]

    def reward(self, done: Round) -> None:
        """Write it down."""
        self.rounds.append(done)


@dataclass
class Measured:
    """A pair's rounds, and what follows from them. Times in seconds.

    Args:
        rounds: of all shapes, the warm-up left out.
        overhead: of a round, outside its phases.
        texts: all rounds of each text, one after the other; () where `rounds` are those of one.
    """

    rounds: list[Round]
    overhead: float = 0.0
    texts: Sequence[Sequence[Round]] = ()
    chances: list[list[float]] = field(init=False)
    tries: list[float] = field(init=False)
    """Per depth, how often its first child was tried."""

    def __post_init__(self) -> None:
        acceptance = Acceptance()
        for row in (row for done in self.rounds if done.shape.depth for row in done.rows):
            acceptance.see(row)
        self.chances = acceptance.chances()
        self.tries = [row[0] for row in acceptance.tries]
        asked = [done for done in self.rounds if done.shape.depth]
        drafted = [done for done in asked if done.drafted]
        self.empty = 1.0 - len(drafted) / max(len(asked), 1)
        plain = [done.verify + done.commit for done in self.rounds if not done.drafted]
        if not plain or not asked:
            raise ValueError("too few rounds were measured; give more --seconds, or more prompts")
        self.passes = Curve(
            _rising([(0, seconds) for seconds in plain], [(d.drafted, d.verify + d.commit) for d in drafted])
        )
        self.plain = self.passes(0)
        self.starts = Starts(*(self.texts or [self.rounds]))
        # the last trees of a text are cut to what may still be written: that says nothing of how they are filled
        whole = [all(row.whole for row in done.rows) for done in drafted]
        self.filled = Counter(
            (one.shape, one.shape.nodes if full else one.drafted) for one, full in zip(drafted, whole)
        )
        self._time_drafting(asked)

    def _time_drafting(self, asked: Sequence[Round]) -> None:
        """Seconds of every shape that was drafted, of chains by depth, and of a further node."""
        self.drafts, chains, trees = dict[str, float](), [(0, 0.0)], list[Shape]()
        for shape in {done.shape.name: done.shape for done in asked}.values():
            self.drafts[shape.name] = typical([done.draft for done in asked if done.shape.name == shape.name])
            if shape.width == 1:
                chains.append((shape.depth, self.drafts[shape.name]))
            elif shape.feeds > shape.depth:
                trees.append(shape)
        self.levels, (deepest, seconds) = Curve(chains), max(chains)
        self.level = seconds / max(deepest, 1)  # with its share of what a proposal takes besides
        further = [(self.drafts[one.name] - self.levels(one.depth)) / (one.feeds - one.depth) for one in trees]
        self.feed = max(statistics.fmean(further), 0.0) if trees else 0.0

    def verify(self, shape: Shape) -> float:
        """Of a pass over what a shape drafts, where there is anything to draft: as chains are filled, or trees."""
        alike = {
            key: times for key, times in self.filled.items() if (key[0].width > 1) == (shape.width > 1)
        } or self.filled
        passes = [times * self.passes(_nodes(shape, asked, drafted)) for (asked, drafted), times in alike.items()]
        return sum(passes) / sum(alike.values()) if passes else self.passes(shape.nodes)


def _nodes(shape: Shape, asked: Shape, drafted: int) -> float:
    """Of a shape, where so many were drafted of another one: down the first children, and besides."""
    further, rest = asked.nodes - asked.depth, shape.nodes - shape.depth
    first = shape.depth if drafted >= asked.depth else min(drafted, shape.depth)
    return first + (rest * max(drafted - asked.depth, 0) / further if further else rest)


def typical(values: Sequence[float]) -> float:
    """Mean without the largest twentieth: other processes stall a round now and then."""
    kept = sorted(values)[: max(1, len(values) - len(values) // 20)]
    return statistics.fmean(kept)


def _rising(plain: Sequence[tuple[int, float]], drafted: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """(nodes, typical seconds): plain passes, then groups of neighbours in nodes, large enough that one slow pass does not bend
    the curve. A pass over more nodes is never faster, so groups that say so are averaged (isotonic regression)."""
    groups: list[list[tuple[int, float]]] = [list(plain)]
    for point in sorted(drafted):
        if len(groups) == 1 or (len(groups[-1]) >= GROUP and groups[-1][-1][0] != point[0]):
            groups.append([])
        groups[-1].append(point)
    if len(groups) > 2 and len(groups[-1]) < GROUP:
        last = groups.pop()
        groups[-1] += last
    blocks: list[tuple[float, list[list[tuple[int, float]]]]] = []  # seconds, and the groups that share them
    for group in groups:
        blocks.append((typical([seconds for _, seconds in group]), [group]))
        while len(blocks) > 1 and blocks[-1][0] < blocks[-2][0]:
            (first, one), (second, other) = blocks[-2:]
            sizes = sum(map(len, one)), sum(map(len, other))
            blocks[-2:] = [((first * sizes[0] + second * sizes[1]) / sum(sizes), one + other)]
    return [(statistics.fmean(n for n, _ in group), seconds) for seconds, block in blocks for group in block]


class Probe:
    """Rounds of a pair, gathered in one stretch of time or in several.

    Args:
        options: of the texts.

    Raises:
        ValueError: without a drafter.
    """

    def __init__(self, engine: Engine, **options: Any) -> None:
        if engine.drafter is None:
            raise ValueError("there is no drafter to plan for; give one with --drafter")
        self.engine, self.options = engine, options
        self.probing, self.texts = Probing([parse_shape(name) for name in PROBES]), list[list[Round]]()
        self.busy = self.outside = 0.0  # rounds of texts that ended, and their seconds outside all phases

    def run(self, prompts: Sequence[Prompt], seconds: float, tell: Tell = lambda done, total, what: None) -> Probe:
        """Write for some seconds, or until all prompts are answered, over shapes that take turns. So do tasks.

        Raises:
            ValueError: without prompts or time.
        """
        if not prompts or seconds <= 0:
            raise ValueError(f"nothing can be measured with {len(prompts)} prompts in {seconds:g} seconds; give more")
        start = time.perf_counter()
        for prompt in in_turns(prompts):
            begun, first = time.perf_counter(), len(self.probing.rounds)
            pieces = self.engine.stream(prompt.encode(self.engine), shape=self.probing, **self.options)
            ended = _follow(pieces, start + seconds)
            self.texts.append(self.probing.rounds[first:])
            tell(min(int(time.perf_counter() - start), int(seconds)), int(seconds), "measuring")
            if ended is None:
                break
            spent = sum(done.seconds for done in self.texts[-1])
            self.busy += len(self.texts[-1])
            self.outside += max(0.0, time.perf_counter() - begun - spent - ended.stats.seconds["prefill"])
        return self

    def measured(self, warm_up: int = WARM_UP) -> Measured:
        """What follows from all rounds so far.

        Args:
            warm_up: rounds of every shape that are not counted.

        Raises:
            ValueError: when they are too few.
        """
        counted, seen = list[Round](), Counter[str]()
        for done in self.probing.rounds:
            seen[done.shape.name] += 1
            if seen[done.shape.name] > warm_up:
                counted.append(done)
        return Measured(counted, self.outside / self.busy if self.busy else 0.0, self.texts)


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    seconds: float = 40.0,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    tell: Tell = lambda done, total, what: None,
) -> Measured:
    """Measure a pair for some seconds, or until all prompts are answered.

    Raises:
        ValueError: without a drafter, without prompts, or when nothing could be measured in that time.
    """
    probe = Probe(engine, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    return probe.run(prompts, seconds, tell).measured()


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every task, then the second ones, and so on: whenever time is over, all tasks had their share."""
    place = Counter[str]()
    numbered = []
    for prompt in prompts:
        numbered.append((place[prompt.task], prompt))
        place[prompt.task] += 1
    return [prompt for _, prompt in sorted(numbered, key=lambda pair: pair[0])]


def _follow(pieces: Any, deadline: float) -> Any:
    """Run a stream to its result; None when time is over before."""
    while time.perf_counter() < deadline:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
    pieces.close()
    return None
