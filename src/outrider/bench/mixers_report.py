"""What `bench mixers` found, as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.picture import picture


def render(report: dict[str, Any], console: Console) -> None:
    """For people."""
    ways = list(report["verify"][0]["ms"])  # and the replay
    table = Table("mixer", "tree", "nodes", "depth", *(f"{way} ms" for way in ways), "choice", "speed-up")
    for row in report["verify"]:
        times = (f"{row['ms'][way]:.2f}" for way in ways)
        numbers = str(row["nodes"]), str(row["depth"]), *times
        table.add_row(row["mixer"], row["case"], *numbers, row["chosen"], f"{row['speedup_over_replay']:.2f}x")
    console.print(table)
    commit = report["commit"]
    ms = commit["ms"]
    console.print(
        f"commit of {commit['tokens']} tokens in {commit['layers']} layers of {commit['size']}: from factors "
        f"{ms['factors']:.2f} ms, replay of the tokens through the mixer {ms['replay']:.2f} ms "
        f"({commit['factors_over_replay']:.2f}x)"
    )
    console.print(
        f"commit and next verification: immediate {ms['immediate']:.2f} ms, deferred {ms['deferred']:.2f} ms "
        f"({commit['deferred_over_immediate']:.2f}x)"
    )
    console.print(
        f"a node leaves {commit['bytes_per_node']:,} B in a layer; a state and its window are "
        f"{commit['dense_bytes_per_node']:,} B ({commit['snapshots_over_factors']:.0f}x)"
    )
    facts = report["provenance"]
    console.print(f"{facts['cpu']}, {facts['threads']} threads, {facts['device']}; choices: {facts['table']} table")


def plot(report: dict[str, Any], path: Path) -> None:
    """Speed-up over replay of every way and of the choice, one panel a mixer."""
    mixers = list(dict.fromkeys(row["mixer"] for row in report["verify"]))
    with picture(path, len(mixers)) as panels:
        for panel, mixer in zip(panels, mixers):
            rows = [row for row in report["verify"] if row["mixer"] == mixer]
            ways = [way for way in rows[0]["ms"] if way != "replay"]
            width = 0.75 / len(ways)
            for number, way in enumerate(ways):
                places = [at + width * number for at in range(len(rows))]
                panel.bar(places, [row["ms"]["replay"] / row["ms"][way] for row in rows], width=width, label=way)
            chosen = [at + width * ways.index(row["chosen"]) for at, row in enumerate(rows)]
            panel.plot(chosen, [row["speedup_over_replay"] for row in rows], "k*", label="choice")
            panel.axhline(1, color="grey", linewidth=0.8)
            panel.set_xticks(
                [at + 0.375 - width / 2 for at in range(len(rows))], [row["case"] for row in rows], fontsize=8
            )
            panel.set(title=f"{mixer}: {rows[0]['size']}", ylabel="speed-up over root-to-leaf replay")
        panels[0].legend()
