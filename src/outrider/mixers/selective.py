"""Mamba-1's recurrence: every channel and every entry of its state decays at a rate of its own.

    h_i = exp(A dt_i) h_p + (dt_i x_i) b_i^T        y_i = h_i c_i        p the parent of node i, A < 0

Factors of a node are its step sizes, dt x and b; with tau_i the sum of dt on the way to i,

    h_i = exp(A tau_i) h_0 + sum_j exp(A (tau_i - tau_j)) w_j b_j^T        w = dt x

Decays depend on channel and state entry, so there is no product of matrices in it: the masked form works pair by pair of node and
ancestor, and stepping chains is mostly faster.

Shapes: B rows, N new nodes, M pending nodes with the new ones last, X nodes below one, F nodes stepped at once, L nodes of a
path, T tokens, D channels, S state size, Y known states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.mixers.chains import Plan
from outrider.mixers.linear import exact


class Inputs(NamedTuple):
    """What the recurrence takes in, without its skip."""

    x_BND: Tensor
    dt_BND: Tensor
    b_BNS: Tensor
    c_BNS: Tensor


class Factors(NamedTuple):
    """What nodes leave behind."""

    dt_BMD: Tensor
    w_BMD: Tensor
    b_BMS: Tensor


def factors(x: Inputs) -> Factors:
    """Of new nodes."""
    return Factors(x.dt_BND, x.dt_BND * x.x_BND, x.b_BNS)


def step(state_FDS: Tensor, dt_FD: Tensor, w_FD: Tensor, b_FS: Tensor, c_FS: Tensor, *, A_DS: Tensor) -> tuple[Tensor]:
    """One token of each of F nodes: outputs [F, D]. The states are changed in place."""
    state_FDS.mul_((dt_FD[..., None] * A_DS).exp_()).addcmul_(w_FD[..., None], b_FS[:, None])
    return ((state_FDS @ c_FS[..., None])[..., 0],)


def sequence(state_BDS: Tensor, x: Inputs, A_DS: Tensor) -> tuple[Tensor, Tensor]:
    """Whole sequences from a state, token by token: outputs [B, T, D] and the state after them."""
    state_BDS = state_BDS.clone()
    outputs: list[Tensor] = []
    for dt_BD, w_BD, b_BS, c_BS in zip(*(t.unbind(1) for t in (*factors(x), x.c_BNS))):
        outputs += step(state_BDS, dt_BD, w_BD, b_BS, c_BS, A_DS=A_DS)
    return torch.stack(outputs, dim=1), state_BDS


def chains(known_YDS: Tensor, x: Inputs, A_DS: Tensor, plan: Plan) -> Tensor:
    """Outputs [B, N, D] of a tree, stepped in chains."""

    def with_rates(state_FDS: Tensor, *inputs: Tensor) -> tuple[Tensor]:
        return step(state_FDS, *inputs, A_DS=A_DS)

    (y_BND,) = plan.run(known_YDS, with_rates, (*factors(x), x.c_BNS))
    return y_BND


def masked(state_BDS: Tensor, c_BNS: Tensor, held: Factors, A_DS: Tensor, seen_BMM: Tensor) -> Tensor:
    """Outputs [B, N, D] of the new nodes of a tree: what each pending node adds to all that see it.

    Args:
        held: factors of all pending nodes.
        seen: which pending nodes are ancestors of a node, or itself.
    """
    new = c_BNS.shape[1]
    tau_BMD = seen_BMM.to(exact(held.dt_BMD).dtype) @ exact(held.dt_BMD)
    tau_BND, seen_BNM = tau_BMD[:, -new:], seen_BMM[:, -new:]
    start_BNDS = (tau_BND.to(A_DS.dtype)[..., None] * A_DS).exp_()
    y_BND = torch.einsum("bnds,bds,bns->bnd", start_BNDS, state_BDS, c_BNS)
    for node in range(tau_BMD.shape[1]):
        below_X = seen_BNM[..., node].any(0).nonzero()[:, 0]
        since_BXD = (tau_BND[:, below_X] - tau_BMD[:, node, None]).to(A_DS.dtype)
        decay_BXDS = (since_BXD[..., None] * A_DS).masked_fill_(~seen_BNM[:, below_X, node, None, None], float("-inf"))
        match_BXS = c_BNS[:, below_X] * held.b_BMS[:, node, None]
        added_BXD = (decay_BXDS.exp_() @ match_BXS[..., None])[..., 0] * held.w_BMD[:, node, None]
        y_BND.index_add_(1, below_X, added_BXD)
    return y_BND


def after_(state_DS: Tensor, dt_LD: Tensor, w_LD: Tensor, b_LS: Tensor, A_DS: Tensor) -> Tensor:
    """The state after a path, from the factors of its nodes, in place."""
    tau_LD = exact(dt_LD).cumsum(0)
    left_LDS = ((tau_LD[-1] - tau_LD).to(A_DS.dtype)[..., None] * A_DS).exp_()
    state_DS.mul_((tau_LD[-1].to(A_DS.dtype)[..., None] * A_DS).exp_())
    return state_DS.add_(torch.einsum("lds,ld,ls->ds", left_LDS, w_LD, b_LS))
