"""The ways to score a tree that a device has for a recurrence, and one layer with one tree to try them on.

Three ways are there everywhere. Their Triton twins are believed only after they have given the same numbers on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from outrider.cache.factor_states import LayerStates
from outrider.cache.nodes import Nodes
from outrider.cache.pending import Pending
from outrider.deviation import deviation
from outrider.mixers import samples, twins
from outrider.mixers.samples import Size

WAYS = ("serial", "chains", "masked")
TOLERANCE = 1e-4  # relative to the largest number; rounding stays below a tenth of it


class ScoredLayer:
    """One layer behind a random committed state, and one tree of random nodes.

    Args:
        rule: its name.
        parents: of the tree's nodes.
    """

    def __init__(self, rule: str, size: Size, parents: Sequence[int], device: torch.device) -> None:
        self.pending = Pending(1)
        start, waves = self.pending.add([parents], len(parents))
        self.nodes = Nodes(self.pending, [parents], start, waves, device)
        self.rule, self.x = samples.rule_of(rule, size, device), samples.INPUTS[rule](size, 1, len(parents), device)
        self.layer = LayerStates()
        self.state_B = self.layer.state_B = samples.state(rule, size, 1, device)

    def score(self, way: str) -> Tensor:
        """Outputs [1, N, ...]; factors stay in the layer."""
        return self.layer.recur(self.rule, self.x, self.nodes, self.nodes.new, way)

    def leaves(self, way: str) -> list[Tensor]:
        """Outputs and factors."""
        return [self.score(way), *(t.clone() for t in self.layer.factors_BM.values())]


def ways_of(rule: str, size: Size, device: torch.device) -> list[str]:
    """All ways to score trees of a recurrence on a device."""
    return [*WAYS, *([] if trouble(rule, size, device) else [twins.PREFIX + form for form in twins.FORMS[rule]])]


@cache
def trouble(rule: str, size: Size, device: torch.device) -> str:
    """Why kernels are not used for a recurrence on a device; empty if they are."""
    return twins.missing(rule, device) or difference(rule, size, device)


@torch.inference_mode()
def difference(rule: str, size: Size, device: torch.device) -> str:
    """What twins do wrong on a device; empty if they compute what PyTorch computes."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # what a user draws next stays what it was
        scored = ScoredLayer(rule, size, samples.deep(16), device)
    wanted = scored.leaves("serial")
    for form in twins.FORMS[rule]:
        try:
            found = scored.leaves(twins.PREFIX + form)
        except Exception as e:  # compilers and drivers have their own kinds
            return f"the {form} kernel fails: {type(e).__name__}: {next(iter(str(e).splitlines()), '')}"[:200]
        for got, right in zip(found, wanted):
            error = deviation(got, right)
            if error > TOLERANCE:
                return f"the {form} kernel is off by {error:.1e} (limit {TOLERANCE:.0e})"
    return ""
