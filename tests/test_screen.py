"""A screened vocabulary head finds what all logits would have shown, bit for bit, and whoever asks for logits gets them all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import outrider
from families import tiny
from helpers import PROMPT, PROMPTS
from native_kernels import needs_kernels
from outrider import doctor, noise
from outrider.api import Engine
from outrider.models import native, screened
from outrider.models.native import NativeTreeModel
from outrider.native import screen as module
from outrider.native.layout import Layout, LinearStructure
from outrider.native.linear import RowProduct
from outrider.native.screen import Screen, Screened
from test_streaming import streamed

TEMPERATURES = (0.1, 0.7, 1.0, 2.0)
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True, scope="module")
def bytes_everywhere() -> Iterator[None]:
    """Whatever the CPU, since every CPU computes the same."""
    needs_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "multiplies_bytes", lambda: True)
        yield


def screen_of(weight: Tensor) -> Screen:
    layout = Layout([weight])
    screen = Screen(weight, layout.linear(weight))
    vars(screen)["kept"] = layout
    return screen


def wrong(screen: Screen, weight: Tensor, x: Tensor, temperatures: tuple[float, ...] = TEMPERATURES) -> int:
    """How many answers differ from those of all logits."""
    logits = RowProduct([weight], [None], laid=True)(x)
    assert torch.equal(screen.logits(x), logits)
    bounds, noise_V = screen.bounds(x), noise.gumbel(3, 0, 0, len(weight))
    count = sum(pair != expected for pair, expected in zip(zip(*screen.highest(x)), truth(logits)))
    for temperature in temperatures:
        expected = truth(logits.float() / temperature + noise_V)
        found = [screen.drawn(*row, temperature, noise_V) for row in zip(x, bounds)]
        count += sum(one != other for one, other in zip(found, expected))
    return count


def truth(scores: Tensor) -> list[tuple[int, float]]:
    """The first place of the highest number, and that."""
    values = scores.float().amax(-1, keepdim=True)
    return list(zip((scores.float() == values).int().argmax(-1).tolist(), values[:, 0].tolist()))


# ---- what weights and rows may be ------------------------------------------------------------------------------------


def _one_big(x: Tensor) -> Tensor:
    x[:, 1] *= 300.0
    return x


def _few(x: Tensor) -> Tensor:
    return x[torch.randint(0, min(3, len(x)), (len(x),))]


def _tiny_steps(x: Tensor) -> Tensor:
    return x[:1] * (1 + 2.0**-7 * torch.randint(0, 2, x.shape))


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "one big number": _one_big,
    "few different rows": _few,
    "rows that hardly differ": _tiny_steps,
    "zeros": torch.zeros_like,
    "zeros among others": lambda x: x * torch.randint(0, 2, (len(x), 1)),
    "whole numbers": lambda x: x.round(),
    "norms far apart": lambda x: x * 10.0 ** torch.linspace(-6, 6, len(x))[:, None],
    "huge": lambda x: x * 1e9,
    "small": lambda x: x * 1e-18,
    "subnormal": lambda x: x * 1e-39,
}


@given(
    kinds=st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS))),
    sizes=st.tuples(st.sampled_from([16, 17, 48, 49, 111, 330]), st.sampled_from([4, 36, 64, 200])),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_the_highest_score_has_the_place_and_the_bits_that_all_logits_give(
    kinds: tuple[str, str], sizes: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = (KINDS[kind](torch.randn(n, sizes[1])).to(dtype) for kind, n in zip(kinds, (sizes[0], 9)))
    screen = screen_of(weight)
    assert wrong(screen, weight, x) == 0
    assert bool((screen.bounds(x) >= screen.logits(x)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_many_outputs_and_rows_are_searched_by_any_number_of_threads(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(10_007, 64).to(dtype), torch.randn(130, 64).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert wrong(screen_of(weight), weight, x, (0.7,)) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [(0, 299), (5, 250), (47, 48), (130, 131)])
def test_of_equal_scores_the_lowest_token_is_told(dtype: torch.dtype, places: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(300, 64), torch.randn(4, 64)
    weight[list(places)] = 3 * x[0] / x[0].norm() * 8
    weight, x = weight.to(dtype), x.to(dtype)
    screen = screen_of(weight)
    assert screen.highest(x[:1])[0] == [places[0]]
    zeros, flat = torch.zeros_like(x[0]), torch.zeros(300)
    assert screen.drawn(zeros, screen.bounds(zeros[None])[0], 1.0, flat) == (0, 0.0)
    assert screen.drawn(x[0], screen.bounds(x[:1])[0], 0.5, flat)[0] == places[0]


@pytest.mark.parametrize("which", ["weights", "rows"])
def test_bounds_that_leave_out_what_rounding_does_are_noticed_here(which: str) -> None:
    """Whole numbers up to 127 lie in bytes as they are, so that errors are the other's; and they are made large."""
    torch.manual_seed(2)
    real, whole = torch.randn(2000, 64), torch.randint(-126, 127, (2000, 64)).float()
    real[:, 1:5], whole[:, 0], whole[:, 1:5] = 30.0, 127.0, 0.0
    weight, x = (real, whole[:200]) if which == "weights" else (whole, real[:200])
    screen = screen_of(weight)
    assert wrong(screen, weight, x, (1.0,)) == 0
    screen._numbers_3V[1 if which == "weights" else 2].zero_()
    assert wrong(screen, weight, x, (1.0,)) > 0


