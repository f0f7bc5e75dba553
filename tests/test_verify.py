"""Both rules give exactly the target's law: every draw and every decision is enumerated with its exact weight (float64).

The library's own `verify_mss`, `Law` and `merge` run on every case; only the coins are scripted, so that each outcome comes with
its probability. Variants with a known mistake go through the same enumeration and must be caught.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import verify
from outrider.drafters.merged import merge
from outrider.tree import TokenTree
from outrider.verify import ONE_HOT, Draft, Law, Trial, Verdict, verify_mss

V, K = 5, 3
EXACT, CAUGHT = 1e-12, 1e-3


class Coin:
    """Stands for a uniform number: `coin < chance` tells the chance to the script, which decides."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def __lt__(self, chance: float) -> bool:
        return self.script.decide(float(chance))


class Script:
    """One run's decisions: a given beginning, then always "accept" as long as that is possible."""

    def __init__(self, given: Sequence[bool]) -> None:
        self.given, self.taken, self.chances = list(given), [], []

    def decide(self, chance: float) -> bool:
        step = len(self.taken)
        decision = self.given[step] if step < len(self.given) else chance > 0
        self.taken.append(decision)
        self.chances.append(chance)
        return decision

    @property
    def weight(self) -> float:
        weight = 1.0
        for decision, chance in zip(self.taken, self.chances):
            weight *= chance if decision else 1.0 - chance
        return weight

    def others(self) -> Iterator[list[bool]]:
        """Scripts that part from this one after its given beginning."""
        for step in range(len(self.given), len(self.taken)):
            other = not self.taken[step]
            if (self.chances[step] if other else 1.0 - self.chances[step]) > 0:
                yield [*self.taken[:step], other]


def outcomes(draft: Draft, law: Callable[[int], Tensor]) -> Iterator[tuple[float, list[int], Tensor]]:
    """Every way that verification can go: (probability, kept path, law of the token after it)."""
    todo: list[list[bool]] = [[]]
    while todo:
        script, drawn = Script(todo.pop()), {}

        def draw(node: int, law_V: Tensor, drawn: dict[str, Tensor] = drawn) -> int:
            drawn["law"] = law_V
            return 0

        coin = Coin(script)
        verdict = verify_mss(draft.tree, draft.trials, law, lambda node, trial, c=coin: c, draw)
        todo += script.others()
        yield script.weight, verdict.path, drawn["law"]


def tv(one: Tensor, other: Tensor) -> float:
    assert torch.isfinite(one).all()
    return 0.5 * float((one - other).abs().sum())


def one_node_law(p_V: Tensor, drafts: Iterator[tuple[float, Draft]] | list[tuple[float, Draft]]) -> Tensor:
    """Law of the first token, over all drafts with their weights."""
    out_V = torch.zeros_like(p_V)
    total = 0.0
    for weight, draft in drafts:
        total += weight
        for chance, path, rest_V in outcomes(draft, lambda node: p_V):
            if len(path) > 1:
                out_V[draft.tree.tokens[path[1]]] += weight * chance
            else:
                out_V += weight * chance * rest_V
    assert abs(total - 1) < 1e-12
    return out_V


# -- drafts of one node, with their weights ------------------------------------------------------------------------------


def hang(tokens: Sequence[int], laws: Sequence[Any]) -> Draft:
    """Children of a root in the order of their trials; a token drawn twice is one node with two trials."""
    tree, trials = TokenTree(0), []
    for token, law in zip(tokens, laws):
        trials.append(Trial(tree.add_once(0, token), law))
    return Draft(tree, {0: trials})


def product(*qs: Tensor) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Independent draws, one from each law."""
    for tokens in itertools.product(range(len(qs[0])), repeat=len(qs)):
        weight = 1.0
        for token, q_V in zip(tokens, qs):
            weight *= float(q_V[token])
        if weight > 0:
            yield weight, tokens


def without(q_V: Tensor, count: int, drawn: tuple[int, ...] = ()) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Draws without replacement, fewer of them where the law is exhausted."""
    left_V = q_V.clone()
    left_V[list(drawn)] = 0.0
    if len(drawn) == count or left_V.sum() <= 0:
        yield 1.0, drawn
        return
    for token in left_V.nonzero().flatten().tolist():
        for weight, tokens in without(q_V, count, (*drawn, token)):
            yield float(left_V[token] / left_V.sum()) * weight, tokens


