"""A Gated DeltaNet language model: every layer a gated-delta mixer and a gated MLP; in hybrids some have attention instead.

Its parameters and its `config.json` are named as flash-linear-attention names them, so checkpoints of that library load from
their folders. It is a transformers model with transformers' cache, and so a target and a drafter like any other.

Shapes: B rows, T tokens, D width, C convolved channels, J key heads, H value heads, K key size, V value size.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from outrider.mixers import gated_delta
from outrider.mixers.short_conv import unrolled
from outrider.models.gdn_attention import Attention, Rotation, check_attention, rotations

MODEL_TYPE = "gated_deltanet"


class GatedDeltaNetConfig(PretrainedConfig):
    """Sizes and options, by the names of flash-linear-attention.

    Raises:
        ValueError: for options of that library that this model does not have.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ("cache",)

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 21
    num_heads: int = 6
    num_v_heads: int | None = None
    head_dim: int = 256
    expand_v: float = 2.0
    hidden_ratio: float | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    conv_size: int = 4
    conv_bias: bool = False
    use_gate: bool = True
    use_short_conv: bool = True
    allow_neg_eigval: bool = False
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attn: dict | None = None
    """Of a hybrid: `layers` that have attention, `num_heads`, `num_kv_heads`, `qkv_bias`, `window_size`, `rope_theta`."""
    fused_mlp: bool = False
    """Whether `mlp.gate_proj` holds both gate and value, as in early checkpoints; found out when a folder is loaded."""
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for wrong, what in (
            (not self.use_short_conv, "no short convolutions"),
            (self.hidden_act not in ("swish", "silu"), f"the activation {self.hidden_act}"),
        ):
            if wrong:
                raise ValueError(f"This Gated DeltaNet has {what}, which is not supported: use a checkpoint without.")
        self.layer_types = ["linear_attention"] * self.num_hidden_layers
        if self.attn:
            check_attention(self.attn, self.num_hidden_layers, self.hidden_size)
            self.sliding_window = self.attn.get("window_size")
            for layer in self.attn.get("layers", ()):
                self.layer_types[layer] = "sliding_attention" if self.sliding_window else "full_attention"
        super().__post_init__(**kwargs)

    @property
    def value_heads(self) -> int:
        """H."""
        return self.num_v_heads or self.num_heads

    @property
    def value_dim(self) -> int:
        """V."""
        return int(self.head_dim * self.expand_v)

    @property
    def ffn(self) -> int:
        """Width inside the MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        exact = int(self.hidden_size * (self.hidden_ratio or 4) * 2 / 3)
        return (exact + 255) // 256 * 256


# -- what runs over tokens; `mixer_rules` has the same over the nodes of a tree -----------------------------------------


def causal_conv1d_fn(x_BCT: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    """Every channel's own short convolution, from zeros, weight [C, taps]; SiLU behind it."""
    assert activation == "silu"
    return F.silu(unrolled([x_BCT.mT], weight.T, bias)).mT


