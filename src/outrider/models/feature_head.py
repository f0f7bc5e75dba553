"""A feature head: one block that drafts from the target's own hidden states (EAGLE's idea).

The core mixes tokens: attention over all that came before; a state-space mixer, whose state has constant size; or, as a hybrid,
that mixer with attention over a short window beside it, which keeps attention's gift for copying at constant cost. The
two read the same input and their outputs are added: neither waits for the other, and the block stays one block deep.

The head reads, for each token, its embedding and a feature of the token before it: the target's hidden states at a few layers
where the target has been there, the head's own output where it has not. Training unrolls the second case (EAGLE-3's
training-time test), so that the head learns to live on its own outputs.

Embedding and vocabulary head are the target's, shared in memory; the vocabulary head is cut to the most frequent tokens.

Shapes: B rows, T or N tokens, D width, H heads, E head size, C draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.mamba_mixer import MambaMixer, Scan
from outrider.models.norm import Norm

CORES = ("attention", "ssm", "hybrid")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, H, N, E], k and v [B, G, N, E] of new tokens -> attention output [B, H, N, E]."""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a feature head.

    Args:
        width: D, the target's.
        taps: which of the target's layers are read (0 is the first layer's output).
        draft_vocab: C.
        core: one of `CORES`.
        window: tokens that a hybrid's attention sees, the own one included.
        ssm_heads, ssm_head_size, ssm_state: sizes of the state-space mixer.
    """

    width: int
    taps: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    ffn: int
    draft_vocab: int
    rope_theta: float = 10_000.0
    core: str = "attention"
    window: int = 128
    ssm_heads: int = 0
    ssm_head_size: int = 64
    ssm_state: int = 64

    def __post_init__(self) -> None:
        if self.core not in CORES:
            raise ValueError(f"core {self.core!r} is unknown; use {', '.join(CORES)}")
        if self.core != "attention" and min(self.ssm_heads, self.ssm_head_size, self.ssm_state, self.window) < 1:
            raise ValueError(f"a head of core {self.core!r} needs sizes of its mixer and a window, all above 0")

    @property
    def attention_window(self) -> int | None:
        """How far attention sees; None is everything."""
        return self.window if self.core == "hybrid" else None

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


class FeatureHead(nn.Module):
    """The block, without the target's embedding and vocabulary head."""

    draft_ids: Tensor
    """Token ids of the draft vocabulary, most frequent first, [C]."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        d, self.config = config.width, config
        self.head_size = d // config.num_heads
        self.tap_norms = nn.ModuleList(Norm(d) for _ in config.taps)
        self.fuse = nn.Linear(d * len(config.taps), d, bias=False)
        self.token_norm, self.feature_norm = Norm(d), Norm(d)
        self.join = nn.Linear(2 * d, d, bias=False)
        self.mixer_norm, self.ffn_norm = Norm(d), Norm(d)
        self.attends, self.scans = config.core != "ssm", config.core != "attention"
        if self.attends:
            self.qkv = nn.Linear(d, (config.num_heads + 2 * config.num_kv_heads) * self.head_size, bias=False)
            self.mixed = nn.Linear(config.num_heads * self.head_size, d, bias=False)
        if self.scans:
            self.ssm = MambaMixer(d, config.ssm_heads, config.ssm_head_size, config.ssm_state)
        self.up = nn.Linear(d, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, d, bias=False)
        self.out_norm = Norm(d)
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab))

    def features(self, hidden_BTF: Tensor) -> Tensor:
        """The target's tapped hidden states [B, T, taps * D] as features [B, T, D]."""
        taps = hidden_BTF.split(self.config.width, dim=-1)
        fused: Tensor = self.fuse(torch.cat([norm(tap) for norm, tap in zip(self.tap_norms, taps)], dim=-1))
        return fused

    def joined(self, embedded_BND: Tensor, features_BND: Tensor) -> Tensor:
        """What goes through the block, [B, N, D]."""
        both = torch.cat([self.token_norm(embedded_BND), self.feature_norm(features_BND)], dim=-1)
        joined: Tensor = self.join(both)
        return joined

    def forward(
        self,
        embedded_BND: Tensor,
        features_BND: Tensor,
        positions_BN: Tensor,
        attend: Attend | None = None,
        scan: Scan | None = None,
    ) -> Tensor:
        """Outputs [B, N, D], which are features for the next token and, by the target's head, logits.

        Args:
            attend: what attention does, for cores that have it.
            scan: what the state-space mixer does, for cores that have it.
        """
        return self.block(self.joined(embedded_BND, features_BND), positions_BN, attend, scan)

    def block(
        self, x_BND: Tensor, positions_BN: Tensor, attend: Attend | None = None, scan: Scan | None = None
    ) -> Tensor:
        """The same behind what goes through the block."""
        normed_BND = self.mixer_norm(x_BND)
        if self.attends:
            assert attend is not None
            x_BND = x_BND + self.mixed(self._attention(normed_BND, positions_BN, attend))
        if self.scans:
            assert scan is not None
            x_BND = x_BND + self.ssm(normed_BND, scan)
        gate, value = self.up(self.ffn_norm(x_BND)).chunk(2, dim=-1)
        x_BND = x_BND + self.down(F.silu(gate) * value)
        out: Tensor = self.out_norm(x_BND)
        return out

    def _attention(self, x_BND: Tensor, positions_BN: Tensor, attend: Attend) -> Tensor:
        heads, groups, size = self.config.num_heads, self.config.num_kv_heads, self.head_size
        batch, new, _ = x_BND.shape
        qkv = self.qkv(x_BND).view(batch, new, heads + 2 * groups, size).transpose(1, 2)
        q, k, v = qkv.split([heads, groups, groups], dim=1)
        cos, sin = rotary(positions_BN, size, self.config.rope_theta, x_BND.dtype)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return out.transpose(1, 2).reshape(batch, new, heads * size)