def shrinking(q_V: Tensor, tokens: Sequence[int]) -> list[Law]:
    return [Law(q_V, tuple(tokens[:i])) for i in range(len(tokens))]


def top(q_V: Tensor) -> list[int]:
    return q_V.topk(K).indices.tolist()


RIGHT: dict[str, Callable[[Tensor, Tensor], Iterator[tuple[float, Draft]]]] = {
    "with replacement": lambda q, r: ((w, hang(x, [Law(q)] * K)) for w, x in product(q, q, q)),
    "two drafters": lambda q, r: ((w, merge([hang(x[:1], [Law(q)]), hang(x[1:], [Law(r)])])) for w, x in product(q, r)),
    "two drafters, two draws each": lambda q, r: (
        (w * u, merge([hang(x, shrinking(q, x)), hang(y, [Law(r)] * 2)]))
        for w, x in without(q, 2)
        for u, y in product(r, r)
    ),
    "without replacement": lambda q, r: ((w, hang(x, shrinking(q, x))) for w, x in without(q, K)),
    "duplicates merged, then without replacement": lambda q, r: (
        (w, hang(d := list(dict.fromkeys(x)), shrinking(q, d))) for w, x in product(q, q, q)
    ),
    "top k, one-hot": lambda q, r: iter([(1.0, hang(top(q), [ONE_HOT] * K))]),
    "sampled and looked up": lambda q, r: (
        (w, merge([hang(x, [Law(q)]), hang(top(r), [ONE_HOT] * K)])) for w, x in product(q)
    ),
    "looked up and sampled": lambda q, r: (
        (w, merge([hang(top(r), [ONE_HOT] * K), hang(x, [Law(q)])])) for w, x in product(q)
    ),
    "nothing drafted": lambda q, r: iter([(1.0, hang([], []))]),
}


class Raw(Law):
    """A mistaken law: drawn tokens are taken out, the rest is not normalised again."""

    def probs(self, token: int, like_V: Tensor) -> Tensor:
        law_V = self.q_V.clone()
        law_V[list(self.without)] = 0.0
        return law_V


def by_q(tokens: Sequence[int], q_V: Tensor) -> list[int]:
    return sorted(tokens, key=lambda token: -float(q_V[token]))


def filtered(q_V: Tensor) -> Tensor:
    kept_V = torch.zeros_like(q_V)
    kept_V[top(q_V)] = q_V[top(q_V)]
    return kept_V / kept_V.sum()


WRONG: dict[str, Callable[[Tensor, Tensor], Iterator[tuple[float, Draft]]]] = {
    "merged duplicates, but the full q": lambda q, r: (
        (w, hang(d := list(dict.fromkeys(x)), [Law(q)] * len(d))) for w, x in product(q, q, q)
    ),
    "with replacement, sorted by q": lambda q, r: ((w, hang(by_q(x, q), [Law(q)] * K)) for w, x in product(q, q, q)),
    "without replacement, q not renormalised": lambda q, r: (
        (w, hang(x, [Raw(law.q_V, law.without) for law in shrinking(q, x)])) for w, x in without(q, K)
    ),
    "without replacement, q never changed": lambda q, r: ((w, hang(x, [Law(q)] * K)) for w, x in without(q, K)),
    "without replacement, sorted by q": lambda q, r: (
        (w, hang(d := by_q(x, q), shrinking(q, d))) for w, x in without(q, K)
    ),
    "top k with p/q": lambda q, r: iter([(1.0, hang(top(q), [Law(q)] * K))]),
    "top k with p/q renormalised": lambda q, r: iter([(1.0, hang(top(q), shrinking(q, top(q))))]),
    "argmax with its full softmax as q": lambda q, r: iter([(1.0, hang(top(q)[:1], [Law(q)]))]),
    "drawn from the filtered law, raw law as q": lambda q, r: ((w, hang(x, [Law(q)])) for w, x in product(filtered(q))),
    "one noise for two merged drafters": lambda q, r: (
        (float(q[x]), merge([hang([x], [Law(q)]), hang([x], [Law(q)])])) for x in range(V)
    ),
    "the law of the wrong drafter": lambda q, r: (
        (w, merge([hang(x[:1], [Law(r)]), hang(x[1:], [Law(q)])])) for w, x in product(q, r)
    ),
}


