"""Recurrent and hybrid transformers models whose trees are scored in one pass, with factors instead of a state per node."""

from __future__ import annotations

from functools import cached_property

from transformers import PreTrainedModel

from outrider.cache.factor_states import FactorStates, Pick
from outrider.mixers.samples import Size
from outrider.models.mixer_calls import missing
from outrider.models.streaming import streaming
from outrider.models.tree_model import NODES, CachedTreeModel, Unsupported
from outrider.native.delta import DeltaKernel, delta_kernels
from outrider.topology import Switch


class FactorTreeModel(CachedTreeModel):
    """A model with recurrent layers, all of a kind that `mixer_rules` knows.

    Raises:
        Unsupported: when it has no such layers, without a text, or when one of them is not known, with the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if not self.specs:
            raise Unsupported
        recurrent = {index: spec.shape for (kind, index, _), spec in self.specs.items() if kind == "recurrent"}
        for mixer in self.mixers:
            if reason := missing(mixer, recurrent.get(getattr(mixer, "layer_idx", -1))):
                raise Unsupported(reason)
        if any(number for _, _, number in self.specs):
            raise Unsupported("a layer keeps several states of a kind")
        self.way = "factors, tree mask"
        self.pick: Pick = Switch(self.device)

    @cached_property
    def kernels(self) -> dict[int, DeltaKernel]:
        """Compiled mixers by layer, made when trees are first scored: they lay out weights of their own."""
        return {} if streaming(self.model) else delta_kernels(self.mixers)

    def new_states(self, batch: int) -> FactorStates:
        """Recurrent states of so many rows."""
        return FactorStates(self.specs, batch, NODES, self.device, self.pick, self.dtype, self.kernels)

    @cached_property
    def _probed(self) -> FactorStates:
        """States after one node, in which every layer has shown what it is."""
        state = self.begin([[0]], 1)
        state.extend([[0]], [[-1]])
        assert isinstance(state.cache.states, FactorStates)
        return state.cache.states

    def state_bytes_per_node(self) -> int:
        """Memory of the factors of one pending node."""
        return self._probed.bytes_per_node()

    def dense_bytes_per_node(self) -> int:
        """Memory of the dense states that they replace."""
        return super().state_bytes_per_node()

    def recurrences(self) -> set[tuple[str, Size]]:
        """The rules of its layers and the sizes of their states."""
        return {
            (layer.rule.name, Size.of(layer.factors_BM["k"], layer.factors_BM["u"]))
            for layer in self._probed.layers.values()
            if layer.rule is not None
        }
