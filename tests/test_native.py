"""Compiled kernels say what transformers says, for every family and size they take, and nobody misses them where they are not."""

from __future__ import annotations

import copy
import math
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import outrider
from families import tiny
from native_kernels import needs_kernels
from outrider.models.draft_vocab import CutHead
from outrider.models.exact import differing
from outrider.models.lean import LeanTreeModel
from outrider.models.native import NativeTextState, NativeTreeModel
from outrider.models.selftest import Plain, tree_error, tree_model
from outrider.native import library as module
from outrider.native.highest import highest
from outrider.native.library import Unavailable, library

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
ODD_SIZES = [
    {
        "hidden_size": 72,
        "intermediate_size": 50,
        "vocab_size": 99,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 160,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 80,
    },
    {
        "hidden_size": 34,
        "intermediate_size": 17,
        "vocab_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 256,
    },
]


@pytest.fixture
def kernels() -> None:
    needs_kernels()


def _llama(dtype: torch.dtype = torch.float32, **sizes: Any) -> tf.PreTrainedModel:
    torch.manual_seed(1)
    config = tf.LlamaConfig(num_hidden_layers=2, attention_bias=True, mlp_bias=True, **sizes)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.normal_()
    return model


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_like_families_are_scored_by_compiled_kernels(family: str) -> None:
    target, tested = tree_model(tiny(family))
    assert isinstance(target, NativeTreeModel) and tested.way == "compiled kernels, tree mask"
    assert tested.error < 2e-6


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", ODD_SIZES)
def test_sizes_that_fill_no_vector_and_biases_are_right(sizes: dict[str, int], dtype: torch.dtype) -> None:
    model = _llama(dtype, **sizes)
    limit = 2e-5 if dtype is torch.float32 else 3e-2
    assert tree_error(NativeTreeModel(model), Plain(model)) < limit


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_prompts_and_taps_are_those_of_the_lean_decoder(family: str, threads: int) -> None:
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for way in (NativeTreeModel, LeanTreeModel):
            state = way(tiny(family)).begin([[3], [5, 6, 7, 8, 9, 10, 11, 12, 13]], room=4, taps=(0, 1))
            first = state.extend([[4, 5, 6, 7], [1, 2]], [[-1, 0, 0, 1], [-1, 0]])
            early = torch.stack(list(state.features or []))
            state.commit([[0, 2], [0]])
            second = state.extend([[9] * 70, [8]], [list(range(-1, 69)), [-1]])  # more nodes than there is room for
            found.append((first[0], first[1, :2], early[0], early[1, :2], second[0], second[1, :1]))
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip(*found):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", ODD_SIZES)
def test_a_node_has_the_same_bits_among_any_number_of_others(sizes: dict[str, int], dtype: torch.dtype) -> None:
    state = NativeTreeModel(_llama(dtype, **sizes)).begin([[1]], room=80)
    alone = state.extend([[2]], [[-1]])[0, 0].clone()
    state.commit([[]])
    for count in (*range(2, 20), 24, 25, 33, 79):
        among = state.extend([[2] * count], [[-1] * count])[0]
        assert torch.equal(among, alone.expand_as(among))
        state.commit([[]])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 51])
