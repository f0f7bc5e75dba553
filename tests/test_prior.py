"""A drafter can bring what its rounds brought elsewhere: its first draft has the right shape, and soon rounds of here count."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from families import tiny
from helpers import PROMPT, expected, lm
from outrider.api import Engine
from outrider.bench.regret import ARMS, Seconds, play, synthetic
from outrider.bench.tasks import Prompt
from outrider.controller import Fixed
from outrider.counterfactual import BELIEVED, Counterfactual
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.catalog import make_controller
from outrider.drafters.folder import PRIOR, SHIPPED, read_priors
from outrider.drafters.merged import MergedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.rounds import Round, Walked
from outrider.train.prior import SHAPES, Listening, keep_prior, measure_prior
from outrider.tree import MATCHES, OFF, parse_shape

GOOD, BAD = (0.8, 0.08, 0.03), (0.05, 0.03, 0.02)
FRAMES = [parse_shape(arm) for arm in ARMS]


def prior(law: tuple[float, ...], seconds: Seconds = Seconds(level=0.05)) -> dict[str, Any]:  # noqa: B008
    listening = Listening([parse_shape(name) for name in SHAPES])
    play(listening, [synthetic([(3000, law)], 3)], seconds)
    from outrider.knowledge import to_data

    data: dict[str, Any] = json.loads(json.dumps(to_data(listening.knowledge, listening.clocks)))
    return data


def believing(known: dict[str, Any]) -> Counterfactual:
    controller = Counterfactual(FRAMES)
    controller.believe(known)
    return controller


def test_the_first_draft_already_has_the_right_shape_on_a_machine_of_another_speed() -> None:
    """A prior measured on a machine ten times as slow: times count in plain passes."""
    slow = Seconds(plain=10.0, node=0.2, level=0.5, fed=0.05)
    stream, fast = [synthetic([(64, GOOD)], 8)], Seconds(level=0.05)
    done = play(believing(prior(GOOD, slow)), stream, fast)
    speeds = {
        shape.name: (p := play(Fixed(shape), [synthetic([(4000, GOOD)], 5)], fast)).tokens / p.total for shape in FRAMES
    }
    assert done.shapes[0] == "off" and parse_shape(done.shapes[1]).depth > 2
    name = done.shapes[1]
    first = play(Fixed(parse_shape(name)), [synthetic([(4000, GOOD)], 5)], fast)
    assert first.tokens / first.total > 0.97 * max(speeds.values())


def test_short_texts_are_faster_with_a_prior() -> None:
    def total(make: Any) -> float:
        return sum(play(make(), [synthetic([(64, GOOD)], seed)], Seconds(level=0.05), seed).total for seed in range(20))

    known = prior(GOOD)
    assert total(lambda: believing(known)) < 0.97 * total(lambda: Counterfactual(FRAMES))


@pytest.mark.parametrize("stalled", range(3))
def test_a_stall_among_the_first_drafts_does_not_end_drafting(stalled: int) -> None:
    """Another process takes the machine for ten rounds' time, once: with a prior there is something to compare that with."""
    controller, chance = believing(prior(GOOD)), random.Random(stalled)
    drafted = off = 0
    for _ in range(100):
        shape = controller.choose()
        kept = 0
        while kept < shape.depth and chance.random() < GOOD[0]:
            kept += 1
        row = Walked((0,) * kept, max(shape.levels[kept]) if kept < shape.depth else 0, False, shape.nodes, True)
        stall = 10.0 * (drafted == stalled) if shape.depth else 0.0
        drafted, off = drafted + bool(shape.depth), off + (not shape.depth)
        controller.reward(Round(shape, [row], 0.05 * shape.depth, 1.0 + 0.02 * shape.nodes + stall))
    assert off < 15


@pytest.mark.parametrize("seed", range(4))
def test_a_prior_that_is_wrong_is_forgotten_within_thirty_rounds(seed: int) -> None:
    """Promised much, and nothing is right here: drafting stops."""
    done = play(believing(prior(GOOD)), [synthetic([(300, BAD)], seed)], Seconds(level=0.3), seed)
    assert Counter(done.shapes[30:])["off"] > 0.8 * len(done.shapes[30:])
    promised_little = play(believing(prior(BAD)), [synthetic([(1500, GOOD)], seed)], Seconds(level=0.05), seed)
    assert Counter(promised_little.shapes[-100:])["off"] < 20


