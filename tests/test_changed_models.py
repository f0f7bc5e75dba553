"""A model may change between calls: its weights, its modules, its hooks. The text follows what it is now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import outrider
from families import tiny
from helpers import PROMPT
from outrider.api import Engine
from outrider.options import Options
from outrider.reference import reference_generate


def add_in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.add_(0.3 * parameter.std())


def add_to_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.6)


def replace_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.6


def assign(model: Any) -> None:
    model.load_state_dict({k: v * 1.4 for k, v in model.state_dict().items()}, assign=True)


def hook(model: Any) -> None:
    model.base_model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: out.flip(-1))


def swap(model: Any) -> None:
    old = model.base_model.layers[0].self_attn.v_proj

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return old(x).flip(-1)

    model.base_model.layers[0].self_attn.v_proj = Scaled()


@pytest.mark.parametrize(
    "change", [add_in_place, add_to_data, replace_data, assign, hook, swap], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "llama from a file"])
def test_the_text_follows_a_changed_model(family: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    """Joined and packed weights are copies: a target that was trained or steered after loading must not write as before."""
    family, _, is_mapped = family.partition(" ")
    model = copy.deepcopy(tiny(family))
    if is_mapped:
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path).requires_grad_(False)
    engine = Engine(model, None, family, "ngram")
    before = engine.generate(list(PROMPT), max_new_tokens=10, shape=3).token_ids
    change(model)
    wanted = reference_generate(model, PROMPT, Options(max_new_tokens=10))
    for shape in ("off", 3, (2, 2)):
        assert engine.generate(list(PROMPT), max_new_tokens=10, shape=shape).token_ids == wanted
    assert wanted != before


def test_train_mode_does_not_reach_the_text() -> None:
    model = copy.deepcopy(tiny("gpt2"))
    engine = Engine(model, None, "gpt2", "ngram")
    wanted = engine.generate(list(PROMPT), max_new_tokens=10).token_ids
    model.train()
    assert engine.generate(list(PROMPT), max_new_tokens=10, shape=3).token_ids == wanted


def test_another_dtype_after_loading_is_followed() -> None:
    model = copy.deepcopy(tiny("llama"))
    engine = Engine(model, None, "llama", "ngram")
    engine.generate(list(PROMPT), max_new_tokens=4)
    model.double()
    assert len(engine.generate(list(PROMPT), max_new_tokens=4).token_ids) == 4


@pytest.mark.parametrize("rule", ["coupled", "mss"])
def test_options_that_leave_no_token_are_refused(rule: str) -> None:
    """With every token banned there is nothing to write; token 0 for ever is no answer."""
    engine = Engine(tiny("llama"), None, "llama", "ngram")
    for options in (
        {"bad_words_ids": [[i] for i in range(48)]},
        {"logits_processor": [lambda ids, scores: scores * float("nan")]},
        {"logits_processor": [lambda ids, scores: scores - float("inf")]},
    ):
        with pytest.raises(ValueError, match="no token is possible"):
            engine.generate(list(PROMPT), max_new_tokens=4, temperature=1.0, rule=rule, seed=1, **options)


def test_a_processor_that_returns_something_else_is_refused() -> None:
    engine = Engine(tiny("llama"), None, "llama", "ngram")
    for wrong in (lambda ids, scores: None, lambda ids, scores: scores[:, :3]):
        with pytest.raises(ValueError, match="logits_processor"):
            engine.generate(list(PROMPT), max_new_tokens=4, logits_processor=[wrong])


def test_a_seed_gives_one_text_under_mss_whatever_the_clock_says() -> None:
    engine = Engine(tiny("llama"), None, "llama", tiny("llama", 1))
    texts = {
        tuple(engine.generate(list(PROMPT), rule="mss", temperature=1.0, seed=3, max_new_tokens=24).token_ids)
        for _ in range(4)
    }
    assert len(texts) == 1


class Collected(transformers.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_every_token_and_an_end() -> None:
    """transformers does not hand the streamer on to a custom function; whoever reads from it would wait for ever."""
    plain, ours = Collected(), Collected()
    options = {"max_new_tokens": 8, "do_sample": False}
    tiny("llama").generate(torch.tensor([PROMPT]), streamer=plain, **options)
    tiny("llama").generate(
        torch.tensor([PROMPT]), streamer=ours, custom_generate=outrider.custom_generate, drafter="ngram", **options
    )
    assert ours.ended and ours.tokens == plain.tokens


def test_a_mask_with_zeros_behind_real_tokens_is_refused() -> None:
    mask = torch.tensor([[1] * 7 + [0] * 3])
    with pytest.raises(ValueError, match="pad on the left"):
        tiny("llama").generate(
            torch.tensor([PROMPT]),
            attention_mask=mask,
            custom_generate=outrider.custom_generate,
            drafter="ngram",
            max_new_tokens=4,
        )
