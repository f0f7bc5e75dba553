"""How far a drafter's law q is from the target's p, and the gradient of that with respect to q's logits.

Losses over a large vocabulary are bound by memory, not by arithmetic: so the vocabulary head, the softmax and the gradient are
computed together, a few rows at a time, and only the gradient with respect to the head's input is kept.

Shapes: K unrolled steps, R positions, D width, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, MANY_ROWS = 64, 2048  # rows whose logits fit into a CPU's cache, and rows that keep other devices busy

Measure = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""p, log p and log q, each [R, C] -> the loss of each row [R], and its gradient with respect to the logits of q [R, C]."""

Laws = Callable[[slice], Tensor]
"""Rows of the written positions -> the target's laws there, log probabilities [R, C]."""


def kl(p_RC: Tensor, logp_RC: Tensor, logq_RC: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q): covers all that the target may write."""
    return torch.linalg.vecdot(p_RC, logp_RC - logq_RC), logq_RC.exp() - p_RC


def reverse_kl(p_RC: Tensor, logp_RC: Tensor, logq_RC: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p): keeps to what the target surely writes."""
    q_RC, ratio_RC = logq_RC.exp(), logq_RC - logp_RC
    value_R = (q_RC * ratio_RC).sum(-1)
    return value_R, q_RC * (ratio_RC - value_R[:, None])


def total_variation(p_RC: Tensor, logp_RC: Tensor, logq_RC: Tensor) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): the rejection rate of one sampled child."""
    q_RC = logq_RC.exp()
    slope_RC = 0.5 * (q_RC - p_RC).sign()
    return 0.5 * (p_RC - q_RC).abs().sum(-1), q_RC * (slope_RC - (q_RC * slope_RC).sum(-1, keepdim=True))


def acceptance(p_RC: Tensor, logp_RC: Tensor, logq_RC: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q): aimed at acceptance, with gradients that do not vanish where acceptance is low."""
    q_RC = logq_RC.exp()
    overlap_R = p_RC.minimum(q_RC).sum(-1).clamp(min=1e-8)
    slope_RC = -(q_RC < p_RC).to(q_RC.dtype) / overlap_R[:, None]
    return -overlap_R.log(), q_RC * (slope_RC - (q_RC * slope_RC).sum(-1, keepdim=True))


LOSSES: dict[str, Measure] = {"kl": kl, "reverse_kl": reverse_kl, "tv": total_variation, "acceptance": acceptance}


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outs_KRD: Tensor, head_CD: Tensor, laws: Laws, measure: Measure) -> Tensor:
        grads_KRD, totals_K = torch.empty_like(outs_KRD), torch.zeros(len(outs_KRD), device=outs_KRD.device)
        count, step_rows = outs_KRD.shape[1], ROWS if outs_KRD.device.type == "cpu" else MANY_ROWS
        for at in range(0, count, step_rows):
            rows = slice(at, at + step_rows)
            logp_RC = laws(rows)
            p_RC = logp_RC.exp()
            for step, out_RD in enumerate(outs_KRD[:, rows]):
                logq_RC = F.linear(out_RD.to(head_CD.dtype), head_CD).float().log_softmax(-1)
                value_R, slope_RC = measure(p_RC, logp_RC, logq_RC)
                totals_K[step] += value_R.sum()
                grads_KRD[step, rows] = (slope_RC.to(head_CD.dtype) @ head_CD).to(grads_KRD.dtype)
        ctx.save_for_backward(grads_KRD.div_(count))
        return totals_K / count

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grads_KRD,) = ctx.saved_tensors
        return grads_KRD * upstream[0][:, None, None].to(grads_KRD.dtype), None, None, None


def head_loss(outs_KRD: Tensor, head_CD: Tensor, laws: Laws, measure: Measure) -> Tensor:
    """Mean losses [K] of the laws that a frozen vocabulary head makes of the outputs of K steps, differentiable in those only."""
    losses: Tensor = _HeadLoss.apply(outs_KRD, head_CD, laws, measure)
    return losses
