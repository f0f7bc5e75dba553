"""Gated DeltaNet hybrids: some layers have attention, as in flash-linear-attention's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from helpers import PROMPT, SHAPES, Oracle, assert_rounds_leave_what_a_prefill_leaves
from outrider.api import Engine
from outrider.models.gdn import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from outrider.models.selftest import tree_model

D, LAYERS, VOCAB = 24, 3, 48
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 500.0}
WINDOW = {**ATTENTION, "window_size": 6}


def hybrid(attn: dict[str, Any] | None, dtype: torch.dtype = torch.float32, **options: Any) -> GatedDeltaNetForCausalLM:
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        num_hidden_layers=LAYERS,
        num_heads=2,
        head_dim=8,
        expand_v=1.0,
        intermediate_size=40,
        initializer_range=0.3,
        attn=attn,
        eos_token_id=None,
        **options,
    )
    return GatedDeltaNetForCausalLM(config).to(dtype).eval().requires_grad_(False)


def all_attention(**options: Any) -> tuple[GatedDeltaNetForCausalLM, PreTrainedModel]:
    """A hybrid of nothing but attention, and a Llama with the same tensors."""
    attn = {**ATTENTION, "layers": list(range(LAYERS)), **options}
    model = hybrid(attn, torch.float64)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=D,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=40,
            rms_norm_eps=model.config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=False,
        )
    ).double()
    names = {"embeddings": "embed_tokens", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    state = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in {**names, ".attn.": ".self_attn."}.items():
            name = name.replace(ours, theirs)
        state[name] = tensor
    llama.load_state_dict(state)
    return model, llama.eval().requires_grad_(False)


def test_attention_layers_are_those_of_a_llama() -> None:
    """Up to rotations, which that one makes in float32."""
    model, llama = all_attention()
    ids = torch.tensor([[(7 * i + 3) % VOCAB for i in range(40)]])
    torch.testing.assert_close(model(input_ids=ids).logits, llama(input_ids=ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attn", [ATTENTION, WINDOW], ids=["full", "window"])
def test_step_by_step_means_what_one_pass_means(attn: dict[str, Any]) -> None:
    model = hybrid(attn, torch.float64)
    ids = torch.tensor([[(5 * i + 1) % VOCAB for i in range(30)]])
    wanted, cache = model(input_ids=ids).logits, None
    for at in (slice(0, 11), *(slice(i, i + 1) for i in range(11, 30))):
        out = model(input_ids=ids[:, at], cache=cache, use_cache=True)
        cache = out.cache
        torch.testing.assert_close(out.logits, wanted[:, at], atol=1e-9, rtol=1e-9)


def test_a_window_forgets() -> None:
    """What lies before the window of the only attention layer, behind no recurrent one, does not count."""
    model = hybrid({**WINDOW, "layers": [0, 1, 2]}, torch.float64)
    ids = torch.tensor([[(5 * i + 1) % VOCAB for i in range(30)]])
    other = ids.clone()
    other[0, 0] = 40
    got, changed = model(input_ids=ids).logits[0], model(input_ids=other).logits[0]
    reach = 3 * (WINDOW["window_size"] - 1)
    assert torch.equal(got[reach + 1 :], changed[reach + 1 :]) and not torch.equal(got[reach], changed[reach])


@pytest.mark.parametrize("attn", [ATTENTION, WINDOW], ids=["full", "window"])
def test_it_is_scored_with_factors_and_writes_what_generate_writes(attn: dict[str, Any]) -> None:
    model = hybrid(attn)
    target, tested = tree_model(model)
    assert tested.way == "factors, tree mask"
    ids = torch.tensor([list(PROMPT)])
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, len(PROMPT) :]
    for shape in ("chain", "3x2x2", "ragged"):
        engine = Engine(model, None, "gdn", Oracle(target, 0.6))
        result = engine.generate(list(PROMPT), shape=SHAPES[shape], max_new_tokens=24, eos_token_id=[])
        assert result.token_ids == wanted.tolist()
        assert result.stats.accepted > 0


@pytest.mark.parametrize("attn", [ATTENTION, WINDOW], ids=["full", "window"])
def test_rounds_leave_the_state_of_a_prefill(attn: dict[str, Any]) -> None:
    target = tree_model(hybrid(attn, torch.float64))[0]
    assert_rounds_leave_what_a_prefill_leaves(target, 1e-10)


@pytest.mark.parametrize("attn", [ATTENTION, WINDOW], ids=["full", "window"])
def test_padding_in_front_of_a_row_changes_nothing(attn: dict[str, Any]) -> None:
    model = hybrid(attn, torch.float64)
    short, long = list(PROMPT)[:4], list(PROMPT)
    ids, mask = torch.tensor([[0] * 6 + short, long]), torch.tensor([[0] * 6 + [1] * 4, [1] * 10])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(input_ids=ids, attention_mask=mask, position_ids=places).logits
    for row, alone in enumerate((short, long)):
        wanted = model(input_ids=torch.tensor([alone])).logits[0, -1]
        torch.testing.assert_close(padded[row, -1], wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("chunk", [1, 3, 10])
@pytest.mark.parametrize("attn", [None, ATTENTION], ids=["recurrent", "hybrid"])
def test_padding_counts_for_nothing_in_pieces_of_any_size_and_with_biases(
    attn: dict[str, Any] | None, chunk: int
) -> None:
    model = hybrid(attn, torch.float64, conv_bias=True)
    for name, parameter in model.named_parameters():
        if "conv1d.bias" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    short, long = list(PROMPT)[:4], list(PROMPT)
    ids, mask = torch.tensor([[0] * 6 + short, long]), torch.tensor([[0] * 6 + [1] * 4, [1] * 10])
    places, cache, logits = (mask.cumsum(1) - 1).clamp(min=0), None, None
    for at in range(0, 10, chunk):
        part = slice(at, at + chunk)
        options = {"attention_mask": mask[:, : at + chunk], "position_ids": places[:, part], "use_cache": True}
        out = model(input_ids=ids[:, part], cache=cache, **options)
        cache, logits = out.cache, out.logits[:, -1]
    for row, alone in enumerate((short, long)):
        wanted = model(input_ids=torch.tensor([alone])).logits[0, -1]
        torch.testing.assert_close(logits[row], wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 0},
        {"num_heads": 5},
        {"num_kv_heads": 3},
        {"window_size": -1},
        {"window_size": 2.5},
        {"rope_theta": -5},
        {"layers": None},
    ],
)
def test_attention_that_cannot_be_meant_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attn must name"):
        hybrid({**ATTENTION, **changes})


def test_masks_by_layer_type_are_refused() -> None:
    with pytest.raises(ValueError, match="use a dynamic cache"):
        hybrid(ATTENTION)(input_ids=torch.tensor([[1, 2]]), attention_mask={"full_attention": None})


def test_batches_write_what_rows_write_alone() -> None:
    model = hybrid(ATTENTION)
    engine = Engine(model, None, "gdn", "ngram")
    prompts = [list(PROMPT), list(PROMPT)[3:], [5, 9, 5, 9, 5]]
    alone = [engine.generate(p, shape="chain4", max_new_tokens=16, eos_token_id=[]).token_ids for p in prompts]
    both = engine.generate(prompts, shape="chain4", max_new_tokens=16, eos_token_id=[])
    assert [result.token_ids for result in both] == alone


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="layers among 0 to 2"):
        hybrid({**ATTENTION, "layers": [7]})
