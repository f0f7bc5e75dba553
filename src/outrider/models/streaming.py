"""A model larger than the memory that it may take: its weights stay in their files, and layers are read while they are needed.

Weights are mapped from safetensors by transformers. A streamed layer is in memory while it runs: before that, the kernel is asked
for the layer after it; behind it, its pages are given back, and leave the kernel's cache of files too, so that the budget
holds for the whole machine. The model stays an ordinary model, whoever runs it. Weights that are stored in another dtype than
that of the run are converted on their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.models.budget import Layer, Split, split
from outrider.models.resident import Extent, extents, joined, read_only_when_asked, release, return_what_is_freed
from outrider.models.taps import decoder_layers

HALF = (torch.bfloat16, torch.float16)


class Part:
    """A layer that is in memory only within `with part:`, or while it is called.

    Args:
        weights: its parameters that are mapped from a file.
        dtype: of the run.
        pieces: where in files they lie.
    """

    def __init__(self, weights: list[nn.Parameter], dtype: torch.dtype, pieces: list[Extent]) -> None:
        self.weights, self.dtype, self.pieces = weights, dtype, pieces
        self.ahead: list[Extent] = []  # what the next streamed layer needs
        self._stored: list[Tensor] = []

    def __enter__(self) -> None:
        if self._stored:  # an interrupt ended the last call, and torch then leaves out hooks
            self.__exit__()
        for piece in (*self.pieces, *self.ahead):
            piece.fetch()
        self._stored = [weight.data for weight in self.weights]
        with torch.inference_mode(False):
            for weight in self.weights:
                weight.data = weight.data.to(self.dtype)  # the very same tensor where nothing is to convert

    def __exit__(self, *_: object) -> None:
        for weight, stored in zip(self.weights, self._stored):
            weight.data = stored
        for stored in self._stored:
            release(stored)
        for piece in self.pieces:
            piece.forget()
        self._stored = []

    def before(self, *_: object) -> None:
        """A hook in front of the layer's own forward."""
        self.__enter__()

    def after(self, *_: object) -> None:
        """A hook behind it."""
        self.__exit__()


class Streaming:
    """How a model is streamed.

    Args:
        budget: bytes that its weights may take.
        chosen: which layers go through.
        parts: these, by layer.
    """

    def __init__(self, budget: int, chosen: Split, parts: dict[nn.Module, Part], layers: int) -> None:
        self.budget, self.chosen, self.parts, self.layers = budget, chosen, parts, layers

    def __str__(self) -> str:
        read = f"; every pass reads {self.chosen.pass_bytes / 1e6:.4g} MB from the disk" if self.parts else ""
        return f"{len(self.parts)} of {self.layers} layers streamed within {self.budget / 1e6:.4g} MB{read}"

    def facts(self) -> dict[str, Any]:
        """For reports."""
        return {
            "memory_budget_bytes": self.budget,
            "resident_weight_bytes": self.chosen.resident_bytes,
            "streaming_bytes": self.chosen.way_bytes,
            "streamed_layers": len(self.parts),
            "layers": self.layers,
            "disk_bytes_per_pass": self.chosen.pass_bytes,
        }


def streaming(model: Any) -> Streaming | None:
    """How a model is streamed; None for one that was loaded without a budget."""
    found: Streaming | None = vars(model).get("_outrider_streaming")
    return found


def streamed_parts(model: nn.Module) -> Mapping[nn.Module, Part]:
    """Streamed layers of a model, each with what holds it in memory; none where nothing is streamed."""
    found = streaming(model)
    return found.parts if found else {}


def is_ours(hook: Any) -> bool:
    """Whether a hook of a module only streams it."""
    return isinstance(getattr(hook, "__self__", None), Part)


def stream(model: PreTrainedModel, name: str, budget: int, dtype: torch.dtype) -> None:
    """Keep a freshly loaded model within a budget of bytes, and run it in a dtype.

    Raises:
        ValueError: when it has no layers that could stay in their files, or the budget is too small.
    """
    layers = list(decoder_layers(model))
    stored_dtype = model.dtype
    everything = dict.fromkeys(model.parameters())
    where = dict(zip(everything, extents(weight.data for weight in everything)))
    owners = Counter(weight for layer in layers for weight in layer.parameters())
    converted = [weight for weight in everything if weight.dtype == stored_dtype != dtype]

    def held(weights: Iterable[nn.Parameter]) -> int:
        sizes = {weight: dtype if weight.dtype == stored_dtype else weight.dtype for weight in weights}
        return sum(weight.numel() * size.itemsize for weight, size in sizes.items())

    mine = [[w for w in layer.parameters() if where[w] is not None and owners[w] == 1] for layer in layers]
    going = [weight for part in mine for weight in part]
    if not going or (converted and (_saved_buffers(model) or None in where.values())):
        raise ValueError(
            f"{name} cannot be kept within a memory budget: its weights are not used as they lie in its files (transformers "
            f"changes them when it loads them); leave out the budget, or save the model again in {dtype}"
        )
    sizes = [Layer(sum(w.numel() * w.element_size() for w in part), held(part)) for part in mine]
    rest = held(everything) - held(going)
    head = model.get_output_embeddings()
    if dtype in HALF and head is not None:
        rest += held(head.parameters())  # products in half precision want it laid out anew
    chosen = split(name, budget, rest, sizes)
    parts = {
        layers[i]: Part(mine[i], dtype, joined(e for w in mine[i] if (e := where[w]) is not None))
        for i in chosen.streamed
    }
    _convert(converted, {weight for part in parts.values() for weight in part.weights}, dtype)
    return_what_is_freed()
    ring = list(parts.values())
    for at, (layer, part) in enumerate(zip(parts, ring)):
        part.ahead = ring[(at + 1) % len(ring)].pieces if len(ring) > 1 else []
        layer.register_forward_pre_hook(part.before)
        layer.register_forward_hook(part.after, always_call=True)
        for weight in part.weights:
            read_only_when_asked(weight.data)
            release(weight.data)
        for piece in part.pieces:
            piece.forget()
    vars(model)["_outrider_streaming"] = Streaming(budget, chosen, parts, len(layers))


def _saved_buffers(model: nn.Module) -> set[str]:
    """Names of what a checkpoint holds besides parameters."""
    return set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _convert(weights: Iterable[nn.Parameter], streamed: set[nn.Parameter], dtype: torch.dtype) -> None:
    """Convert weights that stay in memory for good."""
    for weight in weights:
        if weight not in streamed:
            stored = weight.data
            weight.data = stored.to(dtype)
            release(stored)
