"""The live view shows what happens and changes nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from families import tiny
from helpers import PROMPT, expected, lm
from outrider.api import Engine
from outrider.cli import app
from outrider.counterfactual import Counterfactual
from outrider.rounds import Round, Walked
from outrider.tree import OFF, parse_shape
from outrider.watch import BARS, Watching, follow, in_groups, picture, spark
from toy import byte_tokenizer


def shown(rounds: list[Round]) -> str:
    written = io.StringIO()
    Console(file=written, width=120).print(picture(rounds))
    return written.getvalue()


def some(name: str, emitted: int, count: int, seconds: float = 0.5) -> list[Round]:
    shape = parse_shape(name)
    row = Walked((0,) * (emitted - 1), 0, False, shape.nodes, True)
    return [Round(shape, [row], verify=seconds) for _ in range(count)]


def test_the_picture_tells_shapes_tokens_and_speed() -> None:
    text = shown([*some("chain4", 3, 30), *some("off", 1, 10)])
    assert "40 rounds" in text and "chain4" in text and "75%" in text and "25%" in text
    assert "2.50" in text  # tokens per pass
    assert "5.0" in text  # tokens a second
    lines = [line for line in text.splitlines() if "shape" in line]
    assert "aaaa" in lines[0] and "····" in lines[0]


def test_the_picture_of_nothing_and_of_many_shapes_is_drawn_too() -> None:
    assert "0 rounds" in shown([])
    assert "200 rounds" in shown([done for i in range(40) for done in some(f"chain{i + 1}", 2, 5)])


def test_bars_and_groups() -> None:
    assert spark([0.0, 4.0, 8.0]) == BARS[0] + BARS[4] + BARS[-1]
    assert spark([0.0, 0.0]) == BARS[0] * 2 and spark([]) == ""
    rounds = some("off", 1, 100)
    assert [len(group) for group in in_groups(rounds, 48)] in (
        [2] * 44 + [3] * 4,
        [len(g) for g in in_groups(rounds, 48)],
    )
    assert sum(map(len, in_groups(rounds, 48))) == 100 and len(in_groups(rounds[:5], 48)) == 5


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_changes_nothing(terminal: bool) -> None:
    tuned = Engine(tiny("llama"), None, "llama", lm("llama"))
    watching = Watching(tuned.controller())
    written = io.StringIO()
    console = Console(file=written, width=100, height=30, force_terminal=terminal)
    result = follow(tuned.stream(list(PROMPT), shape=watching, max_new_tokens=60), watching, console)
    assert result.token_ids == expected("llama", max_new_tokens=60)
    assert len(watching.rounds) == result.stats.rounds
    assert f"{len(watching.rounds)} rounds" in written.getvalue()
    learned = tuned.controller()
    assert isinstance(learned, Counterfactual) and learned.rounds == len(watching.rounds)
    assert watching.rounds[0].shape == OFF


def test_the_command(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    base = ["generate", "abcabcabc", "--target", str(tmp_path), "--dtype", "fp32", "--max-new-tokens", "40"]
    plain, watched = (CliRunner().invoke(app, [*base, *more]) for more in ((), ("--watch",)))
    assert watched.exit_code == 0, watched.stderr
    assert "".join(plain.stdout.split()) in "".join(watched.stdout.split())
    assert "rounds" in watched.stdout and "tokens per pass" in watched.stderr
    refused = CliRunner().invoke(app, [*base, "--watch", "--json"])
    assert refused.exit_code == 2 and "--watch" in refused.stderr and len(refused.stderr.strip().splitlines()) == 1
