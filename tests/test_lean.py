"""The lean decoder: prompts in pieces, windows, hidden states, and nothing that leans on transformers' own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devices import DEVICE
from families import tiny
from outrider.models.lean import LeanTreeModel
from outrider.models.taps import tapping

pytestmark = pytest.mark.any_device
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
PROMPT = [(5 * i + 2) % 48 for i in range(23)]


def after(model: Any, taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a small tree behind the prompt, and the prompt's hidden states."""
    state = model.begin([PROMPT], 8, taps)
    hidden = state.features[0] if taps else torch.empty(0)
    return state.extend([[7, 8, 9]], [[-1, 0, 0]])[0], hidden


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", (1, 4, 9, 64))
def test_a_prompt_in_pieces_is_the_prompt(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces shorter and longer than the window of mistral and gemma3, and than the prompt."""
    model = tiny(family)
    monkeypatch.setattr(LeanTreeModel, "chunk", chunk)
    found, _ = after(LeanTreeModel(model))
    for node, path in enumerate(([7], [7, 8], [7, 9])):
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([PROMPT + path], device=DEVICE)).logits[0, -1]
        torch.testing.assert_close(found[node], wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_the_layers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    monkeypatch.setattr(LeanTreeModel, "chunk", 10)
    _, found = after(LeanTreeModel(model), (0, 1))
    with torch.inference_mode(), tapping(model, (0, 1)) as reader:
        model(input_ids=torch.tensor([PROMPT], device=DEVICE))
    torch.testing.assert_close(found, reader.everything(), atol=2e-5, rtol=1e-4)


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="are not among the model's 2"):
        LeanTreeModel(tiny("llama")).begin([PROMPT], 8, (0, 5))


def test_an_empty_prompt_has_no_hidden_states() -> None:
    state = LeanTreeModel(tiny("llama")).begin([[]], 8, (0, 1))
    assert state.features is not None and len(state.features[0]) == 0
