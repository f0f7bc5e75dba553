"""Mamba-2's recurrence (state-space duality): heads of one group share what they write and read by.

    h_t = exp(A dt_t) h_{t-1} + dt_t x_t b_t^T        y_t = h_t c_t + D x_t        A < 0

The same in many forms: single steps; attention-like (`quadratic`) and in chunks for whole sequences; attention-like for the nodes
of a tree. Decays between two tokens are exponentials of differences of summed logs, masked before the exponential: ratios of
exponentials would overflow. With groups, it is the recurrence of `linear` with keys b, values dt x and log decays A dt: those
forms take trees and leave out the skip D x.

Shapes: B rows, T tokens, H heads, G groups, P head size, S state size, F or N nodes, M pending nodes, L nodes of a path,
K chunks, Q tokens of a chunk, Y known states. Forms without G have one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.mixers import linear
from outrider.mixers.chains import Plan
from outrider.mixers.shift import advance, delay

CHUNK = 64


class Inputs(NamedTuple):
    """What the recurrence takes in, over whole sequences."""

    x_BTHP: Tensor
    b_BTS: Tensor
    c_BTS: Tensor
    dt_BTH: Tensor


class Factors(NamedTuple):
    """What pending nodes leave behind: enough for what their descendants read, and for the state after any of them."""

    x_BMHP: Tensor
    b_BMS: Tensor
    dt_BHM: Tensor
    log_BHM: Tensor
    """Log decay from the committed state to after the node."""


def step(
    state_FHPS: Tensor, x_FHP: Tensor, b_FS: Tensor, c_FS: Tensor, dt_FH: Tensor, A_H: Tensor, D_H: Tensor
) -> Tensor:
    """One token of each of F nodes: outputs [F, H, P]. The states are changed in place."""
    state_FHPS.mul_((dt_FH * A_H).exp()[:, :, None, None])
    state_FHPS.addcmul_((dt_FH[..., None] * x_FHP)[..., None], b_FS[:, None, None])
    y_FHP = (state_FHPS.flatten(1, 2) @ c_FS[..., None]).view(x_FHP.shape)
    return y_FHP + D_H[:, None] * x_FHP


def quadratic(inputs: Inputs, A_H: Tensor, D_H: Tensor) -> Tensor:
    """Whole sequences from a zero state, [B, T, H, P]; work and memory grow with T * T."""
    return _within(inputs, (inputs.dt_BTH * A_H).cumsum(1)) + D_H[:, None] * inputs.x_BTHP


def _within(inputs: Inputs, log_BTH: Tensor) -> Tensor:
    """Outputs [B, T, H, P] from a zero state, without the skip; `log` is the summed log decay."""
    log_BHT, length = log_BTH.mT, log_BTH.shape[1]
    later_TT = torch.ones(length, length, dtype=torch.bool, device=log_BTH.device).triu(1)
    between_BHTT = (log_BHT[..., :, None] - log_BHT[..., None, :]).masked_fill(later_TT, float("-inf")).exp()
    scores_BTT = inputs.c_BTS @ inputs.b_BTS.mT
    weights_BHTT = between_BHTT * scores_BTT[:, None] * inputs.dt_BTH.mT[:, :, None]
    return (weights_BHTT @ inputs.x_BTHP.transpose(1, 2)).transpose(1, 2)


def chunked(
    inputs: Inputs, A_H: Tensor, D_H: Tensor, state_BHPS: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Whole sequences from a state (zero by default): outputs [B, T, H, P] and the state after them.

    Attention-like within chunks, one state handed from chunk to chunk.
    """
    rows, length = inputs.x_BTHP.shape[:2]
    # padding has dt = 0: it neither decays the state nor adds to it
    parts = Inputs(*(_chunks(t, -length % chunk, chunk) for t in inputs))
    log_KQH = (parts.dt_BTH * A_H).cumsum(1)
    left_KQH = (log_KQH[:, -1:] - log_KQH).exp() * parts.dt_BTH
    added_KHPS = torch.einsum("kqhp,kqn->khpn", left_KQH[..., None] * parts.x_BTHP, parts.b_BTS)
    added = added_KHPS.unflatten(0, (rows, -1))
    kept = log_KQH[:, -1].exp().unflatten(0, (rows, -1))[..., None, None]
    state = torch.zeros_like(added[:, 0]) if state_BHPS is None else state_BHPS
    before = []
    for k in range(added.shape[1]):
        before.append(state)
        state = kept[:, k] * state + added[:, k]
    before_KHPS = torch.stack(before, dim=1).flatten(0, 1).to(parts.c_BTS.dtype)
    carried_KQHP = torch.einsum("kqn,khpn->kqhp", parts.c_BTS, before_KHPS) * log_KQH.exp()[..., None]
    y = (_within(parts, log_KQH) + carried_KQHP).unflatten(0, (rows, -1)).flatten(1, 2)[:, :length]
    return y + D_H[:, None] * inputs.x_BTHP, state


