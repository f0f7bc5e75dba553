"""Two vocabularies that are not quite the same: padding is harmless, another meaning is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from families import tiny
from helpers import Watch, expected
from outrider.api import Engine
from outrider.drafters.lm import LMDrafter
from outrider.drafters.vocabulary import shared_vocabulary
from outrider.models.selftest import tree_model

PROMPT = [5, 9, 13, 7, 5, 9, 13, 7, 5]
KEYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 1.2, "seed": 1},
    {"logit_bias": {3: 1.0, 31: 2.0}, "bad_words_ids": [[4], [5, 9]], "min_new_tokens": 4, "eos_token_id": [30, 31]},
]


def words(count: int, order: list[int] | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of `count` words, in an order of their ids."""
    ids = order or list(range(count))
    core = Tokenizer(WordLevel({f"w{word}": i for i, word in enumerate(ids)}, unk_token="w0"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def drafting(target_vocab: int, drafter_vocab: int, shared: int | None, family: str = "llama") -> tuple[Engine, Watch]:
    own = LMDrafter(tree_model(tiny(family, 1, drafter_vocab))[0], family, shared)
    watch = Watch(own)
    return Engine(tiny("llama", 0, target_vocab), None, "llama", watch), watch


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.parametrize("sizes", [(40, 32), (32, 40), (40, 40)], ids=str)
def test_a_vocabulary_padded_to_another_size_changes_nothing(sizes: tuple[int, int], family: str) -> None:
    """The same tokenizer with embeddings padded to another size was refused or crashed: users edited config files by hand."""
    engine, watch = drafting(*sizes, shared=32, family=family)
    for given in KEYS:
        wanted = expected("llama", PROMPT, vocab=sizes[0], max_new_tokens=24, **given)
        for shape in (4, (3, 2), "best8", [[0], [1], [1, 0]]):
            result = engine.generate(PROMPT, shape=shape, max_new_tokens=24, **given)
            assert result.token_ids == wanted, (given, shape)
            proposed = [token for draft, _ in watch.walks() for token in draft.tree.tokens[1:]]
            assert proposed
            assert max(proposed) < 32


def test_a_target_that_writes_ids_beyond_the_drafters_embeddings() -> None:
    """The target may write, and the prompt may hold, ids that a smaller drafter has no embedding for: it must not crash."""
    engine, _ = drafting(40, 32, shared=32)
    given = {"logit_bias": dict.fromkeys(range(32, 40), 4.0), "temperature": 1.0, "seed": 2}
    for prompt in (PROMPT, [36, 5, 39]):
        wanted = expected("llama", prompt, vocab=40, max_new_tokens=16, **given)
        assert any(token >= 32 for token in wanted)
        assert engine.generate(prompt, shape=(2, 2), max_new_tokens=16, **given).token_ids == wanted


@pytest.mark.parametrize("sampling", ["topk", "without_replacement", "iid"])
def test_padded_vocabularies_under_mss(sampling: str) -> None:
    for sizes in ((40, 32), (32, 40)):
        engine, watch = drafting(*sizes, shared=32)
        for seed in range(4):
            options = {"rule": "mss", "draft_sampling": sampling, "temperature": 1.0, "seed": seed}
            options["logit_bias"] = dict.fromkeys(range(32, sizes[0]), -50.0)
            options["logit_bias"][1] = 0.0
            result = engine.generate(PROMPT, shape=(3, 2), max_new_tokens=16, **options)
            assert len(result.token_ids) == 16
            assert max(result.token_ids) < 32
            assert all(token < 32 for draft, _ in watch.walks() for token in draft.tree.tokens[1:])


def test_the_shared_part_ends_with_the_last_common_id() -> None:
    assert shared_vocabulary(words(32), words(32), 40, "d") == 32
    assert shared_vocabulary(words(40), words(32), 64, "d") == 32
    assert shared_vocabulary(words(32), words(40), 64, "d") == 32
    assert shared_vocabulary(words(32), None, 40, "d") == 32
    assert shared_vocabulary(None, words(32), 40, "d") == 40
    assert shared_vocabulary(None, None, 40, "d") == 40


def test_ids_beyond_the_tokenizer_are_never_proposed_by_a_live_model() -> None:
    """A drafter's padding rows are no tokens."""
    tokenizer = words(32)
    engine = Engine(tiny("llama", 0, 40), tokenizer, "llama", tiny("llama", 1, 40))
    assert engine.drafter.vocab == 32
    result = engine.generate(PROMPT, shape=(3, 2), max_new_tokens=24)
    assert result.token_ids == expected("llama", PROMPT, vocab=40, max_new_tokens=24)


def test_a_tokenizer_with_other_meanings_is_refused_and_the_ids_are_named() -> None:
    """A drafter of the same size whose ids mean other strings was accepted silently: here the first differing ids are told."""
    swapped = list(range(32))
    swapped[3], swapped[7] = 7, 3
    with pytest.raises(ValueError, match="another vocabulary") as refusal:
        shared_vocabulary(words(32), words(32, swapped), 32, "other")
    message = str(refusal.value)
    assert "2 ids differ" in message
    assert "3 is 'w7' there and 'w3' here" in message
    assert "7 is 'w3' there and 'w7' here" in message
    assert "'other'" in message
    assert "\n" not in message


def test_many_differing_ids_are_counted_and_three_are_named() -> None:
    with pytest.raises(ValueError, match="32 ids differ") as refusal:
        shared_vocabulary(words(32), words(32, list(range(31, -1, -1))), 32, "other")
    assert str(refusal.value).count(" there and ") == 3
