"""Shifts along time (dimension 1), with zeros where nothing was."""

from __future__ import annotations

import torch
from torch import Tensor


def delay(x: Tensor, steps: int) -> Tensor:
    """Position t gets what was at t - steps."""
    steps = min(steps, x.shape[1])
    return torch.cat([x.new_zeros(x.shape[0], steps, *x.shape[2:]), x[:, : x.shape[1] - steps]], 1) if steps else x


def advance(x: Tensor, steps: int) -> Tensor:
    """Position t gets what was at t + steps."""
    steps = min(steps, x.shape[1])
    return torch.cat([x[:, steps:], x.new_zeros(x.shape[0], steps, *x.shape[2:])], 1) if steps else x
