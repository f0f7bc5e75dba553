"""What a shape's own rounds would bring, foretold from rounds of others, against runs of that shape."""

from __future__ import annotations

import random

import pytest

from outrider.bench.probe import PROBES, Measured, Probing
from outrider.bench.regret import Seconds, Stream, play, synthetic
from outrider.bench.starts import FEW, Kind, Starts
from outrider.controller import Fixed
from outrider.rounds import Round, Walked
from outrider.tree import OFF, parse_shape

# chances by depth do not tell that a second child is right where the text is hard, so trees look a little better than they are
SHAPES = {"chain1": 0.04, "chain3": 0.04, "chain6": 0.04, "chain12": 0.04, "3x1x1": 0.08, "tree:0,0.0,0.0.0,1": 0.12}


def copying(stretches: int, seed: int) -> Stream:
    """A text that goes on to be copied for long stretches, and is hard to foretell between them."""
    chance = random.Random(seed)
    phases = [
        (chance.randint(5, 40), (0.95, 0.02)) if n % 2 else (chance.randint(5, 40), (0.3, 0.12))
        for n in range(stretches)
    ]
    return synthetic(phases, seed)


def probed(stream: Stream) -> list[Round]:
    probing = Probing([parse_shape(name) for name in PROBES])
    play(probing, [stream], Seconds())
    return probing.rounds


def tokens_a_round(name: str, stream: Stream) -> float:
    done = play(Fixed(parse_shape(name)), [stream], Seconds())
    return done.tokens / len(done.seconds)


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_of_a_shape_that_was_never_drafted_are_those_of_a_run(name: str) -> None:
    stream = copying(1500, 1)
    found = Starts(probed(stream)).brought(parse_shape(name)).length
    assert found == pytest.approx(tokens_a_round(name, stream), rel=SHAPES[name])


def test_walks_of_all_rounds_would_not_tell_that() -> None:
    """Rounds of short chains leave off amid what is easily foretold, which a deep chain's own rounds seldom do."""
    stream = copying(1500, 1)
    mixed = Kind([row for done in probed(stream) if done.shape.depth for row in done.rows])
    assert abs(mixed.walk(parse_shape("chain12"))[0] / tokens_a_round("chain12", stream) - 1) > 0.08


def test_rounds_with_nothing_to_draft_are_as_many_as_the_kinds_of_rounds_say() -> None:
    """Behind a failed draft there is none, behind a kept one there is: of chains of 1 that are right half of the time, a third of
    the rounds has nothing to draft."""
    shape, rounds = parse_shape("chain1"), list[Round]()
    nothing, right = Walked((), 0, True, 0, False), Walked((0,), 0, False, 1, True)
    wrong = Walked((), 1, False, 1, True)
    for _ in range(FEW):
        rounds += [
            Round(shape, [row], 0.1, 1.0) for row in (right, wrong, nothing, right, right, wrong, nothing, right)
        ]
    brought = Starts(rounds).brought(shape)
    assert brought.empty == pytest.approx(2 / 8, abs=0.02) and brought.length == pytest.approx(12 / 8, abs=0.03)


def test_where_a_text_ends_nothing_goes_on() -> None:
    """The last round of one text and the first of another are no pair."""
    shape = parse_shape("chain1")
    right, wrong = Walked((0,), 0, False, 1, True), Walked((), 1, False, 1, True)
    text = [Round(shape, [row], 0.1, 1.0) for row in (right, right, wrong, wrong, right)]
    starts = Starts(*[text] * FEW)
    assert [row.emitted for row in starts.anew.rows] == [1, 2] * FEW
    assert [row.emitted for _, row in starts.going_on] == [2, 1] * FEW


def test_trees_cut_where_a_text_ends_are_not_those_that_could_not_be_filled() -> None:
    plain, deep = Round(OFF, [Walked((), 0, False, 0, True)], verify=1.0), parse_shape("chain8")
    cut, full = (Round(deep, [Walked((), 1, False, count, True)], 0.1, 1.0 + count) for count in (2, 8))
    found = Measured([plain] * 9 + [cut, full] * 9)
    assert found.verify(deep) == pytest.approx(found.passes(8))


@pytest.mark.parametrize("seldom", [0.02, 0.005])
def test_kinds_of_rounds_that_seldom_give_way_to_each_other_are_balanced(seldom: float) -> None:
    """Long copies, and as long stretches in which nothing is foretold: half of the rounds go on."""
    shape, count = parse_shape("chain1"), round(1 / seldom)
    right, wrong = Walked((0,), 0, False, 1, True), Walked((), 1, False, 1, True)
    rounds = [Round(shape, [row], 0.1, 1.0) for row in ([right] * count + [wrong] * count) * 20]
    assert Starts(rounds).brought(shape).length == pytest.approx(1.5, abs=0.02)


