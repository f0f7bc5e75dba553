"""A feature head's state of a single text, by compiled kernels: addresses instead of tensors.

A step of a head takes the kernels some tens of microseconds, and as long again to be told so by tensors and arrays that are made
anew for each step. Here, what stays where it is between steps is said once.

Shapes: N new nodes, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from outrider.cache.attention import AttentionLayer
from outrider.cache.text_nodes import TextNodes
from outrider.models.draft_vocab import DraftState, TextVocabulary
from outrider.models.inference import inference
from outrider.models.protocol import Rows
from outrider.native.decoder import TextPass
from outrider.native.embedding import lies

if TYPE_CHECKING:
    from outrider.drafters.feature_head import HeadModel

T = TypeVar("T")
NODES = 128  # that buffers hold before they grow


def takes(model: HeadModel, prompts: Rows) -> bool:
    """Whether the kernels compute all of a step, and there is one text."""
    plain = not model.head.scans and model.head.config.attention_window is None
    native = model.native and model.entry and model.cut.product.few
    return bool(len(prompts) == 1 and plain and native and lies(model.embedding))


def predecessors(
    seen: Sequence[T], outputs: Sequence[T], first: int, depths: Sequence[int], parents: Sequence[int], start: int
) -> list[T]:
    """The feature of each new node's predecessor: the target's where it was seen, else what the block gave for the parent.

    Args:
        seen: the target's, one a position.
        outputs: the block's, of the pending nodes.
        first: which of those seen belongs to the predecessor of a node of depth 0.
        start: the first of the new nodes.
    """
    found = list[T]()
    for depth, parent in zip(depths, parents):
        assert first + depth < len(seen) or 0 <= parent < start, "a drafted node comes after its parent"
        found.append(seen[first + depth] if first + depth < len(seen) else outputs[parent])
    return found


class HeadText(DraftState):
    """Keys, values, outputs and features of a text.

    Args:
        capacity: slots to begin with.
    """

    def __init__(self, model: HeadModel, capacity: int) -> None:
        assert model.native and model.entry
        self.model, self.entry, self.lengths = model, model.entry, [0]
        self.layer, self.vocabulary = AttentionLayer(capacity), TextVocabulary(model.cut, 1)
        self._pass = TextPass(model.native.decoder)
        self.features: list[Tensor] | None = None
        self.nodes, self.outputs_ND = TextNodes(), model.nothing_D[None]
        # features [D] of committed tokens that are still needed: addresses, what holds them, and the position of the first
        self.seen, self.holders, self.first = [model.nothing_D.data_ptr()], [model.nothing_D], -1
        self.raw = list[Tensor]()  # hidden states that are no features yet
        self.step = model.head.config.width * model.nothing_D.element_size()
        self._allocate(NODES)

    def _allocate(self, capacity: int) -> None:
        """Room for what enters and what leaves the block."""
        width, nothing_D = self.model.head.config.width, self.model.nothing_D
        self.capacity, outputs_ND = capacity, nothing_D.new_empty(capacity, width)
        if self.pending:
            outputs_ND[: self.pending] = self.outputs_ND[: self.pending]
        self.stream_1ND, self.outputs_ND = nothing_D.new_empty(1, capacity, width), outputs_ND

    @property
    def pending(self) -> int:
        """Pending nodes."""
        return len(self.nodes)

    @property
    def outputs(self) -> list[Tensor]:
        """Of all pending nodes, [M, D]."""
        return [self.outputs_ND[: self.pending]]

    def see(self, hidden: Sequence[Tensor]) -> None:
        """Hidden states [tokens, taps * D] of tokens that the target has just committed. They become features when they are
        needed: rounds that draft nothing should cost nothing."""
        if hidden[0].shape[0]:
            self.raw.append(hidden[0])

    def _read(self) -> None:
        """Make features of what was seen."""
        if self.raw:
            features_TD = self.model.features(self.raw)
            at, count = features_TD.data_ptr(), features_TD.shape[0]
            self.seen += range(at, at + self.step * count, self.step)
            self.holders += [features_TD] * count
            self.raw = []

    def _outputs(self, tokens: Rows, parents: Rows, wanted: int = 0) -> Tensor:
        """Feed nodes, return the block's outputs [1, N, D], of which those before `wanted` are nothing."""
        (row,), (above,), start, length = tokens, parents, self.pending, self.lengths[0]
        self._read()
        self.vocabulary.follow(tokens)
        end = start + len(row)
        if end > self.capacity:
            self._allocate(max(end, 2 * self.capacity))
        depths, at, stream = self.nodes.add(above), self.outputs_ND.data_ptr(), self.stream_1ND.data_ptr()
        outputs = range(at, at + self.step * end, self.step)
        before = predecessors(self.seen, outputs, length - 1 - self.first, depths, above, start)
        self.entry.join(row, before, stream)
        self._pass.attend(self.model.native.held(self.layer, self.stream_1ND, length + end))
        positions = [length + depth for depth in depths]
        self._pass.rotate(self.model.native.rotations(max(positions)))
        self._pass(
            stream, length + start, positions, self.nodes.seen(start, length), hidden=outputs[start], wanted=wanted
        )
        return self.outputs_ND[None, start:end]

    @inference
    def extend(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes, return logits of the draft vocabulary [1, N, C]; see `TreeState`."""
        return self.vocabulary.logits(self._outputs(tokens, parents))

    @inference
    def follow(self, tokens: Rows) -> Tensor:
        """Feed a chain; logits of the draft vocabulary after its last token, [1, C]."""
        last = len(tokens[0]) - 1
        return self.vocabulary.logits(self._outputs(tokens, [range(-1, last)], last)[:, last:])[:, 0]

    @inference
    def commit(self, paths: Rows) -> None:
        """A path joins the committed state."""
        path = list(paths[0])
        self.nodes.check_path(path)
        length = self.lengths[0]
        if path != [*range(len(path))]:  # else it lies where it belongs
            self.layer.move(0, torch.tensor(path) + length, length)
        self.lengths = [length + len(path)]
        self.nodes.clear()
        drop = min(self.lengths[0] - 1 - self.first, len(self.seen))  # features may come after the commit
        if drop > 0:
            self.seen, self.holders, self.first = self.seen[drop:], self.holders[drop:], self.first + drop

    def keep(self, rows: Sequence[int]) -> None:
        """There is one."""

    def bytes(self) -> int:
        """Memory of keys and values."""
        return self.layer.bytes()
