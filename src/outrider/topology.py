"""Which way scores a tree fastest on this machine: by recurrence, size of state, kind of tree, number of nodes.

The ways are serial, in chains, and masked; on a GPU Triton twins of these stand beside them (`ways`).

`outrider doctor --topology` measures all ways once and keeps the table in the cache folder. Models look their choices up there,
in the entry of their recurrence whose state is nearest in size; where nothing was measured, a fixed rule decides.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from outrider.cache.nodes import Nodes
from outrider.machine import machine_name
from outrider.mixers import samples, twins
from outrider.mixers.rules import DELTA, DELTA_PER_CHANNEL, DUALITY, SelectiveRule
from outrider.mixers.samples import Size
from outrider.models.files import write_atomically
from outrider.paths import cache_dir, exclusive
from outrider.ways import ScoredLayer, ways_of

NODES = (1, 2, 4, 8, 16, 32, 64)
# Qwen3-Next, GatedDeltaNet 1.3B, Kimi Linear, Mamba-2 1.3B, Mamba 1.4B
STANDARD = (
    (DELTA.name, Size(16, 32, 128, 128)),
    (DELTA.name, Size(8, 8, 256, 256)),
    (DELTA_PER_CHANNEL.name, Size(32, 32, 128, 128)),
    (DUALITY.name, Size(1, 64, 128, 64)),
    (SelectiveRule.name, Size(1, 1, 16, 4096)),
)

Milliseconds = dict[str, dict[str, dict[str, float]]]
"""By kind of tree, number of nodes (as text, as JSON has it) and way."""


@dataclass(frozen=True)
class Entry:
    """What was measured of one recurrence."""

    machine: str
    rule: str
    size: Size
    ms: Milliseconds


def kind_of(nodes: int, depth: int) -> str:
    """The kind of a tree: a chain, mostly a chain, or broad."""
    return "chain" if depth >= nodes else "deep" if 2 * depth > nodes else "bushy"


# -- the table ---------------------------------------------------------------------------------------------------------


def table_file() -> Path:
    """Where the table is kept."""
    return cache_dir() / "topology.json"


def load_table() -> list[Entry]:
    """Everything measured before; nothing if there is no readable table."""
    try:
        found = json.loads(table_file().read_text())
        return [Entry(e["machine"], e["rule"], Size(*e["size"]), e["ms"]) for e in found]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def store(entries: Sequence[Entry]) -> None:
    """Add to the table, in place of what was measured of the same before."""
    path = table_file()
    with exclusive(path.with_suffix(".lock"), "storing what it measured"):
        known = {(e.machine, e.rule, e.size): e for e in [*load_table(), *entries]}
        write_atomically(json.dumps([asdict(e) for e in known.values()], indent=1), path)


# -- choosing ----------------------------------------------------------------------------------------------------------


def static_way(rule: str, kind: str, nodes: int) -> str:
    """Without measurements. Nodes are scored at once, even one, which takes fewest calls of kernels and reads a state without
    writing another; but where channels decay on their own that is much work: every entry of the state for every pair of nodes
    in Mamba-1, every key channel for every pair in the delta rule."""
    if rule == SelectiveRule.name or (rule == DELTA_PER_CHANNEL.name and nodes > 8):
        return "chains"
    return "masked"


def measured_way(entry: Entry, kind: str, nodes: int, ways: Sequence[str]) -> str:
    """The fastest of these ways among those measured for the nearest number of nodes."""
    by_nodes = entry.ms[kind]
    ms = by_nodes[min(by_nodes, key=lambda known: abs(math.log(int(known) / nodes)))]
    return min((way for way in ways if way in ms), key=lambda way: ms[way])


class Switch:
    """Chooses ways on one device.

    Args:
        entries: the table.
    """

    def __init__(self, device: torch.device, entries: Iterable[Entry] | None = None) -> None:
        machine = machine_name(device)
        self.device = device
        known = load_table() if entries is None else entries
        self.entries = [entry for entry in known if entry.machine == machine]
        self._way = lru_cache(maxsize=4096)(self._choose)

    def __call__(self, rule: str, nodes: Nodes, numbers: int) -> str:
        """The way to score these nodes under a rule whose state has so many numbers."""
        return self._way(rule, kind_of(nodes.largest, nodes.depth), nodes.largest, numbers, nodes.start > 0)

    def _choose(self, rule: str, kind: str, nodes: int, numbers: int, behind: bool) -> str:
        # nodes behind pending nodes: to step them, the states of these would have to be rebuilt from factors first
        fixed = static_way(rule, kind, nodes) if not behind else "chains" if rule == SelectiveRule.name else "masked"
        fitting = [entry for entry in self.entries if entry.rule == rule]
        if not fitting:
            return fixed
        entry = min(fitting, key=lambda e: abs(math.log(e.size.numbers / numbers)))
        ways = ways_of(rule, entry.size, self.device)
        if behind:
            ways = [way for way in ways if twins.form_of(way) == fixed]
        return measured_way(entry, kind, nodes, ways)


# -- measuring ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def time_ways(
    rule: str, size: Size, parents: Sequence[int], device: torch.device, ways: Sequence[str] = (), repeat: int = 5
) -> dict[str, float]:
    """Milliseconds in which each way scores one tree in one layer, the best of `repeat`, taken in turns.

    A way that is far behind after two turns gets no further ones.

    Args:
        ways: all that there are, if none are given.
    """
    ways = ways or ways_of(rule, size, device)
    scored, best = ScoredLayer(rule, size, parents, device), dict.fromkeys(ways, math.inf)
    for number in range(repeat + 1):
        for way in ways:
            if number > 2 and best[way] > 5 * min(best.values()):
                continue
            began = time.perf_counter()
            float(scored.score(way).flatten()[0])  # a value waits for the device
            if number:  # the first time makes plans and buffers
                best[way] = min(best[way], (time.perf_counter() - began) * 1e3)
    return best


def measure(
    rule: str,
    size: Size,
    device: torch.device,
    counts: Sequence[int] = NODES,
    tell: Callable[[int, int, str], Any] = lambda done, total, what: None,
) -> Entry:
    """All ways for all kinds of trees."""
    ms: Milliseconds = {kind: {} for kind in samples.TREES}
    trees = [(kind, count) for kind in samples.TREES for count in counts]
    for done, (kind, count) in enumerate(trees):
        tell(done, len(trees), f"{rule}, {size}")
        ms[kind][str(count)] = time_ways(rule, size, samples.TREES[kind](count), device)
    return Entry(machine_name(device), rule, size, ms)
