"""Rows of an embedding, taken from where they lie: torch's own lookup takes longest in looking.

Shapes: B rows, N tokens, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

FEW_TOKENS = 64  # beyond these torch is as fast


def places(rows_XD: Tensor) -> list[int]:
    """The addresses of rows of numbers that lie side by side."""
    first, step = rows_XD.data_ptr(), rows_XD.stride(0) * rows_XD.element_size()
    return [first + row * step for row in range(rows_XD.shape[0])]


def token_places(embedding: nn.Embedding, tokens: Sequence[int]) -> tuple[list[int], Any]:
    """The addresses of the rows of tokens, and what must be kept as long as they are read."""
    if not lies(embedding):
        rows_XD = embedding(torch.tensor(tokens, dtype=torch.long, device=embedding.weight.device)).contiguous()
        return places(rows_XD), rows_XD
    weight = embedding.weight
    first, step = weight.data_ptr(), weight.shape[1] * weight.element_size()
    return [first + token * step for token in tokens], weight


def embedded(embedding: nn.Embedding, ids_BN: Tensor) -> Tensor:
    """Embeddings [B, N, D] of their own."""
    if ids_BN.numel() > FEW_TOKENS or not lies(embedding):
        found: Tensor = embedding(ids_BN).contiguous()
        return found
    out_BND = embedding.weight.new_empty(*ids_BN.shape, embedding.weight.shape[1])
    copied(embedding.weight, ids_BN.flatten().tolist(), out_BND.data_ptr())
    return out_BND


def copied(weight: Tensor, tokens: Sequence[int], out: int) -> None:
    """Rows [N, D] of a weight [V, D] that is no more than rows in memory, copied to an address."""
    first, step = weight.data_ptr(), weight.shape[1] * weight.element_size()
    for number, token in enumerate(tokens):
        ctypes.memmove(out + number * step, first + token * step, step)


def lies(embedding: nn.Embedding) -> bool:
    """Whether an embedding is no more than rows in memory."""
    weight = embedding.weight
    hooks = embedding._forward_hooks or embedding._forward_pre_hooks
    return type(embedding) is nn.Embedding and weight.device.type == "cpu" and weight.is_contiguous() and not hooks
