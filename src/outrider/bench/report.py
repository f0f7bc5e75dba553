"""What a measurement found, as records, a table and JSON.

Speed is total tokens over total time, never a mean of ratios. Acceptance length is the tokens that a round emits;
acceptance rate is accepted over tried levels along the walked path. Times are seconds of wall clock. Every JSON report
carries its provenance: the command, the versions, the machine and the settings behind the numbers.
"""

import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.machine import cpu_name, cpuinfo

STAGES = ("prefill", "draft", "verify", "commit")
Spread = tuple[float, float, float]


@dataclass(frozen=True)
class Run:
    """One prompt continued by one method.

    `first_token_seconds` is what the same prompt took when one token was asked for, where that was measured. `stats`
    are the engine's own, None for a method that has none.
    """

    token_ids: list[int]
    seconds: float
    first_token_seconds: float | None = None
    stats: Any = None


@dataclass(frozen=True)
class Difference:
    """The first place where two continuations of one prompt part.

    `position` counts generated tokens from 0. A token is None where that text had ended. `margin_ulps` is how far the
    worse of the two lies below the target's best score, in units of last place of the model's dtype, None if unknown; a
    `tie` is a difference within the target's own rounding. `run` says what was run.
    """

    prompt: str
    position: int
    plain_token: int | None
    other_token: int | None
    margin_ulps: float | None
    tie: bool
    run: str


