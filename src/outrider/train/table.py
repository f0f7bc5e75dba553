"""Count a target's answers into an n-gram table (`drafters/table.py` reads it)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from outrider.drafters.table import LONGEST, hash_contexts
from outrider.models.files import save_atomically
from outrider.train.data import Answer

KEPT = 3  # continuations per context


def count_answers(answers: Sequence[Answer], fewest: int = 2) -> dict[str, torch.Tensor]:
    """The tensors of a table.

    Args:
        answers: prompts and what the target wrote; only written tokens are counted, with contexts reaching into the prompt.
        fewest: contexts of two tokens and more that were seen less often are left out.

    Raises:
        ValueError: when nothing is left.
    """
    tensors: dict[str, torch.Tensor] = {}
    for n in range(1, LONGEST + 1):
        keys, following = _observed(answers, n)
        hashes, tokens, shares = _likeliest(keys, following, 1 if n == 1 else fewest)
        tensors |= {
            f"hashes.{n}": torch.from_numpy(hashes),
            f"tokens.{n}": torch.from_numpy(tokens),
            f"shares.{n}": torch.from_numpy(shares),
        }
    if not len(tensors["hashes.1"]):
        raise ValueError("the data holds no answers to count; make more with `outrider data`")
    return tensors


def make_table(answers: Sequence[Answer], path: Path, fewest: int = 2) -> int:
    """Write a table; returns its number of contexts."""
    tensors = count_answers(answers, fewest)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_atomically(tensors, path)
    return sum(len(tensors[f"hashes.{n}"]) for n in range(1, LONGEST + 1))


def _observed(answers: Sequence[Answer], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all contexts of n tokens in front of written tokens, and these tokens."""
    keys, following = [], []
    for answer in answers:
        ids = answer.ids.numpy().astype(np.int64)
        start = max(answer.prompt_length, n)
        if len(ids) <= start:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(ids, n)[start - n : len(ids) - n]
        keys.append(hash_contexts(windows))
        following.append(ids[start:])
    if not keys:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    return np.concatenate(keys), np.concatenate(following)


def _likeliest(keys: np.ndarray, following: np.ndarray, fewest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per context seen at least `fewest` times its `KEPT` likeliest continuations and their shares (255 is all)."""
    if not len(keys):
        empty = np.empty((0, KEPT))
        return np.empty(0, np.uint64), empty.astype(np.int32), empty.astype(np.uint8)
    pairs = np.stack([keys, following.astype(np.uint64)], axis=1)
    pairs, counts = np.unique(pairs, axis=0, return_counts=True)
    contexts, starts = np.unique(pairs[:, 0], return_index=True)
    totals = np.add.reduceat(counts, starts)
    # within a context: more frequent first, ties to the lower token
    order = np.lexsort((pairs[:, 1], -counts, pairs[:, 0]))
    tokens, shares = np.zeros((len(contexts), KEPT), np.int32), np.zeros((len(contexts), KEPT), np.uint8)
    lengths = np.diff(np.append(starts, len(pairs)))
    for rank in range(KEPT):
        has = lengths > rank
        at = order[starts[has] + rank]
        tokens[has, rank] = pairs[at, 1]
        shares[has, rank] = np.maximum(1, counts[at] * 255 // totals[has])
    kept = totals >= fewest
    return contexts[kept], tokens[kept], shares[kept]
