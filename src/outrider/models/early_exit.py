"""The first layers of a model with its own final norm and vocabulary head: a cheaper model inside the model.

It is made of the model's own modules and packed weights: nothing is held twice. Its states are its own, those of the first layers
alone.
"""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from outrider.models.convert import first_line
from outrider.models.factor_model import FactorTreeModel
from outrider.models.lean import LeanTreeModel
from outrider.models.protocol import TreeModel
from outrider.models.taps import decoder_layers
from outrider.models.tree_model import CachedTreeModel


def early_exit(target: TreeModel, layers: int) -> TreeModel:
    """The first `layers` of a target's model, run in the target's own way.

    Raises:
        ValueError: when there are not so many, or they cannot be run alone.
    """
    model: PreTrainedModel = cast(Any, target).model
    count = len(decoder_layers(model))
    if not 1 <= layers <= count:
        raise ValueError(f"there is no exit after layer {layers} of {count}; give 1 to {count}")
    try:
        shallow: Any = _first_layers(target, model, layers)
        shallow.begin([[0]], 2).extend([[0, 0]], [[-1, 0]])
    except Exception as error:  # whatever transformers' code says to a shorter stack
        raise ValueError(
            f"the first {layers} layers of {type(model).__name__} cannot be run alone ({first_line(error)}); use another drafter"
        ) from error
    shallow.way = f"{layers} of {count} layers, {target.way}"
    made: TreeModel = shallow
    return made


def _first_layers(target: Any, model: PreTrainedModel, layers: int) -> Any:
    if isinstance(target, LeanTreeModel):
        return target.shallow(layers)
    shallow = type(target)(shortened(model, layers))
    if isinstance(target, CachedTreeModel):
        vars(shallow)["packed"] = target.packed
    if isinstance(target, FactorTreeModel):
        vars(shallow)["kernels"] = target.kernels
    return shallow


def shortened(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The model with its first layers only, sharing every module but those that hold the stack."""
    stack = decoder_layers(model)
    path = next(name for name, module in model.named_modules() if module is stack).split(".")
    short = made = _with_own_children(model)
    for name in path[:-1]:
        made._modules[name] = _with_own_children(cast(nn.Module, made._modules[name]))
        made = cast(nn.Module, made._modules[name])
    made._modules[path[-1]] = nn.ModuleList(list(stack)[:layers])
    config = copy.deepcopy(model.config)
    _shorten(config.get_text_config(), layers)
    for module in {short, made}:
        if hasattr(module, "config"):
            module.config = config if module is short else config.get_text_config()
    vars(short).pop("_outrider", None)  # what is known about the whole model
    return cast(PreTrainedModel, short)


def _with_own_children(module: nn.Module) -> nn.Module:
    """The same module, whose children can be exchanged."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


def _shorten(config: Any, layers: int) -> None:
    """A configuration of the first layers: what it lists by layer is cut, too."""
    count = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count and name not in ("architectures", "eos_token_id"):
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
