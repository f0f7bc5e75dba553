"""The slow, obvious loop that every other test compares with is itself compared with transformers' own `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import FAMILIES, tiny
from helpers import NEW, PROMPT, PROMPTS, expected
from outrider.options import Options
from outrider.reference import reference_generate


def theirs(family: str, prompt: tuple[int, ...], new: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = tiny(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, **options
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    """Assisted generation gave other greedy texts than plain generate: the promise is about transformers' own text."""
    for prompt in (PROMPT, PROMPTS[0], PROMPTS[2]):
        assert expected(family, prompt, max_new_tokens=24) == theirs(family, prompt, 24)


RULES: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.5},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[42], [18], [25, 18], [5, 9, 13]]},
    "end token": {"eos_token_id": 25},
    "many end tokens": {"eos_token_id": [25, 18, 30]},
    "least new tokens": {"eos_token_id": [25, 18, 30], "min_new_tokens": 7},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[42], [9, 9]],
        "eos_token_id": [25, 18, 30],
        "min_new_tokens": 9,
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_processed_greedy_text_is_that_of_transformers(rule: str) -> None:
    changed = 0
    for prompt in (PROMPT, *PROMPTS):
        ours = expected("llama", prompt, max_new_tokens=24, **RULES[rule])
        assert ours == theirs("llama", prompt, 24, **RULES[rule])
        changed += ours != expected("llama", prompt, max_new_tokens=24)
    assert changed, "the rule changes nothing on these prompts: choose others"


def test_sampled_text_follows_the_seed() -> None:
    texts = [tuple(expected("llama", temperature=1.0, seed=seed)) for seed in range(5)]
    assert len(set(texts)) == 5
    again = reference_generate(tiny("llama"), PROMPT, Options(max_new_tokens=NEW, temperature=1.0), seed=3)
    assert tuple(again) == texts[3]


def test_random_weights_make_texts_that_depend_on_the_prompt() -> None:
    """Guards all parity tests: a model that writes the same whatever it read would pass anything."""
    for family in FAMILIES:
        texts = {tuple(expected(family, prompt)) for prompt in (PROMPT, *PROMPTS)}
        assert len(texts) > 1, family
