"""Measured speed: totals, turns, differences of text; held against a made-up engine and its clock."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bench_fakes import VOCAB, Clock, FakeEngine, fixed, prompts
from outrider.bench import runner
from outrider.bench.report import render, to_json
from outrider.bench.runner import Run, run_speed


def test_speed_is_total_tokens_over_total_time() -> None:
    """A mean of ratios would say (100 + 1) / 2."""
    method = fixed("m", Clock(), [([1] * 100, 1.0), ([1] * 10, 10.0)], [])
    report = run_speed(FakeEngine(), prompts(2), [method], 100, warmup=0)
    assert report.methods[0].totals().tokens_per_second == 110 / 11


def test_engine_methods_are_timed_by_the_given_clock() -> None:
    clock = Clock()
    engine = FakeEngine(clock=clock)
    engine.seconds_per_token = {"off": 0.5, "3x2x2": 0.25}
    report = run_speed(engine, prompts(3), ["plain", "3x2x2"], 10, clock=clock)
    plain, tree = report.methods
    assert (plain.totals().seconds, tree.totals().seconds) == (15.0, 7.5)
    assert report.speedup(tree) == 2.0
    assert plain.equal_text and tree.equal_text


def test_methods_take_turns_and_each_is_first_equally_often() -> None:
    log: list[str] = []
    methods = [fixed(name, Clock(), [([1], 1.0)] * 6, log) for name in "abc"]
    run_speed(FakeEngine(), prompts(3), methods, 1, repeat=2, warmup=0)
    turns = ["".join(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert turns == ["abc", "bca", "cab", "bca", "cab", "abc"]


def test_warm_up_runs_every_method_and_is_not_counted() -> None:
    log: list[str] = []
    methods = [fixed(name, Clock(), [([1], 99.0), ([1], 1.0)], log) for name in "ab"]
    report = run_speed(FakeEngine(), prompts(1), methods, 1, warmup=1)
    assert log == ["a", "b", "a", "b"]
    assert [method.totals().seconds for method in report.methods] == [1.0, 1.0]


def test_repeats_give_minimum_median_and_maximum() -> None:
    method = fixed("m", Clock(), [([1], 1.0), ([1], 0.25), ([1], 0.5)], [])
    report = run_speed(FakeEngine(), prompts(1), [method], 1, repeat=3, warmup=0)
    assert report.methods[0].speed_spread() == (1.0, 2.0, 4.0)


def test_acceptance_is_counted_over_all_rounds() -> None:
    """9 tokens are 5 rounds of which 4 drafts are accepted, 10 tokens are 5 and 5."""
    totals = runner.MethodReport("m", ["t", "t"], [[stats_run(9), stats_run(10)]], True).totals()
    assert totals.acceptance_length == pytest.approx(19 / 10)
    assert totals.acceptance_rate == pytest.approx(9 / 10)
    assert totals.stage_seconds["verify"] == pytest.approx(0.4)


def stats_run(tokens: int) -> Run:
    return Run([1] * tokens, 1.0, stats=FakeEngine().stats(tokens, "auto"))


def test_plain_decoding_has_length_one_and_no_rate() -> None:
    totals = run_speed(FakeEngine(), prompts(1), ["plain"], 4).methods[0].totals()
    assert (totals.acceptance_length, totals.acceptance_rate) == (1.0, None)


def test_unequal_text_is_reported_with_prompt_position_and_both_tokens() -> None:
    engine = FakeEngine()
    engine.wrong_at = 3
    report = run_speed(engine, prompts(2), ["auto", "plain"], 6)
    auto, plain = report.methods
    assert plain.equal_text is True and auto.equal_text is False
    first = auto.differences[0]
    right = engine.generate(prompts(1)[0].encode(engine), 6, shape="off").token_ids
    assert (first.prompt, first.position, first.plain_token) == ("t/0", 3, right[3])
    assert first.other_token != right[3] and not first.tie
    assert len(auto.differences) == 2


def test_a_text_that_ends_early_is_different() -> None:
    methods = [
        fixed("plain", Clock(), [([1, 2, 3], 1.0)], []),
        fixed("auto", Clock(), [([1, 2], 1.0)], []),
    ]
    report = run_speed(FakeEngine(), prompts(1), methods, 3, warmup=0)
    difference = report.methods[1].differences[0]
    assert (difference.position, difference.plain_token, difference.other_token) == (2, 3, None)
    assert not difference.tie


def test_one_method_alone_is_not_called_equal() -> None:
    assert run_speed(FakeEngine(), prompts(1), ["auto"], 2).methods[0].equal_text is None


def test_margin_is_counted_in_units_of_last_place() -> None:
    """Between 4 and 8 a bfloat16 steps by 2 ** -5."""
    engine = FakeEngine(dtype=torch.bfloat16)
    engine.model.table[2] = torch.tensor([-9.0, 0.0, 5.0, 5.0 - 3 / 32, 1.0, 1.0, 1.0, 1.0])
    assert runner.margin_ulps(engine, [2], [2, 3]) == 3.0
    assert runner.margin_ulps(engine, [2], [3, 2]) == 3.0
    assert runner.margin_ulps(engine, [2], [4, 5]) == 128.0, "two equal losers are no tie"


def test_a_sampled_margin_counts_the_noise_of_its_position() -> None:
    engine = FakeEngine()
    written = engine.generate([3], 5, temperature=0.7, seed=11, shape="off").token_ids
    settings = {"temperature": 0.7, "seed": 11}
    assert runner.margin_ulps(engine, [3, *written[:4]], [written[4]], **settings) == 0.0
    others = [token for token in range(1, VOCAB) if token != written[4]]
    assert all(runner.margin_ulps(engine, [3, *written[:4]], [token], **settings) > 0 for token in others)


@pytest.mark.parametrize("arguments", [{"prompts": []}, {"methods": []}, {"repeat": 0}, {"warmup": -1}])
def test_nothing_to_measure_is_refused(arguments: dict[str, Any]) -> None:
    given: dict[str, Any] = {"prompts": prompts(1), "methods": ["plain"], "max_new_tokens": 2} | arguments
    with pytest.raises(ValueError, match="give"):
        run_speed(FakeEngine(), **given)


@pytest.mark.parametrize("name", ["auto", "chain3", "2", "3x2x2", "(3,2)", "best16"])
def test_a_method_may_be_any_shape(name: str) -> None:
    engine = FakeEngine()
    (method,) = runner.methods_from_names(engine, [name])
    assert method.name == name and len(method.run([1], 3).token_ids) == 3
    assert engine.calls == [name]


def test_plain_is_the_engine_without_drafting() -> None:
    engine = FakeEngine()
    (method,) = runner.methods_from_names(engine, ["off"])
    method.run([1], 3)
    assert method.name == "plain" and engine.calls == ["off"]


@pytest.mark.parametrize("name", ["fast", "chain0", "3x", "3x0", "", "(3,,2)", "-1"])
def test_an_unknown_method_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="chain5"):
        runner.methods_from_names(FakeEngine(), [name])


def test_method_lists_split_at_commas_outside_of_shapes() -> None:
    assert runner.parse_methods("plain, (3,2,2),3x2") == ["plain", "(3,2,2)", "3x2"]
    with pytest.raises(ValueError, match="more than once"):
        runner.methods_from_names(FakeEngine(), ["auto", "auto"])


@pytest.fixture(scope="module")
def llama() -> SimpleNamespace:
    """An engine's model side: a tiny random transformers model whose checkpoint asks for sampling."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes, eos_token_id=None, bos_token_id=None)).eval()
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0, suppress_tokens=[1, 2, 3])
    facts = {"name": "tiny", "dtype": torch.float32, "model_eos": [], "drafter": None}
    return SimpleNamespace(model=model, encode=lambda prompt: [5, 6, 7, 5, 6, 7, 5], **facts)


