"""How well "auto" chooses: against every fixed shape, task by task and over the mix, in one run that alternates.

The best fixed shape of a task is known in hindsight only. What choosing can bring over the best single shape for the mix is
bounded by the fastest fixed shape of each task, and of each prompt: both are reported, to tell a small room from a bad choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.report import MethodReport, Run, SpeedReport, provenance, to_json

AUTO, PLAIN = "auto", "plain"
SHAPES = (
    "chain1,chain2,chain4,chain7,2x2x1,3x2x1x1,chain2@0.08~15,chain4@0.08~15,2x2x1@0.08~15,2x2x1x1x1@0.08~15,"
    "best7x8@0.05+0.2~7"
)


def rate(runs: Sequence[Run]) -> float:
    """Tokens per second after the prompts were read."""
    seconds = sum(run.seconds - run.stats.seconds["prefill"] for run in runs)
    return sum(len(run.token_ids) for run in runs) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Choice:
    """A speed report, read for the choice of shapes.

    Args:
        report: with methods "plain" and "auto", and fixed shapes.
    """

    report: SpeedReport

    @property
    def methods(self) -> list[MethodReport]:
        """All but "auto": what could have been fixed, plain decoding among it."""
        return [method for method in self.report.methods if method.method != AUTO]

    @property
    def tasks(self) -> list[str]:
        """In the order of the run."""
        return list(dict.fromkeys(self.report.methods[0].tasks))

    def speed(self, name: str, task: str | None = None) -> float:
        """Tokens per second of a method on a task, or on all."""
        method = next(one for one in self.report.methods if one.method == name)
        return rate(method.totals(task).runs)

    def best_fixed(self, task: str | None = None) -> str:
        """The fixed shape that was fastest, in hindsight."""
        return max((method.method for method in self.methods), key=lambda name: self.speed(name, task))

    def ratio(self, task: str | None = None) -> float:
        """Speed of "auto" over the best fixed shape's."""
        return self.speed(AUTO, task) / self.speed(self.best_fixed(task), task)

    def room(self, prompts: bool = False) -> float:
        """Speed with the best fixed shape of each task, or of each prompt, over that with the best single one."""
        plain = next(method for method in self.methods if method.method == PLAIN)
        groups = [[i] for i in range(len(plain.tasks))] if prompts else [self._of(task) for task in self.tasks]
        tokens = [self._tokens(plain, group) for group in groups]
        # ties may end texts at different places: times are those for plain decoding's tokens
        best = sum(count / max(self._rate(m, group) for m in self.methods) for count, group in zip(tokens, groups))
        single = min(sum(count / self._rate(m, group) for count, group in zip(tokens, groups)) for m in self.methods)
        return single / best

    def _of(self, task: str) -> list[int]:
        return [i for i, name in enumerate(self.report.methods[0].tasks) if name == task]

    @staticmethod
    def _tokens(method: MethodReport, group: Sequence[int]) -> int:
        return sum(len(repeat[i].token_ids) for repeat in method.repeats for i in group)

    @staticmethod
    def _rate(method: MethodReport, group: Sequence[int]) -> float:
        return rate([repeat[i] for repeat in method.repeats for i in group])

    def to_json(self) -> dict[str, Any]:
        """Speeds after the prompt, ratios and rooms; and the whole speed report."""
        names = [method.method for method in self.report.methods]
        return {
            "tasks": {task: self._line(names, task) for task in self.tasks},
            "mix": self._line(names, None) | {"room_by_task": self.room(), "room_by_prompt": self.room(prompts=True)},
            "speed": to_json(self.report),
        }

    def _line(self, names: Sequence[str], task: str | None) -> dict[str, Any]:
        speeds = {name: self.speed(name, task) for name in names}
        return {
            "best_fixed": self.best_fixed(task),
            "auto_over_best_fixed": self.ratio(task),
            "tokens_per_second": speeds,
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
    progress: Callable[[int, int, str], None] | None = None,
    **clock: Any,
) -> Choice:
    """Plain decoding, "auto" and fixed shapes take turns, prompt by prompt.

    Args:
        clock: another `clock` for `run_speed`.

    Raises:
        ValueError: without a drafter, or for shapes that draft nothing.
    """
    from outrider.bench.runner import run_speed

    if engine.drafter is None:
        raise ValueError("there is no drafter whose shapes could be chosen; give one with --drafter")
    methods = [PLAIN, AUTO, *(shape for shape in shapes if shape not in (PLAIN, AUTO))]
    options: dict[str, Any] = {"repeat": repeat, "temperature": temperature, "seed": seed, "progress": progress}
    return Choice(run_speed(engine, prompts, methods, max_new_tokens, **options, **clock))


def render(choice: Choice, console: Console) -> None:
    """One row per method, one column per task; below what choosing brought and could have brought."""
    facts = choice.report.settings
    table = Table(title=f"{facts['target']}, {facts['dtype']}, drafter {facts['drafter']}: tokens/s after the prompt")
    table.add_column("method")
    for name in (*choice.tasks, "all"):
        table.add_column(name, justify="right")
    columns: list[str | None] = [*choice.tasks, None]
    for method in choice.report.methods:
        cells = [f"{choice.speed(method.method, task):.1f}" for task in columns]
        best = [method.method == choice.best_fixed(task) for task in columns]
        table.add_row(method.method, *(f"[bold]{cell}[/bold]" if top else cell for cell, top in zip(cells, best)))
    table.add_section()
    table.add_row("auto over best fixed", *(f"{choice.ratio(task):.3f}" for task in columns))
    console.print(table)
    console.print(
        f"over the best single shape, {choice.best_fixed()}: auto {choice.ratio():.3f}; the best fixed shape of each task would "
        f"bring {choice.room():.3f}, of each prompt {choice.room(prompts=True):.3f}",
        markup=False,
    )
    console.print(f"command: {provenance()['command']}", markup=False)
