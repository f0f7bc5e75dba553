"""The lean decoder with compiled kernels: a pass over a few nodes is one call, and takes little more than reading the weights.

Weights are laid out for the kernels once, and those of transformers given back; with a memory budget they are read as they lie,
layer after layer. Prompts go through the kernels too, some hundred tokens at a time.

Shapes: B rows, N nodes, P positions, D width, E head size, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.cache.text_nodes import TextNodes
from outrider.cache.tree_cache import TreeCache
from outrider.models.attention import seen_in_prompt
from outrider.models.draft_vocab import CutHead
from outrider.models.inference import inference
from outrider.models.lean import Block, LeanTreeModel, StreamedBlock
from outrider.models.native_streamed import StreamedDecoder
from outrider.models.protocol import Rows
from outrider.models.streaming import streamed_parts, streaming
from outrider.models.taps import check_layers
from outrider.models.tree_model import CachedTreeState, Unsupported
from outrider.native.decoder import Attended, Decoder, DecoderLayer, Held, TextPass
from outrider.native.embedding import copied, embedded, lies
from outrider.native.library import Unavailable, library
from outrider.native.screen import Screen, Screened
from outrider.scores import Scores

NODES = 32  # of a text that there is room for at first
STREAMED_CHUNK = 512  # every chunk of a prompt reads the disk
MOVING = ("dynamic", "longrope")  # rotations that depend on the length of the text


class NativeTreeModel(LeanTreeModel):
    """A Llama-like transformers model whose trees are scored by compiled kernels, with the same bits wherever a token lies.

    Raises:
        Unsupported: without a compiler, and for models that the kernels do not compute.
    """

    chunk = 256  # enough that weights are read rarely, few enough that memory stays small
    screen: Screen | None = None  # see `screened`

    def __init__(self, model: PreTrainedModel) -> None:
        try:
            self._kernels = library()
        except Unavailable as reason:
            raise Unsupported(str(reason)) from reason
        super().__init__(model)
        if self.cap:
            raise Unsupported("the kernels do not cap logits")
        self.kind_names = sorted(self.kinds)
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        rope: Any = getattr(self.config, "rope_parameters", None) or {}
        types = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
        self.rotations_stay = not any(kind in MOVING for kind in types)
        try:
            self.decoder = self._decoder(model)
        except ValueError as reason:
            raise Unsupported(str(reason)) from reason
        self.way = "compiled kernels, tree mask"

    def _decoder(self, model: PreTrainedModel) -> Decoder | StreamedDecoder:
        base: Any = model.base_model
        head: Any = model.get_output_embeddings()
        if len(found := {_size(layer) for layer in base.layers}) > 1:
            raise ValueError("the kernels want layers of one size")
        ((self.heads, self.groups, self.head_size),) = found
        activation = self.config.hidden_activation if self.typed_rotary else self.config.hidden_act
        make = partial(
            Decoder,
            heads=self.heads,
            groups=self.groups,
            size=self.head_size,
            activation=activation,
            epsilon=self.norm.eps,
            norm=self.norm.weight,
            lying=streaming(model) is not None,
        )
        layers = [partial(_layer, *both, self.kind_names) for both in zip(base.layers, self.blocks)]
        if not (parts := streamed_parts(model)):
            return make([layer() for layer in layers], unembed=head)
        self.chunk = STREAMED_CHUNK
        streamed = [(parts.get(layer, nullcontext()), read) for layer, read in zip(base.layers, layers)]
        with streamed[0][0]:
            make([streamed[0][1]()], unembed=head)  # says what the kernels do not compute
        return StreamedDecoder(streamed, make, head)

    def shallow(self, layers: int) -> NativeTreeModel:
        """The same model with its first layers only."""
        made = cast(NativeTreeModel, super().shallow(layers))
        made.decoder = self.decoder.changed(layers=self.decoder.layers[:layers])
        return made

    def speak_through(self, head: CutHead) -> None:
        """Take another vocabulary head."""
        super().speak_through(head)
        self.screen = None
        self.decoder = self.decoder.changed(unembed=head.linear)

    def size(self, new: int, batch: int) -> int:
        """Nodes that a call is padded to: none, since every count gives the same bits."""
        return new

    def masks(self, visible: dict[int | None, Any]) -> Any:
        """Which slots are seen, by window."""
        return visible

    @inference
    def forward(
        self, ids_BN: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Logits of every node [B, N, V], and hidden states at the taps."""
        logits_BNV, features, _ = self._pass(ids_BN, positions_BN, mask, cache, taps)
        assert logits_BNV is not None
        return logits_BNV, list(features.unbind()) if features is not None else None

    def hidden(
        self, ids_BN: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor] | None]:
        """What enters the vocabulary head, [B, N, D], and hidden states at the taps."""
        _, features, hidden_BND = self._pass(ids_BN, positions_BN, mask, cache, taps, logits=False, hidden=True)
        assert hidden_BND is not None
        return hidden_BND, list(features.unbind()) if features is not None else None

    def new_state(self, cache: TreeCache, lengths: list[int]) -> NativeTreeState:
        """Sequences in flight whose prompts are in a cache."""
        return (
            NativeTextState(self, cache, lengths) if self._is_plain(lengths) else NativeTreeState(self, cache, lengths)
        )

    def _is_plain(self, lengths: Sequence[int]) -> bool:
        """Whether there is one text, and one kind of layers that are in memory and see all of it."""
        alike = len(self.kind_names) == 1 and not any(self.windows.values()) and self.rotations_stay
        return len(lengths) == 1 and alike and isinstance(self.decoder, Decoder) and lies(self.embedding)

    def _pass(
        self,
        ids_BN: Tensor,
        positions_BN: Tensor,
        seen: dict[int | None, np.ndarray],
        cache: TreeCache,
        taps: Sequence[int],
        logits: bool = True,
        hidden: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        stream_BND = embedded(self.embedding, ids_BN)
        end = cache.start + ids_BN.shape[1]
        attended = Attended(
            rotations=[
                self.rotations(kind, stream_BND, end)
                if self.rotations_stay
                else self._rotated(kind, stream_BND, positions_BN)
                for kind in self.kind_names
            ],
            places=positions_BN.reshape(-1) if self.rotations_stay else torch.arange(positions_BN.numel()),
            seen=[torch.from_numpy(np.ascontiguousarray(seen[self.windows.get(kind)])) for kind in self.kind_names],
            start=cache.start,
            held=self.held(cache, stream_BND, end),
        )
        return self.decoder(stream_BND, attended, taps, logits, hidden)

    @inference
    def _feed(self, cache: TreeCache, tokens: Sequence[int], taps: Sequence[int] = ()) -> Tensor:
        check_layers(taps, len(self.blocks))
        features = []
        for at in range(0, len(tokens), self.chunk):
            part = tokens[at : at + self.chunk]
            start = cache.start = cache.seen
            positions = torch.arange(start, start + len(part))[None]
            seen = {window: seen_in_prompt(len(part), start, window)[None] for window in set(self.windows.values())}
            _, tapped, _ = self._pass(torch.tensor([list(part)]), positions, seen, cache, taps, logits=False)
            features += [] if tapped is None else [tapped[0]]
            cache.seen += len(part)
        return torch.cat(features) if features else torch.empty(0)

    def held(self, cache: TreeCache, like: Tensor, end: int) -> Held:
        """Where keys and values are, with room for `end` slots."""
        if cache.beside is None or end > cache.beside.room:
            rooms = [cache.room(i, like, self.groups, self.head_size, end) for i in range(len(self.blocks))]
            cache.beside = Held([keys for keys, _ in rooms], [values for _, values in rooms], self._kernels)
        held: Held = cache.beside
        return held

    def rotations(self, kind: str, like: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all positions below `end`, where they do not depend on the length of the text."""
        if kind not in self._tables or end > len(self._tables[kind][0]):
            self._tables[kind] = self._rotated(kind, like, torch.arange(max(2 * end, 512))[None])
        return self._tables[kind]

    def _rotated(self, kind: str, like: Tensor, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [P, E] in float32, rounded as the model rounds them."""
        cos, sin = self._rope(like, positions_BN, kind)
        return cos.flatten(0, 2).float().contiguous(), sin.flatten(0, 2).float().contiguous()


class NativeTreeState(CachedTreeState):
    """Sequences in flight of a `NativeTreeModel`."""

    model: NativeTreeModel

    @inference
    def score(self, tokens: Rows, parents: Rows) -> list[Scores]:
        """Feed nodes, return the scores of each row; see `Scorer`."""
        if self.model.screen is None:
            return [Scores(logits_NV) for logits_NV in self.extend(tokens, parents)]
        hidden_BND, self.features = self.model.hidden(*self._nodes(tokens, parents), self.cache, self.taps)
        return Screened(self.model.screen, hidden_BND.flatten(0, 1), hidden_BND.shape[0]).rows()


class NativeTextState(NativeTreeState):
    """A text alone, by addresses instead of tensors."""

    def __init__(self, model: NativeTreeModel, cache: TreeCache, lengths: list[int]) -> None:
        super().__init__(model, cache, lengths)
        self.text, self._weight = TextNodes(), model.embedding.weight
        self._width = self._weight.shape[1]
        self._pass: TextPass | None = None
        self._stream_1ND = self._weight.new_empty(1, NODES, self._width)

    @property
    def pending(self) -> int:
        """Pending nodes."""
        return len(self.text)

    @inference
    def extend(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes, return logits [1, N, V]; see `TreeState`."""
        head = cast(nn.Linear, cast(Decoder, self.model.decoder).unembed)
        logits_NV = head.weight.new_empty(len(tokens[0]), head.out_features)
        self._feed(tokens[0], parents[0], logits=logits_NV.data_ptr())
        return logits_NV[None]

    @inference
    def score(self, tokens: Rows, parents: Rows) -> list[Scores]:
        """Feed nodes, return their scores; see `Scorer`."""
        if self.model.screen is None:
            return [Scores(self.extend(tokens, parents)[0])]
        hidden_ND = self._weight.new_empty(len(tokens[0]), self._width)
        self._feed(tokens[0], parents[0], hidden=hidden_ND.data_ptr())
        return Screened(self.model.screen, hidden_ND, 1).rows()

    def _feed(self, tokens: Sequence[int], parents: Sequence[int], **wanted: int) -> None:
        model, new = self.model, len(tokens)
        run = self._pass
        if run is None or run.decoder is not model.decoder or run.taps != self.taps:
            # another head or other taps write more or fewer numbers
            run = self._pass = TextPass(cast(Decoder, model.decoder), self.taps)
        if new > self._stream_1ND.shape[1]:
            self._stream_1ND = self._weight.new_empty(1, new, self._width)
        start, length = len(self.text), self.lengths[0]
        positions = [length + depth for depth in self.text.add(parents)]
        stream, end = self._stream_1ND.data_ptr(), length + start + new
        copied(self._weight, tokens, stream)
        if self.taps:
            features_NF = self._weight.new_empty(new, len(self.taps) * self._width)
            self.features, wanted["features"] = [features_NF], features_NF.data_ptr()
        run.attend(model.held(self.cache, self._stream_1ND, end))
        run.rotate(model.rotations(model.kind_names[0], self._stream_1ND, end))
        run(stream, length + start, positions, self.text.seen(start, length), **wanted)

    @inference
    def commit(self, paths: Rows) -> None:
        """A path joins the committed state."""
        self.text.check_path(paths[0])
        self.cache.commit(self.lengths[0], self.lengths, paths)
        self.lengths = [self.lengths[0] + len(paths[0])]
        self.text.clear()


def _size(layer: Any) -> tuple[int, int, int]:
    """Heads, key-value heads and head size of a layer."""
    attention = layer.self_attn
    size = int(attention.head_dim)
    return attention.q_proj.out_features // size, attention.k_proj.out_features // size, size


def _layer(layer: Any, read: Block | StreamedBlock, kinds: list[str]) -> DecoderLayer:
    """transformers' weights of a layer that is in memory, as the kernels take them."""
    attention, mlp = layer.self_attn, layer.mlp
    block = read if isinstance(read, Block) else read.make()
    query_norm, key_norm = [norm.weight for norm in block.qk_norms] or [None, None]
    return DecoderLayer(
        before_mixer=block.before_mixer.weight,
        before_ffn=block.before_ffn.weight,
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        mixed=attention.o_proj,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        scale=block.scale,
        kind=kinds.index(block.kind),
        after_mixer=block.after_mixer.weight if block.after_mixer else None,
        after_ffn=block.after_ffn.weight if block.after_ffn else None,
        query_norm=query_norm,
        key_norm=key_norm,
    )
