"""RMS norm for blocks that are trained in float32 under autocast and run in the target's dtype."""

from __future__ import annotations

from torch import Tensor, nn

EPSILON = 1e-5


class Norm(nn.RMSNorm):
    """An RMS norm that reads its input in the dtype of its weights: only then is it one fused kernel."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """The normed input, in the weights' dtype."""
        return super().forward(x.to(self.weight.dtype))
