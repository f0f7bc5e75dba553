"""Self-drafting: the target's first layers draft for it, and the text is the target's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import FAMILIES, tiny
from helpers import PROMPT, PROMPTS, SHAPES, assert_same_tensors, committed_tensors, expected
from outrider.api import Engine
from outrider.drafters.self_draft import SelfDrafter
from outrider.models.early_exit import early_exit, shortened
from outrider.models.gdn import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from outrider.models.selftest import tree_model
from outrider.models.taps import decoder_layers
from outrider.options import Options
from outrider.reference import reference_generate


def gdn(layers: int = 4) -> GatedDeltaNetForCausalLM:
    """A small Gated DeltaNet whose laws are peaked."""
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=layers,
        num_heads=2,
        head_dim=8,
        expand_v=1.0,
        eos_token_id=None,
    )
    model = GatedDeltaNetForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "A_log" not in name:
            parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    model.lm_head.weight.mul_(4)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_drafts_for_itself_and_writes_what_it_would_write(family: str) -> None:
    model = tiny(family)
    wanted = expected(family)
    for layers in range(1, len(decoder_layers(model))):
        engine = Engine(model, None, family, f"self:{layers}")
        for shape in (3, (3, 2, 2)):
            result = engine.generate(list(PROMPT), shape=shape, max_new_tokens=len(wanted))
            assert result.token_ids == wanted and result.stats.drafted > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "sampled"])
def test_every_shape_writes_the_same(shape: str, options: dict[str, Any]) -> None:
    model = gdn()
    wanted = [
        reference_generate(model, p, Options(max_new_tokens=12, **options), [], options.get("seed", 0)) for p in PROMPTS
    ]
    engine = Engine(model, None, "gdn", "self:2")
    made = engine.generate(
        [list(p) for p in PROMPTS], shape=SHAPES[shape], max_new_tokens=12, eos_token_id=[], **options
    )
    assert [result.token_ids for result in made] == wanted


@pytest.mark.parametrize(
    "make", [gdn, lambda: tiny("llama"), lambda: tiny("qwen3_5_text")], ids=["gdn", "llama", "hybrid"]
)
def test_an_exit_behind_the_last_layer_is_the_target_itself(make: Any) -> None:
    """Positions, caches and packed weights of the shallow model are right: nothing that it drafts is ever rejected."""
    model = make()
    target = tree_model(model)[0]
    drafter = SelfDrafter(target, 1)
    drafter.model = early_exit(target, len(decoder_layers(model)))
    stats = (
        Engine(model, None, "m", drafter)
        .generate(list(PROMPT), shape=(2, 2, 1), max_new_tokens=24, eos_token_id=[])
        .stats
    )
    assert stats.accepted == stats.tried > 0


def test_an_exit_gives_the_logits_of_the_layers_that_were_run() -> None:
    model = gdn()
    state = early_exit(tree_model(model)[0], 2).begin([list(PROMPT)], 4)
    hidden = model.model.embeddings(torch.tensor([[*PROMPT, 7]]))
    for layer in model.model.layers[:2]:
        hidden = layer(hidden, None, None)
    wanted = model.lm_head(model.model.norm(hidden))[0, -1]
    torch.testing.assert_close(state.extend([[7]], [[-1]])[0, 0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "limit"),
    [(lambda: gdn().double(), 1e-10), (lambda: tiny("llama"), 1e-5), (lambda: tiny("qwen3_5_text"), 1e-5)],
    ids=["gdn", "attention", "hybrid"],
)
def test_rounds_leave_the_states_of_a_fresh_run(make: Any, limit: float) -> None:
    """Of the target and of its first layers, which are given no node that was rejected."""
    target = tree_model(make())[0]
    for one in (target, early_exit(target, 1)):
        state, ids = one.begin([list(PROMPT)], 60), list(PROMPT)
        for token in range(5):
            state.extend([[token, 8]], [[-1, 0]])
            state.extend([[15, 16, 17]], [[0, 1, 1]])
            state.commit([[0, 1, 4]])
            ids += [token, 8, 17]
        assert_same_tensors(committed_tensors(state), committed_tensors(one.begin([ids])), limit)


def test_no_weight_is_held_twice() -> None:
    for model in (gdn(), tiny("llama"), tiny("gpt2")):
        target: Any = tree_model(model)[0]
        own = {parameter.data_ptr() for parameter in model.parameters()}
        shallow: Any = early_exit(target, 1)
        assert {p.data_ptr() for p in shallow.model.parameters()} <= own
        if hasattr(target, "blocks"):
            assert shallow.blocks[0] is target.blocks[0] and shallow.unembed is target.unembed
        else:
            assert shallow.packed is target.packed
            assert getattr(shallow, "kernels", None) is getattr(target, "kernels", None)


def test_shortening_leaves_the_model_as_it_was() -> None:
    model = gdn()
    before = model(input_ids=torch.tensor([list(PROMPT)])).logits
    short = shortened(model, 1)
    assert len(decoder_layers(short)) == 1 and len(decoder_layers(model)) == 4 == model.config.num_hidden_layers
    assert torch.equal(model(input_ids=torch.tensor([list(PROMPT)])).logits, before)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("self:0", "give 1 to 3"),
        ("self:4", "would run 4 of the target's 4 layers"),
        ("self:99", "give 1 to 3"),
        ("self:", "needs a number of layers"),
        ("self:-1", "needs a number of layers"),
        ("self:two", "needs a number of layers"),
        ("ngram>self:4", "give 1 to 3"),
    ],
)
def test_a_wrong_number_of_layers_is_refused_with_a_reason(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Engine(gdn(), None, "gdn", name)


def test_a_changed_target_is_followed_by_its_drafter() -> None:
    model = gdn()
    engine = Engine(model, None, "gdn", "ngram>self:3")
    engine.generate(list(PROMPT), shape=3, max_new_tokens=8)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.7
    wanted = reference_generate(model, PROMPT, Options(max_new_tokens=16), [], 0)
    result = engine.generate(list(PROMPT), shape=3, max_new_tokens=16, eos_token_id=[])
    assert result.token_ids == wanted
    fresh = Engine(model, None, "gdn", "ngram>self:3").generate(
        list(PROMPT), shape=3, max_new_tokens=16, eos_token_id=[]
    )
    assert result.stats.accepted == fresh.stats.accepted
