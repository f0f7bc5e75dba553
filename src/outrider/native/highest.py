"""The best tokens of a few rows of scores, with noise or without, found on the CPU in microseconds.

Shapes: N rows, V columns.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int64

import torch
from torch import Tensor

from outrider.native.library import Unavailable, library
from outrider.native.linear import DTYPES

FEW = 16  # more are sorted faster
# Under shared noise the target takes the token where log p plus noise is highest, and log q plus noise tells which that is, up to
# what log p and log q differ by. Were that Gumbel noise of scale 1 / SURE, the softmax of SURE times the sums would be each
# token's chance. (Measured with the shipped head, as the value that brings most: `docs/drafters.md`.)
SURE = 0.7


def highest(
    scores_NV: Tensor, temperature: float = 1.0, noise_V: Tensor | None = None
) -> tuple[list[int], list[float]]:
    """The highest scores of N rows on the CPU and where they are, the lowest token of several; NaN where there is one.

    Args:
        temperature, noise_V: with noise, of the scores divided by the temperature, in float32, and the noise on top.
    """
    if scores_NV.dtype in DTYPES and scores_NV.is_contiguous() and scores_NV.shape[-1]:
        try:
            call = library().outrider_highest
        except Unavailable:
            pass
        else:
            rows, width = scores_NV.shape
            tokens, values = (c_int64 * rows)(), (c_float * rows)()
            noise, threads = _place(noise_V, width), torch.get_num_threads()
            at = scores_NV.element_size(), scores_NV.data_ptr()
            call(*at, rows, width, temperature, noise, tokens, values, threads)
            return list(tokens), list(values)
    if noise_V is not None:
        scores_NV = scores_NV.float() / temperature + noise_V
    values_N, tokens_N = scores_NV.max(-1)
    return tokens_N.tolist(), values_N.tolist()


def best(
    scores_NV: Tensor,
    count: int,
    temperature: float = 1.0,
    noise_X: Tensor | None = None,
    ids_V: Tensor | None = None,
) -> list[list[tuple[int, float]]]:
    """The `count` best columns of every row, best first, and the logs of their chances; impossible ones are left out.

    Args:
        temperature, noise_X: with noise, of the scores divided by the temperature, and the noise on top: chances are those that
            the same noise on top of the target's scores picks the same.
        ids_V: where the noise of each column is, if not in the same place.
    """
    rows, width = scores_NV.shape
    count = min(count, width)
    if scores_NV.device.type == "cpu" and scores_NV.dtype in DTYPES and count <= FEW and scores_NV.stride(1) == 1:
        try:
            call = library().outrider_best
        except Unavailable:
            pass
        else:
            tokens, logs = (c_int64 * (rows * count))(), (c_float * (rows * count))()
            noise = _place(noise_X, width if ids_V is None else 0)
            ids = None if ids_V is None else ids_V.data_ptr()
            assert ids_V is None or len(ids_V) >= width
            at = scores_NV.element_size(), scores_NV.data_ptr(), rows, scores_NV.stride(0)
            if call(*at, width, count, temperature, SURE, noise, ids, tokens, logs):
                raise MemoryError("there is no memory left for a step of the drafter")
            return _possible(list(tokens), list(logs), rows, count)
    if noise_X is not None:
        scores_NV = scores_NV.float() / temperature + (noise_X[:width] if ids_V is None else noise_X[ids_V])
    values, tokens_NK = scores_NV.max(-1, keepdim=True) if count == 1 else scores_NV.topk(count, dim=-1)
    known = tokens_NK.masked_fill(~(values > -math.inf), -1)
    logs_NK = (scores_NV.float() * (1.0 if noise_X is None else SURE)).log_softmax(-1).gather(-1, tokens_NK)
    # to the host in one copy; float32 holds token ids exactly
    both = torch.stack([known.float(), logs_NK]).flatten(1).tolist()
    return _possible([int(token) for token in both[0]], both[1], rows, count)


def _place(noise_X: Tensor | None, least: int) -> int | None:
    if noise_X is None:
        return None
    assert noise_X.shape[0] >= least and noise_X.dtype is torch.float32 and noise_X.is_contiguous()
    return noise_X.data_ptr()


def _possible(tokens: list[int], logs: list[float], rows: int, count: int) -> list[list[tuple[int, float]]]:
    pairs = list(zip(tokens, logs))
    return [[pair for pair in pairs[row * count : (row + 1) * count] if pair[0] >= 0] for row in range(rows)]
