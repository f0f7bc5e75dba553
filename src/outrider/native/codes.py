"""Weights of bfloat16 in twelve bits a number, exactly: a code for each of the sixteen upper bytes that nearly all numbers of a
piece have, and patches for the others (`coded.h`). A quarter less is held, and read where memory decides how long a pass takes.

Shapes: K inputs, V outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from outrider.models.resident import release
from outrider.native.library import library

PIECE = 48  # outputs
RARE = 4096  # numbers a patch, at least: patches take time
_PLACE, _COUNT = 2, 3  # of a piece, behind sixteen bytes: where its patches are, and how many
_NO_STEP = -1  # of a patch: all bits
_WORD = 8  # bytes of a patch, and a quarter of what is kept of a piece


class Codes:
    """The codes of a weight [V, K], which depend on the weight alone, and room for the patches that writing it fills in.

    Args:
        cuts: where parts of the outputs start and end: so much of a weight that is mapped from a file is in memory at a time.

    Raises:
        Unavailable: without compiled kernels.
    """

    def __init__(self, weight_VK: Tensor, cuts: Iterable[tuple[int, int]]) -> None:
        outs, inputs = weight_VK.shape
        self._pieces = torch.zeros(-(-outs // PIECE), 4, dtype=torch.int64, device="cpu")
        for start, end in cuts:
            part_VK, threads = weight_VK[start:end], torch.get_num_threads()
            library().outrider_choose_codes(part_VK.data_ptr(), end - start, inputs, self.at(start), threads)
            release(part_VK)
        counts = self._pieces[:, _COUNT]
        self.patches, self.pays = int(counts.sum()), int(counts.sum()) * RARE <= weight_VK.numel()
        if self.pays:
            # one of no step behind those of each piece
            behind = torch.arange(1, len(counts) + 1, device="cpu") + counts.cumsum(0)
            self._patches = torch.full((int(behind[-1]),), _NO_STEP, device="cpu")
            self._pieces[:, _PLACE] = self._patches.data_ptr() + _WORD * (behind - 1 - counts)

    def at(self, output: int = 0) -> int:
        """Where the codes are of the piece that begins with an output."""
        return self._pieces.data_ptr() + output // PIECE * self._pieces.shape[1] * _WORD


def takes_codes(weight: Tensor) -> bool:
    """Whether the kernels read codes on this CPU, and this weight can be written in them."""
    return weight.dtype is torch.bfloat16 and weight.shape[1] % 4 == 0 and bool(library().outrider_reads_codes())
