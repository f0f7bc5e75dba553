"""Promises of `outrider.bench`, held against a small made-up engine and a clock that only the engine moves."""

import gzip
import io
import json
import math
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider import noise
from outrider.bench import runner, tasks
from outrider.bench.certify import LAW_TOKENS, Law, certify, chi_square, pool
from outrider.bench.report import render, to_json
from outrider.bench.runner import Method, Run, run_speed
from outrider.bench.tasks import Prompt, load_task, parse_tasks

VOCAB, END = 8, 0


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeModel:
    """Logits that depend on the last token only; ids 1 to 7 are written for ever unless `ends` lets 0 in."""

    device = torch.device("cpu")

    def __init__(self, ends: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
        if not ends:
            self.table[:, END] = -60.0

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


class FakeEngine:
    """Writes the target's tokens one by one and pretends to have drafted them.

    `wrong_at` makes speculation write the second choice there, `bias` makes rule mss write token 1 that often.
    """

    name, drafter = "fake", SimpleNamespace(name="pretence")

    def __init__(self, *, dtype: torch.dtype = torch.float32, ends: bool = False, clock: Clock | None = None) -> None:
        self.model, self.dtype, self.clock = FakeModel(ends, dtype), dtype, clock
        self.seconds_per_token: dict[object, float] = {}
        self.wrong_at: int | None = None
        self.bias = 0.0
        self.drafts = True
        self.calls: list[object] = []
        self.model_eos = [END]

    def encode(self, prompt: str | list[dict[str, str]], chat: bool = True) -> list[int]:
        return [1 + len(prompt) % (VOCAB - 1)] if chat else [2] * len(prompt)

    def generate(
        self,
        ids: list[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        shape: object = "auto",
        rule: str = "coupled",
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> SimpleNamespace:
        self.calls.append(shape)
        generator = torch.Generator().manual_seed(seed or 0)
        new: list[int] = []
        while len(new) < max_new_tokens and END not in new:
            scores = self.model.table[[*ids, *new][-1]].double()
            if temperature > 0:
                scores = runner.process(scores, temperature, top_k, top_p)
            if temperature > 0 and rule == "mss":
                biased = new and float(torch.rand(1, generator=generator)) < self.bias
                new.append(1 if biased else int(torch.multinomial(scores.exp(), 1, generator=generator)))
                continue
            if temperature > 0:
                scores = scores + noise.gumbel(seed or 0, noise.TARGET, len(ids) + len(new), VOCAB)
            wrong = shape != "off" and len(new) == self.wrong_at
            new.append(int(scores.argsort(descending=True)[1 if wrong else 0]))
        if self.clock:
            self.clock.now += len(new) * self.seconds_per_token.get(shape, 1.0)
        return SimpleNamespace(token_ids=new, stats=self.stats(len(new), shape))

    def stats(self, tokens: int, shape: object) -> SimpleNamespace:
        """Rounds of two tokens, one of them drafted; plain decoding drafts nothing."""
        speculative = shape != "off" and self.drafts
        rounds = (tokens + 1) // 2 if speculative else tokens
        accepted = tokens - rounds
        seconds = {"prefill": 0.5, "draft": 0.1, "verify": 0.2, "commit": 0.1, "total": 1.0}
        counts = {"rounds": rounds, "emitted": tokens, "accepted": accepted}
        counts |= {"drafted": 3 * rounds, "tried": rounds} if speculative else {"drafted": 0, "tried": 0}
        return SimpleNamespace(**counts, seconds=seconds)


def prompts(count: int, task: str = "t") -> list[Prompt]:
    return [Prompt(task, str(i), ({"role": "user", "content": "x" * i},)) for i in range(count)]


def fixed(name: str, clock: Clock, answers: list[tuple[list[int], float]], log: list[str]) -> Method:
    """A method that writes given tokens in given seconds, one answer after the other."""
    left = iter(answers)

    def run(ids: list[int], max_new_tokens: int) -> Run:
        log.append(name)
        tokens, seconds = next(left)
        return Run(tokens, seconds)

    return Method(name, run)


# ---- speed -----------------------------------------------------------------------------------------------------


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
    assert set(plain) == {"methods", "provenance"}
    keys = "method tokens_per_second acceptance_length acceptance_rate equal_text tokens seconds speedup_over_plain"
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


# ---- certificate -----------------------------------------------------------------------------------------------


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


def test_no_certificate_without_a_compared_token() -> None:
    engine = FakeEngine()
    engine.generate = lambda *a, **k: SimpleNamespace(token_ids=[], stats=engine.stats(2, "auto"))  # type: ignore
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


# ---- tasks -----------------------------------------------------------------------------------------------------

CODE = '    """Adds things. """\n' + "    total = total + values[0]  # and so on\n" * 8
TEXT = "Several honest people walked along another crowded street while everybody talked. " * 5
ROWS: dict[str, list[dict[str, Any]]] = {
    "HumanEval.jsonl.gz": [
        {"task_id": f"H/{i}", "prompt": f"def f{i}(values):\n", "canonical_solution": CODE, "entry_point": f"f{i}"}
        for i in range(40)
    ],
    "cases.jsonl": [
        {
            "id": f"c{i}",
            "prompt": TEXT,
            "upstream_answer": "It is <<1+1=2>>2.",
            "ctx": TEXT,
            "endings": ["a", "b", "c", "d"],
            "expected_index": 1,
            "question": "Why?",
        }
        for i in range(40)
    ],
    "question.jsonl": [{"question_id": i, "turns": [TEXT, "And then?"]} for i in range(40)],
}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index, replaced by rows made up above."""
    fetch = types.ModuleType("outrider.models.fetch")

    @contextmanager
    def open_member(path: Path, member: str) -> Iterator[io.BytesIO]:
        content = "\n".join(map(json.dumps, ROWS[Path(member).name])).encode()
        yield io.BytesIO(gzip.compress(content) if member.endswith(".gz") else content)

    fetch.fetch_package = lambda name, version, sha256: Path(name)  # type: ignore[attr-defined]
    fetch.open_member = open_member  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outrider.models.fetch", fetch)


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_tasks_are_the_same_every_time(packages: None, name: str) -> None:
    found = load_task(name)
    assert len(found) >= 40 and found == load_task(name)
    assert len({prompt.id for prompt in found}) == len(found)
    assert {prompt.task for prompt in found} == {name} and all(prompt.source for prompt in found)


def test_a_limit_takes_an_evenly_spaced_subset(packages: None) -> None:
    everything = load_task("mtbench")
    assert [everything.index(prompt) for prompt in load_task("mtbench", 4)] == [5, 15, 25, 35]
    assert load_task("mtbench", 999) == everything
    with pytest.raises(ValueError, match="limit"):
        load_task("mtbench", 0)


def test_a_small_subset_of_copy_holds_every_kind(packages: None) -> None:
    kinds = {prompt.id.split(":")[0] for prompt in load_task("copy", 6)}
    assert kinds == {"rename function", "rename argument", "fix typos", "replace word", "add line"}


def test_mtbench_keeps_later_turns(packages: None) -> None:
    assert load_task("mtbench")[0].later_turns == ("And then?",)


@pytest.mark.real
def test_real_packages_hold_the_documented_tasks() -> None:
    counts = {name: len(load_task(name)) for name in tasks.TASKS}
    few = {"gsm8k": 100, "hellaswag": 100, "truthfulqa": 100}
    assert counts == {"humaneval": 164, **few, "mtbench": 80, "copy": 96}


def test_user_files_may_hold_every_usual_form(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = [
        {"prompt": "Say hi", "id": "a"},
        {"messages": chat},
        {"text": "Once upon"},
        {"question_id": 81, "category": "writing", "turns": ["First?", "Second?"]},
        {"document": "Long news.", "summary": "News."},
        {"article": "Long news.", "highlights": "News."},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    found = load_task(str(path))
    assert [prompt.id for prompt in found] == ["a", "line 3", "line 5", "81", "line 9", "line 11"]
    assert found[1].messages == tuple(chat) and found[2].text == "Once upon"
    assert found[3].messages[0]["content"] == "First?" and found[3].later_turns == ("Second?",)
    assert found[4].messages == found[5].messages and found[4].messages[0]["content"].endswith("Long news.")
    assert found[2].encode(FakeEngine()) == [2] * 9, "raw text gets no chat template"


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": ["a"]}',
        '{"turns": []}',
        '{"turns": "a"}',
        '{"messages": {"role": "user", "content": "a"}}',
        '{"messages": [{"role": "user"}]}',
        '{"prompt": "a", "text": "b"}',
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"line 2: .* write a JSON object"):
        load_task(str(path))


def test_task_lists_are_checked(tmp_path: Path) -> None:
    assert parse_tasks("humaneval, gsm8k,x.jsonl") == ["humaneval", "gsm8k", "x.jsonl"]
    for names, reason in (("nonsense", "take one of"), (" ,", "No task"), ("gsm8k,gsm8k", "named 2 times")):
        with pytest.raises(ValueError, match=reason):
            parse_tasks(names)
    with pytest.raises(ValueError, match="check the path"):
        load_task(str(tmp_path / "missing.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        load_task(str(tmp_path / "empty.jsonl"))
