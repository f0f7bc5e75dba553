"""A feature head as a drafter: a `TreeModel` whose nodes also carry features, grown by `lm.py` like any other.

The target hands out its hidden states for every token that it commits (`see`). A node whose predecessor was committed reads
those; a deeper node reads its parent's output. What was drafted on the head's own outputs is not committed but fed again
with the target's features, in the same pass as the next root: the state of the head only ever holds the target's text.

Shapes: B rows, N new nodes, D width, C draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from outrider.cache.attention import ALIGNMENT, AttentionLayer, additive_mask, visibility
from outrider.cache.factors import Factors
from outrider.cache.pending import Pending
from outrider.drafters.head_text import NODES, HeadText, predecessors, takes
from outrider.drafters.lm import LMDrafter, LMDraftState
from outrider.models.attention import folded
from outrider.models.draft_vocab import CutHead, DraftState, TextVocabulary
from outrider.models.feature_head import Attend, FeatureHead
from outrider.models.inference import inference
from outrider.models.mamba_mixer import MambaMixer
from outrider.models.native_head import native_entry, native_head
from outrider.models.packed import Packed
from outrider.models.protocol import Rows
from outrider.models.scans import mixer_kernels, tree_scan
from outrider.sampling import Sampler
from outrider.verify import Verdict

SPARE = 256  # slots that nobody sees any more, before they are given up


class HeadModel:
    """A feature head with the embedding and the vocabulary head that it borrows from the target.

    Args:
        head: the trained block; it is moved to the target's dtype and device.
        embedding: the target's input embedding.
        unembedding: the target's vocabulary head.
    """

    way = "one block on the target's hidden states"
    context: int | None = None

    def __init__(self, head: FeatureHead, embedding: nn.Embedding, unembedding: nn.Linear) -> None:
        weight = unembedding.weight
        self.head = head.to(weight.device, weight.dtype).eval().requires_grad_(False)
        self.embedding, self.vocab = embedding, weight.shape[0]
        self.dtype, self.device = weight.dtype, weight.device
        self.cut = CutHead(weight, head.draft_ids)
        self.draft_ids = self.cut.ids
        self.packed = Packed(self.head, rounds=True)
        self.entry = native_entry(self.head, embedding)
        self.native, self.kernels = native_head(self.head), mixer_kernels(self.head.modules())
        self.nothing_D = torch.zeros(head.config.width, device=self.device, dtype=self.dtype)
        self.sizes = [m.sizes() for m in self.head.modules() if isinstance(m, MambaMixer)]

    def features(self, hidden: Sequence[Tensor]) -> Tensor:
        """Of hidden states [tokens, taps * D] in several pieces, [all tokens, D]."""
        if self.entry and all(piece.dtype is self.dtype and piece.device == self.device for piece in hidden):
            return self.entry.features(hidden)
        features_TD: Tensor = self.head.features(torch.cat(list(hidden))[None])[0]
        return features_TD

    def joined(self, tokens: Rows, features: Sequence[list[Tensor]]) -> Tensor:
        """What goes through the block, [B, N, D]: tokens, and the feature of each one's predecessor; padding is token 0."""
        most = max(map(len, tokens))
        tokens = [[*row, *[0] * (most - len(row))] for row in tokens]
        features = [[*row, *[self.nothing_D] * (most - len(row))] for row in features]
        if self.entry:
            return self.entry.joined(tokens, features)
        embedded_BND = self.embedding(torch.tensor(tokens, device=self.device))
        return self.head.joined(embedded_BND, torch.stack([torch.stack(row) for row in features]))

    def begin(self, prompts: Rows, room: int = 0, taps: Sequence[int] = ()) -> HeadState | HeadText:
        """Start without reading the prompts: their features come later, and `lm.py` feeds what is behind."""
        capacity, window = max(map(len, prompts), default=0) + room, self.head.config.attention_window
        if takes(self, prompts):
            return HeadText(self, capacity)
        return HeadState(self, len(prompts), capacity if window is None else min(capacity, window + SPARE + NODES))

    def state_bytes_per_node(self) -> int:
        """Memory of what one pending node leaves of its state; attention has none."""
        return sum(size.node_bytes() for size in self.sizes)


