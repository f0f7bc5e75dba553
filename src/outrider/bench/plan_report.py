"""A plan as tables, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from outrider.bench.plan import NODES, Model, Plan, Predicted
from outrider.bench.report import provenance
from outrider.bench.runner import engine_facts
from outrider.cost import RANKS, best_trees
from outrider.train.plots import picture

SHOWN, TREES = 6, 2  # shapes in the table, and ragged trees
LEVELS = 8  # depths whose acceptance is shown
SIZES = (1, 4, 8, 16, 32)  # nodes whose pass times are shown


def to_json(plan: Plan, engine: Any) -> dict[str, Any]:
    """The plan as plain data; times in seconds."""
    measured = plan.measured
    return {
        "speculate": plan.speculate,
        "verdict": plan.verdict,
        "shapes": [_shape_json(one) for one in plan.ranking],
        "break_even": {"acceptance": plan.break_even_acceptance, "draft_factor": plan.break_even_draft},
        "what_if": [{"change": change.text, **_shape_json(one)} for change, one in plan.what_if],
        "latency": {
            "plain": measured.plain,
            "passes": [{"nodes": nodes, "seconds": seconds} for nodes, seconds in measured.passes.points],
            "drafts": measured.drafts,
            "draft_level": measured.level,
            "draft_further_node": measured.feed,
            "overhead": measured.overhead,
        },
        "acceptance": {"by_depth_and_rank": measured.chances, "tries_by_depth": measured.tries},
        "rounds": len(measured.rounds),
        "rounds_without_a_proposal": measured.empty,
        "provenance": provenance() | engine_facts(engine),
    }


def _shape_json(one: Predicted) -> dict[str, Any]:
    return {
        "shape": one.shape.name,
        "acceptance_length": one.length,
        "seconds": one.seconds,
        "tokens_per_second": one.tokens_per_second,
        "speedup": one.speedup,
    }


def render(plan: Plan, console: Console) -> None:
    """The verdict first, then what it rests on."""
    console.print(plan.verdict, style="bold", soft_wrap=True)
    shapes = Table(
        Column("shape", overflow="fold"), "tokens per pass", "ms a round", "tokens/s", "over plain", title="predicted"
    )
    for one in _shown(plan.ranking):
        row = (f"{one.length:.2f}", f"{one.seconds * 1e3:.1f}", f"{one.tokens_per_second:.1f}", f"{one.speedup:.2f}")
        shapes.add_row("off (plain)" if not one.shape.depth else one.shape.name, *row)
    console.print(shapes)
    measured = plan.measured
    latency = Table("", *(f"{nodes} nodes" for nodes in SIZES), title="ms of a target pass over the root and")
    latency.add_row("pass", *(f"{measured.passes(nodes) * 1e3:.1f}" for nodes in SIZES))
    console.print(latency)
    console.print(
        f"plain pass {measured.plain * 1e3:.1f} ms; drafting {measured.level * 1e3:.2f} ms a level and "
        f"{measured.feed * 1e3:.2f} ms for each further node; something to propose in {1 - measured.empty:.0%} of rounds",
        soft_wrap=True,
    )
    chances = Table("depth", *map(str, range(1, LEVELS + 1)), title="chance that a child is the target's token")
    for rank in range(RANKS):
        cells = [_chance(measured.chances[d][rank], measured.tries[d]) for d in range(LEVELS)]
        chances.add_row(f"child {rank + 1}", *cells)
    console.print(chances)
    rate, factor = plan.break_even_acceptance, plan.break_even_draft
    console.print(
        "break-even: "
        + ("no acceptance would do" if rate is None else f"first children right {rate:.0%} of the time")
        + "; "
        + ("not even free drafts would do" if factor is None else f"drafting {factor:.2f} times as slow as measured"),
        soft_wrap=True,
    )
    for change, one in plan.what_if:
        name = one.shape.name if one.shape.depth else "off (plain)"
        console.print(f"what if {change.text}: {name}, {one.speedup:.2f} times plain", soft_wrap=True, markup=False)


def _shown(ranking: Sequence[Predicted]) -> list[Predicted]:
    """The fastest of grown trees, which are many and much alike, the fastest others, and plain decoding."""
    trees = [one for one in ranking if one.shape.name.startswith("tree:")][:TREES]
    others = [one for one in ranking if one.shape.depth and not one.shape.name.startswith("tree:")][:SHOWN]
    plain = [one for one in ranking if not one.shape.depth]
    return sorted([*trees, *others, *plain], key=lambda one: -one.speedup)


def _chance(chance: float, tries: float) -> str:
    return f"{chance:.2f}" if tries >= 10 else f"({chance:.2f})"


def pictures(plan: Plan, folder: Path) -> Path:
    """Pass times, acceptance by depth, and the predicted speed-up of the best tree of every size; returns the file."""
    path, measured = folder / "plan.png", plan.measured
    with picture(path, 3) as (passes, acceptance, speedup):
        points = measured.passes.points
        passes.plot([1 + nodes for nodes, _ in points], [seconds * 1e3 for _, seconds in points], marker=".")
        passes.set(xlabel="nodes of a target pass, root included", ylabel="ms", ylim=(0, None))
        for rank in range(RANKS):
            values = [measured.chances[depth][rank] for depth in range(LEVELS)]
            acceptance.plot(range(1, LEVELS + 1), values, marker="o", label=f"child {rank + 1}")
        acceptance.set(xlabel="depth", ylabel="chance that it is the target's token", ylim=(0, 1.02))
        acceptance.legend()
        _speedups(plan, speedup)
        for axes in (passes, acceptance, speedup):
            axes.grid(alpha=0.3)
    return path


def _speedups(plan: Plan, axes: Any) -> None:
    """One line for trees, one for chains, and one for every what-if."""
    chains = sorted((one.shape.depth, one.speedup) for one in plan.ranking if one.shape.name.startswith("chain"))
    axes.plot([n for n, _ in chains], [s for _, s in chains], marker=".", label="chains")
    for change, model in [(None, Model(plan.measured)), *((c, Model(plan.measured, c)) for c, _ in plan.what_if)]:
        trees: dict[int, float] = {}
        for depth in (2, 4, 8):
            for nodes, (_, shape) in enumerate(best_trees(model.chances, NODES, depth), 1):
                trees[nodes] = max(trees.get(nodes, 0.0), model.predict(shape).speedup)
        axes.plot(list(trees), list(trees.values()), label="best trees" if change is None else f"if {change.text}")
    axes.axhline(1.0, color="grey", linestyle=":")
    axes.set(xlabel="drafted nodes", ylabel="predicted speed over plain decoding")
    axes.legend()
