"""An evaluation as a table, JSON and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.report import provenance
from outrider.train.evaluate import Evaluation, Measured
from outrider.train.plots import acceptance_by_depth, reliability
from outrider.train.walks import Walk, rates_by_depth


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation as plain data."""
    return {
        "drafters": [_drafter_json(evaluation, one) for one in evaluation.drafters],
        "provenance": provenance() | evaluation.speed.settings | {"shape": evaluation.shape, "prompts_are": "held out"},
    }


def _drafter_json(evaluation: Evaluation, one: Measured) -> dict[str, Any]:
    return {
        "drafter": one.name,
        **_of_task(evaluation, one, None),
        "per_task": {task: _of_task(evaluation, one, task) for task in evaluation.tasks},
        "top_k_membership": one.members,
        "calibration": one.calibration,
        "step_seconds": one.step_seconds,
        "predicted_speedup": one.predicted_speedup,
        "state_bytes_per_node": one.bytes_per_node,
        "state_bytes": one.bytes_total,
        "equal_text": one.report.equal_text,
    }


def _of_task(evaluation: Evaluation, one: Measured, task: str | None) -> dict[str, Any]:
    walks = _walks(one, task)
    totals = one.report.totals(task)
    return {
        "acceptance_length": totals.acceptance_length,
        "acceptance_rate": totals.acceptance_rate,
        "rate_by_depth": rates_by_depth(walks),
        "first_token_match": sum(w.ranks[:1] == [0] for w in walks) / max(len(walks), 1),
        "rounds_with_a_proposal": sum(w.drafted > 0 for w in walks) / max(len(walks), 1),
        "measured_speedup": evaluation.speed.speedup(one.report, task),
        "tokens_per_second": totals.tokens_per_second,
    }


def _walks(one: Measured, task: str | None) -> list[Walk]:
    return [w for name, walks in zip(one.report.tasks, one.walks) for w in walks if task in (None, name)]


def pictures(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Acceptance by depth, and reliability where drafters give laws; returns what was written."""
    depths = folder / "acceptance_by_depth.png"
    acceptance_by_depth({one.name: rates_by_depth(_walks(one, None)) for one in evaluation.drafters}, depths)
    known = {one.name: one.calibration for one in evaluation.drafters if one.calibration}
    if not known:
        return [depths]
    diagram = folder / "reliability.png"
    reliability({name: (found["ece"], found["bins"]) for name, found in known.items()}, diagram)
    return [depths, diagram]


def render(evaluation: Evaluation, console: Console) -> None:
    """One column per drafter."""
    data = to_json(evaluation)["drafters"]
    table = Table("", *(one["drafter"] for one in data), title=f"held-out prompts, {evaluation.shape}")
    for task in (None, *evaluation.tasks):
        for name in ("acceptance_length", "acceptance_rate", "rate_by_depth", "first_token_match", "measured_speedup"):
            values = [(one if task is None else one["per_task"][task])[name] for one in data]
            table.add_row(f"{name.replace('_', ' ')}{'' if task is None else f', {task}'}", *map(_cell, values))
        table.add_section()
    table.add_row("rounds with a proposal", *(_cell(one["rounds_with_a_proposal"]) for one in data))
    table.add_row("among the first 1 to 5 children", *(_cell(one["top_k_membership"]) for one in data))
    table.add_row("calibration error (ECE)", *(_cell((one["calibration"] or {}).get("ece")) for one in data))
    table.add_row("ms a step", *(_cell(one["step_seconds"] and one["step_seconds"] * 1e3) for one in data))
    table.add_row("predicted speed-up", *(_cell(one["predicted_speedup"]) for one in data))
    table.add_row("state bytes a node", *(str(one["state_bytes_per_node"]) for one in data))
    table.add_row("state bytes in all", *(str(one["state_bytes"]) for one in data))
    table.add_row("text", *("equal" if one["equal_text"] else "differs by rounding" for one in data))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(f"{v:.2f}" for v in value) if isinstance(value, list) else f"{value:.2f}"
