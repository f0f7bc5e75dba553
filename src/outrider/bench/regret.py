"""Ways to choose shapes, side by side on the same text: synthetic streams, and recorded walks played again.

A stream says for every position of a text what a wide and deep tree rooted there would have met, so that any smaller shape can
be played on it and the best fixed one is known in hindsight. Regret is seconds lost against that one.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.controller import Bandit, Controller, Fixed
from outrider.cost import drafted_by
from outrider.counterfactual import Counterfactual
from outrider.drafters.base import DraftState
from outrider.drafters.catalog import ARMS, default_arms
from outrider.options import options_from
from outrider.rounds import Round, Walked, walked
from outrider.sampling import Sampler
from outrider.train.plots import picture
from outrider.tree import OFF, Shape, parse_shape
from outrider.verify import Verdict, verify_coupled

if TYPE_CHECKING:
    from outrider.api import Engine
    from outrider.bench.tasks import Prompt


class EpsilonGreedy(Bandit):
    """The arm that was fastest, but in a share of the rounds any."""

    def __init__(self, arms: Sequence[Shape], epsilon: float = 0.1, discount: float = 0.98, seed: int = 0) -> None:
        super().__init__(arms, discount=discount)
        self.epsilon, self.random = epsilon, random.Random(seed)

    def choose(self) -> Shape:
        """Each arm once, then by chance."""
        untried = [arm for name, arm in self.arms.items() if not self.pulls[name]]
        if untried:
            return untried[0]
        if self.random.random() < self.epsilon:
            return self.random.choice(list(self.arms.values()))
        return self.arms[max(self.arms, key=self.speed)]


class Exp3:
    """Exponential weights from the reward of the drawn arm alone (Auer and others), with forgetting (EXP3.S).

    The reward is tokens per second as a share of the largest seen so far.
    """

    def __init__(self, arms: Sequence[Shape], gamma: float = 0.1, share: float = 0.002, seed: int = 0) -> None:
        self.arms = {arm.name: arm for arm in [*arms, OFF]}
        self.gamma, self.share, self.random = gamma, share, random.Random(seed)
        self.weights = dict.fromkeys(self.arms, 1.0)
        self.chances = dict.fromkeys(self.arms, 1.0 / len(self.arms))
        self.largest = 0.0

    def choose(self) -> Shape:
        """Draw an arm."""
        total, count = sum(self.weights.values()), len(self.arms)
        self.chances = {n: (1 - self.gamma) * w / total + self.gamma / count for n, w in self.weights.items()}
        (name,) = self.random.choices(list(self.chances), list(self.chances.values()))
        return self.arms[name]

    def reward(self, done: Round) -> None:
        """Raise the drawn arm's weight."""
        name = done.shape.name
        if name not in self.arms or done.seconds <= 0:
            return
        speed = done.emitted / done.seconds
        self.largest = max(self.largest, speed)
        gain = speed / self.largest / self.chances[name]
        self.weights[name] *= math.exp(min(self.gamma * gain / len(self.arms), 50.0))
        total = sum(self.weights.values())
        # every arm gets a little of the whole, so that none is beyond recall
        self.weights = {n: w / total + self.share / len(self.arms) for n, w in self.weights.items()}


# ---- streams ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seconds:
    """What rounds take, in any unit.

    Args:
        plain: a pass over one token.
        node: each further node.
        level: a step of the drafter.
        fed: each further node fed to the drafter.
        noise: spread of the logarithm.
    """

    plain: float = 1.0
    node: float = 0.02
    level: float = 0.15
    fed: float = 0.005
    noise: float = 0.05

    def __call__(self, shape: Shape, drafted: int, chance: random.Random) -> tuple[float, float]:
        """Seconds of drafting and of the target's pass."""
        factor = math.exp(chance.gauss(0.0, self.noise))
        draft = self.level * shape.depth + self.fed * (shape.feeds - shape.depth) if shape.depth else 0.0
        return draft * factor, (self.plain + self.node * drafted) * factor


