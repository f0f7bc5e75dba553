"""Where a text ends, what is counted, and what is reported: exact inside an accepted block."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from families import tiny
from helpers import DRAFTERS, NEW, PROMPT, PROMPTS, Watch, engine, expected, lm, oracle
from outrider.api import Engine
from outrider.drafters.lm import LMDrafter
from outrider.models.selftest import tree_model
from outrider.stop import TextStream

DEEP = ["llama", "gemma3", "qwen3_next", "mamba"]


class Bytes:
    """A toy tokenizer: tokens are byte strings, and a text is their join, read as UTF-8."""

    chat_template = None
    eos_token_id = None

    def __init__(self, tokens: list[bytes], special: tuple[int, ...] = ()) -> None:
        self.tokens, self.special = tokens, special

    def __len__(self) -> int:
        return len(self.tokens)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.tokens.index(bytes([b])) for b in text.encode()]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i in self.special)]
        return b"".join(self.tokens[i] for i in kept).decode(errors="replace")


LETTERS = Bytes([bytes([97 + i % 26]) if i < 26 else bytes([65 + i % 26]) for i in range(48)])
PAIRS = Bytes([b"abcdefghijklmnopqrstuvwxyz"[i % 7 : i % 7 + 1 + i % 3] for i in range(48)])
EURO = [bytes([b]) for b in "aé€😀".encode()] + [b"x", b"stop", b"\xff"]


def feed(stream: TextStream, tokens: list[int]) -> list[str]:
    pieces = []
    for token in tokens:
        stream.push(token)
        pieces.append(stream.take())
        if stream.stopped:
            return pieces
    stream.finish()
    return [*pieces, stream.take(final=True)]


# -- text --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, len(EURO) - 1), max_size=30), st.lists(st.integers(0, len(EURO) - 1), max_size=4))
def test_pieces_join_to_the_text_whatever_the_bytes(tokens: list[int], context: list[int]) -> None:
    toy = Bytes(EURO)
    start = toy.decode([len(EURO) - 3])  # contexts end with a whole character
    stream = TextStream(toy, [*context, EURO.index(b"x")], [])
    pieces = feed(stream, tokens)
    assert "".join(pieces) == stream.text
    whole = toy.decode([*context, EURO.index(b"x"), *tokens])
    assert whole.endswith(stream.text)
    assert stream.text == toy.decode(tokens)
    assert start == "x"


@given(
    st.lists(st.integers(0, 2), max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_the_earliest_stop_string_wins_and_nothing_of_it_comes_out(letters: list[int], stops: list[str]) -> None:
    """A stop string completed inside a block was cut from the text elsewhere, but its tokens leaked, or it was missed."""
    toy = Bytes([b"a", b"b", b"c"])
    stream = TextStream(toy, [], stops)
    pieces = feed(stream, letters)
    text = toy.decode(letters)
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    if ends:
        first = min(end for end, _ in ends)  # the token that completes one ends the text
        wanted = text[: min(start for end, start in ends if end == first)]
        assert stream.stopped
        assert len(pieces) == first
    else:
        wanted = text
        assert not stream.stopped
    assert "".join(pieces) == stream.text == wanted


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_stop_strings_across_tokens_of_several_letters(tokens: list[int]) -> None:
    toy = Bytes([b"a", b"ab", b"ba", b"bab", b"c", b"cab"])
    stream = TextStream(toy, [], ["abb", "bc"])
    pieces = feed(stream, tokens)
    text = toy.decode(tokens)
    at = [text.index(s) for s in ("abb", "bc") if s in text]
    assert "".join(pieces) == stream.text
    assert stream.stopped == bool(at)
    if at:
        fed = toy.decode(tokens[: len(pieces)])
        before = toy.decode(tokens[: len(pieces) - 1])
        assert any(s in fed for s in ("abb", "bc"))
        assert not any(s in before for s in ("abb", "bc"))
        assert stream.text == fed[: min(fed.index(s) for s in ("abb", "bc") if s in fed)]


def test_an_incomplete_character_is_held_back_until_it_is_whole() -> None:
    toy = Bytes([bytes([b]) for b in "€".encode()] + [b"a"])
    stream = TextStream(toy, [3], [])
    seen = []
    for token in (0, 1, 2, 3):
        stream.push(token)
        seen.append(stream.take())
    assert seen == ["", "", "€", "a"]
    stream.push(0)
    assert stream.take() == ""
    stream.finish()
    assert stream.take(final=True) == "�"
    assert stream.text == "€a�"


def test_the_beginning_of_a_stop_string_is_held_back_and_given_out_when_it_is_none() -> None:
    stream = TextStream(Bytes([b"a", b"b", b"c"]), [], ["abc"])
    seen = []
    for token in (0, 1, 1, 0):
        stream.push(token)
        seen.append(stream.take())
    assert seen == ["", "", "abb", ""]
    stream.finish()
    assert stream.take(final=True) == "a"


def test_special_tokens_are_left_out_or_kept() -> None:
    toy = Bytes([b"a", b"<s>"], special=(1,))
    assert "".join(feed(TextStream(toy, [], []), [0, 1, 0])) == "aa"
    assert "".join(feed(TextStream(toy, [], [], skip_special_tokens=False), [0, 1, 0])) == "a<s>a"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine("llama").generate(list(PROMPT), stop="a")


def stop_cases(text: str, at: int) -> list[tuple[str, ...]]:
    return [(text[at],), (text[at : at + 2],), (text[at : at + 5],), (text[at + 1 : at + 3], text[at : at + 3], "ZZZZ")]


@pytest.mark.parametrize("toy", [LETTERS, PAIRS], ids=["letters", "pairs"])
@pytest.mark.parametrize("drafter", ["same", "half", "ngram", "off"])
def test_a_stop_string_cuts_text_ids_and_logprobs_together(drafter: str, toy: Bytes) -> None:
    """vLLM cut the text at a stop string inside an accepted block, while ids and logprobs past it leaked out."""
    writing = Engine(tiny("llama"), toy, "llama", DRAFTERS[drafter]("llama"))
    options = {"temperature": 1.3, "seed": 5, "max_new_tokens": 24}
    ids = expected("llama", **options)
    text = toy.decode(ids)
    for at in (0, 3, 7):
        for stops in stop_cases(text, at):
            ends = [text.index(s) + len(s) for s in stops if s in text]
            lengths = [len(toy.decode(ids[:n])) for n in range(len(ids) + 1)]
            count = next(n for n in range(len(ids) + 1) if lengths[n] >= min(ends))
            fed = toy.decode(ids[:count])
            for shape in (5, (2, 2, 1)):
                stream = writing.stream(list(PROMPT), shape=shape, stop=list(stops), logprobs=1, **options)
                pieces, result = [], None
                while result is None:
                    try:
                        pieces.append(next(stream))
                    except StopIteration as end:
                        result = end.value
                assert result.finish_reason == "stop"
                assert result.token_ids == ids[:count] == [p.token for p in pieces]
                assert [entry.token for entry in result.logprobs] == result.token_ids
                assert result.text == fed[: min(fed.index(s) for s in stops if s in fed)]
                assert "".join(p.text for p in pieces) == result.text
                assert result.stats.emitted == count


# -- end tokens --------------------------------------------------------------------------------------------------------


def cut(ids: list[int], eos: set[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(ids) if token in eos), len(ids))
    return ids[:end]


@pytest.mark.parametrize("drafter", ["same", "half", "alternate", "ngram", "merged", "off"])
@pytest.mark.parametrize("family", DEEP)
def test_an_end_token_inside_an_accepted_block_ends_the_text_and_is_kept_once(family: str, drafter: str) -> None:
    """transformers ignored an end token inside an accepted block, and the text ran on."""
    options = {"temperature": 1.0, "seed": 2, "max_new_tokens": 24}
    whole = expected(family, **options)
    for place in (0, 1, 2, 4, 7):
        for eos in (whole[place], [whole[place]], [whole[place], whole[place + 2], 47]):
            wanted = cut(whole, {eos} if isinstance(eos, int) else set(eos))
            result = engine(family, drafter).generate(list(PROMPT), shape=6, eos_token_id=eos, **options)
            assert result.token_ids == wanted
            assert result.finish_reason == ("stop" if len(wanted) < len(whole) else result.finish_reason)
            assert result.stats.emitted == len(wanted)
            last = result.stats.accepted + result.stats.rounds - len(wanted)
            assert last in (0, 1)  # a block that was cut ends with an accepted token, not with a correction


def test_no_end_token_at_all_is_fine() -> None:
    """Assisted generation crashed where no end token was configured."""
    for eos in (None, [], "model"):
        result = engine("llama", "same").generate(list(PROMPT), shape=4, eos_token_id=eos, max_new_tokens=NEW)
        assert result.token_ids == expected("llama")
        assert result.finish_reason == "length"


def test_the_models_own_end_token_is_taken_and_can_be_switched_off() -> None:
    import copy

    model = copy.deepcopy(tiny("llama"))
    ids = expected("llama")
    model.generation_config.eos_token_id = [ids[3], 46]
    own = Engine(model, None, "llama", "ngram")
    assert own.generate(list(PROMPT), shape=4, max_new_tokens=NEW).token_ids == cut(ids, {ids[3]})
    assert own.generate(list(PROMPT), shape=4, max_new_tokens=NEW, eos_token_id=None).token_ids == ids


def test_an_end_token_in_the_prompt_does_not_end_anything() -> None:
    ids = expected("llama")
    eos = next(token for token in PROMPT if token not in ids)
    result = engine("llama", "same").generate(list(PROMPT), shape=4, eos_token_id=eos, max_new_tokens=NEW)
    assert result.token_ids == ids


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["same", "wrong", "half", "alternate", "ngram", "merged", "off"])
@pytest.mark.parametrize("family", DEEP)
def test_budgets_are_met_exactly(family: str, drafter: str) -> None:
    """Usage counted whole blocks, or answers were shorter than asked for, where the last block did not fit the budget."""
    for budget in (0, 1, 2, 3, 5, 8):
        for shape in (5, (3, 2), "best6"):
            result = engine(family, drafter).generate(list(PROMPT), shape=shape, max_new_tokens=budget)
            assert result.token_ids == expected(family, max_new_tokens=8)[:budget]
            assert result.finish_reason == "length"
            assert result.stats.emitted == budget
            assert result.stats.accepted + result.stats.rounds == budget


def test_a_budget_of_none_writes_nothing_and_begins_nothing() -> None:
    for result in engine("llama", "merged").generate([list(p) for p in PROMPTS], max_new_tokens=0):
        assert (result.token_ids, result.text, result.stats.rounds) == ([], "", 0)


def test_counts_add_up() -> None:
    """Accepted, drafted and rounds per request are what users want to see; they must fit the tokens written."""
    for family, drafter, shape in itertools.product(DEEP, ("same", "half", "alternate", "merged"), (4, (3, 2, 1))):
        stats = engine(family, drafter).generate(list(PROMPT), shape=shape, max_new_tokens=NEW).stats
        assert stats.accepted + stats.rounds == stats.emitted == NEW
        assert stats.accepted <= stats.tried <= stats.drafted
        assert sum(stats.histogram.values()) == stats.rounds == sum(stats.shapes.values())
        assert sum(n * count for n, count in stats.histogram.items()) == NEW
        assert stats.acceptance_length == NEW / stats.rounds
        assert 0 <= stats.acceptance_rate <= 1
        assert set(stats.seconds) == {"prefill", "draft", "verify", "commit", "total"}
        assert sum(v for k, v in stats.seconds.items() if k != "total") <= stats.seconds["total"]


def test_tried_levels_are_those_where_something_was_drafted() -> None:
    """A walk that ends at a leaf tried nothing below it, though another branch may be deeper."""
    stats = engine("llama", "same").generate(list(PROMPT), shape=[[0], [1], [1, 0]], max_new_tokens=NEW).stats
    assert stats.accepted > 0
    assert stats.acceptance_rate == 1.0


def test_a_block_cut_by_an_end_token_does_not_count_as_rejected() -> None:
    options = {"temperature": 1.0, "seed": 2, "max_new_tokens": NEW}
    ids = expected("llama", **options)
    place = next(i for i in range(1, 5) if ids[i] not in ids[:i])
    stats = engine("llama", "same").generate(list(PROMPT), shape=6, eos_token_id=ids[place], **options).stats
    assert stats.emitted == stats.accepted == place + 1
    assert stats.acceptance_rate == 1.0


def test_pieces_are_marked_as_drafted_or_not() -> None:
    for drafter in ("same", "half", "wrong"):
        stream = engine("llama", drafter).stream(list(PROMPT), shape=3, max_new_tokens=NEW)
        marks = []
        while True:
            try:
                marks.append(next(stream).drafted)
            except StopIteration as end:
                assert sum(marks) == end.value.stats.accepted
                break
        assert any(marks) == (drafter != "wrong")


# -- context limits ----------------------------------------------------------------------------------------------------


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


# -- log probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["same", "half", "merged", "off"])
@pytest.mark.parametrize("family", DEEP)
def test_logprobs_are_those_of_a_full_forward(family: str, drafter: str) -> None:
    result = engine(family, drafter).generate(list(PROMPT), shape=(3, 2, 1), max_new_tokens=NEW, logprobs=4)
    ids = [*PROMPT, *result.token_ids]
    logp = tiny(family)(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    assert len(result.logprobs) == NEW
    for place, entry in enumerate(result.logprobs):
        row = logp[len(PROMPT) + place - 1]
        assert entry.token == result.token_ids[place]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
        values, tokens = row.topk(4)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


def test_processed_logprobs_are_those_of_the_law_that_is_drawn_from() -> None:
    options = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.4, "seed": 1}
    raw, processed = (
        engine("llama", "same").generate(
            list(PROMPT), shape=3, max_new_tokens=NEW, logprobs=5, logprobs_mode=mode, **options
        )
        for mode in ("raw", "processed")
    )
    assert raw.token_ids == processed.token_ids
    ids = list(PROMPT)
    for token, one, other in zip(raw.token_ids, raw.logprobs, processed.logprobs):
        logits = tiny("llama")(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        assert one.logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-3)
        for seen in set(ids):
            logits[seen] = logits[seen] * 1.4 if logits[seen] < 0 else logits[seen] / 1.4
        kept = logits.topk(3)
        law = (kept.values / 0.5).log_softmax(-1)
        assert other.token == token
        assert other.logprob == pytest.approx(float(law[kept.indices.tolist().index(token)]), abs=1e-3)
        finite = [(t, v) for t, v in other.top if not math.isinf(v)]
        assert [t for t, _ in finite] == kept.indices.tolist()
        ids.append(token)


def test_no_logprobs_unless_asked_for_and_zero_alternatives_are_possible() -> None:
    assert engine("llama").generate(list(PROMPT), max_new_tokens=2).logprobs is None
    result = engine("llama", "same").generate(list(PROMPT), shape=3, max_new_tokens=3, logprobs=0)
    assert [entry.top for entry in result.logprobs] == [[], [], []]
    assert all(entry.logprob <= 0 for entry in result.logprobs)


def test_the_oracle_is_what_other_tests_take_it_for() -> None:
    """Guards the drafters of this suite: `same` and the perfect oracle are always right, `wrong` never is."""
    perfect = Engine(tiny("llama"), None, "llama", oracle("llama", 1.0))
    assert perfect.generate(list(PROMPT), shape=3, max_new_tokens=NEW).stats.acceptance_rate == 1.0
    assert engine("llama", "wrong").generate(list(PROMPT), shape=3, max_new_tokens=NEW).stats.accepted == 0
    half = engine("llama", "half").generate(list(PROMPT), shape=1, max_new_tokens=200).stats.acceptance_rate
    assert 0.3 < half < 0.7
    assert engine("llama", "none").generate(list(PROMPT), shape=3, max_new_tokens=NEW).stats.drafted == 0
