"""Outrider and its peers as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider.bench.report import MethodReport, SpeedReport, describe, verdict
from outrider.picture import picture


def reference(report: SpeedReport) -> MethodReport:
    """What others are held against: `auto`, or the fastest method if `auto` was not measured."""
    fastest = max(report.methods, key=lambda method: method.totals().tokens_per_second)
    return next((method for method in report.methods if method.method == "auto"), fastest)


def render(report: SpeedReport, console: Console) -> None:
    """Prints the comparison, fastest first, what differed, and what was left out."""
    ours = reference(report)
    title = "{target}, {dtype}, drafter {drafter}, {prompts} prompts, {max_new_tokens} tokens".format(**report.settings)
    table = Table(title=title)
    columns = ("method", "tokens/s", "median", "after the first", f"{ours.method} over it", "tokens a pass", "text")
    for name in columns:
        table.add_column(name, justify="left" if name in ("method", "text") else "right", no_wrap=name == "method")
    for method in ranked(report):
        totals = method.totals()
        ratio = ours.totals().tokens_per_second / totals.tokens_per_second
        decoding, length = totals.decoding_tokens_per_second, totals.acceptance_length
        table.add_row(
            method.method,
            f"{totals.tokens_per_second:.1f}",
            f"{totals.median_tokens_per_second:.1f}",
            "-" if decoding is None else f"{decoding:.1f}",
            f"{ratio:.2f}x",
            "-" if length is None else f"{length:.2f}",
            verdict(method),
        )
    console.print(table)
    for method in report.methods:
        for d in method.differences:
            console.print(f"{method.method}: {d.prompt} differs at token {d.position}: {describe(d)}", markup=False)
    for why in dict.fromkeys(report.left_out.values()):
        names = ", ".join(name for name, reason in report.left_out.items() if reason == why)
        console.print(f"Left out: {names}. {why}", markup=False, soft_wrap=True)


def ranked(report: SpeedReport) -> list[MethodReport]:
    """Methods, fastest first."""
    return sorted(report.methods, key=lambda method: -method.totals().tokens_per_second)


def plot(report: SpeedReport, path: Path) -> None:
    """Bars of tokens per second, ours in another colour."""
    methods = ranked(report)[::-1]
    speeds = [method.totals().tokens_per_second for method in methods]
    peers = {"transformers", "transformers-lookup", *report.settings["peers"]}
    with picture(path) as (axes,):
        colours = ["tab:gray" if method.method in peers else "tab:green" for method in methods]
        bars = axes.barh([method.method for method in methods], speeds, color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set_xlabel("tokens/s, prefill included")
        axes.set_title("{target}, {dtype}".format(**report.settings))
        axes.margins(x=0.12)
