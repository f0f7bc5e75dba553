"""`model.generate(..., custom_generate=outrider.custom_generate)` is transformers' own `generate`, token for token."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import transformers

import outrider
from families import FAMILIES, tiny
from helpers import PROMPT, PROMPTS, lm
from outrider import hf_generate
from outrider.controller import Fixed
from outrider.counterfactual import Counterfactual
from outrider.engine import Run
from outrider.options import Options

PAD = 0


def batch(prompts: Any = PROMPTS) -> dict[str, torch.Tensor]:
    """Left-padded prompts."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def both(
    family: str, inputs: dict[str, torch.Tensor], drafter: Any = "ngram", shape: Any = (2, 2, 1), **given: Any
) -> Any:
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, **given}
    model = tiny(family)
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, custom_generate=outrider.custom_generate, drafter=drafter, shape=shape)
    return plain, ours


ONE = batch([PROMPT])
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[42], [18], [25, 18]]},
    "suppressed tokens": {"suppress_tokens": [42, 25]},
    "end token": {"eos_token_id": 25},
    "end tokens, least length": {"eos_token_id": [25, 18, 30], "min_new_tokens": 6},
    "longest length": {"max_length": 19, "max_new_tokens": None},
    "one token": {"max_new_tokens": 1},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "eos_token_id": [25, 30], "min_new_tokens": 4},
}


def test_the_function_is_the_function_however_often_it_is_named() -> None:
    """A module of the same name took its place after the first use: the second `generate` then ignored it."""
    assert all(callable(outrider.custom_generate) for _ in range(3))


@pytest.mark.parametrize("rule", RULES)
def test_a_prompt_gives_the_text_of_plain_generate(rule: str) -> None:
    for drafter in ("ngram", lm("llama"), ["ngram", lm("mamba", 1)], "oracle:0.6", "off"):
        plain, ours = both("llama", ONE, drafter, **RULES[rule])
        assert torch.equal(plain, ours), drafter


@pytest.mark.parametrize("rule", RULES)
def test_a_left_padded_batch_gives_the_texts_of_plain_generate(rule: str) -> None:
    """Assisted generation refuses batches; here rows are ragged, padded, and end at different times."""
    plain, ours = both("llama", batch(), lm("llama"), **RULES[rule])
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "rwkv"])
def test_every_family(family: str) -> None:
    """transformers refuses assisted generation for stateful targets, prompt lookup included."""
    plain, ours = both(family, ONE)
    assert torch.equal(plain, ours)


def test_a_dictionary_is_returned_when_asked_for() -> None:
    plain, ours = both("llama", batch(), return_dict_in_generate=True, eos_token_id=25)
    assert torch.equal(plain.sequences, ours.sequences)


def test_the_inputs_without_a_mask() -> None:
    plain, ours = both("llama", {"input_ids": ONE["input_ids"]})
    assert torch.equal(plain, ours)


def test_a_users_processor_and_stopping_rule_are_obeyed() -> None:
    from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

    class Stop(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return (input_ids[:, -3:].sum(1) % 5 == 0) & (input_ids.shape[1] > len(PROMPT) + 3)

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, ids[:, -2:], float("-inf"))

    given = {"logits_processor": LogitsProcessorList([processor]), "stopping_criteria": StoppingCriteriaList([Stop()])}
    plain, ours = both("llama", ONE, lm("llama"), max_new_tokens=40, **given)
    assert torch.equal(plain, ours)
    assert plain.shape[1] < len(PROMPT) + 40


