"""Nothing is believed of a model's code: what scores a tree wrongly is found at load, and a slower way that is right is used."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from families import FAMILIES, tiny
from helpers import NEW, OPTIONS, PROMPT, PROMPTS, SHAPES, assert_same_tensors, expected, lm, run, target_of
from outrider.api import Engine
from outrider.drafters.lm import LMDrafter
from outrider.drafters.oracle import OracleDrafter
from outrider.models.factor_model import FactorTreeModel
from outrider.models.fallback import RecomputeTreeModel, StepwiseTreeModel
from outrider.models.native import NativeTreeModel
from outrider.models.selftest import Plain, tree_error, tree_model
from outrider.models.tree_model import CachedTreeModel, Unsupported
from outrider.options import Options
from outrider.reference import reference_generate

WAYS = {
    "factors": FactorTreeModel,
    "cached": CachedTreeModel,
    "stepwise": StepwiseTreeModel,
    "recompute": RecomputeTreeModel,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_in_some_fast_way(family: str) -> None:
    _, tested = tree_model(tiny(family))
    if family == "rwkv":
        assert tested.way == "a copied cache per node"
        assert any("takes no `cache`" in note for note in tested.notes)
    else:
        assert tested.way.endswith(("tree mask", "waves of single steps"))
        assert not any("off by" in note for note in tested.notes)
    assert tested.error < 1e-4


def test_attention_models_score_a_tree_in_one_pass() -> None:
    for family in ("llama", "gemma3", "gpt2", "opt", "mistral"):
        model, tested = tree_model(tiny(family))
        assert tested.way == model.way
        assert tested.way.endswith("tree mask")
        assert tested.chunked_prefill


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "mamba2", "qwen3_next"])
def test_blocks_may_be_fed_onto_a_state(family: str) -> None:
    """transformers' Mamba-1 families ignore the state when a block is fed onto it; here their recurrence is another one."""
    assert tree_model(tiny(family))[1].chunked_prefill


def test_blocks_fed_onto_a_state_are_allowed_only_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose blocks ignore the state has its long prompts prefilled in one piece."""
    from outrider.models import mixer_calls

    monkeypatch.setattr(mixer_calls, "FORGETFUL", "none of them")
    model, tested = tree_model(copy.deepcopy(tiny("mamba")))
    assert not tested.chunked_prefill and not model.chunked_prefill
    assert tested.way == "factors, tree mask"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mamba", "mamba2", "qwen3_next", "jamba", "zamba"])
def test_long_prompts_in_chunks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for way in (CachedTreeModel, NativeTreeModel):
        monkeypatch.setattr(way, "chunk", 5)
    prompt = [(7 * i + 3) % 48 for i in range(33)]
    chunked = Engine(tiny(family), None, family, lm(family))
    result = chunked.generate(prompt, shape=3, max_new_tokens=8)
    assert result.token_ids == expected(family, prompt, max_new_tokens=8)
    assert result.stats.acceptance_rate == 1.0


def ignoring_masks(model: Any) -> Any:
    """A model in which a node sees all that earlier nodes see, whatever its mask: a tree is scored as a chain."""
    model = copy.deepcopy(model)
    inner = model.base_model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 4:
            seen = (mask == 0).cumsum(-2) > 0
            kwargs["attention_mask"] = torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)
        return inner(*args, **kwargs)

    model.base_model.forward = forward
    return model


def broken_steps(model: Any) -> Any:
    """A recurrent model whose cached single step forgets part of its state."""
    model = copy.deepcopy(model)
    for module in model.modules():
        vars(module).pop("forward", None)  # what an earlier self-test wrapped belongs to the original's modules
        if type(module).__name__.endswith(("Mixer", "GatedDeltaNet")):
            inner = module.forward

            def forward(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
                out = inner(*args, **kwargs)
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                cached = any(kwargs.get(name) is not None for name in ("cache", "cache_params"))
                return out * 1.1 if cached and hidden.shape[1] == 1 else out

            module.forward = forward
    return model


def check_text(model: Any, plain: Any) -> Any:
    made = Engine(model, None, "broken", "ngram")
    for key in ("greedy", "sampled"):
        options = {"max_new_tokens": 12, **OPTIONS[key]}
        wanted = reference_generate(plain, PROMPT, Options(**options), seed=options.get("seed", 0))
        for shape in (3, (2, 2)):
            assert made.generate(list(PROMPT), shape=shape, **options).token_ids == wanted
    return made.selftest


def test_a_model_that_ignores_the_tree_mask_gets_another_way() -> None:
    """SGLang verified trees as chains on layers that knew no parents: here the self-test sees it and says so."""
    tested = check_text(ignoring_masks(tiny("gpt_neox")), tiny("gpt_neox"))
    assert tested.way == "a copied cache per node"
    assert any("CachedTreeModel: tree logits are off by" in note for note in tested.notes)
    assert tested.error < 1e-4


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next"])
def test_a_recurrent_model_with_a_broken_step_is_recomputed(family: str) -> None:
    """Block and cached step disagree in many families and versions: then every path is computed from its beginning."""
    tested = check_text(broken_steps(tiny(family)), tiny(family))
    assert tested.way == "every path recomputed"
    assert any("off by" in note for note in tested.notes)


@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "llama"])
def test_a_copy_of_a_model_in_use_is_a_model_of_its_own(family: str) -> None:
    """What a load teaches a model's layers must not tie a later copy to the weights of the original."""
    original = fresh_copy(family)
    tree_model(original)
    changed = copy.deepcopy(original)
    for parameter in changed.parameters():
        parameter.mul_(0.5)
    direct = fresh_copy(family)
    for parameter in direct.parameters():
        parameter.mul_(0.5)
    ids = torch.tensor([list(PROMPT)])
    assert torch.allclose(changed(input_ids=ids).logits, direct(input_ids=ids).logits, atol=1e-4)