@pytest.mark.parametrize("name", ["transformers", "transformers-lookup"])
def test_transformers_runs_greedy_whatever_the_checkpoint_prefers(llama: SimpleNamespace, name: str) -> None:
    own = llama.model.generation_config
    expected = [5, 6, 7, 5, 6, 7, 5]
    for _ in range(12):
        expected.append(int(runner.next_logits(llama, expected).argmax()))
    (method,) = runner.methods_from_names(llama, [name])
    assert method.comparable
    assert method.run(expected[:7], 12).token_ids == expected[7:]
    assert llama.model.generation_config is own


def test_sampled_text_of_transformers_is_not_compared(llama: SimpleNamespace) -> None:
    state = torch.get_rng_state()
    report = run_speed(llama, prompts(1), ["transformers"], 4, temperature=1.0)
    assert report.methods[0].equal_text is None and not report.methods[0].differences
    assert torch.equal(state, torch.get_rng_state()), "a measurement leaves the global generator alone"


def test_json_has_the_documented_keys_and_can_be_written() -> None:
    report = run_speed(FakeEngine(), [*prompts(2), *prompts(1, "other")], ["plain", "auto"], 4)
    plain = json.loads(json.dumps(to_json(report, limit=2)))
    assert set(plain) == {"methods", "left_out", "provenance"}
    keys = "method tokens_per_second median_tokens_per_second decoding_tokens_per_second acceptance_length"
    keys += " acceptance_rate equal_text tokens seconds speedup_over_plain"
    assert set(plain["methods"][0]) == {*keys.split(), "per_task", "differences"}
    assert set(plain["methods"][0]["per_task"]) == {"t", "other"}
    keys = "command date versions cpu cores threads capabilities git_commit target drafter dtype tasks limit"
    assert {*keys.split(), "max_new_tokens"} <= set(plain["provenance"])
    assert set(plain["provenance"]["versions"]) == {"python", "torch", "transformers", "outrider"}
    assert plain["provenance"]["limit"] == 2


def test_table_shows_every_method_and_every_difference() -> None:
    engine = FakeEngine()
    engine.wrong_at = 1
    out = io.StringIO()
    render(run_speed(engine, prompts(1), ["plain", "3x2"], 4), Console(file=out, width=200))
    assert "plain" in out.getvalue() and "1 differ" in out.getvalue()
    assert "3x2: t/0 differs at token 1" in out.getvalue()
