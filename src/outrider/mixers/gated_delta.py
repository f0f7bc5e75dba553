"""The gated delta rule: a state that decays, and whose entry for a key is moved towards a value instead of added to.

    S_i = exp(g_i) S_p + k_i u_i^T        u_i = b_i (v_i - (exp(g_i) S_p)^T k_i)        o_i = S_i^T q_i

where p is the parent of node i. With u, the corrected value, the state is that of `linear`, and so are factors and commits. On a
tree u of all nodes solves one unit triangular system, whose matrix holds a node's ancestors only; a mask on the outputs alone
would let siblings into each other's u.

Shapes: B rows, N new nodes, M pending nodes with the new ones last, T tokens, F nodes stepped at once, L nodes of a path, J key
heads, R value heads that share a key head, H = J * R, K key size, V value size, D decays of a head: 1, or K for one per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.mixers import linear
from outrider.mixers.chains import Plan
from outrider.mixers.linear import by_head, heads

CHUNK = 64


class Inputs(NamedTuple):
    """What the rule takes in. Queries and keys are normalised, queries are scaled."""

    q_BNJK: Tensor
    k_BNJK: Tensor
    v_BNHV: Tensor
    g_BNHD: Tensor
    """Log decay, at most 0."""
    beta_BNH: Tensor


def normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Vectors of length 1 along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def step(
    state_FHKV: Tensor, q_FJK: Tensor, k_FJK: Tensor, v_FHV: Tensor, g_FHD: Tensor, beta_FH: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of F nodes: outputs and corrected values [F, H, V]. The states are changed in place."""
    key_heads = q_FJK.shape[1]
    state_FHKV.mul_(g_FHD.exp()[..., None])
    state_FJRKV = state_FHKV.unflatten(1, (key_heads, -1))
    known_FHV = (k_FJK[:, :, None, None] @ state_FJRKV)[..., 0, :].flatten(1, 2)
    u_FHV = beta_FH[..., None] * (v_FHV - known_FHV)
    state_FJRKV.addcmul_(k_FJK[:, :, None, :, None], heads(u_FHV, key_heads, 1)[..., None, :])
    return (q_FJK[:, :, None, None] @ state_FJRKV)[..., 0, :].flatten(1, 2), u_FHV


def chains(known_YHKV: Tensor, x: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """Outputs and corrected values [B, N, H, V] of a tree, stepped in chains."""
    o_BNHV, u_BNHV = plan.run(known_YHKV, step, x)
    return o_BNHV, u_BNHV


def masked(state_BHKV: Tensor, x: Inputs, factors: linear.Factors, seen_BMM: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and corrected values [B, N, H, V] of the new nodes of a tree, all at once.

    Args:
        factors: of all pending nodes; u of the new ones is not read.
        seen: which pending nodes are ancestors of a node, or itself.
    """
    new, key_heads = x.q_BNJK.shape[1:3]
    known = factors.k_BMJK.shape[1] - new
    start_BJRND, between = linear.decays(heads(factors.g_BMHD, key_heads, 2), seen_BMM, new)
    q, k, all_k = by_head(x.q_BNJK), by_head(x.k_BNJK), by_head(factors.k_BMJK)
    read_BJRXV = torch.cat([start_BJRND * k, start_BJRND * q], dim=-2) @ heads(state_BHKV, key_heads, 1)
    beta_BJRN1 = heads(x.beta_BNH, key_heads, 2).permute(0, 2, 3, 1)[..., None]
    lower_BJRNM = beta_BJRN1 * linear.scores(k, all_k, between)
    v_BJRNV = heads(x.v_BNHV, key_heads, 2).permute(0, 2, 3, 1, 4)
    u_BJRNV = beta_BJRN1 * (v_BJRNV - read_BJRXV[..., :new, :])
    weights_BJRNM = linear.scores(q, all_k, between)
    o_BJRNV = read_BJRXV[..., new:, :]
    if known:
        earlier_BJRMV = heads(factors.u_BMHV[:, :known], key_heads, 2).permute(0, 2, 3, 1, 4)
        u_BJRNV = u_BJRNV - lower_BJRNM[..., :known] @ earlier_BJRMV
        o_BJRNV = o_BJRNV + weights_BJRNM[..., :known] @ earlier_BJRMV
    # the diagonal is not read: it is one by definition
    u_BJRNV = torch.linalg.solve_triangular(lower_BJRNM[..., known:], u_BJRNV, upper=False, unitriangular=True)
    o_BJRNV = o_BJRNV + weights_BJRNM[..., known:] @ u_BJRNV
    o_BNHV, u_BNHV = (t.permute(0, 3, 1, 2, 4).flatten(2, 3) for t in (o_BJRNV, u_BJRNV))
    return o_BNHV, u_BNHV


def sequence(state_BHKV: Tensor, x: Inputs, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Whole sequences from a state, chunk by chunk: outputs [B, T, H, V] and the state after them."""
    outputs = []
    for at in range(0, x.q_BNJK.shape[1], chunk):
        part = Inputs(*(t[:, at : at + chunk] for t in x))
        tokens = part.q_BNJK.shape[1]
        factors = linear.Factors(part.k_BNJK, part.v_BNHV, part.g_BNHD)
        seen_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=state_BHKV.device).tril()
        o_BTHV, u_BTHV = masked(state_BHKV, part, factors, seen_TT.expand(len(state_BHKV), -1, -1))
        outputs.append(o_BTHV)
        rows = zip(state_BHKV, part.k_BNJK, u_BTHV, part.g_BNHD)
        state_BHKV = torch.stack([linear.after(*row) for row in rows])
    return torch.cat(outputs, dim=1), state_BHKV
