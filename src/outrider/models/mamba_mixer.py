"""A Mamba-2 mixer: the layer that stands where attention would, with a state of constant size.

It knows its parameters and how to split and join what flows through; how tokens follow one another (a sequence, an unrolled
training step, nodes of a tree) is the scan's business (`scans.py`).

Shapes: B rows, N tokens, D width, H heads, P head size, I = H * P, S state size, C = I + 2 S convolved channels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.cache.factors import MixerSizes
from outrider.models.norm import Norm

TAPS = 4  # of the short convolution

Scan = Callable[["MambaMixer", Tensor, Tensor], Tensor]
"""The mixer, its convolution's inputs [B, N, C], raw step sizes [B, N, H] -> outputs of the recurrence [B, N, I]."""


class WholeScan(ABC):
    """A scan that computes everything that a mixer does, not only how tokens follow one another."""

    @abstractmethod
    def mixed(self, mixer: MambaMixer, x_BND: Tensor) -> Tensor:
        """The mixer's outputs [B, N, D]."""


class MambaMixer(nn.Module):
    """One mixer.

    Args:
        layer: where its state is kept.
    """

    def __init__(self, width: int, num_heads: int, head_size: int, state_size: int, layer: int = 0) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.state_size, self.layer = num_heads, head_size, state_size, layer
        self.inner = num_heads * head_size
        self.channels = self.inner + 2 * state_size
        self.in_proj = nn.Linear(width, self.inner + self.channels + num_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(TAPS, 1, self.channels))
        self.conv_bias = nn.Parameter(torch.zeros(self.channels))
        self.dt_bias, self.A_log = nn.Parameter(torch.empty(num_heads)), nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = Norm(self.inner)
        self.out_proj = nn.Linear(self.inner, width, bias=False)
        self._reset()

    @torch.no_grad()
    def _reset(self) -> None:
        """Mamba-2's own start: decays from a token to a thousand, spread over the heads."""
        nn.init.uniform_(self.conv_weight, -(TAPS**-0.5), TAPS**-0.5)
        self.A_log.uniform_(1.0, 16.0).log_()
        dt_H = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(dt_H + (-(-dt_H).expm1()).log())  # softplus(dt_bias) == dt

    def forward(self, x_BND: Tensor, scan: Scan | WholeScan) -> Tensor:
        """Outputs [B, N, D]."""
        if isinstance(scan, WholeScan):
            return scan.mixed(self, x_BND)
        gate, inputs, dt = self.in_proj(x_BND).split([self.inner, self.channels, self.num_heads], dim=-1)
        y_BNI = scan(self, inputs, dt).to(gate.dtype)
        out: Tensor = self.out_proj(self.norm(y_BNI * F.silu(gate)))
        return out

    def split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution's outputs [..., C] as x [..., H, P], b and c [..., S]."""
        x, b, c = F.silu(convolved).split([self.inner, self.state_size, self.state_size], dim=-1)
        return x.unflatten(-1, (self.num_heads, self.head_size)), b, c

    def step_sizes(self, raw: Tensor) -> Tensor:
        """dt [..., H], in float32 at least: small steps decide over long memories."""
        return F.softplus(raw.to(self.wide) + self.dt_bias)

    @property
    def conv(self) -> tuple[Tensor, Tensor]:
        """Weight [taps, C] and bias [C] of the convolution."""
        return self.conv_weight[:, 0], self.conv_bias

    @property
    def A(self) -> Tensor:
        """Decay rates [H], below 0."""
        return -self.A_log.to(self.wide).exp()

    @property
    def wide(self) -> torch.dtype:
        """What states and steps are computed in: float32 at least."""
        return torch.promote_types(self.A_log.dtype, torch.float32)

    def sizes(self) -> MixerSizes:
        """Of the buffers that trees need."""
        return MixerSizes(self.num_heads, self.head_size, self.state_size, self.channels, TAPS - 1, self.wide)
