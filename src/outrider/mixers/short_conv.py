"""Causal depthwise convolution over a few tokens, in front of a recurrence.

Every channel is weighted on its own: y_t = bias + sum_i weight[K - 1 - i] * x_{t - i}, with zeros before the beginning.

Shapes: B rows, T tokens, C channels, K taps, F nodes, W = K - 1 inputs of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.mixers.shift import delay


def unrolled(inputs: Sequence[Tensor], weight_KC: Tensor, bias_C: Tensor) -> Tensor:
    """Training step k over whole sequences, [B, T, C].

    Args:
        inputs: of steps 0..k, [B, T, C] each. Position t sees its own input of step k, then that of step k - 1 at t - 1, and so
            on down to step 0, whose inputs go on from there.
    """
    step, taps = len(inputs) - 1, weight_KC.shape[0]
    out = bias_C
    for back in range(taps):
        out = out + weight_KC[taps - 1 - back] * delay(inputs[max(step - back, 0)], back)
    return out


def sequence(
    x_BTC: Tensor, weight_KC: Tensor, bias_C: Tensor, window_BWC: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A whole sequence behind the inputs of a window; also the window after it."""
    width = weight_KC.shape[0] - 1
    if window_BWC is None:
        window_BWC = x_BTC.new_zeros(x_BTC.shape[0], width, x_BTC.shape[2])
    full = torch.cat([window_BWC, x_BTC], dim=1)
    return unrolled([full], weight_KC, bias_C)[:, width:], full[:, full.shape[1] - width :]


def step(window_FWC: Tensor, x_FC: Tensor, weight_KC: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of F nodes; also their windows after it."""
    full_FKC = torch.cat([window_FWC, x_FC[:, None]], dim=1)
    return gathered(full_FKC, weight_KC, bias_C), full_FKC[:, 1:]


def gathered(inputs_XKC: Tensor, weight_KC: Tensor, bias_C: Tensor) -> Tensor:
    """Tokens whose K inputs were brought together, oldest first, [..., K, C]: outputs [..., C], summed in float32 at least."""
    wide = torch.promote_types(inputs_XKC.dtype, torch.float32)
    # tap by tap over rows that lie together: a product with a transposed weight takes several times as long on a CPU
    taps, weights = inputs_XKC.to(wide).unbind(-2), weight_KC.to(wide).contiguous()
    out_XC = taps[0] * weights[0]
    for tap_XC, weight_C in zip(taps[1:], weights[1:]):
        out_XC.addcmul_(tap_XC, weight_C)
    return (out_XC + bias_C).to(inputs_XKC.dtype)
