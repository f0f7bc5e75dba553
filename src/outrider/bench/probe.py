"""Measure a pair for some seconds: one text is written while rounds take turns over a few shapes.

Their walks say what any shape would have emitted, their clocks what any shape would take (`cost.py`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from outrider.cost import Acceptance, Curve, Fit
from outrider.rounds import Round, Walked
from outrider.tree import Shape, parse_shape

if TYPE_CHECKING:
    from outrider.api import Engine
    from outrider.bench.tasks import Prompt

Tell = Callable[[int, int, str], None]
PROBES = ("off", "chain1", "chain2", "chain4", "chain8", "2x2x1x1", "4x2x1", "chain15")
WARM_UP = 2  # rounds of every shape that are not counted: a machine's first ones are slow
DEEP, FEW = 4, 200  # levels of a round behind which walks are as in a run, and walks that are too few to be choosy
GROUP = 6  # rounds behind every point of the curve of pass times


class Probing:
    """A controller that goes round a few shapes and writes the rounds down."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes, self.rounds = list(shapes), list[Round]()

    def choose(self) -> Shape:
        """The next one."""
        return self.shapes[len(self.rounds) % len(self.shapes)]

    def reward(self, done: Round) -> None:
        """Write it down."""
        self.rounds.append(done)


@dataclass
class Measured:
    """A pair's rounds, and what follows from them. Times in seconds.

    Args:
        rounds: of all shapes, the warm-up left out.
        overhead: of a round, outside its phases.
    """

    rounds: list[Round]
    overhead: float = 0.0
    chances: list[list[float]] = field(init=False)
    tries: list[float] = field(init=False)
    """Per depth, how often its first child was tried."""

    def __post_init__(self) -> None:
        acceptance = Acceptance()
        for row in self.telling():
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
        self.drafts, fit = dict[str, float](), Fit(0.05)
        for shape in {done.shape.name: done.shape for done in asked}.values():
            seconds = typical([done.draft for done in asked if done.shape.name == shape.name])
            self.drafts[shape.name] = seconds
            fit.see(shape.depth, shape.feeds - shape.depth, seconds)
        self.level, self.feed = fit.solve()

    def telling(self) -> list[Walked]:
        """Walks behind rounds that drafted deep; all, where these are few.

        A shape's own rounds begin where the one before was rejected, which is seldom amid what is easily foretold. Behind plain
        rounds and short chains a walk begins there more often than it will.
        """
        behind = [
            row
            for before, done in pairwise(self.rounds)
            if done.shape.depth and before.shape.depth >= DEEP
            for row in done.rows
        ]
        return behind if len(behind) >= FEW else self.rows

    @property
    def rows(self) -> list[Walked]:
        """Walks of rounds that asked for drafts."""
        return [row for done in self.rounds if done.shape.depth for row in done.rows]


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
    """Write with the pair for some seconds, or until all prompts are answered, over shapes that take turns. So do tasks.

    Raises:
        ValueError: without a drafter, without prompts, or when nothing could be measured in that time.
    """
    if engine.drafter is None:
        raise ValueError("there is no drafter to plan for; give one with --drafter")
    if not prompts or seconds <= 0:
        raise ValueError(f"nothing can be measured with {len(prompts)} prompts in {seconds:g} seconds; give more")
    probing = Probing([parse_shape(name) for name in PROBES])
    start, busy, outside = time.perf_counter(), 0.0, 0.0
    for prompt in in_turns(prompts):
        begun, first = time.perf_counter(), len(probing.rounds)
        ids = prompt.encode(engine)
        pieces = engine.stream(ids, shape=probing, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        ended = _follow(pieces, start + seconds)
        tell(min(int(time.perf_counter() - start), int(seconds)), int(seconds), "measuring")
        if ended is None:
            break
        total = time.perf_counter() - begun
        spent = sum(done.seconds for done in probing.rounds[first:])
        busy += len(probing.rounds) - first
        outside += max(0.0, total - spent - ended.stats.seconds["prefill"])
    counted, seen = [], dict[str, int]()
    for done in probing.rounds:
        seen[done.shape.name] = seen.get(done.shape.name, 0) + 1
        if seen[done.shape.name] > WARM_UP:
            counted.append(done)
    return Measured(counted, outside / busy if busy else 0.0)


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
