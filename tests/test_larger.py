"""Drafters that grow: larger ones draft what smaller ones did, and every part of what is new learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.api import Engine
from outrider.drafters.folder import load_module, save_mamba
from outrider.models.fingerprint import fingerprint
from outrider.train.batches import make_batch
from outrider.train.distil import DistilSettings, Trainer
from outrider.train.features import examples
from outrider.train.kinds import Plan, make_student
from outrider.train.students import MambaStudent, new_mamba
from workshop_fixtures import head_student

pytest_plugins = ["workshop_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def trained_mamba(engine: Engine, tmp_path: Path) -> Path:
    """With feed-forward parts, and weights that do something."""
    blocks = new_mamba(engine, [], 100, 5, layers=2, ffn=32, state_size=16)
    for parameter in blocks.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    save_mamba(blocks, tmp_path / "mamba", {"fingerprint": fingerprint(engine.model)}, "")
    return tmp_path / "mamba"


@pytest.mark.parametrize(
    "sizes", [{"layers": 4}, {"neurons": 64}, {"state": 24}, {"layers": 3, "neurons": 48, "state": 32}]
)
def test_a_mamba_grows_without_forgetting(
    engine: Engine, data: Path, trained_mamba: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """It drafts the same at first, and every part of what is new learns."""
    found = head_student(engine, data)[1]
    known = MambaStudent(engine, load_module(trained_mamba, None).float())
    plan = Plan("mamba", init=str(trained_mamba), taps=(0, 1), **sizes)
    grown = make_student(engine, plan, found, DistilSettings(minutes=1), tmp_path / "run")
    assert isinstance(grown, MambaStudent) and torch.equal(grown.draft_ids, known.draft_ids)
    batch = make_batch(found[:2])
    (before,), (after,) = known.outputs(batch, 1), grown.outputs(batch, 1)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    config = grown.blocks.config
    assert sizes.items() <= {"layers": config.layers, "neurons": config.ffn, "state": config.state_size}.items()
    trainer = Trainer(grown, DistilSettings(minutes=1), tmp_path / "checkpoint")
    start = {name: p.clone() for name, p in grown.module.named_parameters()}
    for _ in range(2):
        trainer._update(batch, 0.0)
    assert not [name for name, p in grown.module.named_parameters() if bool((p == start[name]).all())]


def test_a_mamba_grows_feed_forward_parts_where_it_had_none(engine: Engine, data: Path, tmp_path: Path) -> None:
    blocks = new_mamba(engine, [], 100, 5, layers=2)
    save_mamba(blocks, tmp_path / "mamba", {"fingerprint": fingerprint(engine.model)}, "")
    known = MambaStudent(engine, load_module(tmp_path / "mamba", None).float())
    plan, found = Plan("mamba", init=str(tmp_path / "mamba"), taps=(0, 1), neurons=32), head_student(engine, data)[1]
    grown = make_student(engine, plan, found, DistilSettings(minutes=1), tmp_path / "run")
    batch = make_batch(found[:1])
    (before,), (after,) = known.outputs(batch, 1), grown.outputs(batch, 1)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("core", ["attention", "hybrid"])
def test_a_head_grows_without_forgetting(engine: Engine, data: Path, head: Path, tmp_path: Path, core: str) -> None:
    taps = tuple(json.loads((head / "config.json").read_text())["head"]["taps"])
    found, plan = examples(data, taps), Plan(core=core, taps=taps, init=str(head))
    batch, settings = make_batch(found[:2]), DistilSettings(minutes=1)
    known = make_student(engine, plan, found, settings, tmp_path / "a")
    more = 2 * known.module.config.ffn + 8
    grown = make_student(engine, replace(plan, neurons=more), found, settings, tmp_path / "b")
    assert grown.module.config.ffn == more and torch.equal(grown.draft_ids, known.draft_ids)
    for before, after in zip(known.outputs(batch, 3), grown.outputs(batch, 3)):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    trainer = Trainer(grown, settings, tmp_path / "checkpoint")
    start = {name: p.clone() for name, p in grown.module.named_parameters()}
    for _ in range(2):
        trainer._update(batch, 0.0)
    assert not [name for name, p in grown.module.named_parameters() if bool((p == start[name]).all())]
    with pytest.raises(ValueError, match=r"--neurons .* can only grow"):
        make_student(engine, replace(plan, neurons=4), found, settings, tmp_path / "c")


@pytest.mark.parametrize("sizes", [{"layers": 1}, {"neurons": 16}, {"state": 8}], ids=str)
def test_a_mamba_does_not_shrink(engine: Engine, data: Path, trained_mamba: Path, sizes: dict[str, int]) -> None:
    plan = Plan("mamba", init=str(trained_mamba), taps=(0, 1), **sizes)
    with pytest.raises(ValueError, match=f"--{next(iter(sizes))} .* can only grow"):
        make_student(engine, plan, head_student(engine, data)[1], DistilSettings(minutes=1), trained_mamba)
