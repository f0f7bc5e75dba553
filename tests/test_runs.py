"""What a run of the workshop leaves in its folder: the drafter that is meant, whole files, nothing after a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.api import Engine
from outrider.train.features import examples
from outrider.train.workshop import make_held_out, measured_acceptance
from workshop_fixtures import TRAINING, fail

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
