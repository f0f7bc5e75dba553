"""Recurrent and hybrid transformers models whose trees are scored in one pass, with factors instead of a state per node."""

from __future__ import annotations

from functools import cached_property

from transformers import PreTrainedModel

from outrider.cache.factor_states import FactorStates
from outrider.cache.nodes import Nodes
from outrider.models.mixer_calls import missing
from outrider.models.tree_model import NODES, CachedTreeModel, Unsupported


class FactorTreeModel(CachedTreeModel):
    """A model with recurrent layers, all of a kind that `mixer_rules` knows.

    Raises:
        Unsupported: when it has no such layers, without a text, or when one of them is not known, with the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if not self.specs:
            raise Unsupported
        recurrent = {index for kind, index, _ in self.specs if kind == "recurrent"}
        for mixer in self.mixers:
            if reason := missing(mixer, getattr(mixer, "layer_idx", None) in recurrent):
                raise Unsupported(reason)
        if any(number for _, _, number in self.specs):
            raise Unsupported("a layer keeps several states of a kind")
        self.way = "factors, tree mask"

    def new_states(self, batch: int) -> FactorStates:
        """Recurrent states of so many rows."""
        return FactorStates(self.specs, batch, NODES, self.device, pick, self.dtype)

    @cached_property
    def _factor_bytes(self) -> int:
        state = self.begin([[0]], 1)
        state.extend([[0]], [[-1]])
        assert isinstance(state.cache.states, FactorStates)
        return state.cache.states.bytes_per_node()

    def state_bytes_per_node(self) -> int:
        """Memory of the factors of one pending node."""
        return self._factor_bytes

    def dense_bytes_per_node(self) -> int:
        """Memory of the dense states that they replace."""
        return super().state_bytes_per_node()


def pick(rule: str, nodes: Nodes) -> str:
    """How to score nodes: a lone node is stepped, others are scored at once."""
    return "serial" if nodes.depth == 1 and nodes.largest == 1 else "masked"
