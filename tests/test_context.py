"""What drafting and rounds cost as the text grows: states of constant size stay so, and mistakes are one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from families import tiny
from helpers import lm, target_of
from outrider.bench.context import Point, measure, plot
from outrider.bench.context_rounds import measure_rounds
from outrider.drafters.feature_head import HeadDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.feature_head import CORES
from test_head_cores import model as head_model
from toy import byte_tokenizer


def test_only_attention_pays_for_the_text() -> None:
    drafters = {core: HeadDrafter(head_model(core)) for core in CORES} | {"mamba": lm("mamba2")}
    points = measure(drafters, (500, 2000), depth=2, repeats=1)
    held = {(point.drafter, point.length): point.bytes for point in points}
    assert held["attention", 2000] > 2 * held["attention", 500]
    for constant in ("ssm", "hybrid", "mamba"):
        assert held[constant, 2000] == held[constant, 500], constant
    assert all(point.seconds > 0 for point in points) and len(points) == 8


def test_what_was_drafted_is_forgotten() -> None:
    state = head_model("hybrid").begin([[1, 2, 3]], 8)
    state.commit([[]])
    assert state.pending == 0 and state.lengths == [0]


@pytest.mark.parametrize(
    ("drafter", "lengths", "word"),
    [(NgramDrafter(), (8,), "has no model"), (lm("llama"), (600,), "holds 512"), (lm("llama"), (), "1 or more")],
)
def test_mistakes_are_told(drafter: object, lengths: tuple[int, ...], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        measure({"it": drafter}, lengths)


@pytest.mark.parametrize(("family", "recurrent", "attends"), [("mamba2", 1, 0), ("qwen3_next", 1, 1), ("llama", 0, 1)])
def test_only_attention_layers_of_a_target_grow(family: str, recurrent: int, attends: int) -> None:
    short, long = measure_rounds(target_of(family), (64, 384), depth=3, repeats=1)
    assert (short.state_bytes, short.factor_bytes) == (long.state_bytes, long.factor_bytes)
    assert (short.state_bytes > 0) == (short.factor_bytes > 0) == bool(recurrent)
    assert (long.attention_bytes > 2 * short.attention_bytes) == bool(attends)
    assert short.ms > 0 and long.ms > 0


@pytest.mark.parametrize(("lengths", "word"), [((505,), "512 tokens, and 8"), ((), "1 or more")])
def test_mistakes_about_rounds_are_told(lengths: tuple[int, ...], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        measure_rounds(target_of("llama"), lengths, depth=1, repeats=2)


def test_the_command_without_drafters_measures_the_target(tmp_path: Path) -> None:
    from outrider.cli import app

    tiny("mamba2").save_pretrained(tmp_path / "model")
    args = [
        "bench",
        "context",
        "--target",
        tmp_path / "model",
        "--dtype",
        "fp32",
        "--lengths",
        "16,64",
        "--repeats",
        "1",
    ]
    done = CliRunner().invoke(app, [str(a) for a in [*args, "--out", tmp_path / "out", "--json"]])
    assert done.exit_code == 0, done.output
    assert [point["length"] for point in json.loads(done.stdout)["rounds"]] == [16, 64]
    assert (tmp_path / "out" / "context.png").stat().st_size > 1000
    shown = CliRunner().invoke(app, [str(a) for a in args])
    assert shown.exit_code == 0 and "states, MB" in shown.stdout


def test_the_command(tmp_path: Path) -> None:
    from outrider.cli import app

    tokenizer = byte_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    args = ["bench", "context", "--target", tmp_path / "model", "--drafter", tmp_path / "model", "--dtype", "fp32"]
    more = ["--lengths", "16,64", "--repeats", "1", "--out", tmp_path / "out"]
    done = CliRunner().invoke(app, [str(a) for a in [*args, *more, "--json"]])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [point["length"] for point in found["points"]] == [16, 64]
    assert (tmp_path / "out" / "context.png").stat().st_size > 1000
    shown = CliRunner().invoke(app, [str(a) for a in [*args, *more]])
    assert "context" in shown.stdout and shown.exit_code == 0


def test_a_picture_of_one_point(tmp_path: Path) -> None:
    plot([Point("head", 128, 0.005, 1000)], 5, tmp_path / "one.png")
    assert (tmp_path / "one.png").exists()
