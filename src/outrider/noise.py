"""Counter-based noise: every number is a hash of (seed, stream, position, token), whatever was drawn before.

The same seed therefore gives the same text on every device, in every batch and with every drafter. Integer arithmetic modulo
2**64 (the finaliser of SplitMix64) is the same everywhere; only the last logarithm is floating point.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from outrider.native.library import Unavailable, library

_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Streams: what a number is used for. Streams of one position are independent of each other.
TARGET, ACCEPT, RESIDUAL, DRAFT = range(4)


def mix(*words: int) -> int:
    """A 64-bit hash of whole numbers."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK)) & _MASK
        state = (state + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _MIX_1) & _MASK
        state = ((state ^ (state >> 27)) * _MIX_2) & _MASK
        state ^= state >> 31
    return state


def uniform(seed: int, stream: int, position: int, counter: int = 0) -> float:
    """One number in [0, 1)."""
    return (mix(seed, stream, position, counter) >> 11) / (1 << 53)


def gumbel(seed: int, stream: int, position: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise for tokens 0 .. size-1 at a position, float32 [size].

    argmax(logits + noise) draws from softmax(logits); the first k of the sorted sum draw k tokens without replacement.
    """
    # The exponential is -log(1 - u), so that small u, which make the large noise that decides a draw, keep their full relative
    # precision in float32.
    return _hashed(mix(seed, stream, position), size).to(device).log1p_().neg_().log_().neg_()


def _hashed(state: int, size: int) -> Tensor:
    """-u of uniform numbers u, float32 [size], of which 32 bits are kept."""
    try:
        call = library().outrider_hashed
    except Unavailable:
        pass
    else:
        out = torch.empty(size)
        call(state, size, out.data_ptr())
        return out
    x = _spread(size) + np.uint64(state)
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        x ^= x >> np.uint64(bits)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    high = torch.from_numpy((x >> np.uint64(32)).view(np.int64)).to(torch.float32)
    return ((high + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24).neg_()


@functools.lru_cache(maxsize=8)
def _spread(size: int) -> np.ndarray:
    """What tells tokens apart: multiples of the golden ratio modulo 2**64."""
    return np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN)