def gated_delta_sequence(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over whole sequences, queries and keys normalised: outputs [B, T, H, V] and the state after them."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, g, beta = (t.to(wide) for t in (query, key, value, g, beta))
    q, k = gated_delta.normalised(q) * q.shape[-1] ** -0.5, gated_delta.normalised(k)
    if initial_state is None:
        initial_state = q.new_zeros(len(q), v.shape[2], q.shape[-1], v.shape[-1])
    x = gated_delta.Inputs(q, k, v, g[..., None], beta)
    with torch.autocast(value.device.type, enabled=False):  # states stay wide in training, too
        o_BTHV, state_BHKV = gated_delta.sequence(initial_state.to(wide), x)
    return o_BTHV.to(value.dtype), state_BHKV


# -- layers ------------------------------------------------------------------------------------------------------------


class GatedNorm(nn.Module):
    """RMS norm of heads, then a SiLU gate where there is one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """Same shape as x, in float32 at least inside."""
        wide = torch.promote_types(x.dtype, torch.float32)
        out = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return (out if gate is None else out * F.silu(gate.to(wide))).to(x.dtype)


class GatedDeltaMixer(nn.Module):
    """The layer that stands where attention would."""

    def __init__(self, config: GatedDeltaNetConfig, layer_idx: int) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.value_heads
        self.layer_idx, self.taps = layer_idx, config.conv_size
        self.key_size, self.value_size = config.head_dim, config.value_dim
        self.beta_scale = 2.0 if config.allow_neg_eigval else 1.0
        keys, values = config.num_heads * self.key_size, heads * self.value_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n, bias=False) for n in (keys, keys, values))
        self.a_proj, self.b_proj = nn.Linear(width, heads, bias=False), nn.Linear(width, heads, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(n, n, self.taps, groups=n, bias=config.conv_bias) for n in (keys, keys, values)
        )
        self.g_proj = nn.Linear(width, values, bias=False) if config.use_gate else None
        self.o_norm = GatedNorm(self.value_size, config.norm_eps)
        self.o_proj = nn.Linear(values, width, bias=False)

    def forward(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Outputs [B, T, D].

        Args:
            attention_mask: [B, T], 0 at padding in front of a row.
        """
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[..., None].to(hidden_states.dtype)
        tokens, state = hidden_states.shape[1], None
        mixed_BCT = torch.cat([p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj)], dim=-1).mT
        if cache is not None:
            state = cache.get_recurrent_state(self.layer_idx)
            mixed_BCT = cache.update_conv_state(mixed_BCT, self.layer_idx, conv_kernel_size=self.taps)
        convolved_BCT = causal_conv1d_fn(mixed_BCT, *self.convolution(), activation="silu")
        q, k, v = convolved_BCT[..., -tokens:].mT.split([p.out_features for p in self._projections()], dim=-1)
        q, k = q.unflatten(-1, (-1, self.key_size)), k.unflatten(-1, (-1, self.key_size))
        v = v.unflatten(-1, (-1, self.value_size))
        beta = self.b_proj(hidden_states).sigmoid() * self.beta_scale
        if attention_mask is not None:  # a convolution's bias makes something of nothing, and padding writes nothing
            beta = beta * attention_mask[..., None].to(beta.dtype)
        o, state = gated_delta_sequence(q, k, v, g=self._decay(hidden_states), beta=beta, initial_state=state)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        gate = self.g_proj(hidden_states).unflatten(-1, (-1, self.value_size)) if self.g_proj is not None else None
        out: Tensor = self.o_proj(self.o_norm(o, gate).flatten(2))
        return out

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj

    def convolution(self) -> tuple[Tensor, Tensor]:
        """Weight [C, taps] of the short convolution, and its bias [C], or [] where there is none."""
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        weight_CK = torch.cat([conv.weight[:, 0] for conv in convs])
        biases = [conv.bias for conv in convs if conv.bias is not None]
        return weight_CK, torch.cat(biases) if biases else weight_CK.new_zeros(())

    def _decay(self, hidden_BTD: Tensor) -> Tensor:
        """Log decay [B, T, H], in float32 at least: small rates decide over long memories."""
        wide = torch.promote_types(hidden_BTD.dtype, torch.float32)
        return -self.A_log.to(wide).exp() * F.softplus(self.a_proj(hidden_BTD).to(wide) + self.dt_bias.to(wide))


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        width, ffn = config.hidden_size, config.ffn
        self.gate_proj = nn.Linear(width, 2 * ffn if config.fused_mlp else ffn, bias=False)
        self.up_proj = None if config.fused_mlp else nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, T, D]."""
        gate, value = self.gate_proj(x).chunk(2, -1) if self.up_proj is None else (self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(F.silu(gate) * value)
        return out


class GatedDeltaBlock(nn.Module):
    """Mixer and MLP, each behind a norm and added to what came in."""

    def __init__(self, config: GatedDeltaNetConfig, layer_idx: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn: GatedDeltaMixer | Attention = GatedDeltaMixer(config, layer_idx)
        if config.layer_types[layer_idx] != "linear_attention":
            self.attn = Attention(config.hidden_size, config.attn or {}, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        x_BTD: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Outputs [B, T, D]; see `Attention`."""
        normed_BTD, options = self.attn_norm(x_BTD), {"cache": cache, "attention_mask": attention_mask}
        if isinstance(self.attn, Attention):
            options["rotation"] = rotation
        elif attention_mask is not None:  # recurrent layers know only padding in front of a row
            options["attention_mask"] = attention_mask[:, -x_BTD.shape[1] :] if attention_mask.ndim == 2 else None
        x_BTD = x_BTD + self.attn(normed_BTD, **options)
        out: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out