def fresh_copy(family: str) -> Any:
    """The weights of a tiny model in an object that nothing was loaded from."""
    model = type(tiny(family))(tiny(family).config).eval().requires_grad_(False)
    model.load_state_dict(tiny(family).state_dict())
    return model


def test_a_model_that_cannot_be_driven_gets_another_way_with_the_reason() -> None:
    """Any error of a model's cached forward is a reason in the notes, not a crash."""
    model = copy.deepcopy(tiny("llama"))
    inner = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
            raise RuntimeError("no caches here\nand more lines")
        return inner(*args, **kwargs)

    model.model.forward = forward
    tested = check_text(model, tiny("llama"))
    assert tested.way == "every path recomputed"
    assert any("no caches here" in note for note in tested.notes)
    assert not any("\n" in note for note in tested.notes)


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_damaged_weights_are_refused_at_load(family: str) -> None:
    model = copy.deepcopy(tiny(family))
    model.get_output_embeddings().weight[3] = float("nan")
    with pytest.raises(ValueError, match="not finite") as refusal:
        Engine(model, None, family, "ngram")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("part", [0, 1])
def test_a_way_that_gives_no_numbers_does_not_pass(part: int) -> None:
    """NaN is neither more nor less than a limit, and `max` drops it where it does not come first."""
    target = target_of("llama")

    class Damaged:
        def begin(self, *given: Any, **more: Any) -> Any:
            state, rounds = target.begin(*given, **more), itertools.count()
            extend = state.extend

            def damaged(*given: Any) -> torch.Tensor:
                logits_BNV = extend(*given).clone()
                logits_BNV[0, 2, 5] += float("nan") if next(rounds) == part else 0.0
                return logits_BNV

            state.extend = damaged
            return state

    assert tree_error(Damaged(), Plain(tiny("llama"))) == float("inf")


# -- each way -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "rwkv"])
def test_every_way_scores_trees_right(family: str, way: str) -> None:
    if way == "factors" and tree_model(tiny(family))[1].way != "factors, tree mask":
        with pytest.raises(Unsupported):
            FactorTreeModel(tiny(family))
        return
    plain = Plain(tiny(family))
    assert tree_error(WAYS[way](tiny(family)), plain) < 1e-4


@pytest.mark.parametrize("way", [way for way in WAYS if way != "factors"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "mamba"])
def test_every_way_passes_parity(family: str, way: str) -> None:
    """Recurrent and hybrid targets are refused elsewhere; with a slow fallback any model is a target and a drafter."""
    target = WAYS[way](tiny(family))
    drafters = {"same": LMDrafter(target, "same"), "half": OracleDrafter(target, 0.5), "other": lm("mamba", 1)}
    for name, drafter in drafters.items():
        for key in ("greedy", "sampled"):
            for shape in ("off", "3x2x2", "ragged") if name == "same" else ("ragged",):
                going = run(target, drafter, PROMPTS, SHAPES[shape], **{"max_new_tokens": 8, **OPTIONS[key]})
                for _ in going.pieces():
                    pass
                for row, prompt in zip(going.sequences, PROMPTS):
                    assert row.new_ids == expected(family, prompt, **{"max_new_tokens": 8, **OPTIONS[key]}), (
                        name,
                        key,
                        shape,
                    )
                    if name == "same" and shape != "off":
                        assert row.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("family", ["llama", "mamba", "qwen3_next"])
def test_a_stepped_state_is_that_of_the_fast_way(family: str) -> None:
    fast, slow = CachedTreeModel(tiny(family)), StepwiseTreeModel(tiny(family))
    tokens, parents = [4, 8, 15, 16, 23], [-1, 0, 0, 2, 2]
    states = [way.begin([list(PROMPT)], 16) for way in (fast, slow)]
    one, other = (state.extend([tokens], [parents])[0] for state in states)
    assert_same_tensors([one], [other], 1e-4)
    for state in states:
        state.commit([[0, 2, 4]])
    one, other = (state.extend([[1, 2]], [[-1, 0]])[0] for state in states)
    assert_same_tensors([one], [other], 1e-4)
    assert states[0].lengths == states[1].lengths == [len(PROMPT) + 3]
    assert NEW > 0
