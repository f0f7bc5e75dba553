"""A profile adds up, leaves nothing behind, and changes no text."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from families import tiny
from helpers import PROMPT, engine, expected, lm
from native_kernels import needs_kernels, without_kernels
from outrider.api import Engine
from outrider.bench.profile import REST, Profile, Stopwatch, plot, profile_rounds, profiling
from outrider.engine import Run
from outrider.models.packed import Product
from toy import byte_tokenizer

KERNELS = ("verify, compiled kernels",)
TORCH = ("verify, linear layers", "verify, attention", "verify, norms")


@pytest.mark.parametrize("verifying", [KERNELS, TORCH], ids=["kernels", "torch"])
def test_parts_add_up_to_the_rounds(verifying: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if verifying is KERNELS:
        needs_kernels()
    else:
        without_kernels(monkeypatch)
    made = Engine(copy.deepcopy(tiny("llama")), None, "llama", lm("llama", 1))
    before = Run._round, Product.__call__
    found = profile_rounds(made, [PROMPT, PROMPT[:3]], 12, shape="3x2")
    assert (Run._round, Product.__call__) == before, "nothing stays wrapped"
    parts = found.to_json()["ms_by_part"]
    for part in ("draft, level 1", "draft, level 2", *verifying, "commit, target", "sampling", REST):
        assert parts[part] > 0, part
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(sum(found.groups().values()))
    assert found.rounds > 0 and found.emitted == 24
    result = made.generate(PROMPT, max_new_tokens=12, shape="3x2")
    assert result.token_ids == expected("llama", PROMPT, max_new_tokens=12)


def test_rounds_take_as_long_as_their_parts() -> None:
    made, profile = engine("llama", "off"), Profile()
    with profiling(profile):
        stats = made.generate(PROMPT, max_new_tokens=16).stats
    seconds = stats.seconds["total"] - stats.seconds["prefill"]
    assert sum(profile.seconds.values()) == pytest.approx(seconds, rel=0.1, abs=0.003)
    assert not any(part.startswith("draft") for part in profile.seconds)


def test_time_goes_to_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("outrider.bench.profile.time.perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    profile = Profile()
    watch = Stopwatch(profile)
    inner = watch.wrap(lambda: spend(2.0), "verify, attention", inside="verify")

    def work() -> None:
        spend(1.0)
        inner()
        spend(0.5)

    watch.wrap(work, "verify, masks")()
    inner()  # outside of any verification: not counted
    assert profile.seconds == {"verify, masks": 1.5, "verify, attention": 2.0}

    def fail() -> None:
        spend(1.0)
        raise KeyError

    with pytest.raises(KeyError):
        watch.wrap(fail, "sampling")()
    assert profile.seconds["sampling"] == 1.0 and not watch.stack


def test_the_command_writes_a_table_a_picture_and_json(tmp_path: Path) -> None:
    from outrider.cli import app

    tokenizer, out = byte_tokenizer(), tmp_path / "out"
    tiny("llama", vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "abcabcabc"}) + "\n")
    given = {"--target": tmp_path / "model", "--drafter": "ngram", "--dtype": "fp32", "--tasks": prompts}
    args = ["bench", "round", *(str(part) for pair in given.items() for part in pair)]
    done = CliRunner().invoke(app, [*args, "--max-new-tokens", "6", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((out / "round.json").read_text())
    assert (out / "round.png").stat().st_size > 1000
    shown = CliRunner().invoke(app, [*args, "--max-new-tokens", "6"])
    assert "a round" in shown.stdout and ("compiled kernels" in shown.stdout or "linear layers" in shown.stdout)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        profile_rounds(engine("llama", "off"), [], 4)


def test_an_empty_profile_is_drawn(tmp_path: Path) -> None:
    plot(Profile(), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()
