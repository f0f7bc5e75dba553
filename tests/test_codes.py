"""Weights in twelve bits a number: every number comes back as it was, and products have the bits of those in sixteen."""

from __future__ import annotations

import copy
import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from families import tiny
from native_kernels import needs_kernels
from outrider import doctor
from outrider.models.native import NativeTreeModel
from outrider.native import codes as module
from outrider.native import layout, library
from outrider.native.codes import PIECE, Codes
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


def numbers(outs: int, inputs: int, odd: int = 12) -> Tensor:
    """A weight with some numbers that are no usual ones."""
    generator = torch.Generator().manual_seed(outs * inputs)
    weight = torch.randn(outs, inputs, generator=generator).bfloat16()
    places = torch.randperm(weight.numel(), generator=generator)[:odd]
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
    weight = numbers(outs, inputs, odd=20 + outs * inputs // 100)
    assert Codes(weight, parts(outs)).patches > 0 or inputs * outs < 1000
    assert is_coded(weight)
    lying, product = RowProduct([weight], [None]), laid(weight)
    for count in ROWS:
        x = rows(count, inputs)
        assert torch.equal(product(x), lying(x)), count


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_bits_are_the_same_with_any_number_of_threads(threads: int) -> None:
    weight, before = numbers(400, 576), torch.get_num_threads()
    assert is_coded(weight)
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


def decoded(weight: Tensor) -> np.ndarray:
    """The bits of a weight, read from the memory of its layout as `coded.h` describes it."""
    held = Layout([weight])
    (codes,) = held.codes.values()
    outs, inputs = weight.shape
    memory, bits = held.memory.numpy(), np.zeros((outs, inputs), dtype=np.uint16)
    at = 0
    for number, start in enumerate(range(0, outs, PIECE)):
        tiles = [min(first, outs - 16) for first in range(start, min(start + PIECE, outs), 16)]
        place, count = codes._pieces[number, 2:].tolist()
        upper = codes._pieces[number, :2].numpy().view(np.uint8)
        raw = np.frombuffer((ctypes.c_char * (8 * (count + 1))).from_address(place), dtype=np.uint8).reshape(-1, 8)
        assert (raw[-1, :4] == 255).all()
        patches = {(int(p[:4].view(np.uint32)[0]), int(p[4])): p[5] for p in raw[:-1]}
        for step in range(inputs // 4 * len(tiles)):
            packed, lower = memory[at : at + 32], memory[at + 32 : at + 96]
            high = upper[np.stack([packed & 15, packed >> 4], axis=1).ravel()]
            high = np.array([patches.get((step, i), high[i]) for i in range(64)], dtype=np.uint16)
            part, at = high << 8 | lower, at + 96
            for half in range(2):  # of sixteen numbers the first eight are of the first two inputs
                numbers = part.reshape(4, 2, 8)[:, half].reshape(16, 2)
                first = step // len(tiles) * 4 + 2 * half
                bits[tiles[step % len(tiles)] : tiles[step % len(tiles)] + 16, first : first + 2] = numbers
    return bits


@pytest.mark.parametrize("outs", [16, 17, 40, 48, 100])
def test_all_bits_are_there_also_of_what_is_no_number(outs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinities, NaN of every kind, zeros of both signs, numbers too small to be normal; patches in every place of a step."""
    monkeypatch.setattr(module, "RARE", 1)
    generator = torch.Generator().manual_seed(outs)
    bits = torch.randint(-(1 << 15), 1 << 15, (outs, 32), generator=generator).to(torch.int16)
    bits[: outs // 2] = torch.randn(outs // 2, 32, generator=generator).bfloat16().view(torch.int16)
    bits[0, :5] = torch.tensor([0, -(1 << 15), 0x7F80, 0x7FC1, 1], dtype=torch.int16)
    weight = bits.view(torch.bfloat16)
    assert np.array_equal(decoded(weight), bits.numpy().view(np.uint16))


def test_a_weight_that_changes_while_it_is_laid_out_harms_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its codes were chosen before: there is room for as many patches as were counted, and for no more."""
    weight = numbers(96, 64, odd=0)
    chosen = Codes(weight, parts(96))
    weight.view(torch.int16).random_(generator=torch.Generator().manual_seed(0))
    behind = chosen._patches[-1].item()
    out = torch.zeros(96 * 64 * 2, dtype=torch.uint8)
    layout.lay_out(weight, out.data_ptr(), chosen)
    assert chosen._patches[-1].item() == behind == -1
    assert not out[96 * 64 * 3 // 2 :].any()


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
    weight = numbers(64, inputs, odd=0)
    assert not is_coded(weight)
    assert torch.equal(laid(weight)(rows(9, inputs)), RowProduct([weight], [None])(rows(9, inputs)))


def test_a_drafters_bytes_are_not_coded() -> None:
    weight = numbers(64, 64, odd=0)
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
    weight, x = numbers(100, 64, odd=0), rows(9, 64)
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
