"""The attention layers that flash-linear-attention's hybrids keep among their recurrent ones, named as there.

Shapes: B rows, T tokens, D width, H query heads, G key-value heads, E head size, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.attention import folded, seen_in_prompt

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [B or 1, 1, T, E]."""
OPTIONS = {"layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"}


def check_attention(attn: dict[str, Any], layers: int, width: int) -> None:
    """Make sure that a config's `attn` can be meant here.

    Raises:
        ValueError: for options that are not known, layers that are not there, or sizes that do not fit.
    """
    if unknown := {name for name, value in attn.items() if name not in OPTIONS and value}:
        raise ValueError(
            f"This Gated DeltaNet has attention layers with {', '.join(sorted(unknown))}, which is not supported: use a "
            "checkpoint without."
        )
    heads: Any = attn.get("num_heads")
    window, theta, chosen = (attn.get(name) for name in ("window_size", "rope_theta", "layers"))
    kv_heads: Any = attn.get("num_kv_heads") or heads
    counts = all(isinstance(count, int) and count > 0 for count in (heads, kv_heads, 1 if window is None else window))
    for wrong, what in (
        (
            not isinstance(chosen, list | tuple) or not set(chosen) <= set(range(layers)),
            f"layers among 0 to {layers - 1}",
        ),
        (not counts, "num_heads, num_kv_heads and window_size above 0"),
        (
            counts and (heads % kv_heads or width % (2 * heads)),
            f"heads of even size that share keys evenly in {width} channels",
        ),
        (theta is not None and not theta > 0, "a rope_theta above 0"),
    ):
        if wrong:
            raise ValueError(f"attn must name {what}; its config has {attn}.")


class Attention(nn.Module):
    """Softmax attention with rotated queries and keys.

    Args:
        attn: `layers`, `num_heads`, and what differs from one key-value head a head, no bias, no window, rotations of 10,000.
    """

    def __init__(self, width: int, attn: dict[str, Any], layer_idx: int) -> None:
        super().__init__()
        heads = attn["num_heads"]
        kv_heads, self.layer_idx, self.size = attn.get("num_kv_heads") or heads, layer_idx, width // heads
        self.window: int | None = attn.get("window_size")
        self.attn = attn
        self.repeat = heads // kv_heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, count * self.size, bias=bool(attn.get("qkv_bias")))
            for count in (heads, kv_heads, kv_heads)
        )
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Outputs [B, T, D].

        Args:
            attention_mask: [B, 1, T, S] to be added to scores, or [B, S] with 0 at padding in front of a row.
            rotation: of the tokens' positions; None where these begin at 0.
        """
        q, k, v = (p(hidden_states).unflatten(-1, (-1, self.size)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if rotation is None:
            positions_1T = torch.arange(q.shape[1], device=q.device)[None]
            rotation = rotations(positions_1T, hidden_states.shape[-1], self.attn, q.dtype)
        q_BHTE, k_BGTE = (rotated(x.transpose(1, 2), rotation) for x in (q, k))
        k_BGSE, v_BGSE = k_BGTE, v.transpose(1, 2)
        start = 0
        if cache is not None:
            start = cache.get_seq_length(self.layer_idx)
            k_BGSE, v_BGSE = cache.update(k_BGSE, v_BGSE, self.layer_idx)
        if attention_mask is not None and attention_mask.ndim == 4:
            attend = folded(attention_mask.to(q_BHTE.dtype), self.repeat)
            out_BTHE = attend(q_BHTE.transpose(1, 2), k_BGSE, v_BGSE, self.size**-0.5)
        else:
            options = self._visible(attention_mask, q_BHTE, start, k_BGSE.shape[2])
            out = F.scaled_dot_product_attention(q_BHTE, k_BGSE, v_BGSE, enable_gqa=self.repeat > 1, **options)
            out_BTHE = out.transpose(1, 2)
        projected: Tensor = self.o_proj(out_BTHE.flatten(2))
        return projected

    def _visible(self, mask: Tensor | None, q_BHTE: Tensor, start: int, slots: int) -> dict[str, Any]:
        new = q_BHTE.shape[2]
        if mask is None and not start and (self.window is None or new <= self.window):
            return {"is_causal": new > 1}
        # a cache of transformers drops what no window reaches: its slots are the last ones
        seen = torch.from_numpy(seen_in_prompt(new, start, self.window))[:, -slots:].to(q_BHTE.device)
        if mask is not None:
            seen = seen & (mask[:, None, None, -slots:] != 0)
            seen = seen | ~seen.any(-1, keepdim=True)  # padding sees everything: it must see something
        return {"attn_mask": seen}


def rotations(positions_BT: Tensor, width: int, attn: dict[str, Any], dtype: torch.dtype) -> Rotation:
    """Of all attention layers at these positions."""
    half = width // attn["num_heads"] // 2
    wide = torch.promote_types(dtype, torch.float32)
    rates = float(attn.get("rope_theta") or 10000.0) ** -(
        torch.arange(half, device=positions_BT.device, dtype=wide) / half
    )
    angles_B1TE = (positions_BT[:, None, :, None].to(wide) * rates).repeat(1, 1, 1, 2)
    return angles_B1TE.cos().to(dtype), angles_B1TE.sin().to(dtype)


def rotated(x_BHTE: Tensor, rotation: Rotation) -> Tensor:
    """Rotary position embedding: the first half of a head's channels pairs with the second."""
    half, (cos_B1TE, sin_B1TE) = x_BHTE.shape[-1] // 2, rotation
    turned_BHTE = torch.cat([-x_BHTE[..., half:], x_BHTE[..., :half]], -1)
    return x_BHTE * cos_B1TE + turned_BHTE * sin_B1TE
