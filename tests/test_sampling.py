"""Every processor sees the prefix and its own node's path, and every option is checked."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import transformers as tf

from families import tiny
from helpers import NEW, PROMPT, engine, expected, lm
from outrider.api import Engine
from outrider.options import Options, options_from
from outrider.sampling import Sampler
from outrider.scores import Scores
from outrider.tree import TokenTree

V = 24
IDS = [3, 5, 3, 7, 5, 3]
EOS = frozenset({2, 9})


def tree() -> TokenTree:
    """Seven nodes, with repeats of the prefix and of each other along the paths."""
    made = TokenTree(IDS[-1])
    a, b = made.add(0, 7), made.add(0, 5)
    made.add(a, 5)
    d = made.add(a, 3)
    made.add(b, 5)
    made.add(d, 7)
    return made


def logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(1))


def user_rule(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's processor: forbids the token that came three places before."""
    return scores.scatter(1, ids[:, -3:-2], float("-inf"))


def careless_rule(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's processor that writes into its argument."""
    rows = torch.arange(len(ids))
    scores[rows, ids[:, -1]] += 2.0
    scores[rows, ids[:, -2]] = float("-inf")
    return scores


STOCK: dict[str, Any] = {
    "ExponentialDecayLengthPenalty": tf.ExponentialDecayLengthPenalty((2, 1.5), 2, len(IDS)),
    "ForcedBOSTokenLogitsProcessor": tf.ForcedBOSTokenLogitsProcessor(4),
    "ForcedEOSTokenLogitsProcessor": tf.ForcedEOSTokenLogitsProcessor(8, 2),
    "InfNanRemoveLogitsProcessor": tf.InfNanRemoveLogitsProcessor(),
    "LogitNormalization": tf.LogitNormalization(),
    "MinLengthLogitsProcessor": tf.MinLengthLogitsProcessor(8, 2),
    "MinNewTokensLengthLogitsProcessor": tf.MinNewTokensLengthLogitsProcessor(6, 2, 2),
    "MinPLogitsWarper": tf.MinPLogitsWarper(0.1),
    "NoBadWordsLogitsProcessor": tf.NoBadWordsLogitsProcessor([[7, 5], [3, 7, 3], [11]], eos_token_id=2),
    "NoRepeatNGramLogitsProcessor": tf.NoRepeatNGramLogitsProcessor(2),
    "PrefixConstrainedLogitsProcessor": tf.PrefixConstrainedLogitsProcessor(
        lambda batch, ids: [int(ids[-1]), (int(ids.sum()) + 1) % V], num_beams=1
    ),
    "RepetitionPenaltyLogitsProcessor": tf.RepetitionPenaltyLogitsProcessor(1.7),
    "SequenceBiasLogitsProcessor": tf.SequenceBiasLogitsProcessor([[[7, 5], 4.0], [[11], -3.0]]),
    "SuppressTokensAtBeginLogitsProcessor": tf.SuppressTokensAtBeginLogitsProcessor([1, 2], len(IDS)),
    "SuppressTokensLogitsProcessor": tf.SuppressTokensLogitsProcessor([1, 2]),
    "TemperatureLogitsWarper": tf.TemperatureLogitsWarper(0.7),
    "TopKLogitsWarper": tf.TopKLogitsWarper(4),
    "TopPLogitsWarper": tf.TopPLogitsWarper(0.7),
    "TypicalLogitsWarper": tf.TypicalLogitsWarper(0.6),
    "EpsilonLogitsWarper": tf.generation.EpsilonLogitsWarper(0.05),
    "EtaLogitsWarper": tf.generation.EtaLogitsWarper(0.05),
}
OWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition penalty": {"repetition_penalty": 1.7},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 1.5},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "no repeated token": {"no_repeat_ngram_size": 1},
    "logit bias": {"logit_bias": {5: -100.0, 7: 2.5}},
    "bad words": {"bad_words_ids": [[7, 5], [3, 7, 3], [11]]},
    "min new tokens": {"min_new_tokens": 2},
    "top k": {"top_k": 3},
    "top p": {"top_p": 0.6},
    "min p": {"min_p": 0.2},
    "typical p": {"typical_p": 0.5},
    "user's": {"logits_processor": [user_rule]},
    "user's careless": {"logits_processor": [careless_rule]},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 2,
        "logit_bias": {5: 1.0},
        "bad_words_ids": [[7, 5]],
        "min_new_tokens": 2,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.95,
        "logits_processor": [user_rule],
    },
    **{name: {"logits_processor": [processor]} for name, processor in STOCK.items()},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", OWN)
