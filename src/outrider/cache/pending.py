"""Bookkeeping of nodes that were extended but not committed, for B rows at once.

Rows may hand in different numbers of nodes: all rows are padded to one count. A padding node is a child of the committed
prefix that nobody descends from, so it is finite and invisible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Rows = Sequence[Sequence[int]]


class Pending:
    """Parents, depths and ancestors of pending nodes. `count` nodes a row, padding included."""

    def __init__(self, batch: int, capacity: int = 64) -> None:
        self.batch, self.count = batch, 0
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self.parents_BM = np.full((self.batch, capacity), -1, dtype=np.int64)
        self.depths_BM = np.zeros((self.batch, capacity), dtype=np.int64)
        self.ancestors_BMM = np.zeros((self.batch, capacity, capacity), dtype=bool)

    def clear(self) -> None:
        """Forget every node."""
        self.count = 0

    def add(self, parents: Rows, size: int) -> tuple[int, list[list[tuple[int, int]]]]:
        """Add `size` nodes to every row.

        Args:
            parents: per row the parent of each real node: an index into the row's pending nodes, or -1 for the committed
                prefix. Parents come before children.
            size: nodes a row including padding.

        Returns:
            The index of the first new node, and the real and padding nodes of this call as (row, node) in waves: a node's
            parent is in an earlier wave, an earlier call, or the committed prefix.
        """
        start = self.count
        if start + size > self.capacity:
            self._grow(start + size)
        self.count = start + size
        waves: list[list[tuple[int, int]]] = [[]]
        for row, row_parents in enumerate(parents):
            given, wave_of = [*row_parents, *[-1] * (size - len(row_parents))], list[int]()
            depths, ancestors_MM = self.depths_BM[row, :start].tolist(), self.ancestors_BMM[row]
            for node, parent in enumerate(given, start):
                if not -1 <= parent < node:
                    raise IndexError(f"node {node} has parent {parent}; parents come before children")
                ancestors_MM[node] = ancestors_MM[parent] if parent >= 0 else False
                ancestors_MM[node, node] = True
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
                wave_of.append(wave_of[parent - start] + 1 if parent >= start else 0)
                if wave_of[-1] == len(waves):
                    waves.append([])
                waves[wave_of[-1]].append((row, node))
            self.parents_BM[row, start : self.count], self.depths_BM[row, start : self.count] = given, depths[start:]
        return start, waves

    def _grow(self, needed: int) -> None:
        old = self.parents_BM, self.depths_BM, self.ancestors_BMM
        n = self.count
        self._allocate(max(needed, 2 * self.capacity))
        self.parents_BM[:, :n], self.depths_BM[:, :n] = old[0][:, :n], old[1][:, :n]
        self.ancestors_BMM[:, :n, :n] = old[2][:, :n, :n]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.batch = len(rows)
        self.parents_BM, self.depths_BM = self.parents_BM[rows], self.depths_BM[rows]
        self.ancestors_BMM = self.ancestors_BMM[rows]

    def check_path(self, row: int, path: Sequence[int]) -> None:
        """A committed path must start at the committed prefix and go from parent to child."""
        for before, node in zip([-1, *path], path):
            if not 0 <= node < self.count or self.parents_BM[row, node] != before:
                raise IndexError(f"{list(path)} is not a path of pending nodes of row {row}")
