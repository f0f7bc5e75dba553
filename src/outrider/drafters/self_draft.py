"""Self-drafting: the target's first layers draft for it, leaving through its own final norm and vocabulary head.

One model for both roles, so one kind of state and no further weights (LayerSkip; Draft & Verify skips layers in between). What it
drafts well depends on how much of the target's choice is settled early: without training for it, little.

States of the first layers are held twice, the target's and the drafter's, and nodes of a tree pass them twice: a round costs
`depth * k` layers of drafting beside the target's pass.
"""

from __future__ import annotations

from outrider.drafters.lm import LMDrafter
from outrider.models.early_exit import early_exit
from outrider.models.protocol import TreeModel
from outrider.models.taps import decoder_layers


class SelfDrafter(LMDrafter):
    """Drafts with the first layers of the target.

    Args:
        layers: how many, at least 1 and fewer than all.

    Raises:
        ValueError: for any other number, or a target whose first layers cannot be run alone.
    """

    def __init__(self, target: TreeModel, layers: int) -> None:
        self.layers, self.target = layers, target
        super().__init__(self._exit(target), f"self:{layers}")

    def _exit(self, target: TreeModel) -> TreeModel:
        model = getattr(target, "model", None)
        if model is None:
            raise ValueError(
                f"a target of type {type(target).__name__} has no layers to draft with; use another drafter"
            )
        count = len(decoder_layers(model))
        if not 1 <= self.layers < count:
            raise ValueError(
                f"drafter 'self:{self.layers}' would run {self.layers} of the target's {count} layers; give 1 to {count - 1}"
            )
        return early_exit(target, self.layers)

    def follow(self, target: TreeModel) -> None:
        """Draft with the layers of this target, which is another one when its model has changed."""
        if target is not self.target:
            self.target, self.model = target, self._exit(target)


def parse_layers(text: str) -> int:
    """The number in `self:NUMBER`.

    Raises:
        ValueError: when it is none.
    """
    if not text.isdecimal():
        raise ValueError(f"drafter 'self:{text}' needs a number of layers; write for example 'self:6'")
    return int(text)
