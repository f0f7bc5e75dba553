"""A transformers cache that holds a committed prefix and a tree behind it, for attention, recurrent and hybrid models.

In prefill it behaves like transformers' own cache. In tree mode attention layers write nodes behind the prefix, and recurrent
mixers are stepped wave by wave: each wave is a batch of nodes whose parents' states are known. Everything else in the
model runs once over all nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from outrider.cache.attention import AttentionLayer
from outrider.cache.recurrent import NodeStates, StateKey, StateSpec

Wave = list[tuple[int, int]]


class TreeCache(Cache):
    """Keys, values and recurrent states of B rows. Callers keep the lengths; this only stores."""

    def __init__(self, capacity: int) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.attention: dict[int, AttentionLayer] = {}
        self.states: NodeStates | None = None
        self.seen = 0  # tokens prefilled
        self.start = 0  # slot where the current call writes
        self.first = 0  # pending index of the current call's first node
        self.waves: list[Wave] | None = None  # of the current call; None in prefill
        self.stepping = False  # a mixer is being stepped: what it calls must not step again
        self.wave_parents: list[list[int]] = []
        self.prefilled: dict[int, LinearAttentionLayer] = {}
        self.on_state_read: Callable[[], None] | None = None

    # -- attention layers ------------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, return all that may be seen."""
        layer = self.attention.setdefault(layer_idx, AttentionLayer(self.capacity))
        return layer.write(key_states, value_states, self.start, align=self.waves is not None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots before the current call's."""
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Slots and offset of the mask that transformers builds in prefill."""
        return self.start + query_length, 0

    # -- recurrent layers ------------------------------------------------------------------------------------------

    def _layer(self, layer_idx: int) -> LinearAttentionLayer:
        return self.prefilled.setdefault(layer_idx, LinearAttentionLayer(number_of_states=8))

    def _get(self, kind: str, layer_idx: int, state_idx: int) -> Tensor | None:
        if self.on_state_read is not None:
            self.on_state_read()
        if self.waves is not None:
            assert self.states is not None
            return self.states.read((kind, layer_idx, state_idx))
        layer = self._layer(layer_idx)
        if not layer.has_previous_state[state_idx]:
            return None
        held: Tensor | None = (layer.conv_states if kind == "conv" else layer.recurrent_states)[state_idx]
        return held

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Last inputs of a short convolution; None before the first token."""
        return self._get("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """State of a recurrence; None before the first token."""
        return self._get("recurrent", layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Append inputs of a short convolution; returns them behind the ones held."""
        if self.waves is None:
            updated: Tensor = self._layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)
            return updated
        assert self.states is not None
        held = self.states.read(("conv", layer_idx, state_idx))
        full = torch.cat([held, conv_states], dim=-1)
        self.states.write(("conv", layer_idx, state_idx), full[..., -held.shape[-1] :])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replace the state of a recurrence."""
        if self.waves is None:
            updated: Tensor = self._layer(layer_idx).update_recurrent_state(recurrent_states, state_idx)
            return updated
        assert self.states is not None
        self.states.write(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything was fed before."""
        return self.waves is not None or self.seen > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: nodes have states of their own."""
        return False

    def prefilled_states(self) -> dict[StateKey, Tensor]:
        """States that a prefill of one row left."""
        found: dict[StateKey, Tensor] = {}
        for index, layer in self.prefilled.items():
            for kind, ready, held in (
                ("conv", layer.is_conv_states_initialized, layer.conv_states),
                ("recurrent", layer.is_recurrent_states_initialized, layer.recurrent_states),
            ):
                found.update({(kind, index, i): held[i][0] for i in held if ready[i]})
        return found

    # -- rows and commits ------------------------------------------------------------------------------------------

    @classmethod
    def stack(cls, rows: Sequence[TreeCache], specs: dict[StateKey, StateSpec], device: torch.device) -> TreeCache:
        """One cache of several prefilled rows."""
        out = cls(max(row.capacity for row in rows))
        for index in {i for row in rows for i in row.attention}:
            layers = [row.attention.get(index, AttentionLayer(row.capacity)) for row in rows]
            out.attention[index] = layers[0] if len(rows) == 1 else AttentionLayer.stack(layers)
        if specs:
            out.states = NodeStates(specs, len(rows), 32, device)
            for number, row in enumerate(rows):
                out.states.set_committed(number, row.prefilled_states())
        return out

    def begin_nodes(self, base: int, first: int, waves: list[Wave], wave_parents: list[list[int]]) -> None:
        """The next forward call brings nodes `first`... of every row, whose slots start at `base + first`."""
        self.start, self.first, self.waves, self.wave_parents = base + first, first, waves, wave_parents
        if self.states is not None:
            self.states.ensure(first + len(waves[0]) if len(waves) == 1 else max(n for w in waves for _, n in w) + 1)

    def commit(self, row: int, base: int, length: int, path: Sequence[int]) -> None:
        """Gather a row's path of pending nodes to the end of its prefix of `length` tokens."""
        if not path:
            return
        in_place = list(path) == list(range(len(path))) and base == length
        if not in_place and self.attention:
            some = next(iter(self.attention.values())).keys_BHSD
            slots = torch.tensor(path, device=some.device if some is not None else None) + base
            for layer in self.attention.values():
                layer.move(row, slots, length)
        if self.states is not None:
            self.states.commit(row, path[-1])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        for layer in self.attention.values():
            layer.keep(rows)
        if self.states is not None:
            self.states.keep(rows)

    def bytes(self) -> int:
        """Memory held by keys, values and states."""
        held = sum(layer.bytes() for layer in self.attention.values())
        return held + (self.states.bytes() if self.states is not None else 0)


def step_by_waves(cache: TreeCache, mixer: Callable[..., Any], hidden_BND: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run a recurrent mixer over the nodes of a call, one batched single-token step per wave."""
    assert cache.waves is not None and cache.states is not None
    batch, new, width = hidden_BND.shape
    flat_FD = hidden_BND.reshape(batch * new, width)
    if "attention_mask" in kwargs:
        kwargs = {**kwargs, "attention_mask": None}
    out_FD: Tensor | None = None
    for wave, parents in zip(cache.waves, cache.wave_parents):
        index_F = torch.tensor([row * new + node - cache.first for row, node in wave], device=hidden_BND.device)
        cache.states.enter(wave, parents)
        cache.stepping = True
        try:
            stepped_F1D = mixer(hidden_states=flat_FD.index_select(0, index_F)[:, None], cache=cache, **kwargs)
        finally:
            cache.stepping = False
        cache.states.leave(wave)
        if out_FD is None:
            out_FD = stepped_F1D.new_empty(batch * new, stepped_F1D.shape[-1])
        out_FD.index_copy_(0, index_F, stepped_F1D[:, 0])
    assert out_FD is not None
    return out_FD.view(batch, new, -1)


def wrap_mixer(mixer: nn.Module) -> None:
    """Teach a recurrent mixer to step trees. Calls with any other cache go through unchanged.

    The module gets a subclass of its class, so that a copy of the model is a model of its own; only where a hook already sits on
    the module itself must the hook be wrapped.
    """
    if "forward" in vars(mixer):
        hooked = mixer.forward
        if not getattr(hooked, "steps_trees", False):
            vars(mixer)["forward"] = _stepping(hooked)
    elif not getattr(type(mixer).forward, "steps_trees", False):
        mixer.__class__ = _stepping_class(type(mixer))


_stepping_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _stepping_class(plain: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a mixer's class, of the same name, whose forward steps trees."""
    if plain in _stepping_classes:
        return _stepping_classes[plain]
    method = plain.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _stepping(functools.partial(method, self))(*args, **kwargs)

    forward.steps_trees = True  # type: ignore[attr-defined]
    made = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
    _stepping_classes[plain] = made
    return made


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    """A mixer's forward that steps trees when it gets a `TreeCache` in tree mode."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        if not isinstance(cache, TreeCache) or cache.waves is None or cache.stepping:
            return original(*args, **kwargs)
        rest = dict(kwargs)
        rest.pop("cache")
        hidden = args[0] if args else rest.pop("hidden_states")
        return step_by_waves(cache, original, hidden, rest)

    forward.steps_trees = True  # type: ignore[attr-defined]
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
