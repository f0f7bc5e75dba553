"""How good a plan is: tokens per second that `plan` predicts for a pair, against those of a run, on other prompts.

A pair is measured, and the shape that promises most is chosen. Then it is measured for as long again in slices, and between them
the other prompts are written: a machine that drifts does so for both sides, and the prediction that is compared, out of these
slices, is not of a shape that was chosen for its luck in them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from outrider.bench.plan import Model, plan
from outrider.bench.probe import Probe, in_turns, measure
from outrider.bench.turns import Heard, Text, Turns, Written, take_turns
from outrider.controller import Fixed
from outrider.drafters.base import Drafter
from outrider.tree import OFF, Shape

if TYPE_CHECKING:
    from outrider.api import Engine
    from outrider.bench.tasks import Prompt

PROMISE = 0.10  # most that a prediction may be off
SLICES = 6  # that a pair is measured in, while it is run
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Forecast:
    """A shape of a pair: tokens per second after the prompt as predicted, and as they were.

    Args:
        speedup: predicted and measured, over plain decoding.
    """

    drafter: str
    shape: str
    predicted: float
    measured: float
    speedup: tuple[float, float]

    @property
    def error(self) -> float:
        """Share by which the prediction is too high."""
        return self.predicted / self.measured - 1.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        predicted, measured = self.speedup
        speeds = {"predicted": self.predicted, "measured": self.measured, "error": self.error}
        return {
            "drafter": self.drafter,
            "shape": self.shape,
            **speeds,
            "speedup": {"predicted": predicted, "measured": measured, "error": predicted / measured - 1.0},
        }


def split(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to measure on, and prompts to run: every other one of each task.

    Raises:
        ValueError: when one side is empty.
    """
    sides: tuple[list[Prompt], list[Prompt]] = [], []
    seen: dict[str, int] = {}
    for prompt in prompts:
        seen[prompt.task] = seen.get(prompt.task, 0) + 1
        sides[(seen[prompt.task] - 1) % 2].append(prompt)
    if not all(sides):
        raise ValueError("half of the prompts are measured and half are run; give two of a task or more")
    return sides


def forecast(
    engine: Engine,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    *,
    seconds: float = 40.0,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    tell: Tell = lambda done, total, what: None,
) -> list[Forecast]:
    """Plan every pair; then, slice by slice, measure once more, and write with the fastest shape and plainly, in turns of a few
    tokens.

    Args:
        seconds: of measuring a pair, each of both times.

    Raises:
        ValueError: without drafters, or when a plan cannot be made.
    """
    if not drafters:
        raise ValueError("there is no pair to plan; give one drafter or more")
    measuring, running = split(prompts)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    found, chance = list[Forecast](), random.Random(seed)
    for number, (name, drafter) in enumerate(drafters.items()):
        tell(number, len(drafters), name)
        with engine.drafting(drafter):
            first = measure(engine, measuring, seconds=seconds, **options)
            best = next(one.shape for one in plan(engine, first).ranking if one.shape.depth)
            again, written = Probe(engine, **options), list[Written]()
            for block, others in _blocks(running, measuring):
                again.run(others, seconds / SLICES)
                written += [_write(engine, prompt, (OFF, best), options, chance) for prompt in block]
        turns, model = Turns(written), Model(again.measured(warm_up=0))  # it is warm by now
        predicted = [model.predict(shape).tokens_per_second for shape in (OFF, best)]
        plain, fast = (turns.speed(shape.name) for shape in (OFF, best))
        found.append(Forecast(name, OFF.name, predicted[0], plain, (1.0, 1.0)))
        found.append(Forecast(name, best.name, predicted[1], fast, (predicted[1] / predicted[0], fast / plain)))
    return found


def _blocks(running: Sequence[Prompt], measuring: Sequence[Prompt]) -> Iterator[tuple[list[Prompt], list[Prompt]]]:
    """The prompts to run, of all tasks in turn, in as many blocks as there are slices, each with the prompts to measure, which
    begin elsewhere for every slice. The last slice has none to run: a drift is between the first slice and the last."""
    ordered, others = in_turns(running), in_turns(measuring)
    blocks = SLICES - 1
    for number in range(blocks):
        start = number * len(others) // SLICES
        yield ordered[number::blocks], others[start:] + others[:start]
    yield [], others[-1:] + others[:-1]


def _write(
    engine: Engine, prompt: Prompt, shapes: Sequence[Shape], options: dict[str, Any], chance: random.Random
) -> Written:
    """A prompt continued with these shapes in turns."""
    ids = prompt.encode(engine)

    def begin(shape: Shape) -> Text:
        heard = Heard(Fixed(shape))
        return Text(engine.stream(ids, shape=heard, **options), heard)

    ways = {shape.name: lambda shape=shape: begin(shape) for shape in shapes}
    return take_turns(prompt.task, ways, options["max_new_tokens"], chance)


def render(found: Sequence[Forecast], console: Console) -> None:
    """One row per pair and shape."""
    table = Table(title=f"planned and run; promised: within {PROMISE:.0%}")
    for name in ("drafter", "shape", "predicted tok/s", "measured tok/s", "off by", "predicted speed-up", "measured"):
        table.add_column(name, justify="left" if name in ("drafter", "shape") else "right")
    for one in found:
        error = f"{one.error:+.1%}" if abs(one.error) <= PROMISE else f"[red]{one.error:+.1%}[/red]"
        speedup = [f"{value:.2f}x" for value in one.speedup]
        table.add_row(one.drafter, one.shape, f"{one.predicted:.1f}", f"{one.measured:.1f}", error, *speedup)
    console.print(table)
