"""Reading a target's hidden states at some of its layers, for drafters that draft from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Taps:
    """Outputs of some decoder layers, collected while the model runs.

    Args:
        layers: indexes of decoder layers.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.outputs: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def collector(self, layer: int) -> Any:
        """A forward hook."""

        def collect(module: nn.Module, args: Any, output: Any) -> None:
            self.outputs[layer].append(output[0] if isinstance(output, tuple) else output)

        return collect

    def take(self) -> Tensor:
        """What the last run left, [B, N, taps * D]."""
        return torch.cat([self.outputs[layer][-1] for layer in self.layers], dim=-1)

    def everything(self) -> Tensor:
        """What all runs over the pieces of one row left, [tokens, taps * D]."""
        if not self.layers or not self.outputs[self.layers[0]]:
            return torch.empty(0)
        return torch.cat([torch.cat(self.outputs[layer], dim=1)[0] for layer in self.layers], dim=-1)


@contextmanager
def tapping(model: nn.Module, layers: Sequence[int]) -> Iterator[Taps]:
    """Collect the outputs of layers within the block.

    Raises:
        ValueError: when the model has no such layers.
    """
    taps, hooks = Taps(layers), []
    if layers:
        stack = decoder_layers(model)
        check_layers(layers, len(stack))
        hooks = [stack[layer].register_forward_hook(taps.collector(layer)) for layer in set(layers)]
    try:
        yield taps
    finally:
        for hook in hooks:
            hook.remove()


def check_layers(layers: Sequence[int], count: int) -> None:
    """Refuse layers that a stack of `count` does not have.

    Raises:
        ValueError: in that case.
    """
    if any(not 0 <= layer < count for layer in layers):
        raise ValueError(f"layers {list(layers)} are not among the model's {count}; use a drafter made for this target")


def decoder_layers(model: Any) -> nn.ModuleList:
    """The stack of decoder layers.

    Raises:
        ValueError: when there is no single one.
    """
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no stack of {count} layers to read hidden states from")
    return stacks[0]
