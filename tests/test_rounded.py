"""Drafters' weights in bytes: products are exact sums of whole numbers, and only drafts depend on the rounding."""

from __future__ import annotations

import copy
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import test_head_cores as heads
import test_mamba_drafter as mambas
from families import tiny
from helpers import PROMPTS
from native_kernels import needs_kernels
from outrider.api import Engine
from outrider.drafters.feature_head import HeadDrafter, HeadModel
from outrider.drafters.lm import LMDrafter
from outrider.models.feature_head import CORES
from outrider.models.mamba_drafter import MambaModel
from outrider.models.native import NativeTreeModel
from outrider.native import layout, screen
from outrider.native import library as module
from outrider.native.linear import RowProduct
from test_screen import screen_of, wrong

SIZES = [(64, 48), (576, 100), (36, 16), (1540, 33), (4, 160)]


@pytest.fixture(autouse=True)
def bytes_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the CPU, since every CPU computes the same."""
    needs_kernels()
    monkeypatch.setattr(layout, "multiplies_bytes", lambda: True)


def made(inputs: int, outs: int, rows: int = 70) -> tuple[torch.Tensor, torch.Tensor, RowProduct]:
    torch.manual_seed(inputs)
    weight, x = torch.randn(outs, inputs).bfloat16(), (30 * torch.randn(rows, inputs)).clamp(-127, 127).bfloat16()
    x[:, -1] = 127  # a scale of 1: some CPUs multiply and add in one, which rounds halves otherwise
    x[1] = 0
    weight[2] = 0
    return weight, x, RowProduct([weight], [None], laid=True, rounds=True)


def rounded(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The whole numbers of every row, and its scale."""
    wide = values.float().numpy()
    top = np.abs(wide).max(-1, keepdims=True)
    by = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(wide * by).astype(np.int64), top / np.float32(127)


@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_those_of_whole_numbers(sizes: tuple[int, int]) -> None:
    weight, x, product = made(*sizes)
    numbers_x, scales_x = rounded(x)
    bytes_w, scales_w = layout._rounded(weight)
    numbers_w = bytes_w.numpy().astype(np.int64) - 128
    assert np.abs(numbers_w * scales_w.numpy()[:, None] - weight.float().numpy()).max() < 0.51 * scales_w.max()
    sums = (numbers_x @ numbers_w.T).astype(np.float32)
    expected = torch.from_numpy(sums * (scales_x * scales_w.numpy())).bfloat16()
    assert torch.equal(product(x), expected)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_an_output_depends_on_its_own_row_alone(sizes: tuple[int, int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _, x, product = made(*sizes)
        every = product(x)
        for count in (*range(1, 20), 33, 64, 65):
            assert torch.equal(product(x[:count]), every[:count])
            assert torch.equal(product(x[-count:]), every[-count:])
    finally:
        torch.set_num_threads(before)


def test_longest_rows_do_not_overflow() -> None:
    weight = torch.ones(16, layout.LONGEST).bfloat16()
    product = RowProduct([weight], [None], laid=True, rounds=True)
    ones = torch.ones(9, layout.LONGEST).bfloat16()
    for x in (ones, -ones):
        assert torch.equal(product(x), (x.float() @ weight.float().T).bfloat16())


def test_the_error_is_a_hundredth() -> None:
    weight, x, product = made(576, 100)
    exact = x.float() @ weight.float().T
    error = (product(x).float() - exact).std() / exact.std()
    assert 1e-3 < error < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_weights_and_other_cpus_keep_their_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weights, x = [torch.randn(20, 64).to(dtype), torch.randn(7, 64).to(dtype)], torch.randn(5, 64).to(dtype)
    odd = torch.randn(20, 66).to(dtype)  # no whole number of four bytes

    def products(rounds: bool) -> list[torch.Tensor]:
        made = [RowProduct([weights[0]], [None], True, rounds), RowProduct(weights, [None] * 2, True, rounds)]
        both = [product(x) for product in made]
        return [*both, RowProduct([odd], [None], True, rounds)(torch.cat([x, x[:, :2]], dim=-1))]

    same = [torch.equal(a, b) for a, b in zip(products(True), products(False))]
    assert same == ([False, True, True] if dtype is torch.bfloat16 else [True] * 3)
    monkeypatch.setattr(layout, "multiplies_bytes", lambda: False)
    assert all(torch.equal(a, b) for a, b in zip(products(True), products(False)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for other CPUs of this kind")
@pytest.mark.parametrize("cpu", ["x86-64-v3"])
def test_cpus_that_do_not_multiply_bytes_say_so_and_would_have_the_same_bits(
    cpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = [made(*sizes)[2](made(*sizes)[1]) for sizes in SIZES]
    with monkeypatch.context() as patched:
        patched.setenv("OUTRIDER_CACHE", str(tmp_path))
        patched.setattr(module, "FLAGS", [flag.replace("native", cpu) for flag in module.FLAGS])
        module._load.cache_clear()
        try:
            assert not module.library().outrider_multiplies_bytes()
            for sizes, wanted in zip(SIZES, expected):
                _, x, product = made(*sizes)
                assert torch.equal(product(x), wanted)
            patched.setattr(screen, "multiplies_bytes", lambda: True)
            weight, x = torch.randn(500, 64).bfloat16(), torch.randn(9, 64).bfloat16()
            assert wrong(screen_of(weight), weight, x) == 0
        finally:
            module._load.cache_clear()


@pytest.mark.parametrize("kind", [*CORES, "mamba"])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "sampled"])
def test_text_stays_the_targets(kind: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    prompts = [list(prompt) for prompt in PROMPTS]
    plain = Engine(target, None, "llama").generate(prompts, max_new_tokens=16, **given)
    borrowed: Any = target.get_input_embeddings(), target.get_output_embeddings()
    drafts = []
    for is_rounded in (True, False):
        monkeypatch.setattr(layout, "multiplies_bytes", lambda: is_rounded)  # noqa: B023
        if kind == "mamba":
            drafter = LMDrafter(MambaModel(mambas.blocks(torch.bfloat16), *borrowed), "mamba")
        else:
            drafter = HeadDrafter(HeadModel(heads.head(kind, torch.bfloat16), *borrowed))
        state: Any = drafter.model.begin([[]])
        if kind != "mamba":
            torch.manual_seed(0)
            state.see([torch.randn(4, 64).bfloat16()])
        drafts.append(state.extend([[1, 2, 3]], [[-1, 0, 1]]))
        engine = Engine(target, None, "llama", drafter)
        for shape in (4, (3, 2, 1), "best8"):
            results = engine.generate(prompts, shape=shape, max_new_tokens=16, **given)
            assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert not torch.equal(*drafts)
    assert (drafts[0] - drafts[1]).float().std() < 0.1 * drafts[1].float().std()


def test_a_target_is_not_rounded() -> None:
    target = NativeTreeModel(copy.deepcopy(tiny("llama")).to(torch.bfloat16))
    linears = [linear for layer in target.decoder.layers for linear in layer.linears()]
    structures = [target.decoder._linear(linear) for linear in linears]
    assert all(structure.laid and not structure.scales for structure in structures)
