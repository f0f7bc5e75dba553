"""Averages of drafters: several trainings of one make one, and nothing else is averaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.api import Engine
from outrider.drafters.folder import load_module, save_head, save_mamba
from outrider.models.fingerprint import fingerprint
from outrider.train.average import average_folders, averaged
from outrider.train.students import new_head, new_mamba
from workshop_fixtures import fail, same_text, succeed

pytest_plugins = ["workshop_fixtures"]
pytestmark = pytest.mark.usefixtures("small")
SIZES = {"layers": 1, "ffn": 16, "state_size": 8}


def saved(engine: Engine, folder: Path, kind: str, seed: int, neurons: int = 16) -> Path:
    about = {"fingerprint": fingerprint(engine.model)}
    if kind == "mamba":
        save_mamba(new_mamba(engine, [], 64, seed, **{**SIZES, "ffn": neurons}), folder, about, "")
    else:
        save_head(new_head(engine, [], (0, 1), 64, seed, kind, neurons=neurons), folder, about, "")
    return folder


@pytest.mark.parametrize("kind", ["attention", "hybrid", "mamba"])
def test_the_average_is_that_of_all_weights(engine: Engine, data: Path, tmp_path: Path, kind: str) -> None:
    folders = [saved(engine, tmp_path / str(seed), kind, seed) for seed in range(3)]
    known = average_folders(engine, folders, data, tmp_path / "out")
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        expected = torch.stack([w[name].float() for w in weights]).mean(0)
        torch.testing.assert_close(value.float(), expected, rtol=1e-2, atol=1e-3)
    assert known["measured_acceptance_length"] >= 1 and known["averaged"] == [str(folder) for folder in folders]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["predicted_acceptance_length"] == known["predicted_acceptance_length"]
    assert "averaged" in (tmp_path / "out" / "README.md").read_text()


def test_one_drafter_averaged_with_itself_stays_what_it_is(engine: Engine, tmp_path: Path) -> None:
    folder = saved(engine, tmp_path / "a", "attention", 0)
    same = averaged([load_module(folder, engine.model) for _ in range(2)]).state_dict()
    assert all(
        torch.equal(value.float(), same[name].float())
        for name, value in load_file(folder / "model.safetensors").items()
    )


def test_mistakes_are_one_line(target: Path, engine: Engine, data: Path, tmp_path: Path) -> None:
    head, wide, mamba = (
        saved(engine, tmp_path / "head", "attention", 0),
        saved(engine, tmp_path / "wide", "attention", 1, neurons=24),
        saved(engine, tmp_path / "mamba", "mamba", 0),
    )

    def attempt(*folders: Path, data: Path = data) -> str:
        return fail("average", *folders, "--target", target, "--data", data, "--out", tmp_path / "o")

    assert "two drafters or more" in attempt(head)
    assert "another kind or size" in attempt(head, wide)
    assert "another kind or size" in attempt(head, mamba)
    assert "holds no drafter" in attempt(head, tmp_path)
    assert "no data set" in attempt(head, head, data=tmp_path)
    other = new_head(engine, [], (0, 1), 64, 0, "attention", neurons=16)
    other.draft_ids = other.draft_ids.flip(0)
    save_head(other, tmp_path / "flipped", {"fingerprint": fingerprint(engine.model)}, "")
    assert "other tokens" in attempt(head, tmp_path / "flipped")
    save_head(other, tmp_path / "foreign", {"fingerprint": "0", "target": "another"}, "")
    assert "made for another" in attempt(head, tmp_path / "foreign")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert "not empty" in fail("average", head, head, "--target", target, "--data", data, "--out", tmp_path / "full")
    assert not (tmp_path / "o").exists()


def test_the_command_writes_a_drafter_that_drafts(target: Path, engine: Engine, data: Path, tmp_path: Path) -> None:
    folders = [saved(engine, tmp_path / str(seed), "attention", seed) for seed in range(2)]
    found = succeed("average", *folders, "--target", target, "--data", data, "--out", tmp_path / "o")
    assert found["averaged"] == [str(folder) for folder in folders]
    same_text(engine, str(tmp_path / "o"))
