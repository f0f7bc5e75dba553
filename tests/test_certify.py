"""Certificates: what is right is certified, what is wrong is caught, with evidence."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bench_fakes import FakeEngine, prompts
from outrider.bench.certify import LAW_TOKENS, Law, certify, chi_square, pool


def test_a_right_engine_is_certified_under_every_rule() -> None:
    """The mss check would fail for one set of seeds in 10,000; these seeds are fixed."""
    certificate = certify(FakeEngine(), prompts(3), max_new_tokens=12, samples=300)
    assert certificate.certified and certificate.verdict == "certified: identical"
    assert [check.name for check in certificate.checks] == ["greedy", "coupled", "mss"]
    assert certificate.checks[0].evidence["tokens_compared"] == 3 * 2 * 12


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_wrong_token_fails_with_evidence(rule: str) -> None:
    engine = FakeEngine()
    engine.wrong_at = 5
    certificate = certify(engine, prompts(1), max_new_tokens=8, rules=[rule], shapes=[(3, 2, 2)], seeds=[4])
    assert not certificate.certified and certificate.verdict == f"not certified: {rule} failed"
    (record,) = certificate.to_json()["differences"]
    right = engine.generate(prompts(1)[0].encode(engine), 8, 0.7 if rule == "coupled" else 0.0, 4, "off").token_ids
    assert (record["prompt"], record["position"], record["plain_token"]) == ("t/0", 5, right[5])
    assert record["speculative_token"] != right[5] and record["margin_ulps"] > 32 and not record["tie"]


def test_a_tie_in_half_precision_is_listed_and_certified() -> None:
    engine = FakeEngine(dtype=torch.bfloat16)
    engine.model.table[:] = torch.tensor([-60.0, 8.0, 8.0 - 1 / 16, 0, 0, 0, 0, 0])  # one rounding apart or less
    engine.wrong_at = 2
    certificate = certify(engine, prompts(1), max_new_tokens=6, rules=["greedy"], shapes=["auto"])
    assert certificate.certified and certificate.verdict == "certified: identical up to 1 ties"
    assert certificate.ties[0].margin_ulps <= 1.0 and not certificate.differences


def test_the_same_gap_is_no_tie_in_float32() -> None:
    engine = FakeEngine()
    engine.model.table[:] = torch.tensor([-60.0, 8.0, 8.0 - 1 / 16, 0, 0, 0, 0, 0])
    engine.wrong_at = 2
    assert not certify(engine, prompts(1), max_new_tokens=6, rules=["greedy"], shapes=["auto"]).certified


def test_a_biased_sampler_is_caught() -> None:
    """Token 1 is written 15 % too often."""
    engine = FakeEngine()
    engine.bias = 0.15
    certificate = certify(engine, prompts(1), rules=["mss"], samples=1500, temperature=1.5)
    evidence = certificate.checks[0].evidence
    assert not certificate.certified and evidence["p_value"] < 1e-6
    assert evidence["total_variation"] > 2 * evidence["total_variation_by_chance"]


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.8}])
def test_a_right_sampler_passes(options: dict[str, Any]) -> None:
    """Fails for one set of seeds in 10,000; these seeds are fixed. Texts that end early have cells of their own."""
    certificate = certify(FakeEngine(ends=True), prompts(2), rules=["mss"], samples=1000, temperature=1.0, **options)
    assert certificate.certified, certificate.checks[0].evidence
    assert certificate.checks[0].evidence["degrees_of_freedom"] >= 3


def test_a_token_that_the_law_excludes_fails_however_rare() -> None:
    engine = FakeEngine()
    engine.model.table[:] = torch.tensor([-60.0, -3.0, 1.0, 1.0, 0.5, 0, 0, 0])
    engine.bias = 0.01
    certificate = certify(engine, prompts(1), rules=["mss"], samples=400, temperature=1.0, top_k=3)
    evidence = certificate.checks[0].evidence
    assert evidence["excluded_tokens"] > 0 and evidence["p_value"] > 1e-4
    assert not certificate.certified


def test_p_values_are_those_of_the_chi_square_law() -> None:
    statistic, freedom, p_value = chi_square([30, 20, 10], [20.0, 20.0, 20.0])
    assert (statistic, freedom) == (10.0, 2)
    assert p_value == pytest.approx(math.exp(-5), rel=1e-12)
    assert chi_square([60, 40], [50.0, 50.0])[2] == pytest.approx(math.erfc(math.sqrt(2)), rel=1e-12)


def test_cells_of_the_joint_law_are_a_law() -> None:
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    law = Law(FakeEngine(ends=True), [3], 500, sampling)
    assert sum(law.cells.values()) == pytest.approx(1.0, abs=1e-12)
    assert max(map(len, law.cells)) == LAW_TOKENS


def test_rare_cells_are_pooled_until_each_expects_five() -> None:
    cells = {(1,): 0.5, (2,): 0.46, (3,): 0.02, (4,): 0.015, (5,): 0.005}
    observed, expected = pool(Counter({(1,): 50, (2,): 40, (3,): 4, (5,): 6}), cells, 100)
    assert observed == [50, 50] and expected == pytest.approx([50.0, 50.0]), "the pool of 4 joins the smaller cell"
    observed, expected = pool(Counter({(1,): 100, (2,): 90, (4,): 10}), cells, 200)
    assert observed == [100, 90, 10] and expected == pytest.approx([100.0, 92.0, 8.0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": []},
        {"shapes": []},
        {"rules": []},
        {"rules": ["magic"]},
        {"seeds": []},
        {"max_new_tokens": 1},
        {"temperature": 0.0},
        {"samples": 10},
        {"prompts": prompts(1) * 2},
    ],
)
def test_an_empty_certificate_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give|take|raise|draw"):
        certify(FakeEngine(), arguments.pop("prompts", prompts(1)), **arguments)


def test_no_certificate_without_a_compared_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    silence = SimpleNamespace(token_ids=[], stats=engine.stats(2, "auto"))
    monkeypatch.setattr(engine, "generate", lambda *a, **k: silence)
    with pytest.raises(ValueError, match="no token was compared"):
        certify(engine, prompts(1), rules=["greedy"])


@pytest.mark.parametrize("rule", ["greedy", "coupled", "mss"])
def test_no_certificate_when_nothing_was_drafted(rule: str) -> None:
    engine = FakeEngine()
    engine.drafts = False
    with pytest.raises(ValueError, match="Nothing was drafted"):
        certify(engine, prompts(1), rules=[rule], max_new_tokens=4, samples=50)


def test_a_law_without_choice_is_refused() -> None:
    engine = FakeEngine()
    engine.model.table[:, 1] = 100.0
    with pytest.raises(ValueError, match="raise the temperature"):
        certify(engine, prompts(1), rules=["mss"])


def test_a_certificate_prints_and_can_be_written() -> None:
    certificate = certify(FakeEngine(), prompts(2), max_new_tokens=4, samples=100)
    out = io.StringIO()
    certificate.render(Console(file=out, width=200))
    assert "certified: identical" in out.getvalue() and "mss: holds" in out.getvalue()
    plain = json.loads(json.dumps(certificate.to_json()))
    assert {"certified", "verdict", "checks", "ties", "differences", "evidence", "provenance"} == set(plain)
