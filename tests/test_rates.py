"""`outrider bench rates`: drafts of known quality, figures that follow from times, and texts that stay plain decoding's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from families import tiny
from outrider.api import Engine
from outrider.bench.rates import Point, break_even, measure_rates
from outrider.bench.report import Run
from outrider.cli import app
from outrider.stats import Stats
from toy import byte_tokenizer


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny("qwen3_next"), None, "tiny", "off")


def test_more_right_drafts_mean_longer_rounds_and_the_same_text(engine: Engine) -> None:
    points = measure_rates(engine, [0.0, 0.6, 1.0], ["chain3", "2x2"], 24, prompts=2)
    lengths = {(p.shape, p.rate): p.to_json()["acceptance_length"] for p in points}
    for shape, deepest in (("chain3", 4), ("2x2", 3)):
        found = [lengths[shape, rate] for rate in (0.0, 0.6, 1.0)]
        assert found[0] == 1.0 and found == sorted(found), shape
        assert found[2] == deepest
    assert all(point.same == 1.0 and point.speedup > 0 for point in points)
    assert all(len(run.token_ids) == 24 for point in points for run in (*point.runs, *point.plain))


def timed(rate: float, seconds: float) -> Point:
    """Ten tokens in so many seconds, against ten in one."""
    runs = [Run([0] * 10, 0.5 + took, stats=Stats(rounds=10, seconds={"prefill": 0.5})) for took in (seconds, 1.0)]
    return Point(rate, "chain3", runs[:1], runs[1:])


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ((1.25, 1.0, 0.5), 0.6),
        ((2.0, 2.0, 0.5), 0.6 + 0.4 * 0.5 / 1.5),
        ((0.9, 0.5, 0.4), 0.3),
        ((1.3, 1.2, 1.1), None),
        ((0.9, 2.0, 0.5), 0.6 + 0.4 * 0.5 / 1.5),
    ],
)
def test_break_even_is_where_the_last_loss_ends(seconds: tuple[float, ...], found: float | None) -> None:
    points = [timed(rate, took) for rate, took in zip((0.3, 0.6, 1.0), seconds)]
    assert points[0].speedup == pytest.approx(1 / seconds[0]), "the prompt is left out"
    got = break_even(points[::-1])
    assert got is None if found is None else got == pytest.approx(found)


@pytest.mark.parametrize(("rates", "word"), [([], "nothing to measure"), ([1.5], "between 0 and 1")])
def test_mistakes_are_told(engine: Engine, rates: list[float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        measure_rates(engine, rates, ["chain3"], 8)


def test_the_command(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    arguments = [
        "bench",
        "rates",
        "--target",
        tmp_path / "model",
        "--dtype",
        "fp32",
        "--max-new-tokens",
        "8",
        "--limit",
        "1",
    ]
    more = ["--rates", "0.5,1", "--shapes", "chain2,auto"]
    done = CliRunner().invoke(app, [str(a) for a in [*arguments, *more, "--json", "--out", tmp_path / "out"]])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(p["rate"], p["shape"]) for p in found["points"]] == [
        (r, s) for r in (0.5, 1.0) for s in ("chain2", "auto")
    ]
    assert set(found["break_even"]) == {"chain2", "auto"} and "command" in found["provenance"]
    assert json.loads((tmp_path / "out" / "rates.json").read_text()) == found
    assert (tmp_path / "out" / "rates.png").read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(app, [str(a) for a in [*arguments, *more]])
    assert shown.exit_code == 0 and "gains" in shown.stdout
    wrong = CliRunner().invoke(app, [str(a) for a in [*arguments, "--rates", "high"]])
    assert wrong.exit_code == 2 and "no numbers" in wrong.output
