"""A vocabulary head beside which its weights lie in bytes: the highest score of a row is found without most logits, bit for bit.

How, and why nothing is lost, is told in `screen.cpp`. Half of the head is read, and half of its products are made.

Shapes: B rows, N nodes, M = B * N, K inputs, V vocabulary.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int64, c_void_p
from functools import cached_property

import torch
from torch import Tensor

from outrider.models.resident import in_huge_pages, release
from outrider.native.layout import CHUNK, LONGEST, TILE, LinearStructure, fits, lay_out, multiplies_bytes, parts
from outrider.native.library import library
from outrider.native.linear import DTYPES
from outrider.scores import Scores

CPU = torch.device("cpu")
LARGEST = 2.0**40  # norm of an output's weights


class _Screen(Structure):
    _fields_ = [
        ("bytes", c_int64),
        ("inputs", c_int64),
        ("exact", LinearStructure),
        ("coarse", LinearStructure),
        ("errors", c_void_p),
        ("sizes", c_void_p),
    ]


class Screen:
    """What finds the highest logits of a head.

    Args:
        weight: of the head [V, K], without a bias.
        exact: the same, as the kernels take it, as long as it is there.

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for a head that cannot be screened, or gains nothing by it here.
    """

    def __init__(self, weight: Tensor, exact: LinearStructure) -> None:
        self._library = library()
        self.vocab, self.inputs = weight.shape
        if not multiplies_bytes():
            raise ValueError("this CPU does not multiply bytes")
        if weight.dtype not in DTYPES or not fits(weight) or self.inputs % 4 or self.inputs > LONGEST // 2:
            raise ValueError("its size or dtype is none that kernels round to bytes")
        if exact.bias or not exact.laid:
            raise ValueError("it has a bias, or is not laid out")
        self.dtype, self._weight = weight.dtype, weight
        self._memory = in_huge_pages(-(-self.vocab // TILE) * TILE * self.inputs)
        self._numbers_3V = torch.empty(3, self.vocab)
        self._round(weight)
        scales, errors, sizes = (part.data_ptr() for part in self._numbers_3V)
        if not bool((self._numbers_3V.abs() <= LARGEST).all()):
            raise ValueError("its weights are not finite, or too large")
        coarse = LinearStructure(self._memory.data_ptr(), None, self.vocab, True, scales)
        self._screen = _Screen(weight.element_size(), self.inputs, exact, coarse, errors, sizes)
        self._at = byref(self._screen)

    def _round(self, weight: Tensor) -> None:
        """Some outputs at a time: so that little of the weight has to be in memory."""
        bytes_VK = torch.empty(min(CHUNK, self.vocab) + TILE, self.inputs, dtype=torch.uint8)
        for start, end in parts(self.vocab):
            part, found = weight[start:end], bytes_VK[: end - start]
            numbers = [numbers_V[start:].data_ptr() for numbers_V in self._numbers_3V]
            size = weight.element_size(), part.data_ptr(), end - start, self.inputs
            self._library.outrider_in_bytes(*size, found.data_ptr(), *numbers, torch.get_num_threads())
            lay_out(found, self._memory.data_ptr() + start * self.inputs)
            release(part)

    @property
    def bytes(self) -> int:
        """Memory that this takes beside the head."""
        return self._memory.numel() + self._numbers_3V.numel() * 4

    def highest(self, x_MK: Tensor) -> tuple[list[int], list[float]]:
        """The highest logit of every row and where it is, the lowest token of several; NaN where there is one."""
        rows = len(x_MK)
        tokens, values = (c_int64 * rows)(), (c_float * rows)()
        threads = torch.get_num_threads()
        self._done(self._library.outrider_screen_highest(self._at, x_MK.data_ptr(), rows, tokens, values, threads))
        return list(tokens), list(values)

    def bounds(self, x_MK: Tensor) -> Tensor:
        """Numbers [M, V] that no logit is above."""
        out_MV = x_MK.new_empty(len(x_MK), self.vocab)
        at = self._at, x_MK.data_ptr(), len(x_MK), out_MV.data_ptr(), torch.get_num_threads()
        self._done(self._library.outrider_screen_bounds(*at))
        return out_MV

    def drawn(self, x_K: Tensor, bounds_V: Tensor, temperature: float, noise_V: Tensor) -> tuple[int, float]:
        """The highest of a row's logits divided by a temperature with noise on top, and where it is.

        Args:
            bounds_V: of the row.
        """
        assert noise_V.dtype is torch.float32 and noise_V.is_contiguous() and len(noise_V) >= self.vocab
        token, value = c_int64(), c_float()
        row = x_K.data_ptr(), bounds_V.data_ptr(), temperature, noise_V.data_ptr(), byref(token), byref(value)
        self._done(self._library.outrider_screen_drawn(self._at, *row, torch.get_num_threads()))
        return token.value, value.value

    def logits(self, x_MK: Tensor) -> Tensor:
        """All of them, [M, V]."""
        out_MV = x_MK.new_empty(len(x_MK), self.vocab)
        head, out = byref(self._screen.exact), out_MV.data_ptr()
        size, threads = x_MK.element_size(), torch.get_num_threads()
        self._library.outrider_product(size, head, 1, self.inputs, x_MK.data_ptr(), len(x_MK), out, self.vocab, threads)
        return out_MV

    @staticmethod
    def _done(failed: int) -> None:
        if failed:
            raise MemoryError("there is no memory left for a pass of the target")


class Screened:
    """The nodes of a pass, of all B rows: what is asked of one is made for all, since it takes hardly longer.

    Args:
        hidden_MK: what enters the head, row after row.
    """

    def __init__(self, screen: Screen, hidden_MK: Tensor, batch: int) -> None:
        self.screen, self._x_MK = screen, hidden_MK
        self.batch, self.nodes = batch, hidden_MK.shape[0] // batch

    def rows(self) -> list[Scores]:
        """By row."""
        return [_ScreenedScores(self, row) for row in range(self.batch)]

    @cached_property
    def logits_MV(self) -> Tensor:
        """All of them."""
        return self.screen.logits(self._x_MK)

    @cached_property
    def highest(self) -> tuple[list[int], list[float]]:
        """Of all nodes."""
        return self.screen.highest(self._x_MK)

    @cached_property
    def _bounds_MV(self) -> Tensor:
        return self.screen.bounds(self._x_MK)

    def drawn(self, node: int, temperature: float, noise_V: Tensor) -> tuple[int, float]:
        """Of one node, with noise."""
        return self.screen.drawn(self._x_MK[node], self._bounds_MV[node], temperature, noise_V)


class _ScreenedScores(Scores):
    """Those of one row."""

    def __init__(self, of: Screened, row: int) -> None:
        self._of, self._all = of, range(row * of.nodes, (row + 1) * of.nodes)

    @property
    def logits_NV(self) -> Tensor:
        """All of them, made when they are first asked for."""
        return self._of.logits_MV[self._all.start : self._all.stop]

    @property
    def vocab(self) -> int:
        """V."""
        return self._of.screen.vocab

    @property
    def device(self) -> torch.device:
        """A CPU."""
        return CPU

    def highest(
        self, nodes: slice, temperature: float = 1.0, noise_V: Tensor | None = None
    ) -> tuple[list[int], list[float]]:
        """See `Scores`."""
        asked = self._all[nodes]
        if noise_V is None:
            tokens, values = self._of.highest
            return tokens[asked.start : asked.stop], values[asked.start : asked.stop]
        found = [self._of.drawn(node, temperature, noise_V) for node in asked]
        return [token for token, _ in found], [value for _, value in found]
