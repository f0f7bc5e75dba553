"""The target's vocabulary head, cut to the tokens that a drafter may propose (FR-Spec's idea).

Models with such a head have an attribute `draft_ids` and give logits over the draft vocabulary only: choosing among a quarter of
the tokens takes a quarter of the time.

Shapes: F or N nodes, D width, C draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CutHead(nn.Module):
    """Rows of a vocabulary head, which give logits [..., C].

    Args:
        weight_VD: the target's.
        draft_ids_C: which of its rows.
    """

    def __init__(self, weight_VD: Tensor, draft_ids_C: Tensor) -> None:
        super().__init__()
        self.ids = draft_ids_C.to(weight_VD.device)
        self.linear = nn.Linear(weight_VD.shape[1], len(draft_ids_C), bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight_VD.detach()[self.ids], requires_grad=False)

    def forward(self, outputs: Tensor) -> Tensor:
        """Logits of the draft vocabulary."""
        logits: Tensor = self.linear(outputs)
        return logits


def widen(logits_FC: Tensor, draft_ids_C: Tensor | None, vocab: int) -> Tensor:
    """Logits of a whole vocabulary [F, V]: minus infinity outside the draft vocabulary (None: the first C tokens)."""
    if draft_ids_C is None:
        return nn.functional.pad(logits_FC, (0, vocab - logits_FC.shape[-1]), value=float("-inf"))
    logits_FV = torch.full((len(logits_FC), vocab), float("-inf"), dtype=logits_FC.dtype, device=logits_FC.device)
    return logits_FV.index_copy_(-1, draft_ids_C, logits_FC)
