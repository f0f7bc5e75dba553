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
import torch.nn.functional as F
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
    u_BJRNV = _unit_inverse(lower_BJRNM[..., known:]) @ u_BJRNV
    o_BJRNV = o_BJRNV + weights_BJRNM[..., known:] @ u_BJRNV
    o_BNHV, u_BNHV = (t.permute(0, 3, 1, 2, 4).flatten(2, 3) for t in (o_BJRNV, u_BJRNV))
    return o_BNHV, u_BNHV


def _unit_inverse(lower_NN: Tensor) -> Tensor:
    """Of unit triangular matrices [..., N, N], whose diagonals are not read: they are one by definition.

    An inverse and a product take less than half as long as solving for many columns.
    """
    one_NN = torch.eye(lower_NN.shape[-1], dtype=lower_NN.dtype, device=lower_NN.device)
    return torch.linalg.solve_triangular(lower_NN, one_NN.expand_as(lower_NN), upper=False, unitriangular=True)


def sequence(state_BHKV: Tensor, x: Inputs, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Whole sequences from a state, differentiable: outputs [B, T, H, V] and the state after them.

    Chunks of C tokens are solved all at once, X of them; only the state goes from one to the next. For that the solved u is kept
    as what it would be without a state, and what it owes to one: u = u_0 - w S.
    """
    tokens, key_heads = x.q_BNJK.shape[1:3]
    chunk = min(chunk, tokens)
    q, k, v, g, beta = (_in_chunks(t, chunk) for t in x)
    q, k = (t.permute(0, 3, 1, 2, 4)[:, :, None] for t in (q, k))  # [B, J, 1, X, C, K]
    v, g, beta = (
        heads(t, key_heads, 3).movedim((3, 4), (1, 2)) for t in (v, g, beta[..., None])
    )  # [B, J, R, X, C, ...]
    log = linear.exact(g).cumsum(-2)
    start, left, whole = (t.to(g.dtype).exp() for t in (log, log[..., -1:, :] - log, log[..., -1, :]))
    unseen_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)[..., None]
    between = (log[..., :, None, :] - log[..., None, :, :]).to(g.dtype).masked_fill(unseen_CC, float("-inf")).exp()
    lower, weights = beta * linear.scores(k, k, between), linear.scores(q, k, between)
    solved = torch.linalg.solve_triangular(
        lower, torch.cat([beta * v, beta * start * k], dim=-1), upper=False, unitriangular=True
    )
    u_0, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    reads, writes, state, outputs = start * q, (left * k).mT, heads(state_BHKV, key_heads, 1), []
    for at in range(q.shape[3]):
        u = u_0[..., at, :, :] - w[..., at, :, :] @ state
        outputs.append(reads[..., at, :, :] @ state + weights[..., at, :, :] @ u)
        state = whole[..., at, :, None] * state + writes[..., at, :, :] @ u
    o_BTHV = torch.cat(outputs, dim=-2)[..., :tokens, :].movedim(3, 1).flatten(2, 3)
    return o_BTHV, state.flatten(1, 2)


def _in_chunks(x_BT: Tensor, chunk: int) -> Tensor:
    """[B, T, ...] as [B, X, C, ...]; zeros behind the end, which neither decay nor write, fill the last chunk."""
    spare = -x_BT.shape[1] % chunk
    return F.pad(x_BT, (*(0, 0) * (x_BT.ndim - 2), 0, spare)).unflatten(1, (-1, chunk))
