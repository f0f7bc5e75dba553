"""What a round leaves behind is exactly the state after its accepted tokens, compared as tensors, for every family."""

from __future__ import annotations

import gc

import pytest
import torch

from devices import DEVICE
from families import FAMILIES, RECURRENT, VOCAB, tiny
from helpers import (
    PROMPT,
    PROMPTS,
    Alternate,
    assert_same_tensors,
    committed_tensors,
    engine,
    expected,
    lm,
    oracle,
    run,
    target_of,
)
from outrider.api import Engine

pytestmark = pytest.mark.any_device
# transformers clamps the time step of these from below in a prefill, but not in a cached step: for them the state is
# compared with that of single steps behind the prompt
CLAMPED = ("nemotron_h", "zamba2")
HYBRIDS = ["llama", "gemma3", "qwen3_next", "mamba", "mamba2", "falcon_h1", "jamba", "lfm2"]


def finished(family: str, drafter: object, shape: object, **options: object) -> tuple[list[int], list[torch.Tensor]]:
    """The text of a run and the tensors that its target committed."""
    going = run(target_of(family), drafter, [PROMPT], shape, **options)
    for _ in going.pieces():
        pass
    (row,) = going.sequences
    assert going.state.lengths == [len(row.ids) - 1]
    return row.ids, [tensor.clone() for tensor in committed_tensors(going.state)]


def fresh(family: str, ids: list[int], prefilled: int = len(PROMPT) - 1) -> list[torch.Tensor]:
    """The state after all but the last token, from a prefill (of `prefilled` tokens only where `CLAMPED`)."""
    target = target_of(family)
    if family not in CLAMPED:
        return committed_tensors(target.begin([ids[:-1]]))
    state = target.begin([ids[:prefilled]], room=len(ids))
    for token in ids[prefilled:-1]:
        state.extend([[token]], [[-1]])
        state.commit([[0]])
    return committed_tensors(state)


