"""The Gated DeltaNet model: a checkpoint in flash-linear-attention's layout loads and means what it meant there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from helpers import PROMPT, SHAPES, Oracle, assert_rounds_leave_what_a_prefill_leaves
from outrider.api import Engine
from outrider.models.gdn import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from outrider.models.loading import load_model
from outrider.models.selftest import tree_model

D, LAYERS, J, H, K, V, FFN, VOCAB, TAPS = 24, 2, 2, 4, 8, 6, 40, 48, 4
CONFIG = {
    "architectures": ["GatedDeltaNetForCausalLM"],
    "model_type": "gated_deltanet",
    "attn": None,
    "attn_mode": "chunk",
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_heads": J,
    "num_v_heads": H,
    "head_dim": K,
    "expand_v": V / K,
    "hidden_ratio": 4,
    "intermediate_size": FFN,
    "hidden_act": "swish",
    "conv_size": TAPS,
    "use_gate": True,
    "use_short_conv": True,
    "allow_neg_eigval": False,
    "norm_eps": 1e-6,
    "fuse_cross_entropy": True,
    "fuse_norm": True,
    "initializer_range": 0.006,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def checkpoint(fused: bool = False) -> dict[str, torch.Tensor]:
    """Random tensors under the names of that library; `fused` as its early versions wrote the MLP."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    tensors = {"model.embeddings.weight": matrix(VOCAB, D) * 4, "model.norm.weight": norm(D)}
    tensors["lm_head.weight"] = matrix(VOCAB, D) * 6
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {at + "attn_norm.weight": norm(D), at + "mlp_norm.weight": norm(D)}
        sizes = {"q": J * K, "k": J * K, "v": H * V}
        tensors |= {f"{at}attn.{n}_proj.weight": matrix(size, D) for n, size in {**sizes, "g": H * V}.items()}
        tensors |= {f"{at}attn.{n}_conv1d.weight": matrix(size, 1, TAPS) for n, size in sizes.items()}
        tensors |= {f"{at}attn.{n}_proj.weight": matrix(H, D) for n in ("a", "b")}
        tensors[at + "attn.A_log"] = torch.rand(H, generator=generator) * 2 - 1
        tensors[at + "attn.dt_bias"] = torch.rand(H, generator=generator) * 2 - 2
        tensors[at + "attn.o_norm.weight"] = norm(V)
        tensors[at + "attn.o_proj.weight"] = matrix(D, H * V)
        gate, up = matrix(FFN, D), matrix(FFN, D)
        mlp = {"gate_proj": torch.cat([gate, up])} if fused else {"gate_proj": gate, "up_proj": up}
        tensors |= {f"{at}mlp.{name}.weight": weight for name, weight in mlp.items()}
        tensors[at + "mlp.down_proj.weight"] = matrix(D, FFN)
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def definition(tensors: dict[str, torch.Tensor], ids: list[int], beta_scale: float = 1.0) -> torch.Tensor:
    """Logits of every token, computed from the checkpoint's tensors one token and one head at a time, in float64."""
    w = {name: tensor.double() for name, tensor in tensors.items()}

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().sum() + 1e-6).sqrt()

    x = w["model.embeddings.weight"][ids]
    for layer in range(LAYERS):
        part = {n.split(".", 3)[3]: t for n, t in w.items() if n.startswith(f"model.layers.{layer}.")}
        h = rms(x, part["attn_norm.weight"])
        mixed = {}
        for name in ("q", "k", "v"):
            inputs = h @ part[f"attn.{name}_proj.weight"].T
            padded = torch.cat([inputs.new_zeros(TAPS - 1, inputs.shape[1]), inputs])
            taps = part[f"attn.{name}_conv1d.weight"][:, 0].T
            rows = [(padded[t : t + TAPS] * taps).sum(0) for t in range(len(ids))]
            mixed[name] = F.silu(torch.stack(rows))
        gates = (h @ part["attn.g_proj.weight"].T).view(len(ids), H, V)
        states, outputs = [torch.zeros(K, V).double() for _ in range(H)], []
        for t in range(len(ids)):
            heads = []
            for head in range(H):
                key_head = head // (H // J)
                q = unit(mixed["q"][t].view(J, K)[key_head]) * K**-0.5
                k = unit(mixed["k"][t].view(J, K)[key_head])
                v = mixed["v"][t].view(H, V)[head]
                beta = beta_scale * (h[t] @ part["attn.b_proj.weight"][head]).sigmoid()
                a = h[t] @ part["attn.a_proj.weight"][head] + part["attn.dt_bias"][head]
                state = (-part["attn.A_log"][head].exp() * F.softplus(a)).exp() * states[head]
                states[head] = state + beta * torch.outer(k, v - state.T @ k)
                heads.append(rms(states[head].T @ q, part["attn.o_norm.weight"]) * F.silu(gates[t, head]))
            outputs.append(torch.cat(heads))
        x = x + torch.stack(outputs) @ part["attn.o_proj.weight"].T
        h = rms(x, part["mlp_norm.weight"])
        gate, up = h @ part["mlp.gate_proj.weight"].T, h @ part["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ part["mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gdn"), checkpoint())


def test_a_folder_loads_and_means_what_its_tensors_say(folder: Path) -> None:
    loaded = load_model(folder, dtype="fp64", device="cpu")
    assert isinstance(loaded.model, GatedDeltaNetForCausalLM)
    assert loaded.model.config.ffn == FFN
    ids = [(7 * i + 3) % VOCAB for i in range(70)]  # more than one chunk
    got = loaded.model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, definition(checkpoint(), ids), atol=1e-8, rtol=1e-8)