@functools.cache
def cases() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Target and two drafters: random, sparse, equal, and disjoint laws."""
    torch.manual_seed(1)
    dirichlet = torch.distributions.Dirichlet(torch.full((V,), 0.7, dtype=torch.float64))
    made = [(dirichlet.sample(), dirichlet.sample(), dirichlet.sample()) for _ in range(6)]
    p, q, r = made[0]
    sparse = torch.tensor([0.5, 0.5, 0, 0, 0], dtype=torch.float64)
    other = torch.tensor([0, 0, 0.3, 0.3, 0.4], dtype=torch.float64)
    point = torch.tensor([0, 1.0, 0, 0, 0], dtype=torch.float64)
    uniform = torch.full((V,), 1 / V, dtype=torch.float64)
    edge = [
        (p, p, q),
        (sparse, other, q),
        (other, uniform, sparse),
        (point, q, r),
        (q, point, point),
        (sparse, sparse, r),
    ]
    return made + edge


@pytest.mark.parametrize("rule", RIGHT)
def test_the_first_token_has_exactly_the_law_of_the_target(rule: str) -> None:
    """transformers' speculative sampling did not keep the target's distribution, for drafters that sampled, filtered or took
    the argmax: here every rule of the table is enumerated."""
    for p_V, q_V, r_V in cases():
        assert tv(one_node_law(p_V, RIGHT[rule](q_V, r_V)), p_V) < EXACT


@pytest.mark.parametrize("mistake", WRONG)
def test_every_known_mistake_is_caught(mistake: str) -> None:
    """Each of these was shipped somewhere: draws verified against another law than theirs, or in another order."""
    found = [tv(one_node_law(p_V, WRONG[mistake](q_V, r_V)), p_V) for p_V, q_V, r_V in cases()[:6]]
    assert max(found) > CAUGHT


MISTAKEN_RESIDUALS = {
    "no residual at all": lambda p_V, q_V: p_V,
    "residual soft-maxed": lambda p_V, q_V: (p_V - q_V).clamp(min=0).softmax(-1),
    "residual not clamped": lambda p_V, q_V: (p_V - q_V).abs() / (p_V - q_V).abs().sum(),
    "rejected token taken out, rest of p": lambda p_V, q_V: (
        p_V.clone().index_fill_(0, q_V.argmax(), 0).div((1 - p_V[q_V.argmax()]).clamp(min=1e-9))
    ),
}


@pytest.mark.parametrize("mistake", MISTAKEN_RESIDUALS)
def test_every_mistaken_residual_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers soft-maxed the residual instead of normalising it; a popular blog's rule has none."""
    monkeypatch.setattr(verify, "residual", MISTAKEN_RESIDUALS[mistake])
    found = [tv(one_node_law(p_V, RIGHT["with replacement"](q_V, r_V)), p_V) for p_V, q_V, r_V in cases()[:6]]
    assert max(found) > CAUGHT


def test_a_coin_shared_with_the_drafter_is_caught() -> None:
    """vLLM's runner used one noise for the drafter's draw and for the accept test: the output leaned towards the drafter."""
    steps = 4000
    for p_V, q_V, _ in cases()[:3]:
        out_V = torch.zeros_like(p_V)
        for step in range(steps):
            u = (step + 0.5) / steps
            x = int((q_V.cumsum(0) < u).sum().clamp(max=V - 1))  # drawn by the very number that decides
            laws: list[Tensor] = []
            draft = hang([x], [Law(q_V)])
            verdict = verify_mss(
                draft.tree,
                draft.trials,
                lambda _, p=p_V: p,
                lambda *_, u=u: u,
                lambda _, r, out=laws: out.append(r) or 0,
            )
            if verdict.accepted:
                out_V[x] += 1 / steps
            else:
                out_V += laws[0] / steps
        assert tv(out_V, p_V) > 10 / steps + CAUGHT


# -- two levels --------------------------------------------------------------------------------------------------------


