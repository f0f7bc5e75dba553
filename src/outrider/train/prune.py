"""Cut a target down to a wide and shallow drafter: few of its layers, and of these the heads and neurons that matter.

Layers go one at a time, always the one whose loss changes the target's laws least given those already gone. That costs a pass
per layer and step, and is worth it: layers that are each dispensable are often not dispensable together, which importance
measured once cannot see. What remains loses attention groups and feed-forward neurons by what they add to the residual stream:
mean activation times the size of the column that reads it. Width 1 keeps all of them.

Shapes: B texts, T tokens, R positions, V vocabulary, U units, G groups.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from outrider.api import Engine

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TEXTS, TEXT_TOKENS = 6, 64  # to measure on
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Removed:
    """A step of elimination: the layer that went, and how far the laws were from the target's then (KL, nats a token)."""

    layer: int
    divergence: float


@dataclass(frozen=True)
class Pruned:
    """A pruned model, which layers it kept, and in which order the others went."""

    model: PreTrainedModel
    kept: list[int]
    removed: list[Removed]
    groups: int
    neurons: int


def prune(
    engine: Engine,
    layers: int,
    width: float = 1.0,
    texts: Sequence[Tensor] = (),
    tell: Tell = lambda done, total, what: None,
) -> Pruned:
    """A smaller copy of the target.

    Args:
        layers: how many to keep.
        width: share of attention groups and feed-forward neurons to keep in each.
        texts: token ids to measure on; without any, the target writes some.

    Raises:
        ValueError: for a family that cannot be cut this way, or impossible sizes.
    """
    config = engine.model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"models of type {config.model_type} cannot be pruned yet, only {', '.join(FAMILIES)}; use `outrider distil`"
        )
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"{layers} layers cannot be kept of {config.num_hidden_layers}; give 1 to that many")
    if not 0 < width <= 1:
        raise ValueError(f"width is {width:g}; it must be above 0 and at most 1, which keeps all heads and neurons")
    ids_BT = _equally_long(texts[:TEXTS] or own_texts(engine)).to(engine.model.device)
    kept, removed = choose_layers(engine.model, layers, ids_BT, tell)
    with only_layers(engine.model, kept):
        groups, neurons = unit_importance(engine.model, ids_BT)
    small, sizes = _cut_out(engine.model, kept, groups, neurons, width)
    return Pruned(small, kept, removed, *sizes)


