"""The best tokens of a few rows of scores, found on the CPU in microseconds.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import c_float, c_int64

from torch import Tensor

from outrider.native.library import Unavailable, library
from outrider.native.linear import DTYPES


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
            call(scores_NV.element_size(), scores_NV.data_ptr(), rows, width, tokens, values)
            return list(tokens), list(values)
    values_N, tokens_N = scores_NV.max(-1)
    return tokens_N.tolist(), values_N.tolist()
