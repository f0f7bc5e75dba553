"""A device that is not there: its tensors live in the host's memory, but may be mixed with the host's no more than a GPU's.

Work on it is real, so that texts and losses can be compared; what a GPU would refuse is refused, and whatever makes the host
wait for the device is counted. It finds what a GPU would find first: tensors made on the wrong device, and needless waiting. It
cannot show how kernels of a GPU round, how fast they are, or what they do not implement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("maia", 0)  # a name that torch knows and that needs no set-up
NAMES = (DEVICE.type, "meta")  # what torch's own code in C++ takes the tensors to be on
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default, aten.to.dtype_layout, aten.to.device, aten.to.dtype)
FRESH = (aten.lift_fresh.default, aten.lift.default)
READS = (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select)


class StrictTensor(torch.Tensor):
    """A tensor of the device."""

    inner: torch.Tensor
    reads: ClassVar[int] = 0
    """How often the host has waited for the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> StrictTensor:
        about: dict[str, Any] = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="meta", **about)
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: StrictTensor) -> None:
        assert value.shape == self.shape and value.dtype == self.dtype
        self.inner = value.inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        other = args[0] if args and isinstance(args[0], torch.Tensor) else None
        copy = kwargs.pop("copy", False)
        found = (other.device, other.dtype) if other is not None else torch._C._nn._parse_to(*args, **kwargs)[:2]
        device, dtype = found[0] or DEVICE, found[1] or self.dtype
        if device.type != DEVICE.type:
            return super().to(device, dtype, copy=copy)
        return super().to(dtype, copy=copy) if copy or dtype is not self.dtype else self

    def numpy(self, *args: Any) -> Any:
        raise TypeError(f"{DEVICE} has no numpy; copy the tensor to the host first")

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_placed(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_placed(index), value)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"{self.inner!r} on {DEVICE}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation where its tensors are."""
    given = list(_leaves((*args, *kwargs.values())))
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    ours = any(isinstance(t, StrictTensor) for t in tensors)
    wanted = next((leaf for leaf in given if isinstance(leaf, torch.device)), None)
    here = ours if wanted is None else wanted.type in NAMES
    if ours:
        _check(func, args, tensors)
        StrictTensor.reads += _waits(func, args, here)
    found = func(*_each(_inner, args), **{name: _each(_inner, value) for name, value in kwargs.items()})
    written = _written(func, args, kwargs)
    if written:
        assert all(w.shape == w.inner.shape for w in written if isinstance(w, StrictTensor)), func
        return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
    if not here:
        return found
    # a view of an ordinary tensor is an ordinary tensor even where new ones are not
    with torch.inference_mode(any(isinstance(t, torch.Tensor) and t.is_inference() for t in _leaves((found,)))):
        return _each(lambda x: StrictTensor(x) if isinstance(x, torch.Tensor) else x, found)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_each(change, part) for part in value])
    return change(value)


def _check(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """What a GPU refuses: tensors of the host beside its own. Single numbers may come from the host, but not stay there."""
    if func in COPIES or func in FRESH:
        return
    strangers = [t for t in tensors if not isinstance(t, StrictTensor) and t.ndim > 0]
    if strangers or any(not isinstance(t, StrictTensor) for t in _written(func, args, {})):
        shapes = [(tuple(t.shape), str(t.device)) for t in tensors]
        raise RuntimeError(f"{func} has tensors on {DEVICE} and on the host: {shapes}")


def _waits(func: Any, args: Any, here: bool) -> bool:
    if func in COPIES:
        return not here or (func is aten.copy_.default and not isinstance(args[0], StrictTensor))
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return any(t is not None and t.dtype is torch.bool for t in args[1])
    return func.overloadpacket in READS


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to and returns."""
    if not func._schema.is_mutable:
        return []
    places = enumerate(func._schema.arguments)
    named = [
        (args[i] if i < len(args) else kwargs.get(a.name)) for i, a in places if a.alias_info and a.alias_info.is_write
    ]
    return [t for t in _leaves(named) if isinstance(t, torch.Tensor)]


def _placed(index: Any) -> Any:
    """Lists as tensors of the device, which torch would make itself if it knew the device."""
    if isinstance(index, tuple):
        return tuple(_placed(part) for part in index)
    return torch.tensor(index, device=DEVICE) if isinstance(index, list) else index


def _inner(x: Any) -> Any:
    if isinstance(x, StrictTensor):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) and x.type in NAMES else x


class _Strict(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


@contextmanager
def strict_device() -> Iterator[torch.device]:
    """The device, within the block."""
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` then fills a tensor of the host and copies it
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a wrapper cannot change its dtype
    try:
        with _Strict():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@contextmanager
def counting() -> Iterator[list[int]]:
    """How often the host waits within the block: the one entry of the list, once the block has ended."""
    found, before = [0], StrictTensor.reads
    yield found
    found[0] = StrictTensor.reads - before
