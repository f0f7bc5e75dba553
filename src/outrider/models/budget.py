"""How much of a model's weights may be in memory, and which of its layers stay there.

Embeddings, the vocabulary head and whatever else is outside the layers stay. Layers stay while the budget lasts; the others are
spread evenly among them, so that they are read while those compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_bytes(given: str | int) -> int:
    """Bytes of a size such as "200MB", "1.5GB" or "2GiB", or of a whole number.

    Raises:
        ValueError: when it is none.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?|)B?", given.strip(), re.I) if isinstance(given, str) else None
    if match:
        unit = match[2][:1].upper() + match[2][1:].lower()
        if (size := int(float(match[1]) * UNITS[unit])) > 0:
            return size
    raise ValueError(f"the memory budget {given!r} is no size; write for example 200MB, 1.5GB or 2GiB")


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer in bytes.

    Args:
        stored: of what can stay in its file.
        held: of the same once it is in memory, in the dtype of the run.
    """

    stored: int
    held: int


@dataclass(frozen=True)
class Split:
    """Which layers are streamed.

    Args:
        streamed: their indices.
        resident_bytes: weights that are always in memory.
        way_bytes: most that layers take on their way through.
        pass_bytes: what one pass reads from the disk.
    """

    streamed: tuple[int, ...]
    resident_bytes: int
    way_bytes: int
    pass_bytes: int


def split(name: str, budget: int, rest: int, layers: Sequence[Layer]) -> Split:
    """The fewest streamed layers that keep to the budget.

    Args:
        rest: bytes of everything that cannot be streamed.

    Raises:
        ValueError: when not even one layer at a time fits, with the least budget that does.
    """
    count = len(layers)
    found = [_streaming(rest, layers, many) for many in range(count + 1)]
    for plan in found:
        if plan.resident_bytes + plan.way_bytes <= budget:
            return plan
    least = min(plan.resident_bytes + plan.way_bytes for plan in found)
    raise ValueError(
        f"a memory budget of {budget / 1e6:.4g} MB is too small for {name}: its embeddings, head and whatever else stays take "
        f"{rest / 1e6:.4g} MB, and layers on their way through {found[-1].way_bytes / 1e6:.4g} MB; give at least "
        f"{math.ceil(least / 1e6)}MB"
    )


def _streaming(rest: int, layers: Sequence[Layer], many: int) -> Split:
    """The split that streams so many layers, evenly spread."""
    count = len(layers)
    streamed = tuple(i for i in range(count) if (i + 1) * many // count > i * many // count)
    going = [layers[i] for i in streamed]
    # at once: the pages of a layer that runs and of the one that is read ahead, and the former laid out for its products
    stored, held = (max((getattr(layer, n) for layer in going), default=0) for n in ("stored", "held"))
    way = (2 if many > 1 else 1) * stored + held * (2 if held != stored else 1)
    resident = rest + sum(layer.held for layer in layers) - sum(layer.held for layer in going)
    return Split(streamed, resident, way, sum(layer.stored for layer in going))
