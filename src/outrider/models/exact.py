"""A lean target whose logits have the same bits however a token is scored: alone, in a chain, on a branch, in a batch.

Outrider's compiled kernels are made that way. With torch's, rows of a matrix product, norms and rotations depend on nothing
but the row where the kernels are row-invariant, and attention is made so by `path_attention`. Neither is assumed but tried, bit
for bit, before the model is handed out.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor

from outrider.models.lean import LeanTreeModel
from outrider.models.native import NativeTreeModel
from outrider.models.path_attention import LEAST_TAIL, TAIL

DEEPEST = LEAST_TAIL - 1  # levels of drafted tokens that stay exact
STEPS = 2 * TAIL  # tokens of the trial: every border is crossed
ROWS = 6  # texts side by side in the trial
NODE_COUNTS = (2, 5, 9, 14, 16, 23, 31, 47)


def exactly(target: Any) -> LeanTreeModel:
    """The same model, scoring exactly.

    Raises:
        ValueError: when the target has no lean decoder, when torch's kernels would score sliding windows or on another device
            than a CPU, and when this machine's kernels give other bits to other numbers of rows.
    """
    instead = "leave out exact: texts then may part where two logits tie, which `outrider certify` lists"
    if not isinstance(target, LeanTreeModel):
        raise ValueError(f"exact needs the lean decoder, and this target is scored by {target.way}; {instead}")
    same = copy.copy(target)
    same.way = f"{target.way}, exact"
    if not isinstance(target, NativeTreeModel):
        if any(target.windows.values()) or target.device.type != "cpu":
            raise ValueError(
                f"without compiled kernels, exact knows no sliding windows, and no device but a CPU; {instead}"
            )
        same.in_path_order, same.deepest = True, DEEPEST
    if (found := differing(same)) is not None:
        raise ValueError(f"this machine's {target.dtype} kernels are not row-invariant ({found}); {instead}")
    return same


@torch.inference_mode()
def differing(target: LeanTreeModel) -> str | None:
    """Where a text read token by token and the same text on branches of random trees have other bits; None: nowhere."""
    rng = random.Random(0)
    room = min(STEPS, (target.context or STEPS) - 2)
    text = [rng.randrange(target.vocab) for _ in range(room)]
    state, alone = target.begin([text[:1]], room), {}
    for position in range(1, room):
        alone[position] = state.extend([[text[position]]], [[-1]])[0, 0].clone()
        state.commit([[0]])
    for rows in (1, ROWS):
        state, at = target.begin([text[:1]] * rows, room), 1
        for nodes in NODE_COUNTS:
            levels = min(rng.randrange(1, LEAST_TAIL), nodes, room - at)
            if levels < 1:
                break
            tokens, parents, path = _tree(text[at : at + levels], nodes, target.vocab, rng)
            logits_BNV = state.extend([tokens] * rows, [parents] * rows)
            for level, node in enumerate(path):
                if not _same(logits_BNV[:, node], alone[at + level]):
                    return f"{nodes} nodes, {rows} rows, position {at + level}"
            state.commit([path] * rows)
            at += levels
    return None


def _same(logits_BV: Tensor, alone_V: Tensor) -> bool:
    return all(torch.equal(row_V, alone_V) for row_V in logits_BV)


def _tree(text: list[int], nodes: int, vocab: int, rng: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of a random tree with a text among its branches, and the text's nodes."""
    tokens, parents, depths, path = [text[0]], [-1], [0], [0]
    while len(tokens) < nodes:
        left = len(text) - len(path)
        if left and rng.random() < max(0.4, left / (nodes - len(tokens))):
            tokens.append(text[len(path)])
            parents.append(path[-1])
            path.append(len(tokens) - 1)
        else:
            shallow = [node for node, depth in enumerate(depths) if depth < DEEPEST]
            tokens.append(rng.randrange(vocab))
            parents.append(rng.choice(shallow))
        depths.append(depths[parents[-1]] + 1)
    return tokens, parents, path
