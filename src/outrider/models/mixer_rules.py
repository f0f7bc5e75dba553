"""What stands in for transformers' convolution and recurrences while the nodes of a tree are scored.

Each takes the arguments of the function that it replaces, after the states that know the tree; what else a mixer passes (initial
states, chunk sizes, limits that its cached single step does not know either) means nothing here.

Shapes: B rows, N nodes, C convolved channels, J key heads, H value heads, K key size, V value size; for Mamba-2 G groups, P head
size, S state size; for Mamba-1 D channels, S state size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from outrider.cache.factor_states import FactorStates
from outrider.mixers import gated_delta, selective, short_conv, ssd
from outrider.mixers.rules import DELTA, DELTA_PER_CHANNEL, DUALITY, DualityInputs, SelectiveRule

CONVOLUTION = "causal_conv1d_fn"
"""What mixers call their short convolution by."""


def convolve(
    states: FactorStates,
    x_BCN: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """The short convolution, weight [C, taps]: every node behind its ancestors, [B, C, N]."""
    windows_BNKC = states.convolve(x_BCN.transpose(1, 2), weight.shape[-1])
    out_BNC = short_conv.gathered(windows_BNKC, weight.T, weight.new_zeros(()) if bias is None else bias)
    if activation is not None:
        out_BNC = ACT2FN[activation](out_BNC)
    return out_BNC.to(x_BCN.dtype).transpose(1, 2)


def gated_delta_rule(
    states: FactorStates,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule; g is [B, N, H], or [B, N, H, K] where every key channel decays on its own."""
    q, k, v, g, beta = (t.to(states.wide) for t in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = gated_delta.normalised(q), gated_delta.normalised(k)
    per_channel = g.ndim == 4
    x = gated_delta.Inputs(q * q.shape[-1] ** -0.5, k, v, g if per_channel else g[..., None], beta)
    o_BNHV = states.recur(DELTA_PER_CHANNEL if per_channel else DELTA, x)
    return o_BNHV.to(value.dtype), query.new_empty(0)


def mamba2_scan(
    states: FactorStates,
    x_BNHP: Tensor,
    dt_BNH: Tensor,
    A_H: Tensor,
    b_BNGS: Tensor,
    c_BNGS: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence."""
    if dt_bias is not None:
        dt_BNH = dt_BNH + dt_bias.to(dt_BNH.dtype)
    if dt_softplus:
        dt_BNH = F.softplus(dt_BNH)
    x, dt, A, b, c = (t.to(states.wide) for t in (x_BNHP, dt_BNH, A_H, b_BNGS, c_BNGS))
    y_BNHP = states.recur(DUALITY, DualityInputs(c, ssd.as_linear(x, b, dt, A)))
    if D is not None:
        y_BNHP = y_BNHP + D[:, None] * x
    return y_BNHP.contiguous(), x_BNHP.new_empty(0)


def mamba_scan(states: FactorStates, x_BDN: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Mamba-1's recurrence, its gate included; outputs [B, D, N]."""

    def recur(x: selective.Inputs, A_DS: Tensor) -> Tensor:
        return states.recur(SelectiveRule(A_DS), x)

    return _around_mamba(recur, states.wide, x_BDN, *args, **kwargs), x_BDN.new_empty(0)


class MambaBlock:
    """Mamba-1's recurrence over a block of tokens behind a state, which transformers' own would ignore.

    Args:
        state: [B, D, S], or [B, heads, D, S] where a layer calls it once per head, in order.
    """

    def __init__(self, state: Tensor) -> None:
        self.before = [state] if state.ndim == 3 else list(state.unbind(1))

    def __call__(self, x_BDN: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Outputs [B, D, N] and the state after the block."""
        before, after = self.before.pop(0), []

        def recur(x: selective.Inputs, A_DS: Tensor) -> Tensor:
            y_BND, state_BDS = selective.sequence(before.to(A_DS.dtype), x, A_DS)
            after.append(state_BDS)
            return y_BND

        wide = torch.promote_types(before.dtype, torch.float32)
        return _around_mamba(recur, wide, x_BDN, *args, **kwargs), after[0]


def _around_mamba(
    recur: Callable[[selective.Inputs, Tensor], Tensor],
    wide: torch.dtype,
    x_BDN: Tensor,
    dt_BDN: Tensor,
    A_DS: Tensor,
    b_BSN: Tensor,
    c_BSN: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """What Mamba-1 does before and after its recurrence: step sizes, skip and gate."""
    if delta_bias is not None:
        dt_BDN = dt_BDN + delta_bias.to(dt_BDN.dtype)[:, None]
    if delta_softplus:
        dt_BDN = F.softplus(dt_BDN)
    x, dt, b, c = (t.mT.to(wide) for t in (x_BDN, dt_BDN, b_BSN, c_BSN))
    y_BDN = recur(selective.Inputs(x, dt, b, c), A_DS.to(wide)).mT
    if D is not None:
        y_BDN = y_BDN + x_BDN * D[:, None]
    return y_BDN * F.silu(z) if z is not None else y_BDN


RECURRENCES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "gated_delta_sequence": partial(gated_delta_rule, use_qk_l2norm_in_kernel=True),  # of our own `gdn`
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba_scan,
}
"""By the name that mixers call the recurrence over a block by."""

FORGETFUL = "mamba_selective_scan"
"""The one that knows no state before its block."""
