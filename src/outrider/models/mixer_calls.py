"""How a transformers recurrent mixer is run over the nodes of a tree.

With factors it runs once, over all nodes, as if they were one block; only its convolution and its recurrence are others, which
know the tree. They go by the names of transformers' functions and replace these for that one call: transformers' modules stay
as they are. Otherwise the mixer is stepped, one batched single-token call per wave of nodes.

In a prefill, transformers' Mamba-1 ignores the state that a block of tokens follows; there, too, another recurrence stands in.

Shapes: B rows, N nodes, D width, F nodes of a wave.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from outrider.cache.factor_states import FactorStates
from outrider.cache.recurrent import NodeStates
from outrider.cache.tree_cache import TreeCache
from outrider.models.mixer_rules import CONVOLUTION, FORGETFUL, RECURRENCES, MambaBlock, convolve


def run_with_factors(cache: TreeCache, mixer: nn.Module, hidden_BND: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run a recurrent mixer once over the nodes of a call, with our convolution and recurrence in it."""
    states = cache.states
    assert isinstance(states, FactorStates)
    done_BND = states.by_kernel(getattr(mixer, "layer_idx", -1), hidden_BND) if states.kernels else None
    if done_BND is not None:
        return done_BND
    names = {CONVOLUTION: functools.partial(convolve, states)}
    for name in recurrences(mixer):
        names[name] = functools.partial(RECURRENCES[name], states)
    forward = renamed(plain_class(mixer).forward, names)
    if "attention_mask" in kwargs:
        kwargs = {**kwargs, "attention_mask": None}
    cache.inside = True
    try:
        out_BND: Tensor = forward(mixer, hidden_BND, cache=cache, **kwargs)
    finally:
        cache.inside = False
    return out_BND


def run_behind_state(cache: TreeCache, mixer: Any, hidden_BTD: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Prefill a block of tokens behind what the cache has seen, where transformers' own recurrence would begin anew."""
    state = cache.get_recurrent_state(mixer.layer_idx)
    assert state is not None
    forward = renamed(plain_class(mixer).forward, {FORGETFUL: MambaBlock(state)})
    out_BTD: Tensor = forward(mixer, hidden_BTD, cache=cache, **kwargs)
    return out_BTD


def renamed(function: Callable[..., Any], names: Mapping[str, Any]) -> FunctionType:
    """The function, undecorated, with other things behind some of its global names."""
    plain: Any = inspect.unwrap(function)
    known = {**plain.__globals__, **names}
    made = FunctionType(plain.__code__, known, plain.__name__, plain.__defaults__, plain.__closure__)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def recurrences(mixer: nn.Module) -> list[str]:
    """The functions of a mixer's forward that `RECURRENCES` replaces."""
    code: Any = inspect.unwrap(plain_class(mixer).forward)
    return [name for name in code.__code__.co_names if name in RECURRENCES]


def missing(mixer: nn.Module, state: Sequence[int] | None) -> str:
    """Why a mixer cannot be run with factors; empty if it can.

    Args:
        state: shape of its recurrent state; None for a convolution alone.
    """
    name, code = type(mixer).__name__, inspect.unwrap(plain_class(mixer).forward)
    if "forward" in vars(mixer) or any(hasattr(part, "_hf_hook") for part in mixer.modules()):
        return f"a hook sits on the forward of {name}"
    if CONVOLUTION not in code.__code__.co_names:
        return f"the convolution of {name} is none that is known here"
    if state is not None and len(recurrences(mixer)) != 1:
        return f"the recurrence of {name} is none that is known here"
    if state is not None and len(state) != 2 and FORGETFUL in recurrences(mixer):
        return f"{name} runs several recurrences, one per head"
    return ""


def step_by_waves(cache: TreeCache, mixer: Callable[..., Any], hidden_BND: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run a recurrent mixer over the nodes of a call, one batched single-token step per wave."""
    assert cache.nodes is not None and isinstance(cache.states, NodeStates)
    batch, new, width = hidden_BND.shape
    flat_FD = hidden_BND.reshape(batch * new, width)
    if "attention_mask" in kwargs:
        kwargs = {**kwargs, "attention_mask": None}
    out_FD: Tensor | None = None
    for wave, parents in zip(cache.nodes.waves, cache.nodes.wave_parents):
        index_F = torch.tensor([row * new + node - cache.nodes.start for row, node in wave], device=hidden_BND.device)
        cache.states.enter(wave, parents)
        cache.inside = True
        try:
            stepped_F1D = mixer(hidden_states=flat_FD.index_select(0, index_F)[:, None], cache=cache, **kwargs)
        finally:
            cache.inside = False
        cache.states.leave(wave)
        if out_FD is None:
            out_FD = stepped_F1D.new_empty(batch * new, stepped_F1D.shape[-1])
        out_FD.index_copy_(0, index_F, stepped_F1D[:, 0])
    assert out_FD is not None
    return out_FD.view(batch, new, -1)


# -- teaching mixers ---------------------------------------------------------------------------------------------------


def wrap_mixer(mixer: nn.Module) -> None:
    """Teach a recurrent mixer to score trees. Calls with any other cache go through unchanged.

    The module gets a subclass of its class, so that a copy of the model is a model of its own; only where a hook already sits on
    the module itself must the hook be wrapped.
    """
    if "forward" in vars(mixer):
        hooked = mixer.forward
        if not getattr(hooked, "scores_trees", False):
            vars(mixer)["forward"] = _taught(hooked)
    elif not getattr(type(mixer).forward, "scores_trees", False):
        mixer.__class__ = _taught_class(type(mixer))


def plain_class(mixer: nn.Module) -> type[nn.Module]:
    """The class that a mixer had before it was taught."""
    return _plain_classes.get(type(mixer), type(mixer))


_taught_classes: dict[type[nn.Module], type[nn.Module]] = {}
_plain_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _taught_class(plain: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a mixer's class, of the same name, whose forward scores trees."""
    if plain in _taught_classes:
        return _taught_classes[plain]
    method = plain.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _taught(functools.partial(method, self), self)(*args, **kwargs)

    vars(forward)["scores_trees"] = True
    made = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
    _taught_classes[plain], _plain_classes[made] = made, plain
    return made


def _taught(original: Callable[..., Any], mixer: nn.Module | None = None) -> Callable[..., Any]:
    """A mixer's forward that scores trees when it gets a `TreeCache` in tree mode."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        if not isinstance(cache, TreeCache) or cache.inside:
            return original(*args, **kwargs)
        rest = dict(kwargs)
        rest.pop("cache")
        hidden = args[0] if args else rest.pop("hidden_states")
        if cache.nodes is None:
            if mixer is not None and cache.seen and FORGETFUL in recurrences(mixer):
                return run_behind_state(cache, mixer, hidden, rest)
            return original(*args, **kwargs)
        if mixer is not None and isinstance(cache.states, FactorStates):
            return run_with_factors(cache, mixer, hidden, rest)
        return step_by_waves(cache, original, hidden, rest)

    vars(forward)["scores_trees"] = True
    return forward


@contextmanager
def find_mixers(model: nn.Module, cache: TreeCache) -> Iterator[set[nn.Module]]:
    """While active, collects the modules that read recurrent states from `cache`: the model itself says which they are."""
    active: list[nn.Module] = []
    found: set[nn.Module] = set()
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda m, _: active.append(m)))
        hooks.append(module.register_forward_hook(lambda m, _, __: active.pop() and None, always_call=True))
    cache.on_state_read = lambda: found.add(active[-1])
    try:
        yield found
    finally:
        cache.on_state_read = None
        for hook in hooks:
            hook.remove()
