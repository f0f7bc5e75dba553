"""Recurrent targets scored with factors: the same text, and after every round the very state of a fresh run."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
import transformers

from families import FAMILIES, MORE, VOCAB, tiny
from helpers import PROMPT, PROMPTS, SHAPES, Oracle, assert_same_tensors, committed_tensors, run, target_of
from outrider.api import Engine
from outrider.cache.factor_states import FactorStates
from outrider.mixers.rules import NAMES
from outrider.models.factor_model import FactorTreeModel
from outrider.models.selftest import tree_model
from outrider.models.tree_model import CachedTreeModel, Unsupported

DELTA = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"]
MAMBA2 = ["mamba2", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "bamba"]
MAMBA1 = ["mamba", "falcon_mamba", "jamba"]
FACTORED = [*DELTA, *MAMBA2, *MAMBA1, "lfm2"]
FEW = ["qwen3_next", "kimi_linear", "falcon_h1", "mamba"]
# transformers clamps time steps of these in a prefill, but not in a cached step, which a node is
CLAMPED = ("nemotron_h", "zamba2")


@functools.cache
def double(family: str) -> FactorTreeModel:
    model = copy.deepcopy(tiny(family)).double()
    model.set_experts_implementation("eager")  # torch's grouped product of experts knows no float64
    return FactorTreeModel(model)


def rounds(target: Any, family: str, seed: int, count: int) -> Any:
    """Rounds of random trees with random accepted paths, some grown in two calls: (all tokens, state) after each."""
    rng = random.Random(seed)
    ids, state = list(PROMPT), target.begin([list(PROMPT)], 200)
    for _ in range(count):
        nodes = rng.randrange(1, 11)
        parents = [-1, *(rng.randrange(max(-1, node - 4), node) for node in range(1, nodes))]
        tokens = [rng.randrange(VOCAB) for _ in range(nodes)]
        split = rng.choice([nodes, max(1, nodes // 2)])
        state.extend([tokens[:split]], [parents[:split]])
        first = state.pending  # padding of the first call lies in between
        at = [node if node < split else first + node - split for node in range(nodes)]
        if split < nodes:
            state.extend([tokens[split:]], [[at[p] if p >= 0 else -1 for p in parents[split:]]])
        path, node = [], rng.choice([*range(nodes), -1])
        while node >= 0:
            path.append(node)
            node = parents[node]
        state.commit([[at[node] for node in path[::-1]]])
        ids += [tokens[node] for node in path[::-1]]
        yield ids, state


def fresh(target: Any, ids: list[int], prefilled: int) -> list[torch.Tensor]:
    """The state after `ids`, of which a prefill takes the first ones and single tokens follow."""
    state = target.begin([ids[:prefilled]], 200)
    for token in ids[prefilled:]:
        state.extend([[token]], [[-1]])
        state.commit([[0]])
    return committed_tensors(state)


# -- who gets factors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_known_recurrence_is_scored_with_factors(family: str) -> None:
    model, tested = tree_model(tiny(family))
    assert (tested.way == "factors, tree mask") == (family in FACTORED)
    if family in FACTORED:
        assert isinstance(model.begin([[1]]).cache.states, FactorStates)
        assert 0 < model.state_bytes_per_node() < model.dense_bytes_per_node()


@pytest.mark.parametrize("family", MORE)
def test_near_relatives_too_or_the_reason_is_told(family: str) -> None:
    target, tested = tree_model(tiny(family))
    if family == "zamba":
        assert tested.way == "waves of single steps"
        assert any("one per head" in note for note in tested.notes)
        return
    assert tested.way == "factors, tree mask"
    for ids, state in rounds(target, family, 4, 4):
        assert_same_tensors(committed_tensors(state), committed_tensors(target.begin([ids])), 1e-5)


@pytest.mark.parametrize("family", ["mamba", "jamba", "zamba"])
def test_a_prompt_in_pieces_leaves_the_state_of_the_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Mamba-1 layers begin anew with every block; zamba's have one recurrence per head."""
    target, prompt = tree_model(tiny(family))[0], [(7 * i + 3) % VOCAB for i in range(17)]
    whole = committed_tensors(target.begin([prompt]))
    for piece in (1, 2, 5):
        monkeypatch.setattr(CachedTreeModel, "chunk", piece)
        assert_same_tensors(committed_tensors(target.begin([prompt])), whole, 1e-5)


