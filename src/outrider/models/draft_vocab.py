"""The target's vocabulary head, cut to the tokens that a drafter may propose (FR-Spec's idea).

Models with such a head have an attribute `draft_ids` and give logits over the draft vocabulary only: choosing among a quarter of
the tokens takes a quarter of the time. Names and rare words that a text has used come back in it: they join the draft vocabulary
of that text.

Shapes: B rows, F or N nodes, D width, C draft vocabulary, E tokens that joined it, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.models.resident import release

MOST_JOINED = 1024  # tokens of a text that join its draft vocabulary


class CutHead(nn.Module):
    """Rows of a vocabulary head, which give logits [..., C].

    Args:
        weight_VD: the target's.
        draft_ids_C: which of its rows.
    """

    def __init__(self, weight_VD: Tensor, draft_ids_C: Tensor) -> None:
        super().__init__()
        self.ids, self.whole_VD = draft_ids_C.to(weight_VD.device), weight_VD.detach()
        self.known = frozenset(draft_ids_C.tolist())
        self.linear = nn.Linear(weight_VD.shape[1], len(draft_ids_C), bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight_VD.detach()[self.ids], requires_grad=False)
        release(weight_VD)  # most rows were not in memory: the target has its head packed

    def forward(self, outputs: Tensor) -> Tensor:
        """Logits of the draft vocabulary."""
        logits: Tensor = self.linear(outputs)
        return logits


class TextVocabulary:
    """The draft vocabularies of B texts: what the head was cut to, and what each text has used beyond."""

    def __init__(self, cut: CutHead, batch: int) -> None:
        self.cut = cut
        self.joined: list[dict[int, None]] = [{} for _ in range(batch)]
        self._rows_BED: Tensor | None = None

    def follow(self, tokens: Sequence[Sequence[int]]) -> None:
        """Take in what each text holds."""
        for joined, row in zip(self.joined, tokens):
            new = dict.fromkeys(token for token in row if token not in self.cut.known and token not in joined)
            if new and len(joined) < MOST_JOINED:
                joined.update(new)
                self._rows_BED = None

    def ids(self, row: int) -> Tensor:
        """Token ids of a row's logits, [C + E]."""
        joined = self.joined[row]
        if not joined:
            return self.cut.ids
        return torch.cat([self.cut.ids, torch.tensor(list(joined), device=self.cut.ids.device)])

    def logits(self, outputs_BND: Tensor) -> Tensor:
        """Logits [B, N, C + E], E that of the row that has most; a row's own come first."""
        logits_BNC: Tensor = self.cut(outputs_BND)
        if not any(self.joined):
            return logits_BNC
        if self._rows_BED is None:
            places = [torch.tensor(list(joined), dtype=torch.long) for joined in self.joined]
            rows_BE = nn.utils.rnn.pad_sequence(places, batch_first=True).to(self.cut.whole_VD.device)
            self._rows_BED = self.cut.whole_VD[rows_BE]
        return torch.cat([logits_BNC, outputs_BND @ self._rows_BED.mT], dim=-1)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.joined, self._rows_BED = [self.joined[row] for row in rows], None


def widen(logits_FC: Tensor, draft_ids_C: Tensor | None, vocab: int) -> Tensor:
    """Logits of a whole vocabulary [F, V]: minus infinity outside the draft vocabulary (None: the first C tokens)."""
    if draft_ids_C is None:
        return nn.functional.pad(logits_FC, (0, vocab - logits_FC.shape[-1]), value=float("-inf"))
    logits_FV = torch.full((len(logits_FC), vocab), float("-inf"), dtype=logits_FC.dtype, device=logits_FC.device)
    return logits_FV.index_copy_(-1, draft_ids_C, logits_FC)
