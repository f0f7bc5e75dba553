"""Never slower: what "auto" costs where speculation cannot pay, against plain decoding, each time from a cold start.

Hostile are texts that no drafter foresees, a drafter that is always wrong at no cost, one that is wrong at its usual cost,
and one that takes as long as it is told to. Both ways write each text in turns (`turns.py`).
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from outrider import noise
from outrider.bench.turns import Clock, Heard, Spread, Text, Turns, Written, take_turns
from outrider.drafters.base import Drafter, DraftState
from outrider.drafters.catalog import make_controller
from outrider.drafters.wrapped import Wrapped, WrappedState
from outrider.sampling import Sampler
from outrider.tree import Shape, TokenTree
from outrider.verify import Draft, Verdict

if TYPE_CHECKING:
    from outrider.api import Engine

RANDOM = 3.0  # temperature at which a text is anybody's guess
PROMISE = 0.97  # least speed of "auto" over plain decoding
WAYS = ("plain", "auto")
WARM = 32  # tokens that both ways write uncounted
Tell = Callable[[int, int, str], None]

# ---- hostile drafters ------------------------------------------------------------------------------------------------


class Guessing:
    """Tokens by chance, at no cost: whole trees that are always wrong."""

    name = "guessing"

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> GuessingState:
        """Start B sequences."""
        return GuessingState(self.vocab)


class GuessingState:
    """Guesses for B texts."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Trees as wide and deep as the shape."""
        return [self._guess(context, shape) for context, shape in zip(contexts, shapes)]

    def _guess(self, context: Sequence[int], shape: Shape) -> Draft:
        tree, frontier = TokenTree(context[-1]), [0]
        for level in shape.levels:
            following = list[int]()
            for node, count in zip(frontier, level):
                for _ in range(count):
                    token = int(noise.uniform(len(context), noise.DRAFT, len(tree)) * self.vocab)
                    following.append(tree.add(node, token))
            frontier = following
        return Draft(tree, {})

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to learn."""

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing to keep."""


class Spoiled(Wrapped):
    """Another drafter made useless: its tokens are off by one, or it takes longer.

    Args:
        shift: added to every token id.
        delay: seconds of every level.
    """

    def __init__(self, inner: Drafter, vocab: int, shift: int = 0, delay: float = 0.0) -> None:
        super().__init__(inner)
        self.vocab, self.shift, self.delay = vocab, shift, delay
        self.drafters = [inner]
        self.name = f"spoiled {inner.name}"

    def around(self, state: DraftState) -> SpoiledState:
        """Spoil B sequences."""
        return SpoiledState(self, state)


class SpoiledState(WrappedState[Spoiled]):
    """The drafter's side of B sequences."""

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Proposals, late or wrong."""
        drafts = self.inner.propose(contexts, shapes)
        levels = max((max(draft.tree.depths) for draft in drafts), default=0)
        if self.owner.delay and levels:
            time.sleep(self.owner.delay * levels)
        if self.owner.shift:
            for draft in drafts:
                tokens = draft.tree.tokens
                tokens[1:] = [(token + self.owner.shift) % self.owner.vocab for token in tokens[1:]]
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Pass verdicts on; of tokens that were changed none is the drafter's own."""
        if self.owner.shift:
            verdicts = [Verdict([0], verdict.next_token) for verdict in verdicts]
        self.inner.observe(verdicts)


# ---- the measurement -------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One kind of hostility: who drafts, on which prompts, at which temperature, and what both ways wrote."""

    name: str
    drafter: Drafter
    prompts: list[list[int]]
    temperature: float = 0.0
    written: list[Written] = field(default_factory=list)

    @cached_property
    def turns(self) -> Turns:
        """Of both ways, prompts included."""
        return Turns(self.written)

    @cached_property
    def ratio(self) -> Spread:
        """Speed of "auto" over plain decoding, prompts included."""
        return self.turns.ratio("auto", ["plain"])

    @property
    def drafted(self) -> float:
        """Share of the rounds that drafted."""
        runs = [one.results["auto"].stats for one in self.written]
        rounds = sum(stats.rounds for stats in runs)
        return 1.0 - sum(stats.shapes["off"] for stats in runs) / rounds if rounds else 0.0

    def lost(self, stage: str) -> float:
        """Seconds of a stage in "auto" over those in plain decoding, as a share of plain decoding's time; with stalls."""
        seconds = {way: [one.results[way].stats.seconds for one in self.written] for way in WAYS}
        found = {way: sum(one.get(stage, 0.0) for one in seconds[way]) for way in WAYS}
        total = sum(done.seconds for one in self.written for done in one.rounds["plain"])
        return (found["auto"] - found["plain"]) / total

    def to_json(self) -> dict[str, Any]:
        """Figures of both ways, and where the time went."""
        return {
            "case": self.name,
            "ratio": self.ratio.to_json(),
            "drafted": self.drafted,
            "lost": {stage: self.lost(stage) for stage in STAGES},
            "stalled": self.turns.stalled,
            "tokens_per_second": {way: self.turns.speed(way) for way in WAYS},
        }


