"""One lean decoder for the Llama-like families: the same weights, far fewer operations a token.

transformers spends as long in Python as in arithmetic when few tokens are scored. This block fuses query, key and value, and gate
and up projections, folds grouped heads into the query rows instead of copying keys, and uses packed weights where they help.
Prompts and trees go through it; `selftest` compares it with transformers' own forward at load.

Shapes: B rows, N nodes, D width, H query heads, G key-value heads, R = H / G, E head size, S slots, V vocabulary.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.cache.attention import additive_mask
from outrider.cache.tree_cache import TreeCache
from outrider.models.attention import Attend, causal, folded
from outrider.models.draft_vocab import CutHead
from outrider.models.packed import Product
from outrider.models.path_attention import path_ordered
from outrider.models.streaming import Part, is_ours, streamed_parts
from outrider.models.taps import check_layers
from outrider.models.tree_model import CachedTreeModel, Unsupported

split = torch.split_with_sizes  # what `Tensor.split` comes to, without its Python
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


class Norm:
    """RMS norm. Gemma's weights are stored as differences from one and applied in float32."""

    def __init__(self, module: Any, offset: bool) -> None:
        eps = getattr(module, "variance_epsilon", None) or module.eps
        self.eps, self.shape = float(eps), tuple(module.weight.shape)
        self.weight = module.weight.detach().float() + 1.0 if offset else module.weight.detach()

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)


class Block:
    """One decoder layer, read from transformers' module; `passing`: for one pass only."""

    def __init__(self, layer: Any, kind: str, offset: bool, passing: bool = False) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.kind, self.scale = kind, float(attention.scaling)
        self.size = int(attention.head_dim)
        self.heads = attention.q_proj.out_features // self.size
        self.groups = attention.k_proj.out_features // self.size
        self.qkv = Product(attention.q_proj, attention.k_proj, attention.v_proj, passing=passing)
        self.mixed, self.down = Product(attention.o_proj), Product(mlp.down_proj)
        self.gate_up = Product(mlp.gate_proj, mlp.up_proj, passing=passing)
        self.act: Callable[[Tensor], Tensor] = mlp.act_fn
        self.halves = [mlp.down_proj.in_features] * 2
        self.rotated, self.kinds = [self.heads + self.groups, self.groups], [self.heads, self.groups]
        self.before_mixer = Norm(layer.input_layernorm, offset)
        self.qk_norms = [Norm(getattr(attention, n), offset) for n in ("q_norm", "k_norm") if hasattr(attention, n)]
        gemma = hasattr(layer, "pre_feedforward_layernorm")
        self.after_mixer = Norm(layer.post_attention_layernorm, offset) if gemma else None
        self.before_ffn = Norm(layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm, offset)
        self.after_ffn = Norm(layer.post_feedforward_layernorm, offset) if gemma else None

    def __call__(
        self, x_BND: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, cache: TreeCache, index: int
    ) -> Tensor:
        mixed = self._mix(self.before_mixer(x_BND), rope, attend, cache, index)
        x_BND = x_BND + (self.after_mixer(mixed) if self.after_mixer else mixed)
        gate, up = split(self.gate_up(self.before_ffn(x_BND)), self.halves, -1)
        out = self.down(self.act(gate) * up)
        return x_BND + (self.after_ffn(out) if self.after_ffn else out)

    def _mix(self, x_BND: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, cache: TreeCache, index: int) -> Tensor:
        batch, new, _ = x_BND.shape
        qkv = self.qkv(x_BND).view(batch, new, self.heads + 2 * self.groups, self.size)
        qk, v = split(qkv, self.rotated, 2)
        if self.qk_norms:
            q, k = split(qk, self.kinds, 2)
            qk = torch.cat([self.qk_norms[0](q), self.qk_norms[1](k)], dim=2)
        cos, sin = rope
        qk = torch.addcmul(qk * cos, qk.roll(self.size // 2, -1), sin)
        q, k = split(qk, self.kinds, 2)
        keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), index)
        return self.mixed(attend(q, keys, values, self.scale).reshape(batch, new, self.heads * self.size))


class StreamedBlock:
    """A block that is made from the file for every pass and forgotten after it."""

    def __init__(self, part: Part, layer: Any, kind: str, offset: bool) -> None:
        self.part, self.kind = part, kind
        self.make = partial(Block, layer, kind, offset, passing=True)

    def __call__(self, *inputs: Any) -> Tensor:
        with self.part:
            return self.make()(*inputs)


