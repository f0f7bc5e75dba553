"""Weights in twelve bits a number: every number comes back as it was, and products have the bits of those in sixteen."""

from __future__ import annotations

import copy
import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import tiny
from native_kernels import needs_kernels
from outrider import doctor
from outrider.models.native import NativeTreeModel
from outrider.native import codes as module
from outrider.native import layout, library
from outrider.native.codes import PIECE, RARE, Codes
from outrider.native.layout import CHUNK, Layout, parts
from outrider.native.linear import RowProduct

CODE_COUNT = 16
ROWS = (*range(1, 18), 23, 24, 25, 33, 64, 65, 70)
SIZES = [(16, 4), (17, 8), (47, 12), (48, 64), (50, 576), (64, 36), (100, 1028), (160, 60), (CHUNK + 20, 32)]


@pytest.fixture(autouse=True)
def kernels() -> None:
    needs_kernels()
    if not library.library().outrider_reads_codes():
        pytest.skip("this CPU multiplies no bf16 by itself, so nothing is written in codes")


def numbers(outs: int, inputs: int, patched: bool = True) -> Tensor:
    """A weight with a few numbers that are no usual ones."""
    generator = torch.Generator().manual_seed(outs * inputs)
    weight = torch.randn(outs, inputs, generator=generator).bfloat16()
    if patched:
        places = torch.randperm(weight.numel(), generator=generator)[: weight.numel() // (2 * RARE) + 20]
        weight.view(-1)[places] = (2.0 ** torch.arange(-90, 90, 9)).bfloat16().repeat(len(places))[: len(places)]
    return weight


def rows(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).bfloat16()


def laid(weight: Tensor) -> RowProduct:
    return RowProduct([weight], [None], laid=True)


def is_coded(weight: Tensor) -> bool:
    return bool(Layout([weight]).codes)


@pytest.mark.parametrize(("outs", "inputs"), SIZES)
def test_products_have_the_bits_of_weights_as_they_lie(outs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RARE", 1)  # also of small weights, in which one patch is not rare
    weight = numbers(outs, inputs)
    assert Codes(weight, parts(outs)).patches > 0 or inputs * outs < 1000
    assert is_coded(weight)
    lying, product = RowProduct([weight], [None]), laid(weight)
    for count in ROWS:
        x = rows(count, inputs)
        assert torch.equal(product(x), lying(x)), count


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_bits_are_the_same_with_any_number_of_threads(threads: int) -> None:
    weight, before = numbers(400, 576), torch.get_num_threads()
    expected = RowProduct([weight], [None])(rows(9, 576))
    torch.set_num_threads(threads)
    try:
        assert torch.equal(laid(weight)(rows(9, 576)), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("first", range(0, 256, CODE_COUNT))
def test_every_number_comes_back(first: int) -> None:
    """All that bf16 has but those that the CPU takes for zero, and those that are none."""
    bits = torch.arange(first << 8, (first + CODE_COUNT) << 8, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    every = every[every.isfinite() & (every.abs() >= torch.finfo(torch.bfloat16).tiny)]
    weight = every.repeat(PIECE * 128 // len(every) + 1)[: PIECE * 128].view(PIECE, 128)
    assert set(every.tolist()) == set(weight.flatten().tolist()) and is_coded(weight)
    assert torch.equal(laid(weight)(torch.eye(128).bfloat16()), weight.T)


def test_a_quarter_less_is_held() -> None:
    weight = numbers(960, 576)
    assert is_coded(weight)
    assert Layout([weight]).memory.numel() == weight.numel() * 3 // 2
    assert Layout([weight.float()]).memory.numel() == weight.numel() * 4


def test_the_doctor_tells_what_is_held() -> None:
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    target = NativeTreeModel(model)
    held = doctor._memory(target)["held_bytes"]
    assert held == sum(layout.memory.numel() for layout in target.decoder.layouts)
    assert "held_bytes" not in doctor._memory(NativeTreeModel(tiny("llama")))


def test_weights_of_all_sorts_of_numbers_stay_as_they_are() -> None:
    """Where many numbers would need a patch, codes would cost more than they save."""
    weight = torch.randint(-(1 << 15), 1 << 15, (96, 64), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    weight = weight.view(torch.bfloat16).nan_to_num()
    assert not Codes(weight, parts(96)).pays and not is_coded(weight)
    x = torch.eye(64).bfloat16()
    assert torch.equal(laid(weight)(x), RowProduct([weight], [None])(x))


@pytest.mark.parametrize("inputs", [6, 34, 578])
def test_inputs_that_fill_no_step_stay_as_they_are(inputs: int) -> None:
    weight = numbers(64, inputs, patched=False)
    assert not is_coded(weight)
    assert torch.equal(laid(weight)(rows(9, inputs)), RowProduct([weight], [None])(rows(9, inputs)))


def test_a_drafters_bytes_are_not_coded() -> None:
    weight = numbers(64, 64, patched=False)
    if layout.multiplies_bytes():
        assert (
            not Layout([weight], rounds=True).codes and Layout([weight], rounds=True).memory.numel() == weight.numel()
        )


def test_a_model_in_codes_has_the_logits_of_one_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    text, more = [5, 9, 20, 31], [7, 7, 10, 40, 3, 9, 11, 12, 6]

    def logits(coded: bool) -> Tensor:
        target = NativeTreeModel(model)
        assert all(bool(held.codes) == coded for held in target.decoder.layouts)
        return target.begin([text], 16).extend([more], [list(range(-1, len(more) - 1))])

    coded = logits(True)
    monkeypatch.setattr(layout, "takes_codes", lambda weight: False)
    assert torch.equal(coded, logits(False))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for other CPUs of this kind")
def test_cpus_that_do_not_multiply_bf16_say_so_and_have_the_same_products(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Up to the order in which a pair of products is added."""
    weight, x = numbers(100, 64, patched=False), rows(9, 64)
    expected = laid(weight)(x)
    with monkeypatch.context() as patched:
        patched.setenv("OUTRIDER_CACHE", str(tmp_path))
        patched.setattr(library, "FLAGS", [flag.replace("native", "x86-64-v3") for flag in library.FLAGS])
        library._load.cache_clear()
        try:
            assert not is_coded(weight)
            torch.testing.assert_close(laid(weight)(x), expected, rtol=1e-2, atol=1e-2)
        finally:
            library._load.cache_clear()
