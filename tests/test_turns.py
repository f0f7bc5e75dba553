"""Speeds are compared rightly on machines that drift and stall: clocks here are made up, and the truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench_fakes import Clock
from families import tiny
from helpers import PROMPT, lm
from outrider.api import Engine
from outrider.bench.turns import TURN, Heard, Text, Timed, Turns, Written, take_turns, without_stalls
from outrider.controller import Fixed
from outrider.rounds import Round, Walked
from outrider.tree import parse_shape

TOKENS = 96
Machine = Callable[[float], float]  # how much longer everything takes at a time


def steady(now: float) -> float:
    """A machine that is always as fast."""
    return 1.0


def drifting(now: float) -> float:
    """Half as fast again and back within a minute, and slower by the hour."""
    return 1.0 + 0.25 * math.sin(now / 8.0) + now / 600.0


class Bench:
    """Methods with known prices write texts on a made-up machine.

    Args:
        stalls: share of rounds that take 50 ms more.
    """

    def __init__(self, machine: Machine, noise: float = 0.03, stalls: float = 0.0, seed: int = 0) -> None:
        self.machine, self.noise, self.stalls = machine, noise, stalls
        self.clock, self.chance, self.order = Clock(), random.Random(seed), list[str]()

    def text(self, name: str, seconds: float, accepted: tuple[int, ...] = (1, 2, 3, 4)) -> Text:
        heard = Heard(Fixed(parse_shape("chain4")))

        def pieces() -> Iterator[int]:
            self.clock.now += 0.2 * self.machine(self.clock.now)  # the prompt
            left = TOKENS
            while left:
                spent = seconds * self.machine(self.clock.now) * math.exp(self.chance.gauss(0, self.noise))
                spent += 0.05 * (self.chance.random() < self.stalls)
                self.clock.now += spent
                self.order.append(name)
                heard.reward(Round(heard.choose(), [Walked((0,), 1, False, 4, True)], verify=spent))
                for _ in range(min(left, self.chance.choice(accepted))):
                    left -= 1
                    yield left
            return SimpleNamespace(stats=SimpleNamespace(seconds={"prefill": 0.2}), token_ids=[0] * TOKENS)

        return Text(pieces(), heard)

    def run(self, prices: dict[str, float], texts: int = 24, **more: Any) -> Turns:
        begin = {name: lambda name=name: self.text(name, prices[name], **more) for name in prices}
        return Turns([take_turns("task", begin, TOKENS, self.chance, self.clock) for _ in range(texts)])


@pytest.mark.parametrize("machine", [steady, drifting])
@pytest.mark.parametrize("stalls", [0.0, 0.03])
@pytest.mark.parametrize(("price", "wanted"), [(0.012, 1.0), (0.012 / 0.95, 0.95)])
def test_drift_and_stalls_do_not_decide(machine: Machine, stalls: float, price: float, wanted: float) -> None:
    """Equal methods are found equal, and one that is 5 % slower 5 % slower, within half a per cent in the mean of four runs."""
    prices = {"plain": 0.012, "auto": price}
    found = [
        Bench(machine, stalls=stalls, seed=seed).run(prices, accepted=(2,)).ratio("auto", ["plain"])
        for seed in range(4)
    ]
    assert sum(one.value for one in found) / 4 == pytest.approx(wanted, abs=0.005)
    assert all(one.low < one.value < one.high and one.high - one.low < 0.03 for one in found)


def test_one_method_after_the_other_would_have_been_deceived() -> None:
    """The same drift, whole texts: so the test above can fail."""
    bench = Bench(drifting)
    seconds = []
    for name in ("plain", "auto"):
        before = bench.clock.now
        for _ in range(12):
            take_turns("task", {name: lambda: bench.text("one", 0.012, (2,))}, TOKENS, bench.chance, bench.clock)
        seconds.append(bench.clock.now - before)
    assert abs(seconds[0] / seconds[1] - 1.0) > 0.05


def test_the_interval_is_honest() -> None:
    """What a method is worth differs from stretch to stretch: of forty intervals at least thirty-three hold the truth."""
    held = 0
    for seed in range(40):
        found = Bench(drifting, stalls=0.02, seed=seed).run({"plain": 0.012, "auto": 0.012}, texts=8)
        one = found.ratio("auto", ["plain"])
        held += one.low <= 1.0 <= one.high
        assert one.high - one.low < 0.25
    assert held >= 33


def test_a_text_that_is_played_again_says_nothing_new_of_other_texts() -> None:
    """Four more plays of the same texts leave the interval as wide as it was, where four times as many texts halve it."""

    def width(written: list[Written]) -> float:
        found = Turns(written).ratio("auto", ["plain"])
        return found.high - found.low

    bench = Bench(steady, noise=0.0)
    begin = {name: lambda name=name: bench.text(name, 0.012) for name in ("plain", "auto")}
    texts = [take_turns("task", begin, TOKENS, bench.chance, bench.clock) for _ in range(40)]
    once = [replace(one, text=number) for number, one in enumerate(texts[:10])]
    assert width(once * 4) == pytest.approx(width(once), rel=0.15)
    assert width(texts) < 0.7 * width(once)


def test_a_single_stretch_has_no_interval() -> None:
    lap = [Timed(1, 0.01, 0.01, "round") for _ in range(TURN)]
    found = Turns([Written("task", {"plain": lap, "auto": lap}, {}, 0)] * 3).ratio("auto", ["plain"])
    assert found.to_json() == {"value": 1.0, "interval": None} and "too little text" in str(found)


def test_the_luckiest_of_many_equal_shapes_is_not_flattered() -> None:
    prices = {"auto": 0.012, **{f"shape{i}": 0.012 for i in range(10)}}
    fitted, flattered = [], []
    for seed in range(12):
        turns = Bench(steady, seed=seed).run(prices, texts=6)
        others = [name for name in prices if name != "auto"]
        fitted.append(turns.ratio("auto", others).value)
        flattered.append(turns.speed("auto") / max(turns.speed(name) for name in others))
    assert sum(fitted) / 12 == pytest.approx(1.0, abs=0.02)
    assert sum(flattered) / 12 < 0.96


def test_a_shape_that_is_really_faster_is_picked_and_counts_in_full() -> None:
    turns = Bench(drifting).run({"auto": 0.012, "slow": 0.02, "fast": 0.010, "plain": 0.015}, accepted=(3,))
    assert turns.ratio("auto", ["slow", "fast", "plain"]).value == pytest.approx(10 / 12, abs=0.01)
    assert turns.room(["slow", "fast", "plain"]).value == pytest.approx(1.0, abs=0.01)


def test_room_is_what_the_best_of_each_task_would_bring() -> None:
    bench, texts = Bench(steady, noise=0.0), list[Written]()
    for task, prices in (("a", {"x": 0.01, "y": 0.02}), ("b", {"x": 0.02, "y": 0.01})):
        for _ in range(2):
            begin = {n: lambda n=n, p=p: bench.text(n, p, (2,)) for n, p in prices.items()}
            texts.append(take_turns(task, begin, TOKENS, bench.chance, bench.clock))
    turns = Turns(texts)
    assert turns.room(["x", "y"]).value == pytest.approx(1.5)
    assert turns.room(["x", "y"], prompts=True).value == pytest.approx(1.5)
    assert turns.speed("x", "a") == pytest.approx(200.0) and turns.speed("x") == pytest.approx(2 * 200 / 3)


def test_stalls_are_taken_out_and_told() -> None:
    bench = Bench(steady, noise=0.0, stalls=0.05)
    turns = bench.run({"plain": 0.012}, accepted=(1,))
    assert turns.speed("plain") == pytest.approx(1 / 0.012, rel=1e-3)
    assert 0.05 < turns.stalled < 0.3


def test_few_rounds_of_a_kind_are_left_as_they_are() -> None:
    """What is rare has nothing to be compared with: a first trial of a slow drafter is not a stall."""
    usual, rare = [Timed(1, 0.01, 0.01, "usual")] * 10, Timed(1, 5.0, 5.0, "rare")
    ((found,),), gone = without_stalls([[[*usual, rare]]])
    assert found == pytest.approx((11, 5.1)) and gone == pytest.approx(0.0)


def test_stretches_in_which_the_machine_was_taken_away_count_for_nobody() -> None:
    """Another process is at work for a third of the time, and all is ten times as slow: speeds and ratios stay the same."""

    def taken(now: float) -> float:
        return 10.0 if 20.0 < now % 60.0 < 40.0 else 1.0

    turns = Bench(taken, noise=0.0).run({"plain": 0.01, "auto": 0.0125}, accepted=(2,))
    assert turns.speed("plain") == pytest.approx(200, rel=0.02)
    assert turns.ratio("auto", ["plain"]).value == pytest.approx(0.8, abs=0.005)
    assert turns.stalled > 0.2


def test_methods_take_turns_within_a_text_in_changing_order() -> None:
    bench = Bench(steady)
    bench.run({"a": 0.01, "b": 0.01, "c": 0.01}, texts=6, accepted=(4,))
    turns = [bench.order[i] for i in range(0, len(bench.order), TURN // 4)]
    laps = {tuple(turns[i : i + 3]) for i in range(0, len(turns), 3)}
    assert all(sorted(lap) == ["a", "b", "c"] for lap in laps) and len(laps) >= 5


def test_real_texts_are_whole_and_the_same_and_the_prompt_is_left_out() -> None:
    made, chance = Engine(tiny("llama"), None, "llama", lm("llama", 1)), random.Random(0)
    alone = made.generate(PROMPT, shape="off", max_new_tokens=40).token_ids

    def begin(shape: str, read: bool) -> Text:
        heard = Heard(made.controller(shape))
        return Text(made.stream(PROMPT, shape=heard, max_new_tokens=40), heard, read)

    shapes = {"off": False, "auto": False, "chain3": True, "best7": False}
    written = take_turns("t", {s: lambda s=s: begin(s, shapes[s]) for s in shapes}, 40, chance)
    for shape in shapes:
        result, rounds = written.results[shape], written.rounds[shape]
        assert result.token_ids == alone and sum(done.tokens for done in rounds) == 40
        assert len(rounds) == result.stats.rounds
        spent, told = sum(done.seconds for done in rounds), result.stats.seconds
        rounded = sum(told[phase] for phase in ("draft", "verify", "commit"))
        assert spent >= rounded + told["prefill"] * shapes[shape]


def test_a_machine_that_is_away_all_the_time_still_gives_a_ratio() -> None:
    quick, slow = Timed(1, 0.010, 0.010, "round"), Timed(1, 0.030, 0.030, "round")
    # most rounds are quick, yet in every stretch both methods have slow ones
    lap = [quick] * 9 + [slow] * 7
    written = Written("task", {"plain": [*lap, *lap], "auto": [*lap, *lap]}, {})
    turns = Turns([written, written])
    assert turns.ratio("auto", ["plain"]).value == pytest.approx(1.0)
    assert 0.0 < turns.speed("plain") < 100.0
