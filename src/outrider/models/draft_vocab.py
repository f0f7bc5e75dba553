"""The target's vocabulary head, cut to the tokens that a drafter may propose (FR-Spec's idea).

Shapes: B rows, N nodes, D width, C draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn


class CutHead(nn.Module):
    """Rows of a vocabulary head.

    Args:
        weight_VD: the target's.
        draft_ids_C: which of its rows.
    """

    def __init__(self, weight_VD: Tensor, draft_ids_C: Tensor) -> None:
        super().__init__()
        self.vocab = weight_VD.shape[0]
        self.ids = draft_ids_C.to(weight_VD.device)
        self.linear = nn.Linear(weight_VD.shape[1], len(draft_ids_C), bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight_VD.detach()[self.ids], requires_grad=False)

    def full(self, outputs_BND: Tensor) -> Tensor:
        """Logits of the whole vocabulary [B, N, V]: minus infinity outside the draft vocabulary."""
        logits_BNC = self.linear(outputs_BND)
        logits_BNV = logits_BNC.new_full((*logits_BNC.shape[:2], self.vocab), float("-inf"))
        return logits_BNV.index_copy_(-1, self.ids, logits_BNC)
