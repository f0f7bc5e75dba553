"""The workshop around training: data, tables and cascades, evaluation; kills and mistakes, and what the figures mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.api import Engine
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.catalog import make_drafter
from outrider.drafters.lm import LMDraftState
from outrider.drafters.table import NgramTable, TableDrafter
from outrider.models.fingerprint import fingerprint
from outrider.train import data as data_module
from outrider.train import features as features_module
from outrider.train import workshop as workshop_module
from outrider.train.data import Answer, make_data, read_answers, shard_files
from outrider.train.kinds import Plan
from outrider.train.prompts import is_held_out, task_prompts
from outrider.train.table import make_table
from outrider.train.walks import Walk, calibration, membership, rates_by_depth
from outrider.tree import parse_shape
from outrider.verify import Verdict

# ---- data ------------------------------------------------------------------------------------------------------------
from workshop_fixtures import Killed, fail, kill_at, run, same_text, save_target, succeed

pytest_plugins = ["workshop_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


def test_data_is_prompts_and_answers_of_the_target(engine: Engine, data: Path) -> None:
    answers = read_answers(data)
    about = json.loads((data / "data.json").read_text())
    assert about["fingerprint"] == fingerprint(engine.model) and about["tokens"] == 1000
    assert {answer.temperature for answer in answers} == {0.0, 0.7}
    greedy = next(answer for answer in answers if answer.temperature == 0.0)
    prompt, written = greedy.ids[: greedy.prompt_length].tolist(), greedy.ids[greedy.prompt_length :].tolist()
    assert engine.generate(prompt, shape="off", max_new_tokens=24).token_ids == written


def test_held_out_prompts_never_enter_data(engine: Engine, data: Path, tmp_path: Path) -> None:
    given = [f"my own question {i}" for i in range(12)]
    make_data(engine, tmp_path / "own", tokens=10**6, prompts=given, sources=("tasks",), max_new_tokens=8)
    asked = {
        engine.tokenizer.decode(answer.ids[: answer.prompt_length])
        for folder in (data, tmp_path / "own")
        for answer in read_answers(folder)
    }
    held = task_prompts(held_out=True) + [text for text in given if is_held_out(text)]
    assert held and not any(text in prompt for text in held for prompt in asked)
    assert any(text in prompt for text in task_prompts(held_out=False) for prompt in asked)


def test_data_goes_on_after_a_kill_with_the_same_answers(engine: Engine, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokens": 900, "sources": ("tasks", "self"), "max_new_tokens": 16}
    make_data(engine, tmp_path / "whole", **options)
    for count in (2, 3):
        with pytest.raises(Killed):
            make_data(engine, tmp_path / "killed", **options, tell=kill_at(count, "answer tokens"))
    make_data(engine, tmp_path / "killed", **options)
    whole, killed = shard_files(tmp_path / "whole"), shard_files(tmp_path / "killed")
    assert len(whole) == len(killed) > 3
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(whole, killed))


def test_data_mistakes_are_one_line(target: Path, data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    to = ("data", "--target", target, "--dtype", "fp32", "--out")
    assert "max_new_tokens" in fail(*to, data, "--max-new-tokens", 99)
    assert "sources" in fail(*to, data, "--max-new-tokens", 24, "--sources", "tasks")
    assert "many" in fail(*to, tmp_path / "x", "--tokens", "many")
    assert "hearsay" in fail(*to, tmp_path / "x", "--sources", "hearsay")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear diary")
    assert "not empty" in fail(*to, tmp_path / "mine")
    assert "no prompts" in fail(*to, tmp_path / "y", "--sources", "none")
    monkeypatch.setattr(data_module, "self_asked", lambda engine, number, seed: ["the same question as ever"])
    assert "nothing new" in fail(*to, tmp_path / "z", "--sources", "self", "--tokens", "9k", "--max-new-tokens", 8)


def test_answers_that_are_cut_are_told(
    engine: Engine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data, tmp_path / "data")
    answers = read_answers(data)
    lengths = sorted(len(answer.ids) for answer in answers)
    monkeypatch.setattr(features_module, "LONGEST", lengths[-3])
    long = sum(length > lengths[-3] for length in lengths)
    with pytest.warns(RuntimeWarning, match=f"{long} of {len(answers)} answers"):
        workshop_module.load_examples(engine, tmp_path / "data", Plan("head"), lambda done, total, what: None)


# ---- tables and cascades ---------------------------------------------------------------------------------------------


def test_a_table_gives_true_shares(tmp_path: Path) -> None:
    text = torch.tensor([9, 9, 1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 3])
    make_table([Answer(text, 2, 0.0)], tmp_path / "t.safetensors")
    table = NgramTable(tmp_path / "t.safetensors")
    after = dict(table.following([7, 7, 1, 2], 3))
    assert set(after) == {3, 4}
    assert after[3] == pytest.approx(3 / 4, abs=1 / 255) and after[4] == pytest.approx(1 / 4, abs=1 / 255)
    assert table.following([7, 7, 1, 2], 1) == [(3, after[3])]
    assert [token for token, _ in table.following([2, 3, 1], 3)] == [2]
    assert table.following([8], 3) == []


def test_a_cascade_asks_in_order(engine: Engine, tmp_path: Path) -> None:
    make_table([Answer(torch.tensor([1, 5, 6, 7, 5, 6, 7, 5, 6, 7]), 1, 0.0)], tmp_path / "t.safetensors")
    cascade = CascadeDrafter(
        [make_drafter("ngram", engine.target, None), TableDrafter(NgramTable(tmp_path / "t.safetensors"))]
    )
    assert cascade.name == "ngram>table"
    shape = parse_shape("chain2")

    def drafted(context: list[int]) -> list[int]:
        state = cascade.begin([context], [], 0)
        tree = state.propose([context], [shape])[0].tree
        state.observe([Verdict([0], 0)])
        return tree.tokens[1:]

    assert drafted([5, 6, 30, 31, 5, 6]) == [30, 31]  # lookup knows better than the table
    assert drafted([40, 41, 42, 5, 6]) == [7, 5]  # nothing to look up
    assert drafted([50]) == []


def test_table_and_cascade_write_the_same_text(engine: Engine, table: Path, head: Path) -> None:
    for name in (str(table), f"ngram>table:{table}", f"ngram>table:{table}>{head}", f"ngram+{head}"):
        same_text(engine, name)


def test_names_of_drafters_are_checked(engine: Engine, target: Path, head: Path, tmp_path: Path) -> None:
    for name in ("table", "head", "mamba"):
        with pytest.raises(ValueError, match=f"no {name} comes with Outrider"):
            make_drafter(name, engine.target, engine.tokenizer)
    with pytest.raises(ValueError, match="another kind than a table"):
        make_drafter(f"table:{head}", engine.target, engine.tokenizer)
    with pytest.raises(ValueError, match="holds no drafter"):
        make_drafter(f"table:{tmp_path}", engine.target, engine.tokenizer)
    assert make_drafter("auto", engine.target, engine.tokenizer).name == "ngram"
    other = save_target(tmp_path / "other", seed=5)
    assert "not for this target" in fail("generate", "x", "--target", other, "--drafter", head, "--dtype", "fp32")


def test_what_is_shipped_makes_auto(engine: Engine, table: Path, head: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from outrider.drafters import folder

    monkeypatch.setattr(folder, "SHIPPED", tmp_path)
    (tmp_path / "some-model").mkdir()
    names = []
    for kind, place in (("", None), ("table", table), ("head", head)):
        if place is not None:
            (tmp_path / "some-model" / kind).symlink_to(place)
        names.append(make_drafter("auto", engine.target, engine.tokenizer).name)
    assert names == ["ngram", "ngram>table", "ngram>head"]
    assert make_drafter("ngram>table>head", engine.target, engine.tokenizer).name == "ngram>table>head"


# ---- evaluate --------------------------------------------------------------------------------------------------------


def test_evaluate_measures_two_drafters_side_by_side(target: Path, head: Path, table: Path, tmp_path: Path) -> None:
    names = (f"ngram>table:{table}", str(head))
    to = ("evaluate", "--target", target, "--drafter", names[0], "--drafter", names[1], "--limit", 1)
    more = ("--tasks", "humaneval,gsm8k", "--max-new-tokens", 16, "--dtype", "fp32", "--out", tmp_path / "e")
    found = succeed(*to, *more)
    lookup, model = found["drafters"]
    assert (lookup["drafter"], model["drafter"]) == names
    for one in (lookup, model):
        assert set(one["per_task"]) == {"humaneval", "gsm8k"} and one["equal_text"]
        assert one["acceptance_length"] >= 1 and one["measured_speedup"] > 0 and one["predicted_speedup"] > 0
        assert len(one["top_k_membership"]) == 5 and one["top_k_membership"] == sorted(one["top_k_membership"])
    assert lookup["calibration"] is None and 0 <= model["calibration"]["ece"] <= 1
    assert lookup["state_bytes"] == 0 < model["state_bytes_per_node"] < model["state_bytes"]
    assert found["provenance"]["prompts"] == 2
    assert {p.name for p in (tmp_path / "e").iterdir()} == {
        "evaluation.json",
        "acceptance_by_depth.png",
        "reliability.png",
    }
    code, out, _ = run(*to, "--tasks", "gsm8k", "--max-new-tokens", 8, "--dtype", "fp32", "--temperature", 0.7)
    assert code == 0 and "calibration error" in out
    assert "drafts nothing" in fail(*to, *more, "--shape", "off")
    only = tmp_path / "p.jsonl"
    only.write_text(json.dumps({"prompt": next(p for p in map(str, range(99)) if not is_held_out(p))}))
    assert "held-out side" in fail(*to, "--tasks", only)


def test_figures_follow_from_walks() -> None:
    walks = [
        Walk([0, 0, None], [(0.9, True), (0.8, True), (0.6, False)], 5, 5),
        Walk([1, None], [(0.4, False)], 5, 5),
        Walk([None], [(0.3, False)], 5, 5),
        Walk([], [], 0, 0),
    ]
    assert rates_by_depth(walks) == [2 / 3, 1 / 2, 0.0]
    assert membership(walks) == [1 / 4, 2 / 4, 2 / 4, 2 / 4, 2 / 4]
    found = calibration(walks)
    assert found["ece"] == pytest.approx((0.1 + 0.2 + 0.6 + 0.4 + 0.3) / 5)
    assert sum(count for _, _, count in found["bins"]) == 5
    assert calibration(walks[3:]) is None


def test_calibration_of_a_perfect_drafter_is_small(engine: Engine) -> None:
    """The target as its own drafter is as sure as it is right; draws are seeded."""
    from outrider.train.walks import Watched

    watched = Watched(make_drafter(engine.model, engine.target, engine.tokenizer))
    own = Engine(engine.model, engine.tokenizer, engine.name, watched)
    for seed in range(12):
        own.generate(
            [5, 9, 13, 7], shape="chain5", max_new_tokens=40, temperature=1.0, seed=seed, rule="mss", draft_sampling="iid",
            eos_token_id=None,
        )  # fmt: skip
    found = calibration(watched.walks)
    assert sum(count for _, _, count in found["bins"]) > 300 and found["ece"] < 0.12


def test_a_drafter_from_a_folder_has_drafted_before_its_first_text(
    engine: Engine, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted, propose = list[int](), LMDraftState.propose

    def counted(self: LMDraftState, *given: Any) -> Any:
        drafted.append(1)
        return propose(self, *given)

    monkeypatch.setattr(LMDraftState, "propose", counted)
    make_drafter(str(head), engine.target, engine.tokenizer, dtype=engine.dtype)
    assert drafted == [1], "what is made at first use would look like the price of drafting"
