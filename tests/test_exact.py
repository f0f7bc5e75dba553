"""With `exact`, half precision keeps the promise too: the same bits, however a token was scored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf

import outrider
from bench_fakes import FakeEngine
from families import tiny
from native_kernels import needs_kernels, without_kernels
from outrider.bench.certify import certify
from outrider.bench.tasks import Prompt
from outrider.models import exact as module
from outrider.models.exact import DEEPEST, differing, exactly
from outrider.models.native import NativeTreeModel
from outrider.models.selftest import tree_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=32),
    "llama without groups": lambda: tf.LlamaConfig(**SIZES, num_key_value_heads=4, head_dim=16),
    "qwen2": lambda: tf.Qwen2Config(**SIZES, num_key_value_heads=1),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32),
}
PROMPTS = [Prompt("t", "0", text="ab")]
SHAPES = ("chain4", "chain30", "3x2x2x1", "best24", "2x2x1@0.08~15")


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to score exactly."""
    if request.param == "torch":
        without_kernels(monkeypatch)
    else:
        needs_kernels()
    return str(request.param)


def _model(family: str) -> tf.PreTrainedModel:
    """Flat laws in bfloat16: ties at every other token."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.bfloat16).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    try:
        exactly(tree_model(model)[0])
    except ValueError as reason:
        if "row-invariant" in str(reason):
            pytest.skip(str(reason))
        raise
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_a_token_has_the_same_bits_alone_in_a_chain_on_a_branch_and_in_a_batch(family: str, kernels: str) -> None:
    target = exactly(tree_model(_model(family))[0])
    assert isinstance(target, NativeTreeModel) if kernels == "compiled" else target.in_path_order
    assert differing(target) is None


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_text_in_bfloat16_is_that_of_plain_decoding_for_every_shape(family: str, options: dict[str, Any]) -> None:
    engine = outrider.load(_model(family), drafter="oracle:0.8", exact=True)
    prompt = [5, 17, 3, 99, 41]
    plain = engine.generate(prompt, shape="off", max_new_tokens=90, **options)
    for shape in SHAPES:
        result = engine.generate(prompt, shape=shape, max_new_tokens=90, **options)
        assert result.token_ids == plain.token_ids, shape
        assert result.stats.rounds < 90


def test_rows_of_a_batch_are_what_they_are_alone() -> None:
    engine = outrider.load(_model("llama"), drafter="oracle:0.7", exact=True)
    prompts = [[3, 4], [9, 8, 7, 6, 5, 4, 3], [11] * 30]
    together = engine.generate(prompts, shape="3x2x1", max_new_tokens=40)
    alone = [engine.generate(prompt, shape="off", max_new_tokens=40) for prompt in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_no_tree_is_deeper_than_what_is_exact(kernels: str) -> None:
    engine = outrider.load(_model("llama"), drafter="oracle:1.0", exact=True)
    result = engine.generate([1, 2, 3], shape="chain40", max_new_tokens=60)
    assert max(result.stats.histogram) == (41 if kernels == "compiled" else DEEPEST + 1)


def test_kernels_that_are_not_row_invariant_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = exactly(tree_model(_model("llama"))[0])

    def uneven(ids_BN: torch.Tensor, *rest: Any) -> Any:
        logits_BNV, features = before(ids_BN, *rest)
        return logits_BNV * (1.01 if ids_BN.shape[1] > 12 else 1.0), features

    before = target.forward
    monkeypatch.setattr(target, "forward", uneven)
    assert "nodes" in str(differing(target))


def test_a_check_that_fails_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama")
    monkeypatch.setattr(module, "differing", lambda target: "9 nodes, 1 rows, position 7")
    with pytest.raises(ValueError, match=r"not row-invariant \(9 nodes.*leave out exact"):
        outrider.load(model, exact=True)


@pytest.mark.parametrize(("family", "why"), [("mamba2", "lean decoder"), ("gemma3", "sliding windows")])
def test_targets_that_cannot_be_exact_are_refused_with_the_reason(family: str, why: str, kernels: str) -> None:
    if family == "gemma3" and kernels == "compiled":
        assert outrider.load(copy.deepcopy(tiny(family)), exact=True).target.way == "compiled kernels, tree mask, exact"
        return
    with pytest.raises(ValueError, match=why):
        outrider.load(copy.deepcopy(tiny(family)), exact=True)


def test_the_certificate_of_an_exact_engine_knows_no_ties() -> None:
    engine = FakeEngine(dtype=torch.bfloat16)
    engine.model.table[:] = torch.tensor([-60.0, 8.0, 8.0 - 1 / 16, 0, 0, 0, 0, 0])  # one rounding apart or less
    engine.exact = True
    settings: dict[str, Any] = {"max_new_tokens": 6, "rules": ["greedy"], "shapes": ["auto"]}
    right = certify(engine, PROMPTS, **settings)
    assert right.certified and right.verdict == "certified: identical, exact by construction"
    engine.wrong_at = 2
    wrong = certify(engine, PROMPTS, **settings)
    assert not wrong.certified and not wrong.ties and wrong.differences
