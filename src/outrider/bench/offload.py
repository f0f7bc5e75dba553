"""Speculation on a target that is streamed from the disk: there a pass costs much, and a round should cost little more.

Methods take turns prompt by prompt, as in `bench speed`. Beside speed this counts what was really read from the disk: a file that
another process has mapped stays in the kernel's cache whatever anybody advises, and then nothing is proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.report import Run, SpeedReport
from outrider.bench.report import to_json as speed_json
from outrider.bench.runner import Method, Progress, methods_from_names, run_speed
from outrider.bench.tasks import Prompt
from outrider.machine import disk_bytes_read
from outrider.models.streaming import Streaming, streaming

ENOUGH = 0.9  # share of a pass's bytes that must come from the disk


@dataclass(frozen=True)
class Offloaded:
    """One method on a streamed target.

    Args:
        share: of the acceptance length that the speed-up over plain decoding reaches.
        read_per_pass: bytes that came from the disk, a pass; None where the system does not count them.
    """

    method: str
    tokens_per_second: float
    speedup: float
    acceptance_length: float
    share: float
    read_per_pass: float | None


class Meter:
    """A method, and the bytes that its runs read from the disk."""

    def __init__(self, method: Method) -> None:
        self.inner, self.bytes, self.passes = method, 0, 0
        self.method = Method(method.name, self.run, method.comparable)

    def run(self, prompt_ids: list[int], max_new_tokens: int) -> Run:
        """The method's run, counted."""
        before = disk_bytes_read()
        done = self.inner.run(prompt_ids, max_new_tokens)
        self.bytes += (disk_bytes_read() or 0) - (before or 0)
        self.passes += done.stats.rounds + 1  # and the prompt's
        return done


def measure(
    engine: Any,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    max_new_tokens: int,
    repeat: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[SpeedReport, list[Offloaded]]:
    """Plain decoding and others on a streamed target.

    Raises:
        ValueError: when nothing is streamed, or plain decoding or what to compare it with is missing.
    """
    if not (found := streaming(engine.model)) or not found.parts:
        raise ValueError(
            "nothing is streamed from the disk, so there is nothing to measure: give a --memory-budget smaller than the model"
        )
    if "plain" not in names or len(names) < 2 or any(name.startswith("transformers") for name in names):
        raise ValueError("methods must be plain and shapes to compare it with, such as plain,auto,chain5")
    meters = [Meter(method) for method in methods_from_names(engine, names, temperature=temperature, seed=seed)]
    methods = [meter.method for meter in meters]
    sampling: dict[str, Any] = {"temperature": temperature, "seed": seed}
    report = run_speed(engine, prompts, methods, max_new_tokens, repeat, progress=progress, **sampling)
    return report, [_offloaded(report, meter) for meter in meters]


def _offloaded(report: SpeedReport, meter: Meter) -> Offloaded:
    method = next(m for m in report.methods if m.method == meter.method.name)
    totals, speedup = method.totals(), report.speedup(method) or 0.0
    length = totals.acceptance_length or 1.0
    read = None if disk_bytes_read() is None else meter.bytes / meter.passes
    return Offloaded(method.method, totals.tokens_per_second, speedup, length, speedup / length, read)


def to_json(report: SpeedReport, found: Sequence[Offloaded], limit: int) -> dict[str, Any]:
    """The report of `bench speed`, and what is said here besides."""
    return {"offload": [asdict(one) for one in found], **speed_json(report, limit=limit)}


def render(found: Sequence[Offloaded], streamed: Streaming, console: Console) -> None:
    """A row a method, and whether the disk was really read."""
    table = Table("method", "tokens/s", "over plain", "tokens per pass", "share of them", "MB read a pass")
    for one in found:
        read = "-" if one.read_per_pass is None else f"{one.read_per_pass / 1e6:.1f}"
        numbers = (one.tokens_per_second, one.speedup, one.acceptance_length, one.share)
        table.add_row(one.method, *(f"{number:.2f}" for number in numbers), read)
    console.print(f"{streamed}", highlight=False, soft_wrap=True)
    console.print(table)
    if note := cached(found, streamed):
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def cached(found: Sequence[Offloaded], streamed: Streaming) -> str:
    """Why the figures are not those of a disk; empty when they are."""
    shares = [one.read_per_pass / streamed.chosen.pass_bytes for one in found if one.read_per_pass is not None]
    if not shares or min(shares) >= ENOUGH:
        return ""
    return (
        f"only {min(shares):.0%} of what a pass needs came from the disk; the rest was in the kernel's cache of files, which "
        "cannot be emptied while another process has the file mapped: end that one, or measure with a copy of the model's folder"
    )
