"""A table of what the target tends to write: after the last one to five tokens, the few likeliest next ones.

Counted once over the target's own answers (`train/table.py`), read from a memory-mapped file. Proposals are made without
chance, so their laws are one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open

from outrider.sampling import Sampler
from outrider.tree import Shape, TokenTree
from outrider.verify import Draft, Trial, Verdict

LONGEST = 5
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def hash_contexts(windows_RN: np.ndarray) -> np.ndarray:
    """64-bit hashes of R contexts of n tokens each, uint64 [R]."""
    state = np.full(len(windows_RN), windows_RN.shape[1], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in windows_RN.T.astype(np.uint64):
            state = (state ^ column) * _FACTOR
            state ^= state >> np.uint64(29)
    return state


class NgramTable:
    """Sorted context hashes of every order with their likeliest continuations.

    Args:
        path: a safetensors file written by `train/table.py`.

    Raises:
        ValueError: when it is not such a file.
    """

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, "numpy") as file:
                self.hashes = {n: file.get_tensor(f"hashes.{n}") for n in range(1, LONGEST + 1)}
                self.tokens = {n: file.get_tensor(f"tokens.{n}") for n in range(1, LONGEST + 1)}
                self.shares = {n: file.get_tensor(f"shares.{n}") for n in range(1, LONGEST + 1)}
        except Exception as error:
            raise ValueError(f"{path} is not an n-gram table ({error}); make one with `outrider table`") from error

    def __len__(self) -> int:
        return sum(map(len, self.hashes.values()))

    def following(self, context: Sequence[int], most: int) -> list[tuple[int, float]]:
        """Up to `most` next tokens with their share of the longest known context, likeliest first."""
        for n in range(min(LONGEST, len(context)), 0, -1):
            key = hash_contexts(np.asarray(context[-n:], dtype=np.int64)[None])[0]
            at = int(np.searchsorted(self.hashes[n], key))
            if at < len(self.hashes[n]) and self.hashes[n][at] == key:
                pairs = zip(self.tokens[n][at].tolist(), (self.shares[n][at] / 255).tolist())
                return [(token, share) for token, share in pairs if share > 0][:most]
        return []


class TableDrafter:
    """Drafts from an `NgramTable`.

    Args:
        table: the counts.
        least: a branch ends where its probability by the table falls below this.
    """

    name = "table"
    free = True

    def __init__(self, table: NgramTable, least: float = 0.1) -> None:
        self.table, self.least = table, least

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> TableDraftState:
        """A table keeps no state."""
        return TableDraftState(self)


class TableDraftState:
    """Proposals for B texts."""

    def __init__(self, drafter: TableDrafter) -> None:
        self.drafter = drafter

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Grow each tree by its shape where the table knows more."""
        return [self._grow(list(context[-LONGEST:]), shape) for context, shape in zip(contexts, shapes)]

    def _grow(self, context: list[int], shape: Shape) -> Draft:
        tree, trials = TokenTree(context[-1]), dict[int, list[Trial]]()
        chance, frontier = {0: 1.0}, [0]
        for level in shape.levels:
            following: list[int] = []
            for node, count in zip(frontier, level if not shape.budget else [level[0]] * len(frontier)):
                path = context + tree.path_tokens(node)[1:]
                for token, share in self.drafter.table.following(path, count):
                    if chance[node] * share < self.drafter.least or tree.drafted >= shape.nodes:
                        break
                    child = tree.add(node, token)
                    chance[child] = chance[node] * share
                    trials.setdefault(node, []).append(Trial(child))
                    following.append(child)
            frontier = sorted(following, key=lambda n: -chance[n])
        return Draft(tree, trials)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to do."""

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing to do."""
