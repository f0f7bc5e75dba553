"""CUDA graphs for the lean decoder: a pass over a tree is one launch instead of some hundred.

A graph has fixed shapes and addresses. So node counts are those of the buckets, the slots shown are a power of two, inputs are
copied into buffers, and keys and values lie in memory that outlives a run: the latest run has it, and one that is still going on
takes copies with it and is scored without graphs from then on, as are batches. A graph is captured when it is first needed.

Never run on a GPU yet: tests record operations in the place of CUDA's graphs, on a CPU. At load, logits with and without graphs
are compared.

Shapes: N nodes, S slots shown, V vocabulary, G key-value heads, E head size.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor

from outrider.cache.attention import AttentionLayer
from outrider.cache.tree_cache import TreeCache
from outrider.deviation import deviation
from outrider.models.attention import folded
from outrider.models.lean import LeanTreeModel

MOST_GRAPHS, FEWEST_SLOTS = 32, 256
Outputs = tuple[Tensor, Tensor | None]  # logits [1, N, V], and hidden states at the taps [1, N, taps * D]
Work = Callable[[], Outputs]
Capture = Callable[[Work, torch.device], Work]


def captured(work: Work, device: torch.device) -> Work:
    """Work as a CUDA graph: does it again, with whatever its buffers hold then, and leaves its outputs where they were before."""
    with torch.cuda.device(device):
        side, current, graph = torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        side.wait_stream(current)
        with torch.cuda.stream(side):  # once before: libraries set themselves up when they are first called
            work()
        current.wait_stream(side)
        with torch.cuda.graph(graph):
            outputs = work()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


class Buffers:
    """What a graph of `nodes` nodes with `slots` slots shown reads and writes. In the place of a cache, it keeps keys and values:
    `held` [1, G, S, E] of every layer, in the memory that all graphs share."""

    def __init__(self, nodes: int, slots: int, held: Sequence[tuple[Tensor, ...]], model: LeanTreeModel) -> None:
        self.slots, self.held = slots, held
        self.ids_1N, self.positions_1N = (
            torch.zeros(1, nodes, dtype=torch.long, device=model.device) for _ in range(2)
        )
        self.slots_N = torch.zeros(nodes, dtype=torch.long, device=model.device)
        mask = torch.zeros(1, 1, nodes, slots, dtype=model.dtype, device=model.device)
        self.masks = {window: mask.clone() for window in set(model.windows.values())}

    def fill(self, ids_1N: Tensor, positions_1N: Tensor, start: int, visible: Mapping[int | None, np.ndarray]) -> None:
        """Nodes that lie in the slots from `start` on."""
        self.ids_1N.copy_(ids_1N)
        self.positions_1N.copy_(positions_1N)
        torch.arange(start, start + len(self.slots_N), out=self.slots_N)
        for window, mask in self.masks.items():
            seen_1NS = torch.from_numpy(visible[window]).to(mask.device)
            mask.fill_(torch.finfo(mask.dtype).min)
            mask[:, 0, :, : seen_1NS.shape[2]].masked_fill_(seen_1NS, 0.0)

    def update(self, keys_1GNE: Tensor, values_1GNE: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store those of the nodes, return all that are shown."""
        keys, values = self.held[layer]
        keys.index_copy_(2, self.slots_N, keys_1GNE)
        values.index_copy_(2, self.slots_N, values_1GNE)
        return keys[:, :, : self.slots], values[:, :, : self.slots]


