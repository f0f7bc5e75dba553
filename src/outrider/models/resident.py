"""Weights that are mapped from a file: giving their memory back, and reading them ahead of their use.

A model loaded from safetensors is mapped from its file. Pages of such a mapping can be dropped at any time; whoever touches them
again reads them from the file again. Pages that were written to are no longer the file's and stay.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LARGE_BLOCK = 256 << 10
HUGE_PAGE = 2 << 20
MADV_RANDOM, MADV_DONTNEED, MADV_HUGEPAGE = 1, 4, 14
_PRESENT, _SWAPPED, _OF_A_FILE = (
    np.uint64(1 << 63),
    np.uint64(1 << 62),
    np.uint64(1 << 61),
)  # bits of /proc/self/pagemap


def release(weight: Tensor) -> int:
    """Drop the pages of a tensor that is mapped from a file, shared ones at its ends too; returns the bytes given back, 0 where
    that is not possible."""
    if sys.platform != "linux" or weight.device.type != "cpu" or not weight.numel():
        return 0
    try:
        return _drop(*_pages(weight)) * mmap.PAGESIZE
    except (OSError, AttributeError, ValueError):
        return 0


def were_written(addresses: Sequence[int]) -> list[bool]:
    """Of places in private mappings of files: whether their page was written to, and so is no longer the file's. Nothing is read
    in to tell that."""
    if not addresses:
        return []
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        entries = [os.pread(file.fileno(), 8, 8 * (address // mmap.PAGESIZE)) for address in addresses]
    return [bool(_is_written(np.frombuffer(entry, dtype=np.uint64))[0]) for entry in entries]


def private_maps(weights: Iterable[Tensor]) -> frozenset[int]:
    """Addresses of those tensors that are mapped from a file for this process alone, where it can be told when they are written
    to; elsewhere than on Linux none."""
    if sys.platform != "linux":
        return frozenset()
    try:
        maps = [(first, end) for first, end, _, _, is_private in _file_maps() if is_private]
        found = [weight.data_ptr() for weight in weights if weight.device.type == "cpu" and weight.numel()]
        were_written(found[:1])
    except (OSError, IndexError):
        return frozenset()
    firsts = [first for first, _ in maps]
    at = [(address, bisect_right(firsts, address) - 1) for address in found]
    return frozenset(address for address, place in at if place >= 0 and address < maps[place][1])


def read_only_when_asked(weight: Tensor) -> None:
    """Touching a page of a mapped tensor reads that page and no others around it; `Extent.fetch` reads many at once."""
    first, last = _pages(weight)
    _advise(first, last, MADV_RANDOM)


def _pages(weight: Tensor) -> tuple[int, int]:
    """Numbers of the first page of a tensor, and of the one behind its last."""
    begin = weight.data_ptr()
    return begin // mmap.PAGESIZE, -(-(begin + weight.numel() * weight.element_size()) // mmap.PAGESIZE)


def in_huge_pages(size: int) -> Tensor:
    """Uninitialized bytes, aligned for vectors, and in huge pages where the system has them: those are read faster."""
    if size < HUGE_PAGE or sys.platform != "linux":
        return _aligned(torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, device="cpu"), mmap.PAGESIZE)[:size]
    found = _aligned(torch.empty(size + HUGE_PAGE, dtype=torch.uint8, device="cpu"), HUGE_PAGE)[:size]
    with suppress(OSError, AttributeError):
        _advise(*_pages(found), MADV_HUGEPAGE)
    return found


def _aligned(memory: Tensor, to: int) -> Tensor:
    return memory[-memory.data_ptr() % to :]


def _advise(first: int, last: int, advice: int) -> bool:
    """madvise over pages; whether it worked."""
    address, length = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE)
    return not ctypes.CDLL(None, use_errno=True).madvise(address, length, advice)


def _drop(first: int, last: int) -> int:
    """Drop those pages from `first` up to `last` that are still a file's; returns how many were in memory."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), dtype=np.uint64)
    if len(entries) < last - first:
        return 0
    present, written = (entries & _PRESENT) != 0, _is_written(entries)
    if not (present & ~written).any():
        return 0
    for before, after in pairwise([-1, *np.flatnonzero(written).tolist(), len(entries)]):
        if after - before > 1 and not _advise(first + before + 1, first + after, MADV_DONTNEED):
            return 0
    return int((present & ~written).sum())


