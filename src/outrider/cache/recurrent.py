"""States of recurrent layers: the committed one of each row, and one per pending node (batch-cache tree drafting, Mamba
Drafters, section 3).

Every state lives in one preallocated buffer of B * (1 + M) entries: entry 0 of a row is its committed state, entry 1 + j that
of pending node j. A wave of nodes gathers its parents' states as a batch, steps once, and writes once. A commit copies the
accepted node's entry over entry 0; every other node is forgotten by never being read again.

Shapes: B rows, M pending nodes, F nodes of a wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.attention import keep_rows
from outrider.cache.nodes import Nodes

StateKey = tuple[str, int, int]  # ("conv" or "recurrent", layer, state of the layer)


@dataclass(frozen=True)
class StateSpec:
    """Shape (without the row) and dtype of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class NodeStates:
    """The buffers of all recurrent states of a model.

    Args:
        specs: what states the model has.
        batch: rows, B.
        capacity: pending nodes that buffers hold before they grow, M.
    """

    def __init__(self, specs: dict[StateKey, StateSpec], batch: int, capacity: int, device: torch.device) -> None:
        self.batch, self.capacity, self.device = batch, capacity, device
        self.buffers = {
            key: torch.zeros(batch * (1 + capacity), *spec.shape, dtype=spec.dtype, device=device)
            for key, spec in specs.items()
        }
        self._gathered: dict[StateKey, Tensor] = {}
        self._sources = torch.empty(0, dtype=torch.long)

    def _entry(self, row: int, node: int) -> int:
        return row * (1 + self.capacity) + 1 + node

    def set_committed(self, row: int, states: dict[StateKey, Tensor]) -> None:
        """Make these the committed states of a row (missing ones are zero, the state of an empty prefix)."""
        entry = self._entry(row, -1)
        for key, buffer in self.buffers.items():
            if key in states:
                buffer[entry] = states[key]
            else:
                buffer[entry].zero_()

    def committed(self, row: int) -> dict[StateKey, Tensor]:
        """The committed states of a row (views)."""
        return {key: buffer[self._entry(row, -1)] for key, buffer in self.buffers.items()}

    def begin(self, nodes: Nodes) -> None:
        """Make room for the nodes of the next call."""
        if nodes.end <= self.capacity:
            return
        old, new = self.capacity, max(nodes.end, 2 * self.capacity)
        for key, buffer in self.buffers.items():
            grown = buffer.new_zeros(self.batch, 1 + new, *buffer.shape[1:])
            grown[:, : 1 + old] = buffer.view(self.batch, 1 + old, *buffer.shape[1:])
            self.buffers[key] = grown.flatten(0, 1)
        self.capacity = new

    def enter(self, wave: Sequence[tuple[int, int]], parents: Sequence[int]) -> None:
        """Begin a wave of nodes given as (row, node), whose parents are pending nodes or -1."""
        self._gathered = {}
        entries = [self._entry(row, parent) for (row, _), parent in zip(wave, parents)]
        self._sources = torch.tensor(entries, device=self.device)

    def read(self, key: StateKey) -> Tensor:
        """The parents' states of the wave, [F, ...]; mixers may write into it."""
        if key not in self._gathered:
            self._gathered[key] = self.buffers[key].index_select(0, self._sources)
        return self._gathered[key]

    def write(self, key: StateKey, state: Tensor) -> None:
        """Set the nodes' states of the wave."""
        self._gathered[key] = state

    def leave(self, wave: Sequence[tuple[int, int]]) -> None:
        """End the wave: what mixers left becomes the nodes' states."""
        targets = torch.tensor([self._entry(row, node) for row, node in wave], device=self.device)
        for key, state in self._gathered.items():
            self.buffers[key].index_copy_(0, targets, state.to(self.buffers[key].dtype))
        self._gathered = {}

    def commit(self, row: int, path: Sequence[int]) -> None:
        """The state after a path becomes the committed one."""
        source, target = self._entry(row, path[-1]), self._entry(row, -1)
        for buffer in self.buffers.values():
            buffer[target] = buffer[source]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        for key, buffer in self.buffers.items():
            full = buffer.view(self.batch, 1 + self.capacity, *buffer.shape[1:])
            self.buffers[key] = keep_rows(full, rows).flatten(0, 1)
        self.batch = len(rows)

    def bytes(self) -> int:
        """Memory held."""
        return sum(b.numel() * b.element_size() for b in self.buffers.values())

    def bytes_per_node(self) -> int:
        """Memory of the states of one node."""
        return sum(b[0].numel() * b.element_size() for b in self.buffers.values())
