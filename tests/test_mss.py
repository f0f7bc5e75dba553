"""Multi-step speculative sampling, end to end: tokens of thousands of runs against the exact law of the target.

Seeds are fixed, so every test always gives the same p-value. Under a right implementation p-values are uniform: at the limit of
1e-4, the chance that any of some thirty tests would fail for an unlucky choice of seeds is below 0.3 %.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from families import tiny
from helpers import Watch, chi_square_p, expected, lm
from outrider.api import Engine
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.lm import LMDrafter, choose
from outrider.drafters.ngram import NgramDrafter
from outrider.models.selftest import tree_model
from outrider.options import Options, options_from
from outrider.sampling import Sampler

V = 7
LIMIT = 1e-4
PROMPT = [1, 4, 2, 1, 4, 2, 1]
SCALE = 2.5
LLAMA, OTHER, MAMBA, NEXT = ("llama", 3), ("llama", 4), ("mamba", 5), ("qwen3_next", 6)


@functools.cache
def model(family: str, seed: int) -> Any:
    """A tiny model of 7 tokens whose laws are broad: every path has a fair chance."""
    return tiny(family, seed, V, SCALE)


class Table:
    """A TreeModel that looks up what a tiny model says after each token sequence: its laws, without its cache.

    Thousands of rows cost nothing but the drawing and the verifying that is under test.
    """

    def __init__(self, name: tuple[str, int]) -> None:
        self.model, self.vocab, self.context, self.way = model(*name), V, None, "looked up"
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def after(self, tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens not in self.known:
            self.known[tokens] = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        return self.known[tokens]

    def begin(self, prompts: Any, room: int = 0, taps: Any = ()) -> TableState:
        return TableState(self, [tuple(prompt) for prompt in prompts])


class TableState:
    features = None

    def __init__(self, table: Table, rows: list[tuple[int, ...]]) -> None:
        self.table, self.rows = table, rows
        self.paths: list[list[tuple[int, ...]]] = [[] for _ in rows]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    @property
    def pending(self) -> int:
        return len(self.paths[0])

    def extend(self, tokens: Any, parents: Any) -> torch.Tensor:
        new = max(map(len, tokens))
        out = torch.zeros(len(tokens), new, V)
        for row, (prefix, paths) in enumerate(zip(self.rows, self.paths)):
            for i, (token, parent) in enumerate(zip(tokens[row], parents[row])):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
                out[row, i] = self.table.after(prefix + paths[-1])
            paths += [()] * (new - len(tokens[row]))
        return out

    def commit(self, paths: Any) -> None:
        self.rows = [row + (own[path[-1]] if path else ()) for row, own, path in zip(self.rows, self.paths, paths)]
        self.paths = [[] for _ in self.rows]

    def keep(self, rows: Any) -> None:
        self.rows, self.paths = [self.rows[i] for i in rows], [self.paths[i] for i in rows]

    def bytes(self) -> int:
        return 0


@functools.cache
def table(name: tuple[str, int]) -> Table:
    return Table(name)


@functools.cache
def drafter(family: str, seed: int, real: bool = False) -> LMDrafter:
    made: Any = tree_model(model(family, seed))[0] if real else table((family, seed))
    return LMDrafter(made, f"{family}-{seed}")


@functools.cache
def joint(name: tuple[str, int], length: int, options: tuple[tuple[str, Any], ...]) -> tuple[float, ...]:
    """Chance of every continuation of `length` tokens, by full forwards of every path."""
    rules = options_from(dict(options))
    sampler = Sampler(rules, 0, len(PROMPT), frozenset(), V)
    chances = {(): 1.0}
    for _ in range(length):
        paths = list(chances)
        logits = model(*name)(input_ids=torch.tensor([PROMPT + list(p) for p in paths]), use_cache=False).logits[:, -1]
        laws = [sampler.law([*PROMPT, *path], logits[i]).double() for i, path in enumerate(paths)]
        chances = {(*path, t): chances[path] * float(laws[i][t]) for i, path in enumerate(paths) for t in range(V)}
    return tuple(chances.values())


def engine(target: tuple[str, int], drafting: Any, real: bool = False) -> Engine:
    made = Engine(model(*target), None, target[0], drafting)
    if not real:
        made.target = table(target)
    return made


def counts(
    target: tuple[str, int], drafting: Any, shape: Any, length: int, samples: int, real: bool = False, **options: Any
) -> list[int]:
    """How often each continuation was written, in batches of rows with seeds of their own."""
    writing = engine(target, drafting, real)
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, samples, 500):
        seeds = list(range(start, min(start + 500, samples)))
        rows = writing.generate(
            [PROMPT] * len(seeds), shape=shape, seed=seeds, max_new_tokens=length, rule="mss", **options
        )
        seen.update(tuple(row.token_ids) for row in rows)
    return [seen[path] for path in itertools.product(range(V), repeat=length)]


def p_value(
    target: tuple[str, int], drafting: Any, shape: Any, length: int = 3, samples: int = 2000, **options: Any
) -> float:
    key = tuple(sorted((k, v) for k, v in options.items() if k not in ("draft_sampling", "real")))
    return chi_square_p(counts(target, drafting, shape, length, samples, **options), joint(target, length, key))


HOT = {"temperature": 1.0}


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)], ids=["chain", "3x2"])
@pytest.mark.parametrize("sampling", ["topk", "without_replacement", "iid"])
def test_three_tokens_have_the_joint_law_of_the_target(sampling: str, shape: Any) -> None:
    """Sampled speculation did not keep the distribution in transformers, and EAGLE's sampled trees wrote worse text; here the
    joint law of three tokens is that of the target, however the drafter draws."""
    assert p_value(LLAMA, drafter(*OTHER), shape, draft_sampling=sampling, **HOT) > LIMIT


@pytest.mark.parametrize("sampling", ["topk", "without_replacement", "iid"])
def test_two_tokens_through_the_real_caches(sampling: str) -> None:
    own = drafter(*OTHER, real=True)
    assert p_value(LLAMA, own, (3, 2), 2, 1000, real=True, draft_sampling=sampling, **HOT) > LIMIT


@pytest.mark.parametrize("sampling", ["without_replacement", "iid"])
@pytest.mark.parametrize("target", [MAMBA, NEXT], ids=["mamba", "qwen3_next"])
def test_recurrent_targets_with_a_recurrent_drafter(target: tuple[str, int], sampling: str) -> None:
    assert (
        p_value(target, drafter("mamba", 8, real=True), (3, 2), 2, 500, real=True, draft_sampling=sampling, **HOT)
        > LIMIT
    )


@pytest.mark.parametrize("sampling", ["topk", "without_replacement", "iid"])
def test_the_drafter_is_compared_by_its_filtered_law(sampling: str) -> None:
    """transformers' drafter drew from top-k-filtered logits but compared by its raw law: off by up to 0.31 in total
    variation."""
    options = {"temperature": 0.7, "top_k": 3}
    assert p_value(LLAMA, drafter(*OTHER), (3, 2), draft_sampling=sampling, **options) > LIMIT


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"repetition_penalty": 1.6}, {"min_p": 0.1, "temperature": 1.5}])
def test_processed_laws_on_a_tree(options: dict[str, Any]) -> None:
    assert p_value(LLAMA, drafter(*OTHER), (2, 2), **{**HOT, **options}) > LIMIT


@pytest.mark.parametrize("shape", ["best6x3", "best3"])
def test_best_first_trees(shape: str) -> None:
    assert p_value(LLAMA, drafter(*OTHER), shape, **HOT) > LIMIT


@pytest.mark.parametrize("sampling", ["topk", "without_replacement", "iid"])
def test_two_merged_drafters(sampling: str) -> None:
    merged = [drafter(*OTHER), drafter("llama", 9)]
    assert p_value(LLAMA, merged, (2, 2), draft_sampling=sampling, **HOT) > LIMIT


@pytest.mark.parametrize("sampling", ["without_replacement", "iid"])
def test_one_drafter_merged_with_itself(sampling: str) -> None:
    """Noise shared by two drafters leans towards what they propose (vLLM shared one draw): merged drafters have their own."""
    twice = [drafter(*OTHER), drafter(*OTHER)]
    assert p_value(LLAMA, twice, (1, 1), draft_sampling=sampling, **HOT) > LIMIT


@pytest.mark.parametrize("order", ["first", "last"])
def test_prompt_lookup_merged_in(order: str) -> None:
    both = [NgramDrafter(), drafter(*OTHER)]
    watch = Watch(NgramDrafter())
    assert p_value(LLAMA, both if order == "first" else both[::-1], (2, 2), **HOT) > LIMIT
    Engine(model(*LLAMA), None, "llama", watch).generate(PROMPT, shape=2, max_new_tokens=1 + 2, **HOT, seed=1)
    assert any(draft.tree.drafted for draft, _ in watch.walks())


@pytest.mark.parametrize("drafting", ["ngram", None])
def test_prompt_lookup_and_nothing(drafting: Any) -> None:
    assert p_value(LLAMA, drafting, (2, 2), **HOT) > LIMIT


def test_the_coupled_rule_draws_from_the_same_law() -> None:
    writing = Engine(model(*LLAMA), None, "llama", drafter(*OTHER))
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, 3000, 500):
        rows = writing.generate(
            [PROMPT] * 500, shape=(2, 2), seed=list(range(start, start + 500)), max_new_tokens=2, **HOT
        )
        seen.update(tuple(row.token_ids) for row in rows)
    observed = [seen[path] for path in itertools.product(range(V), repeat=2)]
    assert chi_square_p(observed, joint(LLAMA, 2, tuple(HOT.items()))) > LIMIT


def test_these_tests_have_teeth() -> None:
    """The same samples against a law that is a little off: another temperature, and another target."""
    observed = counts(LLAMA, drafter(*OTHER), (3, 2), 3, 3000, **HOT)
    assert chi_square_p(observed, joint(LLAMA, 3, (("temperature", 1.0),))) > LIMIT
    assert chi_square_p(observed, joint(LLAMA, 3, (("temperature", 1.2),))) < LIMIT
    assert chi_square_p(observed, joint(OTHER, 3, (("temperature", 1.0),))) < LIMIT


def test_a_mistaken_residual_is_caught_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider import verify

    monkeypatch.setattr(verify, "residual", lambda p_V, q_V: p_V)
    assert p_value(LLAMA, drafter(*OTHER), (3, 2), draft_sampling="iid", **HOT) < LIMIT


# -- draws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["iid", "without_replacement"])
def test_children_are_drawn_from_the_laws_that_they_carry(method: str) -> None:
    """Two children per node: the joint law of the draws is the product of the laws reported with them."""
    scores = torch.tensor([[0.0, 1.0, -1.0, 0.5, float("-inf")]])
    options = Options(temperature=1.0, rule="mss", draft_sampling=method)
    q = scores[0].softmax(-1)
    seen: Counter[tuple[int, int]] = Counter()
    for seed in range(4000):
        ((first, second),) = choose(scores, [2], Sampler(options, seed, 3, frozenset(), 5), 3, 0, topmost=False)
        seen[first[0], second[0]] += 1
        assert torch.allclose(first[1].probs(first[0], q), q)
        left = q.clone()
        if method == "without_replacement":
            left[first[0]] = 0
        assert torch.allclose(second[1].probs(second[0], q), left / left.sum())
    wanted = []
    for a, b in itertools.product(range(5), repeat=2):
        left = q.clone()
        if method == "without_replacement":
            left[a] = 0
        wanted.append(float(q[a] * left[b] / left.sum()))
    observed = [seen[pair] for pair in itertools.product(range(5), repeat=2)]
    assert chi_square_p(observed, wanted) > LIMIT


def test_children_without_replacement_are_fewer_where_the_law_has_no_more() -> None:
    """With top_k=2 there are only two tokens to draw; a node of three children has two then."""
    for method in ("without_replacement", "topk"):
        options = Options(temperature=1.0, top_k=2, rule="mss", draft_sampling=method)
        sampler = Sampler(options, 1, 3, frozenset(), 5)
        scores = sampler.scores([[1, 2, 3]], torch.tensor([[0.0, 1.0, -1.0, 0.5, 0.2]]))
        (chosen,) = choose(scores, [3], sampler, 3, 0, topmost=method == "topk")
        assert sorted(token for token, *_ in chosen) == [1, 3]


# -- seeds and acceptance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["topk", "without_replacement", "iid"])
def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch(sampling: str) -> None:
    """A seed was ignored, or read from Python's own generator, elsewhere: here runs repeat, alone or among other rows."""
    options = {**HOT, "rule": "mss", "draft_sampling": sampling, "max_new_tokens": 12, "shape": (3, 2)}
    writing = Engine(model(*LLAMA), None, "llama", drafter(*OTHER))
    alone = [writing.generate(PROMPT, seed=seed, **options).token_ids for seed in range(6)]
    torch.manual_seed(5)
    again = Engine(model(*LLAMA), None, "llama", drafter(*OTHER))
    assert [again.generate(PROMPT, seed=seed, **options).token_ids for seed in range(6)] == alone
    rows = writing.generate([PROMPT] * 6, seed=list(range(6)), **options)
    assert [row.token_ids for row in rows] == alone
    assert len({tuple(ids) for ids in alone}) == 6


