"""Odd arguments get one sentence, not a traceback from deep inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import outrider
from families import tiny
from helpers import PROMPT, expected
from outrider.api import Engine
from toy import byte_tokenizer


@pytest.mark.parametrize(
    "prompt", [None, 5, 5.5, [None], [1.5], [True], iter([1, 2]), ["a", 5], "\ud800x", {}, object()]
)
def test_a_prompt_of_the_wrong_kind_is_one_sentence(prompt: Any) -> None:
    engine = Engine(tiny("llama", vocab=260), byte_tokenizer(), "llama", "off")
    with pytest.raises(ValueError, match=r"prompt|messages"):
        engine.generate(prompt, max_new_tokens=1)


def test_ids_may_come_from_numpy_or_torch() -> None:
    engine = Engine(tiny("llama"), None, "llama", "off")
    wanted = expected("llama", PROMPT, max_new_tokens=4)
    for given in (list(np.array(PROMPT)), torch.tensor(PROMPT)):
        assert engine.generate(given, max_new_tokens=4).token_ids == wanted


@pytest.mark.parametrize(
    "given",
    [
        {"target": None},
        {"target": 5},
        {"target": b"x"},
        {"target": torch.nn.Linear(2, 2)},
        {"target": "~nosuchuser/x"},
        {"target": "x" * 5000},
        {"drafter": "~nosuchuser/x"},
        {"drafter": "x" * 5000},
        {"drafter": 3},
        {"threads": "x"},
        {"threads": 1.5},
        {"threads": True},
        {"threads": 10**12},
        {"tokenizer": "x"},
    ],
    ids=str,
)
def test_loading_the_wrong_kind_of_thing_is_one_sentence(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as refusal:
        outrider.load(**{"target": tiny("llama"), **given})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "presence_penalty"])
def test_a_number_beyond_all_floats_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Engine(tiny("llama"), None, "llama", "off").generate(list(PROMPT), **{name: 10**400})


def test_a_processor_that_revives_unknown_ids_cannot_make_the_drafter_propose_them() -> None:
    """A user's processor may overwrite impossible scores; a drafter of a smaller vocabulary still keeps to its own ids."""

    def flat(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.clamp(min=-5.0)

    engine = Engine(tiny("llama", vocab=40), None, "llama", tiny("llama", 1, 32))
    plain = engine.generate(
        list(PROMPT[:4]), shape="off", max_new_tokens=16, temperature=3.0, seed=1, logits_processor=[flat]
    )
    for shape in ((4, 3, 2), 6):
        drafted = engine.generate(
            list(PROMPT[:4]), shape=shape, max_new_tokens=16, temperature=3.0, seed=1, logits_processor=[flat]
        )
        assert drafted.token_ids == plain.token_ids


def test_a_shape_that_is_none_is_refused_though_nobody_drafts() -> None:
    engine = Engine(tiny("llama"), None, "llama", "off")
    with pytest.raises(ValueError, match="shape 'warp' is not understood"):
        engine.generate([5, 9, 13], shape="warp", max_new_tokens=2)
