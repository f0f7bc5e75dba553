"""Promises about tuning can be checked with one command each: chosen well, never slower, foretold rightly."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench_fakes import prompts
from families import tiny
from helpers import NEW, PROMPT, expected, lm
from outrider.api import Engine
from outrider.bench import choice, forecast, hostile
from outrider.bench.choice import Choice, measure_choice
from outrider.bench.forecast import split
from outrider.bench.hostile import Guessing, Spoiled, hostile_cases, measure_hostile, random_prompts
from outrider.bench.report import SpeedReport
from outrider.bench.tasks import Prompt
from outrider.bench.turns import Timed, Turns, Written
from outrider.cli import app
from toy import byte_tokenizer


def shown(render: Any, value: Any) -> str:
    out = io.StringIO()
    render(value, Console(file=out, width=200))
    return out.getvalue()


# -- choice ------------------------------------------------------------------------------------------------------------


def chosen(seconds: dict[str, float], slow: str = "") -> Choice:
    """Texts of two tasks, a round a token, with seconds of a token by method; `slow` takes twice as long on the second task."""
    written = []
    for task in "aaabb":
        times = {name: value * (1 + (task == "b" and name == slow)) for name, value in seconds.items()}
        rounds = {name: [Timed(1, value, value, (name, task)) for _ in range(64)] for name, value in times.items()}
        written.append(Written(task, rounds, {}))
    settings = {"target": "t", "dtype": "float32", "drafter": "d"}
    return Choice(Turns(written), SpeedReport([], settings))


def test_auto_is_compared_with_the_best_fixed_shape() -> None:
    found = chosen({"plain": 1.0, "auto": 0.5, "chain2": 0.4, "3x2": 2.0})
    assert found.best_fixed() == found.best_fixed("a") == "chain2"
    assert found.ratio().value == pytest.approx(0.8) and found.ratio("b").value == pytest.approx(0.8)
    assert found.rooms[0].value == pytest.approx(1.0), "where one shape is best everywhere, nothing is to be had"
    value = json.loads(json.dumps(found.to_json()))
    assert value["tasks"]["a"]["best_fixed"] == "chain2" and "command" in value["speed"]["provenance"]
    assert value["tasks"]["a"]["auto_over_best_fixed"]["interval"] == pytest.approx([0.8, 0.8])
    text = shown(choice.render, found)
    assert "auto over best fixed" in text and "0.800 to 0.800" in text


def test_plain_decoding_may_be_the_best_fixed_shape() -> None:
    assert chosen({"plain": 0.1, "auto": 0.11, "chain2": 1.0, "3x2": 1.0}).best_fixed() == "plain"


def test_the_best_shape_is_another_one_on_another_task() -> None:
    found = chosen({"plain": 1.0, "auto": 0.5, "chain2": 0.5, "3x2": 0.75}, slow="chain2")
    assert (found.best_fixed("a"), found.best_fixed("b")) == ("chain2", "3x2")
    # three prompts of a and two of b: the best single shape needs 3 * 0.5 + 2 * 1, both together 3 * 0.5 + 2 * 0.75
    assert found.rooms[0].value == pytest.approx(3.5 / 3.0)


def test_all_methods_write_the_same_texts_in_turns() -> None:
    made = engine()
    given = [Prompt(task, "0", ({"role": "user", "content": "x"},)) for task in "ab"]
    for prompt in given:
        object.__setattr__(prompt, "encode", lambda engine: PROMPT)
    found = measure_choice(made, given, ["chain2", "best7"], 24)
    assert [method.method for method in found.report.methods] == ["plain", "auto", "chain2", "best7"]
    assert all(method.equal_text and len(method.repeats[0]) == 2 for method in found.report.methods)
    assert found.turns.methods == ["plain", "auto", "chain2", "best7"] and found.tasks == ["a", "b"]


def test_without_a_drafter_there_is_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="drafter"):
        measure_choice(Engine(tiny("llama"), None, "llama", "off"), prompts(1), ["chain2"], 4)
    for shapes, word in ((["chain2", "chain2"], "more than once"), (["chain2", "0"], "drafts nothing")):
        with pytest.raises(ValueError, match=word):
            measure_choice(engine(), prompts(1), shapes, 4)


# -- hostile -----------------------------------------------------------------------------------------------------------


def engine(drafter: Any = None) -> Engine:
    return Engine(tiny("llama"), None, "llama", drafter or lm("llama"))


@pytest.mark.parametrize("shape", ["auto", "chain3", "3x2x1"])
def test_hostile_drafters_are_useless_and_lossless(shape: str) -> None:
    vocab = tiny("llama").config.vocab_size
    for made in (Guessing(vocab), Spoiled(lm("llama"), vocab, shift=1), Spoiled(lm("llama"), vocab, delay=0.0001)):
        result = engine(made).generate(PROMPT, shape=shape, max_new_tokens=NEW)
        assert result.token_ids == expected("llama", PROMPT, max_new_tokens=NEW)
        if not getattr(made, "delay", 0.0):
            assert result.stats.accepted <= 0.2 * result.stats.rounds


def test_a_slow_drafter_is_as_slow_as_it_is_told_to_be() -> None:
    vocab = tiny("llama").config.vocab_size
    start = time.perf_counter()
    stats = engine(Spoiled(lm("llama"), vocab, delay=0.01)).generate(PROMPT, shape="chain4", max_new_tokens=10).stats
    assert time.perf_counter() - start > 0.01 * 4 and stats.accepted > 0


def test_every_case_writes_whole_texts_both_ways_and_says_where_time_went() -> None:
    made = engine()
    cases = measure_hostile(made, hostile_cases(made, [PROMPT, PROMPT[:5]], 0.001), 24)
    assert len(cases) == 4
    for case in cases:
        assert len(case.written) == 2
        for written in case.written:
            plain, auto = (written.results[way].token_ids for way in ("plain", "auto"))
            assert plain == auto and len(auto) == 24, "no text ends early"
        value = case.to_json()
        assert value["ratio"]["interval"][0] <= value["ratio"]["value"] <= value["ratio"]["interval"][1]
        assert set(value["lost"]) == {"prefill", "draft", "verify", "commit"}
    assert "random text" in shown(hostile.render, cases)
    assert made.drafter is not None and made.drafter.name == lm("llama").name, "the engine has its own drafter again"


def test_each_hostile_run_begins_cold() -> None:
    """What one run learned may not spare the next one its trials."""
    made = engine()
    (case, *_) = hostile_cases(made, [PROMPT] * 3, 0.0)
    measure_hostile(made, [case], 12)
    assert all(one.results["auto"].stats.shapes["off"] >= 1 for one in case.written) and not made._tuned


def test_random_prompts_differ_and_stay_in_the_vocabulary() -> None:
    first, second = random_prompts(48, 2, length=100)
    assert first != second and all(0 <= token < 48 for token in first + second)


@pytest.mark.parametrize(
    ("drafter", "texts", "delay"), [("off", [PROMPT], 0.0), (None, [], 0.0), (None, [PROMPT], -1.0)]
)
def test_a_hostile_set_of_nothing_is_refused(drafter: Any, texts: list[list[int]], delay: float) -> None:
    with pytest.raises(ValueError, match="give"):
        hostile_cases(engine(drafter), texts, delay)


# -- forecast ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"abcabc{i}"}) for i in range(6)))
    return path


def test_half_of_each_task_is_measured_and_the_other_half_is_run() -> None:
    both = split(prompts(5, "a") + prompts(2, "b"))
    assert [[f"{p.task}{p.id}" for p in side] for side in both] == [["a0", "a2", "a4", "b0"], ["a1", "a3", "b1"]]
    with pytest.raises(ValueError, match="two of a task"):
        split(prompts(1))


def test_an_error_is_the_share_by_which_a_prediction_is_too_high() -> None:
    one = forecast.Forecast("d", "chain2", 110.0, 100.0, (1.5, 1.2))
    assert one.error == pytest.approx(0.1) and one.to_json()["speedup"]["error"] == pytest.approx(0.25)
    assert "+10.0%" in shown(forecast.render, [one])


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_each_promise_has_a_command(folder: Path, tmp_path: Path) -> None:
    more = ("--target", folder, "--tasks", folder / "prompts.jsonl", "--dtype", "fp32", "--json")
    code, out, err = run(
        "bench", "hostile", *more, "--drafter", folder, "--limit", 1, "--max-new-tokens", 20, "--delay", 1
    )
    assert code == 0 and len(json.loads(out)["cases"]) == 4, err
    few = ("--limit", 2, "--max-new-tokens", 16, "--shapes", "chain3,2x2", "--out", tmp_path / "c.json")
    code, out, err = run("bench", "choice", *more, "--drafter", folder, *few)
    assert code == 0, err
    assert set(json.loads(out)["mix"]["tokens_per_second"]) == {"plain", "auto", "chain3", "2x2"}
    assert json.loads((tmp_path / "c.json").read_text()) == json.loads(out)
    code, out, err = run(
        "bench", "forecast", *more, "--drafter", folder, "--drafter", "oracle:0.7", "--seconds", 4, "--limit", 6
    )
    assert code == 0, err
    found = json.loads(out)["pairs"]
    assert [one["shape"] for one in found[::2]] == ["off", "off"] and all(one["measured"] > 0 for one in found)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("hostile", "--delay", "-1", "--drafter", "ngram", "--tasks", "PROMPTS"), "delay"),
        (("choice", "--shapes", "nonsense", "--tasks", "PROMPTS"), "nonsense"),
        (("choice", "--drafter", "off", "--tasks", "PROMPTS"), "drafter"),
        (("forecast", "--drafter", "ngram", "--limit", "1", "--tasks", "PROMPTS"), "two of a task"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(folder: Path, arguments: tuple[str, ...], word: str) -> None:
    names = {"PROMPTS": str(folder / "prompts.jsonl")}
    code, out, err = run("bench", *(names.get(a, a) for a in arguments), "--target", folder, "--dtype", "fp32")
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and not out.strip() and len(lines) == 1 and word in lines[0]