def test_negative_eigenvalues_double_beta(folder: Path, tmp_path: Path) -> None:
    model = load_model(write(tmp_path, checkpoint(), allow_neg_eigval=True), dtype="fp64", device="cpu").model
    got = model(input_ids=torch.tensor([list(PROMPT)])).logits[0]
    torch.testing.assert_close(got, definition(checkpoint(), list(PROMPT), 2.0), atol=1e-8, rtol=1e-8)


def test_the_early_layout_of_the_mlp_and_an_unread_skip_load_too(folder: Path, tmp_path: Path) -> None:
    tensors = checkpoint(fused=True)
    tensors |= {f"model.layers.{layer}.attn.D": torch.ones(H) for layer in range(LAYERS)}
    ids = torch.tensor([list(PROMPT)])
    early = load_model(write(tmp_path, tensors), dtype="fp32", device="cpu").model
    later = load_model(folder, dtype="fp32", device="cpu").model
    assert torch.allclose(early(input_ids=ids).logits, later(input_ids=ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"attn": {"layers": [0], "num_heads": 2, "qk_norm": True}}, {"use_short_conv": False}, {"hidden_act": "gelu"}],
)
def test_what_is_not_supported_is_refused_in_one_sentence(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not supported: use a checkpoint without"):
        load_model(write(tmp_path, checkpoint(), **changes), dtype="fp32", device="cpu")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["model.layers.1.attn.A_log"]
    with pytest.raises(ValueError, match="lacks 1 of the tensors"):
        load_model(write(tmp_path, tensors), dtype="fp32", device="cpu")


def test_what_is_saved_has_the_layout_that_was_loaded(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    load_model(folder, dtype="fp32", device="cpu").model.save_pretrained(tmp_path)
    saved, wanted = load_file(tmp_path / "model.safetensors"), checkpoint()
    assert set(saved) == set(wanted)
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gated_deltanet"


def test_the_width_of_the_mlp_follows_from_the_ratio() -> None:
    """GatedDeltaNet 1.3B: width 2048, ratio 4, no explicit width inside."""
    assert GatedDeltaNetConfig(hidden_size=2048, hidden_ratio=4).ffn == 5632


def test_it_is_a_target_scored_with_factors_and_writes_what_generate_writes(folder: Path) -> None:
    model = load_model(folder, dtype="fp32", device="cpu").model
    target, tested = tree_model(model)
    assert tested.way == "factors, tree mask"
    assert tested.chunked_prefill
    ids = torch.tensor([list(PROMPT)])
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, len(PROMPT) :]
    for shape in ("chain", "3x2x2", "ragged"):
        engine = Engine(model, None, "gdn", Oracle(target, 0.6))
        result = engine.generate(list(PROMPT), shape=SHAPES[shape], max_new_tokens=24, eos_token_id=[])
        assert result.token_ids == wanted.tolist()
        assert result.stats.accepted > 0


def test_rounds_leave_the_state_of_a_prefill(folder: Path) -> None:
    target = tree_model(load_model(folder, dtype="fp64", device="cpu").model)[0]
    assert_rounds_leave_what_a_prefill_leaves(target, 1e-10)


def test_padding_in_front_of_a_row_changes_nothing(folder: Path) -> None:
    model = load_model(folder, dtype="fp64", device="cpu").model
    short, long = list(PROMPT)[:4], list(PROMPT)
    ids = torch.tensor([[0] * 6 + short, long])
    mask = torch.tensor([[0] * 6 + [1] * 4, [1] * 10])
    padded = model(input_ids=ids, attention_mask=mask).logits
    for row, alone in enumerate((short, long)):
        wanted = model(input_ids=torch.tensor([alone])).logits[0, -1]
        torch.testing.assert_close(padded[row, -1], wanted, atol=1e-9, rtol=1e-9)
