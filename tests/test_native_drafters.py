"""Drafters with compiled kernels propose what they propose without them, for every core, size and row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import test_head_cores as heads
import test_mamba_drafter as mambas
from families import VOCAB, tiny
from helpers import PROMPT, PROMPTS, expected
from native_kernels import needs_kernels, without_kernels
from outrider.api import Engine
from outrider.drafters.feature_head import HeadDrafter, HeadModel, HeadState
from outrider.drafters.head_text import HeadText
from outrider.drafters.lm import LMDrafter
from outrider.models.draft_vocab import CutHead
from outrider.models.feature_head import CORES, FeatureHead, HeadConfig
from outrider.models.mamba_drafter import MambaBlocks, MambaDrafterConfig, MambaModel
from outrider.models.norm import Norm
from outrider.models.packed import Packed, Product
from outrider.models.protocol import TreeModel
from outrider.native import layout, linear
from outrider.native.linear import FEW_ROWS, RowProduct

pytestmark = pytest.mark.usefixtures("kernels")
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
HEAD_SIZES = [
    {"width": 32, "num_heads": 4, "num_kv_heads": 2, "ffn": 48},
    {"width": 66, "num_heads": 3, "num_kv_heads": 1, "ffn": 17},
    {"width": 40, "num_heads": 1, "num_kv_heads": 1, "ffn": 33},
]
SSM_SIZES: list[dict[str, Any]] = [
    {"ssm_heads": 2, "ssm_head_size": 8, "ssm_state": 6},
    {"ssm_heads": 3, "ssm_head_size": 21, "ssm_state": 17},
    {"ssm_heads": 1, "ssm_head_size": 5, "ssm_state": 1},
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights as torch has them: `test_rounded.py` looks at those in bytes."""
    needs_kernels()
    monkeypatch.setattr(layout, "multiplies_bytes", lambda: False)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = LIMITS[wanted.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=limit, atol=limit * float(wanted.detach().abs().max()))


# -- heads -------------------------------------------------------------------------------------------------------------


def head_model(core: str, sizes: int, dtype: torch.dtype) -> HeadModel:
    torch.manual_seed(3)
    config: dict[str, Any] = {**HEAD_SIZES[sizes], **SSM_SIZES[sizes], "window": 70}
    made = FeatureHead(HeadConfig(taps=(0, 1), draft_vocab=VOCAB - 8, core=core, **config))
    made.draft_ids = torch.randperm(VOCAB)[: VOCAB - 8]
    for parameter in made.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    width = made.config.width
    return HeadModel(made, nn.Embedding(VOCAB, width).to(dtype), nn.Linear(width, VOCAB, bias=False).to(dtype))


