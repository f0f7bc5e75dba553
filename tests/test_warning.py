"""A drafter that is next to never right is named; its text is right all the same."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from families import tiny
from helpers import PROMPT, expected
from outrider.api import Engine


def test_a_drafter_at_chance_level_is_named_within_fifty_rounds() -> None:
    """Acceptance falls to nothing (a wrong head, placeholder weights) and nobody is told, since the text stays right."""
    shuffled = copy.deepcopy(tiny("llama"))
    head = shuffled.get_output_embeddings().weight
    head.copy_(head[torch.randperm(len(head), generator=torch.Generator().manual_seed(0))])
    engine = Engine(tiny("llama"), None, "llama", shuffled)
    with pytest.warns(RuntimeWarning, match="made for this target"):
        result = engine.generate(list(PROMPT), shape=2, max_new_tokens=50)
    assert result.token_ids == expected("llama", PROMPT, max_new_tokens=50)


def test_a_good_drafter_is_not_blamed() -> None:
    engine = Engine(tiny("llama"), None, "llama", tiny("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(list(PROMPT), shape=2, max_new_tokens=50)
