"""The table by which ways are chosen, as `doctor --topology` shows it; what is missing in it is measured first."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.models.factor_model import FactorTreeModel
from outrider.progress import progress
from outrider.topology import STANDARD, WAYS, Entry, load_table, machine_name, measure, measured_way, store, table_file


def examine_topology(device: torch.device, target: Any = None) -> dict[str, Any]:
    """What was measured on this device, as plain data.

    Args:
        target: the `TreeModel` whose recurrent layers are meant; None means the sizes of well-known models.
    """
    wanted = list(STANDARD)
    if target is not None:
        wanted = sorted(target.recurrences()) if isinstance(target, FactorTreeModel) else []
    machine, known = machine_name(device), load_table()
    entries = {(entry.rule, entry.size): entry for entry in known if entry.machine == machine}
    missing = [place for place in wanted if place not in entries]
    with progress("topology", quiet=not missing) as tell:
        made = [measure(rule, size, device, tell=tell) for rule, size in missing]
    if made:
        store(made)
    entries.update({(entry.rule, entry.size): entry for entry in made})
    return {
        "file": str(table_file()),
        "machine": machine,
        "mixers": [_plain(entries[place]) for place in wanted],
    }


def _plain(entry: Entry) -> dict[str, Any]:
    choices = {
        kind: {nodes: measured_way(entry, kind, int(nodes)) for nodes in by_nodes}
        for kind, by_nodes in entry.ms.items()
    }
    return {"rule": entry.rule, "size": str(entry.size), "ms": entry.ms, "choices": choices}


def render_topology(report: dict[str, Any], console: Console) -> None:
    """For people."""
    for mixer in report["mixers"]:
        table = Table(
            "tree", "nodes", *(f"{way} ms" for way in WAYS), "choice", title=f"{mixer['rule']}, {mixer['size']}"
        )
        for kind, by_nodes in mixer["ms"].items():
            for nodes, ms in by_nodes.items():
                table.add_row(kind, nodes, *(f"{ms[way]:.2f}" for way in WAYS), mixer["choices"][kind][nodes])
        console.print(table)
    if not report["mixers"]:
        console.print("topology: this target has no recurrent layers that are scored with factors: nothing to choose")
    else:
        console.print(f"topology: measured once, kept in {report['file']}; delete it to measure again", soft_wrap=True)
