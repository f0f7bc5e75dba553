"""The best tokens of a few rows of scores, found on the CPU in microseconds.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int64

import torch
from torch import Tensor

from outrider.native.library import Unavailable, library
from outrider.native.linear import DTYPES

FEW = 16  # more are sorted faster


def highest(scores_NV: Tensor) -> tuple[list[int], list[float]]:
    """The highest scores of N rows on the CPU and where they are, the lowest token of several; NaN where there is one."""
    if scores_NV.dtype in DTYPES and scores_NV.is_contiguous() and scores_NV.shape[-1]:
        try:
            call = library().outrider_highest
        except Unavailable:
            pass
        else:
            rows, width = scores_NV.shape
            tokens, values = (c_int64 * rows)(), (c_float * rows)()
            threads = torch.get_num_threads()
            call(scores_NV.element_size(), scores_NV.data_ptr(), rows, width, tokens, values, threads)
            return list(tokens), list(values)
    values_N, tokens_N = scores_NV.max(-1)
    return tokens_N.tolist(), values_N.tolist()


def best(scores_NV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` best tokens of every row, best first, and their log probabilities; impossible ones are left out."""
    rows, width = scores_NV.shape
    count = min(count, width)
    if scores_NV.device.type == "cpu" and scores_NV.dtype in DTYPES and count <= FEW and scores_NV.stride(1) == 1:
        try:
            call = library().outrider_best
        except Unavailable:
            pass
        else:
            tokens, logs = (c_int64 * (rows * count))(), (c_float * (rows * count))()
            stride = scores_NV.stride(0)
            call(scores_NV.element_size(), scores_NV.data_ptr(), rows, stride, width, count, tokens, logs)
            return _possible(list(tokens), list(logs), rows, count)
    values, tokens_NK = scores_NV.max(-1, keepdim=True) if count == 1 else scores_NV.topk(count, dim=-1)
    known = tokens_NK.masked_fill(~(values > -math.inf), -1)
    logs_NK = scores_NV.float().log_softmax(-1).gather(-1, tokens_NK)
    # to the host in one copy; float32 holds token ids exactly
    both = torch.stack([known.float(), logs_NK]).flatten(1).tolist()
    return _possible([int(token) for token in both[0]], both[1], rows, count)


def _possible(tokens: list[int], logs: list[float], rows: int, count: int) -> list[list[tuple[int, float]]]:
    pairs = list(zip(tokens, logs))
    return [[pair for pair in pairs[row * count : (row + 1) * count] if pair[0] >= 0] for row in range(rows)]
