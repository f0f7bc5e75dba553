"""Make a Gated DeltaNet language model out of an attention model, in closed form, layer by layer.

Embeddings, norms, MLPs and q, k, v projections are taken over. What a layer writes into the residual stream is then fitted by
ridge regression: first the mixer's output projection, so that the stream behind the mixer is the teacher's, then the MLP's. Both
are fitted on the student's own stream, so that a layer also mends what those before it got wrong. That needs forward passes over
some ten thousand tokens and nothing else; what it leaves is for distillation (the two stages of MOHAWK, LoLCATs and RADLADS,
whose first stage is gradient descent). A hybrid keeps the attention of the layers in which it is missed most.

A fitted layer is a file; a run that was killed goes on behind the last one.

Shapes: N texts of T tokens, D width, U what a projection reads, E head size, H heads, G key-value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.models.files import save_atomically
from outrider.models.gdn import GatedDeltaBlock, GatedDeltaMixer, GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from outrider.models.gdn_attention import Attention
from outrider.train.prune import choose_layers

if TYPE_CHECKING:
    from outrider.api import Engine

FAMILIES = ("llama", "mistral")
BATCH = 8  # texts that are run at once
RIDGE = 1e-3  # of the mean square of what a projection reads
DECAYS = (
    1.5,
    0.3,
    0.03,
)  # of the heads that share a key-value head, in turn: memories of a token, a clause, a paragraph
LINEAR = 0.1  # values pass the convolution's SiLU at this scale, where it is all but linear; a norm behind it undoes the scale
OPEN = 1.28  # where SiLU is one: gates start open
MEASURED, MEASURED_TOKENS = 6, 64  # texts on which layers are chosen
Tell = Callable[[int, int, str], None]


def check_teacher(engine: Engine, layers: int | None, attention: int = 0) -> None:
    """Refuse what cannot be linearized.

    Args:
        layers: how many to keep; None is all.
        attention: how many of these keep their attention.

    Raises:
        ValueError: in that case.
    """
    config = engine.model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"models of type {config.model_type} cannot be linearized yet, only {', '.join(FAMILIES)}; use another --target"
        )
    if layers is not None and not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"{layers} layers cannot be kept of {config.num_hidden_layers}; give 1 to that many")
    most = (layers or config.num_hidden_layers) - 1
    if not 0 <= attention <= most:
        raise ValueError(f"{attention} layers cannot keep their attention; give 0 to {most}")
    rotation = _rotation(config)
    if attention and rotation.get("rope_type", "default") != "default":
        raise ValueError(
            f"positions rotated the {rotation['rope_type']} way are not in flash-linear-attention's layout; keep no attention"
        )


def linearize(
    engine: Engine,
    texts_NT: Tensor,
    layers: int | None,
    run: Path,
    tell: Tell = lambda done, total, what: None,
    attention: Sequence[int] = (),
) -> tuple[GatedDeltaNetForCausalLM, list[int]]:
    """A Gated DeltaNet model, float32, and the teacher's layers that it was made of.

    Args:
        texts_NT: token ids of the teacher's own texts, on its device, where the model will be as well.
        layers: how many layers to keep; None is all. Those behind a kept one that went are fitted into it.
        run: folder that keeps fitted layers.
        attention: kept layers of the teacher that keep their attention: a hybrid.
    """
    check_teacher(engine, layers, len(attention))
    kept = kept_layers(engine, texts_NT, layers, run, tell)
    model = new_model(engine, len(kept), [kept.index(layer) for layer in attention]).to(engine.model.device)
    half = engine.dtype is torch.bfloat16  # products as the finished model will compute them; streams stay wide
    with torch.inference_mode(), torch.autocast(engine.model.device.type, torch.bfloat16, enabled=half):
        _fit(engine, model, kept, texts_NT, run, tell)
    return model, kept


def kept_layers(engine: Engine, texts_NT: Tensor, layers: int | None, run: Path, tell: Tell) -> list[int]:
    """The layers to keep: all, or so many of them; what is chosen is remembered in `run`."""
    run.mkdir(parents=True, exist_ok=True)
    count = engine.model.config.get_text_config().num_hidden_layers
    path = run / "kept.safetensors"
    if not path.exists():
        kept = list(range(count))
        if layers is not None and layers < count:
            kept, _ = choose_layers(engine.model, layers, texts_NT[:MEASURED, -MEASURED_TOKENS:], tell)
        save_atomically({"kept": torch.tensor(kept)}, path)
    found: list[int] = load_file(path)["kept"].tolist()
    return found


def _rotation(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return found


def new_model(engine: Engine, layers: int, attention: Sequence[int] = ()) -> GatedDeltaNetForCausalLM:
    """A model of the teacher's sizes with the teacher's embeddings, final norm and vocabulary head; its layers are not the
    teacher's yet, and those of `attention` have attention."""
    teacher: Any = engine.model
    config = teacher.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    softmax = {
        "layers": sorted(attention),
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "window_size": getattr(config, "sliding_window", None),
        "rope_theta": _rotation(config).get("rope_theta", 10000.0),
    }
    model = GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            attn=softmax if attention else None,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=layers,
            num_heads=config.num_attention_heads,
            head_dim=size,
            expand_v=1.0,
            intermediate_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            tie_word_embeddings=bool(config.tie_word_embeddings),
        )
    )
    with torch.no_grad():
        model.model.embeddings.weight.copy_(teacher.get_input_embeddings().weight)
        model.lm_head.weight.copy_(teacher.get_output_embeddings().weight)
        model.model.norm.weight.copy_(teacher.base_model.norm.weight)
    model.generation_config = teacher.generation_config
    return model.eval().requires_grad_(False)