def test_a_prior_weighs_as_much_as_a_few_rounds_however_long_it_was_measured() -> None:
    controller = believing(prior(GOOD))
    assert sum(controller.knowledge.acceptance.tries[0][:1]) <= 1.01 * BELIEVED
    controller.reward(Round(OFF, [Walked((), 0, False, 0, True)], verify=2.0))
    assert controller.clocks.asked <= 1.01 * BELIEVED * controller.clocks.unit
    assert controller.clocks.plain == pytest.approx(2.0)
    level = controller.clocks.drafting()[0]
    assert level == pytest.approx(0.05 * 2.0, rel=0.3), "a level takes the share of a plain pass that it took there"


def test_what_was_learned_here_outweighs_a_prior() -> None:
    """Statistics are restored behind it: the first plain round leaves their drafting times as they are."""
    controller = believing(prior(GOOD))
    controller.restore(prior(GOOD, Seconds(level=0.001)))
    before = controller.clocks.drafting()
    controller.reward(Round(OFF, [Walked((), 0, False, 0, True)], verify=1.0))
    assert controller.clocks.drafting() == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize("broken", [{}, {"counts": {}}, {"counts": [], "clocks": {}}, [], "x", 3])
def test_a_prior_that_is_none_is_ignored_with_one_line(broken: Any) -> None:
    drafter: Any = lm("llama")
    drafter.priors, drafter.folder = {drafter.name: broken}, "somewhere"
    try:
        with pytest.warns(RuntimeWarning, match="prior in somewhere is ignored"):
            controller = make_controller("auto", drafter)
    finally:
        del drafter.priors, drafter.folder
    assert controller.choose() == OFF


def test_a_measured_prior_is_kept_beside_the_drafter_and_found_again(tmp_path: Path) -> None:
    drafter: Any = lm("llama", 1)
    made = Engine(tiny("llama"), None, "llama", drafter)
    asked = [Prompt("t", str(i), text=None, messages=()) for i in range(2)]
    for prompt in asked:
        object.__setattr__(prompt, "encode", lambda engine: list(PROMPT))
    found = measure_prior(made, asked, 60)
    with pytest.raises(ValueError, match="folder"):
        keep_prior(made, found)
    drafter.folder = tmp_path
    try:
        assert keep_prior(made, found) == tmp_path / PRIOR
        assert read_priors(tmp_path) == {drafter.name: found}
        drafter.priors = read_priors(tmp_path)
        result = Engine(tiny("llama"), None, "llama", drafter).generate(list(PROMPT), max_new_tokens=40)
        assert result.token_ids == expected("llama", max_new_tokens=40)
    finally:
        for name in ("folder", "priors"):
            if hasattr(drafter, name):
                delattr(drafter, name)


def test_too_little_is_no_prior() -> None:
    with pytest.raises(ValueError, match="too few rounds"):
        measure_prior(Engine(tiny("llama"), None, "llama", lm("llama", 1)), [], 8)
    with pytest.raises(ValueError, match="drafter"):
        measure_prior(Engine(tiny("llama"), None, "llama", "off"), [], 8)


def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    for text in ("", "[1]", "{", "[" * 100_000):
        (tmp_path / PRIOR).write_text(text)
        assert read_priors(tmp_path) == {}
    assert read_priors(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("joined", ["+", ">"])
def test_a_prior_hears_all_parts_of_a_drafter_whose_lookups_have_no_reach(joined: str) -> None:
    """A merged drafter, and a cascade without a model: shapes are theirs alone, and nothing of them is left out."""
    asked = [Prompt("t", str(i), text=None, messages=()) for i in range(4)]
    for prompt in asked:
        object.__setattr__(prompt, "encode", lambda engine: [5, 6, 7, 8] * 4)
    made = (MergedDrafter if joined == "+" else CascadeDrafter)([NgramDrafter(), NgramDrafter(3, 3)])
    known = measure_prior(Engine(tiny("llama"), None, "llama", made), asked, 60)
    assert known["counts"]["hits.0"][0] > 10, "lookups drafted"


def test_a_prior_whose_rounds_emit_nothing_is_refused() -> None:
    known = prior(GOOD)
    known["counts"]["instead.emitted"] = [0.0] * (len(MATCHES) + 1)
    with pytest.raises(ValueError, match="emitted"):
        believing(known)


def test_every_prior_that_is_shipped_can_be_believed(tmp_path: Path) -> None:
    files = list(SHIPPED.glob(f"*/*/{PRIOR}"))
    assert files
    for file in files:
        shutil.copy(file, tmp_path / PRIOR)
        for known in read_priors(tmp_path).values():
            assert believing(known).knowledge.nodes.chances()[0][1] > 0.3