@pytest.mark.parametrize("sampling", ["without_replacement", "iid"])
def test_behind_lookups_a_row_is_what_it_is_alone(sampling: str) -> None:
    """A model is asked when some row of a batch needs it: the draws of the others do not depend on how often that was."""
    options = {**HOT, "rule": "mss", "draft_sampling": sampling, "max_new_tokens": 24, "shape": "3x2"}
    behind = CascadeDrafter([NgramDrafter(), drafter(*OTHER)])
    writing = Engine(model(*LLAMA), None, "llama", behind)
    prompts = [PROMPT, PROMPT[:4] * 3, PROMPT[::-1], [1, 2, 3] * 4]
    alone = [writing.generate(prompt, seed=seed, **options).token_ids for seed, prompt in enumerate(prompts)]
    rows = writing.generate(prompts, seed=list(range(len(prompts))), **options)
    assert [row.token_ids for row in rows] == alone


@pytest.mark.parametrize("family", ["llama", "mamba", "qwen3_next"])
@pytest.mark.parametrize("sampling", ["without_replacement", "iid"])
def test_a_drafter_equal_to_the_target_is_nearly_always_accepted(sampling: str, family: str) -> None:
    """p equals q up to rounding, so that a draw is kept with a chance of 1 up to rounding; and nothing is ever NaN."""
    own = Watch(lm(family))
    writing = Engine(tiny(family), None, family, own)
    for shape in ((1, 1, 1), (3, 2)):
        for seed in range(4):
            writing.generate(
                [3, 5, 7, 5],
                shape=shape,
                seed=seed,
                temperature=1.0,
                rule="mss",
                draft_sampling=sampling,
                max_new_tokens=24,
            )
            assert own.accepted() > 12
            assert own.misses() <= 1