@pytest.mark.parametrize("shape", [5, (3, 2, 2), [[0], [0, 0], [1], [1, 0]]], ids=["chain", "3x2x2", "ragged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_tokens_leave_no_trace_in_the_state(family: str, shape: object) -> None:
    """transformers' cache crop does not roll back linear-attention states: rejected tokens stay in them, silently. Here the
    state after rounds of wrong drafts equals the state of a fresh prefill."""
    for rate in (0.0, 0.5):
        ids, state = finished(family, oracle(family, rate), shape, max_new_tokens=20)
        assert ids[len(PROMPT) :] == expected(family, max_new_tokens=20)
        assert_same_tensors(state, fresh(family, ids))


@pytest.mark.parametrize("family", HYBRIDS)
def test_two_hundred_wrong_rounds_do_not_drift(family: str) -> None:
    """Linear states without a snapshot ended in runs of '!' and NaN after a while elsewhere."""
    ids, state = finished(family, oracle(family, 0.0), (2, 1), max_new_tokens=200)
    assert ids[len(PROMPT) :] == expected(family, max_new_tokens=200)
    assert_same_tensors(state, fresh(family, ids))


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_round_that_drafts_nothing_is_an_ordinary_round(family: str) -> None:
    """vLLM read a stale recurrent state in a round without drafts after a round that accepted several tokens."""
    for pattern in ((True, False), (True, False, False), (False, True)):
        ids, state = finished(family, Alternate(oracle(family, 0.9), pattern), 4, max_new_tokens=40)
        assert ids[len(PROMPT) :] == expected(family, max_new_tokens=40)
        assert_same_tensors(state, fresh(family, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_extend_reads_the_committed_state_and_never_writes_it(family: str) -> None:
    state = target_of(family).begin([list(PROMPT)], room=40)
    before = [tensor.clone() for tensor in committed_tensors(state)]
    state.extend([[4, 8, 15]], [[-1, 0, 0]])
    state.extend([[16, 23, 42, 7]], [[2, 1, -1, 3]])
    assert_same_tensors(committed_tensors(state), before, 0.0)
    state.commit([[]])
    assert state.lengths == [len(PROMPT)]
    assert_same_tensors(committed_tensors(state), before, 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_grown_in_several_calls_scores_like_one(family: str) -> None:
    target = target_of(family)
    tokens, parents = [4, 8, 15, 16, 23, 42], [-1, 0, 0, 1, 2, -1]
    whole, grown = target.begin([list(PROMPT)], 40), target.begin([list(PROMPT)], 40)
    together = whole.extend([tokens], [parents])[0]
    parts, at = [], {-1: -1}
    for a, b in ((0, 1), (1, 3), (3, 6)):
        at.update({node: grown.pending + node - a for node in range(a, b)})
        parts.append(grown.extend([tokens[a:b]], [[at[parent] for parent in parents[a:b]]])[0])
    assert torch.allclose(torch.cat(parts), together, atol=1e-4 * float(together.abs().max()))
    whole.commit([[0, 2, 4]])
    grown.commit([[at[0], at[2], at[4]]])
    for state in (whole, grown):
        assert_same_tensors(committed_tensors(state), fresh(family, [*PROMPT, 4, 15, 23, 0], len(PROMPT)))


@pytest.mark.parametrize("family", FAMILIES)
def test_keep_leaves_the_kept_rows_as_they_were(family: str) -> None:
    target = target_of(family)
    state = target.begin([list(prompt) for prompt in PROMPTS], room=40)
    state.extend([[4, 8], [15], [16, 23, 42]], [[-1, 0], [-1], [-1, 0, 1]])
    state.commit([[0, 1], [0], [0, 1]])
    state.keep([2, 0])
    assert state.lengths == [len(PROMPTS[2]) + 2, len(PROMPTS[0]) + 2]
    for row, ids in enumerate(([*PROMPTS[2], 16, 23], [*PROMPTS[0], 4, 8])):
        assert_same_tensors(committed_tensors(state, row), fresh(family, [*ids, 0], len(ids) - 2))
    logits = state.extend([[9], [9, 5]], [[-1], [-1, 0]])
    for row, ids in enumerate(([*PROMPTS[2], 16, 23, 9], [*PROMPTS[0], 4, 8, 9])):
        wanted = tiny(family)(input_ids=torch.tensor([ids], device=DEVICE), use_cache=False).logits[0, -1]
        assert torch.allclose(logits[row, 0], wanted, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "mamba", "rwkv"])
def test_a_path_that_is_none_is_refused(family: str) -> None:
    state = target_of(family).begin([list(PROMPT)], room=8)
    state.extend([[4, 8, 15]], [[-1, 0, 0]])
    for path in ([1], [0, 3], [1, 2], [0, 0], [-1]):
        with pytest.raises(IndexError, match="not a path"):
            state.commit([path])
    with pytest.raises(IndexError, match="parents come before children"):
        state.extend([[1]], [[9]])


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "mamba"])
def test_memory_of_a_state_does_not_grow_with_rounds(family: str) -> None:
    """Everything is allocated when a run begins; two hundred rounds later it is still that."""
    going = run(target_of(family), lm(family, 1), [PROMPT], (3, 2, 2), max_new_tokens=200)
    sizes = []
    for _ in going.pieces():
        sizes.append((going.state.bytes(), going.drafting.state.bytes()))
    assert len(set(sizes[len(sizes) // 10 :])) == 1
    assert sizes[-1][0] > 0


@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv"])
def test_memory_does_not_grow_with_requests(family: str) -> None:
    """Hours of requests leave no tensor behind."""
    serving = Engine(tiny(family), None, family, ["ngram", lm(family, 1)])

    def alive(requests: int) -> int:
        for seed in range(requests):
            serving.generate([list(p) for p in PROMPTS], shape=(2, 2), max_new_tokens=6, temperature=1.0, seed=seed)
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    first = alive(3)
    assert alive(12) == first


@pytest.mark.parametrize("family", RECURRENT)
def test_random_weights_give_states_that_matter(family: str) -> None:
    """Guards the tests above: another prefix leaves another state, and another next token law."""
    one, other = fresh(family, [3, 4, 5, 0]), fresh(family, [3, 7, 5, 0])
    assert any(float((a - b).abs().max()) > 1e-3 for a, b in zip(one, other))
    a, b = (
        tiny(family)(input_ids=torch.tensor([ids], device=DEVICE), use_cache=False).logits[0, -1]
        for ids in ([3, 4, 5], [3, 7, 5])
    )
    assert float((a - b).abs().max()) > 1e-2


def test_nan_weights_raise_instead_of_writing_something() -> None:
    """A state gone bad wrote '!' for ever elsewhere; logits that are no numbers must stop a run with a sentence."""
    import copy

    model = copy.deepcopy(tiny("llama"))
    broken = Engine(model, None, "llama", "ngram")
    model.lm_head.weight[VOCAB // 2] = float("nan")
    for options in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 1, "rule": "mss"}):
        with pytest.raises(ValueError, match="not finite"):
            broken.generate(list(PROMPT), max_new_tokens=4, shape=2, **options)
    assert engine("llama").generate(list(PROMPT), max_new_tokens=4).token_ids == expected("llama", max_new_tokens=4)
