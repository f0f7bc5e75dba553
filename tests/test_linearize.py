"""A Gated DeltaNet model made out of an attention model: fitted in closed form, distilled, a target of its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outrider
from families import tiny
from outrider.api import Engine
from outrider.models.selftest import tree_model
from outrider.train import linearize as linearize_module
from outrider.train.data import read_answers
from outrider.train.distil import DistilSettings, read_checkpoint
from outrider.train.hybrid import missed_layers
from outrider.train.linear_lm import LanguageTrainer, LinearPlan, linear_lm
from outrider.train.linearize import check_teacher, equally_long, linearize, new_model, ridge, take_over
from workshop_fixtures import Killed, fail, kill_at, succeed

pytest_plugins = ["workshop_fixtures"]
pytestmark = pytest.mark.usefixtures("small")

PLAN = LinearPlan(tokens=1024)


@pytest.fixture(scope="module")
def linear(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gated DeltaNet model, made by the command."""
    out = tmp_path_factory.mktemp("linear") / "out"
    options = ("--minutes", 0.01, "--every", 0.2, "--batch-tokens", 256, "--tokens", "2k", "--dtype", "fp32")
    found = succeed("linearize", "--target", target, "--data", data, "--out", out, *options)
    assert found["kl"] <= found["kl_as_fitted"] and 0 <= found["agreement"] <= 1 and found["distilled_on_tokens"] > 0
    return out


