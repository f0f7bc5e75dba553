"""A data set that a target reads instead of writing it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from outrider.train.data import read_answers, shard_files
from outrider.train.features import examples
from workshop_fixtures import fail, succeed

pytest_plugins = ["workshop_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


def test_texts_are_those_of_the_source_and_states_the_targets_own(target: Path, data: Path, tmp_path: Path) -> None:
    pruned, out = tmp_path / "pruned", tmp_path / "read"
    succeed("prune", "--target", target, "--layers", 1, "--no-finetune", "--out", pruned, "--dtype", "fp32")
    given = ("data", "--target", pruned, "--read", data, "--tokens", "1k", "--taps", "0", "--dtype", "fp32")
    found = succeed(*given, "--out", out)
    ours, theirs = read_answers(out), read_answers(data)
    assert found["complete"] and found["answer_tokens"] >= 1000 and found["answers"] == len(ours)
    assert all(torch.equal(a.ids, b.ids) and a.prompt_length == b.prompt_length for a, b in zip(ours, theirs))
    assert "read, written by" in json.loads((out / "data.json").read_text())["sources"][-1]
    assert examples(out, (0,))[0].hidden().shape[0] == len(ours[0].ids)
    before = {path: path.stat().st_mtime_ns for path in shard_files(out)}
    assert succeed(*given, "--out", out)["answer_tokens"] == found["answer_tokens"]  # nothing is done twice
    assert before == {path: path.stat().st_mtime_ns for path in shard_files(out)}
    small = ("--minutes", 0.004, "--every", 60, "--batch-tokens", 256, "--draft-vocab", 200, "--dtype", "fp32")
    succeed("distil", "--target", pruned, "--data", out, "--out", tmp_path / "head", "--taps", "0", *small)


def test_texts_of_another_vocabulary_are_refused(target: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(data, other)
    known = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps({**known, "vocabulary": "another"}))
    given = ("data", "--target", target, "--out", tmp_path / "out", "--dtype", "fp32")
    assert "not in the vocabulary" in fail(*given, "--read", other)
    assert not (tmp_path / "out").exists()


def test_damaged_sources_are_told_in_one_line_and_counts_are_those_of_the_folder(
    target: Path, data: Path, tmp_path: Path
) -> None:
    given = ("data", "--target", target, "--dtype", "fp32", "--out", tmp_path / "out")
    all_of_it = succeed(*given, "--read", data, "--tokens", "9M")["answer_tokens"]
    assert succeed(*given, "--read", data, "--tokens", 1)["answer_tokens"] == all_of_it
    other = tmp_path / "other"
    shutil.copytree(data, other)
    shard = shard_files(other)[0]
    shard.write_bytes(shard.read_bytes()[:100])
    assert "is damaged" in fail(*given[:-1], tmp_path / "new", "--read", other)
    for broken in ("[]", "null", "{}"):
        (other / "data.json").write_text(broken)
        assert "holds no data set to read" in fail(*given[:-1], tmp_path / "new", "--read", other)


def test_what_cannot_be_read_is_told_in_one_line(target: Path, data: Path, tmp_path: Path) -> None:
    given = ("data", "--target", target, "--out", tmp_path / "out", "--dtype", "fp32")
    assert "holds no data set to read" in fail(*given, "--read", tmp_path)
    assert "leave out --prompts and --sources" in fail(*given, "--read", data, "--sources", "sums")
    assert "is not empty" in fail("data", "--target", target, "--out", target, "--dtype", "fp32", "--read", data)
