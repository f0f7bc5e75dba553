"""Counter-based noise: every number is a hash of (seed, stream, position, token), whatever was drawn before.

The same seed therefore gives the same text on every device, in every batch and with every drafter. Integer arithmetic modulo
2**64 (the finaliser of SplitMix64) is the same everywhere; only the last logarithm is floating point.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed: int, stream: int, position: int, counter: int = 0) -> float:
    """One number in [0, 1)."""
    return (mix(seed, stream, position, counter) >> 11) / (1 << 53)


def gumbel(seed: int, stream: int, position: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise for tokens 0 .. size-1 at a position, float32 [size].

    argmax(logits + noise) draws from softmax(logits); the first k of the sorted sum draw k tokens without replacement.
    """
    x = torch.arange(size, dtype=torch.int64, device=device) * _signed(_GOLDEN) + _signed(mix(seed, stream, position))
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    # 32 bits are kept. The exponential is -log(1 - u), so that small u, which make the large noise that decides a draw, keep
    # their full relative precision in float32.
    u = (_shift_right(x, 32).to(torch.float32) + 0.5) * 2.0**-32
    exponential = -torch.log1p(-u.clamp(max=1.0 - 2.0**-24))
    return -torch.log(exponential)
