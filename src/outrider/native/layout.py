"""Weights laid out for the kernels: one piece of memory, in the order in which a pass reads them.

A drafter's are rounded to bytes where the CPU multiplies bytes: half as much is read. Whether a draft is good is all that
depends on it; a target's weights stay what they are, in twelve bits a number where that is possible (`codes.py`).

Shapes: K inputs, V outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, c_int64, c_void_p
from itertools import pairwise

import torch
from torch import Tensor

from outrider.models.resident import in_huge_pages, release
from outrider.native.codes import PIECE, Codes, takes_codes
from outrider.native.library import library

TILE, LINE = 16, 64
CHUNK = 64 * PIECE  # outputs that are laid out at a time
LONGEST = 1 << 16  # inputs whose sum of products of bytes fits into four bytes


class LinearStructure(Structure):
    """A weight [V, K], a bias [V] of float32 or null, V, whether the weight is laid out, the scales [V] of one in bytes, and the
    codes of one in codes."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("outs", c_int64),
        ("laid", c_int64),
        ("scales", c_void_p),
        ("codes", c_void_p),
    ]


class Layout:
    """Copies of weights [V, K] in the kernels' own order. Weights that are mapped from a file are given back, so nothing is held
    twice. Those that fill no tile, or whose inputs fill no four bytes, are left out.

    Args:
        rounds: round bfloat16 weights to bytes, with a scale for each output, where the CPU multiplies bytes.

    Raises:
        Unavailable: without compiled kernels.
    """

    def __init__(self, weights: Iterable[Tensor], rounds: bool = False) -> None:
        self._held = [weight for weight in weights if fits(weight)]  # so that no other comes to lie at their addresses
        rounded = {_key(weight): _rounded(weight) for weight in self._held if rounds and _rounds(weight)}
        self._scales = {key: scales_V for key, (_, scales_V) in rounded.items()}
        sources = [rounded[_key(weight)][0] if _key(weight) in rounded else weight for weight in self._held]
        memory = in_huge_pages(sum(_whole_lines(_size(source)) for source in sources))
        self.codes, self._at, end = dict[tuple[int, torch.Size], Codes](), dict[tuple[int, torch.Size], int](), 0
        for weight, source in zip(self._held, sources):
            codes = _codes(source)
            if codes is not None:
                self.codes[_key(weight)] = codes
            self._at[_key(weight)] = memory.data_ptr() + end
            lay_out(source, memory.data_ptr() + end, codes)
            release(weight)
            end += _whole_lines(_held_bytes(_size(source), codes))
        self.memory = memory[:end]  # pages behind it were never touched

    def linear(self, weight: Tensor, bias: int | None = None) -> LinearStructure:
        """A weight for the kernels, laid out or else as it lies.

        Args:
            bias: where it is, [V] of float32.
        """
        laid, scales_V = self.address(weight), self._scales.get(_key(weight))
        scales = scales_V.data_ptr() if scales_V is not None else None
        codes = self.codes[_key(weight)].at() if _key(weight) in self.codes else None
        return LinearStructure(laid or weight.data_ptr(), bias, len(weight), laid is not None, scales, codes)

    def address(self, weight: Tensor) -> int | None:
        """Where a weight was laid out; None for one that was not."""
        return self._at.get(_key(weight))


def lay_out(weight_VK: Tensor, at: int, codes: Codes | None = None) -> None:
    """Copy a weight to an address in the kernels' order, some outputs at a time: of one that is mapped from a file hardly more
    than these is in memory.

    Args:
        codes: write it in these.

    Raises:
        Unavailable: without compiled kernels.
    """
    outs, inputs = weight_VK.shape
    call, size, threads = library().outrider_lay_out, weight_VK.element_size(), torch.get_num_threads()
    for start, end in parts(outs):
        part_VK, place = weight_VK[start:end], at + _held_bytes(start * inputs * size, codes)
        call(size, part_VK.data_ptr(), end - start, inputs, place, codes and codes.at(start), threads)
        release(part_VK)


def parts(outs: int) -> Iterable[tuple[int, int]]:
    """Where parts of so many outputs start and end; the last one is never less than a tile, as the kernels want it."""
    return pairwise([*range(0, max(outs - TILE + 1, 1), CHUNK), outs])


def fits(weight: Tensor) -> bool:
    """Whether a weight can be laid out."""
    return len(weight) >= TILE and weight.is_contiguous() and weight.shape[1] * weight.element_size() % 4 == 0


def _codes(weight: Tensor) -> Codes | None:
    """The codes of a weight; None for one that is not written in codes."""
    if not takes_codes(weight):
        return None
    codes = Codes(weight, parts(len(weight)))
    return codes if codes.pays else None


def _rounds(weight: Tensor) -> bool:
    """Whether a weight can be rounded to bytes, and gains by it. One in float32 is there to be compared with."""
    inputs = weight.shape[1]
    return weight.dtype is torch.bfloat16 and inputs % 4 == 0 and inputs <= LONGEST and multiplies_bytes()


def multiplies_bytes() -> bool:
    """Whether the kernels were compiled for a CPU that multiplies bytes (AVX512-VNNI)."""
    return bool(library().outrider_multiplies_bytes())


def _rounded(weight_VK: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as bytes, larger by 128 so that none is below 0, and its scales [V]."""
    bytes_VK = torch.empty(weight_VK.shape, dtype=torch.uint8)
    scales_V = torch.empty(len(weight_VK))
    for part_VK, out_VK, scale_V in zip(*(whole.split(CHUNK // 8) for whole in (weight_VK, bytes_VK, scales_V))):
        wide_VK = part_VK.float()
        highest_V1 = wide_VK.abs().amax(-1, keepdim=True)
        out_VK.copy_((wide_VK * (127 / highest_V1).nan_to_num_(posinf=0.0)).round_().add_(128))
        torch.div(highest_V1[:, 0], 127, out=scale_V)
    return bytes_VK, scales_V


def _held_bytes(size: int, codes: Codes | None) -> int:
    """What is left of so many bytes."""
    return size if codes is None else size * 3 // 4


def _whole_lines(size: int) -> int:
    return -(-size // LINE) * LINE


def _size(weight: Tensor) -> int:
    """Bytes of whole tiles."""
    return -(-len(weight) // TILE) * TILE * weight.shape[1] * weight.element_size()


def _key(weight: Tensor) -> tuple[int, torch.Size]:
    return weight.data_ptr(), weight.shape
