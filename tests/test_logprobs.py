"""What is reported of every emitted token is what a full forward says."""

from __future__ import annotations

import math

import pytest
import torch

from families import VOCAB, tiny
from helpers import NEW, PROMPT, engine, expected, oracle, target_of
from outrider.api import Engine
from outrider.drafters.oracle import OracleDrafter
from outrider.options import Options
from outrider.sampling import Sampler

DEEP = ["llama", "gemma3", "qwen3_next", "mamba"]


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


def test_the_oracle_writes_no_further_than_the_text() -> None:
    """Behind the end a grammar's processor has no answer, and may raise."""
    text = expected("llama")
    end = next(token for at, token in enumerate(text) if at >= 2 and token not in text[:at])

    def grammar(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert end not in ids[0, len(PROMPT) :], "asked behind the end"
        return scores

    for room, last in ((NEW, end), (1, text[0])):
        options = Options(max_new_tokens=room, logits_processor=[grammar])
        sampler = Sampler(options, 0, len(PROMPT), frozenset([end]), VOCAB)
        (written,) = OracleDrafter(target_of("llama"), 1.0).begin([PROMPT], [sampler], room).texts
        assert written == [*PROMPT, *text[: text.index(last) + 1]]
