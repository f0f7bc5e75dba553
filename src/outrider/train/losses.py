"""How far a drafter's law q is from the target's p, and the gradient of that with respect to q's logits.

Losses over a large vocabulary are bound by memory, not by arithmetic: so the vocabulary head, the softmax and the gradient are
computed together, a few rows at a time, and only the gradient with respect to the head's input is kept.

Shapes: R positions, D width, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64  # rows whose logits fit into the cache

Measure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""p [R, C] and log q [R, C] -> the loss of each row [R], and its gradient with respect to the logits of q [R, C]."""


def kl(p_RC: Tensor, logq_RC: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q): covers all that the target may write."""
    entropy = torch.special.entr(p_RC).sum(-1)
    return -(p_RC * logq_RC).sum(-1) - entropy, logq_RC.exp() - p_RC


def reverse_kl(p_RC: Tensor, logq_RC: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p): keeps to what the target surely writes."""
    q_RC = logq_RC.exp()
    ratio_RC = logq_RC - p_RC.clamp(min=1e-9).log()
    value_R = (q_RC * ratio_RC).sum(-1)
    return value_R, q_RC * (ratio_RC - value_R[:, None])


def total_variation(p_RC: Tensor, logq_RC: Tensor) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): the rejection rate of one sampled child."""
    q_RC = logq_RC.exp()
    slope_RC = 0.5 * (q_RC - p_RC).sign()
    return 0.5 * (p_RC - q_RC).abs().sum(-1), q_RC * (slope_RC - (q_RC * slope_RC).sum(-1, keepdim=True))


def acceptance(p_RC: Tensor, logq_RC: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q): aimed at acceptance, with gradients that do not vanish where acceptance is low."""
    q_RC = logq_RC.exp()
    overlap_R = p_RC.minimum(q_RC).sum(-1).clamp(min=1e-8)
    slope_RC = -(q_RC < p_RC).to(q_RC.dtype) / overlap_R[:, None]
    return -overlap_R.log(), q_RC * (slope_RC - (q_RC * slope_RC).sum(-1, keepdim=True))


LOSSES: dict[str, Measure] = {"kl": kl, "reverse_kl": reverse_kl, "tv": total_variation, "acceptance": acceptance}


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, head_CD: Tensor, p_RC: Tensor, measure: Measure) -> Tensor:
        grad_RD, total = torch.empty_like(out_RD), out_RD.new_zeros((), dtype=torch.float32)
        for at in range(0, len(out_RD), ROWS):
            rows = slice(at, at + ROWS)
            logq = F.linear(out_RD[rows].to(head_CD.dtype), head_CD).float().log_softmax(-1)
            value, slope = measure(p_RC[rows].float(), logq)
            total += value.sum()
            grad_RD[rows] = (slope.to(head_CD.dtype) @ head_CD).to(grad_RD.dtype)
        ctx.save_for_backward(grad_RD / len(out_RD))
        return total / len(out_RD)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RD,) = ctx.saved_tensors
        return grad_RD * upstream[0], None, None, None


def head_loss(out_RD: Tensor, head_CD: Tensor, p_RC: Tensor, measure: Measure) -> Tensor:
    """Mean loss of the laws that a frozen vocabulary head makes of `out_RD`; differentiable in `out_RD` only."""
    loss: Tensor = _HeadLoss.apply(out_RD, head_CD, p_RC, measure)
    return loss


def law_loss(logq_RC: Tensor, p_RC: Tensor, measure: Measure) -> Tensor:
    """Mean loss of laws that come from a trainable head; differentiable through `logq_RC`."""
    value_R, slope_RC = measure(p_RC.float(), logq_RC.detach())
    # the gradient with respect to log q that gives `slope` with respect to the logits is `slope` itself: its rows sum to 0
    surrogate = (slope_RC * logq_RC).sum(-1)
    return (value_R + surrogate - surrogate.detach()).mean()
