"""States of a model's recurrent layers: a committed one per row, and of every pending node only its factors.

No node holds a state: what it reads follows from the committed state and the factors of its ancestors, and a commit rebuilds the
state of the accepted node. Commits are deferred: a layer applies them when it is next run, or when its state is asked for, so
that state and factors are touched once a round. (`factors` is the same for the one recurrence of our own drafters.)

Shapes: B rows, N new nodes, M pending nodes, C convolved channels, W inputs of a committed window, S = W + nodes that fit,
L nodes of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.cache.attention import keep_rows
from outrider.cache.nodes import Nodes
from outrider.cache.recurrent import StateKey, StateSpec
from outrider.mixers import twins
from outrider.mixers.rules import Factors, Rule

Pick = Callable[[str, Nodes, int], str]
"""The way to score these nodes under the rule of that name, with a state of so many numbers: "serial", "chains", "masked", or a
twin of one of these (`mixers.twins`)."""


class Kernel(Protocol):
    """A mixer that computes its nodes by itself, on the states and factors of its layer."""

    def takes(self, x_BND: Tensor, held: LayerStates) -> bool:
        """Whether it computes these."""
        ...

    def __call__(self, x_BND: Tensor, held: LayerStates, nodes: Nodes, capacity: int) -> Tensor:
        """Outputs of new nodes [B, N, D]."""
        ...


class LayerStates:
    """One layer: its convolution's window, its state, and the factors of pending nodes."""

    def __init__(self) -> None:
        self.inputs_BSC: Tensor | None = None
        self.window = 0
        self.state_B: Tensor | None = None
        self.rule: Rule | None = None
        self.factors_BM: dict[str, Tensor] = {}
        self.due: dict[int, Tensor] = {}
        """Committed paths that were not applied yet, by row."""

    def convolve(self, x_BNC: Tensor, taps: int, nodes: Nodes, capacity: int) -> Tensor:
        """Keep the inputs of new nodes; what each of them convolves, [B, N, taps, C]."""
        self.settle()
        inputs_BSC = self.room_for_inputs(capacity)
        inputs_BSC[:, self.window + nodes.start : self.window + nodes.end] = x_BNC
        slots = nodes.window(self.window, taps, inputs_BSC.shape[1])
        picked = inputs_BSC.flatten(0, 1).index_select(0, slots)
        return picked.view(nodes.batch, nodes.new, taps, -1)

    def room_for_inputs(self, capacity: int) -> Tensor:
        """The window and the inputs of pending nodes, with room for so many nodes."""
        assert self.inputs_BSC is not None
        if self.inputs_BSC.shape[1] < self.window + capacity:
            self.inputs_BSC = _grown(self.inputs_BSC, self.window + capacity)
        return self.inputs_BSC

    def room_for_factors(
        self, rule: Rule, sizes: Mapping[str, tuple[int, ...]], batch: int, capacity: int
    ) -> dict[str, Tensor]:
        """The factors of pending nodes under a rule, [B, M, *size] each, with room for so many nodes."""
        assert self.state_B is not None
        self.rule = rule
        for name, size in sizes.items():
            held = self.factors_BM.get(name)
            if held is None:
                held = self.state_B.new_zeros(batch, 0, *size)
            if held.shape[1] < capacity:
                held = _grown(held, capacity)
            self.factors_BM[name] = held
        return self.factors_BM

    def recur(self, rule: Rule, x: Any, nodes: Nodes, capacity: int, way: str) -> Tensor:
        """Outputs of new nodes; their factors are kept."""
        self.settle()
        assert self.state_B is not None
        self._write(rule, rule.given(x), nodes, capacity)
        rule, form = twins.resolve(rule, way)
        if form == "masked":
            known = {name: buffer[:, : nodes.end] for name, buffer in self.factors_BM.items()}
            out_BN, rest = rule.masked(self.state_B, x, known, nodes.seen_BMM)
        else:
            plan = nodes.plan(together=form == "chains")
            rebuilt = [self._after_(self.state_B[row].clone(), row, nodes.path(row, node)) for row, node in plan.known]
            known_Y = torch.cat([self.state_B, torch.stack(rebuilt)]) if rebuilt else self.state_B
            out_BN, rest = rule.chains(known_Y, x, plan)
        self._write(rule, rest, nodes, capacity)
        return out_BN

    def _write(self, rule: Rule, factors: Factors, nodes: Nodes, capacity: int) -> None:
        sizes = {name: tuple(new_BN.shape[2:]) for name, new_BN in factors.items()}
        held = self.room_for_factors(rule, sizes, nodes.batch, capacity)
        for name, new_BN in factors.items():
            held[name][:, nodes.start : nodes.end] = new_BN

    def _after_(self, state: Tensor, row: int, path_L: Tensor) -> Tensor:
        assert self.rule is not None
        factors_L = {name: buffer[row].index_select(0, path_L) for name, buffer in self.factors_BM.items()}
        return self.rule.after_(state, factors_L)

    @torch.inference_mode()
    def settle(self) -> None:
        """Apply what was committed."""
        for row, path_L in self.due.items():
            if self.rule is not None and self.state_B is not None:
                self._after_(self.state_B[row], row, path_L)
            if self.inputs_BSC is not None:
                old, new = self.inputs_BSC[row, : self.window], self.inputs_BSC[row, self.window + path_L]
                self.inputs_BSC[row, : self.window] = torch.cat([old, new])[len(path_L) :]
        self.due = {}

    def tensors(self) -> list[Tensor]:
        """Everything held."""
        return [t for t in (self.inputs_BSC, self.state_B, *self.factors_BM.values()) if t is not None]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.settle()
        if self.inputs_BSC is not None:
            self.inputs_BSC = keep_rows(self.inputs_BSC, rows)
        if self.state_B is not None:
            self.state_B = keep_rows(self.state_B, rows)
        self.factors_BM = {name: keep_rows(buffer, rows) for name, buffer in self.factors_BM.items()}

    def node_bytes(self) -> int:
        """Memory of what a pending node leaves, known once there was one."""
        kept = [t for t in (self.inputs_BSC, *self.factors_BM.values()) if t is not None]
        return sum(t[0, 0].numel() * t.element_size() for t in kept)


