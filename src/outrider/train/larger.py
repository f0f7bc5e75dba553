"""A trained drafter made larger, so that it can learn more from more text without forgetting what it knows.

Everything that is new starts by adding nothing: new blocks, and feed-forward parts where there were none, write zeros into
the residual stream; new neurons are read by zeros, and so are new dimensions of a state. So the larger drafter drafts what the
smaller one drafts, and training goes on from there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.models.feature_head import FeatureHead
from outrider.models.mamba_drafter import MambaBlock, MambaBlocks
from outrider.train.students import untrained_head, untrained_mamba

if TYPE_CHECKING:
    from outrider.api import Engine


@torch.no_grad()
def larger_head(engine: Engine, known: FeatureHead, seed: int, neurons: int | None) -> FeatureHead:
    """A feature head with more feed-forward neurons; None keeps those that it has.

    Raises:
        ValueError: for fewer than it has.
    """
    old, count = known.config.ffn, neurons or known.config.ffn
    _check_growth("--neurons", old, count)
    if count == old:
        return known
    fresh = untrained_head(engine, replace(known.config, ffn=count), seed)
    own = fresh.state_dict()
    fresh.load_state_dict(
        {name: t if own[name].shape == t.shape else own[name] for name, t in known.state_dict().items()}
    )
    _fill_neurons(fresh.up.weight, fresh.down.weight, known.up.weight, known.down.weight)
    return fresh


@torch.no_grad()
def larger_mamba(
    engine: Engine, known: MambaBlocks, seed: int, layers: int | None, neurons: int | None, state: int | None
) -> MambaBlocks:
    """A Mamba drafter with more blocks, feed-forward neurons or state; None keeps what there is.

    Raises:
        ValueError: for sizes below those that it has.
    """
    old = known.config
    new = replace(old, layers=layers or old.layers, ffn=neurons or old.ffn, state_size=state or old.state_size)
    for name, before, after in (
        ("--layers", old.layers, new.layers),
        ("--neurons", old.ffn, new.ffn),
        ("--state", old.state_size, new.state_size),
    ):
        _check_growth(name, before, after)
    if new == old:
        return known
    fresh = untrained_mamba(engine, new, seed)
    fresh.in_norm.load_state_dict(known.in_norm.state_dict())
    fresh.out_norm.load_state_dict(known.out_norm.state_dict())
    fresh.draft_ids = known.draft_ids
    for number, block in enumerate(fresh.blocks):
        held = known.blocks[number] if number < old.layers else None
        assert isinstance(block, MambaBlock) and isinstance(held, MambaBlock | None)
        _fill(block, held)
    return fresh


def _check_growth(option: str, before: int, after: int) -> None:
    if after < before:
        raise ValueError(
            f"{option} {after} is less than the {before} of the drafter to start from, which can only grow"
        )


def _fill_neurons(up: Tensor, down: Tensor, known_up: Tensor, known_down: Tensor) -> None:
    """The neurons of a trained feed-forward part, and fresh ones that nothing reads yet."""
    after, before = down.shape[1], known_down.shape[1]
    _copy(up, known_up, [after] * 2, [before] * 2)
    down[:, before:].zero_()
    down[:, :before].copy_(known_down)


def _fill(block: MambaBlock, known: MambaBlock | None) -> None:
    """Give a fresh block what a trained one knows; without one, let it add nothing."""
    if known is None:
        block.mixer.out_proj.weight.zero_()
    else:
        block.norm.load_state_dict(known.norm.state_dict())
        _fill_mixer(block, known)
    if not block.gated:
        return
    if known is None or not known.gated:
        block.down.weight.zero_()
        return
    block.ffn_norm.load_state_dict(known.ffn_norm.state_dict())
    _fill_neurons(block.up.weight, block.down.weight, known.up.weight, known.down.weight)


def _fill_mixer(block: MambaBlock, known: MambaBlock) -> None:
    new, old = block.mixer, known.mixer
    fresh = dict(new.named_parameters())
    for name, parameter in old.named_parameters():
        if fresh[name].shape == parameter.shape:
            fresh[name].copy_(parameter)
    inner, heads = new.inner, new.num_heads
    s, t = new.state_size, old.state_size
    _copy(new.in_proj.weight, old.in_proj.weight, [inner, inner, s, s, heads], [inner, inner, t, t, heads])
    _copy(new.conv_weight, old.conv_weight, [inner, s, s], [inner, t, t], dim=2)
    _copy(new.conv_bias, old.conv_bias, [inner, s, s], [inner, t, t])
    read = new.in_proj.weight[2 * inner + s : 2 * inner + 2 * s]  # what reads the state
    read[t:].zero_()


def _copy(
    fresh: Tensor | nn.Parameter, known: Tensor | nn.Parameter, sizes: list[int], before: list[int], dim: int = 0
) -> None:
    """Copy every part into the beginning of its place."""
    for place, part in zip(fresh.split(sizes, dim), known.split(before, dim)):
        place.narrow(dim, 0, part.shape[dim]).copy_(part)