def test_leaves_that_only_rounds_which_go_on_reach_count_too() -> None:
    """Behind a failed draft the second child is right, behind a kept one often the path of first children."""
    shape, rounds = parse_shape("tree:0,0.0,0.0.0,1"), list[Round]()
    second, deep, wrong = (
        Walked(ranks, width, False, 4, True) for ranks, width in (((1,), 0), ((0, 0, 0), 0), ((), 2))
    )
    for _ in range(FEW):
        rounds += [Round(shape, [row], 0.1, 1.0) for row in (second, *[deep] * 5, wrong)]
    assert Starts(rounds).brought(shape).length == pytest.approx(23 / 7, rel=0.02)


def test_what_follows_a_plain_round_tells_nothing() -> None:
    """A text in which a rejection is followed by another, and everything else is easy: plain rounds land amid what is easy."""
    deep, rounds = parse_shape("chain8"), list[Round]()
    for _ in range(FEW):
        rounds += [Round(OFF, [Walked((), 0, False, 0, True)], verify=1.0)]
        rounds += [Round(deep, [Walked((0,) * 7, 1, False, 8, True)], 0.1, 1.0)]
        rounds += [Round(deep, [Walked((), 1, False, 8, True)], 0.1, 1.0)]
    assert Starts(rounds).brought(deep).length == 1.0


@pytest.mark.parametrize("row", [Walked((0, 0), 0, False, 2, True), Walked((0,), 1, False, 2, True)])
def test_a_single_kind_of_rounds_is_enough(row: Walked) -> None:
    shape = parse_shape("chain2")
    for count in (1, 2, 50):
        assert Starts([Round(shape, [row], 0.1, 1.0)] * count).brought(shape).length == pytest.approx(row.emitted)
    with pytest.raises(ValueError, match="no round"):
        Starts([Round(OFF, [Walked((), 0, False, 0, True)], verify=1.0)])


def test_a_proposal_has_a_price_of_its_own() -> None:
    """Half a unit for each, and a tenth for every level: what was not drafted lies between what was."""
    rounds = [Round(OFF, [Walked((), 0, False, 0, True)], verify=1.0)]
    for depth in (1, 2, 4, 8):
        row = Walked((), 1, False, depth, True)
        rounds += [Round(parse_shape(depth), [row], 0.5 + 0.1 * depth, 1.0)] * 3
    found = Measured(rounds)
    assert found.levels(6) == pytest.approx(1.1) and found.levels(15) == pytest.approx(2.0)
    assert found.level == pytest.approx(1.3 / 8)


def test_trees_are_filled_as_trees_were_and_chains_as_chains_were() -> None:
    """Lookups have one continuation, whatever the shape asks for, and passes get dear behind four nodes."""
    tree, rounds = parse_shape("2x2x1"), [Round(OFF, [Walked((), 0, False, 0, True)], verify=1.0)] * 9
    for drafted in (1, 2, 3, 4):
        chain = parse_shape(drafted)
        rounds += [Round(chain, [Walked((), 1, False, drafted, True)], 0.1, 1.0 + 0.1 * drafted)] * 9
    rounds += [Round(tree, [Walked((), 1, False, 3, False)], 0.1, 1.3)] * 9
    rounds += [Round(tree, [Walked((), 1, False, 10, True)], 0.1, 5.0)] * 9
    found = Measured(rounds)
    assert found.verify(parse_shape("chain3")) == pytest.approx(1.3)
    assert found.verify(tree) == pytest.approx((1.3 + 5.0) / 2)
    # three of its nodes lie down the first children: these alone, or all five
    other = parse_shape("tree:0,0.0,0.0.0,1,1.0")
    assert found.verify(other) == pytest.approx((1.3 + found.passes(5)) / 2)


def test_a_level_of_several_children_is_no_chain() -> None:
    rounds = [Round(OFF, [Walked((), 0, False, 0, True)], verify=1.0)] * 3
    for name in ("chain1", "4", "3x1"):
        shape = parse_shape((4,) if name == "4" else name)
        rounds += [Round(shape, [Walked((), 1, False, shape.nodes, True)], 0.2 * shape.feeds, 1.0)] * 3
    found = Measured(rounds)
    assert found.levels(1) == pytest.approx(0.2) and found.feed == pytest.approx(0.2)
