"""`plan` predicts what a run then does: against rounds with a made-up clock, and end to end on tiny models."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from families import tiny
from helpers import PROMPT, lm, oracle
from outrider.api import Engine
from outrider.bench.plan import (
    WORTH,
    Change,
    Model,
    Predicted,
    _named,
    break_even_acceptance,
    break_even_draft,
    parse_change,
    plan,
)
from outrider.bench.probe import PROBES, Measured, Probing, _rising, in_turns, measure, typical
from outrider.bench.regret import Seconds, compare, play, record, regret_plot, synthetic
from outrider.bench.tasks import Prompt
from outrider.cli import app
from outrider.controller import Fixed
from outrider.drafters.ngram import NgramDrafter
from outrider.rounds import Round
from outrider.tree import parse_shape
from test_starts import copying, probed
from toy import byte_tokenizer

LAW = (0.6, 0.15, 0.08)


def measured(law: tuple[float, ...] = LAW, seconds: Seconds = Seconds(), tokens: int = 4000) -> Measured:  # noqa: B008
    """A pair of known acceptance on a machine of known clock."""
    probing = Probing([parse_shape(name) for name in PROBES])
    play(probing, [synthetic([(tokens, law)])], seconds)
    return Measured(probing.rounds)


@pytest.mark.parametrize(
    "shape", ["chain1", "chain4", "chain10", "3x2x1x1", "2x2x2x1", "4x1x1", "tree:0,0.0,0.0.0,1,1.0,2"]
)
@pytest.mark.parametrize("law", [LAW, (0.9, 0.03), (0.2, 0.2, 0.1)])
def test_the_predicted_speed_of_any_shape_is_that_of_a_run(law: tuple[float, ...], shape: str) -> None:
    """Also of shapes that were never drafted while measuring: within 10 %."""
    predicted = Model(measured(law)).predict(parse_shape(shape))
    done = play(Fixed(parse_shape(shape)), [synthetic([(6000, law)], 7)], Seconds(), 7)
    assert predicted.tokens_per_second == pytest.approx(done.tokens / done.total, rel=0.1)


def test_no_measured_pass_is_lost_on_the_way_to_the_curve() -> None:
    """The last few passes join the group before them; once they took its place, and curves bent or could not be read."""
    chance = random.Random(0)
    for _ in range(200):
        nodes = sorted(chance.choice((1, 2, 3, 4, 8, 15, 26)) for _ in range(chance.randint(1, 40)))
        points = _rising([(0, 1.0)], [(count, 1.0 + 0.1 * count) for count in nodes])
        places = [x for x, _ in points]
        assert places == sorted(set(places)) and all(y == pytest.approx(1.0 + 0.1 * x, abs=0.06) for x, y in points)


def test_the_shape_on_top_is_really_the_best_of_those_compared() -> None:
    ranking = Model(measured()).ranking([parse_shape("3x2x1x1")])
    speeds = {}
    for one in ranking[:3] + ranking[-3:]:
        done = play(Fixed(one.shape), [synthetic([(6000, LAW)], 3)], Seconds(), 3)
        speeds[one.shape.name] = done.tokens / done.total
    assert max(speeds, key=lambda name: speeds[name]) in [one.shape.name for one in ranking[:3]]
    assert [one.speedup for one in ranking] == sorted((one.speedup for one in ranking), reverse=True)


def made(law: tuple[float, ...], seconds: Seconds, changes: tuple[Change, ...] = ()) -> Any:
    return plan(Engine(tiny("llama"), None, "llama", lm("llama")), measured(law, seconds), changes)


def test_a_pair_that_pays_is_told_the_shape() -> None:
    found = made((0.85,), Seconds())
    assert found.speculate and found.verdict.startswith("speculate: ") and found.ranking[0].shape.name in found.verdict


def test_of_shapes_that_are_as_fast_the_one_with_a_short_name_is_told() -> None:
    names = {"tree:0,0.0,1": 2.0, "chain3": 1.985, "chain4": 1.99, "2x1": 1.9}
    ranking = [Predicted(parse_shape(name), 1.0, 1.0, speedup) for name, speedup in names.items()]
    assert _named(sorted(ranking, key=lambda one: -one.speedup)).shape.name == "chain4"
    assert _named([ranking[0], ranking[3]]).shape.name == "tree:0,0.0,1"


@pytest.mark.parametrize(
    ("law", "seconds", "reason"),
    [
        ((0.01,), Seconds(), "right too rarely"),
        ((0.6,), Seconds(level=1.2), "even if every draft were right"),
        ((0.9,), Seconds(node=1.2), "a pass over five tokens takes"),
        ((0.45,), Seconds(level=0.5), "it would pay from about"),
    ],
)
def test_a_pair_that_does_not_pay_is_told_why(law: tuple[float, ...], seconds: Seconds, reason: str) -> None:
    found = made(law, seconds)
    assert not found.speculate
    assert found.verdict.startswith("do not speculate, because ") and reason in found.verdict


def test_break_even_is_where_the_best_chain_is_as_fast_as_plain() -> None:
    quiet = Seconds(noise=0.0)
    rate = break_even_acceptance(measured(LAW, quiet))
    # chain1: (1 + a) = 1 + 0.02 + 0.15; longer chains need more
    assert rate == pytest.approx(0.17, abs=0.01)
    factor = break_even_draft(measured(LAW, quiet), [])
    # chain1 pays while 1 + a > 1.02 + 0.15 f
    first = measured(LAW, quiet).chances[0][0]
    assert factor == pytest.approx((first - 0.02) / 0.15, rel=0.05)
    assert break_even_acceptance(measured(LAW, Seconds(level=1.5))) is None
    assert break_even_draft(measured((0.0,)), []) is None


def test_a_shallower_or_a_better_drafter_can_be_asked_for() -> None:
    """Decoding Speculative Decoding: half the layers at a little less acceptance may be the faster drafter."""
    texts = ("latency=0.5x", "acceptance=0.8", "latency=0.3x,acceptance=-0.05", "latency=0ms,acceptance=1")
    found = made((0.6,), Seconds(level=0.5), tuple(map(parse_change, texts)))
    base, speeds = found.ranking[0].speedup, [one.speedup for _, one in found.what_if]
    assert min(speeds) > max(base, WORTH)
    assert speeds[3] == max(speeds) and found.what_if[3][1].length == pytest.approx(16, rel=0.3)
    real = play(Fixed(found.what_if[1][1].shape), [synthetic([(6000, (0.8,))])], Seconds(level=0.5))
    assert speeds[1] == pytest.approx(real.tokens / real.total, rel=0.12)


@pytest.mark.parametrize("shape", ["chain1", "chain4", "chain12"])
def test_a_drafter_that_is_never_right_brings_one_token_and_one_that_always_is_all(shape: str) -> None:
    """Of a text in which rounds of short chains leave off amid what is easy, so that no two shapes meet the same acceptance."""
    found, asked = Measured(probed(copying(200, 1))), parse_shape(shape)
    lengths = {
        text: Model(found, parse_change(text)).predict(asked).length
        for text in ("acceptance=0", "acceptance=-0.1", "latency=1x", "acceptance=+0.1", "acceptance=1")
    }
    assert lengths["acceptance=0"] == pytest.approx(1.0)
    assert lengths["acceptance=1"] == pytest.approx(asked.depth + 1)
    assert list(lengths.values()) == sorted(lengths.values()) and len(set(lengths.values())) == 5


@pytest.mark.parametrize(
    "text", ["", "latency", "latency=fast", "acceptance=2", "acceptance=1.5", "speed=2x", "latency=2x;"]
)
def test_a_what_if_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="what-if"):
        parse_change(text)


def test_passes_over_more_nodes_never_get_cheaper_by_noise() -> None:
    points = measured(LAW, Seconds(node=0.0, noise=0.2)).passes.points
    assert all(one[1] <= other[1] for one, other in itertools.pairwise(points))
    assert typical([1.0] * 19 + [100.0]) == 1.0


def test_too_little_to_measure_is_one_sentence() -> None:
    for rounds in ([], [Round(parse_shape("off"), [], verify=1.0)]):
        with pytest.raises(ValueError, match="too few rounds"):
            Measured(rounds)
    with pytest.raises(ValueError, match="no drafter"):
        measure(Engine(tiny("llama"), None, "llama", "off"), [Prompt("t", "0", text="x")])


class Ids:
    """A prompt that is token ids already."""

    task = "ids"

    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def encode(self, engine: Any) -> list[int]:
        return list(self.ids)


def test_a_real_pair_is_measured_while_its_text_stays_the_same() -> None:
    tuned = Engine(tiny("llama"), None, "llama", oracle("llama", 0.7))
    prompts: Any = [Ids([5, 9, 13 + i]) for i in range(8)]
    found = measure(tuned, prompts, max_new_tokens=100)
    assert found.overhead > 0 and found.plain > 0 and len(found.rounds) > 150
    assert found.chances[0][0] == pytest.approx(0.7, abs=0.12)
    assert found.chances[0][1] < 0.1
    assert Model(found).predict(parse_shape("chain4")).length == pytest.approx(2.77, abs=0.5)


def test_tasks_take_turns_so_that_a_short_measurement_sees_all() -> None:
    prompts = [Prompt(task, str(i), text="x") for task in ("a", "b") for i in range(3)] + [Prompt("c", "0", text="x")]
    assert [prompt.task for prompt in in_turns(prompts)] == ["a", "b", "c", "a", "b", "a", "b"]


def test_measuring_ends_with_its_time() -> None:
    import time

    start = time.perf_counter()
    prompts: Any = [Ids(PROMPT)] * 10_000
    measure(Engine(tiny("llama"), None, "llama", oracle("llama", 0.7)), prompts, seconds=1.0)
    assert time.perf_counter() - start < 10


def test_prompt_lookup_mostly_has_nothing_to_propose_and_the_plan_knows() -> None:
    asked: Any = [Ids(range(3, 30))]
    found = measure(Engine(tiny("llama"), None, "llama", NgramDrafter()), asked, max_new_tokens=40)
    assert 0 < found.empty < 1
    assert Model(found).predict(parse_shape("chain4")).seconds > found.plain


# -- recorded walks ----------------------------------------------------------------------------------------------------


def test_walks_are_recorded_at_every_position_and_say_what_shapes_then_do() -> None:
    tuned = Engine(tiny("llama"), None, "llama", lm("llama", 1))
    prompts: Any = [Ids(PROMPT), Ids((3, 11, 4))]
    streams = record(tuned, prompts, 60, shape="2x2x1")
    assert [len(stream.walks) for stream in streams] == [57, 57]
    for shape in ("chain2", "2x1"):
        emitted = play(Fixed(parse_shape(shape)), streams[:1], Seconds())
        result = tuned.generate(list(PROMPT), shape=shape, max_new_tokens=57)
        assert abs(len(emitted.shapes) - result.stats.rounds) <= 1
    with pytest.raises(ValueError, match="no drafter"):
        record(Engine(tiny("llama"), None, "llama", "off"), prompts, 8)


def test_regret_is_zero_for_the_best_fixed_shape_itself(tmp_path: Path) -> None:
    found = compare([synthetic([(400, LAW)])], Seconds())
    best = found.best_fixed
    assert best is not None
    found.played["itself"] = found.fixed[best]
    assert all(lost == 0 for _, lost in found.regret("itself"))
    assert found.speed("itself") == 1.0
    assert min(found.speed(name) for name in found.fixed) > 0 and max(found.speed(n) for n in found.fixed) == 1.0
    regret_plot(found, tmp_path / "regret.png")
    assert (tmp_path / "regret.png").stat().st_size > 5000


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"abcabc{i}"}) for i in range(6)))
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_plan_prints_a_verdict_and_writes_what_it_rests_on(folder: Path, tmp_path: Path) -> None:
    more = ("--target", folder, "--drafter", "oracle:0.8", "--prompts", folder / "prompts.jsonl", "--dtype", "fp32")
    code, out, err = run("plan", *more, "--out", tmp_path, "--what-if", "latency=2x")
    assert code == 0, err
    assert "speculate" in out and "break-even" in out and "what if latency=2x" in out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (tmp_path / "plan.png").stat().st_size > 5000
    assert {"speculate", "verdict", "shapes", "break_even", "what_if", "latency", "acceptance", "provenance"} <= set(
        found
    )
    assert any(one["shape"] == "off" and one["speedup"] == 1.0 for one in found["shapes"])
    for one in found["shapes"]:
        parse_shape(one["shape"])
    code, out, err = run("plan", *more, "--seconds", "5", "--json")
    assert code == 0 and json.loads(out)["rounds"] > 20, err


def test_regret_writes_a_picture_and_numbers(folder: Path, tmp_path: Path) -> None:
    code, out, err = run("bench", "regret", "--out", tmp_path / "made-up")
    assert code == 0 and "counterfactual" in out, err
    assert json.loads((tmp_path / "made-up" / "regret.json").read_text())["speed"]["counterfactual"] > 1.0
    more = ("--target", folder, "--drafter", folder, "--prompts", folder / "prompts.jsonl", "--dtype", "fp32")
    code, out, err = run(
        "bench", "regret", *more, "--limit", 3, "--max-new-tokens", 40, "--out", tmp_path / "real", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["speed"]["chain7@0.08"] == 1.0  # a drafter that is always right
    assert (tmp_path / "real" / "regret.png").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("plan", "--target", "FOLDER", "--drafter", "off"), "drafter"),
        (("plan", "--target", "FOLDER", "--what-if", "magic"), "what-if"),
        (("plan", "--target", "FOLDER", "--seconds", "0", "--prompts", "PROMPTS"), "seconds"),
        (("plan", "--target", "FOLDER", "--prompts", "no-such-task"), "no-such-task"),
        (("bench", "regret", "--level", "-1", "--out", "x"), "level"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(folder: Path, arguments: tuple[str, ...], word: str) -> None:
    names = {"FOLDER": str(folder), "PROMPTS": str(folder / "prompts.jsonl")}
    code, out, err = run(*(names.get(a, a) for a in arguments))
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and not out.strip()
    assert len(lines) == 1 and lines[0].startswith("outrider: ") and word in lines[0]


def test_a_comparison_is_fixed_by_its_seeds() -> None:
    assert (
        compare([synthetic([(200, LAW)], 5)], Seconds(), seed=2).to_json()
        == compare([synthetic([(200, LAW)], 5)], Seconds(), seed=2).to_json()
    )
