"""Where drafting ends within a round is learned: from what the drafter's belief was worth, and from the clock."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from families import tiny
from helpers import NEW, OPTIONS, PROMPT, expected, lm
from outrider.api import Engine
from outrider.controller import Controller, Fixed
from outrider.counterfactual import Counterfactual
from outrider.rounds import Round, Walked, walked
from outrider.stopping import BINS, Calibration, Going, stops
from outrider.tree import Shape, TokenTree, parse_shape
from outrider.verify import Draft, Verdict

BELIEFS = (0.97, 0.9, 0.6, 0.3, 0.1)  # what the drafter says of its next token, each as often as the others


def honest(belief: float) -> float:
    return belief


def boastful(belief: float) -> float:
    """Right far more rarely than it says."""
    return belief**4


def modest(belief: float) -> float:
    return belief**0.25


@dataclass
class Drafter:
    """A drafter of chains that is right with a chance that depends on its belief, on a clock that only it moves."""

    truth: Callable[[float], float] = honest
    level: float = 0.1
    node: float = 0.02

    def play(self, controller: Controller, rounds: int, seed: int = 0) -> tuple[float, list[Round]]:
        """Tokens per second, and the rounds."""
        chance, done = random.Random(seed), list[Round]()
        for _ in range(rounds):
            done.append(self.round(controller.choose(), chance))
            controller.reward(done[-1])
        return sum(one.emitted for one in done) / sum(one.seconds for one in done), done

    def round(self, shape: Shape, chance: random.Random) -> Round:
        tree, verdict, beliefs, path = TokenTree(0), [0], dict[int, float](), 1.0
        for node in range(shape.depth):
            if path < max(shape.least, shape.enough):
                break
            belief = chance.choice(BELIEFS)
            path *= belief
            beliefs[tree.add(node, 0)] = path
            if verdict[-1] == node and chance.random() < self.truth(belief):
                verdict.append(node + 1)
        row = walked(Draft(tree, {}, beliefs=beliefs), Verdict(verdict, 1), shape)
        return Round(shape, [row], self.level * tree.drafted, 1.0 + self.node * tree.drafted)


def learner(shape: str = "chain8@0.05") -> Counterfactual:
    return Counterfactual([parse_shape(shape)])


def best_fixed(drafter: Drafter, rounds: int = 2500) -> float:
    """Over thresholds, in hindsight."""
    frame = parse_shape("chain8")
    grid = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    return max(drafter.play(Fixed(replace(frame, enough=enough)), rounds, seed=9)[0] for enough in grid)


@pytest.mark.parametrize("level", [0.03, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("truth", [honest, boastful, modest])
def test_the_threshold_learned_is_nearly_as_fast_as_the_best_in_hindsight(
    truth: Callable[[float], float], level: float
) -> None:
    drafter, controller = Drafter(truth, level), learner()
    drafter.play(controller, 300)
    speed, _ = drafter.play(controller, 2500, seed=9)
    assert speed > 0.96 * max(best_fixed(drafter), 1.0)


def test_dear_levels_end_sooner_and_so_do_a_boasters() -> None:
    """The same beliefs: what they are worth depends on the clock and on how often they were right."""

    def learned(drafter: Drafter) -> float:
        controller = learner()
        drafter.play(controller, 600, seed=1)
        assert controller.stops is not None
        return controller.stops.enough

    assert learned(Drafter(level=0.05)) < 0.7 * learned(Drafter(level=0.4))
    assert learned(Drafter(modest)) < learned(Drafter(honest)) < learned(Drafter(boastful))


def test_it_follows_a_drafter_whose_beliefs_change_their_worth() -> None:
    """A text of another kind: within a hundred rounds the new threshold is nearly as fast as the best one for it."""
    controller = learner()
    for truth in (honest, boastful, modest):
        drafter = Drafter(truth, 0.1)
        drafter.play(controller, 400, seed=1)
        drafter.play(controller, 100, seed=2)
        speed, _ = drafter.play(controller, 1000, seed=9)
        assert speed > 0.94 * max(best_fixed(drafter), 1.0), truth


@pytest.mark.parametrize("level", [0.0, 1e-9, 0.3, 50.0])
@pytest.mark.parametrize("truth", [honest, lambda belief: 0.0, lambda belief: 1.0])
def test_thresholds_stay_thresholds_and_every_round_ends(truth: Callable[[float], float], level: float) -> None:
    controller = learner()
    _, done = Drafter(truth, level).play(controller, 1500)
    for one in done:
        assert 0.0 <= one.shape.least <= 0.3 and 0.0 <= one.shape.enough <= 0.9
        assert one.shape.depth == 0 or one.levels >= 1, "a round that drafts drafts a level at least"
    json.dumps(controller.state(), allow_nan=False)


def test_a_threshold_that_was_too_high_comes_down_again() -> None:
    """Paths that got no children are counted too: what they would have been worth does not go unseen."""
    drafter, controller = Drafter(modest, 0.05), learner()
    Drafter(boastful, 1.0).play(controller, 200)
    drafter.play(controller, 400, seed=3)
    assert drafter.play(controller, 1000, seed=9)[0] > 0.95 * best_fixed(drafter)


def test_the_names_of_shapes_say_nothing_of_what_is_learned() -> None:
    """Clocks and counts of a shape stay together while its thresholds move."""
    controller = learner("chain8@0.05~12")
    _, done = Drafter(level=0.2).play(controller, 200)
    assert all("@" not in one.shape.name for one in done)
    assert len({(one.shape.least, one.shape.enough) for one in done if one.shape.depth}) > 1
    fixed = Counterfactual([parse_shape("chain8")])
    _, done = Drafter(level=0.2).play(fixed, 200)
    assert all(one.shape.least == one.shape.enough == 0.0 for one in done), "shapes without stops get none"


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_a_calibration_is_what_happened_and_at_first_what_the_drafter_says() -> None:
    calibration, chance = Calibration(), random.Random(0)
    worth = [value for value, _ in calibration.worth()]
    assert all(a > b for a, b in pairwise(worth)), "more probable paths are worth more"
    for _ in range(4000):
        belief = chance.choice((0.9, 0.4))
        kept = chance.random() < (0.5 if belief == 0.9 else 0.2)
        more = kept and chance.random() < 0.7
        beliefs = [(belief, kept), *([(belief * 0.01, True)] if more else [])]
        calibration.see(Walked((0,) * (kept + more), int(kept and not more), False, 2, True, beliefs=beliefs))
    worth = [value for value, _ in calibration.worth()]
    assert worth[0] == pytest.approx(0.5 * 0.7, abs=0.03)
    assert worth[5] == pytest.approx(0.2 * 0.7, abs=0.03)


def test_branches_end_later_than_levels_and_both_sooner_for_many_rows() -> None:
    worth = [(0.9 * 2 ** (-place / 4), 1.0) for place in range(BINS)]
    one = stops(worth, 2.0, 1, node=0.02, level=0.2, further=0.01)
    assert 0.0 < one.least < one.enough < 1.0
    many = stops(worth, 2.0, 8, node=0.02, level=0.2, further=0.01)
    assert many.least > one.least and many.enough > one.enough


def test_levels_follow_as_often_as_they_followed() -> None:
    going = Going()
    for _ in range(200):
        going.see(Walked((0,), 1, False, 3, False, 3, True))
    chances = going.chances()
    assert chances[0] > 0.95 and chances[2] < 0.1


def test_a_walk_tells_levels_feeds_and_beliefs() -> None:
    tree = TokenTree(1)
    first, second = tree.add(0, 5), tree.add(0, 6)
    third = tree.add(first, 7)
    draft = Draft(tree, {}, beliefs={first: 0.6, second: 0.2, third: 0.5})
    row = walked(draft, Verdict([0, second], 9), parse_shape("2x1x1"))
    assert (row.levels, row.stopped, row.fed) == (2, True, 2)
    assert list(row.beliefs) == [(0.6, False), (0.2, True), (0.5, False)]
    assert walked(replace(draft, fed=7), Verdict([0], 9), parse_shape("2x1")).fed == 7
    assert walked(Draft(TokenTree(1), {}), Verdict([0], 9), parse_shape("2x1")).levels is None


def test_a_level_is_left_out_where_its_parents_are_too_improbable_together() -> None:
    """Random models believe nothing strongly: with a high threshold one level is drafted, with a low one all are."""
    made = Engine(tiny("llama"), None, "llama", lm("llama", 1))
    few = made.generate(PROMPT, shape="chain4+0.9", max_new_tokens=NEW).stats
    all_ = made.generate(PROMPT, shape="chain4+0.000001", max_new_tokens=NEW).stats
    assert few.drafted <= 1.5 * few.rounds and all_.drafted > 2 * all_.rounds


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_learned_stops_never_show_in_the_text(key: str) -> None:
    made = Engine(tiny("mamba2"), None, "mamba2", lm("mamba2", 1))
    for _ in range(2):
        result = made.generate(PROMPT, max_new_tokens=NEW, **OPTIONS[key])
        if OPTIONS[key].get("rule") != "mss" or not OPTIONS[key].get("temperature"):
            assert result.token_ids == expected("mamba2", PROMPT, **{"max_new_tokens": NEW, **OPTIONS[key]})


def test_rows_of_a_batch_end_where_each_of_them_wants() -> None:
    rows = [PROMPT, [*PROMPT, 3, 9], PROMPT[:4]]
    results = Engine(tiny("llama"), None, "llama", lm("llama", 1)).generate(
        [list(r) for r in rows], shape="2x2x1x1@0.01+0.05", max_new_tokens=NEW
    )
    for row, result in zip(rows, results):
        assert result.token_ids == expected("llama", list(row), max_new_tokens=NEW)


@pytest.mark.parametrize("text", ["chain4@0.05+0.2", "2x2x1+0.3~9", "tree:0,0.0,1@0.1/20+0.25", "best12x6@0.1+0.2"])
def test_a_shape_with_stops_is_written_as_it_is_named(text: str) -> None:
    shape = parse_shape(text)
    assert shape.name == text and parse_shape(shape.name) == shape and shape.enough


@pytest.mark.parametrize("text", ["best12@0.1+2", "chain4@0.1+", "chain4+2", "chain4/0.2"])
def test_stops_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"shape|levels"):
        parse_shape(text)


def test_rows_draft_their_levels_together() -> None:
    """The longest row sets the time; a row that found nothing to draft does not."""
    shape, nothing = parse_shape("chain6"), Walked((), 0, True, 0, False)
    short, long = (Walked((), 1, False, levels, False, levels, True, levels) for levels in (2, 4))
    assert Round(shape, [short, long, nothing]).levels == 4
    assert Round(shape, [nothing]).levels == 6, "who found nothing may have looked for it as long as for all"