def _chunks(x_BT: Tensor, padding: int, chunk: int) -> Tensor:
    """[B, T, ...] as [B * K, Q, ...]."""
    padded = F.pad(x_BT, (0, 0) * (x_BT.ndim - 2) + (0, padding))
    return padded.unflatten(1, (-1, chunk)).flatten(0, 1)


def unrolled(steps: Sequence[Inputs], A_H: Tensor, D_H: Tensor) -> Tensor:
    """Outputs [B, T, H, P] of training step k, given the inputs of steps 0..k.

    A token at step k lies k drafted tokens behind text that the target has seen: position t reads the state of step 0 after
    position t - k, decayed and added to by one token of each step j = 1..k, at position t - k + j.
    """
    first, last, behind = steps[0], steps[-1], len(steps) - 1
    if behind == 0:
        return chunked(first, A_H, D_H)[0]
    # what c at t reads of the state at t - k is what a c moved there would read
    moved = first._replace(c_BTS=advance(last.c_BTS, behind))
    read_BTHP = delay(chunked(moved, A_H, torch.zeros_like(D_H))[0], behind)
    y_BTHP, log_BTH = D_H[:, None] * last.x_BTHP, torch.zeros_like(last.dt_BTH)
    for back, step_inputs in enumerate(reversed(steps[1:])):
        x, b, dt = (delay(t, back) for t in (step_inputs.x_BTHP, step_inputs.b_BTS, step_inputs.dt_BTH))
        match_BT = (last.c_BTS * b).sum(-1)
        y_BTHP = y_BTHP + (match_BT[..., None] * dt * log_BTH.exp())[..., None] * x
        log_BTH = log_BTH + dt * A_H
    return y_BTHP + log_BTH.exp()[..., None] * read_BTHP


def tree(state_BHPS: Tensor, factors: Factors, c_BNS: Tensor, seen_BNM: Tensor, D_H: Tensor) -> Tensor:
    """Outputs [B, N, H, P] of the last N of M pending nodes, behind a committed state.

    Args:
        seen: which pending nodes are ancestors of a node, or itself.
    """
    new = c_BNS.shape[1]
    log_BHN = factors.log_BHM[..., -new:]
    between_BHNM = log_BHN[..., :, None] - factors.log_BHM[..., None, :]
    decay_BHNM = between_BHNM.masked_fill_(~seen_BNM[:, None], float("-inf")).exp_()
    scores_BNM = c_BNS @ factors.b_BMS.mT
    weights_BHNM = decay_BHNM.mul_(scores_BNM[:, None]).mul_(factors.dt_BHM[:, :, None])
    y_BNHP = (weights_BHNM @ factors.x_BMHP.transpose(1, 2)).transpose(1, 2)
    read_BNHP = (c_BNS @ state_BHPS.flatten(1, 2).mT).view(y_BNHP.shape)
    y_BNHP = torch.addcmul(y_BNHP, read_BNHP, log_BHN.mT.exp()[..., None])
    return y_BNHP.addcmul_(D_H[:, None].to(y_BNHP.dtype), factors.x_BMHP[:, -new:])


def after(state_HPS: Tensor, x_LHP: Tensor, b_LS: Tensor, dt_HL: Tensor, log_HL: Tensor) -> Tensor:
    """The state after a path of pending nodes, given their factors."""
    last_H1 = log_HL[:, -1:]
    left_HL = (last_H1 - log_HL).exp() * dt_HL
    added_XS = (left_HL.T[..., None] * x_LHP).flatten(1).T @ b_LS
    return last_H1.exp()[..., None] * state_HPS + added_XS.view(state_HPS.shape)


def as_linear(x_BNHP: Tensor, b_BNGS: Tensor, dt_BNH: Tensor, A_H: Tensor) -> linear.Factors:
    """The factors of nodes under `linear`."""
    return linear.Factors(b_BNGS, dt_BNH[..., None] * x_BNHP, (dt_BNH * A_H)[..., None])


def masked_groups(state_BHPS: Tensor, c_BNGS: Tensor, factors: linear.Factors, seen_BMM: Tensor) -> Tensor:
    """Outputs [B, N, H, P] of the new nodes of a tree, all at once; see `linear.masked`."""
    return linear.masked(state_BHPS.mT, c_BNGS, factors, seen_BMM)


def chains(known_YHPS: Tensor, c_BNGS: Tensor, new: linear.Factors, plan: Plan) -> Tensor:
    """Outputs [B, N, H, P] of a tree, stepped in chains."""

    def transposed(state_FHPS: Tensor, *inputs: Tensor) -> tuple[Tensor]:
        return linear.step(state_FHPS.mT, *inputs)

    (y_BNHP,) = plan.run(known_YHPS, transposed, (c_BNGS, *new))
    return y_BNHP


def after_groups_(state_HPS: Tensor, b_LGS: Tensor, u_LHP: Tensor, g_LH1: Tensor) -> Tensor:
    """The state after a path, from its nodes' factors under `linear`, in place."""
    return linear.after_(state_HPS.mT, b_LGS, u_LHP, g_LH1).mT
