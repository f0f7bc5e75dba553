"""How tokens follow one another through a Mamba-2 mixer: as sequences, unrolled training steps, a prompt, nodes of a tree.

All give the same numbers where they mean the same tokens.

Shapes: B rows, T or N tokens, M pending nodes, C convolved channels, H heads, I = H * head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from outrider.cache.factors import Factors
from outrider.cache.nodes import window_slots
from outrider.cache.pending import Pending
from outrider.mixers import short_conv, ssd
from outrider.models.mamba_mixer import TAPS, MambaMixer, WholeScan
from outrider.native.library import Unavailable
from outrider.native.mixer import MixerKernel


def scan_sequence(mixer: MambaMixer, inputs_BTC: Tensor, dt_BTH: Tensor) -> Tensor:
    """Whole sequences from nothing."""
    return UnrolledScan()(mixer, inputs_BTC, dt_BTH)


class UnrolledScan:
    """Whole sequences of one mixer, step after step: the n-th call is training step n - 1 (see `ssd.unrolled`)."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.steps: list[ssd.Inputs] = []

    def __call__(self, mixer: MambaMixer, inputs_BTC: Tensor, dt_BTH: Tensor) -> Tensor:
        """Outputs [B, T, I]."""
        self.inputs.append(inputs_BTC)
        x, b, c = mixer.split(short_conv.unrolled(self.inputs, *mixer.conv))
        self.steps.append(ssd.Inputs(x, b, c, mixer.step_sizes(dt_BTH)))
        return ssd.unrolled(self.steps, mixer.A, mixer.D).flatten(2)


class PromptScan:
    """One sequence behind what was scanned before; windows and states after its last token are kept by layer."""

    def __init__(self) -> None:
        self.windows: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}

    def __call__(self, mixer: MambaMixer, inputs_BTC: Tensor, dt_BTH: Tensor) -> Tensor:
        """Outputs [B, T, I]."""
        layer, window = mixer.layer, self.windows.get(mixer.layer)
        inputs_BTC = inputs_BTC.to(mixer.wide)
        convolved, self.windows[layer] = short_conv.sequence(inputs_BTC, *mixer.conv, window)
        inputs = ssd.Inputs(*mixer.split(convolved), mixer.step_sizes(dt_BTH))
        y, self.states[layer] = ssd.chunked(inputs, mixer.A, mixer.D, self.states.get(layer))
        return y.flatten(2)


class TreeScan:
    """The nodes of a call, whatever their tree, in one pass; their factors stay in `factors`.

    Args:
        start: the pending index of the call's first node.
    """

    def __init__(self, factors: Factors, nodes: Pending, start: int) -> None:
        factors.ensure(nodes.count)
        self.factors, self.start, self.end = factors, start, nodes.count
        slots_BNK = window_slots(nodes, start, TAPS - 1, TAPS)
        first_B = np.arange(nodes.batch) * (TAPS - 1 + factors.capacity)
        self.slots_X = torch.from_numpy((first_B[:, None, None] + slots_BNK).ravel()).to(factors.device)
        seen = nodes.ancestors_BMM[:, start : self.end, : self.end]
        self.seen_BNM = torch.from_numpy(seen).to(factors.device)

    def __call__(self, mixer: MambaMixer, inputs_BNC: Tensor, dt_BNH: Tensor) -> Tensor:
        """Outputs [B, N, I]."""
        held, new, known = self.factors.layers[mixer.layer], slice(self.start, self.end), slice(0, self.end)
        held.inputs_BMC[:, TAPS - 1 + self.start : TAPS - 1 + self.end] = inputs_BNC
        windows_XC = held.inputs_BMC.flatten(0, 1).index_select(0, self.slots_X)
        windows_BNKC = windows_XC.view(*inputs_BNC.shape[:2], TAPS, mixer.channels)
        x, b, c = mixer.split(short_conv.gathered(windows_BNKC, *mixer.conv))
        held.x_BMHP[:, new], held.b_BMS[:, new], held.dt_BHM[..., new] = x, b, mixer.step_sizes(dt_BNH).mT
        dt_BHM = held.dt_BHM[..., known]
        held.log_BHM[..., new] = (dt_BHM * mixer.A[:, None]) @ self.seen_BNM.mT.to(dt_BHM.dtype)
        factors = ssd.Factors(held.x_BMHP[:, known], held.b_BMS[:, known], dt_BHM, held.log_BHM[..., known])
        return ssd.tree(held.state_BHPS, factors, c, self.seen_BNM, mixer.D).flatten(2)


class KernelScan(TreeScan, WholeScan):
    """The same by compiled kernels.

    Args:
        kernels: of the mixers, by layer.
    """

    def __init__(self, factors: Factors, nodes: Pending, start: int, kernels: Mapping[int, MixerKernel]) -> None:
        super().__init__(factors, nodes, start)
        self.kernels = kernels

    def mixed(self, mixer: MambaMixer, x_BND: Tensor) -> Tensor:
        """The mixer's outputs [B, N, D]."""
        held = self.factors.layers[mixer.layer]
        return self.kernels[mixer.layer](x_BND, held, self.slots_X, self.seen_BNM)


def mixer_kernels(modules: Iterable[nn.Module]) -> dict[int, MixerKernel]:
    """Kernels of all mixers among some modules, by layer; none where they do not compute every one."""
    try:
        return {mixer.layer: MixerKernel(mixer) for mixer in modules if isinstance(mixer, MambaMixer)}
    except (Unavailable, ValueError):
        return {}


def tree_scan(factors: Factors, nodes: Pending, start: int, kernels: Mapping[int, MixerKernel]) -> TreeScan:
    """The nodes of a call, by kernels where there are any."""
    return KernelScan(factors, nodes, start, kernels) if kernels else TreeScan(factors, nodes, start)
