"""What speculation brings at a given acceptance rate: rounds of a target with drafts of known quality that cost nothing.

Plain decoding writes a text behind random tokens. An oracle then proposes that text's own next token at a rate, and shapes take
turns with plain decoding. What stays is the target: how many nodes it scores in the time of one, and what a commit costs. A
drafter that needs time lies below the curve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from outrider.bench.choice import rate as speed
from outrider.bench.hostile import random_prompts
from outrider.bench.report import Run, Totals
from outrider.drafters.catalog import make_controller
from outrider.drafters.oracle import OracleDrafter, OracleDraftState
from outrider.picture import picture
from outrider.sampling import Sampler

if TYPE_CHECKING:
    from outrider.api import Engine

Clock = Callable[[], float]
Tell = Callable[[int, int, str], None]


class Foretold(OracleDrafter):
    """An oracle that is told its text, so that no run has to write it first."""

    text: list[int]
    """Prompt and continuation."""

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> OracleDraftState:
        """Every row gets the one text."""
        return OracleDraftState(self, [self.text for _ in prompts])


@dataclass
class Point:
    """One shape at one rate, and the runs of plain decoding that it took turns with."""

    rate: float
    shape: str
    runs: list[Run] = field(default_factory=list)
    plain: list[Run] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Tokens per second of the rounds over those of plain decoding; the prompt is left out."""
        return speed(self.runs) / speed(self.plain)

    @property
    def same(self) -> float:
        """Share of the texts that are plain decoding's; below 1 where two tokens tie within the dtype's rounding."""
        return sum(run.token_ids == plain.token_ids for run, plain in zip(self.runs, self.plain)) / len(self.runs)

    def to_json(self) -> dict[str, Any]:
        """Figures."""
        totals = Totals(self.runs)
        return {
            "rate": self.rate,
            "shape": self.shape,
            "speedup": self.speedup,
            "acceptance_rate": totals.acceptance_rate,
            "acceptance_length": totals.acceptance_length,
            "ms_per_round": 1e3 * _busy(self.runs) / sum(run.stats.rounds for run in self.runs),
            "plain_ms_per_round": 1e3 * _busy(self.plain) / sum(run.stats.rounds for run in self.plain),
            "same_text": self.same,
        }


def _busy(runs: Sequence[Run]) -> float:
    return sum(run.seconds - run.stats.seconds["prefill"] for run in runs)


def measure_rates(
    engine: Engine,
    rates: Sequence[float],
    shapes: Sequence[str],
    max_new_tokens: int = 64,
    *,
    prompts: int = 2,
    temperature: float = 1.0,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    tell: Tell = lambda done, total, what: None,
) -> list[Point]:
    """Every shape at every rate, in turns with plain decoding, prompt by prompt. No text ends before its budget.

    Args:
        rates: chances that a drafted token is the target's own.
        prompts: random texts to continue.
        temperature: where tokens are drawn, two of them rarely tie, and texts part less often in half precision.

    Raises:
        ValueError: without rates, shapes, prompts or tokens, and for rates that are no chances.
    """
    if not rates or not shapes or prompts < 1 or max_new_tokens < 2:
        raise ValueError("there is nothing to measure; give --rates, --shapes, a prompt and two tokens or more")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "eos_token_id": None}
    oracles = {rate: Foretold(engine.target, rate) for rate in rates}
    arms = {(rate, shape): make_controller(shape, oracles[rate]) for rate in rates for shape in shapes}
    points = {key: Point(*key) for key in arms}
    ids = random_prompts(engine.target.vocab, prompts, seed=seed)
    texts: dict[tuple[int, str], list[int]] = {}

    def plainly(number: int) -> Run:
        with engine.drafting(None):
            return _run(engine, ids[number], "off", options, clock)

    def drafted(number: int, rate: float, shape: str) -> Run:
        oracle = oracles[rate]
        oracle.seed, oracle.text = seed + number, texts[number, shape]
        with engine.drafting(oracle):
            run = _run(engine, ids[number], arms[rate, shape], options, clock)
        # in half precision a shape may settle ties in its own way, and what is foretold must be what it will write
        texts[number, shape] = ids[number] + run.token_ids
        return run

    for number in range(prompts):
        tell(0, len(rates), "texts")
        first = plainly(number)
        for shape in shapes:
            texts[number, shape] = ids[number] + first.token_ids
            drafted(number, max(rates), shape)  # a warm-up, too
    for done, rate in enumerate(rates):
        tell(done, len(rates), f"rate {rate:g}")
        for number in range(prompts):
            plain = plainly(number)
            for at in range(len(shapes)):
                shape = shapes[(at + number) % len(shapes)]
                points[rate, shape].runs.append(drafted(number, rate, shape))
                points[rate, shape].plain.append(plain)
    tell(len(rates), len(rates), "rates")
    return list(points.values())


def _run(engine: Engine, ids: list[int], shape: Any, options: dict[str, Any], clock: Clock) -> Run:
    start = clock()
    result = engine.generate(ids, shape=shape, **options)
    return Run(list(result.token_ids), clock() - start, stats=result.stats)


def break_even(points: Sequence[Point]) -> float | None:
    """The rate from which on a shape gains, between two measured ones by a straight line; the lowest one where it always does,
    None where the highest one brings nothing."""
    ordered = sorted(points, key=lambda point: point.rate)
    if ordered[-1].speedup < 1:
        return None
    losing = [number for number, point in enumerate(ordered) if point.speedup < 1]
    if not losing:
        return ordered[0].rate
    below, above = ordered[losing[-1]], ordered[losing[-1] + 1]
    return below.rate + (above.rate - below.rate) * (1 - below.speedup) / (above.speedup - below.speedup)


# ---- for people ------------------------------------------------------------------------------------------------------


def _by_shape(points: Sequence[Point]) -> dict[str, list[Point]]:
    return {shape: [p for p in points if p.shape == shape] for shape in dict.fromkeys(p.shape for p in points)}


def to_json(points: Sequence[Point]) -> dict[str, Any]:
    """Plain data."""
    gains = {shape: break_even(mine) for shape, mine in _by_shape(points).items()}
    return {"points": [point.to_json() for point in points], "break_even": gains}


def render(points: Sequence[Point], console: Console) -> None:
    """A row a rate, a column a shape; below, from where on each gains."""
    shapes = _by_shape(points)
    table = Table("rate", *(f"{shape}: {what}" for shape in shapes for what in ("over plain", "tokens a round")))
    for rate in dict.fromkeys(point.rate for point in points):
        here = [next(point for point in mine if point.rate == rate).to_json() for mine in shapes.values()]
        cells = [(f"{one['speedup']:.2f}x", f"{one['acceptance_length']:.2f}") for one in here]
        table.add_row(f"{rate:g}", *(cell for pair in cells for cell in pair))
    console.print(table)
    lowest = min(point.rate for point in points)
    for shape, mine in shapes.items():
        found = break_even(mine)
        told = "never" if found is None else f"from {found:.2f} on" + (", the lowest rate" if found == lowest else "")
        same = sum(point.same for point in mine) / len(mine)
        console.print(f"{shape} gains {told}; {same:.0%} of its texts are those of plain decoding", highlight=False)


def plot(points: Sequence[Point], path: Path) -> None:
    """Speed-up against the rate, a curve a shape."""
    with picture(path) as (axes,):
        for shape, mine in _by_shape(points).items():
            axes.plot([p.rate for p in mine], [p.speedup for p in mine], marker="o", label=shape)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(xlabel="chance that a drafted token is right", ylabel="speed-up over plain decoding", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
