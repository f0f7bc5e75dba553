"""What the gated delta rule and state-space duality share: a state that decays and gains one outer product a token.

    S_i = exp(g_i) S_p + k_i u_i^T        o_i = S_i^T q_i        where p is the parent of node i

So the state of a node, and what it reads, follow from the committed state S_0 and the factors (k, u, g) of its ancestors:

    S_i = exp(G_i) S_0 + sum_j exp(G_i - G_j) k_j u_j^T        where G_i is the sum of g on the way to i

Decays between two nodes are exponentials of differences, masked before the exponential: off a path a difference may be large
and positive, and ratios of exponentials would be 0 / 0 under strong decay. Sums of logs are kept in float64 where there is any:
their differences may be small between large numbers.

Shapes: B rows, N new nodes, M pending nodes with the new ones last, L nodes of a path, J key heads, R value heads that share a
key head, H = J * R, K key size, V value size, D decays of a head: 1, or K for one per key channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """What nodes leave behind."""

    k_BMJK: Tensor
    u_BMHV: Tensor
    g_BMHD: Tensor


def heads(x_H: Tensor, key_heads: int, dim: int) -> Tensor:
    """Value heads by the key head that they share: dimension `dim` of H becomes [J, R]."""
    return x_H.unflatten(dim, (key_heads, -1))


def exact(g: Tensor) -> Tensor:
    """Logs in the dtype that they are summed in."""
    return g.to(torch.float32 if g.device.type == "mps" else torch.float64)


def decays(g_BMJRD: Tensor, seen_BMM: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """Decay since the committed state [B, J, R, N, D], and since each pending node [B, J, R, N, M, D], 0 where none is seen."""
    g_BJRMD = exact(g_BMJRD).permute(0, 2, 3, 1, 4)
    log_BJRMD = seen_BMM.to(g_BJRMD.dtype)[:, None, None] @ g_BJRMD
    new_BJRND = log_BJRMD[..., -new:, :]
    between = (new_BJRND[..., :, None, :] - log_BJRMD[..., None, :, :]).to(g_BMJRD.dtype)
    unseen = ~seen_BMM[:, None, None, -new:, :, None]
    return new_BJRND.to(g_BMJRD.dtype).exp_(), between.masked_fill_(unseen, float("-inf")).exp_()


def scores(a_BJ1NK: Tensor, k_BJ1MK: Tensor, between_BJRNMD: Tensor) -> Tensor:
    """Products of what reads with what was written by, decayed in between, [B, J, R, N, M]."""
    if between_BJRNMD.shape[-1] == 1:
        return (a_BJ1NK @ k_BJ1MK.mT) * between_BJRNMD[..., 0]
    return torch.einsum("bjrnk,bjrmk,bjrnmk->bjrnm", a_BJ1NK, k_BJ1MK, between_BJRNMD)


def by_head(x_BMJK: Tensor) -> Tensor:
    """[B, M, J, K] as [B, J, 1, M, K]."""
    return x_BMJK.transpose(1, 2)[:, :, None]


def masked(state_BHKV: Tensor, q_BNJK: Tensor, factors: Factors, seen_BMM: Tensor) -> Tensor:
    """Outputs [B, N, H, V] of the new nodes of a tree, all at once."""
    new, key_heads = q_BNJK.shape[1:3]
    state_BJRKV = heads(state_BHKV, key_heads, 1)
    start_BJRND, between = decays(heads(factors.g_BMHD, key_heads, 2), seen_BMM, new)
    q = by_head(q_BNJK)
    weights_BJRNM = scores(q, by_head(factors.k_BMJK), between)
    u_BJRMV = heads(factors.u_BMHV, key_heads, 2).permute(0, 2, 3, 1, 4)
    o_BJRNV = (start_BJRND * q) @ state_BJRKV + weights_BJRNM @ u_BJRMV
    return o_BJRNV.permute(0, 3, 1, 2, 4).flatten(2, 3)


def step(state_FHKV: Tensor, q_FJK: Tensor, k_FJK: Tensor, u_FHV: Tensor, g_FHD: Tensor) -> tuple[Tensor]:
    """One token of each of F nodes: outputs [F, H, V]. The states are changed in place."""
    key_heads = q_FJK.shape[1]
    state_FHKV.mul_(g_FHD.exp()[..., None])
    state_FJRKV = state_FHKV.unflatten(1, (key_heads, -1))
    state_FJRKV.addcmul_(k_FJK[:, :, None, :, None], heads(u_FHV, key_heads, 1)[..., None, :])
    return ((q_FJK[:, :, None, None] @ state_FJRKV)[..., 0, :].flatten(1, 2),)


def after_(state_HKV: Tensor, k_LJK: Tensor, u_LHV: Tensor, g_LHD: Tensor) -> Tensor:
    """The state after a path, from the factors of its nodes, in place."""
    log_LHD = exact(g_LHD).cumsum(0)
    left_LHD = (log_LHD[-1] - log_LHD).exp().to(g_LHD.dtype)
    kept_LHK = (heads(left_LHD, k_LJK.shape[1], 1) * k_LJK[:, :, None]).flatten(1, 2)
    state_HKV.mul_(log_LHD[-1].exp().to(g_LHD.dtype)[..., None])
    return state_HKV.baddbmm_(kept_LHK.permute(1, 2, 0), u_LHV.transpose(0, 1))
