"""The controller that learns about every shape from every round: fast to find, fast to follow, cheap where nothing pays."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import Counter
from typing import Any

import pytest

from outrider.bench.regret import ARMS, Played, Seconds, Stream, compare, play, played, synthetic
from outrider.controller import Fixed
from outrider.counterfactual import Counterfactual
from outrider.rounds import Round, Walked
from outrider.tree import OFF, Shape, match_class, parse_shape

GOOD, MIDDLE, BAD = (0.8, 0.08, 0.03), (0.55, 0.15, 0.08), (0.05, 0.03, 0.02)
SHAPES = [parse_shape(arm) for arm in ARMS]
COSTLY = Seconds(level=0.3)


def run(*phases: tuple[int, tuple[float, ...]], seconds: Seconds, seed: int) -> Played:
    return play(Counterfactual(SHAPES), [synthetic(phases, seed)], seconds, seed)


def share(streams: list[Stream], seconds: Seconds, seed: int = 0) -> float:
    """The controller's speed as a share of the best fixed shape's, "off" among them."""
    return compare(streams, seconds, seed=seed).speed("counterfactual")


def rounds_after(done: Played, position: int) -> list[str]:
    """Shapes of the rounds that began at or after a position."""
    return [shape for at, shape in zip(done.positions, done.shapes) if at >= position]


@pytest.mark.parametrize("seed", range(8))
def test_when_drafts_stop_being_accepted_drafting_stops_within_thirty_rounds(seed: int) -> None:
    after = rounds_after(run((600, GOOD), (200, BAD), seconds=COSTLY, seed=seed), 600)
    assert Counter(after[30:])["off"] > 0.8 * len(after[30:])


@pytest.mark.parametrize("seed", range(8))
def test_when_drafts_begin_to_be_accepted_drafting_begins_within_thirty_rounds(seed: int) -> None:
    """The hard way round: while nothing is drafted, nothing is heard of acceptance but what exploring pays for."""
    after = rounds_after(run((400, BAD), (600, GOOD), seconds=COSTLY, seed=seed), 400)
    assert Counter(after[30:])["off"] < 0.2 * len(after[30:])


def test_deep_gives_way_to_wide_within_thirty_rounds() -> None:
    """Both phases pay, but not with the same shape: speed after 30 rounds is that of the phase's own best shape."""
    wide, seconds, shares = (0.35, 0.3, 0.2), Seconds(node=0.004, level=0.25), list[float]()
    for seed in range(6):
        done = run((900, (0.93,)), (900, wide), seconds=seconds, seed=seed)
        start = next(i for i, at in enumerate(done.positions) if at >= 900) + 30
        mine = (done.tokens - done.positions[start]) / (done.total - done.seconds[start])
        rest = [synthetic([(900, wide)], seed + 100)]
        best = max(p.tokens / p.total for p in (play(Fixed(s), rest, seconds) for s in SHAPES))
        shares.append(mine / best)
    assert statistics.fmean(shares) > 0.97 and min(shares) > 0.8


@pytest.mark.parametrize(
    ("name", "law", "seconds"),
    [
        ("a drafter that is always wrong", (0.0,), Seconds()),
        ("always wrong and nearly free", (0.0,), Seconds(level=0.005)),
        ("right, but as slow as the target", GOOD, Seconds(level=1.0)),
        ("right, and far too slow", GOOD, Seconds(level=6.0)),
        ("random text", BAD, Seconds()),
    ],
)
def test_a_drafter_that_does_not_pay_costs_three_percent_at_most(name: str, law: Any, seconds: Seconds) -> None:
    """ "Slower than without" is the most frequent complaint about speculation: 256 tokens from a cold start, five times."""
    for seed in range(5):
        stream = [synthetic([(256, law)], seed)]
        assert compare(stream, seconds, seed=seed).best_fixed == "off"
        assert share(stream, seconds, seed) > 0.97 - 0.005, (name, seed)


@pytest.mark.parametrize(
    ("law", "seconds"), [(GOOD, Seconds()), (MIDDLE, COSTLY), (GOOD, Seconds(level=0.01, node=0.003))]
)
def test_it_comes_close_to_the_best_fixed_shape_or_passes_it(law: Any, seconds: Seconds) -> None:
    assert share([synthetic([(3000, law)])], seconds) > 0.97


def test_it_beats_every_fixed_shape_and_every_bandit_where_the_text_changes() -> None:
    stream = [synthetic([(600, GOOD), (600, BAD)] * 2)]
    found = compare(stream, COSTLY)
    mine = found.speed("counterfactual")
    assert mine > 1.0
    assert all(mine > found.speed(other) for other in found.played if other != "counterfactual")