# -- models ------------------------------------------------------------------------------------------------------------


class GatedDeltaNetPreTrainedModel(PreTrainedModel):
    """What both models share."""

    config_class = GatedDeltaNetConfig
    base_model_prefix = "model"
    _is_stateful = True
    _no_split_modules = ("GatedDeltaBlock",)
    _keys_to_ignore_on_load_unexpected = (r"\.attn\.D$",)  # early checkpoints carry a skip that nothing reads

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GatedDeltaMixer):
            initialization.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(0.01, 16.0).log())
            steps = torch.empty_like(module.dt_bias).uniform_(-6.9, -2.3).exp()  # 0.001 to 0.1
            initialization.copy_(module.dt_bias, steps + (-(-steps).expm1()).log())  # softplus(dt_bias) is the step


class GatedDeltaNetModel(GatedDeltaNetPreTrainedModel):
    """From token ids to the last hidden states."""

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GatedDeltaBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of token ids."""
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding of token ids."""
        self.embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Last hidden states [B, T, D] and, if asked for, the cache.

        Args:
            attention_mask: 0 at padding in front of a row [B, S], or what attention layers add to their scores [B, 1, T, S].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds.")
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            raise ValueError("Masks by layer type, as of static caches, are not supported: use a dynamic cache.")
        x_BTD = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        attention = [layer.attn.layer_idx for layer in self.layers if isinstance(layer.attn, Attention)]
        if position_ids is None:
            start = 0 if cache is None or not attention else cache.get_seq_length(attention[0])
            position_ids = torch.arange(start, start + x_BTD.shape[1], device=x_BTD.device)[None]
        rotation = rotations(position_ids, x_BTD.shape[-1], self.config.attn, x_BTD.dtype) if attention else None
        for layer in self.layers:
            x_BTD = layer(x_BTD, cache, attention_mask, rotation)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BTD), cache=cache if use_cache else None)


class GatedDeltaNetForCausalLM(GatedDeltaNetPreTrainedModel, GenerationMixin):
    """With a vocabulary head."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012 - transformers reads it off the class

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__(config)
        self.model = GatedDeltaNetModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """See transformers; a folder also tells which of two layouts its MLPs have."""
        config = config or GatedDeltaNetConfig.from_pretrained(name)
        if Path(name).is_dir():
            config.fused_mlp = has_fused_mlp(Path(name))
        return super().from_pretrained(name, *args, config=config, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V], of the last `logits_to_keep` tokens if that is not 0."""
        out = self.model(input_ids, attention_mask, cache, inputs_embeds, use_cache, position_ids)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=out.cache)


def has_fused_mlp(folder: Path) -> bool:
    """Whether a checkpoint's MLPs hold gate and value in one matrix."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return any(".mlp.gate_proj." in name for name in names) and not any(".mlp.up_proj." in name for name in names)


def register() -> None:
    """Let transformers' Auto classes load these checkpoints."""
    AutoConfig.register(MODEL_TYPE, GatedDeltaNetConfig, exist_ok=True)
    AutoModelForCausalLM.register(GatedDeltaNetConfig, GatedDeltaNetForCausalLM, exist_ok=True)