def next_law(seed: int, path: Sequence[int], size: int) -> Tensor:
    """Some law after a path, float64."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum((t + 1) * 17**i for i, t in enumerate(path)))
    return (1.5 * torch.randn(size, generator=generator, dtype=torch.float64)).softmax(-1)


def joint_law(drafts: Iterator[tuple[float, Draft]], target: Callable[[Sequence[int]], Tensor], size: int) -> Tensor:
    """Law of the first two tokens; where a round gives only one, the next round's plain law continues."""
    out = torch.zeros(size, size, dtype=torch.float64)
    for weight, draft in drafts:
        tree = draft.tree
        for chance, path, rest_V in outcomes(draft, lambda node, t=tree: target(t.path_tokens(node)[1:])):
            tokens, mass = [tree.tokens[node] for node in path[1:]], weight * chance
            if len(tokens) >= 2:
                out[tokens[0], tokens[1]] += mass
            elif len(tokens) == 1:
                out[tokens[0]] += mass * rest_V
            else:
                for first in range(size):
                    out[first] += mass * rest_V[first] * target([first])
    return out


def two_level(
    draw: Callable[[Tensor], Iterator[tuple[float, list[tuple[int, Law]]]]], size: int
) -> Iterator[tuple[float, Draft]]:
    """All trees of two levels, children of every node drawn by `draw` from the drafter's law after its path."""
    for weight, first in draw(next_law(2, [], size)):
        tokens = list(dict.fromkeys(token for token, _ in first))
        for below in itertools.product(*(list(draw(next_law(2, [token], size))) for token in tokens)):
            tree, trials, mass = TokenTree(0), defaultdict(list), weight
            for token, law in first:
                trials[0].append(Trial(tree.add_once(0, token), law))
            for token, (chance, second) in zip(tokens, below):
                parent, mass = tree.child(0, token), mass * chance
                assert parent is not None
                for child, law in second:
                    trials[parent].append(Trial(tree.add_once(parent, child), law))
            yield mass, Draft(tree, dict(trials))


DRAWS: dict[str, Callable[[Tensor], Iterator[tuple[float, list[tuple[int, Law]]]]]] = {
    "with replacement": lambda q: ((w, [(t, Law(q)) for t in x]) for w, x in product(q, q)),
    "without replacement": lambda q: ((w, list(zip(x, shrinking(q, x)))) for w, x in without(q, 2)),
    "top k": lambda q: iter([(1.0, [(t, ONE_HOT) for t in q.topk(2).indices.tolist()])]),
}


@pytest.mark.parametrize("rule", DRAWS)
def test_two_tokens_of_a_two_level_tree_have_exactly_the_joint_law(rule: str) -> None:
    """EAGLE's sampled tree text was worse than the target's own: a bug in sampled verification that one level does not show."""
    size = 3
    target = functools.partial(next_law, 7, size=size)
    wanted = torch.stack([target([])[first] * target([first]) for first in range(size)])
    assert tv(joint_law(two_level(DRAWS[rule], size), lambda path: target(path), size), wanted) < EXACT


def test_two_levels_of_two_merged_drafters_have_exactly_the_joint_law() -> None:
    """Two drafters that meet in a node below which both have children."""
    size = 3

    def target(path: Sequence[int]) -> Tensor:
        return next_law(7, path, size)

    def chains(seed: int) -> Iterator[tuple[float, Draft]]:
        for first in range(size):
            for second in range(size):
                q_V, r_V = next_law(seed, [], size), next_law(seed, [first], size)
                tree = TokenTree(0)
                one = tree.add(0, first)
                two = tree.add(one, second)
                trials = {0: [Trial(one, Law(q_V))], one: [Trial(two, Law(r_V))]}
                yield float(q_V[first] * r_V[second]), Draft(tree, trials)

    both = ((w * u, merge([one, other])) for w, one in chains(3) for u, other in chains(4))
    wanted = torch.stack([target([])[first] * target([first]) for first in range(size)])
    assert tv(joint_law(both, target, size), wanted) < EXACT


def test_equal_laws_never_end_in_nan_even_against_the_last_coin() -> None:
    """A coin as large as it gets, p equal to q in every trial: the law that is left is still a law."""
    p_V = torch.tensor([0.125, 0.25, 0.5, 0.125])
    draft = hang([0, 1, 2, 3], [Law(p_V)] * 4)
    laws: list[Tensor] = []
    verdict = verify_mss(
        draft.tree, draft.trials, lambda _: p_V, lambda *_: 1.0, lambda _, law_V: laws.append(law_V) or 2
    )
    assert verdict == Verdict([0], 2)
    assert torch.equal(laws[0], p_V)