def own_texts(engine: Engine) -> list[Tensor]:
    """A few texts of the target's own."""
    from outrider.train.prompts import templates

    prompts = templates()[:: len(templates()) // TEXTS][:TEXTS]
    results = engine.generate(prompts, shape="off", max_new_tokens=TEXT_TOKENS // 2, temperature=0.7, seed=0)
    return [torch.tensor(engine.encode(prompt) + result.token_ids) for prompt, result in zip(prompts, results)]


def _equally_long(texts: Sequence[Tensor]) -> Tensor:
    """The ends of texts, which the target wrote, [B, T]."""
    length = min(TEXT_TOKENS, *map(len, texts)) if len(texts) > 1 else min(TEXT_TOKENS, len(texts[0]))
    return torch.stack([text[-length:].long() for text in texts])


# ---- layers ----------------------------------------------------------------------------------------------------------


@contextmanager
def only_layers(model: Any, kept: Sequence[int]) -> Iterator[None]:
    """The model with these layers only, within the block."""
    base, config = model.base_model, model.config.get_text_config()
    whole, types = base.layers, getattr(config, "layer_types", None)
    base.layers = nn.ModuleList([whole[i] for i in kept])
    if types:
        config.layer_types = [types[i] for i in kept]
    try:
        yield
    finally:
        base.layers = whole
        if types:
            config.layer_types = types


@torch.inference_mode()
def laws(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Log probabilities after every second token of every text, [R, V]."""
    hidden_BTD: Tensor = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    unembed: Any = model.get_output_embeddings()
    logits_RV: Tensor = unembed(hidden_BTD[:, 1::2].flatten(0, 1))
    return logits_RV.float().log_softmax(-1)


def divergence(logp_RV: Tensor, logq_RV: Tensor) -> float:
    """KL(p || q), nats a position."""
    return float((logp_RV.exp() * (logp_RV - logq_RV)).sum(-1).mean())


def choose_layers(
    model: PreTrainedModel, count: int, ids_BT: Tensor, tell: Tell = lambda done, total, what: None
) -> tuple[list[int], list[Removed]]:
    """The layers to keep, and what went before."""
    kept = list(range(model.config.get_text_config().num_hidden_layers))
    steps = sum(range(count + 1, len(kept) + 1))
    whole_RV, removed, done = laws(model, ids_BT), list[Removed](), 0
    while len(kept) > count:
        found = []
        for layer in kept:
            tell(done, steps, f"without layer {layer}")
            with only_layers(model, [i for i in kept if i != layer]):
                found.append((divergence(whole_RV, laws(model, ids_BT)), layer))
            done += 1
        apart, layer = min(found)
        kept.remove(layer)
        removed.append(Removed(layer, apart))
    tell(steps, steps, "layers")
    return kept, removed


# ---- width -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def unit_importance(model: PreTrainedModel, ids_BT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Of every layer, what its attention groups [G] and its feed-forward neurons [U] add to the residual stream."""
    base: Any = model.base_model
    watched: list[nn.Linear] = [layer.self_attn.o_proj for layer in base.layers]
    watched += [layer.mlp.down_proj for layer in base.layers]
    sums: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        total_U = arguments[0].detach().float().abs().flatten(0, -2).sum(0)
        sums[module] = sums[module] + total_U if module in sums else total_U

    hooks = [module.register_forward_pre_hook(note) for module in watched]
    try:
        laws(model, ids_BT)
    finally:
        for hook in hooks:
            hook.remove()
    scores = [sums[module] * module.weight.detach().float().norm(dim=0) for module in watched]
    config = model.config.get_text_config()
    half = len(base.layers)
    groups = [score.view(config.num_key_value_heads, -1).sum(-1) for score in scores[:half]]
    return groups, scores[half:]


def _best(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count).indices.sort().values


def _cut_out(
    model: PreTrainedModel, kept: Sequence[int], groups: Sequence[Tensor], neurons: Sequence[Tensor], width: float
) -> tuple[PreTrainedModel, tuple[int, int]]:
    """The kept layers with their best groups and neurons, as a model of its own."""
    config = copy.deepcopy(model.config.get_text_config())
    num_groups = max(1, round(width * len(groups[0])))
    step = 64 if len(neurons[0]) >= 256 else 1
    num_neurons = min(len(neurons[0]), max(step, round(width * len(neurons[0]) / step) * step))
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads // config.num_key_value_heads
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    config.head_dim, config.num_hidden_layers = head_size, len(kept)
    config.num_key_value_heads, config.num_attention_heads = num_groups, num_groups * queries
    config.intermediate_size = num_neurons
    small: PreTrainedModel = type(model)(config).to(model.device, model.dtype)
    base: Any = model.base_model
    state = {name: value for name, value in model.state_dict().items() if ".layers." not in name}
    for place, (layer, group_scores, neuron_scores) in enumerate(zip(kept, groups, neurons)):
        chosen, alive = _best(group_scores, num_groups), _best(neuron_scores, num_neurons)
        keys, heads = _members(chosen, head_size), _members(chosen, queries)
        rows = _members(heads, head_size)
        for name, value in base.layers[layer].state_dict().items():
            state[f"{model.base_model_prefix}.layers.{place}.{name}"] = _slice(name, value, rows, keys, alive)
    small.load_state_dict(state)
    return small.eval().requires_grad_(False), (num_groups, num_neurons)


def _members(groups: Tensor, size: int) -> Tensor:
    """The units of groups of one size."""
    return (groups[:, None] * size + torch.arange(size, device=groups.device)).flatten()


def _slice(name: str, value: Tensor, queries: Tensor, keys: Tensor, neurons: Tensor) -> Tensor:
    """What is left of a layer's tensor; biases of what writes to the residual stream stay whole."""
    if name.startswith(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")):
        return value[queries if "q_proj" in name else keys]
    if name.startswith(("mlp.gate_proj", "mlp.up_proj")):
        return value[neurons]
    if name == "self_attn.o_proj.weight":
        return value[:, queries]
    if name == "mlp.down_proj.weight":
        return value[:, neurons]
    return value
