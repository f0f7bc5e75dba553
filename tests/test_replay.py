"""Recorded texts played again do what real runs did, and show what only choosing changes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from families import tiny
from helpers import PROMPT, lm
from outrider.api import Engine
from outrider.bench.replay import (
    Prices,
    Track,
    load,
    methods_of,
    parse_prices,
    play,
    played_drafter,
    record,
    replay,
    save,
)
from outrider.bench.tasks import Prompt
from outrider.bench.turns import Heard
from outrider.cli import app
from outrider.controller import Fixed
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.merged import MergedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.rounds import Round
from outrider.tree import parse_shape
from toy import byte_tokenizer

PRICES = Prices({1: 10.0, 8: 12.0, 9: 18.0, 16: 20.0}, noise=0.0)


@dataclass(frozen=True)
class Given(Prompt):
    """A prompt of token ids."""

    ids: tuple[int, ...] = ()

    def encode(self, engine: Any) -> list[int]:
        return list(self.ids)


def given(task: str, ids: list[int]) -> Given:
    """One of a task."""
    return Given(task, task, ids=tuple(ids))


class Noted(Heard):
    """A controller whose rounds are all kept."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.rounds = list[Round]()

    def reward(self, done: Round) -> None:
        super().reward(done)
        self.rounds.append(done)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A target that writes loops, and a drafter that is right now and then, behind lookups."""
    return Engine(tiny("llama"), None, "llama", CascadeDrafter([NgramDrafter(trust={2: 3, 3: 5}), lm("llama", 1)]))


@pytest.fixture(scope="module")
def tracks(engine: Engine) -> list[Track]:
    return record(engine, [given("a", PROMPT), given("b", PROMPT[:5])], 48, widest="best400x4")


@pytest.mark.parametrize("shape", ["chain3", "best7x4@0.01+0.02~7", "best3x4~5", "3x2x1@0.02~4", "2x2"])
def test_rounds_are_those_of_a_real_run(engine: Engine, tracks: list[Track], shape: str) -> None:
    """Tree for tree: what was drafted, how far it was followed, levels, and beliefs."""
    for track in tracks:
        real, again = Noted(Fixed(parse_shape(shape))), Noted(Fixed(parse_shape(shape)))
        engine.generate(track.ids[: track.begins], shape=real, max_new_tokens=48)
        play(again, track, played_drafter(engine.drafter, track), PRICES, random.Random(0))
        assert len(real.rounds) == len(again.rounds) > 3
        for one, other in zip(real.rounds, again.rounds):
            (row,), (played,) = one.rows, other.rows
            for name in ("ranks", "width", "drafted", "levels", "stopped", "whole", "beyond"):
                assert getattr(row, name) == getattr(played, name), name
            assert [b for b, _ in row.beliefs] == pytest.approx([b for b, _ in played.beliefs], rel=1e-4)


def test_plain_rounds_write_a_token_each_at_the_price_of_one_row(engine: Engine, tracks: list[Track]) -> None:
    turns = replay(tracks, engine.drafter, methods_of(engine, ["chain3"]), PRICES, 1)
    assert turns.speed("plain") == pytest.approx(1e3 / (10.0 + PRICES.around))
    assert turns.tokens_LM.sum(0).tolist() == [96.0, 96.0, 96.0] and turns.methods == ["plain", "auto", "chain3"]


def test_without_a_clock_nothing_is_taken_for_a_stall(engine: Engine, tracks: list[Track]) -> None:
    found = replay(tracks, engine.drafter, methods_of(engine, ["best23x8", "chain1"]), PRICES, 4)
    assert found.stalled == pytest.approx(0.0, abs=1e-9)


def test_the_same_seeds_give_the_same_figures(engine: Engine, tracks: list[Track]) -> None:
    noisy = Prices(PRICES.passes, noise=0.05)
    one, other = (replay(tracks, engine.drafter, methods_of(engine, ["best7"]), noisy, 2) for _ in range(2))
    assert one.seconds_LM.tolist() == other.seconds_LM.tolist()


def test_tracks_outlive_a_process(engine: Engine, tracks: list[Track], tmp_path: Path) -> None:
    save(tracks, tmp_path / "tracks.json", engine)
    assert load(tmp_path / "tracks.json", engine) == tracks
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no recorded texts"):
        load(tmp_path / "other.json", engine)
    other = lm("llama", 2)
    other.name = "another"
    with pytest.raises(ValueError, match="another"):
        load(tmp_path / "tracks.json", Engine(tiny("llama"), None, "llama", CascadeDrafter([NgramDrafter(), other])))
    with pytest.raises(ValueError, match="only a drafter that is a model"):
        load(tmp_path / "tracks.json", Engine(tiny("llama"), None, "llama", MergedDrafter([NgramDrafter(), other])))
    assert load(tmp_path / "tracks.json", Engine(tiny("llama"), None, "llama", lm("llama", 1))) == tracks, (
        "lookups do not matter"
    )


def test_drafters_that_are_no_model_cannot_be_recorded() -> None:
    made = Engine(tiny("llama"), None, "llama", NgramDrafter())
    with pytest.raises(ValueError, match="--drafter"):
        record(made, [given("a", PROMPT)], 4)


@pytest.mark.parametrize("text", ["", "1", "1:0", "0:3", "one:2", "1:2,8"])
def test_prices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--passes"):
        parse_prices(text)


def test_replay_is_a_command(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"abcabc{i}"}) for i in range(2)))
    of_texts = ("--tasks", tmp_path / "prompts.jsonl", "--max-new-tokens", 24)
    more = ("--shapes", "chain3,best7", "--dtype", "fp32")
    arguments = ("bench", "replay", "--target", tmp_path, "--drafter", f"ngram>{tmp_path}", *more, "--json")
    found = []
    for written in (of_texts, ()):  # the second time from the file
        result = CliRunner().invoke(app, [str(a) for a in (*arguments, *written, "--tracks", tmp_path / "tracks.json")])
        assert result.exit_code == 0, result.stderr
        found.append(json.loads(result.stdout)["played"])
    result = CliRunner().invoke(app, [str(a) for a in (*arguments, *of_texts, "--tracks", tmp_path / "tracks.json")])
    assert result.exit_code == 2 and "is for a recording" in result.stderr
    assert found[0] == found[1] and set(found[0]["mix"]["tokens_per_second"]) == {"plain", "auto", "chain3", "best7"}
