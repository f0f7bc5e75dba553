"""Whether a model is still what it was: its modules, hooks and weights, in place or replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.resident import private_maps, were_written
from outrider.models.streaming import streamed_parts

FEW = 8  # values of every weight that are compared


@dataclass(frozen=True)
class Stamp:
    """What changes when a model does.

    Args:
        looked_at: which weights the values are of.
        values: some of them each, since some writes leave no other trace (`parameter.data.add_`).
        mapped: addresses of weights that are mapped from a file for this process alone. Until they are written to they are what
            the file says, and looking at them would bring back memory that was given back.
    """

    modules: tuple[tuple[int, int, int], ...]
    weights: tuple[tuple[int, int, torch.dtype], ...]
    looked_at: tuple[int, ...]
    values: tuple[float, ...]
    mapped: frozenset[int]


def stamp(model: PreTrainedModel, before: Stamp | None = None) -> Stamp:
    """Of a model as it is now. Streamed layers, of which nothing is kept, are left on the disk.

    Args:
        before: an earlier one: where weights lie as they did then, so do their files.
    """
    every = list(model.modules())
    parameters = list(dict.fromkeys(p for m in every for p in m._parameters.values() if p is not None))
    modules = tuple((id(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in every)
    weights = tuple((p.data_ptr(), p._version, p.dtype) for p in parameters)
    if before is not None and before.weights == weights:
        mapped = before.mapped
    else:
        mapped = private_maps(parameters)
    streamed = {weight for part in streamed_parts(model).values() for weight in part.weights}
    held = [number for number, parameter in enumerate(parameters) if parameter not in streamed]
    asleep = [number for number in held if weights[number][0] in mapped]
    written = were_written([weights[number][0] for number in asleep])
    untouched = {number for number, is_written in zip(asleep, written) if not is_written}
    looked_at = tuple(number for number in held if number not in untouched)
    return Stamp(modules, weights, looked_at, _values([parameters[number] for number in looked_at]), mapped)


def _values(parameters: list[Any]) -> tuple[float, ...]:
    few: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        few.setdefault((parameter.device, parameter.dtype), []).append(parameter.detach().reshape(-1)[:FEW])
    return tuple(value for parts in few.values() for value in torch.cat(parts).cpu().double().tolist())
