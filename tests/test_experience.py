"""What was learned outlives the process, belongs to one pair, and never gets in the way."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from families import tiny
from helpers import PROMPT, expected, lm
from outrider.api import MOST_TUNED, Engine
from outrider.counterfactual import Counterfactual
from outrider.drafters.ngram import NgramDrafter
from outrider.experience import Experience
from outrider.options import Options
from outrider.paths import statistics_dir
from outrider.rounds import Round, Walked
from outrider.tree import OFF, parse_shape

ABOUT = {"target": "t", "drafter": "d", "machine": "m", "dtype": "float32"}
ARMS = [parse_shape(text) for text in ("chain1", "chain4")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Statistics of these tests only."""
    monkeypatch.setenv("OUTRIDER_STATISTICS", str(tmp_path / "statistics"))
    return tmp_path / "statistics"


def learned(rounds: int = 40) -> Counterfactual:
    controller = Counterfactual(ARMS)
    for _ in range(rounds):
        shape = controller.choose()
        controller.reward(Round(shape, [Walked((0,) * shape.depth, 0, False, shape.nodes, True)], 0.1, 1.0))
    return controller


def tuned() -> Engine:
    return Engine(tiny("llama"), None, "llama", lm("llama"))


def test_a_second_engine_begins_where_the_first_ended(folder: Path) -> None:
    first = tuned()
    texts = [first.generate(list(PROMPT), max_new_tokens=200) for _ in range(2)]
    assert texts[0].stats.shapes["off"] >= 1
    (file,) = folder.glob("*.json")
    assert json.loads(file.read_text())["about"]["drafter"] == "llama-0"
    second = tuned().generate(list(PROMPT), max_new_tokens=200)
    assert second.token_ids == texts[0].token_ids == expected("llama", max_new_tokens=200)
    known = Engine(tiny("llama"), None, "llama", lm("llama")).controller()
    assert isinstance(known, Counterfactual) and known.clocks.weight > 0 and known.clocks.asked > 0


def test_every_pair_has_a_file_of_its_own(folder: Path) -> None:
    for change in ({}, {"drafter": "e"}, {"dtype": "bfloat16"}, {"machine": "n"}, {"target": "u"}):
        experience = Experience(Counterfactual(ARMS), ABOUT | change)
        experience.learner = learned()
        experience.keep()
    assert len(list(folder.glob("*.json"))) == 5 and len(list(folder.iterdir())) == 5


def test_little_news_is_not_worth_a_file(folder: Path) -> None:
    experience = Experience(learned(5), ABOUT)
    experience.keep()
    assert not folder.exists()


def _kept(folder: Path) -> Path:
    experience = Experience(Counterfactual(ARMS), ABOUT)
    experience.learner = learned()
    experience.keep()
    (file,) = folder.glob("*.json")
    return file