def test_the_folder_is_whole_and_of_the_known_layout(linear: Path) -> None:
    config, origin = (json.loads((linear / name).read_text()) for name in ("config.json", "origin.json"))
    assert config["model_type"] == "gated_deltanet" and config["architectures"] == ["GatedDeltaNetForCausalLM"]
    assert origin["provenance"]["versions"]["torch"] and origin["layers_of_the_teacher"] == [0, 1]
    names = load_file(linear / "model.safetensors")
    assert {
        "model.embeddings.weight",
        "model.layers.0.attn.q_conv1d.weight",
        "model.layers.1.attn.o_norm.weight",
    } <= set(names)
    assert "outrider generate" in (linear / "README.md").read_text()
    assert (linear / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("drafter", ["ngram", "self:1", "ngram>self:1"])
def test_it_is_a_target_that_speculates_and_writes_what_it_would_write(linear: Path, drafter: str) -> None:
    engine = outrider.load(str(linear), drafter, dtype="fp32")
    assert engine.way.way == "factors, tree mask"
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        plain = engine.generate("humaneval question", shape="off", max_new_tokens=24, eos_token_id=None, **options)
        for shape in ("chain4", "3x2x1"):
            made = engine.generate("humaneval question", shape=shape, max_new_tokens=24, eos_token_id=None, **options)
            assert made.token_ids == plain.token_ids


def test_a_table_and_heads_are_made_for_it_like_for_any_target(linear: Path, head: Path, tmp_path: Path) -> None:
    """The target-aligned drafter: a head with a state of constant size on a target with a state of constant size."""
    own = tmp_path / "data"
    given = ("--target", linear, "--dtype", "fp32")
    succeed("data", *given, "--out", own, "--tokens", "1k", "--max-new-tokens", 24, "--sources", "tasks,templates")
    succeed("table", *given, "--data", own, "--out", tmp_path / "table")
    small = ("--minutes", 0.004, "--every", 60, "--batch-tokens", 256, "--draft-vocab", 200)
    succeed("distil", *given, "--data", own, "--out", tmp_path / "head", "--kind", "head", "--core", "ssm", *small)
    started = ("--init", head, "--out", tmp_path / "started", "--kind", "head", *small[:-2])
    succeed("distil", *given, "--data", own, *started)  # begins as the head of the model that this one was made out of
    plain = outrider.load(str(linear), "off", dtype="fp32")
    wanted = plain.generate("gsm8k question", max_new_tokens=20, eos_token_id=None).token_ids
    for name in ("table", "head", "started"):
        engine = Engine(plain.model, plain.tokenizer, plain.name, str(tmp_path / name), dtype=torch.float32)
        made = engine.generate("gsm8k question", shape="3x2x1", max_new_tokens=20, eos_token_id=None)
        assert made.token_ids == wanted


# -- fitting -----------------------------------------------------------------------------------------------------------


def test_ridge_finds_the_projection_that_made_the_data() -> None:
    torch.manual_seed(0)
    weight, read = torch.randn(5, 8), torch.randn(4, 50, 8)
    found = ridge(read, read @ weight.T, torch.ones(4, 50, 5))
    torch.testing.assert_close(found, weight, atol=2e-2, rtol=0)


def test_tokens_count_in_relation_to_the_size_of_their_stream() -> None:
    """A few tokens have a stream a thousand times as large as others: they must not decide alone."""
    torch.manual_seed(0)
    weight, other, read = torch.randn(5, 8), torch.randn(5, 8), torch.randn(1, 400, 8)
    wanted, scale = read @ weight.T, torch.ones(1, 400, 5)
    wanted[:, :20], scale[:, :20] = 1000 * (read[:, :20] @ other.T), 1000
    found = ridge(read, wanted, scale)
    assert (found - weight).norm() < 0.2 * weight.norm()


def test_fitting_brings_the_laws_nearer(engine: Engine, data: Path, tmp_path: Path) -> None:
    texts = equally_long([answer.ids for answer in read_answers(data)], 2048)
    fitted, kept = linearize(engine, texts, None, tmp_path)
    assert kept == [0, 1]
    raw = new_model(engine, 2)
    for block, layer in zip(raw.model.layers, engine.model.base_model.layers):
        take_over(block, layer, torch.ones(raw.config.hidden_size))
    logp = engine.model(input_ids=texts[:4]).logits.log_softmax(-1)

    def apart(model: torch.nn.Module) -> float:
        logq = model(input_ids=texts[:4]).logits.log_softmax(-1)
        return float((logp.exp() * (logp - logq)).sum(-1).mean())

    assert apart(fitted) < 0.8 * apart(raw)


def test_layers_that_go_are_fitted_into_those_before_them(engine: Engine, data: Path, tmp_path: Path) -> None:
    texts = equally_long([answer.ids for answer in read_answers(data)], 1024)
    model, kept = linearize(engine, texts, 1, tmp_path)
    assert len(kept) == 1 == len(model.model.layers) == model.config.num_hidden_layers
    assert tree_model(model)[1].way == "factors, tree mask"


def test_layers_whose_attention_is_missed_keep_it(target: Path, data: Path, tmp_path: Path) -> None:
    """One of two layers stays the teacher's; laws are nearer than without any, and the hybrid is a target like any other."""
    given = ("--target", target, "--data", data, "--minutes", 0, "--tokens", "2k", "--dtype", "fp32")
    pure = succeed("linearize", *given, "--out", tmp_path / "pure")
    known = succeed("linearize", *given, "--out", tmp_path / "hybrid", "--attention", 1)
    assert len(known["layers_with_attention"]) == 1 and known["kl"] < pure["kl"]
    config = json.loads((tmp_path / "hybrid" / "config.json").read_text())
    assert config["attn"]["layers"] == known["layers_with_attention"]
    engine = outrider.load(str(tmp_path / "hybrid"), "ngram", dtype="fp32")
    assert engine.way.way == "factors, tree mask"
    plain = engine.generate("humaneval question", shape="off", max_new_tokens=24, eos_token_id=None)
    made = engine.generate("humaneval question", shape="chain4", max_new_tokens=24, eos_token_id=None)
    assert made.token_ids == plain.token_ids
    assert "attention in some" in (tmp_path / "hybrid" / "README.md").read_text()


def test_the_layer_that_matters_is_found(engine: Engine, data: Path, tmp_path: Path) -> None:
    """A layer whose attention writes nothing is not missed."""
    texts = equally_long([answer.ids for answer in read_answers(data)], 1024)
    layer = engine.model.base_model.layers[0].self_attn.o_proj
    kept = layer.weight.clone()
    with torch.no_grad():
        layer.weight.zero_()
    try:
        assert missed_layers(engine, texts, [0, 1], 1, tmp_path, lambda done, total, what: None) == [1]
    finally:
        with torch.no_grad():
            layer.weight.copy_(kept)


def test_fitting_goes_on_after_a_kill(
    engine: Engine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = equally_long([answer.ids for answer in read_answers(data)], 1024)
    with pytest.raises(Killed):
        linearize(engine, texts, None, tmp_path / "killed", kill_at(2, "fitted"))
    fits, inner = [], linearize_module._fit_layer
    monkeypatch.setattr(linearize_module, "_fit_layer", lambda *args: fits.append(1) or inner(*args))
    again, _ = linearize(engine, texts, None, tmp_path / "killed")
    whole, _ = linearize(engine, texts, None, tmp_path / "whole")
    assert len(fits) == 1 + 2
    monkeypatch.setattr(linearize_module, "Teacher", None)  # where every layer has its file, nothing is run
    done, _ = linearize(engine, texts, None, tmp_path / "whole")
    assert all(torch.equal(done.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-5, rtol=1e-4)


def test_distilling_goes_on_after_a_kill_and_keeps_the_best(engine: Engine, data: Path, tmp_path: Path) -> None:
    settings, out = DistilSettings(minutes=0.02, steps=1, batch_tokens=256), tmp_path / "out"
    with pytest.raises(Killed):
        linear_lm(engine, data, out, PLAN, settings, every=0.2, tell=kill_at(2, "agreement"))
    curve = read_checkpoint(out / "run" / "checkpoint.safetensors")[1]["curve"]
    known = linear_lm(engine, data, out, PLAN, settings, every=0.2)
    after = read_checkpoint(out / "run" / "checkpoint.safetensors")[1]["curve"]
    assert after[: len(curve)] == curve and len(after) > len(curve)
    assert set(known["settings"]) == {"minutes", "loss", "rate", "batch_tokens", "seed"}  # what it was trained with
    assert known["kl"] == min(point["kl"] for point in after) and known["kl_as_fitted"] == after[0]["kl"]


def test_without_minutes_the_model_is_as_fitted(engine: Engine, data: Path, tmp_path: Path) -> None:
    known = linear_lm(engine, data, tmp_path / "out", PLAN, None)
    assert known["kl"] > 0 and "distilled_on_tokens" not in known
    assert not (tmp_path / "out" / "run" / "checkpoint.safetensors").exists()


def test_distilling_stops_when_laws_come_no_nearer(engine: Engine, data: Path, tmp_path: Path) -> None:
    trainer = LanguageTrainer.__new__(LanguageTrainer)
    trainer.curve = [{"kl": kl} for kl in (2.0, 1.5, 1.6, 1.7)]
    assert trainer.stalled(2) and not trainer.stalled(3) and not trainer.stalled(0)


# -- odd input ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_linearized_is_refused_in_one_line(target: Path, data: Path, tmp_path: Path) -> None:
    given = ("linearize", "--target", target, "--data", data, "--out", tmp_path / "out", "--dtype", "fp32")
    assert "3 layers cannot be kept of 2" in fail(*given, "--layers", 3)
    assert "0 layers cannot be kept" in fail(*given, "--layers", 0)
    assert "2 layers cannot keep their attention; give 0 to 1" in fail(*given, "--attention", 2)
    assert "too few to fit" in fail(*given, "--tokens", 10)
    assert "holds no data set" in fail(*given[:4], tmp_path, *given[5:])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "biases"),
        ({"head_dim": 24}, "heads of 24"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rotated the linear way"),
    ],
)
def test_attention_that_the_layout_does_not_know_is_not_kept(changes: dict[str, Any], reason: str) -> None:
    engine = Engine(copy.deepcopy(tiny("llama")), None, "llama", "off")
    vars(engine.model.config).update(changes)
    check_teacher(engine, None)
    with pytest.raises(ValueError, match=reason):
        check_teacher(engine, None, 1)


def test_families_without_a_way_are_refused(tmp_path: Path) -> None:
    engine = Engine(tiny("gpt2"), None, "gpt2", "off")
    with pytest.raises(ValueError, match="type gpt2 cannot be linearized yet"):
        linear_lm(engine, tmp_path, tmp_path / "out", PLAN, None)


def test_texts_are_cut_to_one_length() -> None:
    texts = equally_long([torch.arange(n) for n in (3, 40, 50, 300, 20)], 90)
    assert texts.shape == (3, 40)
    assert equally_long([torch.arange(5)], 9999).shape == (1, 5)
