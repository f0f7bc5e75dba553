"""Decoder layers in the kernels' own terms: structures of pointers, and tensors that are kept alive for them.

Shapes: B rows, N nodes, M = B * N, D width, H query heads, G key-value heads, E head size, S slots, C room for slots,
V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int64, c_void_p
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.native.layout import Layout, LinearStructure
from outrider.native.library import library
from outrider.native.linear import DTYPES

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
LEAST = 16  # inner width
NO_MEMORY = "there is no memory left for a pass over the model"
MOST_SIZE = 256


class _Layer(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("before_mixer", "after_mixer", "before_ffn", "after_ffn", "query_norm", "key_norm")
        ),
        *((name, LinearStructure) for name in ("query", "key", "value", "mixed", "gate", "up", "down")),
        ("scale", c_float),
        ("kind", c_int64),
    ]


class _Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("bytes", "layers", "width", "heads", "groups", "size", "inner", "activation")),
        ("epsilon", c_float),
        ("layer", POINTER(_Layer)),
        ("norm", c_void_p),
        ("unembed", LinearStructure),
    ]


class _Pass(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "nodes", "slots", "room", "start", "threads", "taps", "wanted")),
        *((name, c_void_p) for name in ("stream", "cos", "sin", "places", "seen")),
        *((name, c_void_p) for name in ("keys", "values", "beside", "tapped")),
        *((name, c_void_p) for name in ("features", "hidden", "logits")),
    ]


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer, as torch holds them; norms as float32, None where there is none.

    Args:
        kind: which of a pass's rotations and visible slots the layer takes.
    """

    before_mixer: Tensor
    before_ffn: Tensor
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    mixed: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    scale: float
    kind: int = 0
    after_mixer: Tensor | None = None
    after_ffn: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None

    def linears(self) -> tuple[nn.Linear, ...]:
        """In the order in which a pass reads them."""
        return self.query, self.key, self.value, self.mixed, self.gate, self.up, self.down