STAGES = ("prefill", "draft", "verify", "commit")


def random_prompts(vocab: int, count: int, length: int = 64, seed: int = 0) -> list[list[int]]:
    """Token ids by chance, id 0 to the last but none in particular."""
    draws = range(length)
    return [[int(noise.uniform(seed + row, noise.DRAFT, at) * vocab) for at in draws] for row in range(count)]


def hostile_cases(engine: Engine, prompts: list[list[int]], delay: float, seed: int = 0) -> list[Case]:
    """The hostile set.

    Args:
        prompts: token ids of usual texts.
        delay: seconds that the slow drafter takes longer for every level.

    Raises:
        ValueError: without a drafter, without prompts, or for a delay below 0.
    """
    if engine.drafter is None or not prompts:
        raise ValueError("a hostile set spoils a drafter on some prompts; give --drafter and one prompt or more")
    if delay < 0:
        raise ValueError(f"a delay of {delay:g} s is impossible; give 0 or more")
    own, vocab = engine.drafter, engine.target.vocab
    return [
        Case("random text", own, random_prompts(vocab, len(prompts), seed=seed), RANDOM),
        Case("always wrong, free", Guessing(vocab), prompts),
        Case("always wrong, at its usual cost", Spoiled(own, vocab, shift=1), prompts),
        Case(f"slow: {delay * 1e3:g} ms more a level", Spoiled(own, vocab, delay=delay), prompts),
    ]


def measure_hostile(
    engine: Engine,
    cases: list[Case],
    max_new_tokens: int = 256,
    *,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    tell: Tell = lambda done, total, what: None,
) -> list[Case]:
    """Both ways write every text in turns; "auto" starts cold each time, and no text ends before its budget."""
    options: dict[str, Any] = {"seed": seed, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    done, total, chance = 0, sum(len(case.prompts) for case in cases), random.Random(seed)
    for case in cases:
        warm = options | {"max_new_tokens": min(WARM, max_new_tokens)}
        _write(engine, case, case.prompts[0], warm, chance, clock)
        for ids in case.prompts:
            tell(done, total, case.name)
            case.written.append(_write(engine, case, ids, options, chance, clock))
            done += 1
    return cases


def _write(
    engine: Engine, case: Case, ids: list[int], options: dict[str, Any], chance: random.Random, clock: Clock
) -> Written:
    def begin(way: str) -> Text:
        drafter = case.drafter if way == "auto" else None
        heard = Heard(make_controller("auto", drafter))
        with engine.drafting(drafter):
            pieces = engine.stream(ids, shape=heard, temperature=case.temperature, **options)
        return Text(pieces, heard, read=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that these drafters are useless is known
        ways = {"plain": lambda: begin("plain"), "auto": lambda: begin("auto")}
        return take_turns(case.name, ways, options["max_new_tokens"], chance, clock)


def render(cases: Sequence[Case], console: Console) -> None:
    """One row per case: the promise, and where the time went."""
    table = Table(title=f'"auto" where speculation cannot pay; promised: at least {PROMISE} of plain decoding')
    table.add_column("case")
    names = ("auto over plain", "95 %", "auto tok/s", "plain tok/s", "rounds drafted", *(f"{s}, lost" for s in STAGES))
    for name in names:
        table.add_column(name, justify="right")
    for case in cases:
        value = case.ratio.value
        ratio = f"{value:.3f}" if value >= PROMISE else f"[red]{value:.3f}[/red]"
        speeds = [f"{case.turns.speed(way):.1f}" for way in ("auto", "plain")]
        lost = [f"{case.lost(stage):+.1%}" for stage in STAGES]
        table.add_row(case.name, ratio, case.ratio.between, *speeds, f"{case.drafted:.0%}", *lost)
    console.print(table)
