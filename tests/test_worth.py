"""What the next node is worth, and what the next row costs: how large a tree should be."""

from __future__ import annotations

import random
from typing import Any

import pytest

from families import tiny
from helpers import NEW, PROMPT, expected, lm
from outrider.api import Engine
from outrider.clocks import Clocks
from outrider.controller import Fixed
from outrider.counterfactual import Counterfactual
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.catalog import BUDGETS, learned_arms
from outrider.drafters.merged import MergedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.options import Options
from outrider.rounds import Round, Walked
from outrider.tree import OFF, parse_shape
from outrider.verify import Draft
from outrider.worth import Copies, Instead, Worth, totals


def watched(drafter: Any, drafts: list[Draft]) -> Any:
    """A drafter whose drafts are written down."""

    class Watched:
        name = "watched"

        def begin(self, *given: Any, **named: Any) -> Any:
            state = drafter.begin(*given, **named)
            propose = state.propose

            def told(*asked: Any) -> Any:
                drafts.extend(made := propose(*asked))
                return made

            state.propose = told
            return state

    return Watched()


# ---- nodes -----------------------------------------------------------------------------------------------------------


def test_a_large_tree_tells_what_every_smaller_one_would_have_brought() -> None:
    chance, large, small = random.Random(0), Worth(8), Worth(8)
    for _ in range(500):
        kept = [chance.random() < 0.5 / (place + 1) for place in range(8)]
        large.see(kept, 8)
        small.see(kept[:3], 3)
    assert large.chances()[:3] == small.chances()[:3]
    told = [kept for _, kept in large.chances()]
    assert told[:4] == pytest.approx([0.5, 0.25, 0.167, 0.125], abs=0.04)


def test_what_was_never_asked_for_is_nearly_as_good_as_what_comes_before_it() -> None:
    worth = Worth(6)
    for _ in range(100):
        worth.see([True, False], 2)
    (_, first), (_, second), (_, third), *_ = worth.chances()
    assert first > 0.95 and second < 0.1 and 0.5 * second < third < second


def test_nodes_that_are_not_there_cost_nothing_and_bring_nothing() -> None:
    """A drafter that stops after two nodes of six takes the passes of two."""
    worth = Worth(6)
    for _ in range(1000):
        worth.see([True, True], 6)
    tokens, seconds = zip(*totals(worth.chances(), lambda nodes: 1.0 + nodes))
    assert tokens[6] == pytest.approx(tokens[2], abs=0.05) == pytest.approx(2.0, abs=0.05)
    assert seconds[6] == pytest.approx(seconds[2], abs=0.05) == pytest.approx(3.0, abs=0.05)


# ---- lookups ---------------------------------------------------------------------------------------------------------


def looked_up(chances: list[float], lookups: int, depth: int) -> Copies:
    """Lookups of one depth, each token of which is kept with a chance of its own where those before it are."""
    found, chance = Copies(len(chances)), random.Random(0)
    for _ in range(lookups):
        kept = next((place for place in range(depth) if chance.random() > chances[place]), depth)
        found.see(depth, kept)
    return found


def test_short_lookups_tell_of_the_tokens_that_they_reach() -> None:
    chances = [0.6, 0.8, 0.9, 0.7, 0.95, 0.95, 0.5, 0.5]
    deep, shallow = (looked_up(chances, 4000, depth).chances() for depth in (8, 4))
    assert deep == pytest.approx(chances, abs=0.05) and shallow[:4] == pytest.approx(chances[:4], abs=0.05)
    assert shallow[4:] == pytest.approx([shallow[3]] * 4), "what was not reached is as likely as what comes before it"


def test_a_lookup_that_ends_early_tells_nothing_of_what_is_behind_its_end() -> None:
    found = Copies(6)
    found.see(2, 2)
    found.see(5, 1)
    assert found.tries == [2, 2, 0, 0, 0, 0] and found.kept == [2, 1, 0, 0, 0, 0]


def test_expected_tokens_are_sums_over_all_that_must_be_kept() -> None:
    found = looked_up([0.5, 0.5, 0.5], 100_000, 3).tokens()
    assert found == pytest.approx([0.0, 0.5, 0.75, 0.875], abs=0.01)


