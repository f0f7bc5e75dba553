"""Linear layers, and RMS norms, over few rows on a CPU: by compiled kernels, or with weights laid out once for oneDNN.

The kernels lay weights out when they are first used (`native/linear.py`). Without a compiler, bf16 weights are packed:
`torch.nn.functional.linear` reorders a bf16 weight on every call, which costs as much as the product itself when few rows
are multiplied. oneDNN can keep the reordered weight; torch offers that only through private operators, so they are used
here and nowhere else, after a check that they exist and give the very same numbers. Weights that are mapped from a file are given
back once they are packed.

Either is active only inside `Packed.active()`: a model that the caller uses on its own behaves as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.norm import Norm
from outrider.models.resident import release
from outrider.models.streaming import streaming
from outrider.native.linear import RowNorm, RowProduct, row_norm, row_product

WORKING_ROWS = 16  # packing for one row makes more rows slower
MOST_ROWS = 64  # beyond this the plain kernel is as good


class Packed:
    """The linear layers of a model, made faster for few rows where that gains something; none is copied where the memory has a
    budget.

    Args:
        rounds: rounded to bytes where that is faster, as a drafter's may be (`native/layout.py`).
    """

    def __init__(self, model: nn.Module, rounds: bool = False) -> None:
        self.on = False
        self.products: dict[nn.Module, Fast] = {}
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m) in (nn.Linear, _SwitchedLinear)]
        if streaming(model) is not None:
            self._add({layer: _Passing(layer) for layer in linears})
        else:
            norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm) and type(m) in NORMS]
            products = {layer: row_product([layer.weight], [layer.bias], True, rounds) for layer in linears}
            self._add(products)
            self._add({norm: row_norm(norm.weight, norm.eps) for norm in norms if norm.eps and norm.weight is not None})
            self._pack([layer for layer in linears if layer not in self.products and _packable(layer)])
        for layer, product in self.products.items():
            layer.__class__ = _switched(layer)
            vars(layer)["switch"] = _Switch(self, product)

    def _add(self, found: Mapping[Any, Fast | None]) -> None:
        self.products.update({layer: product for layer, product in found.items() if product is not None})

    def _pack(self, layers: list[nn.Linear]) -> None:
        if layers and _works(layers[0]):
            self._add({layer: _Reordered(layer) for layer in layers})
            for layer in layers:
                release(layer.weight)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the fast products within the block."""
        self.on = bool(self.products)
        try:
            yield
        finally:
            self.on = False


class _Switch:
    """From a layer to its fast product. A copy of the layer has none: its weights may change."""

    def __init__(self, packed: Packed | None, product: Fast | None) -> None:
        self.packed, self.product = packed, product

    def product_for(self, x: Tensor) -> Fast | None:
        """What computes this input, if it is switched on and takes it."""
        on = self.packed is not None and self.packed.on and self.product is not None and self.product.takes(x)
        return self.product if on else None

    def __deepcopy__(self, memo: Any) -> _Switch:
        return _Switch(None, None)

    def __reduce__(self) -> Any:
        return _Switch, (None, None)


class _SwitchedLinear(nn.Linear):
    """A linear layer that goes through its fast product while that is switched on."""

    def forward(self, x: Tensor) -> Tensor:
        product: Fast | None = self.__dict__["switch"].product_for(x)
        return product(x) if product else super().forward(x)


class _SwitchedNorm(Norm):
    """A norm of ours, likewise."""

    def forward(self, x: Tensor) -> Tensor:
        product: Fast | None = self.__dict__["switch"].product_for(x)
        return product(x) if product else super().forward(x)


class _SwitchedRMSNorm(nn.RMSNorm):
    """A norm of torch's, likewise."""

    def forward(self, x: Tensor) -> Tensor:
        product: Fast | None = self.__dict__["switch"].product_for(x)
        return product(x) if product else super().forward(x)


def _switched(layer: nn.Module) -> type[nn.Module]:
    if isinstance(layer, Norm):
        return _SwitchedNorm
    return _SwitchedRMSNorm if isinstance(layer, nn.RMSNorm) else _SwitchedLinear


NORMS = (Norm, nn.RMSNorm, _SwitchedNorm, _SwitchedRMSNorm)  # others may do more


class _Reordered:
    """A product with a bf16 weight in oneDNN's layout."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.bias = pack(layer.weight), layer.bias

    def takes(self, x: Tensor) -> bool:
        """Whether this is an input of few rows."""
        return x.dtype is torch.bfloat16 and x.numel() <= MOST_ROWS * x.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Passing:
    """A product by the kernels with a weight that is only there while its layer runs; the bits are those of one that stays."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels compute this input."""
        product = self._product()
        return product is not None and product.takes(x)

    def __call__(self, x: Tensor) -> Tensor:
        product = self._product()
        assert product is not None
        return product(x)

    def _product(self) -> RowProduct | None:
        return row_product([self.layer.weight], [self.layer.bias])


Fast = RowProduct | RowNorm | _Reordered | _Passing


class Product:
    """One product for several linear layers that read the same input, their outputs side by side.

    With compiled kernels weights are laid out when they are first used. Else they are joined; on machines that gain
    nothing from packing, the layers' own weights then become views of the joined one, so that nothing is held twice; not so
    with `passing`, for a product that is forgotten before the layers' weights are. `rounds`: as for `Packed`.
    """

    def __init__(self, *layers: Any, passing: bool = False, rounds: bool = False) -> None:
        weights = [layer.weight.detach() for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if biases and len(biases) != len(layers):
            raise ValueError("linear layers with and without bias cannot be joined")
        self.bias = torch.cat(biases) if biases else None
        self.few = row_product(weights, [layer.bias for layer in layers], not passing, rounds)
        self.packed, self.apart = False, weights
        if self.few:
            return
        joined = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.packed = all(_packable(layer) for layer in layers) and _works(layers[0])
        self.weight = pack(joined) if self.packed else joined
        if self.packed:
            for layer in layers:
                release(layer.weight)
        if not self.packed and len(layers) > 1 and not passing:
            for layer, part in zip(layers, joined.split([len(w) for w in weights])):
                release(layer.weight)
                layer.weight.data = part

    def __call__(self, x: Tensor) -> Tensor:
        if self.few and self.few.takes(x):
            return self.few(x)
        if self.few:
            out = torch.cat([F.linear(x, weight) for weight in self.apart], dim=-1)
            return out if self.bias is None else out + self.bias
        if self.packed and x.numel() <= MOST_ROWS * x.shape[-1]:
            return linear(x, self.weight, self.bias)
        if self.packed:
            return linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


def pack(weight: Tensor) -> Tensor:
    """A weight in oneDNN's layout for `WORKING_ROWS` rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), WORKING_ROWS)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times a packed weight, plus bias."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and torch.backends.mkldnn.is_available()


def _works(layer: nn.Linear) -> bool:
    """Whether the private operators exist and give bit for bit what the plain layer gives; asked once for each size."""
    size = layer.in_features, layer.out_features, layer.bias is None
    if size not in _PROVED:
        _PROVED[size] = _proves(layer)
    return _PROVED[size]


_PROVED: dict[tuple[int, int, bool], bool] = {}


def _proves(layer: nn.Linear) -> bool:
    x = torch.linspace(-1, 1, 3 * layer.in_features, device="cpu").to(torch.bfloat16).view(1, 3, layer.in_features)
    try:
        return torch.equal(linear(x, pack(layer.weight), layer.bias), layer(x))
    except (AttributeError, RuntimeError, TypeError):
        return False