@pytest.mark.parametrize("shape", [(3, 2, 2), [[0], [0, 0], [1], [1, 0], [2], [2, 0]], "best6", (4, 4)])
@pytest.mark.parametrize("sampling", ["topk", "without_replacement", "iid"])
def test_narrow_laws_do_not_crash_any_shape(sampling: str, shape: Any) -> None:
    """Duplicates and exhausted laws leave fewer nodes than the shape has room for."""
    writing = Engine(model(*LLAMA), None, "llama", [drafter(*OTHER), "ngram"])
    for top_k in (1, 2, 0):
        for temperature in (0.2, 3.0):
            result = writing.generate(
                PROMPT,
                shape=shape,
                seed=1,
                temperature=temperature,
                top_k=top_k,
                rule="mss",
                draft_sampling=sampling,
                max_new_tokens=12,
            )
            assert len(result.token_ids) == 12
            assert result.stats.accepted + result.stats.rounds == 12


def test_greedy_mss_is_greedy() -> None:
    for shape in (3, (3, 2), "best6"):
        for sampling in ("topk", "without_replacement", "iid"):
            writing = Engine(tiny("llama"), None, "llama", [lm("mamba", 1), "ngram"])
            result = writing.generate(PROMPT, shape=shape, rule="mss", draft_sampling=sampling, max_new_tokens=12)
            assert result.token_ids == expected("llama", PROMPT, max_new_tokens=12)


def test_an_oracle_is_refused_where_its_foreknowledge_would_be_false() -> None:
    writing = Engine(model(*LLAMA), None, "llama", "oracle:0.5")
    with pytest.raises(ValueError, match="use rule 'coupled'"):
        writing.generate(PROMPT, rule="mss", temperature=1.0, shape=2)
