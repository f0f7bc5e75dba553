"""Where a text ends, what is counted, and what is reported: exact inside an accepted block."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken

from families import tiny
from helpers import DRAFTERS, NEW, PROMPT, PROMPTS, engine, expected, lm
from outrider.api import Engine
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


class Marked(Bytes):
    """A tokenizer that tells of its special tokens as transformers' do."""

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {i: AddedToken(self.tokens[i].decode(), special=True) for i in self.special}


def test_a_special_token_that_is_left_out_of_the_text_can_be_a_stop_string() -> None:
    """It was looked for in the text, where it never is."""
    tokenizer = Marked([b"a", b"b", b"<end>", b"<pad>", "é".encode()[:1]], special=(2, 3))
    for skip in (True, False):
        stream = TextStream(tokenizer, [0], ["<end>"], skip)
        for token in (0, 3, 1, 4, 2):
            assert not stream.stopped
            stream.push(token)
        assert stream.stopped
        assert stream.text == ("ab\ufffd" if skip else "a<pad>b\ufffd")
    with pytest.raises(ValueError, match="stop at '<end>' alone"):
        TextStream(tokenizer, [0], ["b<end>"])
    assert TextStream(tokenizer, [0], ["b<end>"], skip_special_tokens=False).stop
    early = TextStream(tokenizer, [0], ["b", "<end>"])
    for token in (0, 1):
        early.push(token)
    assert early.stopped and early.text == "a"


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


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "seed": 3, "rule": "mss"}]
)
@pytest.mark.parametrize("seeds", [(0,), (1,), (0, 1)], ids=str)
def test_no_processor_ever_sees_text_behind_the_end(seeds: tuple[int, ...], options: dict[str, Any]) -> None:
    """A grammar has no answer there: neither verification nor drafters ask."""
    made = Engine(tiny("llama"), None, "llama", [lm("llama", seed) for seed in seeds])
    whole = made.generate(list(PROMPT), shape="off", max_new_tokens=NEW, **options).token_ids
    eos = whole[NEW // 2]

    def grammar(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert not (ids[:, len(PROMPT) :] == eos).any()
        return scores

    for shape in (4, (3, 2, 1), "best7x4"):
        result = made.generate(
            list(PROMPT), shape=shape, eos_token_id=eos, logits_processor=[grammar], max_new_tokens=NEW, **options
        )
        if options.get("rule") != "mss":
            assert result.token_ids == cut(whole, {eos}) and result.finish_reason == "stop"


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
