"""Rows of a batch: each is exactly what it would be alone, whatever its neighbours do."""

from __future__ import annotations

from typing import Any

import pytest

from families import FAMILIES, tiny
from helpers import NEW, OPTIONS, PROMPTS, SHAPES, Alternate, Spoiled, Watch, engine, expected, lm, oracle
from outrider.api import Engine

ROWS = [list(prompt) for prompt in PROMPTS]
DEEP = ["llama", "gemma3", "qwen3_next", "mamba"]


def alone(family: str, key: str, **given: Any) -> list[list[int]]:
    return [expected(family, prompt, **{**OPTIONS[key], **given}) for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", ["same", "half", "alternate", "merged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_equals_its_single_run(family: str, drafter: str) -> None:
    """Batches are refused, or crash where rows accept different lengths, in project after project since 2023."""
    for shape, key in (("chain", "sampled"), ("3x2x2", "greedy")):
        results = engine(family, drafter).generate(ROWS, shape=SHAPES[shape], max_new_tokens=NEW, **OPTIONS[key])
        assert [r.token_ids for r in results] == alone(family, key), (shape, key)


@pytest.mark.parametrize("shape", ["off", "bulge", "best12", "ragged"])
@pytest.mark.parametrize("drafter", ["same", "wrong", "none", "ngram", "merged", "recurrent"])
@pytest.mark.parametrize("family", DEEP)
def test_rows_of_every_shape_and_option(family: str, drafter: str, shape: str) -> None:
    for key in OPTIONS if family == "llama" else ("greedy", "bias"):
        results = engine(family, drafter).generate(ROWS, shape=SHAPES[shape], max_new_tokens=NEW, **OPTIONS[key])
        assert [r.token_ids for r in results] == alone(family, key), key
        assert [r.prompt_tokens for r in results] == [len(row) for row in ROWS]


@pytest.mark.parametrize("family", DEEP)
def test_rows_have_different_luck(family: str) -> None:
    """A drafter that suits one row and not the others: rows advance at different speed and stay right."""
    for drafter in ("ngram", "half", "recurrent"):
        results = engine(family, drafter).generate(ROWS, shape=4, max_new_tokens=40)
        for result, prompt in zip(results, PROMPTS):
            assert result.token_ids == expected(family, prompt, max_new_tokens=40)
    lengths = {r.stats.rounds for r in engine(family, "ngram").generate(ROWS, shape=4, max_new_tokens=40)}
    assert len(lengths) > 1


@pytest.mark.parametrize("family", DEEP)
def test_a_list_of_seeds_gives_every_row_its_own(family: str) -> None:
    """One request's seed must not reach into another's text: each row has its own, as when it is alone."""
    seeds = [5, 6, 7]
    for drafter in ("same", "half", "merged"):
        results = engine(family, drafter).generate(ROWS, shape=(2, 2), seed=seeds, temperature=1.0, max_new_tokens=NEW)
        for result, prompt, seed in zip(results, PROMPTS, seeds):
            assert result.token_ids == expected(family, prompt, seed=seed, temperature=1.0)
            assert result.seed == seed


def test_seeds_of_one_prompt_give_different_texts() -> None:
    """A drafter's sampling must not rule the target's: elsewhere five samples of a prompt became one text five times."""
    prompt = [list(PROMPTS[1])] * 5
    for drafter in ("same", "merged", "ngram"):
        results = engine("llama", drafter).generate(
            prompt, shape=(2, 2), seed=[1, 2, 3, 4, 5], temperature=1.0, max_new_tokens=NEW
        )
        assert len({tuple(r.token_ids) for r in results}) == 5


def test_one_seed_is_the_seed_of_all_rows() -> None:
    results = engine("llama", "half").generate([ROWS[0]] * 3, shape=3, seed=4, temperature=1.0, max_new_tokens=NEW)
    assert {tuple(r.token_ids) for r in results} == {tuple(expected("llama", PROMPTS[0], seed=4, temperature=1.0))}


def test_a_wrong_number_of_seeds_is_refused() -> None:
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        engine("llama").generate(ROWS, seed=[1, 2], temperature=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_is_always_accepted_in_a_batch(family: str) -> None:
    """Padded drafter batches cost vLLM acceptance that nobody saw, since the text stayed right."""
    watch = Watch(lm(family))
    drafting = Engine(tiny(family), None, family, watch)
    for shape, key in (("chain", "greedy"), ("3x2x2", "sampled"), ("bulge", "bias"), ("ragged", "sampled")):
        watch.rounds.clear()
        drafting.generate(ROWS, shape=SHAPES[shape], max_new_tokens=NEW, **OPTIONS[key])
        assert watch.misses() == 0, (shape, key)
        assert watch.accepted() > 6


@pytest.mark.parametrize("family", DEEP)
def test_the_same_model_is_accepted_again_after_rejections_in_a_batch(family: str) -> None:
    for key in ("greedy", "sampled"):
        spoiled = Spoiled(lm(family))
        drafting = Engine(tiny(family), None, family, spoiled)
        results = drafting.generate(ROWS, shape=(2, 2, 1), max_new_tokens=20, **OPTIONS[key])
        assert [r.token_ids for r in results] == alone(family, key, max_new_tokens=20)
        assert spoiled.spoiled > 6
        assert spoiled.accepted > 6
        assert spoiled.misses == 0


@pytest.mark.parametrize("family", DEEP)
def test_the_same_model_is_accepted_after_a_long_pause_in_a_batch(family: str) -> None:
    """Rows that lag behind by different numbers of tokens, some by more than is caught up at once."""
    watch = Watch(lm(family))
    prompts = [ROWS[0], ROWS[2] * 7, ROWS[1]]
    pattern = (*[False] * 75, *[True] * 10)
    drafting = Engine(tiny(family), None, family, Alternate(watch, pattern))
    results = drafting.generate(prompts, shape=(1, 1), max_new_tokens=90)
    for result, prompt in zip(results, prompts):
        assert result.token_ids == expected(family, prompt, max_new_tokens=90)
    assert watch.misses() == 0
    assert watch.accepted() > 12


@pytest.mark.parametrize("family", DEEP)
def test_rows_end_at_different_times(family: str) -> None:
    """An end token stops its own row only."""
    texts = alone(family, "sampled", max_new_tokens=20)
    for place in (0, 1, 2):
        eos = texts[place][4]
        wanted = []
        for text in texts:
            cut = text.index(eos) + 1 if eos in text else len(text)
            wanted.append((text[:cut], "stop" if eos in text else "length"))
        assert len({len(text) for text, _ in wanted}) > 1
        for drafter in ("same", "merged", "alternate", "ngram"):
            results = engine(family, drafter).generate(
                ROWS, shape=(2, 1, 1), max_new_tokens=20, eos_token_id=eos, **OPTIONS["sampled"]
            )
            assert [(r.token_ids, r.finish_reason) for r in results] == wanted, drafter


def test_a_big_batch_that_shrinks_row_by_row() -> None:
    """Rows leave one after the other, in no order; each must find its own state afterwards."""
    prompts = [[3 + i % 5, 7, 11, *range(i % 7)] for i in range(12)]
    for family in ("llama", "gemma3", "mamba", "qwen3_next"):
        results = engine(family, "merged").generate(
            prompts,
            shape=(2, 1),
            max_new_tokens=24,
            temperature=1.0,
            seed=list(range(12)),
            eos_token_id=[1, 9, 17, 25, 33],
        )
        for i, (result, prompt) in enumerate(zip(results, prompts)):
            assert result.token_ids == expected(
                family, prompt, max_new_tokens=24, temperature=1.0, seed=i, eos_token_id=[1, 9, 17, 25, 33]
            )
        assert len({len(r.token_ids) for r in results}) > 3


def test_single_prompts_and_lists_come_back_as_they_were_given() -> None:
    import torch

    one = engine("llama").generate(ROWS[0], max_new_tokens=2)
    (listed,) = engine("llama").generate([ROWS[0]], max_new_tokens=2)
    (tensor,) = engine("llama").generate(torch.tensor([ROWS[0]]), max_new_tokens=2)
    flat = engine("llama").generate(torch.tensor(ROWS[0]), max_new_tokens=2)
    assert one.token_ids == listed.token_ids == tensor.token_ids == flat.token_ids


def test_the_stream_of_a_batch_names_its_rows() -> None:
    wanted = alone("llama", "greedy")
    got: list[list[int]] = [[], [], []]
    drafted = 0
    stream = engine("llama", "half").stream(ROWS, shape=3, max_new_tokens=NEW)
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            results = end.value
            break
        got[piece.row].append(piece.token)
        drafted += piece.drafted
    assert got == wanted == [r.token_ids for r in results]
    assert drafted == sum(r.stats.accepted for r in results) > 0


def test_counts_are_per_row() -> None:
    results = engine("llama", "half").generate(ROWS, shape=3, max_new_tokens=NEW)
    for result in results:
        assert result.stats.accepted + result.stats.rounds == result.stats.emitted == NEW
    assert oracle("llama", 0.5).name == engine("llama", "half").drafter.name