def test_a_tree_that_was_no_arm_is_grown_when_it_is_faster() -> None:
    seconds = Seconds(node=0.04, level=0.2)
    controller = Counterfactual([parse_shape("chain1"), parse_shape("3x2x1x1")])
    done = play(controller, [synthetic([(3000, (0.5, 0.3, 0.1))])], seconds)
    late = Counter(rounds_after(done, 1500))
    assert sum(count for name, count in late.items() if name.startswith("tree:")) > 0.5 * sum(late.values())


def test_the_first_round_is_plain_and_the_first_draft_is_small() -> None:
    controller = Counterfactual(SHAPES)
    assert controller.choose() == OFF
    controller.reward(Round(OFF, [Walked((), 0, False, 0, True)], verify=1.0))
    assert controller.choose().depth == 1
    assert Counterfactual([]).choose() == OFF


def test_rounds_that_draft_nothing_are_counted_as_such() -> None:
    """Prompt lookup mostly finds nothing; that is no reason to give it up: looking costs nothing, and what it finds is long."""
    chance, walks = random.Random(0), []
    while len(walks) < 3000:
        found = chance.random() < 0.25
        walks += [Walked((0,) * 15, 1, False, 15, True) if found else Walked((), 0, True, 0, False)] * 4
    arms = [parse_shape(text) for text in ("chain4", "chain10", "chain15")]
    done = play(Counterfactual(arms), [Stream(walks)], Seconds(level=0.002, node=0.01))
    assert Counter(done.shapes)["off"] < 0.1 * len(done.shapes)
    assert Counter(done.shapes).most_common(1)[0][0] in ("chain10", "chain15")


def test_one_stall_of_the_machine_changes_nothing() -> None:
    controller = Counterfactual(SHAPES)
    play(controller, [synthetic([(600, GOOD)])], Seconds())
    before = controller.choose()
    controller.reward(Round(before, [Walked((), 1, False, before.nodes, True)], 5.0, 50.0))
    assert Counter(play(controller, [synthetic([(200, GOOD)], 5)], Seconds()).shapes)["off"] < 5


def test_it_takes_batches() -> None:
    """Speculation pays for one row; for eight, each further node costs as much as eight."""
    chosen = _batches([(300, 1), (300, 8)])
    assert Counter(chosen[:300])["off"] < 45, (
        "a tenth is gained: plain rounds, which cost little, are compared with now and then"
    )
    late = Counter(chosen[-200:])
    assert late["off"] + late["chain1"] > 185


def test_it_remembers_what_pays_for_each_size_of_batch() -> None:
    """A server's batches grow and shrink: the clock of eight rows must not be taken for that of one."""
    chosen = _batches([(100, 1), (100, 8)] * 5)
    small, large = ([chosen[200 * i + first : 200 * i + first + 100] for i in range(2, 5)] for first in (0, 100))
    assert all(Counter(part[5:])["off"] < 15 for part in small)
    assert all(Counter(part[5:])["off"] + Counter(part[5:])["chain1"] > 80 for part in large)


def _batches(phases: list[tuple[int, int]]) -> list[str]:
    """Shapes chosen over phases of (rounds, rows), where passes take longer with every node of every row."""
    controller, texts, chosen = Counterfactual(SHAPES), synthetic([(20_000, GOOD)]).walks, list[str]()
    for count, rows in phases:
        for _ in range(count):
            shape = controller.choose()
            walks = [played(shape, texts[8 * len(chosen) + row]) for row in range(rows)]
            chosen.append(shape.name)
            controller.reward(Round(shape, walks, 0.1 * shape.depth, 0.3 + 0.06 * rows * (1 + shape.nodes)))
    return chosen


# -- trees that grow best first ----------------------------------------------------------------------------------------

WORTH = (0.66, 0.4, 0.27, 0.2, 0.15, 0.12, 0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.05, 0.04, 0.04)  # of the i-th best node
BUDGETS = [parse_shape(f"best{nodes}x8") for nodes in (1, 3, 7, 11, 15)]


