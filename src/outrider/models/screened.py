"""A compiled target that finds the highest scores without most logits, once it has shown at load that they are the same.

It costs memory beside the weights (`Screen.bytes`), so that models which stay within a memory budget do without.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider import noise
from outrider.models.native import NativeTreeModel
from outrider.models.protocol import scored
from outrider.models.resident import give_back_freed
from outrider.native.decoder import Decoder
from outrider.native.screen import Screen

PREFIX, NODES = 5, 12
TEMPERATURES = (0.3, 1.0)


def screen(target: Any) -> str:
    """Have a target's vocabulary head screened, where that can be done; returns why not, or nothing."""
    decoder = target.decoder if isinstance(target, NativeTreeModel) and not target.screen else None
    if not isinstance(decoder, Decoder) or decoder.lying or decoder.unembed is None:
        return ""
    give_back_freed()  # what the self-test took
    try:
        target.screen = Screen(decoder.unembed.weight.detach(), decoder.head)
    except ValueError as reason:
        return f"all logits are made: {reason}"
    differs = _differs(target)
    give_back_freed()
    if differs:
        target.screen = None
        return "all logits are made: screened ones were others"
    return ""


@torch.inference_mode()
def _differs(target: NativeTreeModel) -> bool:
    """Whether a screened head gives other scores than all logits do, or in other places."""
    nodes = min(NODES, (target.context or NODES + PREFIX) - PREFIX)
    tokens = [(11 * i + 7) % target.vocab for i in range(PREFIX + nodes)]
    tree, every = ([tokens[PREFIX:]], [[(i - 1) // 2 if i else -1 for i in range(nodes)]]), slice(nodes)
    state = target.begin([tokens[:PREFIX]], room=2 * nodes)
    (screened,) = scored(state, *tree)
    state.commit([[]])
    logits_NV = state.extend(*tree)[0]
    if not torch.equal(screened.logits_NV, logits_NV):
        return True
    values_N, tokens_N = logits_NV.max(-1)
    if screened.highest(every) != (tokens_N.tolist(), values_N.tolist()):
        return True
    noise_V = noise.gumbel(0, noise.TARGET, 0, target.vocab)
    for temperature in TEMPERATURES:
        values_N, tokens_N = (logits_NV.float() / temperature + noise_V).max(-1)
        if screened.highest(every, temperature, noise_V) != (tokens_N.tolist(), values_N.tolist()):
            return True
    return False
