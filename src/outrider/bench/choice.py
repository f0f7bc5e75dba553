"""How well "auto" chooses: against every fixed shape, task by task and over the mix, all writing each text in turns.

The best fixed shape of a task is known in hindsight only, and the luckiest of many looks better than it is: so it is picked on
one half of the stretches, and its speed is read off the other half (`turns.py`). What choosing can bring over the best single
shape for the mix is bounded by the fastest fixed shape of each task, and of each prompt: both are reported, to tell a small room
from a bad choice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.report import Run, SpeedReport, provenance, to_json
from outrider.bench.turns import Clock, Heard, Spread, Text, Turns, Written, take_turns
from outrider.tree import parse_shape

AUTO, PLAIN = "auto", "plain"
WARM = 32  # tokens that every method writes uncounted


def rate(runs: Sequence[Run]) -> float:
    """Tokens per second after the prompts were read."""
    seconds = sum(run.seconds - run.stats.seconds["prefill"] for run in runs)
    return sum(len(run.token_ids) for run in runs) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Choice:
    """Texts written in turns, read for the choice of shapes.

    Args:
        turns: of methods "plain" and "auto", and fixed shapes.
        report: what they wrote, and whether it was the same.
    """

    turns: Turns
    report: SpeedReport
    ratios: dict[str | None, Spread] = field(default_factory=dict, init=False)

    @property
    def fixed(self) -> list[str]:
        """All but "auto": what could have been fixed, plain decoding among it."""
        return [method for method in self.turns.methods if method != AUTO]

    @property
    def tasks(self) -> list[str]:
        """In the order of the run."""
        return list(dict.fromkeys(self.turns.tasks))

    def best_fixed(self, task: str | None = None) -> str:
        """The fixed shape that was fastest, in hindsight."""
        return max(self.fixed, key=lambda name: self.turns.speed(name, task))

    def ratio(self, task: str | None = None) -> Spread:
        """Speed of "auto" over the best fixed shape's."""
        if task not in self.ratios:
            self.ratios[task] = self.turns.ratio(AUTO, self.fixed, task)
        return self.ratios[task]

    @cached_property
    def rooms(self) -> tuple[Spread, Spread]:
        """Speed with the best fixed shape of each task, and of each prompt, over that with the best single one."""
        return self.turns.room(self.fixed), self.turns.room(self.fixed, prompts=True)

    def to_json(self) -> dict[str, Any]:
        """Speeds after the prompt, ratios and rooms; and the whole speed report."""
        by_task, by_prompt = self.rooms
        return {
            "tasks": {task: self._line(task) for task in self.tasks},
            "mix": self._line(None) | {"room_by_task": by_task.to_json(), "room_by_prompt": by_prompt.to_json()},
            "stalled": self.turns.stalled,
            "speed": to_json(self.report),
        }

    def _line(self, task: str | None) -> dict[str, Any]:
        return {
            "best_fixed": self.best_fixed(task),
            "auto_over_best_fixed": self.ratio(task).to_json(),
            "tokens_per_second": {name: self.turns.speed(name, task) for name in self.turns.methods},
        }


def measure_choice(
    engine: Any,
    prompts: Sequence[Any],
    shapes: Sequence[str],
    max_new_tokens: int,
    *,
    repeat: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    clock: Clock = time.perf_counter,
) -> Choice:
    """Plain decoding, "auto" and fixed shapes write every text in turns.

    Raises:
        ValueError: without a drafter or prompts, or for shapes that draft nothing.
    """
    from outrider.bench.runner import refuse_repeated, report_of

    if engine.drafter is None:
        raise ValueError("there is no drafter whose shapes could be chosen; give one with --drafter")
    fixed = [shape for shape in shapes if shape not in (PLAIN, AUTO)]
    refuse_repeated(fixed)
    if idle := [shape for shape in fixed if not parse_shape(shape).depth]:
        raise ValueError(
            f"shape {idle[0]!r} drafts nothing, as plain decoding does, which is measured anyway; leave it out"
        )
    if not prompts or repeat < 1:
        raise ValueError(f"{len(prompts)} prompts, {repeat} times, are nothing to measure; give one or more")
    methods, options = [PLAIN, AUTO, *fixed], {"temperature": temperature, "seed": seed}
    encoded, chance = [prompt.encode(engine) for prompt in prompts], random.Random(seed)

    def written(task: str, ids: list[int], tokens: int, text: int = 0) -> Written:
        begin = {name: lambda name=name: _begin(engine, name, ids, tokens, options) for name in methods}
        return replace(take_turns(task, begin, tokens, chance, clock), text=text)

    written(prompts[0].task, encoded[0], min(max_new_tokens, WARM))
    found = list[list[Written]]()
    for number in range(repeat):
        found.append([])
        for place, (prompt, ids) in enumerate(zip(prompts, encoded)):
            progress(number * len(prompts) + place, repeat * len(prompts), prompt.task)
            found[-1].append(written(prompt.task, ids, max_new_tokens, place))
    runs = {name: [[_run(one, name) for one in repeated] for repeated in found] for name in methods}
    report = report_of(engine, methods, prompts, encoded, runs, {"max_new_tokens": max_new_tokens, **options})
    return Choice(Turns([one for repeated in found for one in repeated]), report)


def _begin(engine: Any, name: str, ids: list[int], tokens: int, options: dict[str, Any]) -> Text:
    from outrider.options import options_from

    heard = Heard(engine.controller("off" if name == PLAIN else name, options_from(options)))
    return Text(engine.stream(ids, shape=heard, max_new_tokens=tokens, **options), heard)


def _run(written: Written, name: str) -> Run:
    """As a run of one method on its own: its rounds, and the prompt."""
    stats = written.results[name].stats
    seconds = sum(done.seconds for done in written.rounds[name]) + stats.seconds["prefill"]
    return Run(list(written.results[name].token_ids), seconds, stats=stats)


def render(choice: Choice, console: Console) -> None:
    """One row per method, one column per task; below what choosing brought and could have brought."""
    facts, turns = choice.report.settings, choice.turns
    table = Table(title=f"{facts['target']}, {facts['dtype']}, drafter {facts['drafter']}: tokens/s after the prompt")
    table.add_column("method")
    for name in (*choice.tasks, "all"):
        table.add_column(name, justify="right")
    columns: list[str | None] = [*choice.tasks, None]
    for method in turns.methods:
        cells = [f"{turns.speed(method, task):.1f}" for task in columns]
        best = [method == choice.best_fixed(task) for task in columns]
        table.add_row(method, *(f"[bold]{cell}[/bold]" if top else cell for cell, top in zip(cells, best)))
    table.add_section()
    table.add_row("auto over best fixed", *(choice.ratio(task).told for task in columns))
    table.add_row("95 % of resamplings", *(choice.ratio(task).between for task in columns))
    console.print(table)
    by_task, by_prompt = choice.rooms
    console.print(
        f"over the best single shape ({choice.best_fixed()}): auto {choice.ratio()}; the best of each task would bring "
        f"{by_task}, of each prompt {by_prompt}. Best shapes are picked on one half of the turns and read off the other; stalls, "
        f"{turns.stalled:.1%} of the time, are taken out",
        markup=False,
    )
    for one in choice.report.methods:
        if one.differences:
            console.print(f"{one.method}: {len(one.differences)} texts differ from plain decoding's", markup=False)
    console.print(f"command: {provenance()['command']}", markup=False)
