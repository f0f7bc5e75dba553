"""The target's vocabulary head, cut to the tokens that a drafter may propose (FR-Spec's idea).

Models with such a head have an attribute `draft_ids` and give logits over the draft vocabulary only: choosing among a quarter of
the tokens takes a quarter of the time. Names and rare words that a text has used come back in it: they join the draft vocabulary
of that text.

Shapes: B rows, F or N nodes, D width, C draft vocabulary, E tokens that joined it, V vocabulary.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.models.inference import inference
from outrider.models.packed import Product
from outrider.models.protocol import Rows
from outrider.models.resident import release
from outrider.native.linear import RowProduct

ROWS = 4096  # of a vocabulary head that are read together
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
        self.linear.weight = nn.Parameter(_rows(self.whole_VD, self.ids), requires_grad=False)
        self.product, self.tokens = Product(self.linear, rounds=True), self.ids.cpu().numpy()

    def forward(self, outputs: Tensor) -> Tensor:
        """Logits of the draft vocabulary."""
        return self.product(outputs)


def _rows(whole_VD: Tensor, ids_C: Tensor) -> Tensor:
    """A copy of some rows, read part after part: the target has its head laid out, so most of them were not in memory."""
    if ids_C.numel() and not 0 <= int(ids_C.min()) <= int(ids_C.max()) < len(whole_VD):
        raise ValueError(
            f"a drafter's vocabulary names tokens that are not among the target's {len(whole_VD)}: it is damaged; fetch or train "
            "it again"
        )
    found_CD = whole_VD.new_empty(len(ids_C), whole_VD.shape[1])
    for start in range(0, len(whole_VD), ROWS):
        places = ((ids_C >= start) & (ids_C < start + ROWS)).nonzero()[:, 0]
        found_CD[places] = whole_VD[ids_C[places]]
        release(whole_VD[start : start + ROWS])
    return found_CD


class TextVocabulary:
    """The draft vocabularies of B texts: what the head was cut to, and what each text has used beyond."""

    def __init__(self, cut: CutHead, batch: int) -> None:
        self.cut = cut
        self.joined: list[dict[int, None]] = [{} for _ in range(batch)]
        self._forget()

    def _forget(self) -> None:
        self._more: _Joined | RowProduct | None = None
        self._ids: dict[int, Tensor] = {}
        self._tokens: dict[int, np.ndarray] = {}

    def follow(self, tokens: Sequence[Sequence[int]]) -> None:
        """Take in what each text holds."""
        for joined, row in zip(self.joined, tokens):
            new = dict.fromkeys(token for token in row if token not in self.cut.known and token not in joined)
            if room := dict.fromkeys(itertools.islice(new, max(0, MOST_JOINED - len(joined)))):
                joined.update(room)
                self._forget()

    def ids(self, row: int) -> Tensor:
        """Token ids of a row's logits, [C + E]."""
        joined = self.joined[row]
        if not joined:
            return self.cut.ids
        if row not in self._ids:
            self._ids[row] = torch.cat([self.cut.ids, torch.tensor(list(joined), device=self.cut.ids.device)])
        return self._ids[row]

    def tokens(self, row: int) -> np.ndarray:
        """The same on the host."""
        if row not in self._tokens:
            self._tokens[row] = np.concatenate([self.cut.tokens, np.array(list(self.joined[row]), int)])
        return self._tokens[row]

    def logits(self, outputs_BND: Tensor) -> Tensor:
        """Logits [B, N, C + E], E that of the row that has most; a row's own come first."""
        if not any(self.joined):
            logits_BNC: Tensor = self.cut(outputs_BND)
            return logits_BNC
        self._more = self._more or _joined(self.cut, self.joined)
        return self._more(outputs_BND)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.joined = [self.joined[row] for row in rows]
        self._forget()


def _joined(cut: CutHead, joined: Sequence[Iterable[int]]) -> _Joined | RowProduct:
    """The draft vocabularies of texts with what joined them; of one text in one call where the kernels compute it."""
    made = _Joined(cut, joined)
    return cut.product.few.beside(made.rows_BED[0]) if len(joined) == 1 and cut.product.few else made


class _Joined:
    """The rows of a vocabulary head that joined it, [B, E, D]."""

    def __init__(self, cut: CutHead, joined: Sequence[Iterable[int]]) -> None:
        places = [torch.tensor(list(ids), dtype=torch.long) for ids in joined]
        rows_BE = nn.utils.rnn.pad_sequence(places, batch_first=True).to(cut.whole_VD.device)
        self.cut, self.rows_BED = cut, cut.whole_VD[rows_BE]

    def __call__(self, outputs_BND: Tensor) -> Tensor:
        """Logits [B, N, C + E]."""
        return torch.cat([self.cut(outputs_BND), outputs_BND @ self.rows_BED.mT], dim=-1)


class DraftState(ABC):
    """Sequences in flight of a drafter that speaks through the vocabularies of its texts."""

    model: Any
    vocabulary: TextVocabulary

    @abstractmethod
    def _outputs(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes, return what the vocabulary head reads, [B, N, D]."""

    @inference
    def extend(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes, return logits of the draft vocabulary [B, N, C]; see `TreeState`."""
        with self.model.packed.active():
            return self.vocabulary.logits(self._outputs(tokens, parents))

    @inference
    def follow(self, tokens: Rows) -> Tensor:
        """Feed a chain to every row; logits of the draft vocabulary after its last token, [B, C]."""
        with self.model.packed.active():
            outputs_BND = self._outputs(tokens, [range(-1, len(row) - 1) for row in tokens])
            return self.vocabulary.logits(_last(outputs_BND, tokens))[:, 0]


def _last(outputs_BND: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """What belongs to the last token of each row, [B, 1, D]."""
    if len(tokens) == 1:
        return outputs_BND[:, -1:]
    rows_B, lasts_B = torch.arange(len(tokens)), torch.tensor([len(row) - 1 for row in tokens])
    return outputs_BND[rows_B.to(outputs_BND.device), lasts_B.to(outputs_BND.device), None]


def widen(logits_FC: Tensor, draft_ids_C: Tensor | None, vocab: int) -> Tensor:
    """Logits of a whole vocabulary [F, V]: minus infinity outside the draft vocabulary (None: the first C tokens)."""
    if draft_ids_C is None:
        return nn.functional.pad(logits_FC, (0, vocab - logits_FC.shape[-1]), value=float("-inf"))
    logits_FV = torch.full((len(logits_FC), vocab), float("-inf"), dtype=logits_FC.dtype, device=logits_FC.device)
    return logits_FV.index_copy_(-1, draft_ids_C, logits_FC)