def damage(kind: str, file: Path) -> None:
    value: Any = json.loads(file.read_text())
    if kind == "empty":
        file.write_text("")
    elif kind == "half":
        file.write_text(file.read_text()[: file.stat().st_size // 2])
    elif kind == "not text":
        file.write_bytes(bytes(range(256)))
    elif kind == "list":
        file.write_text("[1, 2]")
    elif kind == "deep":
        file.write_text("[" * 100_000)
    elif kind == "huge":
        file.write_text(" " * 1_000_001)
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "version":
        file.write_text(json.dumps(value | {"version": 99}))
    elif kind == "program":
        file.write_text(json.dumps(value | {"format": "something else"}))
    elif kind == "pair":
        file.write_text(json.dumps(value | {"about": ABOUT | {"drafter": "x"}}))
    elif kind == "state":
        file.write_text(json.dumps(value | {"state": {"clocks": {"rounds": [1, 2]}}}))
    else:
        clocks = value["state"]["clocks"]
        if kind == "infinite":
            clocks["passes"][1] = float("inf")
        elif kind == "no time":
            clocks["rounds"][0] = 0
        else:
            assert kind == "passes of no time" and any(clocks["passes"])
            clocks["passes"][2 * len(clocks["passes"]) // 3 :] = [0] * (len(clocks["passes"]) // 3)
        file.write_text(json.dumps(value))


DAMAGES = [
    "empty",
    "half",
    "not text",
    "list",
    "deep",
    "huge",
    "folder",
    "version",
    "program",
    "pair",
    "state",
    "infinite",
    "no time",
    "passes of no time",
]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_or_foreign_file_is_ignored_with_one_line(folder: Path, kind: str) -> None:
    damage(kind, _kept(folder))
    fresh = Counterfactual(ARMS)
    with pytest.warns(RuntimeWarning, match="are ignored") as caught:
        Experience(fresh, ABOUT)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert fresh.choose() == OFF and fresh.rounds == 0


def test_a_good_file_is_read_without_a_word(folder: Path) -> None:
    _kept(folder)
    fresh = Counterfactual(ARMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Experience(fresh, ABOUT)
    assert fresh.choose().depth >= 4


def test_what_a_long_process_did_only_once_does_not_spoil_its_file(folder: Path) -> None:
    """After 36,000 rounds, the weight of a pass that was never seen again was still a number, and its seconds were none."""
    controller = learned()
    wide = Round(ARMS[1], [Walked((), 1, False, 23, True)], 1e-4, 6e-3)
    usual = Round(ARMS[1], [Walked((0,), 1, False, 4, True)], 1e-4, 5e-3)
    controller.reward(wide)
    for number in range(37_500):
        controller.clocks.hear(usual if number % 9 else replace(usual, shape=OFF, rows=[Walked((), 0, True, 0, True)]))
        if number > 36_000 and number % 50 == 0:
            Counterfactual(ARMS).restore(controller.state())


def test_a_process_that_only_wrote_batches_leaves_no_file(folder: Path) -> None:
    """Times of single texts are what is kept."""
    made = tuned()
    made.generate([list(PROMPT), list(PROMPT)], max_new_tokens=60)
    assert not folder.exists()
    made.generate(list(PROMPT), max_new_tokens=200)
    assert len([*folder.glob("*.json")]) == 1


def test_changed_weights_begin_anew_and_drafters_that_are_gone_are_not_held(folder: Path) -> None:
    made = tuned()
    before = made.controller()
    assert made.controller() is before
    for _ in range(3 * MOST_TUNED):
        with made.drafting(lm("llama", 1)):
            made.controller("auto", Options(temperature=1.0))
        with made.drafting(NgramDrafter()):
            made.controller()
    assert len(made._tuned) == MOST_TUNED
    made.model = tiny("llama", seed=3)
    made._find_target()
    assert not made._tuned


def test_a_place_that_cannot_be_written_is_told_once(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    experience = Experience(learned(), ABOUT)
    with pytest.warns(RuntimeWarning, match="OUTRIDER_STATISTICS") as caught:
        experience.keep()
    assert len(caught) == 1
    experience.learner.rounds += 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experience.keep()


def test_statistics_can_be_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_STATISTICS", "off")
    assert statistics_dir() is None
    tuned().generate(list(PROMPT), max_new_tokens=120)
    assert not folder.exists()


def test_a_damaged_file_never_changes_the_text(folder: Path) -> None:
    tuned().generate(list(PROMPT), max_new_tokens=200)
    tuned().generate(list(PROMPT), max_new_tokens=200)
    (file,) = folder.glob("*.json")
    damage("half", file)
    with pytest.warns(RuntimeWarning, match="are ignored"):
        result = tuned().generate(list(PROMPT), max_new_tokens=200)
    assert result.token_ids == expected("llama", max_new_tokens=200)
    json.loads(file.read_text())  # and is replaced by a good one


def test_tests_keep_nothing_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert statistics_dir() is None
