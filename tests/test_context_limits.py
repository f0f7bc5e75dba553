"""Texts that reach the end of a context, of the target or of its drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from families import tiny
from helpers import PROMPT, PROMPTS, Watch, expected, lm
from outrider.api import Engine
from outrider.drafters.lm import LMDrafter
from outrider.models.selftest import tree_model

DEEP = ["llama", "gemma3", "qwen3_next", "mamba"]


def short(family: str, positions: int, seed: int = 0) -> tf.PreTrainedModel:
    torch.manual_seed(seed)
    if family == "gpt2":
        config: Any = tf.GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=positions)
    elif family == "opt":
        config = tf.OPTConfig(
            vocab_size=48,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=positions,
            word_embed_proj_dim=32,
        )
    else:
        config = tf.LlamaConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
        )
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_text_ends_where_the_targets_context_does(family: str) -> None:
    """One more position would be an index error or nonsense: the text ends, with reason "length"."""
    from outrider.options import Options
    from outrider.reference import reference_generate

    model = short(family, 24)
    wanted = reference_generate(model, PROMPT, Options(max_new_tokens=24 - len(PROMPT)))
    target = tree_model(model)[0]
    for drafter in ("off", "ngram", LMDrafter(target, "same"), lm("mamba", 1), "oracle:0.5"):
        for shape in (6, (2, 2, 2)):
            result = Engine(model, None, family, drafter).generate(list(PROMPT), shape=shape, max_new_tokens=100)
            assert result.token_ids == wanted
            assert result.finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    full = Engine(short("gpt2", 16), None, "gpt2", "ngram")
    for length in (16, 17):
        with pytest.raises(ValueError, match="context is 16"):
            full.generate([1] * length, max_new_tokens=1)
    assert len(full.generate([1] * 15, max_new_tokens=5).token_ids) == 1
    assert full.generate([1] * 16, max_new_tokens=0).token_ids == []


@pytest.mark.parametrize("positions", [2, 3, 4, 9, 16])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_drafter_of_shorter_context_never_crashes_and_changes_nothing(family: str, positions: int) -> None:
    """Learned positions end after `positions` tokens; the drafter must start again with a part of the text, not crash."""
    watch = Watch(LMDrafter(tree_model(short(family, max(positions, 16)))[0], family))
    watch.inner.model.context = positions
    drafting = Engine(tiny("llama"), None, "llama", watch)
    for prompt in (PROMPT, PROMPTS[0], PROMPTS[2] * 3):
        for shape in (1, 5, (3, 2, 2), "best8"):
            result = drafting.generate(list(prompt), shape=shape, max_new_tokens=30)
            assert result.token_ids == expected("llama", prompt, max_new_tokens=30), shape
    if positions >= 4:
        assert any(True for _ in watch.walks())
    rows = drafting.generate([list(p) for p in PROMPTS], shape=(2, 2), max_new_tokens=30)
    assert [r.token_ids for r in rows] == [expected("llama", p, max_new_tokens=30) for p in PROMPTS]


def test_a_same_drafter_of_shorter_context_still_drafts_after_its_context_is_full() -> None:
    watch = Watch(LMDrafter(tree_model(short("gpt2", 16))[0], "gpt2"))
    Engine(tiny("llama"), None, "llama", watch).generate(list(PROMPT), shape=3, max_new_tokens=60)
    late = [drafts[0].tree.drafted for contexts, drafts, _ in watch.rounds if 20 < len(contexts[0]) < 66]
    assert late
    assert min(late) > 0
