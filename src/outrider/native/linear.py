"""Linear layers and norms over rows by the kernels, which read weights as they lie, or laid out once.

Shapes: M rows, K inputs, V outputs, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from ctypes import byref

import torch
from torch import Tensor

from outrider.native.layout import Layout, LinearStructure, fits
from outrider.native.library import Unavailable, library

DTYPES = (torch.bfloat16, torch.float32)
FEW_ROWS = 32  # from here on torch's products are as fast or faster


def check_weights(weights: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Refuse weights that the kernels do not read.

    Raises:
        ValueError: in that case.
    """
    for weight in weights:
        if weight.device.type != "cpu" or dtype not in DTYPES or weight.dtype is not dtype:
            raise ValueError(f"the kernels compute bf16 or float32 on a CPU, not {weight.dtype} on {weight.device}")
        if not weight.is_contiguous():
            raise ValueError("the kernels want weights row after row")


class RowProduct:
    """x times the weights of linear layers that read the same input, plus their biases, the outputs side by side.

    Every output depends on its own row alone, bit for bit. Weights as they lie are followed when they are changed in place, and
    take few rows; those that are laid out, when they are first used, are copies, and take any number of rows.

    Args:
        weights: [V, K] each.
        biases: of each, [V] or None.
        laid: lay them out.
        rounds: rounded to bytes, as a drafter's may be (`Layout`).

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for weights that the kernels do not read.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], laid: bool = False, rounds: bool = False
    ) -> None:
        self._call = library().outrider_product
        weights = [weight.detach() for weight in weights]
        biases = [None if bias is None else bias.detach().float().contiguous() for bias in biases]
        self.dtype, self.inputs = weights[0].dtype, weights[0].shape[1]
        check_weights(weights, self.dtype)
        if any(weight.shape[1] != self.inputs for weight in weights):
            raise ValueError("the kernels want weights of one width")
        self._held = weights, biases
        self._bytes, self.outs = weights[0].element_size(), sum(map(len, weights))
        self._most = FEW_ROWS * self.inputs
        self._layout: Layout | None = None
        self._is_to_be_laid, self._rounds = laid and all(map(fits, weights)), rounds
        self._point()

    def _point(self) -> None:
        layout = self._layout or Layout([])
        biases = [None if bias is None else bias.data_ptr() for bias in self._held[1]]
        parts = [layout.linear(weight, bias) for weight, bias in zip(self._held[0], biases)]
        self._parts = (LinearStructure * len(parts))(*parts)
        self._at, self._count = byref(self._parts), len(parts)

    def _lay_out(self) -> None:
        if self._is_to_be_laid:
            self._layout, self._is_to_be_laid = Layout(self._held[0], self._rounds), False
            self._point()

    def beside(self, weight: Tensor) -> RowProduct:
        """The same product with the outputs of another weight behind, which is read as it lies."""
        self._lay_out()
        check_weights([weight], self.dtype)
        made, (weights, biases) = copy.copy(self), self._held
        made._held, made.outs = ([*weights, weight], [*biases, None]), self.outs + len(weight)
        made._point()
        return made

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels multiply this input."""
        few = self._is_to_be_laid or self._layout is not None or x.numel() <= self._most
        return x.dtype is self.dtype and few and x.shape[-1] == self.inputs

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [..., V] of an input [..., K] in the dtype of the weights."""
        self._lay_out()
        x = x.contiguous()
        shape = x.shape
        out = x.new_empty(*shape[:-1], self.outs)
        rows, threads = x.numel() // self.inputs, torch.get_num_threads()
        self._call(
            self._bytes, self._at, self._count, self.inputs, x.data_ptr(), rows, out.data_ptr(), self.outs, threads
        )
        return out


def row_product(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, laid: bool = False, rounds: bool = False
) -> RowProduct | None:
    """The product by the kernels; None where they do not compute it."""
    try:
        return RowProduct(weights, biases or [None] * len(weights), laid, rounds)
    except (Unavailable, ValueError):
        return None


class RowNorm:
    """An RMS norm. Its weights are copied: a change of them is not followed.

    Args:
        weight: [D].

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for dtypes and devices that the kernels do not compute.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._call = library().outrider_norm
        self.dtype, self.width, self.epsilon = weight.dtype, len(weight), epsilon
        check_weights([weight], self.dtype)
        self._weight, self._bytes = weight.detach().float().contiguous(), weight.element_size()
        self._at, self._most = self._weight.data_ptr(), FEW_ROWS * self.width

    def takes(self, x: Tensor) -> bool:
        """Whether this is an input of few rows."""
        return x.dtype is self.dtype and x.numel() <= self._most and x.shape[-1] == self.width

    def __call__(self, x: Tensor) -> Tensor:
        """The normed input [..., D]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // self.width
        self._call(self._bytes, self._at, self.epsilon, self.width, x.data_ptr(), rows, out.data_ptr())
        return out


def row_norm(weight: Tensor, epsilon: float) -> RowNorm | None:
    """The norm by the kernels; None where they do not compute it."""
    try:
        return RowNorm(weight, epsilon)
    except (Unavailable, ValueError):
        return None