def test_every_node_of_a_tree_is_processed_as_if_it_were_alone(rule: str, temperature: float) -> None:
    """Penalties, biases and cuts were ignored or wrong at later draft positions elsewhere, and most stock processors broke on
    several positions at once: here each node's pick, law and scores are those of its own sequence, one by one."""
    options = options_from({"temperature": temperature, **OWN[rule]})
    made, raw = tree(), logits(7)
    kept = raw.clone()
    prefix = IDS[:4]  # the last two tokens of IDS are new text already
    sampler = Sampler(options, 5, len(prefix), EOS, V)
    pick = sampler.picker(IDS, made, Scores(raw))
    by_depth: dict[int, list[int]] = {}
    for node in range(7):
        by_depth.setdefault(made.depths[node], []).append(node)
    together = {}
    for nodes in by_depth.values():
        ids = [[*IDS, *made.path_tokens(n)[1:]] for n in nodes]
        for node, scores in zip(nodes, sampler.scores(ids, raw[nodes])):
            together[node] = scores
    picks = {node: pick(node) for node in reversed(range(7))}
    for node in range(7):
        fresh = Sampler(options, 5, len(prefix), EOS, V)
        ids = [*IDS, *made.path_tokens(node)[1:]]
        alone = fresh.scores([ids], kept[node : node + 1])[0]
        assert torch.equal(together[node], alone)
        assert picks[node] == fresh.pick(ids, kept[node])
        law = fresh.law(ids, kept[node])
        assert float(law.sum()) == pytest.approx(1.0)
        assert float(law[picks[node]]) > 0
        if temperature == 0:
            assert float(law[picks[node]]) == 1.0
    assert torch.equal(raw, kept), "logits were changed"


# what each rule must do, computed by hand on the sequence IDS + path


def one(path: list[int], **given: Any) -> torch.Tensor:
    sampler = Sampler(options_from(given), 5, 4, EOS, V)
    return sampler.scores([[*IDS, *path]], logits(1))[0]


def test_what_each_rule_does() -> None:
    raw = logits(1)[0]
    ids = [*IDS, 7, 5]
    wanted = raw.clone()
    for token in {3, 5, 7}:
        wanted[token] = raw[token] / 1.7 if raw[token] > 0 else raw[token] * 1.7
    assert torch.allclose(one([7, 5], repetition_penalty=1.7), wanted)
    new = ids[4:]  # 5 3 7 5
    wanted = raw.clone()
    for token in set(new):
        wanted[token] -= 0.5 + 0.25 * new.count(token)
    assert torch.allclose(one([7, 5], presence_penalty=0.5, frequency_penalty=0.25), wanted)
    assert torch.isinf(one([7, 5], no_repeat_ngram_size=2)).nonzero().flatten().tolist() == [3]
    assert torch.isinf(one([7], no_repeat_ngram_size=2)).nonzero().flatten().tolist() == [5]
    assert torch.isinf(one([7], bad_words_ids=[[7, 5], [11]])).nonzero().flatten().tolist() == [5, 11]
    assert torch.isinf(one([], bad_words_ids=[[7, 5], [11]])).nonzero().flatten().tolist() == [11]
    assert torch.isinf(one([7], min_new_tokens=4)).nonzero().flatten().tolist() == [2, 9]
    assert not torch.isinf(one([7, 5], min_new_tokens=4)).any()
    assert torch.equal(
        one([], logit_bias={5: 1.5, 6: -2.0}) - raw != 0,
        torch.arange(V).unsqueeze(0).eq(torch.tensor([[5], [6]])).any(0),
    )
    for given, kept in (({"top_k": 3}, 3), ({"top_k": 3000}, V)):
        cut = one([], temperature=2.0, **given)
        assert int(torch.isfinite(cut).sum()) == kept
        assert torch.allclose(cut[torch.isfinite(cut)], (raw / 2)[torch.isfinite(cut)])
    law, order = (raw / 2).softmax(-1), raw.argsort(descending=True)
    cut = torch.isfinite(one([], temperature=2.0, top_p=0.6))
    count = int(cut.sum())
    assert cut[order[:count]].all()
    assert float(law[order[:count]].sum()) >= 0.6 > float(law[order[: count - 1]].sum())
    assert torch.equal(torch.isfinite(one([], temperature=2.0, min_p=0.3)), law >= 0.3 * law.max())


