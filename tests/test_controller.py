"""The bandit finds the fastest arm, "off" among them, and never changes a word."""

from __future__ import annotations

import time
from typing import Any

import pytest

from families import tiny
from helpers import PROMPT, expected, lm, oracle
from outrider.api import Engine
from outrider.controller import Bandit, Fixed
from outrider.counterfactual import Counterfactual
from outrider.drafters.catalog import default_arms, make_controller
from outrider.drafters.ngram import NgramDrafter
from outrider.rounds import Round, Walked
from outrider.tree import OFF, Shape, parse_shape

ARMS = [parse_shape(text) for text in ("chain2", "chain4", "3x2x1")]


def round_of(shape: Shape, emitted: int, seconds: float, drafted: int) -> Round:
    """A round of one row that accepted everything along its first path."""
    return Round(shape, [Walked((0,) * (emitted - 1), 0, False, drafted, drafted == shape.nodes)], verify=seconds)


def play(bandit: Bandit, speeds: dict[str, float], rounds: int, draft: bool = True) -> list[str]:
    """Rounds in which an arm of depth d emits d + 1 tokens at the given tokens per second."""
    chosen = []
    for _ in range(rounds):
        shape = bandit.choose()
        chosen.append(shape.name)
        emitted = shape.depth + 1
        bandit.reward(round_of(shape, emitted, emitted / speeds[shape.name], shape.nodes if draft else 0))
    return chosen


SLOW = {"chain2": 40.0, "chain4": 30.0, "3x2x1": 20.0, "off": 100.0}
FAST = {"chain2": 150.0, "chain4": 300.0, "3x2x1": 200.0, "off": 100.0}


def test_a_slow_drafter_is_switched_off_within_thirty_rounds() -> None:
    """ "Slower than without" is the most frequent complaint about speculation: where drafting does not pay, it stops."""
    chosen = play(Bandit(ARMS), SLOW, 60)
    assert chosen[:4] == ["chain2", "chain4", "3x2x1", "off"]
    assert chosen[:30].count("off") > 20
    assert chosen[30:].count("off") >= 27


def test_the_fastest_shape_wins() -> None:
    chosen = play(Bandit(ARMS), FAST, 80)
    assert chosen[20:].count("chain4") > 50


def test_the_arm_is_switched_when_it_becomes_slow() -> None:
    """Users want tuning that follows the task: where drafts stop being accepted, another arm takes over."""
    bandit = Bandit(ARMS)
    play(bandit, FAST, 60)
    assert play(bandit, SLOW, 120)[-30:].count("off") > 20


def test_an_arm_that_becomes_fast_is_found_again() -> None:
    """A chat that turns to copying code: drafting did not pay and was off, now it would; the bandit must look again."""
    bandit = Bandit(ARMS)
    play(bandit, SLOW, 60)
    assert play(bandit, FAST, 200)[-30:].count("chain4") > 20


def test_every_arm_is_tried_once_and_off_is_always_one() -> None:
    assert set(Bandit(ARMS).arms) == {"chain2", "chain4", "3x2x1", "off"}
    assert set(Bandit([*ARMS, OFF]).arms) == {"chain2", "chain4", "3x2x1", "off"}
    assert set(play(Bandit(ARMS), FAST, 4)) == {"chain2", "chain4", "3x2x1", "off"}


def test_rounds_in_which_nothing_was_drafted_tell_what_plain_decoding_costs() -> None:
    bandit = Bandit(ARMS)
    shape = bandit.choose()
    bandit.reward(round_of(shape, 1, 0.01, 0))
    assert bandit.choose() == shape
    assert bandit.pulls[shape.name] == 0


def test_a_shape_that_is_no_arm_or_took_no_time_teaches_nothing() -> None:
    bandit = Bandit(ARMS)
    before = dict(bandit.pulls)
    bandit.reward(round_of(parse_shape("best12"), 3, 1.0, 12))
    bandit.reward(round_of(ARMS[0], 3, 0.0, 2))
    assert bandit.pulls == before


def test_controllers_are_made_of_what_users_write() -> None:
    drafter = NgramDrafter()
    assert isinstance(make_controller("auto", drafter), Counterfactual)
    assert isinstance(make_controller(None, drafter), Counterfactual)
    assert isinstance(make_controller("ucb", drafter), Bandit)
    assert make_controller("auto", None).choose() == OFF
    assert make_controller((3, 2), None).choose() == OFF
    assert make_controller((3, 2), drafter).choose() == parse_shape("3x2")
    own = Fixed(ARMS[1])
    assert make_controller(own, drafter) is own
    assert all(arm.nodes for arm in default_arms(drafter))
    with pytest.raises(ValueError, match="shape"):
        make_controller("huge", drafter)


class Slow:
    """A drafter that is right, and far too slow to be of use."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner, self.seconds, self.name = inner, seconds, "slow"

    def begin(self, *args: Any) -> Any:
        state = self.inner.begin(*args)
        propose = state.propose

        def slowly(contexts: Any, shapes: Any) -> Any:
            time.sleep(self.seconds)
            return propose(contexts, shapes)

        state.propose = slowly
        return state


def test_a_really_slow_drafter_is_switched_off_and_the_text_is_the_same() -> None:
    slow = Engine(tiny("llama"), None, "llama", Slow(oracle("llama", 0.3), 0.1))
    result = slow.generate(list(PROMPT), shape="auto", max_new_tokens=60)
    assert result.token_ids == expected("llama", max_new_tokens=60)
    assert result.stats.shapes["off"] > result.stats.rounds / 2


@pytest.mark.parametrize("shape", ["auto", "ucb"])
def test_a_controller_that_learns_never_changes_the_text(shape: str) -> None:
    for family in ("llama", "mamba", "qwen3_next"):
        for drafter in ("ngram", lm(family, 1), lm(family), [lm("mamba", 1), "ngram"]):
            tuned = Engine(tiny(family), None, family, drafter)
            for given in ({}, {"temperature": 0.8, "seed": 5}):
                result = tuned.generate(list(PROMPT), shape=shape, max_new_tokens=40, **given)
                assert result.token_ids == expected(family, max_new_tokens=40, **given)
                assert sum(result.stats.shapes.values()) == result.stats.rounds


def test_a_request_can_switch_drafting_off_exactly() -> None:
    """A flag that turned off one drafter and left the others on was a bug elsewhere: off drafts nothing."""
    both = Engine(tiny("llama"), None, "llama", ["ngram", lm("llama")])
    stats = both.generate(list(PROMPT), shape="off", max_new_tokens=12).stats
    assert (stats.drafted, stats.accepted, stats.rounds, dict(stats.shapes)) == (0, 0, 12, {"off": 12})
    assert both.generate(list(PROMPT), shape=4, max_new_tokens=12).stats.drafted > 0


def test_the_length_asked_for_is_the_length_drafted() -> None:
    own = Engine(tiny("llama"), None, "llama", lm("llama"))
    stats = own.generate(list(PROMPT), shape=3, max_new_tokens=12).stats
    assert dict(stats.shapes) == {"chain3": 3}
    assert stats.drafted == 9