def fed(model: HeadModel) -> list[torch.Tensor]:
    """Logits of prompts in pieces, levels and commits of two rows of unlike length; windows and buffers are outgrown."""
    state, width = model.begin([[], []], 4), model.head.config.width
    torch.manual_seed(4)
    found = []
    for turn in range(14):
        state.see([torch.randn(20, 2 * width).to(model.dtype), torch.randn(11, 2 * width).to(model.dtype)])
        ids = [[(7 * i + turn) % VOCAB for i in range(count)] for count in (20, 11)]
        found.append(state.follow(ids))
        root = [[19, 19, 19], [10]]
        found.append(state.extend([[1, 2, 3], [4]], root)[0])
        found.append(state.extend([[5], [6, 7]], [[21], [20, 20]])[1])
        state.commit([range(20), range(11)])
        if turn == 9:
            state.keep([1, 0])
            state.keep([1, 0])
    return found


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sizes", range(len(HEAD_SIZES)))
@pytest.mark.parametrize("core", CORES)
def test_heads_say_the_same_without_kernels(
    core: str, sizes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = head_model(core, sizes, dtype)
    assert bool(model.native) == (core != "ssm") and bool(model.kernels) == (core != "attention")
    ours = fed(model)
    without_kernels(monkeypatch)
    plain = head_model(core, sizes, dtype)
    assert not plain.native and not plain.kernels
    if dtype is torch.bfloat16:  # states of many tokens may have drifted apart
        ours = ours[:9]
    for got, wanted in zip(ours, fed(plain)):
        close(got, wanted)


@pytest.mark.parametrize("core", CORES)
def test_logits_after_the_last_token_are_those_of_all(core: str) -> None:
    states: list[HeadState | HeadText] = []
    for _ in range(2):
        state = head_model(core, 0, torch.float32).begin([[], []], 4)
        state.see([torch.ones(8, 64), torch.ones(8, 64)])
        states.append(state)
    tokens = [[1, 2, 3], [4]]
    last, every = states[0].follow(tokens), states[1].extend(tokens, [range(-1, 2), [-1]])
    close(last[0], every[0, 2])
    close(last[1], every[1, 0])


def one_text(state: HeadState | HeadText, dtype: torch.dtype, width: int) -> list[torch.Tensor]:
    """Logits of a text in pieces, levels, side branches and many nodes at once; what is committed lies apart now and then."""
    torch.manual_seed(6)
    found = []
    for turn in range(12):
        for count in (0, 4, 1):
            state.see(
                [torch.randn(count, 3 * width)[:, : 2 * width].to(dtype)]
            )  # a part of something wider, as paths are
        found.append(state.follow([[(3 * turn + i) % VOCAB for i in range(5)]]))
        found.append(state.extend([[1, 2, VOCAB - 1]], [[4, 4, 4]]))
        found.append(state.extend([[4, 5, 6, 7]], [[5, 7, 6, 5]]))
        if turn == 5:
            found.append(state.extend([[8] * 300], [[9] * 300]))
        state.commit([range(5)])
        if turn % 4 == 3:
            state.see([torch.randn(3, 2 * width).to(dtype)])
            found += [state.extend([[token]], [[parent]]) for token, parent in enumerate((-1, -1, 1, 2))]
            state.commit([[1, 2, 3]])
    assert state.lengths == [69] and state.pending == 0 and state.bytes() > 0
    return found


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sizes", range(len(HEAD_SIZES)))
def test_a_text_alone_goes_by_addresses_and_has_the_same_bits(sizes: int, dtype: torch.dtype) -> None:
    model = head_model("attention", sizes, dtype)
    alone, width = model.begin([[]], 4), model.head.config.width
    assert isinstance(alone, HeadText)
    found = one_text(alone, dtype, width)
    wanted = one_text(HeadState(model, 1, 4), dtype, width)
    assert len(found) == len(wanted) == 49
    for got, other in zip(found, wanted):
        assert torch.equal(got, other)


def test_texts_side_by_side_windows_and_other_cores_do_not_go_by_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = head_model("attention", 0, torch.float32)
    assert isinstance(attention.begin([[], []]), HeadState)
    for core in CORES:
        if core != "attention":
            assert isinstance(head_model(core, 0, torch.float32).begin([[]]), HeadState)
    attention.embedding.register_forward_hook(lambda *_: None)
    assert isinstance(attention.begin([[]]), HeadState), "who looks up rows in a way of their own is asked"
    without_kernels(monkeypatch)
    assert isinstance(head_model("attention", 0, torch.float32).begin([[]]), HeadState)


def test_of_a_text_alone_what_is_no_path_is_refused() -> None:
    state = head_model("attention", 0, torch.float32).begin([[]])
    state.see([torch.ones(3, 64)])
    state.follow([[1, 2, 3]])
    for parents in ([3], [-2], [0, 5]):
        with pytest.raises(IndexError, match="parents come before children"):
            state.extend([[1] * len(parents)], [parents])
    for path in ([1], [0, 2], [0, 1, 2, 9]):
        with pytest.raises(IndexError, match="path of pending nodes"):
            state.commit([path])


# -- mixers ------------------------------------------------------------------------------------------------------------


def mamba_model(sizes: int, dtype: torch.dtype) -> MambaModel:
    torch.manual_seed(5)
    ssm = SSM_SIZES[sizes]
    config = MambaDrafterConfig(
        32, 2, ssm["ssm_heads"], ssm["ssm_head_size"], ssm["ssm_state"], VOCAB - 8, 24 * (sizes > 0)
    )
    made = MambaBlocks(config)
    made.draft_ids = torch.arange(VOCAB - 8)
    return MambaModel(made, nn.Embedding(VOCAB, 32).to(dtype), nn.Linear(32, VOCAB, bias=False).to(dtype))


def stepped(model: MambaModel) -> list[torch.Tensor]:
    state, found = model.begin([mambas.TEXT[:20], mambas.TEXT[:3]]), []
    for _ in range(3):
        found.append(state.extend([[1, 2, 3, 4], [5]], [[-1, 0, 0, 1], [-1]])[0])
        found.append(state.extend([[7, 8], [9, 1, 2]], [[3, 2], [0, 0, 4]])[1])
        found.append(state.extend([[6] * 140, [6]], [range(5, 145), [5]])[:, :1])  # more nodes than buffers hold
        state.commit([[0, 1, 3, 4], [0, 4, 6]])
        found.append(state.follow([[5, 6], [7]]))
        state.commit([[0, 1], [0]])
    return found


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sizes", range(len(SSM_SIZES)))
@pytest.mark.parametrize("threads", [1, 3])
def test_mixers_say_the_same_without_kernels(
    sizes: int, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = mamba_model(sizes, dtype)
        assert model.kernels
        ours = stepped(model)
        without_kernels(monkeypatch)
        plain = mamba_model(sizes, dtype)
        assert not plain.kernels
        for got, wanted in zip(ours, stepped(plain)):
            close(got, wanted)
    finally:
        torch.set_num_threads(before)


def test_wide_numbers_go_the_old_way() -> None:
    assert not heads.model("hybrid").native and not heads.model("hybrid").kernels and not mambas.model().kernels


@pytest.mark.parametrize("kind", [*CORES, "mamba"])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "sampled"])
def test_drafts_and_text_are_the_same_without_kernels(
    kind: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for switch in (None, without_kernels):
        if switch:
            switch(monkeypatch)
        target = copy.deepcopy(tiny("llama"))
        borrowed: Any = target.get_input_embeddings(), target.get_output_embeddings()
        if kind == "mamba":
            drafter = LMDrafter(MambaModel(mambas.blocks(torch.float32), *borrowed), "mamba")
        else:
            drafter = HeadDrafter(HeadModel(heads.head(kind, torch.float32), *borrowed))
        engine = Engine(target, None, "llama", drafter)
        for shape in (4, (3, 2, 1), "best8"):
            results = engine.generate([list(p) for p in PROMPTS], shape=shape, max_new_tokens=16, **given)
            assert [r.token_ids for r in results] == [expected("llama", p, max_new_tokens=16, **given) for p in PROMPTS]
            found.append([(r.stats.rounds, r.stats.drafted, r.stats.accepted) for r in results])
    assert found[:3] == found[3:]


# -- products and norms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sizes", [(64, 48), (37, 5), (1, 1), (33, 130)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("laid", [False, True])
def test_products_are_right_row_by_row(sizes: tuple[int, int], bias: bool, dtype: torch.dtype, laid: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes, bias=bias, dtype=dtype), nn.Linear(sizes[0], 19, bias=bias, dtype=dtype)]
    product = RowProduct([layer.weight for layer in layers], [layer.bias for layer in layers], laid)
    x = torch.randn(2, 9, sizes[0], dtype=dtype)
    both = product(x)
    close(both, torch.cat([layer(x) for layer in layers], dim=-1))
    for row in range(9):
        assert torch.equal(product(x[1, row]), both[1, row])
    assert torch.equal(product(x.mT.contiguous().mT), both)  # however the input lies
    assert product(x[:, :0]).shape == (2, 0, sizes[1] + 19)
    is_laid = laid and sizes[1] >= 16 and sizes[0] * dtype.itemsize % 4 == 0
    assert product.takes(torch.zeros(FEW_ROWS + 1, sizes[0], dtype=dtype)) == is_laid
    assert not product.takes(torch.zeros(sizes[0], 1, dtype=torch.float64))