def test_cuts_do_nothing_to_greedy_text() -> None:
    for given in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"typical_p": 0.1}):
        assert torch.equal(one([], **given), logits(1)[0])


def test_ties_go_to_the_lowest_id_everywhere() -> None:
    """Speculative argmax broke ties to the last index elsewhere, plain argmax to the first: texts differed."""
    tied = torch.zeros(3, V)
    tied[:, [4, 11, 20]] = 5.0
    made = TokenTree(1)
    made.add(made.add(0, 4), 4)
    for given in ({}, {"logit_bias": {1: 0.0}}, {"logits_processor": [lambda ids, scores: scores]}):
        sampler = Sampler(options_from(given), 0, 1, EOS, V)
        assert sampler.pick([1], tied[0]) == 4
        assert int(sampler.law([1], tied[0]).argmax()) == 4
        assert [sampler.picker([1], made, Scores(tied))(n) for n in range(3)] == [4, 4, 4]


def test_a_model_with_exact_ties_writes_the_same_with_and_without_speculation() -> None:
    """Twin rows of the vocabulary head tie exactly at every step."""
    import copy

    from outrider.reference import reference_generate

    model = copy.deepcopy(tiny("llama"))
    model.lm_head.weight[24:] = model.lm_head.weight[:24]
    wanted = reference_generate(model, PROMPT, Options(max_new_tokens=NEW))
    assert max(wanted) < 24
    for drafter in ("ngram", model, lm("mamba", 1)):
        for shape in (4, (3, 2), "best8"):
            result = Engine(model, None, "twins", drafter).generate(list(PROMPT), shape=shape, max_new_tokens=NEW)
            assert result.token_ids == wanted


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_raise(bad: float) -> None:
    """NaN must raise, not emit '!' for ever."""
    raw = logits(3)
    raw[1, 4] = bad
    made = TokenTree(1)
    made.add(made.add(0, 4), 4)
    for given in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.2}):
        sampler = Sampler(options_from(given), 0, 1, EOS, V)
        with pytest.raises(ValueError, match="not finite"):
            sampler.pick([1], raw[1])
        with pytest.raises(ValueError, match="not finite"):
            sampler.law([1], raw[1])
        with pytest.raises(ValueError, match="not finite"):
            sampler.picker([1], made, Scores(raw))(1)


def test_minus_infinity_is_an_ordinary_logit() -> None:
    raw = torch.full((V,), float("-inf"))
    raw[7] = -5.0
    for given in ({}, {"temperature": 1.0, "seed": 3}):
        assert Sampler(options_from(given), 3, 1, EOS, V).pick([1], raw) == 7


# -- end to end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {25: -100.0}},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "temperature": 0.8, "seed": 2},
        {"bad_words_ids": [[25], [42, 25], [18, 30]]},
        {"typical_p": 0.7, "min_p": 0.02, "temperature": 1.2, "seed": 4},
        {"logits_processor": [user_rule], "temperature": 0.6, "top_k": 9, "seed": 5},
    ],
)
def test_options_on_a_tree_give_the_reference_text(given: dict[str, Any]) -> None:
    """A banned token came back at later draft positions elsewhere; a bias or penalty holds at every node here."""
    for family in ("llama", "qwen3_next"):
        plain = expected(family, **given)
        for drafter, shape in itertools.product(("same", "merged"), ((3, 2, 2), "best12")):
            result = engine(family, drafter).generate(list(PROMPT), shape=shape, max_new_tokens=NEW, **given)
            assert result.token_ids == plain