class HeadState(DraftState):
    """Keys, values, states, outputs and features of B rows.

    With a window, keys and values that all rows have left behind are given up: position p lies in slot p - `forgotten`.
    """

    def __init__(self, model: HeadModel, batch: int, capacity: int) -> None:
        self.model, self.lengths = model, [0] * batch
        self.layer, self.nodes = AttentionLayer(capacity), Pending(batch)
        self.vocabulary = TextVocabulary(model.cut, batch)
        self.factors = Factors(model.sizes, batch, NODES, model.device)
        self.features: list[Tensor] | None = None
        self.forgotten = 0
        self.outputs: list[list[Tensor]] = [[] for _ in range(batch)]  # [D] of each pending node
        # features [D] of committed tokens that are still needed, and the position of the first of them
        self.seen = [[model.nothing_D] for _ in range(batch)]
        self.first = [-1] * batch
        self.raw: list[list[Tensor]] = [[] for _ in range(batch)]  # hidden states that are no features yet

    @property
    def pending(self) -> int:
        """Pending nodes of each row, padding included."""
        return self.nodes.count

    def see(self, hidden: Sequence[Tensor]) -> None:
        """Hidden states [tokens, taps * D] of tokens that the target has just committed, per row. They become features when they
        are needed: rounds that draft nothing should cost nothing."""
        for row, hidden_TF in enumerate(hidden):
            if hidden_TF.shape[0]:
                self.raw[row].append(hidden_TF)

    def _read(self) -> None:
        """Make features of what was seen."""
        for row, parts in enumerate(self.raw):
            if parts:
                self.seen[row] += self.model.features(parts).unbind()
                self.raw[row] = []

    def _outputs(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes, return the block's outputs [B, N, D]."""
        self._read()
        self.vocabulary.follow(tokens)
        model, new = self.model, max(map(len, tokens))
        start, _ = self.nodes.add(parents, new)
        positions_BN = np.array(self.lengths)[:, None] + self.nodes.depths_BM[:, start : start + new]
        features = [self._features(row, start, start + len(row_tokens)) for row, row_tokens in enumerate(tokens)]
        x_BND = model.joined(tokens, features)
        scan = tree_scan(self.factors, self.nodes, start, model.kernels) if model.head.scans else None
        if model.native:
            seen_BNS = self._visible(start, start + new)
            beside = model.head.ssm(model.head.mixer_norm(x_BND), scan) if scan else None
            first = self._lowest() - self.forgotten
            outputs = model.native(x_BND, positions_BN, seen_BNS, self.layer, first, beside)
        else:
            positions = torch.from_numpy(positions_BN).to(model.device)
            attend = self._attend(start, start + new) if model.head.attends else None
            outputs = model.head.block(x_BND, positions, attend, scan)
        for known, new_ND in zip(self.outputs, outputs.unbind()):
            known += new_ND.unbind()
        return outputs

    def _visible(self, start: int, end: int) -> np.ndarray:
        """Which slots the nodes from `start` to `end` see, bool [B, N, S]; with a window, from the lowest on that anyone sees."""
        base, window, low = max(self.lengths), self.model.head.config.attention_window, self._lowest()
        nodes, lengths = self.nodes, [length - low for length in self.lengths]
        ancestors_BNM = nodes.ancestors_BMM[:, start:end, :end]
        return visibility(lengths, base - low, nodes.depths_BM[:, :end], ancestors_BNM, window)

    def _attend(self, start: int, end: int) -> Attend:
        """Attention of the nodes from `start` to `end`; with a window, slots that nobody sees are not even read."""
        base, low, seen = max(self.lengths), self._lowest(), self._visible(start, end)
        config = self.model.head.config
        few = folded(additive_mask(seen, self.model.dtype, self.model.device), config.num_heads // config.num_kv_heads)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            written = self.layer.write(k, v, base + start - self.forgotten, align=True)
            keys, values = (t[:, :, low - self.forgotten :] for t in written)
            out = few(q.transpose(1, 2), keys, values, q.shape[-1] ** -0.5)
            return out.reshape(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)

        return attend

    def _lowest(self) -> int:
        """The first position that any row still sees, rounded down to whole vectors."""
        window = self.model.head.config.attention_window
        return 0 if window is None else max(0, min(self.lengths) - window + 1) // ALIGNMENT * ALIGNMENT

    def _forget(self) -> None:
        """Give up what no row sees any more, now and then."""
        if (spare := self._lowest() - self.forgotten) >= SPARE:
            self.layer.forget(spare)
            self.forgotten += spare

    def _features(self, row: int, start: int, end: int) -> list[Tensor]:
        """The feature [D] of each node's predecessor."""
        depths, parents = (of[row, start:end].tolist() for of in (self.nodes.depths_BM, self.nodes.parents_BM))
        first = self.lengths[row] - 1 - self.first[row]
        return predecessors(self.seen[row], self.outputs[row], first, depths, parents, start)

    @inference
    def commit(self, paths: Rows) -> None:
        """A path per row joins the committed state."""
        base = max(self.lengths)
        for row, path in enumerate(paths):
            self.nodes.check_path(row, path)
            if list(path) != list(range(len(path))) or base != self.lengths[row]:  # else it lies where it belongs
                slots = torch.tensor(path, dtype=torch.long, device=self.model.device) + base - self.forgotten
                self.layer.move(row, slots, self.lengths[row] - self.forgotten)
            if path:
                self.factors.commit(row, path)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths)]
        self.nodes.clear()
        self.outputs = [[] for _ in self.outputs]
        self._forget()
        for row, length in enumerate(self.lengths):
            drop = min(length - 1 - self.first[row], len(self.seen[row]))  # features may come after the commit
            if drop > 0:
                self.seen[row], self.first[row] = self.seen[row][drop:], self.first[row] + drop

    @inference
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.layer.keep(rows)
        self.nodes.keep(rows)
        self.factors.keep(rows)
        self.vocabulary.keep(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.seen = [self.seen[row] for row in rows]
        self.outputs = [self.outputs[row] for row in rows]
        self.first = [self.first[row] for row in rows]
        self.raw = [self.raw[row] for row in rows]

    def bytes(self) -> int:
        """Memory of keys, values and states."""
        return self.layer.bytes() + self.factors.bytes()


class HeadDrafter(LMDrafter):
    """Drafts with a `HeadModel`; the engine hands it the target's hidden states at `taps`."""

    def __init__(self, model: HeadModel, name: str = "head") -> None:
        super().__init__(model, name, model.vocab)
        self.taps = model.head.config.taps

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> HeadDraftState:
        """Start B sequences; prompts are read when their features have come."""
        return HeadDraftState(self, prompts, samplers, room, stream)


class HeadDraftState(LMDraftState):
    """`LMDraftState` that passes features on."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Commit the nodes up to the root: they read the target's features, what was drafted behind them did not."""
        self.state.commit([growth.chain for growth in self.growths])

    def _prefill(self, contexts: Sequence[Sequence[int]]) -> HeadState | HeadText:
        return cast(HeadModel, self.drafter.model).begin(contexts, self.room)

    def see(self, hidden: Sequence[Tensor]) -> None:
        """Hidden states of tokens that the target has committed, per row."""
        cast(HeadState | HeadText, self.state).see(hidden)
