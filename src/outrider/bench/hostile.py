"""Never slower: what "auto" costs where speculation cannot pay, against plain decoding in turns, each time from a cold start.

Hostile are texts that no drafter foresees, a drafter that is always wrong at no cost, one that is wrong at its usual cost,
and one that takes as long as it is told to.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from outrider import noise
from outrider.bench.report import Run
from outrider.drafters.base import Drafter, DraftState
from outrider.drafters.catalog import make_controller
from outrider.sampling import Sampler
from outrider.tree import Shape, TokenTree
from outrider.verify import Draft, Verdict

if TYPE_CHECKING:
    from outrider.api import Engine

RANDOM = 3.0  # temperature at which a text is anybody's guess
PROMISE = 0.97  # least speed of "auto" over plain decoding
Clock = Callable[[], float]
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


class Spoiled:
    """Another drafter made useless: its tokens are off by one, or it takes longer.

    Args:
        shift: added to every token id.
        delay: seconds of every level.
    """

    def __init__(self, inner: Drafter, vocab: int, shift: int = 0, delay: float = 0.0) -> None:
        self.inner, self.vocab, self.shift, self.delay = inner, vocab, shift, delay
        self.drafters = [inner]
        self.name = f"spoiled {inner.name}"

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that the drafter reads."""
        return tuple(getattr(self.inner, "taps", ()))

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> SpoiledState:
        """Begin the drafter."""
        return SpoiledState(self, self.inner.begin(prompts, samplers, room, stream))


class SpoiledState:
    """The drafter's side of B sequences."""

    def __init__(self, owner: Spoiled, inner: DraftState) -> None:
        self.owner, self.inner = owner, inner

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

    def see(self, hidden: Any) -> None:
        """Pass hidden states on."""
        see: Any = getattr(self.inner, "see")  # noqa: B009
        see(hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.inner.keep(rows)


# ---- the measurement -------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One kind of hostility: who drafts, on which prompts, at which temperature, and the runs of both ways, in turns."""

    name: str
    drafter: Drafter
    prompts: list[list[int]]
    temperature: float = 0.0
    plain: list[Run] = field(default_factory=list)
    auto: list[Run] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Speed of "auto" over plain decoding, prefill included: all tokens over all seconds."""
        return _rate(self.auto) / _rate(self.plain)

    @property
    def drafted(self) -> float:
        """Share of the rounds that drafted."""
        rounds = sum(run.stats.rounds for run in self.auto)
        return 1.0 - sum(run.stats.shapes["off"] for run in self.auto) / rounds if rounds else 0.0

    def lost(self, stage: str) -> float:
        """Seconds of a stage in "auto" over those in plain decoding, as a share of plain decoding's whole time."""
        found = [sum(run.stats.seconds.get(stage, 0.0) for run in runs) for runs in (self.auto, self.plain)]
        return (found[0] - found[1]) / sum(run.seconds for run in self.plain)

    def to_json(self) -> dict[str, Any]:
        """Figures of both ways, and where the time went."""
        stages = {stage: self.lost(stage) for stage in STAGES}
        speeds = {"auto": _rate(self.auto), "plain": _rate(self.plain)}
        return {
            "case": self.name,
            "ratio": self.ratio,
            "drafted": self.drafted,
            "lost": stages,
            "tokens_per_second": speeds,
        }


STAGES = ("prefill", "draft", "verify", "commit")


def _rate(runs: Sequence[Run]) -> float:
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


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
    """Both ways on every prompt, the order turning; "auto" starts cold each time, and no text ends before its budget.

    Raises:
        ValueError: when a drafter changed a text in float32.
    """
    options: dict[str, Any] = {"seed": seed, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    done, total = 0, 2 * sum(len(case.prompts) for case in cases)
    for case in cases:
        _continue(engine, case, case.prompts[0], "auto", options, clock)  # warm-up, not counted
        for number, ids in enumerate(case.prompts):
            for way in ("plain", "auto") if number % 2 else ("auto", "plain"):
                tell(done, total, f"{case.name}: {way}")
                getattr(case, way).append(_continue(engine, case, ids, way, options, clock))
                done += 1
    return cases


def _continue(engine: Engine, case: Case, ids: list[int], way: str, options: dict[str, Any], clock: Clock) -> Run:
    drafter = case.drafter if way == "auto" else None
    with engine.drafting(drafter), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that these drafters are useless is known
        start = clock()
        result = engine.generate(
            ids, shape=make_controller("auto", drafter, case.temperature > 0), temperature=case.temperature, **options
        )
        seconds = clock() - start
    return Run(list(result.token_ids), seconds, stats=result.stats)


def render(cases: Sequence[Case], console: Console) -> None:
    """One row per case: the promise, and where the time went."""
    table = Table(title=f'"auto" where speculation cannot pay; promised: at least {PROMISE} of plain decoding')
    table.add_column("case")
    for name in ("auto over plain", "auto tok/s", "plain tok/s", "rounds drafted", *(f"{s}, lost" for s in STAGES)):
        table.add_column(name, justify="right")
    for case in cases:
        ratio = f"{case.ratio:.3f}" if case.ratio >= PROMISE else f"[red]{case.ratio:.3f}[/red]"
        lost = [f"{case.lost(stage):+.1%}" for stage in STAGES]
        table.add_row(
            case.name, ratio, f"{_rate(case.auto):.1f}", f"{_rate(case.plain):.1f}", f"{case.drafted:.0%}", *lost
        )
    console.print(table)
