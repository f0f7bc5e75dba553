"""A transformers cache that holds a committed prefix and a tree behind it, for attention, recurrent and hybrid models.

In prefill it behaves like transformers' own cache. In tree mode attention layers write nodes behind the prefix. Recurrent layers
either keep a state per node, which mixers read and write wave by wave, or factors, which stand in for their recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from outrider.cache.attention import AttentionLayer
from outrider.cache.factor_states import FactorStates
from outrider.cache.nodes import Nodes
from outrider.cache.recurrent import NodeStates, StateKey


class TreeCache(Cache):
    """Keys, values and recurrent states of B rows. Callers keep the lengths; this only stores."""

    def __init__(self, capacity: int) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.attention: dict[int, AttentionLayer] = {}
        # what a reader keeps about all keys and values, and moves them with; forgotten when these may lie elsewhere
        self.beside: Any = None
        self.states: NodeStates | FactorStates | None = None
        self.seen = 0  # tokens prefilled
        self.start = 0  # slot where the current call writes
        self.nodes: Nodes | None = None  # of the current call; None in prefill
        self.inside = False  # a mixer is being run over nodes: what it calls must not do that again
        self.prefilled: dict[int, LinearAttentionLayer] = {}
        self.on_state_read: Callable[[], None] | None = None

    # -- attention layers ------------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, return all that may be seen."""
        self.beside = None
        layer = self.attention.setdefault(layer_idx, AttentionLayer(self.capacity))
        return layer.write(key_states, value_states, self.start, align=self.nodes is not None)

    def room(self, layer_idx: int, like: Tensor, heads: int, size: int, end: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [B, H, C, D], with room for `end` slots, of the dtype and with the rows of `like`."""
        self.beside = None
        layer = self.attention.setdefault(layer_idx, AttentionLayer(self.capacity))
        return layer.reserve(like, heads, size, end)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots before the current call's."""
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Slots and offset of the mask that transformers builds in prefill."""
        return self.start + query_length, 0

    # -- recurrent layers ------------------------------------------------------------------------------------------

    def _layer(self, layer_idx: int) -> LinearAttentionLayer:
        return self.prefilled.setdefault(layer_idx, LinearAttentionLayer(number_of_states=8))

    def _get(self, kind: str, layer_idx: int, state_idx: int) -> Tensor | None:
        if self.on_state_read is not None:
            self.on_state_read()
        if self.nodes is not None:
            assert self.states is not None
            # without a state a mixer takes all nodes for one block, whatever their number
            return self.states.read((kind, layer_idx, state_idx)) if isinstance(self.states, NodeStates) else None
        layer = self._layer(layer_idx)
        if not layer.has_previous_state[state_idx]:
            return None
        held: Tensor | None = (layer.conv_states if kind == "conv" else layer.recurrent_states)[state_idx]
        return held

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Last inputs of a short convolution; None before the first token."""
        return self._get("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """State of a recurrence; None before the first token."""
        return self._get("recurrent", layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Append inputs of a short convolution; returns them behind the ones held."""
        if self.nodes is None:
            updated: Tensor = self._layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)
            return updated
        if isinstance(self.states, FactorStates):
            self.states.enter(layer_idx)
            return conv_states
        assert self.states is not None
        held = self.states.read(("conv", layer_idx, state_idx))
        full = torch.cat([held, conv_states], dim=-1)
        self.states.write(("conv", layer_idx, state_idx), full[..., -held.shape[-1] :])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replace the state of a recurrence."""
        if self.nodes is None:
            updated: Tensor = self._layer(layer_idx).update_recurrent_state(recurrent_states, state_idx)
            return updated
        if isinstance(self.states, NodeStates):
            self.states.write(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything was fed before."""
        return self.nodes is not None or self.seen > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: nodes have states of their own."""
        return False

    def prefilled_states(self) -> dict[StateKey, Tensor]:
        """States that a prefill of one row left."""
        found: dict[StateKey, Tensor] = {}
        for index, layer in self.prefilled.items():
            for kind, ready, held in (
                ("conv", layer.is_conv_states_initialized, layer.conv_states),
                ("recurrent", layer.is_recurrent_states_initialized, layer.recurrent_states),
            ):
                found.update({(kind, index, i): held[i][0] for i in held if ready[i]})
        return found

    # -- rows and commits ------------------------------------------------------------------------------------------

    @classmethod
    def stack(cls, rows: Sequence[TreeCache], states: NodeStates | FactorStates | None) -> TreeCache:
        """One cache of several prefilled rows, with these states for them, whose numbers it sets."""
        out = cls(max(row.capacity for row in rows))
        for index in {i for row in rows for i in row.attention}:
            layers = [row.attention.get(index, AttentionLayer(row.capacity)) for row in rows]
            out.attention[index] = layers[0] if len(rows) == 1 else AttentionLayer.stack(layers)
        out.states = states
        if states is not None:
            for number, row in enumerate(rows):
                states.set_committed(number, row.prefilled_states())
        return out

    def begin_nodes(self, base: int, nodes: Nodes) -> None:
        """The next forward call brings these nodes; the slots of pending nodes start at `base`."""
        self.start, self.nodes = base + nodes.start, nodes
        if self.states is not None:
            self.states.begin(nodes)

    def commit(self, base: int, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Gather each row's path of pending nodes to the end of its prefix."""
        if self.attention:
            self._move([(row, list(p)) for row, p in enumerate(paths) if p], base, lengths)
        if self.states is not None:
            for row, path in enumerate(paths):
                if path:
                    self.states.commit(row, path)

    def _move(self, moves: list[tuple[int, list[int]]], base: int, lengths: Sequence[int]) -> None:
        """Keys and values of paths that do not lie where they belong already."""
        moves = [(row, p) for row, p in moves if p != list(range(len(p))) or base != lengths[row]]
        layers = list(self.attention.values())
        device = layers[0].device
        if self.beside is not None:
            for row, path in moves:
                self.beside.move(row, [base + node for node in path], lengths[row])
        elif len(moves) == 1:  # slices are cheaper than indexes
            row, path = moves[0]
            slots = torch.tensor(path, device=device) + base
            for layer in layers:
                layer.move(row, slots, lengths[row])
        elif moves:
            rows = torch.tensor([row for row, path in moves for _ in path], device=device)
            slots = torch.tensor([base + node for _, path in moves for node in path], device=device)
            ends = [lengths[row] + place for row, path in moves for place in range(len(path))]
            targets = torch.tensor(ends, device=device)
            for layer in layers:
                layer.move_many(rows, slots, targets)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.beside = None
        for layer in self.attention.values():
            layer.keep(rows)
        if self.states is not None:
            self.states.keep(rows)

    def bytes(self) -> int:
        """Memory held by keys, values and states."""
        held = sum(layer.bytes() for layer in self.attention.values())
        return held + (self.states.bytes() if self.states is not None else 0)
