"""How far numbers are from those that they should be."""

from __future__ import annotations

import math

from torch import Tensor


def deviation(got: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest wanted number; infinite where anything is not finite, since NaN would get
    through comparisons and `max`."""
    found = float((got - wanted).abs().max() / wanted.abs().max())
    return found if math.isfinite(found) else math.inf