def test_the_highest_score_is_the_first_of_several_and_nothing_hides_what_is_no_number(
    width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 3, (40, width), generator=generator).to(dtype)
    scores[0] = float("-inf")
    tokens, values = highest(scores)
    assert tokens == scores.float().argmax(-1).tolist() and values == scores.amax(-1).tolist()
    for place in range(width):
        broken = scores[1:2].clone()
        broken[0, place] = float("nan")
        assert math.isnan(highest(broken)[1][0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", ODD_SIZES)
@pytest.mark.parametrize("taps", [(), (0, 1)])
def test_a_text_alone_goes_by_addresses_and_has_the_bits_of_texts_side_by_side(
    sizes: dict[str, int], dtype: torch.dtype, taps: tuple[int, ...]
) -> None:
    """Trees call by call, more nodes than there was room for, paths that lie apart, and a text that outgrows its caches."""
    model, prompt = NativeTreeModel(_llama(dtype, **sizes)), [5, 9, 13, 7]
    alone, both = model.begin([prompt], 4, taps), model.begin([prompt, prompt], 4, taps)
    assert isinstance(alone, NativeTextState) and not isinstance(both, NativeTextState)
    for turn in range(6):
        calls = [([1, 2, 3], [-1, 0, 0]), ([4, 5], [1, 3]), ([turn] * 90, [2] * 90)]
        for tokens, parents in calls:
            found, wanted = (state.extend([tokens] * rows, [parents] * rows) for state, rows in ((alone, 1), (both, 2)))
            assert torch.equal(found[0], wanted[1])
            if taps:
                assert alone.features and both.features
                assert len(alone.features) == 1 and torch.equal(alone.features[0], both.features[1])
        path = ([0, 1, 3, 4], [0, 2, 5 + turn])[turn % 2]
        alone.commit([path])
        both.commit([path, path])
        assert alone.lengths * 2 == both.lengths and not alone.pending
    assert alone.bytes() > 0
    alone.keep([0])
    for wrong in ([1], [0, 2, 3]):
        alone.extend([[1, 2, 3, 4]], [[-1, 0, 1, 0]])
        with pytest.raises(IndexError, match="path of pending nodes"):
            alone.commit([wrong])
    with pytest.raises(IndexError, match="parents come before children"):
        alone.extend([[1]], [[99]])


@pytest.mark.usefixtures("kernels")
def test_a_text_alone_follows_its_model_to_another_vocabulary_head_and_to_other_taps() -> None:
    """Once passes wrote as many logits and features as the first one of the text had, over whatever lay there."""
    model = NativeTreeModel(_llama(**ODD_SIZES[0]))
    state, whole_VD = model.begin([[5, 9, 13]], 4), model.model.get_output_embeddings().weight
    ids, nodes = torch.arange(20), ([[2, 3]], [[-1, 0]])
    wanted = state.extend(*nodes)[..., ids]
    state.commit([[]])
    model.speak_through(CutHead(whole_VD, ids))
    assert state.extend(*nodes).shape == wanted.shape and torch.allclose(state.extend(*nodes), wanted, atol=1e-5)
    state.taps, tapped = (0, 1), model.begin([[5, 9, 13]], 4, (0, 1))
    state.commit([[]])
    state.extend(*nodes)
    tapped.extend(*nodes)
    assert state.features and tapped.features and torch.equal(state.features[0], tapped.features[0])


@pytest.mark.usefixtures("kernels")
def test_windows_and_several_kinds_of_layers_do_not_go_by_addresses() -> None:
    states = {family: NativeTreeModel(tiny(family)).begin([[5, 9]]) for family in FAMILIES}
    assert {name for name, state in states.items() if isinstance(state, NativeTextState)} == {"llama", "qwen2", "qwen3"}


@pytest.mark.usefixtures("kernels")
def test_cut_and_shallow_copies_share_what_was_laid_out() -> None:
    model = NativeTreeModel(_llama(**ODD_SIZES[0]))
    assert model.shallow(1).decoder.layouts == model.decoder.layouts


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("OUTRIDER_NATIVE", "off", "switched off"),
        ("CXX", "/nowhere/cc", "could not be compiled.*nowhere"),
        ("CXX", "false", "could not be compiled.*false failed"),
        ("PATH", "/nowhere", "no C\\+\\+ compiler"),
    ],
)
def test_without_a_compiler_the_same_text_comes_from_torch(
    variable: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with_kernels = outrider.load(copy.deepcopy(tiny("llama"))).generate([1, 2, 3], max_new_tokens=12).token_ids
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    module._load.cache_clear()
    try:
        with pytest.raises(Unavailable, match=why):
            library()
        engine = outrider.load(copy.deepcopy(tiny("llama")))
        assert engine.target.way == "lean decoder, tree mask"
        assert any("kernels" in note for note in engine.selftest.notes)
        assert engine.generate([1, 2, 3], max_new_tokens=12).token_ids == with_kernels
    finally:
        monkeypatch.undo()
        module._load.cache_clear()


@pytest.mark.usefixtures("kernels")
def test_kernels_are_compiled_once_and_again_when_their_source_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    first = module._built()
    written = first.stat().st_mtime_ns
    assert module._built() == first and first.stat().st_mtime_ns == written
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-DOTHER"))
    assert module._built() != first


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for other CPUs of this kind")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64"])
def test_cpus_without_wide_vectors_get_the_same_logits_and_keep_the_bits(
    cpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {**ODD_SIZES[1], "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    wide = _llama(torch.bfloat16, **sizes)
    expected = NativeTreeModel(wide).begin([[1]], 4).extend([[2, 3, 4]], [[-1, 0, 0]])
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "FLAGS", [flag.replace("native", cpu) for flag in module.FLAGS])
    module._load.cache_clear()
    try:
        narrow = NativeTreeModel(wide)
        found = narrow.begin([[1]], 4).extend([[2, 3, 4]], [[-1, 0, 0]])
        torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)
        assert differing(narrow) is None
        exact = _llama(**sizes)
        assert tree_error(NativeTreeModel(exact), Plain(exact)) < 2e-5
    finally:
        monkeypatch.undo()
        module._load.cache_clear()


def test_what_the_kernels_do_not_compute_goes_another_way() -> None:
    needs_kernels()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 160,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    for model in (_llama(**sizes, head_dim=300), _llama(torch.float64, **sizes, head_dim=16)):
        target, tested = tree_model(model)
        assert not isinstance(target, NativeTreeModel)
        assert any(note.startswith("not NativeTreeModel: the kernels") for note in tested.notes)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_prompt_has_the_same_bits_in_pieces_and_token_by_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = NativeTreeModel(copy.deepcopy(tiny(family)).to(torch.bfloat16))
    text = [(5 * i + 2) % 48 for i in range(40)]
    alone = target.begin([text[:1]], room=40)
    for token in text[1:39]:
        alone.extend([[token]], [[-1]])
        alone.commit([[0]])
    expected = alone.extend([text[39:]], [[-1]])
    for chunk in (256, 7, 1):
        monkeypatch.setattr(NativeTreeModel, "chunk", chunk)
        assert torch.equal(target.begin([text[:39]], room=1).extend([text[39:]], [[-1]]), expected)