def grown(controller: Counterfactual, seconds: Any, rounds: int, seed: int, draft: float = 0.4) -> Counter[str]:
    """Shapes of the last half of rounds in which the i-th best node is kept with chance WORTH[i]; a pass over n nodes takes
    `seconds(n)`, drafting `draft`."""
    chance, shapes = random.Random(seed), Counter[str]()
    for number in range(rounds):
        shape = controller.choose()
        kept = [chance.random() < worth for worth in WORTH[: shape.nodes]]
        beliefs = [(1.0 / (place + 2), right) for place, right in enumerate(kept)]
        row = Walked((0,) * sum(kept), 1, False, shape.nodes, True, 4, False, 8, beliefs)
        controller.reward(Round(shape, [row], draft if shape.depth else 0.0, seconds(shape.nodes)))
        shapes[shape.name] += number >= rounds // 2
    return +shapes


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_as_large_as_the_step_of_a_pass_that_pays(seed: int) -> None:
    """Where the ninth row costs half a pass, trees end at seven nodes; where rows cost the same, they go on."""
    steps = grown(Counterfactual(BUDGETS), lambda nodes: 1.0 + 0.01 * nodes + 0.5 * (nodes // 8), 300, seed)
    assert steps["best7x8"] > 0.8 * steps.total()
    even = grown(Counterfactual(BUDGETS), lambda nodes: 1.0 + 0.01 * nodes, 300, seed)
    assert even["best11x8"] + even["best15x8"] > 0.8 * even.total()
    dear = grown(Counterfactual(BUDGETS), lambda nodes: 1.0 + 0.15 * nodes, 300, seed, 0.1)
    assert dear["best3x8"] + dear["best1x8"] > 0.8 * dear.total()


class Copying:
    """A text that repeats stretches of itself: lookups after matches of two tokens go on with a chance of `first`, those in a
    stretch with one of `lasting`; the drafter behind them brings `brings` tokens a round."""

    def __init__(self, first: float, lasting: float, brings: int = 2, node: float = 0.01) -> None:
        self.controller = Counterfactual([shape.adapting(0.05, 15) for shape in BUDGETS])
        self.first, self.lasting, self.brings, self.node = first, lasting, brings, node
        self.chance, self.matched = random.Random(0), 0

    def rounds(self, count: int) -> None:
        for _ in range(count):
            shape = self.controller.choose()
            self.matched = self.matched or 2 * (self.chance.random() < 0.5)
            copied, lasting = 0, self.first if self.matched < 3 else self.lasting
            while self.matched and copied < 31 and self.chance.random() < lasting:
                copied, lasting = copied + 1, self.lasting
            depth = (
                (shape.trust[match_class(self.matched)] if shape.trust else 15) if self.matched and shape.depth else 0
            )
            row = self._row(shape, depth, copied)
            time = 1.0 + self.node * row.drafted + 0.5 * (row.drafted // 8)
            self.controller.reward(Round(shape, [row], 0.2 if shape.depth and not depth else 0.0, time))
            stopped = copied < row.emitted
            self.matched = 0 if stopped or not self.matched else min(self.matched + row.emitted, 24)

    def _row(self, shape: Shape, depth: int, copied: int) -> Walked:
        kept = min(copied, depth)
        if depth:
            return Walked((0,) * kept, kept < depth, False, depth, True, beyond=True, matched=self.matched)
        nodes, accepted = shape.nodes, min(self.brings - 1, shape.nodes)
        unused = (accepted + 1, min(copied, accepted + 1)) if self.matched else (0, 0)
        beliefs = [(0.9 / (place + 1), place < accepted) for place in range(nodes)]
        return Walked((0,) * accepted, 1, False, nodes, True, 2, True, 4, beliefs, matched=self.matched, unused=unused)

    @property
    def trust(self) -> tuple[int, ...]:
        return self.controller.chosen.trust


def test_lookups_go_as_deep_as_the_step_of_a_pass_that_pays() -> None:
    """The longer the match, the deeper: as far as what they copy takes less time than the next lookup would."""
    lasting, ending = Copying(0.9, 0.99), Copying(0.9, 0.8)
    for text in (lasting, ending):
        text.rounds(400)
    assert lasting.trust[-1] == 15 and 5 <= ending.trust[-1] <= 7
    dear = Copying(0.9, 0.8, node=0.2)
    dear.rounds(400)
    assert dear.trust[-1] < 5


def test_lookups_may_go_deeper_than_is_counted() -> None:
    text = Copying(0.9, 0.99)
    text.controller = Counterfactual([shape.adapting(0.05, 24) for shape in BUDGETS])
    text.rounds(200)
    assert text.controller.chosen.reach == 24 and 7 <= text.trust[-1] <= 16


def test_lookups_are_left_out_where_the_drafter_behind_them_brings_more_and_come_back() -> None:
    """A lookup that is not drafted is compared with what was written instead of it."""
    text = Copying(0.2, 0.98, brings=4)
    text.rounds(200)
    assert text.trust[match_class(2)] == 0 and text.trust[-1] >= 7
    text.first = 0.98
    text.rounds(200)
    assert text.trust[match_class(2)] > 0, "nobody drafted one in between"


@pytest.mark.parametrize("first", [0.01, 0.04])
@pytest.mark.parametrize("seed", range(6))
def test_stalls_are_no_gain_of_drafting(first: float, seed: int) -> None:
    """Plain rounds that the machine stalls, the very first one too, do not make drafts look cheap that are always wrong: what
    these really take stays within what drafting may lose."""
    controller, chance, lost = Counterfactual(BUDGETS), random.Random(seed), 0.0
    for number in range(256):
        shape, stalled = controller.choose(), first if not number else 0.04 * (chance.random() < 0.08)
        more = 0.0
        if shape.depth:
            more = chance.choice(
                [0.0003, 0.0025]
            )  # what is looked up costs next to nothing, what a model drafts does not
            lost += more
        row = Walked((), 1, False, shape.nodes, True, 2, False, 4, [(0.6, False)] * shape.nodes)
        noise = math.exp(chance.gauss(0.0, 0.03))
        controller.reward(Round(shape, [row], more * noise, 0.01 * noise + stalled))
    assert lost < 0.026 * 256 * 0.01


def test_plain_rounds_are_timed_again_while_drafting_pays() -> None:
    """The less drafting gains, the more often it is compared; where it gains much, hardly ever."""
    seldom = play(Counterfactual(SHAPES), [synthetic([(2000, (0.95,))])], Seconds(level=0.02))
    often = play(Counterfactual(SHAPES), [synthetic([(2000, (0.4,))])], Seconds(level=0.2))
    assert Counter(seldom.shapes)["off"] < 0.02 * len(seldom.shapes)
    assert 0.03 * len(often.shapes) < Counter(often.shapes)["off"]


def test_weights_stay_finite_over_a_long_run() -> None:
    controller = Counterfactual(SHAPES)
    play(controller, [synthetic([(400, GOOD), (400, BAD)] * 8)], Seconds())
    assert max(controller.unit, controller.clocks.unit) <= 1e10
    json.dumps(controller.state(), allow_nan=False)


def test_the_controller_costs_microseconds_a_round() -> None:
    """Some 40 on the machine it was written on; processor time, best of five, with room for slow machines."""
    controller, walks = Counterfactual(SHAPES), synthetic([(200, GOOD)], 1).walks
    play(controller, [synthetic([(500, GOOD)])], Seconds())
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for walk in walks:
            shape = controller.choose()
            controller.reward(Round(shape, [played(shape, walk)], 0.2, 1.0))
        best = min(best, (time.process_time() - start) / len(walks))
    assert best < 200e-6


# -- state -------------------------------------------------------------------------------------------------------------


def test_what_was_learned_is_the_first_choice_of_the_next_process() -> None:
    first = Counterfactual(SHAPES)
    play(first, [synthetic([(1500, GOOD)])], COSTLY)
    state = json.loads(json.dumps(first.state()))
    second = Counterfactual(SHAPES)
    second.restore(state)
    done = play(second, [synthetic([(300, GOOD)], 9)], COSTLY)
    assert Counter(done.shapes)["off"] < 8 and done.shapes[0] != "off"
    hopeless = Counterfactual(SHAPES)
    play(hopeless, [synthetic([(600, BAD)])], COSTLY)
    third = Counterfactual(SHAPES)
    third.restore(hopeless.state())
    assert play(third, [synthetic([(60, BAD)], 9)], COSTLY).shapes[0] == "off"


CLOCKS: dict[str, tuple[str, int, list[float]]] = {  # from a place of a list on
    "no plain": ("rounds", 1, [0.0]),
    "no time to speak of": ("rounds", 0, [5e-324, 1e18]),
    "more rounds without a draft than rounds": ("rounds", 2, [1.0, 3.0]),
    "passes of less than a row": ("passes", 8, [1e-3]),
    "drafts of nothing that took time": ("drafts", 1, [0.0, 0.0, 0.0, 0.0, 200.0]),
}


@pytest.mark.parametrize(
    "damage", ["missing", "text", "negative", "nan", "short", "more hits than tries", "no clocks", *CLOCKS]
)
def test_a_state_that_is_none_is_refused_and_nothing_is_changed(damage: str) -> None:
    source = Counterfactual(SHAPES)
    play(source, [synthetic([(300, GOOD)])], Seconds())
    state = source.state()
    if damage == "missing":
        del state["clocks"]["passes"]
    elif damage == "text":
        state["clocks"]["rounds"] = "0.1"
    elif damage == "negative":
        state["clocks"]["rounds"][0] = -1.0
    elif damage == "nan":
        state["clocks"]["drafts"][0] = float("nan")
    elif damage == "short":
        state["counts"]["hits.3"] = [1.0]
    elif damage == "more hits than tries":
        state["counts"]["hits.0"][0] = state["counts"]["tries.0"][0] + 5
    elif damage == "no clocks":
        state["clocks"] = None
    else:
        name, place, values = CLOCKS[damage]
        state["clocks"][name][place : place + len(values)] = values
    fresh = Counterfactual(SHAPES)
    before = json.dumps(fresh.state())
    with pytest.raises(ValueError, match=r"list|number|table|fit"):
        fresh.restore(state)
    assert json.dumps(fresh.state()) == before
    assert fresh.choose() == OFF
