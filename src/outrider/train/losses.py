"""How far a drafter's law q is from the target's p. All are means over positions, 0 for equal laws.

Shapes: R positions, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def kl(logp_RC: Tensor, logq_RC: Tensor) -> Tensor:
    """KL(p || q): covers all that the target may write."""
    return (logp_RC.exp() * (logp_RC - logq_RC)).sum(-1).mean()


def reverse_kl(logp_RC: Tensor, logq_RC: Tensor) -> Tensor:
    """KL(q || p): keeps to what the target surely writes."""
    return (logq_RC.exp() * (logq_RC - logp_RC.clamp(min=-30.0))).sum(-1).mean()


def total_variation(logp_RC: Tensor, logq_RC: Tensor) -> Tensor:
    """1 - sum min(p, q): the rejection rate of one sampled child."""
    return 0.5 * (logp_RC.exp() - logq_RC.exp()).abs().sum(-1).mean()


def acceptance(logp_RC: Tensor, logq_RC: Tensor) -> Tensor:
    """-log sum min(p, q): aimed at acceptance, with gradients that do not vanish where acceptance is low."""
    overlap = logp_RC.exp().minimum(logq_RC.exp()).sum(-1)
    return -overlap.clamp(min=1e-8).log().mean()


LOSSES: dict[str, Loss] = {"kl": kl, "reverse_kl": reverse_kl, "tv": total_variation, "acceptance": acceptance}