def test_a_hooked_mixer_is_stepped_and_the_reason_is_told() -> None:
    model = copy.deepcopy(tiny("qwen3_next"))
    mixer = next(m for m in model.modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet")
    inner = mixer.forward
    mixer.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    tested = tree_model(model)[1]
    assert tested.way == "waves of single steps"
    assert "not FactorTreeModel: a hook sits on the forward of Qwen3NextGatedDeltaNet" in tested.notes


def test_an_attention_model_has_nothing_to_keep_factors_of() -> None:
    with pytest.raises(Unsupported, match=r"^$"):
        FactorTreeModel(tiny("gpt2"))


def test_transformers_functions_stay_as_they_are() -> None:
    """Other models of the process, and this one outside of trees, run transformers' own code."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    names = ("causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule")
    before, ids = [getattr(module, name) for name in names], torch.tensor([list(PROMPT)])
    plain = copy.deepcopy(tiny("qwen3_next"))(input_ids=ids).logits
    target = target_of("qwen3_next")
    state = target.begin([list(PROMPT)], 8)
    state.extend([[1, 2]], [[-1, -1]])
    assert [getattr(module, name) for name in names] == before
    assert torch.equal(target.model(input_ids=ids).logits, plain)


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FACTORED)
def test_text_is_that_of_transformers_generate(family: str) -> None:
    ids = torch.tensor([list(PROMPT)])
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    wanted = tiny(family).generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(PROMPT) :].tolist()
    for shape in ("chain", "3x2x2", "ragged"):
        for rate in (0.5, 1.0):
            engine = Engine(tiny(family), None, family, Oracle(target_of(family), rate))
            assert engine.selftest.way == "factors, tree mask"
            result = engine.generate(list(PROMPT), shape=SHAPES[shape], max_new_tokens=24)
            assert result.token_ids == wanted
            assert result.stats.accepted > 0


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FACTORED)
def test_after_every_round_the_state_is_that_of_a_fresh_run(family: str) -> None:
    target = target_of(family)
    for ids, state in rounds(target, family, 1, 8):
        assert state.lengths == [len(ids)]
        wanted = fresh(target, ids, len(PROMPT) if family in CLAMPED else len(ids))
        assert_same_tensors(committed_tensors(state), wanted, 1e-5)


@pytest.mark.parametrize("family", FACTORED)
def test_in_float64_the_state_is_that_of_single_steps_to_the_last_digits(family: str) -> None:
    target = double(family)
    for ids, state in rounds(target, family, 2, 6):
        assert_same_tensors(committed_tensors(state), fresh(target, ids, len(PROMPT)), 1e-10)


@pytest.mark.parametrize("family", FACTORED)
def test_swapping_siblings_changes_nothing(family: str) -> None:
    target, tokens, parents = double(family), [4, 8, 15, 16, 23, 42, 7], [-1, 0, 0, 1, 1, 2, 2]
    order = [0, 2, 1, 5, 6, 3, 4]
    one, other = (target.begin([list(PROMPT)], 20) for _ in range(2))
    logits = one.extend([tokens], [parents])[0]
    swapped = other.extend([[tokens[node] for node in order]], [parents])[0]
    assert torch.allclose(swapped, logits[order], atol=1e-9, rtol=1e-9)
    one.commit([[0, 2, 6]])
    other.commit([[0, 1, 4]])
    assert_same_tensors(committed_tensors(other), committed_tensors(one), 1e-10)


@pytest.mark.parametrize("family", FEW)
def test_five_hundred_wrong_rounds_do_not_drift(family: str) -> None:
    """Only the root of each tree is kept, 500 times; the state is still that of the same tokens in float64, without trees.

    (Of Qwen3-Next, transformers' own prefill of 500 tokens is four times further off than these 500 rounds.)
    """
    rng = random.Random(3)
    ids = [rng.randrange(VOCAB) for _ in range(500)]
    state, exact = (target.begin([list(PROMPT)], 520) for target in (target_of(family), double(family)))
    for token in ids:
        state.extend([[token, rng.randrange(VOCAB), rng.randrange(VOCAB)]], [[-1, 0, 0]])
        state.commit([[0]])
    for at in range(0, 500, 50):
        exact.extend([ids[at : at + 50]], [list(range(-1, 49))])
        exact.commit([list(range(50))])
    assert_same_tensors(committed_tensors(state), committed_tensors(exact), 1e-5)


@pytest.mark.parametrize("way", ["serial", "chains", "masked"])
@pytest.mark.parametrize("family", FACTORED)
def test_every_way_gives_the_same_logits_and_states(family: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different trees, grown in two calls: each way against waves of single steps."""
    if family != "lfm2":  # whose layers are convolutions only
        used = []
        monkeypatch.setattr(target_of(family), "pick", lambda rule, nodes, numbers: used.append(rule) or way)
    target, waves = target_of(family), CachedTreeModel(tiny(family))
    states = [model.begin([list(p) for p in PROMPTS], 40) for model in (target, waves)]
    first = [[4, 8, 15], [16], [23, 42, 7, 9]], [[-1, 0, 0], [-1], [-1, 0, 1, 0]]
    second = [[1, 2], [3, 5, 6], [11]], [[1, -1], [0, 4, 4], [2]]
    for tokens, parents in (first, second):
        # both pad to four nodes in the first call where there is attention
        shift = states[0].pending - 4 if tokens is second[0] else 0
        parents = [[p + shift if p >= 4 else p for p in row] for row in parents]
        one, other = (state.extend(tokens, parents) for state in states)
        for row in range(3):
            count = len(tokens[row])
            assert torch.allclose(one[row, :count], other[row, :count], atol=1e-4 * float(other.abs().max()))
    for state in states:
        state.commit([[0, 1], [0, 4], [0, 1, 2]])
    for row in range(3):
        one, other = (committed_tensors(state, row) for state in states)
        assert_same_tensors(one, other, 1e-5)
    if family != "lfm2":
        assert len(set(used)) == 1 and set(used) <= set(NAMES)


def test_commits_wait_until_the_state_is_needed() -> None:
    state = target_of("qwen3_next").begin([list(PROMPT)], 20)
    state.extend([[4, 8, 15]], [[-1, 0, 0]])
    state.commit([[0, 2]])
    states = state.cache.states
    assert all(layer.due for layer in states.layers.values())
    state.extend([[16]], [[-1]])
    assert not any(layer.due for layer in states.layers.values())


def test_a_run_that_raised_in_the_middle_leaves_states_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer applies what was committed once, even if a pass breaks off behind it."""
    target = target_of("qwen3_next")
    one, other = (target.begin([list(PROMPT)], 20) for _ in range(2))
    for state in (one, other):
        state.extend([[4, 8, 15]], [[-1, 0, 0]])
        state.commit([[0, 2]])
    last = target.model.model.layers[-1]
    hook = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        one.extend([[1]], [[-1]])
    hook.remove()
    assert_same_tensors(committed_tensors(one), committed_tensors(other), 0.0)


def test_runs_of_several_rows_write_what_each_row_writes_alone() -> None:
    for family in FEW:
        going = run(target_of(family), Oracle(target_of(family), 0.6), PROMPTS, (2, 2, 1), max_new_tokens=12)
        for _ in going.pieces():
            pass
        for row, prompt in zip(going.sequences, PROMPTS):
            alone = run(target_of(family), Oracle(target_of(family), 0.6), [prompt], (2, 2, 1), max_new_tokens=12)
            for _ in alone.pieces():
                pass
            assert row.new_ids == alone.sequences[0].new_ids


def test_the_families_here_are_those_of_transformers() -> None:
    assert all(hasattr(transformers, f"{n}Config") for n in ("Qwen3Next", "KimiLinear", "Mamba2", "Lfm2"))
