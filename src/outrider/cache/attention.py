"""Keys and values of an attention layer: the committed prefix, and tree nodes behind it.

Slot s < length holds the committed token at position s. Pending nodes lie behind the longest row's prefix. A node sees the
committed prefix of its row and its ancestors; windows count positions along the path, not slots. A commit gathers the
path's slots into place.

Compiled kernels hold keys in the same memory in an order of their own (`native/attention.h`): those of sixteen slots side by
side, four bytes of each.

Shapes: B rows, H key-value heads, S slots, D head size, N new nodes, M pending nodes, J blocks, L slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
BLOCK, UNIT = 16, 4  # slots whose keys kernels hold side by side, and bytes of each


class AttentionLayer:
    """Preallocated keys and values of one layer."""

    def __init__(self, capacity: int) -> None:
        self.capacity = aligned(capacity, BLOCK)
        self.in_blocks = False  # keys lie as compiled kernels hold them
        self.keys_BHSD: Tensor | None = None
        self.values_BHSD: Tensor | None = None
        self.beside: Any = None  # what a reader keeps about them; forgotten when they come to lie elsewhere

    def write(self, keys_BHND: Tensor, values_BHND: Tensor, start: int, align: bool = False) -> tuple[Tensor, Tensor]:
        """Put new keys and values at slots `start`... and return everything up to their end, `aligned` when in a tree."""
        assert not self.in_blocks, "these keys belong to compiled kernels"
        end = start + keys_BHND.shape[2]
        shown = aligned(end) if align else end
        if self.keys_BHSD is None or shown > self.capacity:
            self._allocate(keys_BHND, values_BHND, shown)
        assert self.keys_BHSD is not None and self.values_BHSD is not None
        self.keys_BHSD[:, :, start:end] = keys_BHND
        self.values_BHSD[:, :, start:end] = values_BHND
        return self.keys_BHSD[:, :, :shown], self.values_BHSD[:, :, :shown]

    def reserve(self, like: Tensor, heads: int, size: int, end: int) -> tuple[Tensor, Tensor]:
        """All slots, at least `end` of them, for kernels; allocated if need be with the rows, dtype and device of `like`."""
        self.in_blocks = True
        if self.keys_BHSD is None or end > self.keys_BHSD.shape[2]:
            none = like.new_empty(like.shape[0], heads, 0, size)
            self._allocate(none, none, end)
        assert self.keys_BHSD is not None and self.values_BHSD is not None
        return self.keys_BHSD, self.values_BHSD

    def _allocate(self, keys: Tensor, values: Tensor, needed: int) -> None:
        old, self.beside = (self.keys_BHSD, self.values_BHSD), None
        if needed > self.capacity:
            self.capacity = aligned(max(needed, self.capacity + self.capacity // 2), BLOCK)
        # zeros, not empty: masked slots still pass through the products, and 0 * NaN is NaN
        self.keys_BHSD = keys.new_zeros(*keys.shape[:2], self.capacity, keys.shape[3])
        self.values_BHSD = values.new_zeros(*values.shape[:2], self.capacity, values.shape[3])
        if old[0] is not None and old[1] is not None:
            self.keys_BHSD[:, :, : old[0].shape[2]] = old[0]
            self.values_BHSD[:, :, : old[1].shape[2]] = old[1]

    def move_into(self, keys_BHSD: Tensor, values_BHSD: Tensor) -> None:
        """Go on in other memory, which may hold anything and has as many slots or more."""
        for new, old in ((keys_BHSD, self.keys_BHSD), (values_BHSD, self.values_BHSD)):
            new.zero_()
            if old is not None:
                new[:, :, : old.shape[2]] = old
        self.keys_BHSD, self.values_BHSD, self.capacity = keys_BHSD, values_BHSD, keys_BHSD.shape[2]
        self.beside = None

    def move(self, row: int, slots: Tensor, target: int) -> None:
        """Gather `slots` of a row into consecutive slots from `target` on."""
        if self.keys_BHSD is None or self.values_BHSD is None:
            return
        end = target + len(slots)
        if self.in_blocks:
            keys_HJLUX, targets = self.blocks()[row], torch.arange(target, end, device=slots.device)
            keys_HJLUX[:, targets // BLOCK, targets % BLOCK] = keys_HJLUX[:, slots // BLOCK, slots % BLOCK]
        else:
            self.keys_BHSD[row, :, target:end] = self.keys_BHSD[row].index_select(1, slots)
        self.values_BHSD[row, :, target:end] = self.values_BHSD[row].index_select(1, slots)

    def move_many(self, rows_M: Tensor, slots_M: Tensor, targets_M: Tensor) -> None:
        """Copy slots of several rows at once."""
        if self.keys_BHSD is None or self.values_BHSD is None:
            return
        if self.in_blocks:
            keys, to, of = self.blocks(), targets_M, slots_M
            keys[rows_M, :, to // BLOCK, to % BLOCK] = keys[rows_M, :, of // BLOCK, of % BLOCK]
        else:
            self.keys_BHSD[rows_M, :, targets_M] = self.keys_BHSD[rows_M, :, slots_M]
        self.values_BHSD[rows_M, :, targets_M] = self.values_BHSD[rows_M, :, slots_M]

    def blocks(self) -> Tensor:
        """The same keys as compiled kernels hold them, [B, H, J, L, units, numbers of a unit]."""
        assert self.in_blocks and self.keys_BHSD is not None
        numbers = UNIT // self.keys_BHSD.element_size()
        return self.keys_BHSD.unflatten(2, (-1, BLOCK)).flatten(3).unflatten(3, (-1, BLOCK, numbers)).transpose(3, 4)

    def forget(self, slots: int) -> None:
        """Give up the first slots, whole blocks; the others move to the front."""
        assert not slots % BLOCK
        for held in (self.keys_BHSD, self.values_BHSD):
            if held is not None:
                held[:, :, : held.shape[2] - slots] = held[:, :, slots:].clone()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.beside = None
        if self.keys_BHSD is not None and self.values_BHSD is not None:
            self.keys_BHSD = keep_rows(self.keys_BHSD, rows)
            self.values_BHSD = keep_rows(self.values_BHSD, rows)

    @property
    def device(self) -> torch.device | None:
        """Where keys and values are, if there are any yet."""
        return self.keys_BHSD.device if self.keys_BHSD is not None else None

    @classmethod
    def stack(cls, layers: Sequence[AttentionLayer]) -> AttentionLayer:
        """One layer of the rows of several, whose prefixes may differ in length."""
        out = cls(max(layer.capacity for layer in layers))
        out.in_blocks = any(layer.in_blocks for layer in layers)
        for name in ("keys_BHSD", "values_BHSD"):
            parts = [getattr(layer, name) for layer in layers]
            known = next((part for part in parts if part is not None), None)
            if known is None:
                continue
            full = known.new_zeros(len(parts), known.shape[1], out.capacity, known.shape[3])
            for row, part in enumerate(parts):
                if part is not None:
                    full[row, :, : part.shape[2]] = part[0]
            setattr(out, name, full)
        return out

    def bytes(self) -> int:
        """Memory held."""
        tensors = [t for t in (self.keys_BHSD, self.values_BHSD) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


def keep_rows(buffer: Tensor, rows: Sequence[int]) -> Tensor:
    """The given rows of a buffer, in place where rows that go are filled by rows from the end: then only those move."""
    count = len(rows)
    if any(row != place and row < count for place, row in enumerate(rows)):
        return buffer.index_select(0, torch.tensor(list(rows), device=buffer.device))
    for place, row in enumerate(rows):
        if row != place:
            buffer[place] = buffer[row]
    return buffer[:count]


def visibility(
    lengths: Sequence[int], base: int, depths_BM: np.ndarray, ancestors_BNM: np.ndarray, window: int | None
) -> np.ndarray:
    """Which slots each new node sees, bool [B, N, base + M].

    Args:
        lengths: committed tokens of each row.
        base: the first slot of pending nodes: the longest row's length.
        depths_BM: depths of all pending nodes; the last N are the new ones.
        ancestors_BNM: of each new node, which pending nodes are its ancestors or itself.
        window: a node sees only the last `window` positions of its path, itself included; None sees all.
    """
    batch, new, pending = ancestors_BNM.shape
    visible_BNS = np.ones((batch, new, base + pending), dtype=bool)
    visible_BNS[:, :, base:] = ancestors_BNM
    if min(lengths) < base:
        visible_BNS[:, :, :base] = np.arange(base) < np.asarray(lengths)[:, None, None]
    if window is not None and base + pending > window:
        depths_BN, lengths_B = depths_BM[:, -new:], np.asarray(lengths)
        positions_BN = lengths_B[:, None] + depths_BN
        visible_BNS[:, :, :base] &= positions_BN[:, :, None] - np.arange(base) < window
        visible_BNS[:, :, base:] &= depths_BN[:, :, None] - depths_BM[:, None, :] < window
    return visible_BNS


def aligned(slots: int, to: int = ALIGNMENT) -> int:
    """Slots rounded up to whole vectors, or blocks.

    A kernel adds up the last, incomplete vector in another order than a complete one. With whole vectors, whose rest is masked,
    a sum over the same visible slots has the same bits however many nodes were scored with it.
    """
    return (slots + to - 1) // to * to


def additive_mask(visible_BNS: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 4D mask that is added to attention scores, [B, 1, N, aligned(S)]: 0 where visible, the lowest finite number elsewhere.

    Additive, since a boolean mask is silently misread by eager attention.
    """
    batch, new, slots = visible_BNS.shape
    mask = torch.full((batch, 1, new, aligned(slots)), torch.finfo(dtype).min, dtype=dtype, device=device)
    mask[:, 0, :, :slots].masked_fill_(torch.from_numpy(visible_BNS).to(device), 0.0)
    return mask
