"""A gated-delta mixer over the nodes of trees by the kernels: one call instead of some fifty operations.

Shapes: B rows, N nodes, M pending nodes, D width, C convolved channels, H value heads, L nodes of a path.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, addressof, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.mixers.rules import DELTA
from outrider.native.layout import Layout, LinearStructure
from outrider.native.library import Unavailable, library
from outrider.native.linear import FEW_ROWS, check_weights

if TYPE_CHECKING:
    from outrider.cache.factor_states import LayerStates
    from outrider.cache.nodes import Nodes
    from outrider.models.gdn import GatedDeltaMixer


class _Delta(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("bytes", "width", "key_heads", "heads", "key", "value", "taps")),
        *((name, c_float) for name in ("epsilon", "scale")),
        *((name, LinearStructure) for name in ("queries", "keys", "values", "betas", "steps", "gate", "out")),
        *((name, c_void_p) for name in ("convolution", "shift", "step", "rate", "norm")),
    ]


class _Nodes(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "start", "end", "room", "slots", "held", "threads")),
        *(
            (name, c_void_p)
            for name in ("x", "window", "seen", "states", "inputs", "keys", "writes", "logs", "due", "path", "out")
        ),
    ]


class DeltaKernel:
    """A mixer. Its large weights are laid out for the kernels; the small ones are copied.

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for dtypes, devices and layouts that the kernels do not compute.
    """

    def __init__(self, mixer: GatedDeltaMixer) -> None:
        self._call = library().outrider_delta
        linears: list[nn.Linear | None] = [mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.b_proj, mixer.a_proj]
        linears += [mixer.g_proj, mixer.o_proj]
        weights = [None if linear is None else linear.weight.detach() for linear in linears]
        self.dtype, self.width = mixer.q_proj.weight.dtype, mixer.q_proj.in_features
        there = [weight for weight in weights if weight is not None]
        check_weights(there, self.dtype)
        self.key, self.value, self.taps = mixer.key_size, mixer.value_size, mixer.taps
        self.key_heads, self.heads = len(mixer.q_proj.weight) // self.key, len(mixer.v_proj.weight) // self.value
        weight_CW, shift = mixer.convolution()
        parts = (weight_CW.T, shift, mixer.dt_bias, -mixer.A_log.float().exp(), mixer.o_norm.weight)
        small = [part.detach().float().contiguous() for part in parts]
        layout = Layout(there)
        self._held = weights, small, layout
        self._mixer = _Delta(
            weights[0].element_size() if weights[0] is not None else 0,
            self.width,
            self.key_heads,
            self.heads,
            self.key,
            self.value,
            self.taps,
            mixer.o_norm.eps,
            mixer.beta_scale,
            *(LinearStructure() if weight is None else layout.linear(weight) for weight in weights),
            *(part.data_ptr() if part.ndim else None for part in small),
        )

    def takes(self, x_BND: Tensor, held: LayerStates) -> bool:
        """Whether these are few nodes, on states that the kernels read."""
        state_B, inputs_BSC = held.state_B, held.inputs_BSC
        assert state_B is not None and inputs_BSC is not None
        kept = state_B.dtype is torch.float32 and inputs_BSC.dtype is self.dtype is x_BND.dtype
        return (
            kept and x_BND.numel() <= FEW_ROWS * self.width and state_B.is_contiguous() and inputs_BSC.is_contiguous()
        )

    def __call__(self, x_BND: Tensor, held: LayerStates, nodes: Nodes, capacity: int) -> Tensor:
        """Outputs [B, N, D] of nodes, whose factors are left in `held`; what was committed before is applied first.

        Args:
            capacity: pending nodes that buffers have room for.
        """
        x_BND, batch = x_BND.contiguous(), nodes.batch
        out_BND = torch.empty_like(x_BND)
        inputs_BSC = held.room_for_inputs(capacity)
        sizes = {"k": (self.key_heads, self.key), "u": (self.heads, self.value), "g": (self.heads, 1)}
        factors = held.room_for_factors(DELTA, sizes, batch, capacity)
        room = factors["k"].shape[1]
        due_B, path_BL = (c_int64 * batch)(), (c_int64 * (batch * room))()
        for row, path_L in held.due.items():
            due_B[row] = len(path_L)
            path_BL[row * room : row * room + len(path_L)] = path_L.tolist()
        held.due = {}
        assert held.state_B is not None and all(t.is_contiguous() for t in factors.values())
        window = nodes.window(held.window, self.taps, inputs_BSC.shape[1])
        call = _Nodes(
            batch,
            nodes.start,
            nodes.end,
            room,
            inputs_BSC.shape[1],
            held.window,
            torch.get_num_threads(),
            x_BND.data_ptr(),
            window.data_ptr(),
            nodes.seen_BMM.data_ptr(),
            held.state_B.data_ptr(),
            inputs_BSC.data_ptr(),
            *(factors[name].data_ptr() for name in ("k", "u", "g")),
            addressof(due_B),
            addressof(path_BL),
            out_BND.data_ptr(),
        )
        if self._call(byref(self._mixer), byref(call)):
            raise MemoryError("there is no memory left for a pass of the target")
        return out_BND


def delta_kernels(mixers: Iterable[nn.Module]) -> dict[int, DeltaKernel]:
    """Kernels of all gated-delta mixers of ours among some modules, by layer; none where they do not compute every one."""
    from outrider.models.gdn import GatedDeltaMixer

    try:
        return {mixer.layer_idx: DeltaKernel(mixer) for mixer in mixers if isinstance(mixer, GatedDeltaMixer)}
    except (Unavailable, ValueError):
        return {}
