"""Attention by compiled kernels: the same bits wherever slots lie, and no outputs that nobody asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import committed_tensors, tiny
from native_kernels import needs_kernels
from outrider.cache.attention import BLOCK, AttentionLayer
from outrider.models.lean import LeanTreeModel
from outrider.models.native import NativeTreeModel
from outrider.native.decoder import Held, TextPass
from outrider.native.library import library

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 168,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}
LAYOUTS = [
    {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
    {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 6},
    {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 40},
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    needs_kernels()


def _llama(dtype: torch.dtype, **sizes: Any) -> NativeTreeModel:
    torch.manual_seed(2)
    config = tf.LlamaConfig(**SIZES, **sizes)
    return NativeTreeModel(tf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False))


_made: dict[Any, NativeTreeModel] = {}


def _model(place: int, dtype: torch.dtype) -> NativeTreeModel:
    if (place, dtype) not in _made:
        _made[place, dtype] = _llama(dtype, **LAYOUTS[place])
    return _made[place, dtype]


@settings(max_examples=25, deadline=None)
@given(
    place=st.integers(0, len(LAYOUTS) - 1),
    dtype=st.sampled_from(DTYPES),
    prompt=st.integers(1, 70),
    rounds=st.lists(
        st.tuples(st.lists(st.integers(0, 10**6), min_size=1, max_size=40), st.integers(0, 10**6)),
        min_size=1,
        max_size=4,
    ),
)
def test_paths_of_trees_have_the_bits_of_text_that_was_fed_token_by_token(
    place: int, dtype: torch.dtype, prompt: int, rounds: list[tuple[list[int], int]]
) -> None:
    """Whatever slots of a block its keys lay in, and between whatever others."""
    model = _model(place, dtype)
    tree, plain = (model.begin([[7 * i % 64 for i in range(prompt)]], room=4) for _ in range(2))
    for seeds, pick in rounds:
        parents = [seed % (node + 1) - 1 for node, seed in enumerate(seeds)]
        tokens = [(seed // 64) % 64 for seed in seeds]
        logits_NV = tree.extend([tokens], [parents])[0]
        node, path = pick % len(parents), list[int]()
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        for node in path:
            assert torch.equal(plain.extend([[tokens[node]]], [[-1]])[0, 0], logits_NV[node])
            plain.commit([[0]])
        tree.commit([path])
        held, wanted = committed_tensors(tree), committed_tensors(plain)
        assert all(torch.equal(one, other) for one, other in zip(held, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_texts_have_the_weights_of_torch(dtype: torch.dtype) -> None:
    """Weights are added up as whole numbers: over thousands of slots, too, and where all weigh the same."""
    model = _model(0, dtype)
    exact = LeanTreeModel(copy.deepcopy(model.model).double())
    for text in ([(11 * i + i // 64) % 64 for i in range(3000)], [5] * 3000):
        ours, torchs, wanted = (
            way.begin([text], room=8).extend([[1, 2, 3]], [[-1, 0, 0]])[0].double()
            for way in (model, LeanTreeModel(model.model), exact)
        )
        error, allowed = ((found - wanted).square().mean().sqrt() for found in (ours, torchs))
        assert float(error) < 1.5 * float(allowed) + 1e-5 * float(wanted.square().mean().sqrt())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_of_which_no_outputs_are_wanted_leaves_the_keys_and_values_of_one_whose_are(family: str) -> None:
    target, text = NativeTreeModel(tiny(family)), [3, 9, 4, 1, 5]
    without, with_taps = (target.begin([text], room=4, taps=taps) for taps in ((), (len(target.blocks) - 1,)))
    pairs = zip(committed_tensors(without), committed_tensors(with_taps), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", range(len(LAYOUTS)))
def test_outputs_that_are_wanted_have_the_bits_of_all_and_the_others_are_left_alone(
    place: int, dtype: torch.dtype
) -> None:
    model, count, width = _model(place, dtype), 9, SIZES["hidden_size"]
    decoder, run = model.decoder, None
    found = []
    for wanted in (0, 1, 5, count - 1, count):
        shape = 1, model.groups, BLOCK, model.head_size
        rooms = [[torch.zeros(shape, dtype=dtype) for _ in decoder.layers] for _ in range(2)]
        run = TextPass(decoder)  # type: ignore[arg-type]
        run.attend(Held(*rooms))
        run.rotate(model.rotations(model.kind_names[0], rooms[0][0], count))
        stream = torch.randn(1, count, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        hidden = torch.full((count, width), 77.0, dtype=dtype)
        seen = bytes(slot <= node for node in range(count) for slot in range(count))
        run(stream.data_ptr(), 0, range(count), seen, hidden=hidden.data_ptr(), wanted=wanted)
        assert bool((hidden[:wanted] == 77.0).all())
        found.append((wanted, hidden, rooms))
    _, hidden, rooms = found[0]
    assert not bool((hidden == 77.0).any())
    for wanted, some, others in found[1:]:
        assert torch.equal(some[wanted:], hidden[wanted:])
        assert all(torch.equal(a, b) for one, other in zip(rooms, others) for a, b in zip(one, other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_kernels_move_keys_alike(dtype: torch.dtype) -> None:
    layers = [AttentionLayer(20) for _ in range(3)]
    generator, like = torch.Generator().manual_seed(0), torch.empty(2, 1, dtype=dtype)
    for layer in layers:
        assert layer.capacity == 2 * BLOCK
        layer.reserve(like, 2, 6, 40)
        assert layer.keys_BHSD is not None and layer.values_BHSD is not None and layer.capacity % BLOCK == 0
        for held in (layer.keys_BHSD, layer.values_BHSD):
            held.copy_(torch.randn(held.shape, generator=generator.manual_seed(3)))
    slots, target = [17, 18, 31, 33, 39], 15
    layers[0].move(1, torch.tensor(slots), target)
    count = len(slots)
    layers[1].move_many(torch.ones(count, dtype=torch.long), torch.tensor(slots), torch.arange(target, target + count))
    parts = [layers[2].keys_BHSD], [layers[2].values_BHSD]
    Held(*parts, library()).move(1, slots, target)  # type: ignore[arg-type]
    for layer in layers[1:]:
        assert torch.equal(layer.blocks(), layers[0].blocks())
        assert torch.equal(layer.values_BHSD, layers[0].values_BHSD)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="belong to compiled kernels"):
        layers[0].write(like.view(2, 1, 1, 1), like.view(2, 1, 1, 1), 0)
