"""States of Mamba-2 mixers: a committed one per row, and of every pending node only its factors.

A node's state follows from the committed one and the factors of its ancestors, so no node holds a state: what it reads is
worked out attention-like, over the pending nodes, and a commit rebuilds the state of the accepted node. A node costs
kilobytes instead of hundreds of them, and a chain of nodes is scored in one pass.

These are the states of our own drafters; `factor_states` keeps those of any model of transformers, whatever its recurrence.
Here the one recurrence is known, so that buffers have fixed places, to which compiled kernels write, and a commit is applied
at once: a drafter is fed level by level right behind it, and would gain nothing from waiting.

Shapes: B rows, N new nodes, M pending nodes, C convolved channels, W slots of a convolution's window, H heads, P head size,
S state size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.attention import keep_rows
from outrider.mixers import ssd


@dataclass
class LayerFactors:
    """Buffers of one layer. The first W slots of `inputs` are the window of the committed prefix, oldest first."""

    state_BHPS: Tensor
    inputs_BMC: Tensor
    x_BMHP: Tensor
    b_BMS: Tensor
    dt_BHM: Tensor
    log_BHM: Tensor
    """Log decay from the committed state to after the node."""

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return dict(vars(self))


@dataclass(frozen=True)
class MixerSizes:
    """What buffers of a mixer look like."""

    num_heads: int
    head_size: int
    state_size: int
    channels: int
    window: int
    dtype: torch.dtype
    """Of all buffers: sums over many tokens are kept in float32 at least."""

    def buffers(self, batch: int, nodes: int, device: torch.device) -> LayerFactors:
        """Empty buffers for so many pending nodes a row."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=device)

        return LayerFactors(
            zeros(batch, self.num_heads, self.head_size, self.state_size),
            zeros(batch, self.window + nodes, self.channels),
            zeros(batch, nodes, self.num_heads, self.head_size),
            zeros(batch, nodes, self.state_size),
            zeros(batch, self.num_heads, nodes),
            zeros(batch, self.num_heads, nodes),
        )

    def node_bytes(self) -> int:
        """Memory of the factors of a node."""
        return (self.channels + self.num_heads * (self.head_size + 2) + self.state_size) * self.dtype.itemsize


class Factors:
    """The buffers of all mixers of a model.

    Args:
        sizes: of the mixer of each layer.
        capacity: pending nodes that buffers hold before they grow.
    """

    def __init__(self, sizes: Sequence[MixerSizes], batch: int, capacity: int, device: torch.device) -> None:
        self.sizes, self.batch, self.capacity, self.device = list(sizes), batch, capacity, device
        self.layers = [size.buffers(batch, capacity, device) for size in sizes]

    def set_committed(self, row: int, layer: int, window_WC: Tensor, state_HPS: Tensor) -> None:
        """Make this the committed state of a row."""
        held = self.layers[layer]
        held.inputs_BMC[row, : len(window_WC)], held.state_BHPS[row] = window_WC, state_HPS

    def ensure(self, nodes: int) -> None:
        """Make room for this many pending nodes."""
        if nodes <= self.capacity:
            return
        self.capacity = max(nodes, 2 * self.capacity)
        for layer, (size, old) in enumerate(zip(self.sizes, self.layers)):
            new = self.layers[layer] = size.buffers(self.batch, self.capacity, self.device)
            for name, buffer in old.tensors().items():
                getattr(new, name)[tuple(slice(0, n) for n in buffer.shape)] = buffer

    def commit(self, row: int, path: Sequence[int]) -> None:
        """The state after a path of pending nodes becomes the committed one."""
        nodes = torch.tensor(path, device=self.device)
        for size, held in zip(self.sizes, self.layers):
            x, b = held.x_BMHP[row, nodes], held.b_BMS[row, nodes]
            dt, log = held.dt_BHM[row][:, nodes], held.log_BHM[row][:, nodes]
            held.state_BHPS[row] = ssd.after(held.state_BHPS[row], x, b, dt, log)
            window = torch.cat([held.inputs_BMC[row, : size.window], held.inputs_BMC[row, size.window + nodes]])
            held.inputs_BMC[row, : size.window] = window[len(window) - size.window :]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.batch = len(rows)
        self.layers = [
            LayerFactors(**{name: keep_rows(buffer, rows) for name, buffer in held.tensors().items()})
            for held in self.layers
        ]

    def bytes(self) -> int:
        """Memory held."""
        return _bytes(t for held in self.layers for t in held.tensors().values())

    def committed(self, row: int) -> list[Tensor]:
        """Windows and states of the committed prefix of a row (views)."""
        pairs = [(held.inputs_BMC[row, : s.window], held.state_BHPS[row]) for s, held in zip(self.sizes, self.layers)]
        return [tensor for pair in pairs for tensor in pair]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
