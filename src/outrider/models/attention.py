"""Attention of a few nodes, and of a prompt, over grouped keys and values that are never copied.

Shapes: B rows, N tokens, H query heads, G key-value heads, R = H / G, E head size, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Rows are taken in blocks. Fewer of them, in all or in the last block, go through another matrix kernel, whose sums differ in the
# last bit: then one token scored alone and the same token scored in a tree would not always agree.
FEWEST_ROWS = 4
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""q [B, N, H, E], keys and values [B, G, S, E], scale -> [B, N, ..., E] with heads in order."""


def folded(mask_B1NS: Tensor, repeat: int) -> Attend:
    """Attention of a few nodes: the heads of a group become rows, so that no key is copied, and there are
    `FEWEST_ROWS` of them or a multiple."""
    mask_B1RS = mask_B1NS.repeat(1, 1, repeat, 1)
    mask_B1RS = F.pad(mask_B1RS, (0, 0, 0, -mask_B1RS.shape[2] % FEWEST_ROWS))

    def attend(q_BNHE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, scale: float) -> Tensor:
        batch, new, _, size = q_BNHE.shape
        groups = k_BGSE.shape[1]
        q = q_BNHE.reshape(batch, new, groups, repeat, size).permute(0, 2, 3, 1, 4)
        q = q.reshape(batch, groups, repeat * new, size)
        if (spare := mask_B1RS.shape[2] - repeat * new) > 0:
            q = F.pad(q, (0, 0, 0, spare))
        out = F.scaled_dot_product_attention(q, k_BGSE, v_BGSE, attn_mask=mask_B1RS, scale=scale)
        return out[:, :, : repeat * new].unflatten(2, (repeat, new)).permute(0, 3, 1, 2, 4)

    return attend


def seen_in_prompt(new: int, start: int, window: int | None) -> np.ndarray:
    """Which slots each of `new` prompt tokens behind `start` others sees, bool [N, S]."""
    back_NS = np.arange(start, start + new)[:, None] - np.arange(start + new)
    return (back_NS >= 0) & (back_NS < (window or start + new))


def causal(new: int, start: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Attend:
    """Attention of `new` prompt tokens behind `start` others."""
    mask: Tensor | None = None
    if start or (window is not None and start + new > window):
        mask = torch.full((new, start + new), torch.finfo(dtype).min, dtype=dtype, device=device)
        mask.masked_fill_(torch.from_numpy(seen_in_prompt(new, start, window)).to(device), 0.0)

    def attend(q_BNHE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, scale: float) -> Tensor:
        q = q_BNHE.transpose(1, 2)
        options: Any = {"is_causal": True} if mask is None else {"attn_mask": mask}
        out = F.scaled_dot_product_attention(q, k_BGSE, v_BGSE, scale=scale, enable_gqa=True, **options)
        return out.transpose(1, 2)

    return attend