def test_what_was_settled_is_expected_until_rounds_say_otherwise() -> None:
    found = looked_up([0.9, 0.2], 1000, 2)
    found.settle()
    assert found.tries == [0, 0] and found.chances() == pytest.approx([0.9, 0.2], abs=0.05)
    for _ in range(200):
        found.see(2, 0)
    assert found.chances()[0] < 0.1 and found.chances()[1] == pytest.approx(0.2, abs=0.05)


def test_what_was_hardly_seen_is_hardly_believed() -> None:
    """A prior without a single lookup of a kind leaves it as open as no prior does."""
    found, fresh = Copies(3), Copies(3)
    found.settle()
    for copies in (found, fresh):
        for _ in range(6):
            copies.see(3, 3)
    assert found.tokens()[3] > 0.75 * fresh.tokens()[3] and found.chances()[0] == pytest.approx(fresh.chances()[0])


def test_a_drafter_is_judged_where_it_drafts_instead_of_a_lookup() -> None:
    instead = Instead(2)
    assert instead.tokens(3.0) == [3.0, 3.0], "unseen, it brings what it brings elsewhere"
    for _ in range(1000):
        instead.see(0, 4)
        instead.see(1, 1)
        instead.see(2, 2)  # no lookup was found
    assert instead.tokens(3.0) == pytest.approx([4.0, 1.0], abs=0.05)
    instead.settle()
    average = (4 + 1 + 2) / 3
    assert instead.rounds == [0, 0, 0] and instead.tokens(6.0) == pytest.approx(
        [6.0 * 4 / average, 6.0 / average], rel=0.02
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def timed(seconds: dict[int, float], rounds: int = 40, plain: float = 1.0) -> Clocks:
    """Clocks that heard plain passes, and passes over trees of so many nodes."""
    clocks, shape = Clocks(), parse_shape("best31x8")
    clocks.hear(Round(OFF, [Walked((), 0, False, 0, True)], verify=plain))
    for _ in range(rounds):
        for nodes, spent in seconds.items():
            clocks.hear(Round(shape, [Walked((), 1, False, nodes, True, 2)], 0.1, spent))
    return clocks


def test_a_pass_costs_what_its_group_of_eight_rows_costs() -> None:
    """Within a group by the slope, from one to the next by the step, and unseen ones by the step of those that were seen."""
    clocks = timed({3: 1.13, 7: 1.17, 9: 1.69, 15: 1.75})
    verify = clocks.verify(1)
    assert [verify(nodes) for nodes in (1, 5, 8, 12)] == pytest.approx([1.11, 1.15, 1.68, 1.72], abs=0.02)
    assert verify(16) - verify(15) == pytest.approx(0.5, abs=0.06)


def test_groups_of_rows_that_nobody_saw_are_tried_one_by_one() -> None:
    """The next one looks cheap, so that it is tried; what lies behind it does not."""
    verify = timed({3: 1.1}).verify(1)
    assert verify(8) - verify(7) < 0.2
    assert verify(16) - verify(15) > 0.9


def test_a_step_that_was_seen_is_not_tried_again_and_again() -> None:
    """Once nine rows were timed, two hundred rounds with fewer do not make them look cheap again."""
    clocks = timed({3: 1.1, 9: 1.7})
    for _ in range(200):
        clocks.hear(Round(parse_shape("chain3"), [Walked((), 1, False, 3, True, 3)], 0.1, 1.1))
    assert clocks.verify(1)(9) == pytest.approx(1.7, abs=0.02)


def test_a_plain_round_takes_no_longer_than_a_tree() -> None:
    """The only plain round was stalled: what passes over trees took is closer to the truth."""
    assert timed({3: 1.1}, plain=4.0).plain == pytest.approx(1.1)
    assert timed({3: 1.1}, plain=1.0).plain == pytest.approx(1.0)


def test_one_stall_moves_a_group_no_further_than_three_of_its_passes() -> None:
    clocks = timed({3: 1.1})
    clocks.hear(Round(parse_shape("chain3"), [Walked((), 1, False, 3, True, 3)], 0.1, 500.0))
    assert clocks.verify(1)(3) < 1.3


def test_what_is_read_once_is_no_price_of_drafting() -> None:
    """A hundred plain rounds, then drafts: text far behind is read before the first one, and the controller is not told of it."""
    drafts, heard = list[Draft](), list[Round]()

    class Late:
        def choose(self) -> Any:
            return parse_shape("chain2") if len(heard) >= 100 else OFF

        def reward(self, done: Round) -> None:
            heard.append(done)

    made = Engine(tiny("llama"), None, "llama", watched(lm("llama", 1), drafts))
    result = made.generate(list(PROMPT), shape=Late(), max_new_tokens=110)
    assert [draft.reading > 0 for draft in drafts] == [True] + [False] * (len(drafts) - 1)
    assert drafts[0].fed is not None and drafts[0].fed <= 64 + 2
    told, spent = sum(done.draft for done in heard), result.stats.seconds["draft"]
    assert told == pytest.approx(spent - drafts[0].reading)


# ---- trees that grow best first --------------------------------------------------------------------------------------


def test_the_likeliest_path_is_one_piece() -> None:
    """First children lie right behind their parents: what is kept of them need not be moved."""
    found: list[Draft] = []
    made = Engine(tiny("llama"), None, "llama", watched(lm("llama", 1), found))
    for shape in ("3x2x2@0.001", "best9x4", "best9x4@0.01+0.05"):
        result = made.generate(list(PROMPT), shape=shape, max_new_tokens=NEW)
        assert result.token_ids == expected("llama", list(PROMPT), max_new_tokens=NEW)
    assert len(found) > 3
    for draft in found:
        tree = draft.tree
        for node, children in enumerate(tree.children):
            assert not children or children[0] == node + 1
        assert set(draft.beliefs) == set(range(1, len(tree)))
        assert all(draft.beliefs[node] <= draft.beliefs.get(tree.parents[node], 1.0) + 1e-9 for node in draft.beliefs)


def test_drafters_that_believe_get_trees_that_grow_best_first_and_others_fixed_ones() -> None:
    drafter = lm("llama", 1)
    assert [arm.budget for arm in learned_arms(drafter)] == list(BUDGETS)
    assert not any(arm.budget for arm in learned_arms(NgramDrafter()))
    both = MergedDrafter([NgramDrafter(), drafter])
    assert not any(arm.budget for arm in learned_arms(both))
    assert not any(arm.budget for arm in learned_arms(CascadeDrafter([NgramDrafter(), both])))
    assert all(arm.budget and arm.reach for arm in learned_arms(CascadeDrafter([NgramDrafter(), drafter])))


def test_greedy_and_drawn_texts_are_learned_apart() -> None:
    """What a drafter believes of its tokens is worth something else where the target draws them. Trees grow best first unless
    children must be draws themselves."""
    made = Engine(tiny("llama"), None, "llama", lm("llama", 1))
    greedy, drawn = (made.controller("auto", Options(temperature=heat)) for heat in (0.0, 0.8))
    assert greedy is not drawn and greedy is made.controller("auto", Options())
    assert isinstance(greedy, Counterfactual) and all(arm.budget for arm in greedy.arms)
    assert isinstance(drawn, Counterfactual) and all(arm.budget for arm in drawn.arms)
    assert made.controller("auto", Options(), Options(temperature=0.8)) is drawn, "one drawn row is enough"
    race = made.controller("auto", Options(temperature=0.8, rule="mss"))
    seeded = [Options(temperature=0.8, rule="mss"), Options(temperature=0.8, rule="mss", seed=5)]
    assert isinstance(made.controller("auto", *seeded), Fixed), "the text of a seed follows no clock"
    assert made.controller("auto", Options(rule="mss", seed=5)) is greedy, "greedy text does not depend on shapes"
    assert race not in (greedy, drawn)
    assert isinstance(race, Counterfactual) and not any(arm.budget for arm in race.arms)