def test_unseeded_sampling_follows_torchs_generator_and_reports_its_seed() -> None:
    """One documented source of randomness: `torch.manual_seed` governs unseeded runs, and the seed that was used is told."""
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        result = engine("llama", "same").generate(list(PROMPT), shape=3, max_new_tokens=NEW, temperature=1.0)
        texts.append(result.token_ids)
        assert result.token_ids == expected("llama", temperature=1.0, seed=result.seed)
    assert texts[0] == texts[1] != texts[2]


def test_do_sample_is_understood_as_transformers_does() -> None:
    assert options_from({"do_sample": True}).temperature == 1.0
    assert options_from({"do_sample": True, "temperature": 0.4}).temperature == 0.4
    assert options_from({"do_sample": False, "temperature": 0.4}).temperature == 0.0
    assert options_from({"do_sample": None, "temperature": 0.4}).temperature == 0.4
    assert options_from({"do_sample": True, "temperature": None}).temperature == 1.0
    with pytest.raises(ValueError, match="contradicts temperature 0"):
        options_from({"do_sample": True, "temperature": 0.0})


# -- checks ------------------------------------------------------------------------------------------------------------

BAD: list[dict[str, Any]] = [
    {"max_new_tokens": -1},
    {"max_new_tokens": 2.5},
    {"max_new_tokens": True},
    {"max_new_tokens": "7"},
    {"max_new_tokens": None},
    {"min_new_tokens": -1},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "hot"},
    {"temperature": None},
    {"top_k": -1},
    {"top_k": 1.5},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"typical_p": 0.0},
    {"typical_p": 2.0},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": math.inf},
    {"repetition_penalty": math.nan},
    {"repetition_penalty": "strong"},
    {"repetition_penalty": None},
    {"presence_penalty": math.nan},
    {"presence_penalty": math.inf},
    {"frequency_penalty": "x"},
    {"no_repeat_ngram_size": -1},
    {"no_repeat_ngram_size": 1.0},
    {"logit_bias": {99: 1.0}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {3: math.nan}},
    {"logit_bias": {3: "x"}},
    {"logit_bias": {"x": 1.0}},
    {"logit_bias": [3]},
    {"bad_words_ids": [[]]},
    {"bad_words_ids": [[99]]},
    {"bad_words_ids": [3]},
    {"bad_words_ids": [["x"]]},
    {"bad_words_ids": 3},
    {"logits_processor": [3]},
    {"logits_processor": user_rule},
    {"seed": 1.5},
    {"seed": "x"},
    {"seed": True},
    {"eos_token_id": -1},
    {"eos_token_id": "end"},
    {"eos_token_id": [1, -2]},
    {"eos_token_id": [1, "x"]},
    {"eos_token_id": 1.5},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": [3]},
    {"stop": 3},
    {"rule": "lossy"},
    {"rule": None},
    {"draft_sampling": "beam"},
    {"logprobs": -1},
    {"logprobs": True},
    {"logprobs": 1.5},
    {"logprobs_mode": "cooked"},
]


@pytest.mark.parametrize(
    "given", BAD, ids=[f"{k}={getattr(v, '__name__', v)!r}"[:60] for g in BAD for k, v in g.items()]
)
def test_a_bad_value_is_refused_in_one_sentence_that_names_it(given: dict[str, Any]) -> None:
    """Nothing is refused silently and nothing is ignored silently."""
    with pytest.raises(ValueError) as refusal:
        engine("llama").generate(list(PROMPT), **{"max_new_tokens": 1, "seed": 1, **given})
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 250
    (name,) = given
    assert name.split("_")[0] in message


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("topp", "top_p"), ("stops", "stop")],
)
def test_an_unknown_option_is_refused_with_a_close_name(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"no option '{wrong}'.*{right}"):
        engine("llama").generate(list(PROMPT), **{wrong: 1})


def test_an_option_like_no_other_points_to_the_list() -> None:
    with pytest.raises(ValueError, match=r"see outrider\.Options"):
        options_from({"zzzzzz": 1})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        ([1, 99], "99 is outside"),
        ([-1], "-1 is outside"),
        ("text", "no tokenizer"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine("llama").generate(prompt, max_new_tokens=1)