@dataclass(frozen=True)
class Stream:
    """A text as drafting meets it.

    Args:
        walks: per position, what a tree that is at least as wide and deep as all arms meets there.
        flips: positions where the text changes, for the plot.
    """

    walks: Sequence[Walked]
    flips: tuple[int, ...] = ()


def synthetic(phases: Sequence[tuple[int, Sequence[float]]], seed: int = 0, depth: int = 16) -> Stream:
    """Phases of (positions, chances that the target's token is the child of rank 0, 1, ...)."""
    chance, ranks, flips = random.Random(seed), list[int | None](), list[int]()
    for count, chances in phases:
        flips.append(len(ranks))
        choices, weights = [*range(len(chances)), None], [*chances, max(0.0, 1.0 - sum(chances))]
        ranks += chance.choices(choices, weights, k=count)
    return Stream([_walk_from(ranks, at, depth) for at in range(len(ranks))], tuple(flips[1:]))


def _walk_from(ranks: Sequence[int | None], at: int, depth: int) -> Walked:
    found: list[int] = []
    for rank in ranks[at : at + depth]:
        if rank is None:
            break
        found.append(rank)
    return Walked(tuple(found), 1024, False, 1024, True)


def record(
    engine: Engine,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    shape: str | None = None,
) -> list[Stream]:
    """Write plainly, then draft a tree at every position of what was written; the target is not asked again.

    Args:
        shape: of these trees; by default as deep as any of the drafter's arms, three wide at the root and two below it.

    Raises:
        ValueError: without a drafter.
    """
    if engine.drafter is None:
        raise ValueError("there is no drafter whose walks could be recorded; give one")
    deepest = max(arm.depth for arm in default_arms(engine.drafter))
    asked, streams = parse_shape((3, 2, *[1] * (deepest - 2)) if shape is None else shape), []
    options = options_from({"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed})
    for prompt in prompts:
        ids = prompt.encode(engine)
        text = ids + engine.generate(ids, shape="off", **vars(options)).token_ids
        sampler = Sampler(
            options, seed, len(ids), options.eos_ids(engine.model_eos), engine.target.vocab, engine.model.device
        )
        with torch.inference_mode():
            drafting = engine.drafter.begin([ids], [sampler], max_new_tokens + asked.nodes + 8)
            walks = [_walk_at(drafting, text, end, asked) for end in range(len(ids), len(text) - asked.depth)]
        streams.append(Stream(walks))
    return [stream for stream in streams if stream.walks]


def _walk_at(drafting: DraftState, text: list[int], end: int, asked: Shape) -> Walked:
    """What a tree drafted after `end` tokens would have met."""
    (draft,) = drafting.propose([text[:end]], [asked])
    verdict = verify_coupled(draft.tree, lambda node: text[end + draft.tree.depths[node]])
    drafting.observe([Verdict([0], text[end])])
    return walked(draft, verdict, asked)


def played(shape: Shape, walk: Walked) -> Walked:
    """What a round of a shape meets where the recorded tree met `walk`."""
    counts, firsts = shape.flat
    node, ranks, drafted = 0, list[int](), drafted_by(shape, walk)
    for rank in walk.ranks:
        if rank >= counts[node]:
            return Walked(tuple(ranks), counts[node], False, drafted, drafted == shape.nodes)
        ranks.append(rank)
        node = firsts[node] + rank
    ended = walk.ended and counts[node] > walk.width
    return Walked(tuple(ranks), min(walk.width, counts[node]), ended, drafted, drafted == shape.nodes)


# ---- playing ---------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """What a policy did on the streams, round by round.

    Args:
        positions: tokens written before the round.
        seconds: time spent before the round.
        shapes: what it drafted.
    """

    positions: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    tokens: int = 0
    total: float = 0.0

    def at(self, position: int) -> float:
        """Seconds until so many tokens were written."""
        return self.seconds[min(bisect_left(self.positions, position), len(self.seconds) - 1)]


def play(policy: Controller, streams: Sequence[Stream], seconds: Seconds, seed: int = 0) -> Played:
    """Let a policy choose its way through the streams, one after the other."""
    done, chance = Played(), random.Random(seed)
    for stream in streams:
        at = 0
        while at < len(stream.walks):
            shape = policy.choose()
            row = played(shape, stream.walks[at]) if shape.depth else Walked((), 0, False, 0, True)
            draft, verify = seconds(shape, row.drafted, chance)
            done.positions.append(done.tokens)
            done.seconds.append(done.total)
            done.shapes.append(shape.name)
            policy.reward(Round(shape, [row], draft, verify))
            at += row.emitted
            done.tokens += row.emitted
            done.total += draft + verify
    return done


def policies(arms: Sequence[Shape]) -> dict[str, Callable[[], Controller]]:
    """The ways to choose that are compared."""
    return {
        "counterfactual": lambda: Counterfactual(arms),
        "UCB": lambda: Bandit(arms),
        "UCB, paper's reward": lambda: Bandit(arms, form="paper"),
        "epsilon-greedy": lambda: EpsilonGreedy(arms),
        "EXP3": lambda: Exp3(arms),
    }


@dataclass(frozen=True)
class Comparison:
    """Policies and all fixed shapes on the same streams."""

    played: Mapping[str, Played]
    fixed: Mapping[str, Played]
    flips: Sequence[int]

    @property
    def best_fixed(self) -> str:
        """The fixed shape with the most tokens per second, in hindsight."""
        return min(self.fixed, key=lambda name: self.fixed[name].total / self.fixed[name].tokens)

    def speed(self, name: str) -> float:
        """Tokens per second of a policy, as a share of the best fixed shape's."""
        one, best = {**self.fixed, **self.played}[name], self.fixed[self.best_fixed]
        return one.tokens / one.total * best.total / best.tokens

    def regret(self, name: str, points: int = 200) -> list[tuple[int, float]]:
        """(tokens written, seconds lost against the best fixed shape)."""
        one, best = self.played[name], self.fixed[self.best_fixed]
        grid = [round(i * best.tokens / points) for i in range(points + 1)]
        return [(at, one.at(at) - best.at(at)) for at in grid]

    def to_json(self) -> dict[str, Any]:
        """Speeds as shares of the best fixed shape's, and how often each policy drafted what."""
        return {
            "best_fixed": self.best_fixed,
            "speed": {name: self.speed(name) for name in (*self.played, *self.fixed)},
            "shapes": {name: dict(Counter(one.shapes).most_common()) for name, one in self.played.items()},
        }


def compare(
    streams: Sequence[Stream], seconds: Seconds, arms: Sequence[Shape | str] = ARMS, seed: int = 0
) -> Comparison:
    """Every policy and every fixed shape once over the streams."""
    if not any(stream.walks for stream in streams):
        raise ValueError("the streams hold no text; write more tokens")
    shapes = [parse_shape(arm) for arm in arms]
    fixed = {shape.name: play(Fixed(shape), streams, seconds, seed) for shape in (OFF, *shapes)}
    tried = {name: play(make(), streams, seconds, seed) for name, make in policies(shapes).items()}
    flips, start = list[int](), 0
    for stream in streams:
        flips += [start + flip for flip in stream.flips]
        start += len(stream.walks)
    return Comparison(tried, fixed, flips)


def regret_plot(comparison: Comparison, path: Path, unit: str = "plain passes") -> None:
    """Regret against tokens written, one line per policy; dotted: the text changes."""
    with picture(path) as (axes,):
        for name in comparison.played:
            points = comparison.regret(name)
            label = f"{name} ({comparison.speed(name):.2f} of its speed)"
            axes.plot([at for at, _ in points], [lost for _, lost in points], label=label)
        for flip in comparison.flips:
            axes.axvline(flip, color="grey", linestyle=":")
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set(xlabel="tokens written", ylabel=f"lost against {comparison.best_fixed} fixed, {unit}")
        axes.grid(alpha=0.3)
        axes.legend()