@dataclass(frozen=True)
class Totals:
    """Sums over runs, and the figures that follow from the sums. A figure without data is None."""

    runs: Sequence[Run]

    @cached_property
    def tokens(self) -> int:
        """Tokens written."""
        return sum(len(run.token_ids) for run in self.runs)

    @cached_property
    def seconds(self) -> float:
        """Wall clock of all runs, prefill included."""
        return sum(run.seconds for run in self.runs)

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def median_tokens_per_second(self) -> float:
        """Half of the runs were at least this fast."""
        return statistics.median(len(run.token_ids) / run.seconds if run.seconds > 0 else 0.0 for run in self.runs)

    @property
    def decoding_tokens_per_second(self) -> float | None:
        """Tokens after the first one over the seconds after it; None where the first one was not timed."""
        timed = [run for run in self.runs if run.first_token_seconds is not None]
        seconds = sum(run.seconds - (run.first_token_seconds or 0.0) for run in timed)
        return sum(len(run.token_ids) - 1 for run in timed) / seconds if seconds > 0 else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a round emits, the one that verification adds included; None without rounds."""
        rounds = self._sum(lambda stats: stats.rounds)
        return self._sum(lambda stats: stats.emitted) / rounds if rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Levels accepted over levels tried; None when nothing was drafted."""
        tried = self._sum(lambda stats: stats.tried)
        return self._sum(lambda stats: stats.accepted) / tried if tried else None

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds of each stage of the engine; empty for other methods."""
        stats = [run.stats for run in self.runs if run.stats is not None]
        return {stage: sum(s.seconds.get(stage, 0.0) for s in stats) for stage in STAGES} if stats else {}

    def _sum(self, of: Callable[[Any], float]) -> float:
        return sum(of(run.stats) for run in self.runs if run.stats is not None)


@dataclass(frozen=True)
class MethodReport:
    """One method. `repeats[r][i]` is the run of prompt i in repeat r, `tasks[i]` that prompt's task.

    `equal_text` is None when nothing was there to compare the method's text with.
    """

    method: str
    tasks: list[str]
    repeats: list[list[Run]]
    equal_text: bool | None
    differences: list[Difference] = field(default_factory=list)

    def totals(self, task: str | None = None) -> Totals:
        """All repeats together, of one task or of all."""
        return Totals([run for repeat in self._of(task) for run in repeat])

    def speed_spread(self, task: str | None = None) -> Spread:
        """Minimum, median and maximum over the repeats of tokens per second."""
        return _spread([Totals(repeat).tokens_per_second for repeat in self._of(task)])

    def acceptance_spread(self, task: str | None = None) -> Spread | None:
        """Minimum, median and maximum over the repeats of the acceptance length; None without rounds."""
        lengths = [Totals(repeat).acceptance_length for repeat in self._of(task)]
        known = [length for length in lengths if length is not None]
        return _spread(known) if known else None

    def _of(self, task: str | None) -> list[list[Run]]:
        if task is None:
            return self.repeats
        return [[run for name, run in zip(self.tasks, repeat, strict=True) if name == task] for repeat in self.repeats]


@dataclass(frozen=True)
class SpeedReport:
    """All methods of one measurement, the settings that they shared, and why others were left out."""

    methods: list[MethodReport]
    settings: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict)

    def speedup(self, method: MethodReport, task: str | None = None) -> float | None:
        """Tokens per second over those of `plain`; None when plain was not run."""
        plain = next((m.totals(task).tokens_per_second for m in self.methods if m.method == "plain"), 0.0)
        return method.totals(task).tokens_per_second / plain if plain else None


def _spread(values: list[float]) -> Spread:
    return min(values), statistics.median(values), max(values)


# ---- JSON ------------------------------------------------------------------------------------------------------


def to_json(report: SpeedReport, *, limit: int | None = None) -> dict[str, Any]:
    """The report as plain data. `limit` is the number of prompts per task that was asked for; None means all."""
    return {
        "methods": [_method_json(report, method) for method in report.methods],
        "left_out": report.left_out,
        "provenance": provenance() | report.settings | {"limit": limit},
    }


def _method_json(report: SpeedReport, method: MethodReport) -> dict[str, Any]:
    return {
        "method": method.method,
        **_totals_json(report, method, None),
        "equal_text": method.equal_text,
        "per_task": {name: _task_json(report, method, name) for name in dict.fromkeys(method.tasks)},
        "differences": [asdict(difference) for difference in method.differences],
    }


def _totals_json(report: SpeedReport, method: MethodReport, task: str | None) -> dict[str, Any]:
    totals = method.totals(task)
    speeds = ("tokens_per_second", "median_tokens_per_second", "decoding_tokens_per_second")
    names = (*speeds, "acceptance_length", "acceptance_rate", "tokens", "seconds")
    return {name: getattr(totals, name) for name in names} | {"speedup_over_plain": report.speedup(method, task)}


def _task_json(report: SpeedReport, method: MethodReport, task: str) -> dict[str, Any]:
    spreads = {"tokens_per_second": method.speed_spread(task), "acceptance_length": method.acceptance_spread(task)}
    return {
        **_totals_json(report, method, task),
        "min_median_max": {name: None if spread is None else list(spread) for name, spread in spreads.items()},
        "stage_seconds": method.totals(task).stage_seconds,
    }


def provenance() -> dict[str, Any]:
    """The command, the time, the versions and the machine."""
    versions = {name: _version(name) for name in ("torch", "transformers", "outrider")}
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capabilities": capabilities(),
        "git_commit": git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None  # run from a checkout that is not installed


def capabilities() -> list[str]:
    """What decides speed: torch's vector level, matrix extensions of the CPU, and the names of GPUs."""
    flags = cpuinfo("flags").split()
    matrix = [flag for flag in ("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8") if flag in flags]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [torch.backends.cpu.get_cpu_capability(), *matrix, *gpus]


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` when it was changed; None if installed."""
    folder = Path(__file__).parent
    try:
        _git(
            folder, "ls-files", "--error-unmatch", __file__
        )  # a virtual environment may lie in someone else's checkout
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


# ---- table -----------------------------------------------------------------------------------------------------


def render(report: SpeedReport, console: Console | None = None) -> None:
    """Prints the comparison, one row per method and, with several tasks, per task; then what differed."""
    table = Table(title="{target}, {dtype}, drafter {drafter}".format(**report.settings))
    for name in ("method", "tokens/s", "min to max", "speed-up", "acceptance length", "min/median/max", "rate", "text"):
        table.add_column(name, justify="left" if name in ("method", "text") else "right")
    for method in report.methods:
        names = list(dict.fromkeys(method.tasks))
        for task in [None, *names] if len(names) > 1 else [None]:
            table.add_row(*_row(report, method, task))
    console = console or Console()
    console.print(table)
    for method in report.methods:
        for d in method.differences:
            console.print(f"{method.method}: {d.prompt} differs at token {d.position}: {describe(d)}", markup=False)


def describe(difference: Difference) -> str:
    """Both tokens of a difference and how far apart the target rates them."""
    tokens = f"{difference.plain_token} became {difference.other_token}"
    if difference.margin_ulps is None:
        return f"{tokens}, margin unknown"
    return f"{tokens}, margin {difference.margin_ulps:.3g} ulps" + (" (a tie)" if difference.tie else "")


def _row(report: SpeedReport, method: MethodReport, task: str | None) -> list[str]:
    totals, speedup = method.totals(task), report.speedup(method, task)
    low, _, high = method.speed_spread(task)
    return [
        f"  {task}" if task else method.method,
        f"{totals.tokens_per_second:.1f}",
        f"{low:.1f} to {high:.1f}",
        _number(speedup, "x"),
        _number(totals.acceptance_length),
        "/".join(_number(value) for value in method.acceptance_spread(task) or ()) or "-",
        _number(totals.acceptance_rate),
        "" if task else verdict(method),
    ]


def verdict(method: MethodReport) -> str:
    """Whether a method's texts were those of plain decoding, in a few words."""
    if method.equal_text is None or method.equal_text:
        return "equal" if method.equal_text else "not compared"
    ties = sum(difference.tie for difference in method.differences)
    return f"{len(method.differences)} differ" + (f", {ties} by a tie" if ties else "")


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