# ---- what is no number -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_told_as_the_logits_tell_it(dtype: torch.dtype, bad: float) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(200, 64).to(dtype), torch.randn(3, 64).to(dtype)
    x[1, 7] = bad
    screen = screen_of(weight)
    (_, values), logits = screen.highest(x), screen.logits(x)
    assert [math.isfinite(value) for value in values] == [True, False, True]
    assert str(values) == str(logits.float().amax(-1).tolist())
    drawn = screen.drawn(x[1], screen.bounds(x)[1], 1.0, noise.gumbel(0, 0, 0, 200))[1]
    assert not math.isfinite(drawn)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_weights_that_have_no_bounds_are_not_screened(bad: float) -> None:
    weight = torch.randn(64, 64).bfloat16()
    weight[40, 3] = bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        screen_of(weight)


@pytest.mark.parametrize("given", [{}, {"temperature": 0.8, "seed": 3}])
def test_a_target_that_computes_no_numbers_is_refused(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = outrider.load(copy.deepcopy(tiny("llama")), "off")
    monkeypatch.setattr(native, "Screened", lambda screen, x_MK, batch: Screened(screen, x_MK * math.nan, batch))
    with pytest.raises(ValueError, match="logits are not finite"):
        engine.generate(list(PROMPT), max_new_tokens=3, **given)


# ---- who asks for what -----------------------------------------------------------------------------------------------


class Counted:
    """How often each was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: set[str] = set()
        for name in ("highest", "bounds", "drawn", "logits"):
            monkeypatch.setattr(Screen, name, self._count(name, getattr(Screen, name)))

    def _count(self, name: str, call: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.calls.add(name)
            return call(*args)

        return counted


def double(ids: Tensor, scores: Tensor) -> Tensor:
    return scores * 2


@pytest.mark.parametrize("shape", ["off", "3x2"])
@pytest.mark.parametrize(
    ("given", "calls"),
    [
        ({}, {"highest"}),
        ({"temperature": 0.8, "seed": 3}, {"bounds", "drawn"}),
        ({"temperature": 0.8, "seed": 3, "top_p": 0.9}, {"logits"}),
        ({"temperature": 0.8, "seed": 3, "rule": "mss"}, {"logits"}),
        ({"rule": "mss"}, {"logits"}),
        ({"logprobs": 2}, {"logits"}),
        ({"temperature": 0.8, "seed": 3, "logprobs": 0}, {"logits"}),
        ({"logit_bias": {5: -3.0}}, {"logits"}),
        ({"repetition_penalty": 1.3}, {"logits"}),
        ({"logits_processor": [double]}, {"logits"}),
    ],
)
def test_logits_are_made_for_those_who_ask_for_more_than_the_highest(
    given: dict[str, Any], calls: set[str], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = outrider.load(copy.deepcopy(tiny("llama")).bfloat16(), "ngram")
    asked = dict(shape=shape, max_new_tokens=16, **given)
    counted = Counted(monkeypatch)
    screened_result = engine.generate(list(PROMPT), **asked)
    assert counted.calls == calls
    assert isinstance(engine.target, NativeTreeModel)
    engine.target.screen = None
    counted.calls.clear()
    result = engine.generate(list(PROMPT), **asked)
    assert result.token_ids == screened_result.token_ids and result.logprobs == screened_result.logprobs
    assert not counted.calls


def test_rows_of_a_batch_may_ask_for_different_things() -> None:
    engine = outrider.load(copy.deepcopy(tiny("qwen3")).bfloat16(), "ngram")
    heats, seeds = [0.0, 0.9, 0.4], [1, 2, 3]
    together = engine.generate(
        [list(p) for p in PROMPTS], temperature=heats, seed=seeds, shape="3x2", max_new_tokens=12
    )
    for prompt, heat, seed, found in zip(PROMPTS, heats, seeds, together):
        alone = engine.generate(list(prompt), temperature=heat, seed=seed, max_new_tokens=12)
        assert found.token_ids == alone.token_ids


# ---- who is screened -------------------------------------------------------------------------------------------------


def target_of(engine: Engine) -> NativeTreeModel:
    assert isinstance(engine.target, NativeTreeModel)
    return engine.target


def test_a_screen_that_is_wrong_is_taken_away_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_of(outrider.load(copy.deepcopy(tiny("llama")), "off")).screen is not None
    highest = Screen.highest
    monkeypatch.setattr(Screen, "highest", lambda screen, x: (highest(screen, x)[0], [0.0] * len(x)))
    engine = outrider.load(copy.deepcopy(tiny("llama")), "off")
    assert target_of(engine).screen is None and any("others" in note for note in engine.selftest.notes)
    assert engine.generate(list(PROMPT), max_new_tokens=4).token_ids


def test_other_heads_and_cpus_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 64)
    with pytest.raises(ValueError, match="not laid out"):
        Screen(weight, Layout([]).linear(weight))
    for odd in (torch.randn(64, 66), torch.randn(12, 64), weight.double()):
        with pytest.raises(ValueError, match="size or dtype"):
            Screen(odd, LinearStructure())
    monkeypatch.setattr(module, "multiplies_bytes", lambda: False)
    engine = outrider.load(copy.deepcopy(tiny("llama")), "off")
    assert target_of(engine).screen is None and any("multiply bytes" in note for note in engine.selftest.notes)


def test_a_memory_budget_leaves_no_room_for_it(tmp_path: Any) -> None:
    copy.deepcopy(tiny("llama")).save_pretrained(tmp_path)
    assert target_of(streamed(tmp_path, dtype="float32")).screen is None
    whole = outrider.load(str(tmp_path), "off", memory_budget=10**9)
    assert target_of(whole).screen is None


def test_what_it_takes_is_a_byte_a_weight_and_three_numbers_an_output() -> None:
    screen = screen_of(torch.randn(330, 64).bfloat16())
    assert screen.bytes == 336 * 64 + 330 * 12
    assert not screened.screen(object())  # what is no compiled target is left alone


def test_doctor_says_what_it_takes() -> None:
    target = target_of(outrider.load(copy.deepcopy(tiny("llama")), "off"))
    assert target.screen and doctor._memory(target)["screen_bytes"] == target.screen.bytes
    target.screen = None
    assert "screen_bytes" not in doctor._memory(target)
