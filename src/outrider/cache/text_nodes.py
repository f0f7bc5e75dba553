"""Pending nodes of a single text: the bookkeeping of `pending.py` and the masks of `attention.py`, by bytes.

Arrays pay for themselves with many rows. A text alone has a few nodes a pass, and there arrays take longer than a small product.

Shapes: N new nodes, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence


class TextNodes:
    """Parents and depths of pending nodes, and which pending nodes each one sees."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self.parents)

    def clear(self) -> None:
        """Forget every node."""
        self.parents, self.depths, self._visible = list[int](), list[int](), list[bytes]()

    def add(self, parents: Sequence[int]) -> list[int]:
        """Add nodes; their depths.

        Args:
            parents: indexes of pending nodes, or -1 for the committed prefix. Parents come before children.
        """
        start = len(self)
        for node, parent in enumerate(parents, start):
            if not -1 <= parent < node:
                raise IndexError(f"node {node} has parent {parent}; parents come before children")
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
            self._visible.append((self._visible[parent] if parent >= 0 else b"").ljust(node, b"\0") + b"\1")
            self.parents.append(parent)
        return self.depths[start:]

    def seen(self, start: int, length: int) -> bytes:
        """Which slots the nodes from `start` on see, bool [N, S]: `length` committed ones and the pending ones behind."""
        committed, pending = b"\1" * length, len(self)
        return b"".join([committed + visible.ljust(pending, b"\0") for visible in self._visible[start:]])

    def check_path(self, path: Sequence[int]) -> None:
        """A committed path must start at the committed prefix and go from parent to child."""
        for before, node in zip([-1, *path], path):
            if not 0 <= node < len(self) or self.parents[node] != before:
                raise IndexError(f"{list(path)} is not a path of pending nodes")