def test_only_what_the_kernels_read_goes_through_them() -> None:
    for weight in (torch.ones(20, 20).double(), torch.ones(20, 30).mT, torch.ones(20, 20).half()):
        assert linear.row_product([weight]) is None
    assert linear.row_product([torch.ones(20, 8), torch.ones(20, 9)]) is None
    assert linear.row_norm(torch.ones(8).double(), 1e-5) is None


def test_packed_layers_take_any_number_of_rows_and_leave_copies_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 20), Norm(20), nn.Linear(20, 3, bias=False)).requires_grad_(False)
    packed = Packed(model)
    with packed.active(), torch.inference_mode():
        for rows in (1, 4, FEW_ROWS + 1, 200):
            x = torch.randn(rows, 24)
            close(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
            close(model(x), nn.functional.linear(model[1](model[0](x)), model[2].weight))
            assert torch.equal(model[0](x[:1]), model[0](x)[:1])
        other = copy.deepcopy(model)
        other[0].weight = nn.Parameter(torch.zeros(20, 24))
        assert torch.equal(other[0](x), other[0].bias.expand(200, 20))


def test_a_joined_product_leaves_weights_where_they_are() -> None:
    layers = [nn.Linear(24, 20), nn.Linear(24, 7)]
    places = [layer.weight.data_ptr() for layer in layers]
    product = Product(*layers)
    assert [layer.weight.data_ptr() for layer in layers] == places
    for rows in (1, FEW_ROWS, FEW_ROWS + 1):
        x = torch.randn(1, rows, 24)
        close(product(x).detach(), torch.cat([layer(x) for layer in layers], dim=-1).detach())


# -- targets that were cut ---------------------------------------------------------------------------------------------


def test_a_cut_vocabulary_head_is_what_the_model_speaks_through() -> None:
    from outrider.models.selftest import tree_model

    source = copy.deepcopy(tiny("llama"))
    model: Any = tree_model(source)[0]
    whole = model.begin([list(PROMPT)], 4).extend([[5, 6]], [[-1, 0]])
    ids = torch.arange(3, VOCAB, 2)
    cut: Any = copy.copy(model)
    cut.speak_through(CutHead(source.get_output_embeddings().weight, ids))
    made: TreeModel = cut
    assert torch.equal(made.begin([list(PROMPT)], 4).extend([[5, 6]], [[-1, 0]]), whole[..., ids])
    assert torch.equal(model.begin([list(PROMPT)], 4).extend([[5, 6]], [[-1, 0]]), whole)
