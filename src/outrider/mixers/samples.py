"""Random inputs of recurrences in the sizes of real mixers, and trees of known kinds, to measure with.

Shapes: B rows, N nodes, J key heads, H value heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.mixers import gated_delta, linear
from outrider.mixers.rules import DELTA, DELTA_PER_CHANNEL, DUALITY, DualityInputs


class Size(NamedTuple):
    """Of a mixer's state: key heads, value heads, key size, value size."""

    key_heads: int
    heads: int
    key: int
    value: int

    @classmethod
    def of(cls, k_BMJK: Tensor, u_BMHV: Tensor) -> Size:
        """Of the state that such factors belong to."""
        return cls(*k_BMJK.shape[2:3], *u_BMHV.shape[2:3], *k_BMJK.shape[3:], *u_BMHV.shape[3:])

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.key_heads == self.heads else f"{self.key_heads}/{self.heads}"
        return f"{heads} heads {self.key}x{self.value}"

    @property
    def numbers(self) -> int:
        """In a state."""
        return self.heads * self.key * self.value


def delta_inputs(
    size: Size, rows: int, nodes: int, device: torch.device, per_channel: bool = False
) -> gated_delta.Inputs:
    """Of the gated delta rule."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, nodes, *shape, device=device)

    q, k = (gated_delta.normalised(normal(size.key_heads, size.key)) for _ in range(2))
    decay = -torch.rand(rows, nodes, size.heads, size.key if per_channel else 1, device=device)
    beta = torch.rand(rows, nodes, size.heads, device=device)
    return gated_delta.Inputs(q, k, normal(size.heads, size.value), decay, beta)


def per_channel_inputs(size: Size, rows: int, nodes: int, device: torch.device) -> gated_delta.Inputs:
    """Of the gated delta rule where every key channel decays on its own."""
    return delta_inputs(size, rows, nodes, device, per_channel=True)


def duality_inputs(size: Size, rows: int, nodes: int, device: torch.device) -> DualityInputs:
    """Of Mamba-2: states are [value, key]."""
    x = delta_inputs(size, rows, nodes, device)
    return DualityInputs(x.q_BNJK, linear.Factors(x.k_BNJK, x.v_BNHV, x.g_BNHD))


INPUTS: dict[str, Callable[[Size, int, int, torch.device], Any]] = {
    DELTA.name: delta_inputs,
    DELTA_PER_CHANNEL.name: per_channel_inputs,
    DUALITY.name: duality_inputs,
}
"""By the name of the rule."""


def state(rule: str, size: Size, rows: int, device: torch.device) -> Tensor:
    """A random state in the layout of the rule."""
    sides = (size.value, size.key) if rule == DUALITY.name else (size.key, size.value)
    return torch.randn(rows, size.heads, *sides, device=device)


def chain(nodes: int) -> list[int]:
    """Parents of a chain."""
    return list(range(-1, nodes - 1))


def deep(nodes: int) -> list[int]:
    """Parents of a chain of three quarters of the nodes; the others are second children along it."""
    spine = max(1, (3 * nodes + 3) // 4)
    return [*range(-1, spine - 1), *(extra * spine // max(nodes - spine, 1) for extra in range(nodes - spine))]


def bushy(nodes: int) -> list[int]:
    """Parents of a tree in which every node has four children, filled level by level."""
    return [-1, *((node - 1) // 4 for node in range(1, nodes))]


TREES: dict[str, Callable[[int], list[int]]] = {"chain": chain, "deep": deep, "bushy": bushy}