# ---- a layer from a layer --------------------------------------------------------------------------------------------


@torch.no_grad()
def take_over(block: GatedDeltaBlock, layer: Any, typical_D: Tensor) -> None:
    """Give a layer what an attention layer has.

    Args:
        typical_D: the mean input of the mixer, behind its norm: at it, gates are open.
    """
    mlp = layer.mlp
    for ours, theirs in (
        (block.attn_norm, layer.input_layernorm),
        (block.mlp_norm, layer.post_attention_layernorm),
        (block.mlp.gate_proj, mlp.gate_proj),
        (block.mlp.up_proj, mlp.up_proj),
        (block.mlp.down_proj, mlp.down_proj),
    ):
        assert ours is not None
        ours.weight.copy_(theirs.weight)
    if isinstance(block.attn, Attention):
        for name in ("q", "k", "v", "o"):
            getattr(block.attn, f"{name}_proj").weight.copy_(getattr(layer.self_attn, f"{name}_proj").weight)
    else:
        _become_recurrent(block.attn, layer.self_attn, typical_D)


def _become_recurrent(mixer: GatedDeltaMixer, attention: Any, typical_D: Tensor) -> None:
    heads = mixer.q_proj.out_features // mixer.key_size
    for name in ("q", "k", "v"):
        weight = getattr(attention, f"{name}_proj").weight
        groups = weight.unflatten(0, (-1, mixer.key_size))  # grouped heads get a copy each
        own: Any = getattr(mixer, f"{name}_proj")
        own.weight.copy_(groups.repeat_interleave(heads // len(groups), 0).flatten(0, 1))
        taps: Any = getattr(mixer, f"{name}_conv1d")
        taps.weight.zero_()
        taps.weight[..., -1] = LINEAR if name == "v" else 1.0
    for linear in (mixer.a_proj, mixer.b_proj):
        linear.weight.zero_()
    mixer.A_log.zero_()
    decays = torch.tensor([DECAYS[head % len(DECAYS)] for head in range(heads)])
    mixer.dt_bias.copy_(decays.expm1().log())
    assert mixer.g_proj is not None
    mixer.g_proj.weight.copy_((OPEN * typical_D / typical_D.square().sum()).expand_as(mixer.g_proj.weight))


# ---- fitting ---------------------------------------------------------------------------------------------------------


def _fit(
    engine: Engine,
    model: GatedDeltaNetForCausalLM,
    kept: Sequence[int],
    texts_NT: Tensor,
    run: Path,
    tell: Tell,
) -> None:
    """Fit all layers that have no file yet."""
    files = [run / f"layer-{place:03d}.safetensors" for place in range(len(kept))]
    if all(path.exists() for path in files):
        for block, path in zip(model.model.layers, files):
            block.load_state_dict(load_file(path))
        return
    teacher = Teacher(engine, texts_NT)
    stream_NTD = _by_parts(model.model.embeddings, texts_NT)
    ends = [*kept[1:], engine.model.config.get_text_config().num_hidden_layers]
    for place, (index, end) in enumerate(zip(kept, ends)):
        tell(place, len(kept), "layers fitted")
        block, path = model.model.layers[place], files[place]
        assert isinstance(block, GatedDeltaBlock)
        mixed_NTD = teacher.advance(index, end)
        if path.exists():
            block.load_state_dict(load_file(path))
            stream_NTD = _by_parts(block, stream_NTD)
        else:
            stream_NTD = _fit_layer(block, teacher.layers[index], stream_NTD, mixed_NTD, teacher.stream_NTD)
            save_atomically(dict(block.state_dict()), path)
    tell(len(kept), len(kept), "layers fitted")


def _fit_layer(block: GatedDeltaBlock, layer: Any, stream_NTD: Tensor, mixed_NTD: Tensor, wanted_NTD: Tensor) -> Tensor:
    """Fit one layer; returns the student's stream behind it.

    Args:
        stream_NTD: the student's stream in front of the layer.
        mixed_NTD: the teacher's behind the mixer.
        wanted_NTD: and behind the layer, or behind those that went with it.
    """
    stream_NTD = fit_mixer(block, layer, stream_NTD, mixed_NTD)
    read_NTU = _by_parts(lambda x: _before(block.mlp.down_proj, block.mlp, block.mlp_norm(x)), stream_NTD)
    down = block.mlp.down_proj
    down.weight.add_(ridge(read_NTU, wanted_NTD - stream_NTD - down(read_NTU), wanted_NTD))
    return stream_NTD + down(read_NTU)


def fit_mixer(block: GatedDeltaBlock, layer: Any, stream_NTD: Tensor, mixed_NTD: Tensor) -> Tensor:
    """Fit the mixer of a layer; returns the student's stream behind it. Attention stays as it is."""
    block.attn_norm.weight.copy_(layer.input_layernorm.weight)
    take_over(block, layer, _by_parts(block.attn_norm, stream_NTD).mean((0, 1)))
    read_NTU = _by_parts(lambda x: _before(block.attn.o_proj, block.attn, block.attn_norm(x)), stream_NTD)
    if not isinstance(block.attn, Attention):
        block.attn.o_proj.weight.copy_(ridge(read_NTU, mixed_NTD - stream_NTD, mixed_NTD))
    return stream_NTD + block.attn.o_proj(read_NTU)


def ridge(read_NTU: Tensor, wanted_NTD: Tensor, scale_NTD: Tensor) -> Tensor:
    """The weight [D, U] of a projection that comes closest to what is wanted of it, in float64.

    Args:
        scale_NTD: tokens count by how far they are off in relation to this: norms read the stream, and a few tokens are huge.
    """
    with torch.autocast(read_NTU.device.type, enabled=False):
        return _ridge(read_NTU, wanted_NTD, scale_NTD)


def _ridge(read_NTU: Tensor, wanted_NTD: Tensor, scale_NTD: Tensor) -> Tensor:
    weight_R1 = scale_NTD.flatten(0, 1).float().square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
    x_RU, y_RD = (t.flatten(0, 1).float() * weight_R1 for t in (read_NTU, wanted_NTD))
    gram_UU, moment_UD = (x_RU.T @ x_RU).double(), (x_RU.T @ y_RD).double()
    gram_UU.diagonal().add_(RIDGE * gram_UU.diagonal().mean() + 1e-12)
    return torch.linalg.solve(gram_UU, moment_UD).T.float()


class Teacher:
    """The attention model, run over the texts one layer at a time."""

    def __init__(self, engine: Engine, texts_NT: Tensor) -> None:
        model: Any = engine.model
        self.layers = list(model.base_model.layers)
        self.kwargs: dict[int, dict[str, Any]] = {}
        hooks = [
            layer.register_forward_pre_hook(self._remember(index), with_kwargs=True)
            for index, layer in enumerate(self.layers)
        ]
        try:
            model.base_model(input_ids=texts_NT[:1], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        self.stream_NTD = _by_parts(model.get_input_embeddings(), texts_NT)

    def _remember(self, index: int) -> Callable[..., None]:
        def remember(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.kwargs[index] = {name: value for name, value in kwargs.items() if name != "hidden_states"}

        return remember

    def advance(self, index: int, end: int) -> Tensor:
        """Run layers up to `end`; returns the stream behind the mixer of layer `index`, float32."""
        layer, kept = self.layers[index], list[Tensor]()
        norm: nn.Module = layer.post_attention_layernorm
        hook = norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        try:
            self._run(index)
        finally:
            hook.remove()
        for further in range(index + 1, end):
            self._run(further)
        return torch.cat(kept).float()

    def _run(self, index: int) -> None:
        layer, kwargs = self.layers[index], self.kwargs[index]
        self.stream_NTD = _by_parts(lambda x: _first(layer(x, **kwargs)), self.stream_NTD)

    def rest(self, index: int, mixed_NTD: Tensor) -> Tensor:
        """The stream behind the last layer, from one behind the mixer of layer `index`."""
        layer = self.layers[index]
        x_NTD = mixed_NTD + layer.mlp(layer.post_attention_layernorm(mixed_NTD))
        for further in range(index + 1, len(self.layers)):
            x_NTD = _first(self.layers[further](x_NTD, **self.kwargs[further]))
        return x_NTD


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _by_parts(function: Callable[[Tensor], Tensor], x_N: Tensor) -> Tensor:
    """A function of texts, a few at a time: what lies in between need not all be in memory."""
    return torch.cat([function(part) for part in x_N.split(BATCH)])


def _before(linear: nn.Module, module: Callable[[Tensor], Tensor], x_NTD: Tensor) -> Tensor:
    """What a linear layer inside a module reads when the module runs."""
    read: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    try:
        module(x_NTD)
    finally:
        hook.remove()
    return read[0]


def equally_long(answers: Sequence[Tensor], most_tokens: int, longest: int = 256) -> Tensor:
    """Beginnings of texts, all of one length, [N, T], of about so many tokens in all."""
    lengths = sorted(map(len, answers))
    length = min(longest, lengths[len(lengths) // 2])
    enough = [ids[:length].long() for ids in answers if len(ids) >= length]
    count = max(1, min(len(enough), math.ceil(most_tokens / length)))
    return torch.stack([enough[i * len(enough) // count] for i in range(count)])
