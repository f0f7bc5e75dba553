"""What a pass says about the tokens after its nodes: all logits, or no more than the highest where that is all anybody asks.

Shapes: N nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.native.highest import highest


class Scores:
    """Of the nodes of one sequence, whose logits are there. Others make them when they are asked for.

    Args:
        logits_NV: of the nodes, padding behind them included.
    """

    def __init__(self, logits_NV: Tensor) -> None:
        self._logits_NV = logits_NV

    @property
    def logits_NV(self) -> Tensor:
        """All of them."""
        return self._logits_NV

    @property
    def vocab(self) -> int:
        """V."""
        return self._logits_NV.shape[-1]

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        return self._logits_NV.device

    def highest(
        self, nodes: slice, temperature: float = 1.0, noise_V: Tensor | None = None
    ) -> tuple[list[int], list[float]]:
        """The highest score of some nodes and where it is, the lowest token of several; NaN where there is one.

        Args:
            temperature, noise_V: with noise, of logits divided by the temperature, and the noise on top.
        """
        return highest(self._logits_NV[nodes], temperature, noise_V)