def _is_written(entries: np.ndarray) -> np.ndarray:
    """Of entries of the page map, of private mappings of files: whether the pages are no longer the file's."""
    own = ((entries & _PRESENT) != 0) & ((entries & _OF_A_FILE) == 0)
    return own | ((entries & _SWAPPED) != 0)


def return_what_is_freed() -> None:
    """From now on, blocks of this process that are freed go back to the system at once.

    glibc keeps blocks of up to 32 MB for the next one of their size; where lasting ones lie between them, as caches do between
    the layers of a model, each may leave a hole that nothing fits into.
    """
    with suppress(OSError, AttributeError):  # other C libraries have no such choice
        ctypes.CDLL(None).mallopt(-3, LARGE_BLOCK)  # M_MMAP_THRESHOLD


def give_back_freed() -> None:
    """What was freed goes back to the system now, where the C library keeps it for later: reading a tokenizer's files leaves tens
    of megabytes that a model can have."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # other C libraries have no such call
            ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class Extent:
    """Bytes of a file, from `start` up to `end`."""

    path: str
    start: int
    end: int

    def fetch(self) -> None:
        """Have the kernel read them in the background."""
        self._advise("POSIX_FADV_WILLNEED")

    def forget(self) -> None:
        """Take them out of the kernel's cache of files, so that whoever reads them next reads the disk. Pages that are mapped,
        here or in another process, stay."""
        self._advise("POSIX_FADV_DONTNEED")

    def _advise(self, advice: str) -> None:
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError:
            return  # the file has lost its name, its mapping has not: only the advice is lost
        try:
            os.posix_fadvise(file, self.start, self.end - self.start, getattr(os, advice))
        finally:
            os.close(file)


def extents(weights: Iterable[Tensor]) -> list[Extent | None]:
    """Where in its file each tensor lies; None for one that is not mapped from a file, and anywhere but on Linux."""
    maps = _file_maps() if sys.platform == "linux" else []
    firsts = [first for first, *_ in maps]
    found: list[Extent | None] = []
    for weight in weights:
        begin = weight.data_ptr()
        end = begin + weight.numel() * weight.element_size()
        at = bisect_right(firsts, begin) - 1
        if weight.device.type != "cpu" or at < 0 or end > maps[at][1] or begin == end:
            found.append(None)
            continue
        first, _, offset, path, _ = maps[at]
        found.append(Extent(path, begin - first + offset, end - first + offset))
    return found


def joined(parts: Iterable[Extent]) -> list[Extent]:
    """The same bytes in as few pieces as possible; gaps of less than a page are closed."""
    found: list[Extent] = []
    for part in sorted(parts, key=lambda e: (e.path, e.start)):
        last = found[-1] if found else None
        if last and last.path == part.path and part.start <= last.end + mmap.PAGESIZE:
            found[-1] = Extent(last.path, last.start, max(last.end, part.end))
        else:
            found.append(part)
    return found


def _file_maps() -> list[tuple[int, int, int, str, bool]]:
    """Mappings of this process that have a file behind them: first address, end, offset in the file, path, and whether what is
    written to them stays with this process."""
    found = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, rights, offset, _, inode, *path = line.split(maxsplit=5)
        if path and inode != "0":
            first, end = (int(address, 16) for address in addresses.split("-"))
            found.append((first, end, int(offset, 16), path[0], rights.endswith("p")))
    return found
