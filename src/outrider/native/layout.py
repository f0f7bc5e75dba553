"""Weights laid out for the kernels: one piece of memory, in the order in which a pass reads them.

Shapes: K inputs, V outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from outrider.models.resident import in_huge_pages, release
from outrider.native.library import library

TILE, LINE = 16, 64


class LinearStructure(Structure):
    """A weight [V, K], a bias [V] of float32 or null, V, and whether the weight is laid out."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("outs", c_int64), ("laid", c_int64)]


class Layout:
    """Copies of weights [V, K] in the kernels' own order. Weights that are mapped from a file are given back, so nothing is held
    twice. Those that fill no tile, or whose inputs fill no four bytes, are left out.

    Raises:
        Unavailable: without compiled kernels.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._held = [weight for weight in weights if fits(weight)]  # so that no other comes to lie at their addresses
        places, end = [], 0
        for weight in self._held:
            places.append(end)
            end += -(-_size(weight) // LINE) * LINE
        self.memory = in_huge_pages(end)
        self._at = {_key(weight): self.memory.data_ptr() + place for weight, place in zip(self._held, places)}
        call, threads = library().outrider_lay_out, torch.get_num_threads()
        for weight in self._held:
            outs, inputs = weight.shape
            call(weight.element_size(), weight.data_ptr(), outs, inputs, self._at[_key(weight)], threads)
            release(weight)

    def linear(self, weight: Tensor, bias: int | None = None) -> LinearStructure:
        """A weight for the kernels, laid out or else as it lies.

        Args:
            bias: where it is, [V] of float32.
        """
        laid = self.address(weight)
        return LinearStructure(laid or weight.data_ptr(), bias, len(weight), laid is not None)

    def address(self, weight: Tensor) -> int | None:
        """Where a weight was laid out; None for one that was not."""
        return self._at.get(_key(weight))


def fits(weight: Tensor) -> bool:
    """Whether a weight can be laid out."""
    return len(weight) >= TILE and weight.is_contiguous() and weight.shape[1] * weight.element_size() % 4 == 0


def _size(weight: Tensor) -> int:
    """Bytes of whole tiles."""
    return -(-len(weight) // TILE) * TILE * weight.shape[1] * weight.element_size()


def _key(weight: Tensor) -> tuple[int, torch.Size]:
    return weight.data_ptr(), weight.shape
