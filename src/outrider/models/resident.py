"""Giving memory back: weights that were laid out anew need not stay in memory in their old layout as well.

A model loaded from safetensors is mapped from its file. Pages of such a mapping can be dropped at any time; whoever touches them
again reads them from the file again. Pages that were written to are no longer the file's and stay.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
from torch import Tensor

_PRESENT, _OF_A_FILE = np.uint64(1 << 63), np.uint64(1 << 61)  # bits of /proc/self/pagemap


def release(weight: Tensor) -> int:
    """Drop the pages of a tensor that is mapped from a file; returns the bytes given back, 0 where that is not possible."""
    if sys.platform != "linux" or weight.device.type != "cpu":
        return 0
    size = mmap.PAGESIZE
    first = -(-weight.data_ptr() // size)
    last = (weight.data_ptr() + weight.numel() * weight.element_size()) // size
    try:
        return _drop(first, last) * size
    except (OSError, AttributeError, ValueError):
        return 0


def _drop(first: int, last: int) -> int:
    """Drop the pages from `first` up to `last`, if all that are in memory are a file's; returns how many were."""
    if last <= first:
        return 0
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), dtype=np.uint64)
    present = (entries & _PRESENT) != 0
    if len(entries) < last - first or not present.any() or ((entries[present] & _OF_A_FILE) == 0).any():
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE)
    failed = libc.madvise(address, length, 4)  # MADV_DONTNEED
    return 0 if failed else int(present.sum())
