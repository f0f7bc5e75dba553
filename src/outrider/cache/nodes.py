"""The nodes of one call in the forms that layers need, each made once for all layers.

Shapes: B rows, N nodes of the call with padding, M pending nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pending import Pending
from outrider.mixers.chains import Plan, plan

Wave = list[tuple[int, int]]


class Nodes:
    """Nodes that a call adds to every row.

    Args:
        pending: where they have been added.
        parents: per row, of its real nodes.
        start: the pending index of the first one.
        waves: nodes as (row, node), padding included; a node's parent is in an earlier wave or call.
    """

    def __init__(
        self,
        pending: Pending,
        parents: Sequence[Sequence[int]],
        start: int,
        waves: list[Wave],
        device: torch.device,
    ) -> None:
        self.pending, self.parents, self.device = pending, parents, device
        self.start, self.end, self.batch = start, pending.count, pending.batch
        self.waves = waves
        self._plans: dict[bool, Plan] = {}
        self._windows: dict[tuple[int, int, int], Tensor] = {}

    @property
    def new(self) -> int:
        """N."""
        return self.end - self.start

    @cached_property
    def largest(self) -> int:
        """Real nodes of the row that has most."""
        return max(map(len, self.parents))

    @cached_property
    def depth(self) -> int:
        """Levels of the deepest row, counted within the call."""
        return len(self.waves)

    @cached_property
    def wave_parents(self) -> list[list[int]]:
        """Of every node of every wave, its parent."""
        return [[int(self.pending.parents_BM[row, node]) for row, node in wave] for wave in self.waves]

    @cached_property
    def seen_BMM(self) -> Tensor:
        """Which pending nodes are ancestors of a pending node, or itself."""
        seen = np.ascontiguousarray(self.pending.ancestors_BMM[:, : self.end, : self.end])
        return torch.from_numpy(seen).to(self.device)

    def plan(self, together: bool) -> Plan:
        """The order in which chains are stepped."""
        if together not in self._plans:
            self._plans[together] = plan(self.parents, self.start, self.new, self.device, together)
        return self._plans[together]

    def path(self, row: int, node: int) -> Tensor:
        """Pending nodes from the first below the committed state down to this one."""
        return torch.from_numpy(np.flatnonzero(self.pending.ancestors_BMM[row, node, : self.end])).to(self.device)

    def window(self, held: int, taps: int, slots: int) -> Tensor:
        """For buffers of `slots` a row, `held` for the committed window and then one for each pending node: what every new node
        convolves, as row * slots + slot, oldest first and its own last, [B * N * taps]."""
        key = held, taps, slots
        if key not in self._windows:
            slots_BNK = window_slots(self.pending, self.start, held, taps)
            flat = slots_BNK + (np.arange(self.batch) * slots)[:, None, None]
            self._windows[key] = torch.from_numpy(flat.ravel()).to(self.device)
        return self._windows[key]


def window_slots(nodes: Pending, start: int, held: int, taps: int) -> np.ndarray:
    """Slots that each node from `start` on convolves, oldest first and its own last, [B, N, taps].

    Slots are `held` inputs of the committed window, oldest first, and then those of pending nodes.
    """
    rows = np.arange(nodes.batch)[:, None]
    # one step towards the past from every slot; the oldest slot of the window stays where it is and is never passed
    behind_BM = np.empty((nodes.batch, held + nodes.count), dtype=np.int64)
    behind_BM[:, :held] = np.maximum(np.arange(held) - 1, 0)
    behind_BM[:, held:] = nodes.parents_BM[:, : nodes.count] + held
    slots = [np.broadcast_to(np.arange(held + start, held + nodes.count), (nodes.batch, nodes.count - start))]
    for _ in range(taps - 1):
        slots.append(behind_BM[rows, slots[-1]])
    return np.stack(slots[::-1], axis=-1)