class LeanTreeModel(CachedTreeModel):
    """A Llama-like transformers model whose trees are scored by lean blocks.

    Raises:
        Unsupported: for other families, and for options that the blocks do not compute.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        if config.model_type not in FAMILIES:
            raise Unsupported(f"the lean decoder does not know the family {config.model_type!r}")
        if getattr(config, "attn_logit_softcapping", None):
            raise Unsupported("the lean decoder does not cap attention scores")
        hooks = (h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
        if not all(map(is_ours, hooks)):
            raise Unsupported("its modules have hooks, which the lean decoder would not run")
        plain = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in plain and not isinstance(module, nn.Linear):
                raise Unsupported(f"its {name} is no plain linear layer")
        super().__init__(model)
        base: Any = model.base_model
        types = getattr(config, "layer_types", None) or [next(iter(self.windows))] * config.num_hidden_layers
        gemma = config.model_type.startswith("gemma")
        self.embedding: nn.Embedding = base.embed_tokens
        # the largest first: then the peak of memory is lowest
        self.unembed: Callable[[Tensor], Tensor] = Product(model.get_output_embeddings())
        parts, first = streamed_parts(model), base.layers[0].self_attn
        self.blocks = [
            StreamedBlock(parts[layer], layer, kind, gemma) if layer in parts else Block(layer, kind, gemma)
            for layer, kind in zip(base.layers, types)
        ]
        self.norm = Norm(base.norm, gemma)
        self.rotary, self.typed_rotary = base.rotary_emb, gemma
        self.kinds = {block.kind for block in self.blocks}
        self.repeat = first.q_proj.out_features // first.k_proj.out_features
        self.cap = getattr(config, "final_logit_softcapping", None)
        self.way = "lean decoder, tree mask"
        self.in_path_order, self.deepest = False, sys.maxsize  # see `exact`

    def shallow(self, layers: int) -> LeanTreeModel:
        """The same model with its first layers only."""
        made = copy.copy(self)
        made.blocks = self.blocks[:layers]
        return made

    def speak_through(self, head: CutHead) -> None:
        """Take another vocabulary head."""
        self.unembed = head

    def _rope(self, x_BND: Tensor, positions_BN: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [B, N, 1, E], so that rotation is `x * cos + roll(x) * sin`."""
        more = (kind,) if self.typed_rotary else ()
        cos, sin = self.rotary(x_BND, positions_BN, *more)
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos[:, :, None], signed[:, :, None]

    def masks(self, visible: dict[int | None, Any]) -> Any:
        """How each kind of layer attends."""
        if self.in_path_order:
            seen = {kind: visible[self.windows.get(kind)] for kind in self.kinds}
            return {kind: path_ordered(seen_BNS, self.repeat, self.dtype) for kind, seen_BNS in seen.items()}
        masks = {window: additive_mask(seen_BNS, self.dtype, self.device) for window, seen_BNS in visible.items()}
        return {kind: folded(masks[self.windows.get(kind)], self.repeat) for kind in self.kinds}

    @torch.inference_mode()
    def forward(
        self, ids_BN: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Logits of every node [B, N, V], and hidden states at the taps."""
        x_BND, features = self._run(ids_BN, positions_BN, mask, cache, taps)
        return self.logits(x_BND), list(features) if features is not None else None

    def logits(self, x_BND: Tensor) -> Tensor:
        """Logits [B, N, V] behind the last block."""
        logits_BNV = self.unembed(self.norm(x_BND))
        return torch.tanh(logits_BNV / self.cap) * self.cap if self.cap else logits_BNV

    def _run(
        self, ids_BN: Tensor, positions_BN: Tensor, attends: dict[str, Attend], cache: TreeCache, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs of the last block [B, N, D], and those at the taps side by side."""
        x_BND = self.embedding(ids_BN)
        ropes = {kind: self._rope(x_BND, positions_BN, kind) for kind in self.kinds}
        tapped: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x_BND = block(x_BND, ropes[block.kind], attends[block.kind], cache, index)
            if index in taps:
                tapped[index] = x_BND
        return x_BND, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None

    @torch.inference_mode()
    def _feed(self, cache: TreeCache, tokens: Sequence[int], taps: Sequence[int] = ()) -> Tensor:
        check_layers(taps, len(self.blocks))
        features = []
        for at in range(0, len(tokens), self.chunk):
            part = tokens[at : at + self.chunk]
            start = cache.start = cache.seen
            attends = {
                kind: causal(len(part), start, self.windows.get(kind), self.dtype, self.device) for kind in self.kinds
            }
            positions = torch.arange(start, start + len(part), device=self.device)[None]
            ids = torch.tensor([list(part)], device=self.device)
            _, tapped = self._run(ids, positions, attends, cache, taps)
            features += [] if tapped is None else [tapped[0]]
            cache.seen += len(part)
        return torch.cat(features) if features else torch.empty(0)
