"""Any transformers causal language model as a TreeModel, through `TreeCache`.

Attention layers score all nodes in one pass under a tree mask; recurrent mixers step the nodes in waves (`FactorTreeModel` has a
faster way). Whether a family's
code really computes that is not assumed but tested at load (`selftest`).

Shapes: B rows, N new nodes, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from outrider.cache.attention import additive_mask, visibility
from outrider.cache.factor_states import FactorStates
from outrider.cache.nodes import Nodes
from outrider.cache.pending import Pending
from outrider.cache.recurrent import NodeStates, StateKey, StateSpec
from outrider.cache.tree_cache import TreeCache
from outrider.models.inference import inference
from outrider.models.mixer_calls import find_mixers, wrap_mixer
from outrider.models.packed import Packed
from outrider.models.protocol import Rows
from outrider.models.taps import tapping

NODES = 32  # that buffers of recurrent states hold before they grow
# Rare node counts cost: oneDNN builds a kernel for every new number of rows. A few sizes are enough.
NODE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class Unsupported(Exception):
    """The model's code cannot be driven through `TreeCache`; the text says why."""


class CachedTreeModel:
    """A transformers model whose layers keep their state in a `TreeCache`.

    Raises:
        Unsupported: when the model takes no cache, or keeps state elsewhere.
    """

    chunk = 1024  # prompt tokens of a pass

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.vocab = int(self.config.vocab_size)
        self.context = context_length(model)
        self.device, self.dtype = model.device, model.dtype
        accepted = inspect.signature(model.forward).parameters
        base = inspect.signature(model.base_model.forward).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in base.values())
        if "cache" not in accepted or not ("cache" in base or open_ended):
            raise Unsupported("its forward takes no `cache`")
        self._takes_positions = "position_ids" in accepted, "position_ids" in base or "position_ids" in accepted
        self.windows = attention_windows(model)
        self.specs = self._discover_states()
        self.way = "tree mask" if not self.specs else "waves of single steps"
        # a block fed onto an existing recurrent state is wrong in some families; `selftest` allows it
        self.chunked_prefill = not self.specs

    @cached_property
    def packed(self) -> Packed:
        """The model's linear layers, packed when trees are first scored through them."""
        return Packed(self.model)

    def _discover_states(self) -> dict[StateKey, StateSpec]:
        cache = TreeCache(capacity=8)
        with find_mixers(self.model, cache) as self.mixers:
            self._feed_chunks(cache, [0, 0, 0])
        for mixer in self.mixers:
            wrap_mixer(mixer)
        return {key: StateSpec(tuple(s.shape), s.dtype) for key, s in cache.prefilled_states().items()}

    @inference
    def _feed(self, cache: TreeCache, tokens: Sequence[int], taps: Sequence[int] = ()) -> Tensor:
        """Prefill tokens behind what the cache has seen, without the vocabulary head; hidden states at the taps."""
        with tapping(self.model, taps) as reader:
            self._feed_chunks(cache, tokens)
        return reader.everything()

    def _feed_chunks(self, cache: TreeCache, tokens: Sequence[int]) -> None:
        chunk = self.chunk if getattr(self, "chunked_prefill", False) else max(len(tokens), 1)
        for at in range(0, len(tokens), chunk):
            part = tokens[at : at + chunk]
            cache.start = cache.seen
            kwargs: dict[str, Any] = {"cache": cache, "use_cache": True}
            if self._takes_positions[1]:
                kwargs["position_ids"] = torch.arange(cache.seen, cache.seen + len(part), device=self.device)[None]
            self.model.base_model(input_ids=torch.tensor([list(part)], device=self.device), **kwargs)
            cache.seen += len(part)

    @inference
    def begin(self, prompts: Rows, room: int = 0, taps: Sequence[int] = ()) -> CachedTreeState:
        """Prefill each prompt on its own, so that a row never depends on its neighbours."""
        caches, features = [], []
        for prompt in prompts:
            cache = TreeCache(max(map(len, prompts)) + room + NODE_BUCKETS[-1])
            features.append(self._feed(cache, prompt, taps))
            caches.append(cache)
        cache = TreeCache.stack(caches, self.new_states(len(prompts)) if self.specs else None)
        state = self.new_state(cache, [len(p) for p in prompts])
        state.taps, state.features = tuple(taps), features if taps else None
        return state

    def new_state(self, cache: TreeCache, lengths: list[int]) -> CachedTreeState:
        """Sequences in flight whose prompts are in a cache."""
        return CachedTreeState(self, cache, lengths)

    def new_states(self, batch: int) -> NodeStates | FactorStates:
        """Recurrent states of so many rows."""
        return NodeStates(self.specs, batch, NODES, self.device)

    def size(self, new: int, batch: int) -> int:
        """Nodes that a call of so many is padded to."""
        return bucket(new, self.dtype, batch) if self.windows else new

    def state_bytes_per_node(self) -> int:
        """Memory of the dense recurrent states of one pending node."""
        sizes = [
            torch.Size(s.shape).numel() * torch.empty(0, dtype=s.dtype).element_size() for s in self.specs.values()
        ]
        return sum(sizes)

    def masks(self, visible: dict[int | None, Any]) -> Tensor | dict[str, Tensor | None]:
        """What goes in as attention_mask: one mask, or one per layer type where windows differ."""
        tensors = {w: additive_mask(v, self.dtype, self.device) for w, v in visible.items()}
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        types = set(self.config.layer_types)
        return {t: tensors.get(self.windows.get(t)) if t in self.windows else None for t in types}

    @inference
    def forward(
        self, ids_BN: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Logits of every node [B, N, V], and hidden states at the taps."""
        kwargs: dict[str, Any] = {"cache": cache, "use_cache": True, "attention_mask": mask}
        if self._takes_positions[0]:
            kwargs["position_ids"] = positions_BN
        with self.packed.active(), tapping(self.model, taps) as reader:
            logits: Tensor = self.model(input_ids=ids_BN, **kwargs).logits
        return logits, list(reader.take()) if taps else None


class CachedTreeState:
    """Sequences in flight of a `CachedTreeModel`."""

    def __init__(self, model: CachedTreeModel, cache: TreeCache, lengths: list[int]) -> None:
        self.model, self.cache, self.lengths = model, cache, lengths
        self.nodes = Pending(len(lengths))
        self.taps: tuple[int, ...] = ()
        self.features: list[Tensor] | None = None

    @property
    def pending(self) -> int:
        """Pending nodes of each row, padding included."""
        return self.nodes.count

    @inference
    def extend(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes, return logits [B, N, V]; see `TreeState`."""
        logits_BNV, self.features = self.model.forward(*self._nodes(tokens, parents), self.cache, self.taps)
        return logits_BNV[:, : max(map(len, tokens))]

    def _nodes(self, tokens: Rows, parents: Rows) -> tuple[Tensor, Tensor, Any]:
        """Ids, positions and masks of new nodes."""
        new = max(map(len, tokens))
        size = self.model.size(new, len(tokens))
        base = max(self.lengths)
        start, waves = self.nodes.add(parents, size)
        end = start + size
        self.cache.begin_nodes(base, Nodes(self.nodes, parents, start, waves, self.model.device))
        depths_BM = self.nodes.depths_BM[:, :end]
        visible = {
            window: visibility(self.lengths, base, depths_BM, self.nodes.ancestors_BMM[:, start:end, :end], window)
            for window in set(self.model.windows.values())
        }
        ids = torch.tensor([[*row, *[0] * (size - len(row))] for row in tokens], device=self.model.device)
        positions = torch.from_numpy(np.array(self.lengths)[:, None] + depths_BM[:, start:end])
        mask = self.model.masks(visible) if visible else None
        return ids, positions.to(self.model.device), mask

    @inference
    def commit(self, paths: Rows) -> None:
        """A path per row joins the committed state."""
        base = max(self.lengths)
        for row, path in enumerate(paths):
            self.nodes.check_path(row, path)
        self.cache.commit(base, self.lengths, paths)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths)]
        self.nodes.clear()

    @inference
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.cache.keep(rows)
        self.nodes.keep(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def bytes(self) -> int:
        """Memory of keys, values and states."""
        return self.cache.bytes()


def bucket(count: int, dtype: torch.dtype, batch: int = 1) -> int:
    """The next node count that calls are padded to.

    In half precision a lone node becomes four: a single row goes through a vector kernel whose sums differ in the last bit from
    those of the matrix kernel, and plain decoding should have the very bits of speculative decoding; attention wants its rows by
    fours, and more rows of a product cost nothing.
    """
    if batch == 1 and dtype in (torch.bfloat16, torch.float16):
        count = max(count, 4)
    return next((size for size in NODE_BUCKETS if size >= count), (count + 63) // 64 * 64)


def context_length(model: PreTrainedModel) -> int | None:
    """Most tokens that positions allow; None where nothing limits them."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Window of each attention layer type; None is full attention."""
    config = model.config.get_text_config()
    layers = DynamicCache(config=config).layers
    types = getattr(config, "layer_types", None) or ["attention"] * len(layers)
    windows: dict[str, int | None] = {}
    for kind, layer in zip(types, layers):
        if isinstance(layer, CacheLayerMixin):
            windows[kind] = getattr(layer, "sliding_window", None)
    return windows