class GraphedTreeModel(LeanTreeModel):
    """A lean decoder that scores trees of single rows through graphs.

    Args:
        lean: the decoder, whose weights it shares.
        capture: makes a graph of some work, as `captured` does.
    """

    def __init__(self, lean: LeanTreeModel, capture: Capture = captured) -> None:
        vars(self).update(vars(lean))
        self.way, self.capture = "lean decoder, CUDA graphs, tree mask", capture
        self.failed = ""  # why graphs are not used any more
        self.graphs: OrderedDict[tuple[int, int, tuple[int, ...]], tuple[Buffers, Work]] = OrderedDict()
        self._held: list[tuple[Tensor, ...]] = []
        self._owner: Callable[[], TreeCache | None] = lambda: None
        self._former: WeakSet[TreeCache] = WeakSet()

    def __copy__(self) -> GraphedTreeModel:
        """One with graphs of its own: copies are made to be changed."""
        return GraphedTreeModel(self, self.capture)

    def masks(self, visible: dict[int | None, Any]) -> Any:
        """Made in `forward`: they differ with and without a graph."""
        return visible

    @torch.inference_mode()
    def forward(
        self, ids_BN: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor] | None]:
        """See `LeanTreeModel.forward`."""
        if len(ids_BN) == 1 and not self.failed:
            try:
                if self._adopt(cache) and shown(cache.start + ids_BN.shape[1]) <= self._held[0][0].shape[2]:
                    return self._replay(ids_BN, positions_BN, mask, cache.start, tuple(taps))
            except RuntimeError as error:
                self.failed = (str(error).splitlines() or [type(error).__name__])[0][:150]
                warnings.warn(f"CUDA graphs are not used any more: {self.failed}", RuntimeWarning, stacklevel=2)
                self.graphs.clear()
        return super().forward(ids_BN, positions_BN, super().masks(mask), cache, taps)

    def _replay(self, ids_1N: Tensor, positions_1N: Tensor, visible: Any, start: int, taps: tuple[int, ...]) -> Any:
        nodes = ids_1N.shape[1]
        key = nodes, shown(start + nodes), taps
        buffers, graph = self.graphs.get(key) or (Buffers(nodes, key[1], self._held, self), None)
        buffers.fill(ids_1N, positions_1N, start, visible)  # before it is captured: to capture is to do it once
        graph = graph or self.capture(self._work(buffers, taps), self.device)
        self.graphs[key] = buffers, graph
        self.graphs.move_to_end(key)
        if len(self.graphs) > MOST_GRAPHS:
            self.graphs.popitem(last=False)
        logits_1NV, features = graph()
        return logits_1NV.clone(), None if features is None else list(features.clone())

    def _work(self, buffers: Any, taps: tuple[int, ...]) -> Work:
        def work() -> Outputs:
            attends = {kind: folded(buffers.masks[self.windows.get(kind)], self.repeat) for kind in self.kinds}
            x_1ND, features = self._run(buffers.ids_1N, buffers.positions_1N, attends, buffers, taps)
            return self.logits(x_1ND), features

        return work

    def _adopt(self, cache: TreeCache) -> bool:
        """Whether a cache's keys and values lie in the shared memory; those of a new one are brought there."""
        last = self._owner()
        if cache in self._former:  # it may have outgrown the memory
            return last is cache and cache.attention[0].keys_BHSD is self._held[0][0]
        if last is not None:
            for index, (keys, values) in enumerate(self._held):
                if (layer := last.attention[index]).keys_BHSD is keys:
                    layer.move_into(torch.empty_like(keys), torch.empty_like(values))
        slots = shown(max([cache.capacity, *(layer.capacity for layer in cache.attention.values())]))
        if not self._held or self._held[0][0].shape[2] < slots:
            self.graphs.clear()
            blocks: list[Any] = self.blocks
            shapes = [(1, block.groups, slots, block.size) for block in blocks]
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            self._held = [(like.new_empty(shape), like.new_empty(shape)) for shape in shapes]
        for index, memory in enumerate(self._held):
            cache.attention.setdefault(index, AttentionLayer(slots)).move_into(*memory)
        self._owner = ref(cache)
        self._former.add(cache)
        return True


def shown(slots: int) -> int:
    """Slots that a graph shows: a power of two, so that few graphs serve texts of every length."""
    return max(FEWEST_SLOTS, 1 << (slots - 1).bit_length())


def graphed(lean: LeanTreeModel, limit: float, capture: Capture = captured) -> tuple[LeanTreeModel, str]:
    """A decoder with graphs where they give the logits of the decoder alone, else the latter and why.

    Args:
        limit: how far logits may be apart, relative to the largest.
    """
    fast = GraphedTreeModel(lean, capture)
    apart = max(_apart(fast, lean, length) for length in (2, 5))
    if fast.failed or not apart <= limit:
        return lean, f"not CUDA graphs: {fast.failed or f'logits are off by {apart:.1e} (limit {limit:.0e})'}"
    fast.graphs.clear()  # a drafter's vocabulary head may be cut once it was tested
    return fast, ""


def _apart(fast: LeanTreeModel, lean: LeanTreeModel, length: int) -> float:
    """How far logits are apart over two rounds behind a text, with other tokens and slots in each."""
    tokens = [(7 * number + length) % lean.vocab for number in range(length + 6)]
    states, found = [model.begin([tokens[:length]], 6) for model in (fast, lean)], 0.0
    for at in (length, length + 3):
        ours, wanted = (state.extend([tokens[at : at + 3]], [[-1, 0, 0]]).float() for state in states)
        found = max(found, deviation(ours, wanted))
        for state in states:
            state.commit([[0, 2]])
    return found