def _grown(buffer_BM: Tensor, nodes: int) -> Tensor:
    # zeros, not empty: what is masked still passes through products, and 0 * NaN is NaN
    grown = buffer_BM.new_zeros(len(buffer_BM), nodes, *buffer_BM.shape[2:])
    grown[:, : buffer_BM.shape[1]] = buffer_BM
    return grown


class FactorStates:
    """All recurrent layers of a model.

    Args:
        specs: what states the model has.
        capacity: pending nodes that buffers hold before they grow.
        pick: how to score nodes.
        dtype: the model's; states are kept in float32 at least.
        kernels: compiled ones of its mixers, by layer.
    """

    def __init__(
        self,
        specs: dict[StateKey, StateSpec],
        batch: int,
        capacity: int,
        device: torch.device,
        pick: Pick,
        dtype: torch.dtype,
        kernels: Mapping[int, Kernel] | None = None,
    ) -> None:
        self.kernels = kernels or {}
        self.specs, self.batch, self.capacity, self.pick = specs, batch, capacity, pick
        self.layers: dict[int, LayerStates] = {}
        self.nodes: Nodes | None = None
        self.entered = LayerStates()
        for (kind, index, _), spec in specs.items():
            layer = self.layers.setdefault(index, LayerStates())
            if kind == "conv":
                channels, layer.window = spec.shape
                shape = batch, layer.window + capacity, channels
                layer.inputs_BSC = torch.zeros(shape, dtype=spec.dtype, device=device)
            else:
                wide = torch.promote_types(torch.promote_types(spec.dtype, dtype), torch.float32)
                layer.state_B = torch.zeros(batch, *spec.shape, dtype=wide, device=device)

    def set_committed(self, row: int, states: dict[StateKey, Tensor]) -> None:
        """Make these the committed states of a row (missing ones are zero, the state of an empty prefix)."""
        for key in self.specs:
            held = self._held(key, row)
            if key in states:
                held.copy_(states[key])
            else:
                held.zero_()

    def committed(self, row: int) -> dict[StateKey, Tensor]:
        """The committed states of a row (views)."""
        for layer in self.layers.values():
            layer.settle()
        return {key: self._held(key, row) for key in self.specs}

    def _held(self, key: StateKey, row: int) -> Tensor:
        kind, index, _ = key
        layer = self.layers[index]
        held = layer.inputs_BSC[row, : layer.window].T if kind == "conv" and layer.inputs_BSC is not None else None
        if held is None:
            assert layer.state_B is not None
            held = layer.state_B[row]
        return held

    def begin(self, nodes: Nodes) -> None:
        """The next call brings these nodes."""
        self.nodes = nodes
        if nodes.end > self.capacity:
            self.capacity = max(nodes.end, 2 * self.capacity)

    def enter(self, layer_idx: int) -> None:
        """What is called next, until another layer is entered, is of this layer."""
        self.entered = self.layers[layer_idx]

    def by_kernel(self, layer_idx: int, x_BND: Tensor) -> Tensor | None:
        """The outputs of a layer's mixer for its inputs [B, N, D], where a kernel computes all of it."""
        kernel, layer = self.kernels.get(layer_idx), self.layers[layer_idx]
        if kernel is None or not kernel.takes(x_BND, layer):
            return None
        assert self.nodes is not None
        return kernel(x_BND, layer, self.nodes, self.capacity)

    def convolve(self, x_BNC: Tensor, taps: int) -> Tensor:
        """What each new node convolves in the entered layer, [B, N, taps, C]."""
        assert self.nodes is not None
        return self.entered.convolve(x_BNC, taps, self.nodes, self.capacity)

    def recur(self, rule: Rule, x: Any) -> Tensor:
        """Outputs of new nodes in the entered layer."""
        assert self.nodes is not None
        assert self.entered.state_B is not None
        way = self.pick(rule.name, self.nodes, self.entered.state_B[0].numel())
        return self.entered.recur(rule, x, self.nodes, self.capacity, way)

    @property
    def wide(self) -> torch.dtype:
        """What the entered layer's state is kept in."""
        assert self.entered.state_B is not None
        return self.entered.state_B.dtype

    def commit(self, row: int, path: Sequence[int]) -> None:
        """The state after a path of pending nodes becomes the committed one, when it is next needed."""
        assert self.nodes is not None
        path_L = torch.tensor(path, device=self.nodes.device)
        for layer in self.layers.values():
            layer.due[row] = path_L

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        for layer in self.layers.values():
            layer.keep(rows)
        self.batch = len(rows)

    def bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for layer in self.layers.values() for t in layer.tensors())

    def bytes_per_node(self) -> int:
        """Memory of what a pending node leaves, known once there was one."""
        return sum(layer.node_bytes() for layer in self.layers.values())
