"""A Mamba-2 mixer over the nodes of trees by the kernels: one call instead of some thirty operations.

Shapes: B rows, N nodes, M pending nodes, D width, K taps.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.native.layout import Layout, LinearStructure
from outrider.native.library import library
from outrider.native.linear import check_weights

if TYPE_CHECKING:
    from outrider.cache.factors import LayerFactors
    from outrider.models.mamba_mixer import MambaMixer


class _Mixer(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("bytes", "width", "heads", "size", "state", "taps")),
        ("epsilon", c_float),
        *((name, LinearStructure) for name in ("in", "out")),
        *((name, c_void_p) for name in ("convolution", "shift", "step", "rate", "skip", "norm")),
    ]


class _Nodes(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "start", "end", "room", "threads")),
        *(
            (name, c_void_p)
            for name in ("x", "slots", "seen", "states", "inputs", "xs", "keys", "steps", "logs", "out")
        ),
    ]


class MixerKernel:
    """A drafter's mixer. Its large weights are laid out for the kernels, rounded to bytes; the small ones are copied.

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for dtypes, devices and layouts that the kernels do not compute.
    """

    def __init__(self, mixer: MambaMixer) -> None:
        self._call = library().outrider_mixer
        weights = [mixer.in_proj.weight.detach(), mixer.out_proj.weight.detach()]
        self.dtype, self.width, self.heads = weights[0].dtype, weights[0].shape[1], mixer.num_heads
        check_weights(weights, self.dtype)
        convolution, shift = mixer.conv
        parts = (convolution, shift, mixer.dt_bias, mixer.A, mixer.D, mixer.norm.weight)
        small = [part.detach().float().contiguous() for part in parts]
        layout = Layout(weights, rounds=True)
        self._held = weights, small, layout
        self._mixer = _Mixer(
            weights[0].element_size(),
            self.width,
            mixer.num_heads,
            mixer.head_size,
            mixer.state_size,
            len(convolution),
            mixer.norm.eps,
            *(layout.linear(weight) for weight in weights),
            *(part.data_ptr() for part in small),
        )

    def __call__(self, x_BND: Tensor, held: LayerFactors, slots_X: Tensor, seen_BNM: Tensor) -> Tensor:
        """Outputs [B, N, D] of nodes, whose factors are left in `held`.

        Args:
            slots_X: what each node convolves, as rows of all inputs that are held, oldest first, [B * N * K].
            seen_BNM: which pending nodes are ancestors of a node, or itself; the last N are the nodes.
        """
        x_BND, seen_BNM = x_BND.contiguous(), seen_BNM.contiguous()
        batch, new, end = seen_BNM.shape
        out_BND = torch.empty_like(x_BND)
        tensors = (held.state_BHPS, held.inputs_BMC, held.x_BMHP, held.b_BMS, held.dt_BHM, held.log_BHM)
        assert x_BND.dtype is self.dtype and all(t.dtype is torch.float32 and t.is_contiguous() for t in tensors)
        call = _Nodes(
            batch,
            end - new,
            end,
            held.b_BMS.shape[1],
            torch.get_num_threads(),
            x_BND.data_ptr(),
            slots_X.data_ptr(),
            seen_BNM.data_ptr(),
            *(tensor.data_ptr() for tensor in tensors),
            out_BND.data_ptr(),
        )
        if self._call(byref(self._mixer), byref(call)):
            raise MemoryError("there is no memory left for a step of the drafter")
        return out_BND
