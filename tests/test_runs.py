"""What a run of the workshop leaves in its folder: the drafter that is meant, whole files, nothing after a refusal."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.api import Engine
from outrider.cli_options import plan_from, settings_from
from outrider.drafters.folder import save_head, save_mamba
from outrider.models.fingerprint import fingerprint
from outrider.train import data as data_module
from outrider.train import distil as distil_module
from outrider.train import features as features_module
from outrider.train import prior as prior_module
from outrider.train import workshop as workshop_module
from outrider.train.batches import make_batch
from outrider.train.data import make_data
from outrider.train.distil import DistilSettings, Trainer, read_checkpoint
from outrider.train.features import compute_features, examples
from outrider.train.kinds import Plan, check_plan, make_student
from outrider.train.linear_lm import LinearPlan, linear_lm
from outrider.train.llama_student import LlamaStudent, new_llama, save_llama
from outrider.train.students import MambaStudent, frequent_tokens, new_head, new_mamba
from outrider.train.workshop import claim, distil, make_held_out, measured_acceptance
from workshop_fixtures import TRAINING, Killed, fail, kill_at, succeed

pytest_plugins = ["workshop_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize("name", ["ngram", "head", "a+b", "a>b"])
def test_the_drafter_that_is_measured_is_the_one_in_the_folder(
    engine: Engine, data: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not the one that other commands mean by the folder's name."""
    drafted, drafting = list[str](), Engine.drafting

    def heard(self: Engine, drafter: Any) -> Any:
        drafted.append(drafter.name)
        return drafting(self, drafter)

    monkeypatch.setattr(Engine, "drafting", heard)
    monkeypatch.chdir(tmp_path)
    Path(name).symlink_to(head)
    measured_acceptance(engine, Path(name), examples(data, (0, 1), make_held_out(engine, data).name)[:1])
    assert drafted == ["head"]


def test_boosted_drafters_have_names_that_can_be_joined(target: Path, data: Path, tmp_path: Path) -> None:
    for name in ("a+b", "a>b"):
        assert "join" in fail("boost", "--target", target, "--data", data, "--out", tmp_path / name, *TRAINING)


# ---- refusals leave nothing behind -----------------------------------------------------------------------------------


def test_a_refused_distil_leaves_its_folder_to_the_corrected_command(
    target: Path, data: Path, head: Path, tmp_path: Path
) -> None:
    to = ("distil", "--target", target, "--data", data, "--out", tmp_path / "o", *TRAINING)
    assert "another drafter" in fail(*to, "--kind", "mamba", "--init", head)
    succeed(*to, "--kind", "head", "--init", head)


def test_a_refused_prune_leaves_its_folder_to_the_corrected_command(target: Path, tmp_path: Path) -> None:
    to = ("prune", "--target", target, "--out", tmp_path / "o", "--no-finetune", "--dtype", "fp32")
    assert "cannot be kept" in fail(*to, "--layers", 9)
    succeed(*to, "--layers", 1)


