"""The table by which ways are chosen, as `doctor --topology` shows it; what is missing in it is measured first."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.machine import machine_name
from outrider.models.factor_model import FactorTreeModel
from outrider.progress import progress
from outrider.topology import STANDARD, Entry, load_table, measure, measured_way, store, table_file
from outrider.ways import trouble, ways_of


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
    missing = [place for place in wanted if place not in entries or not _complete(entries[place], device)]
    with progress("topology", quiet=not missing) as tell:
        made = [measure(rule, size, device, tell=tell) for rule, size in missing]
    if made:
        store(made)
    entries.update({(entry.rule, entry.size): entry for entry in made})
    return {
        "file": str(table_file()),
        "machine": machine,
        "mixers": [_plain(entries[place], device) for place in wanted],
    }


def _complete(entry: Entry, device: torch.device) -> bool:
    """Whether every way that the device has now was measured."""
    ways = set(ways_of(entry.rule, entry.size, device))
    return all(ways <= set(ms) for by_nodes in entry.ms.values() for ms in by_nodes.values())


def _plain(entry: Entry, device: torch.device) -> dict[str, Any]:
    ways = ways_of(entry.rule, entry.size, device)
    choices = {
        kind: {nodes: measured_way(entry, kind, int(nodes), ways) for nodes in by_nodes}
        for kind, by_nodes in entry.ms.items()
    }
    ms = {
        kind: {n: {way: ms[way] for way in ways} for n, ms in by_nodes.items()} for kind, by_nodes in entry.ms.items()
    }
    no_kernels = trouble(entry.rule, entry.size, device)
    return {
        "rule": entry.rule,
        "size": str(entry.size),
        "ways": ways,
        "no_kernels": no_kernels or None,
        "ms": ms,
        "choices": choices,
    }


def render_topology(report: dict[str, Any], console: Console) -> None:
    """For people."""
    for mixer in report["mixers"]:
        title, reason = f"{mixer['rule']}, {mixer['size']}", mixer["no_kernels"]
        table = Table("tree", "nodes", *(f"{way} ms" for way in mixer["ways"]), "choice", title=title)
        table.caption = f"no Triton kernels: {reason}" if reason else None
        for kind, by_nodes in mixer["ms"].items():
            for nodes, ms in by_nodes.items():
                table.add_row(kind, nodes, *(f"{ms[way]:.2f}" for way in mixer["ways"]), mixer["choices"][kind][nodes])
        console.print(table)
    if not report["mixers"]:
        console.print("topology: this target has no recurrent layers that are scored with factors: nothing to choose")
    else:
        console.print(f"topology: measured once, kept in {report['file']}; delete it to measure again", soft_wrap=True)