def rotary(positions_BN: Tensor, size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, N, size / 2] of rotary positions."""
    angles = positions_BN[:, None, :, None] * _frequencies(size, theta, positions_BN.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@functools.lru_cache(maxsize=8)
def _frequencies(size: int, theta: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for training as well
        return theta ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)


def rotate(x_BHNE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + E/2) by their angles."""
    first, second = x_BHNE.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def unrolled_attention(keys: list[Tensor], values: list[Tensor], window: int | None = None) -> Attend:
    """Attention of training step k = len(keys) over whole sequences.

    A token at step k lies k drafted tokens behind text that the target has seen. At position t it attends to step 0 at positions
    up to t - k, and to one token of each step j = 1..k at position t - k + j. The new keys and values are appended to the
    lists for the steps to come. A window must be wider than the steps.
    """

    def attend(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor) -> Tensor:
        repeat = q_BHTE.shape[1] // k_BGTE.shape[1]
        keys.append(k_BGTE.repeat_interleave(repeat, dim=1))
        values.append(v_BGTE.repeat_interleave(repeat, dim=1))
        step, length = len(keys) - 1, q_BHTE.shape[2]
        if step == 0 and window is None:
            return F.scaled_dot_product_attention(q_BHTE, keys[0], values[0], is_causal=True)
        q_BHTE = q_BHTE * q_BHTE.shape[-1] ** -0.5
        position = torch.arange(length, device=q_BHTE.device)
        seen_TT = position[:, None] - step >= position
        if window is not None:
            assert step < window
            seen_TT &= position[:, None] - position < window
        known = q_BHTE @ keys[0].mT
        scores = [known.masked_fill(~seen_TT, torch.finfo(known.dtype).min)]
        shifted = [(_delay(keys[j], step - j), _delay(values[j], step - j)) for j in range(1, step + 1)]
        scores += [(q_BHTE * k).sum(-1, keepdim=True) for k, _ in shifted]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        out = weights[..., :length] @ values[0]
        for place, (_, v) in enumerate(shifted):
            out = out + weights[..., length + place, None] * v
        return out

    return attend


def _delay(x_BHTE: Tensor, steps: int) -> Tensor:
    """Shift along time: position t gets what was at t - steps (zeros before the beginning)."""
    return F.pad(x_BHTE, (0, 0, steps, 0))[:, :, : x_BHTE.shape[2]] if steps else x_BHTE