def test_refused_data_leaves_its_folder_to_the_corrected_command(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that were asked with another seed are asked anew."""
    asked = list[int]()

    def nothing_new(engine: Engine, number: int, seed: int) -> list[str]:
        asked.append(seed)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(data_module, "self_asked", nothing_new)
        for seed in (0, 1):
            with pytest.raises(ValueError, match="nothing new"):
                make_data(engine, tmp_path / "o", sources=("self",), seed=seed, max_new_tokens=8)
    assert len(set(asked)) == 2
    made = make_data(engine, tmp_path / "o", tokens=20, sources=("templates",), max_new_tokens=8)
    assert made >= 20
    with pytest.raises(ValueError, match="another seed"):
        make_data(engine, tmp_path / "o", tokens=20, sources=("templates",), max_new_tokens=8, seed=2)


def test_a_run_goes_on_with_the_draft_vocabulary_that_it_began_with(engine: Engine, data: Path, tmp_path: Path) -> None:
    plan, run = Plan("mamba", layers=1), tmp_path / "out" / "run"
    options: dict[str, Any] = {"every": 60, "tell": kill_at(1, "seconds of training")}
    with pytest.raises(Killed):
        distil(engine, data, tmp_path / "out", plan, DistilSettings(minutes=1, draft_vocab=60), **options)
    assert len(load_file(run / "draft_ids.safetensors")["draft_ids"]) == 60
    with pytest.raises(ValueError, match="of 60 tokens, not 70"):
        distil(engine, data, tmp_path / "out", plan, DistilSettings(minutes=1, draft_vocab=70), **options)


# ---- drafters to start from ------------------------------------------------------------------------------------------


def test_a_transformer_keeps_its_draft_vocabulary_unless_told(engine: Engine, data: Path, tmp_path: Path) -> None:
    first, about = tmp_path / "first", {"fingerprint": fingerprint(engine.model)}
    ids = torch.arange(3, 63)
    save_llama(LlamaStudent(engine, new_llama(engine, 1, 0), ids), first, engine, about, "")
    compute_features(engine, data, (1,))
    plan, found = Plan("llama", init=str(first)), examples(data, (1,))
    kept = make_student(engine, plan, found, DistilSettings(minutes=1), tmp_path)
    assert torch.equal(kept.draft_ids, ids)
    told = make_student(engine, plan, found, DistilSettings(minutes=1, draft_vocab=50), tmp_path)
    assert torch.equal(told.draft_ids, frequent_tokens(found, 50, engine.target.vocab))


# ---- whole files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(engine: Engine, data: Path, tmp_path: Path) -> Callable[..., Trainer]:
    """Makes trainers of one small Mamba, which go on from the same checkpoint."""

    def make(**settings: Any) -> Trainer:
        student = MambaStudent(engine, new_mamba(engine, [], 50, 0, layers=1))
        return Trainer(student, DistilSettings(minutes=1, **settings), tmp_path)

    return make


def test_weights_and_clock_of_a_checkpoint_belong_together(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trainer()
    first.updates = 7
    first.save()
    first.updates = 8
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(Killed))
        with pytest.raises(ValueError, match="cannot be written"):
            first.save()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"] and trainer().updates == 7


def test_checkpoints_of_two_files_are_still_read(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    first = trainer()
    first.updates = 7
    first.save()
    tensors, state = read_checkpoint(tmp_path / "checkpoint.safetensors")
    save_file(tensors, tmp_path / "checkpoint.safetensors")
    (tmp_path / "checkpoint.json").write_text(json.dumps(state))
    second = trainer()
    assert second.updates == 7
    second.save()
    assert not (tmp_path / "checkpoint.json").exists() and trainer().updates == 7


@pytest.mark.parametrize("count", [1, 2])
def test_a_drafters_folder_with_a_configuration_is_whole(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    written, replace = iter(range(99)), os.replace

    def killed_at(*paths: Any) -> None:
        if next(written) == count:
            raise Killed
        replace(*paths)

    monkeypatch.setattr(os, "replace", killed_at)
    with pytest.raises(Killed):
        save_mamba(new_mamba(engine, [], 50, 0, layers=1), tmp_path, {}, "a card")
    assert "config.json" not in {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "README.md").exists() == (count == 2)


def test_a_pass_that_goes_on_does_not_begin_with_what_it_has_learnt(
    trainer: Callable[..., Trainer], data: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_features(engine, data, (1,))
    found, orders = examples(data, (1,)), list[list[int]]()

    def heard(examples: Any, tokens: int, rng: random.Random, prompts: bool) -> Any:
        orders.append(rng.sample(range(len(found)), len(found)))
        return iter([make_batch(found[:1])] * 2)

    monkeypatch.setattr(distil_module, "batches", heard)
    for _ in range(2):
        one = trainer()
        with pytest.raises(Killed):
            one.train(lambda: found, lambda: {"acceptance_length": 1.0}, kill_at(1, "acceptance"), every=0.0)
    assert orders[0] != orders[1]


def test_settings_that_differ_are_named_with_what_they_were(trainer: Callable[..., Trainer]) -> None:
    trainer(rate=1e-3, loss="tv").save()
    with pytest.raises(ValueError, match=r"\(loss tv, rate 0.001\)"):
        trainer()
    trainer(rate=1e-3, loss="tv")


def test_a_drafter_to_start_from_may_be_called_by_another_path(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    claim(tmp_path / "out", asdict(Plan(init="first")), engine)
    claim(tmp_path / "out", asdict(Plan(init=str(tmp_path / "first"))), engine)
    with pytest.raises(ValueError, match="another init"):
        claim(tmp_path / "out", asdict(Plan(init="second")), engine)


@pytest.mark.parametrize("command", ["distil", "boost"])
@pytest.mark.parametrize("kind", ["mamba", "llama"])
@pytest.mark.parametrize("option", [("--core", "attention"), ("--taps", "0,1"), ("--steps", 4), ("--ramp", 0.6)])
def test_options_of_heads_are_refused_for_other_kinds(
    target: Path, data: Path, tmp_path: Path, command: str, kind: str, option: tuple[str, object]
) -> None:
    to = (command, "--target", target, "--data", data, "--out", tmp_path / "o", "--kind", kind, *TRAINING)
    assert f"{option[0]}: for --kind head" in fail(*to, *option)


def test_a_head_has_attention_and_four_steps_that_grow_unless_told() -> None:
    given: tuple[Any, ...] = ("kl", 2e-3, None, 2048, 0)
    settings = settings_from("head", 1.0, None, None, *given)
    assert (settings.steps, settings.ramp) == (4, 0.6)
    settings = settings_from("head", 1.0, 2, 0.0, *given)
    assert (settings.steps, settings.ramp) == (2, 0.0)
    assert plan_from("head", None, "", None, None, "").core == "attention"


def test_what_needs_no_hidden_states_is_refused_before_they_are_computed(
    target: Path, data: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = list[int]()
    monkeypatch.setattr(workshop_module, "compute_features", lambda *given: computed.append(1))
    (tmp_path / "file").write_text("")
    for command in ("distil", "boost"):
        to = (command, "--target", target, "--data", data, *TRAINING, "--out")
        assert "cannot be written" in fail(*to, tmp_path / "file" / "o")
        assert "another drafter" in fail(*to, tmp_path / "o", "--kind", "mamba", "--init", head)
        assert "another drafter" in fail(*to, tmp_path / "o", "--taps", "1", "--init", head)
    assert not computed


def test_a_head_is_trained_on_with_its_own_taps(engine: Engine, tmp_path: Path) -> None:
    save_head(new_head(engine, [], (1,), 50, 0), tmp_path, {"fingerprint": fingerprint(engine.model)}, "")
    assert check_plan(engine, Plan(init=str(tmp_path))).taps == (1,)


def test_a_prior_that_cannot_be_kept_is_not_measured(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior_module, "measure_prior", lambda *given: pytest.fail("it was measured"))
    assert "no folder" in fail("prior", "--target", target, "--drafter", "ngram", "--dtype", "fp32")


@pytest.mark.parametrize("taps", ["0", "1,1", "7,1"])
def test_taps_that_nothing_can_learn_from_are_refused_before_data_is_written(
    target: Path, tmp_path: Path, taps: str
) -> None:
    to = ("data", "--target", target, "--dtype", "fp32", "--out", tmp_path / "o", "--tokens", 20, "--max-new-tokens", 8)
    assert f"taps {taps} must" in fail(*to, "--sources", "templates", "--taps", taps)
    assert not (tmp_path / "o").exists()


def test_linearizing_asks_for_held_out_prompts_before_it_fits(engine: Engine, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gsm9k"):
        linear_lm(engine, data, tmp_path / "o", LinearPlan(held_out=("gsm9k",)), None)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.nan, math.inf])
def test_a_budget_is_a_number_of_minutes(minutes: float) -> None:
    with pytest.raises(ValueError, match="minutes"):
        DistilSettings(minutes=minutes)


def test_prompts_that_fill_training_sequences_are_told(
    engine: Engine, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_features(engine, data, (1,))
    monkeypatch.setattr(features_module, "LONGEST", 4)
    with pytest.raises(ValueError, match=r"all prompts .* 3 tokens or more"):
        examples(data, (1,))