@pytest.mark.parametrize("shape", ["off", (2, 2, 1)], ids=str)
def test_a_rows_own_constraint_reaches_it_and_its_drafts(shape: Any) -> None:
    """Every row was number 0 to `prefix_allowed_tokens_fn`, and a node of the drafter's tree the number of its node."""
    asked = set()

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        asked.add(row)
        return list(range(2 + 9 * row, 11 + 9 * row))

    plain, ours = both("llama", batch(), lm("llama"), shape, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(plain, ours)
    assert asked == set(range(len(PROMPTS)))


@pytest.mark.parametrize("given", [{"encoder_no_repeat_ngram_size": 2}, {"encoder_repetition_penalty": 3.0}], ids=str)
def test_rules_about_prompts_read_the_rows_own(given: dict[str, Any]) -> None:
    plain, ours = both("llama", batch(), lm("llama"), **given)
    assert torch.equal(plain, ours)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """All runs from now on."""
    runs: list[Run] = []
    monkeypatch.setattr(hf_generate, "Run", lambda *given: runs.append(Run(*given)) or runs[-1])
    return runs


@pytest.mark.parametrize("end", [25, [25, 18, 30]], ids=str)
def test_rows_and_their_drafters_know_what_ends_a_text(end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else drafts and verification go on behind the end, where a grammar's processor may raise."""
    runs = watched(monkeypatch)
    plain, ours = both("llama", batch(), "oracle:0.8", eos_token_id=end)
    assert torch.equal(plain, ours)
    for row in runs[0].sequences:
        assert row.eos == row.sampler.eos == set([end] if isinstance(end, int) else end)


def test_nobody_is_asked_what_follows_the_end() -> None:
    """A grammar has no answer there."""

    def grammar(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert not (ids[:, len(PROMPT) :] == 25).any(), "asked behind the end"
        return scores

    for drafter in ("oracle:1", "ngram"):
        given = {"logits_processor": transformers.LogitsProcessorList([grammar]), "eos_token_id": 25}
        plain, ours = both("llama", ONE, drafter, shape=5, **given)
        assert torch.equal(plain, ours) and plain[0, -1] == 25


def test_under_mss_no_shape_depends_on_a_clock_where_a_seed_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text depends on the shape there, and a seed must give one text; shapes that grow best first are for other rules."""
    runs = watched(monkeypatch)
    options = {"custom_generate": outrider.custom_generate, "max_new_tokens": 24, "do_sample": True, "rule": "mss"}
    for drafter, seed in ((lm("llama", 1), 3), (lm("llama", 1), None), ("self:1", 3), ("self:1", None)):
        tiny("llama").generate(**ONE, **options, drafter=drafter, seed=seed)
        if seed is not None:
            assert isinstance(runs[-1].controller, Fixed)
        else:
            assert isinstance(runs[-1].controller, Counterfactual)
            assert not any(arm.budget for arm in runs[-1].controller.arms)


def test_a_named_drafter_and_what_was_learned_stay_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights were read and packed in every call, and every call began to learn from nothing."""
    runs, model = watched(monkeypatch), copy.deepcopy(tiny("llama"))

    def write(one: Any, drafter: Any) -> Run:
        options = {**ONE, "max_new_tokens": 8, "do_sample": False}
        ours = one.generate(**options, custom_generate=outrider.custom_generate, drafter=drafter)
        assert torch.equal(ours, one.generate(**options))
        return runs[-1]

    first, again = write(model, "self:1"), write(model, "self:1")
    assert again.drafter is first.drafter and again.controller is first.controller
    for parameter in model.parameters():
        parameter.data.mul_(0.6)
    changed = write(model, "self:1")
    assert changed.drafter is first.drafter and changed.controller is not first.controller
    assert write(copy.deepcopy(model), "self:1").drafter is not first.drafter
    for name in ("ngram", "off", "oracle:0.5", "oracle:0.6", "oracle:0.7"):
        write(model, name)
    assert write(model, "self:1").drafter is not first.drafter
    assert len(vars(model)["_outrider_engines"].known) == hf_generate.MOST_ENGINES
    gone = weakref.ref(model)
    del model, first, again, changed
    runs.clear()
    gc.collect()
    assert gone() is None


def test_sampling_follows_the_seed_and_not_the_drafter() -> None:
    model = tiny("llama")
    options = {
        "max_new_tokens": 16,
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.95,
        "pad_token_id": PAD,
    }
    texts = []
    for seed in (1, 2):
        for drafter in ("off", "ngram", lm("llama"), lm("mamba", 1)):
            out = model.generate(
                **ONE, **options, custom_generate=outrider.custom_generate, drafter=drafter, shape=(2, 2), seed=seed
            )
            texts.append(tuple(out[0].tolist()))
    assert len(set(texts[:4])) == len(set(texts[4:])) == 1
    assert texts[0] != texts[4]


def test_sampling_without_a_seed_follows_torchs_generator() -> None:
    model = tiny("llama")
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = model.generate(
            **ONE,
            max_new_tokens=16,
            do_sample=True,
            pad_token_id=PAD,
            custom_generate=outrider.custom_generate,
            drafter="ngram",
        )
        texts.append(out[0].tolist())
    assert texts[0] == texts[1] != texts[2]


def test_rows_of_a_sampled_batch_differ() -> None:
    out = tiny("llama").generate(
        **batch([PROMPT] * 4),
        max_new_tokens=16,
        do_sample=True,
        pad_token_id=PAD,
        custom_generate=outrider.custom_generate,
        drafter="ngram",
        seed=1,
    )
    assert len({tuple(row) for row in out.tolist()}) == 4


@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": 2},
        {"output_scores": True, "return_dict_in_generate": True},
        {"output_logits": True, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_speculation_does_not_give_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given)).replace("num_beams", "beam search")) as refusal:
        tiny("llama").generate(
            **ONE,
            max_new_tokens=4,
            pad_token_id=PAD,
            custom_generate=outrider.custom_generate,
            drafter="ngram",
            **given,
        )
    assert "\n" not in str(refusal.value)


def refusal(**given: Any) -> str:
    """How a call is refused, in one sentence."""
    inputs = {"max_new_tokens": 4, "pad_token_id": PAD, "drafter": "ngram", **ONE} | given
    with pytest.raises(ValueError) as refused:
        tiny("llama").generate(custom_generate=outrider.custom_generate, **inputs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_processors_that_remember_are_refused() -> None:
    """They saw the nodes of trees as if those were the text: guidance kept a cache of rejected drafts."""
    mark = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)
    assert "guidance_scale" in refusal(guidance_scale=1.5)
    assert "SynthID" in refusal(watermarking_config=mark, do_sample=True)
    processor = mark.construct_processor(48, "cpu")
    with pytest.raises(ValueError, match="remembers"):
        Options(logits_processor=[processor])


@pytest.mark.parametrize("family", ["llama", "mamba", "qwen3_next"])
def test_a_cache_may_be_given_but_must_be_empty(family: str) -> None:
    model = tiny(family)
    used = model(ONE["input_ids"], use_cache=True)
    with pytest.raises(ValueError, match="already holds tokens"):
        model.generate(
            **ONE, custom_generate=outrider.custom_generate, drafter="ngram", max_new_tokens=4, cache=used.cache
        )
    empty = transformers.DynamicCache(config=model.config)
    options = {**ONE, "custom_generate": outrider.custom_generate, "drafter": "ngram", "max_new_tokens": 4}
    assert torch.equal(model.generate(**options, cache=empty), model.generate(**options))


def test_positions_must_be_those_of_the_mask() -> None:
    """Others were ignored without a word."""
    inputs = batch()
    counted = inputs["attention_mask"].cumsum(-1) - 1
    plain, ours = both("llama", {**inputs, "position_ids": counted})
    assert torch.equal(plain, ours)
    assert "position_ids" in refusal(**inputs, position_ids=counted + 1)
    assert "position_ids" in refusal(position_ids=torch.arange(len(PROMPT))[None] * 2)
    assert "same shape" in refusal(attention_mask=torch.tensor([[0, 1, 1, 1]]))


@pytest.mark.parametrize("seed", [1.5, "3", True], ids=repr)
def test_a_seed_must_be_a_whole_number(seed: Any) -> None:
    assert "not a whole number" in refusal(seed=seed, do_sample=True, **batch())


def test_a_row_without_tokens_is_refused() -> None:
    assert "row 1 has no tokens" in refusal(
        input_ids=torch.tensor([[3, 4], [PAD, PAD]]), attention_mask=torch.tensor([[1, 1], [0, 0]])
    )


def test_other_ways_to_generate_and_other_inputs_are_refused() -> None:
    """Plain `generate` asks for `trust_remote_code` here; ours went on and wrote greedily."""
    assert "contrastive search" in refusal(penalty_alpha=0.6, top_k=4)
    assert "dola" in refusal(dola_layers="low")
    assert "beam search" in refusal(force_words_ids=[[[3]]], num_beams=1)
    with pytest.raises(ValueError, match="token_type_ids"):
        tiny("gpt2").generate(
            **ONE,
            custom_generate=outrider.custom_generate,
            drafter="ngram",
            max_new_tokens=4,
            token_type_ids=ONE["input_ids"],
        )


def test_several_sequences_of_a_prompt() -> None:
    """`num_return_sequences` repeats the prompt before our turn: the rows are ordinary rows."""
    out = tiny("llama").generate(
        **ONE,
        max_new_tokens=8,
        do_sample=True,
        num_return_sequences=3,
        pad_token_id=PAD,
        custom_generate=outrider.custom_generate,
        drafter="ngram",
        seed=3,
    )
    assert out.shape == (3, len(PROMPT) + 8)
    assert len({tuple(row) for row in out.tolist()}) == 3
