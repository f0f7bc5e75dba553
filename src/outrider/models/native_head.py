"""A feature head by compiled kernels: products that join its inputs from where they lie, and behind them a decoder of one layer.

Shapes: B rows, N nodes, M = B * N, P positions, D width, E head size, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from outrider.cache.attention import AttentionLayer
from outrider.models.feature_head import FeatureHead, rotary
from outrider.models.norm import EPSILON, Norm
from outrider.models.protocol import Rows
from outrider.native.decoder import Attended, Decoder, DecoderLayer, Held
from outrider.native.embedding import places, token_places
from outrider.native.joined import JoinedProduct
from outrider.native.library import Unavailable


class NativeEntry:
    """What enters the block: features of the target's hidden states, and features joined with embeddings.

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for dtypes that the kernels do not compute.
    """

    def __init__(self, head: FeatureHead, embedding: nn.Embedding) -> None:
        if embedding.weight.dtype is not head.join.weight.dtype:
            raise ValueError("the kernels want embeddings of the head's dtype")
        self.embedding, self.width = embedding, head.config.width
        taps = [cast(Norm, norm).weight for norm in head.tap_norms]
        self._features = JoinedProduct(taps, EPSILON, head.fuse)
        both = [head.token_norm.weight, head.feature_norm.weight]
        self._joined = JoinedProduct(both, EPSILON, head.join)

    def features(self, hidden: Sequence[Tensor]) -> Tensor:
        """Of hidden states [tokens, taps * D] in several pieces, [all tokens, D]."""
        pieces = [piece if piece.stride(-1) == 1 else piece.contiguous() for piece in hidden]
        step, taps = self.width * pieces[0].element_size(), range(self._features.parts)
        return self._features([place + tap * step for piece in pieces for place in places(piece) for tap in taps])

    def joined(self, tokens: Rows, features: Sequence[Sequence[Tensor]]) -> Tensor:
        """What goes through the block, [B, N, D].

        Args:
            tokens: as many in every row.
            features: [D] of each one's predecessor.
        """
        x_BND = self.embedding.weight.new_empty(len(tokens), len(tokens[0]), self.width)
        before = [feature.data_ptr() for row in features for feature in row]
        self.join([token for row in tokens for token in row], before, x_BND.data_ptr())
        return x_BND

    def join(self, tokens: Sequence[int], before: Sequence[int], out: int) -> None:
        """The same from and to addresses: of each token's predecessor's feature [D], and of what goes through the block."""
        own, _held = token_places(self.embedding, tokens)
        self._joined.into([place for both in zip(own, before) for place in both], out)


class NativeHead:
    """A block with attention; a state-space mixer beside it comes from elsewhere.

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for a block without attention, and for dtypes and sizes that the kernels do not compute.
    """

    def __init__(self, head: FeatureHead) -> None:
        config, size = head.config, head.head_size
        if not head.attends:
            raise ValueError(f"the kernels compute no core {config.core!r}")
        self.head, self.heads, self.groups, self.size = head, config.num_heads, config.num_kv_heads, size
        query, key, value = _parts(head.qkv, [size * self.heads, size * self.groups, size * self.groups])
        gate, up = _parts(head.up, [config.ffn, config.ffn])
        layer = DecoderLayer(
            before_mixer=head.mixer_norm.weight,
            before_ffn=head.ffn_norm.weight,
            query=query,
            key=key,
            value=value,
            mixed=head.mixed,
            gate=gate,
            up=up,
            down=head.down,
            scale=size**-0.5,
        )
        eps = head.out_norm.eps
        assert eps is not None
        self.decoder = Decoder([layer], self.heads, self.groups, size, "silu", eps, head.out_norm.weight, rounds=True)
        self._table = self._rotations(512)

    def __call__(
        self,
        joined_BND: Tensor,
        positions_BN: np.ndarray,
        seen_BNS: np.ndarray,
        held: AttentionLayer,
        first: int = 0,
        beside_BND: Tensor | None = None,
    ) -> Tensor:
        """Outputs [B, N, D].

        Args:
            joined_BND: what the block's inputs were joined to; overwritten.
            seen_BNS: the slots that each node sees; the last N are the nodes' own.
            held: where keys and values are, and those of the nodes come to be.
            first: the slot that `seen` begins with.
            beside_BND: the outputs of a mixer that read the same input.
        """
        end, positions_M = seen_BNS.shape[2], positions_BN.reshape(-1)
        attended = Attended(
            rotations=[self.rotations(int(positions_M.max()))],
            places=torch.from_numpy(positions_M),
            seen=[torch.from_numpy(np.ascontiguousarray(seen_BNS))],
            start=end - seen_BNS.shape[1],
            held=self.held(held, joined_BND, first + end, first),
        )
        outputs_BND = self.decoder(joined_BND, attended, hidden=True, beside_BND=beside_BND)[2]
        assert outputs_BND is not None
        return outputs_BND

    def held(self, layer: AttentionLayer, like: Tensor, end: int, first: int = 0) -> Held:
        """Where keys and values are from a slot on, with room for `end` slots."""
        keys, values = layer.reserve(like, self.groups, self.size, end)
        if layer.beside is None or layer.beside[0] != first:
            layer.beside = first, Held([keys[:, :, first:]], [values[:, :, first:]])
        held: Held = layer.beside[1]
        return held

    def rotations(self, last: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions up to the last one and more."""
        if last >= len(self._table[0]):
            self._table = self._rotations(2 * (last + 1))
        return self._table

    def _rotations(self, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [P, E] in float32, rounded as the head rounds them."""
        dtype, theta = self.head.join.weight.dtype, self.head.config.rope_theta
        cos, sin = (part[0, 0].float() for part in rotary(torch.arange(count)[None], self.size, theta, dtype))
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def native_entry(head: FeatureHead, embedding: nn.Embedding) -> NativeEntry | None:
    """What enters the block by compiled kernels; None where they do not compute it."""
    try:
        return NativeEntry(head, embedding)
    except (Unavailable, ValueError):
        return None


def native_head(head: FeatureHead) -> NativeHead | None:
    """The block by compiled kernels; None where they do not compute it."""
    try:
        return NativeHead(head)
    except (Unavailable, ValueError):
        return None


def _parts(linear: nn.Linear, sizes: list[int]) -> list[nn.Linear]:
    """Rows of a layer without bias as layers of their own, in the same memory."""
    found = []
    for weight in linear.weight.detach().split(sizes):
        part = nn.Linear(linear.in_features, len(weight), bias=False, device="meta")
        part.weight = nn.Parameter(weight, requires_grad=False)
        found.append(part)
    return found