class Held:
    """Keys and values by layer, [B, G, C, E]; they may be parts of larger ones.

    Args:
        kernels: move them, if anything does.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], kernels: ctypes.CDLL | None = None) -> None:
        self._kernels = kernels
        assert len(keys) == len(values), "keys and values of every layer"
        self.layers, self.room = len(keys), keys[0].stride(1) // keys[0].shape[3]
        self._tensors, self._at = (keys, values), (_pointers(keys), _pointers(values))
        self.keys, self.values = (ctypes.addressof(at) for at in self._at)

    def move(self, row: int, slots: Sequence[int], target: int) -> None:
        """Gather rising slots of a row into consecutive ones from `target` on, none of which lies behind its source."""
        like = self._tensors[0][0]
        groups, size, places = like.shape[1], like.shape[3] * like.element_size(), (c_int64 * len(slots))(*slots)
        both, heads = (self.keys, self.values), (row * groups, groups)
        assert self._kernels is not None
        self._kernels.outrider_move(self.layers, *both, *heads, self.room, size, places, len(slots), target)

    def layer(self, index: int) -> Held:
        """Those of one layer."""
        keys, values = self._tensors
        return Held([keys[index]], [values[index]])


class TextPass:
    """Passes over nodes of one text. What stays the same from pass to pass is said once: that takes as long as a small product.

    Args:
        decoder: its weights; layers of one kind.
        taps: layers whose outputs are asked for.
    """

    def __init__(self, decoder: Decoder, taps: Sequence[int] = ()) -> None:
        self.decoder, self.taps, self._seen, self._taps = decoder, taps, (c_char_p * 1)(), (c_int64 * len(taps))(*taps)
        self._call = _Pass(batch=1, taps=len(taps))
        self._call.seen, self._call.tapped = ctypes.addressof(self._seen), ctypes.addressof(self._taps)
        self._at = byref(decoder._model), byref(self._call)
        self._held: Held | None = None
        self._rotations: tuple[Tensor, Tensor] | None = None

    def attend(self, held: Held) -> None:
        """Where keys and values are from now on."""
        if held is not self._held:
            assert held.layers == len(self.decoder.layers), "keys and values of every layer"
            self._held = held
            self._call.room, self._call.keys, self._call.values = held.room, held.keys, held.values

    def rotate(self, rotations: tuple[Tensor, Tensor]) -> None:
        """Cosines and sines of all positions from now on, as in `Attended`."""
        if rotations is not self._rotations:
            self._rotations, self._tables = rotations, [_pointers([part]) for part in rotations]
            self._call.cos, self._call.sin = map(ctypes.addressof, self._tables)

    def __call__(
        self,
        stream: int,
        start: int,
        positions: Sequence[int],
        seen: bytes,
        hidden: int | None = None,
        features: int | None = None,
        logits: int | None = None,
        wanted: int = 0,
    ) -> None:
        """Write what is wanted, and new keys and values to their slots.

        Args:
            stream: address of what goes in [N, D]; overwritten.
            start: slot of the first node.
            seen: which slots a node sees, bool [N, S]; S is `start` + N.
            hidden, features, logits: addresses for outputs behind the last norm [N, D], of the tapped layers side by side
                [N, taps * D], and of the vocabulary head [N, V].
            wanted: the first node whose outputs of the last layer are wanted; those of nodes before it are left as they are.

        Raises:
            MemoryError: where there is none left for the pass.
        """
        call, nodes = self._call, len(positions)
        places = (c_int64 * nodes)(*positions)
        self._seen[0] = seen
        call.nodes, call.slots, call.start, call.threads = nodes, start + nodes, start, torch.get_num_threads()
        call.stream, call.places = stream, ctypes.addressof(places)
        call.hidden, call.features, call.logits, call.wanted = hidden, features, logits, wanted
        if self.decoder._library.outrider_pass(*self._at):
            raise MemoryError(NO_MEMORY)


@dataclass(frozen=True)
class Attended:
    """What a pass attends to.

    Args:
        rotations: by kind, cosines and sines [P, E] in float32, those of the first half negated.
        places: which of them each node takes, int64 [M].
        seen: by kind, which slots a node sees, bool [M, S].
        start: slot of the first node; S is `start` + N.
        held: where keys and values are.
    """

    rotations: Sequence[tuple[Tensor, Tensor]]
    places: Tensor
    seen: Sequence[Tensor]
    start: int
    held: Held


@dataclass
class Decoder:
    """Layers, the last norm and perhaps a vocabulary head. Weights are laid out for the kernels once, here or where it came from.

    Args:
        lying: read weights as they lie instead.
        rounds: rounded to bytes, as a drafter's may be (`Layout`).

    Raises:
        Unavailable: without compiled kernels.
        ValueError: for sizes that the kernels do not compute.
    """

    layers: Sequence[DecoderLayer]
    heads: int
    groups: int
    size: int
    activation: str
    epsilon: float
    norm: Tensor
    unembed: nn.Linear | None = None
    layouts: tuple[Layout, ...] = ()
    lying: bool = False
    rounds: bool = False
    _held: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._library = library()
        first = self.layers[0]
        self.dtype, self.width = first.query.weight.dtype, first.query.in_features
        if self.dtype not in DTYPES or first.query.weight.device.type != "cpu":
            raise ValueError(f"the kernels compute bf16 and float32 on a CPU, not {self.dtype}")
        if self.size % 2 or self.size > MOST_SIZE:
            raise ValueError(f"the kernels take heads of even sizes up to {MOST_SIZE}, not {self.size}")
        if first.gate.out_features < LEAST:
            raise ValueError(f"the kernels take inner widths of at least {LEAST}, not {first.gate.out_features}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"the kernels do not know the activation {self.activation!r}")
        self._lay_out()
        self._layers = (_Layer * len(self.layers))(*(self._layer(layer) for layer in self.layers))
        self._model = _Model(
            first.query.weight.element_size(),
            len(self.layers),
            self.width,
            self.heads,
            self.groups,
            self.size,
            first.gate.out_features,
            ACTIVATIONS[self.activation],
            self.epsilon,
            self._layers,
            self._norm(self.norm),
            self._linear(self.unembed) if self.unembed else LinearStructure(),
        )

    def _lay_out(self) -> None:
        """Lay out those weights that are not laid out yet."""
        linears = [linear for layer in self.layers for linear in layer.linears()] + [self.unembed] * bool(self.unembed)
        weights = [linear.weight.detach() for linear in linears if linear is not None]
        if any(weight.dtype is not self.dtype or not weight.is_contiguous() for weight in weights):
            raise ValueError("the kernels want weights of one dtype, row after row")
        new = [weight for weight in weights if not self._layout_of(weight).address(weight)]
        if new and not self.lying:
            self.layouts = (*self.layouts, Layout(new, self.rounds))

    def _layout_of(self, weight: Tensor) -> Layout:
        return next((layout for layout in self.layouts if layout.address(weight)), Layout([]))

    @property
    def head(self) -> LinearStructure:
        """The vocabulary head as the kernels take it, as long as the decoder is there."""
        return self._model.unembed

    def changed(self, **parts: Any) -> Decoder:
        """The same decoder with other `layers`, another `unembed` ..."""
        return replace(self, **parts)

    def _layer(self, layer: DecoderLayer) -> _Layer:
        norms = (
            layer.before_mixer,
            layer.after_mixer,
            layer.before_ffn,
            layer.after_ffn,
            layer.query_norm,
            layer.key_norm,
        )
        return _Layer(*map(self._norm, norms), *map(self._linear, layer.linears()), layer.scale, layer.kind)

    def _norm(self, weight: Tensor | None) -> int | None:
        if weight is None:
            return None
        self._held.append(held := weight.detach().float().contiguous())
        return held.data_ptr()

    def _linear(self, linear: nn.Linear) -> LinearStructure:
        weight = linear.weight.detach()
        self._held.append(weight)
        return self._layout_of(weight).linear(weight, self._norm(linear.bias))

    def __call__(
        self,
        stream_BND: Tensor,
        attended: Attended,
        taps: Sequence[int] = (),
        logits: bool = True,
        hidden: bool = False,
        beside_BND: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Logits [B, N, V]; outputs of the tapped layers side by side [B, N, taps * D]; those of the last norm [B, N, D].

        Each only if wanted, and logits only if there is a vocabulary head. New keys and values are written to their slots.

        Args:
            stream_BND: embeddings; overwritten.
            beside_BND: what joins the stream together with the first layer's attention.

        Raises:
            MemoryError: where there is none left for the pass.
        """
        batch, nodes, width = stream_BND.shape
        held, places = attended.held, attended.places
        assert held.layers == len(self.layers), "keys and values of every layer"
        assert places.dtype is torch.int64 and places.is_contiguous()
        logits_BNV = stream_BND.new_empty(batch, nodes, self.unembed.out_features) if logits and self.unembed else None
        features = stream_BND.new_empty(batch, nodes, len(taps) * width) if taps else None
        out_BND = stream_BND.new_empty(batch, nodes, width) if hidden else None
        ends = (
            logits_BNV is not None or hidden or len(self.layers) - 1 in taps
        )  # else nothing is asked of the last layer
        cos, sin = (_pointers([pair[part] for pair in attended.rotations]) for part in (0, 1))
        seen, tapped = _pointers(attended.seen), (c_int64 * len(taps))(*taps)
        call = _Pass(
            batch,
            nodes,
            attended.start + nodes,
            held.room,
            attended.start,
            torch.get_num_threads(),
            len(taps),
            0 if ends else nodes,
            stream_BND.data_ptr(),
            ctypes.addressof(cos),
            ctypes.addressof(sin),
            places.data_ptr(),
            ctypes.addressof(seen),
            held.keys,
            held.values,
            beside_BND.data_ptr() if beside_BND is not None else None,
            ctypes.addressof(tapped),
            *(part.data_ptr() if part is not None else None for part in (features, out_BND, logits_BNV)),
        )
        if self._library.outrider_pass(byref(self._model), byref(call)):
            raise MemoryError(NO_MEMORY)
        return logits_BNV, features, out_BND


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
