"""Rows of numbers that are normed by parts, put side by side and multiplied, in one call that takes each part from where it lies.

Shapes: M rows, D width, V outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor, nn

from outrider.native.layout import Layout, LinearStructure
from outrider.native.library import library
from outrider.native.linear import check_weights


class _Joined(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("bytes", "parts", "width")),
        ("epsilon", c_float),
        ("norms", POINTER(c_void_p)),
        ("linear", LinearStructure),
    ]


class JoinedProduct:
    """A drafter's linear layer behind RMS norms of the parts of its input.

    Args:
        norms: [D] of each part.
        linear: without bias, from all parts.

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for weights that the kernels do not read.
    """

    def __init__(self, norms: Sequence[Tensor], epsilon: float, linear: nn.Linear) -> None:
        self._call = library().outrider_joined
        weight = linear.weight.detach()
        self.parts, self.dtype, self.outs = len(norms), weight.dtype, len(weight)
        check_weights([weight, *norms], self.dtype)
        layout, small = Layout([weight], rounds=True), [norm.detach().float().contiguous() for norm in norms]
        places = (c_void_p * len(small))(*[norm.data_ptr() for norm in small])
        self._held = weight, layout, small, places
        self._model = _Joined(weight.element_size(), self.parts, len(norms[0]), epsilon, places, layout.linear(weight))
        self._at = byref(self._model)

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """Outputs [M, V].

        Args:
            rows: the addresses of all parts of the first row, of the second ...; they hold numbers of the dtype of the weight.

        Raises:
            MemoryError: where there is none left.
        """
        out = torch.empty(len(rows) // self.parts, self.outs, dtype=self.dtype)
        self.into(rows, out.data_ptr())
        return out

    def into(self, rows: Sequence[int], out: int) -> None:
        """The same, written to an address.

        Raises:
            MemoryError: where there is none left.
        """
        places, count = (c_void_p * len(rows))(*rows), len(rows) // self.parts
        if self._call(self._at, places, count, out, torch.get_num_threads()):
            raise MemoryError("there is no memory left for a step of the drafter")
