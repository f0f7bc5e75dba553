"""Attention whose result has the same bits wherever a token lies: alone, in a chain, or on a branch of a tree.

Floating point sums depend on their order. Ordinary tree attention adds up keys in the order of slots, and the slots of a branch
are not side by side, so in half precision a token scored in a tree differs in the last bit from the same token scored alone. Here
every token at position t sees its keys in two parts that follow from t alone: the first b(t) positions, which are committed in
any round, in one call of exactly that width, and the last `LEAST_TAIL` to `TAIL` positions, gathered in the order of its own
path. The two are joined by their log-sum-exps, as in flash attention.

Shapes: B rows, N nodes, H query heads, G key-value heads, R = H / G, E head size, S slots, T tail positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.attention import FEWEST_ROWS, Attend

STEP = 16  # borders between the two parts
LEAST_TAIL = 16  # a tree may be this deep, its root included, and the first part is committed still
TAIL = STEP + LEAST_TAIL


@dataclass(frozen=True)
class _Group:
    """Nodes of one row that share a border."""

    row: int
    nodes: Tensor
    border: int
    slots: Tensor  # of their tails, n * T
    mask: Tensor  # [n, 1, 1, T]


def path_ordered(visible_BNS: np.ndarray, repeat: int, dtype: torch.dtype) -> Attend:
    """Attention of tree nodes, bit for bit that of the same tokens alone.

    Args:
        visible_BNS: which slots each node sees; an ancestor's slot comes before its descendants'.
        repeat: R.

    Raises:
        ValueError: for a tree deeper than `LEAST_TAIL`.
    """
    groups = [group for row, visible_NS in enumerate(visible_BNS) for group in _groups(row, visible_NS, dtype)]

    def attend(q_BNHE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, scale: float) -> Tensor:
        q_BNGRE = q_BNHE.unflatten(2, (k_BGSE.shape[1], repeat))
        if len(groups) == 1:
            return _attend(q_BNGRE[0], k_BGSE[0], v_BGSE[0], groups[0], scale)[None]
        out_BNGRE = torch.empty_like(q_BNGRE)
        for group in groups:
            rows = q_BNGRE[group.row, group.nodes]
            out_BNGRE[group.row, group.nodes] = _attend(rows, k_BGSE[group.row], v_BGSE[group.row], group, scale)
        return out_BNGRE

    return attend


def _groups(row: int, visible_NS: np.ndarray, dtype: torch.dtype) -> list[_Group]:
    """The nodes of a row by border."""
    seen_N = visible_NS.sum(1)
    borders_N = np.maximum(seen_N - LEAST_TAIL, 0) // STEP * STEP
    groups = []
    for border in np.unique(borders_N):
        nodes = np.flatnonzero(borders_N == border)
        if not visible_NS[nodes, :border].all():
            raise ValueError(f"a tree of {LEAST_TAIL} levels or more cannot be scored exactly; use a flatter shape")
        slots_NT = np.zeros((len(nodes), TAIL), dtype=np.int64)
        mask_NT = np.full((len(nodes), TAIL), float(torch.finfo(dtype).min), dtype=np.float32)
        for place, node in enumerate(nodes):
            path = border + np.flatnonzero(visible_NS[node, border:])
            slots_NT[place, : len(path)], mask_NT[place, : len(path)] = path, 0.0
        mask = torch.from_numpy(mask_NT).to(dtype)[:, None, None]
        groups.append(_Group(row, torch.from_numpy(nodes), int(border), torch.from_numpy(slots_NT).view(-1), mask))
    return groups


def _attend(q_nGRE: Tensor, k_GSE: Tensor, v_GSE: Tensor, group: _Group, scale: float) -> Tensor:
    nodes, kv, repeat, size = q_nGRE.shape
    k, v = (part.index_select(1, group.slots).view(kv, nodes, TAIL, size).transpose(0, 1) for part in (k_GSE, v_GSE))
    last, weight = (part[:, :, :repeat] for part in _flash(q_nGRE, k, v, group.mask, scale))
    if not group.border:
        return last
    rows = q_nGRE.transpose(0, 1).reshape(1, kv, nodes * repeat, size)
    first, heavy = _flash(rows, k_GSE[None, :, : group.border], v_GSE[None, :, : group.border], None, scale)
    first, heavy = (
        part[0, :, : nodes * repeat].unflatten(1, (nodes, repeat)).transpose(0, 1) for part in (first, heavy)
    )
    # Elementwise kernels treat what is left over behind their last whole vector in another way, and may round a product and a sum
    # once or twice: shares are made in whole vectors, products and sums apart.
    share = torch.sigmoid((heavy - weight)[..., None].repeat(1, 1, 1, size))
    return (first * share + last * (1.0 - share)).to(last.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of what the weights were divided by.

    The kernel takes rows in blocks; a last block of fewer than `FEWEST_ROWS` would be summed in another order.
    """
    q = F.pad(q, (0, 0, 0, -q.shape[2] % FEWEST_ROWS))
    found: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return found[0], found[1]
