"""Shapes that adapt: branches end where the drafter is unsure, lookups in a cascade go as deep as their match is trusted.

Neither may show in the text, and the controller of shapes must not learn from trees that were not held to a shape.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from families import tiny
from helpers import NEW, OPTIONS, PROMPT, expected, lm
from outrider.api import Engine
from outrider.controller import Fixed
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.catalog import default_arms, make_drafter
from outrider.drafters.merged import MergedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.knowledge import Knowledge
from outrider.models.selftest import tree_model
from outrider.options import options_from
from outrider.rounds import Walked, walked
from outrider.sampling import Sampler
from outrider.tree import CONTESTED, MATCHES, OFF, TokenTree, match_class, parse_shape
from outrider.verify import Draft, Verdict

ADAPTING = "chain4@0.05", "2x2x1~9", "3x2x1@0.2~12", "best12x4@0.1", "3x2x1@/4"
TRUST = {2: 3, 3: 5, 4: 9}
LOOPING = [5, 6, 7, 8] * 4


def cascade(family: str = "llama", seed: int = 1) -> CascadeDrafter:
    return CascadeDrafter([NgramDrafter(trust=TRUST), lm(family, seed)])


def engine(drafter: Any, family: str = "llama") -> Engine:
    return Engine(tiny(family), None, family, drafter)


class Listening(Fixed):
    """Keeps the rounds that it hears of."""

    def __init__(self, shape: str) -> None:
        super().__init__(parse_shape(shape))
        self.heard: list[Any] = []

    def reward(self, done: Any) -> None:
        self.heard.append(done)


@pytest.mark.parametrize("shape", [*ADAPTING, "tree:0,0.0,1@0.3~3", "best12x4@0.02/6~5"])
@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_the_text_stays_the_targets(shape: str, key: str) -> None:
    prompt = [*PROMPT, *LOOPING]
    result = engine(cascade()).generate(prompt, shape=shape, max_new_tokens=NEW, **OPTIONS[key])
    if OPTIONS[key].get("rule") != "mss" or not OPTIONS[key].get("temperature"):
        assert result.token_ids == expected("llama", prompt, **{"max_new_tokens": NEW, **OPTIONS[key]})
    assert len(result.token_ids) == NEW


@pytest.mark.parametrize("text", [*ADAPTING, "off", "tree:0,0.0,1~15", "2x2@0.05/1.5~4"])
def test_a_shapes_name_is_how_it_is_written(text: str) -> None:
    shape = parse_shape(text)
    assert shape.name == text and parse_shape(shape.name) == shape
    assert shape.adapting(0.0, 0).name == text.split("@")[0].split("~")[0]


@pytest.mark.parametrize(
    "text", ["2x2@", "2x2@/", "2x2@/0", "2x2@/.5", "2x2@/0.5", "2x2@/-3", "2x2@0.1/", "2x2/20", "2x2@~5", "2x2@/nan"]
)
def test_what_is_no_ratio_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not understood|no branch"):
        parse_shape(text)


def sharpened(shape: str, factor: float) -> Any:
    """What a small drafter whose logits are sharpened proposes: its tree, and the log probability of every path."""
    sampler = Sampler(options_from({"max_new_tokens": 8}), 0, len(PROMPT), frozenset(), 48)
    state: Any = lm("llama", 1).begin([PROMPT], [sampler], 32)
    extend = state.state.extend
    state.state.extend = lambda tokens, parents: extend(tokens, parents) * factor
    (draft,) = state.propose([list(PROMPT)], [parse_shape(shape)])
    return draft.tree, state.growths[0].scores


@pytest.mark.parametrize("base", ["3x2x2x1", "best30x4"])
def test_branches_far_below_the_best_of_their_level_end_and_the_best_goes_on(base: str) -> None:
    whole, _ = sharpened(base, 4.0)
    sizes = [len(whole)]
    for ratio in (50, 3, 1):
        tree, scores = sharpened(f"{base}@/{ratio}", 4.0)
        assert max(tree.depths) == max(whole.depths), "the best path ends nowhere"
        best = [
            max(scores[n] for n, d in enumerate(tree.depths) if d == depth) for depth in range(max(tree.depths) + 1)
        ]
        for node in range(len(tree)):
            if tree.children[node] or base.startswith("best"):
                assert scores[node] >= best[tree.depths[node]] - math.log(ratio) - 1e-6
        sizes.append(len(tree))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_cutting_cuts_lookups_too() -> None:
    shape = parse_shape("2x1x1@0.1~9")
    assert shape.cut(9) is shape
    assert [(s.depth, s.reach, s.least) for s in map(shape.cut, (8, 2, 0))] == [(3, 8, 0.1), (2, 2, 0.1), (0, 0, 0.1)]


@pytest.mark.parametrize(("match", "depth"), [(2, 3), (3, 5), (4, 9)])
def test_lookups_go_as_deep_as_the_match_is_long(match: int, depth: int) -> None:
    known, after = [11, 12, 13, 14], list(range(20, 40))
    context = [*known, *after, 1, *known[4 - match :]]  # the end repeats the last `match` of the known tokens
    state = NgramDrafter(trust=TRUST).begin([context], [], 64)
    (draft,) = state.propose([context], [parse_shape(15)])
    assert [draft.tree.tokens[n] for n in range(1, len(draft.tree))] == after[:depth]
    (plain,) = NgramDrafter().begin([context], [], 64).propose([context], [parse_shape(15)])
    assert plain.tree.drafted == 15


def test_of_all_places_where_a_match_stood_the_one_that_matches_longest_is_copied() -> None:
    """The latest one shares four tokens with the end, an earlier one ten."""
    shared, after = list(range(40, 50)), [7, 8, 9]
    context = [*shared, *after, 1, 2, *shared[-4:], 3, 4, 5, *shared]
    (draft,) = NgramDrafter().begin([context], [], 64).propose([context], [parse_shape(3)])
    assert [draft.tree.tokens[n] for n in range(1, len(draft.tree))] == after
    assert draft.matched == CONTESTED, "the text went on in two ways"
    context = [*shared, *after, 1, 2, *shared[-5:]]
    (draft,) = NgramDrafter().begin([context], [], 64).propose([context], [parse_shape(3)])
    assert [draft.tree.tokens[n] for n in range(1, len(draft.tree))] == after and draft.matched == 4


def test_a_long_match_is_not_contested_by_short_ones() -> None:
    shared, after = list(range(40, 70)), [7, 8, 9]
    context = [*shared, *after, 1, 2, *shared[-4:], 3, 4, 5, *shared]
    (draft,) = NgramDrafter().begin([context], [], 64).propose([context], [parse_shape(3)])
    assert [draft.tree.tokens[n] for n in range(1, len(draft.tree))] == after and draft.matched == 24


def test_a_contested_match_is_trusted_as_the_shortest_is() -> None:
    context = [1, 2, 3, 4, 50, 51, 52, 53, 54, 55, 1, 2, 3, 4, 60, 61, 62, 63, 64, 1, 2, 3, 4]
    for trust, depth in ((TRUST, 3), (None, 6)):
        (draft,) = NgramDrafter(trust=trust).begin([context], [], 64).propose([context], [parse_shape(6)])
        assert draft.matched == CONTESTED and draft.tree.drafted == depth


@pytest.mark.parametrize(("match", "depth"), [(2, 1), (3, 2), (4, 3), (9, 4), (16, 5), (30, 6)])
def test_a_shape_can_say_how_far_matches_are_trusted(match: int, depth: int) -> None:
    known, after = list(range(100, 130)), list(range(20, 40))
    context = [*known, *after, 1, *known[30 - match :]]
    shape = replace(parse_shape(15), trust=(0, 1, 2, 3, 4, 5, 6))
    (draft,) = NgramDrafter(trust=TRUST).begin([context], [], 64).propose([context], [shape])
    assert draft.tree.drafted == depth and not draft.unused


def test_lookups_that_are_not_trusted_are_compared_with_what_is_written() -> None:
    """The same rounds with lookups, and without: what is told of those left out is what they would have brought."""
    hears = Listening("chain2~12")
    hears.shape = replace(hears.shape, trust=(0,) * len(MATCHES))
    result = engine(cascade()).generate(LOOPING, shape=hears, max_new_tokens=60)
    text, told, at = [*LOOPING, *result.token_ids], 0, len(LOOPING)
    for done in hears.heard:
        (row,) = done.rows
        assert not row.beyond
        if row.matched:
            (lookup,) = NgramDrafter().begin([[]], [], 0).propose([text[:at]], [parse_shape(12)])
            tokens = lookup.tree.tokens[1:][: row.emitted]
            same = [one == other for one, other in zip(tokens, text[at:])]
            if at + row.emitted <= len(text):
                assert row.unused == (len(tokens), same.index(False) if False in same else len(same))
                told += 1
        at += row.emitted
    assert told > 3


class Constant:
    """A drafter that costs nothing and always drafts one token."""

    name, free = "constant", True

    def begin(self, prompts: Any, samplers: Any, room: int, stream: int = 0) -> Any:
        return self

    def propose(self, contexts: Any, shapes: Any) -> list[Draft]:
        trees = [TokenTree(context[-1]) for context in contexts]
        for tree, shape in zip(trees, shapes):
            if shape.depth:
                tree.add(0, 1)
        return [Draft(tree, {}) for tree in trees]

    def observe(self, verdicts: Any) -> None:
        pass


def test_a_lookup_that_is_not_trusted_is_told_whoever_drafts_instead() -> None:
    """And what another drafter that costs nothing brings is not taken for a lookup's."""
    shape = replace(parse_shape("chain3~9"), trust=(0,) * len(MATCHES))
    state = CascadeDrafter([NgramDrafter(), Constant(), lm("llama", 1)]).begin([LOOPING], [], 64)
    (draft,) = state.propose([LOOPING], [shape])
    assert draft.beyond == "constant" and draft.tree.drafted == 1
    assert draft.matched >= 8 and list(draft.unused) == [5, 6, 7, 8, 5, 6, 7, 8, 5]
    row = walked(draft, Verdict([0], 5), shape)
    knowledge = Knowledge()
    knowledge.see(row, shape)
    assert row.unused == (1, 1)
    assert [copies.kept[0] for copies in knowledge.lookups] == [
        float(place == match_class(row.matched)) for place in range(len(MATCHES))
    ]
    knowledge.see(Walked((0,), 0, False, 1, True, beyond=True), shape)
    assert sum(copies.tries[0] for copies in knowledge.lookups) == 1


def test_depths_of_lookups_are_for_those_before_a_model_alone() -> None:
    """A lookup merged with that model drafts as the shape asks."""
    shape = replace(parse_shape("chain3~9"), trust=(0,) * len(MATCHES))
    inner = MergedDrafter([NgramDrafter(), NgramDrafter(3, 3)])
    (draft,) = CascadeDrafter([NgramDrafter(), inner]).begin([LOOPING], [], 64).propose([LOOPING], [shape])
    assert draft.tree.drafted == 3 and not draft.beyond


@pytest.mark.parametrize(("path", "last"), [([0, 1, 2], 2), ([0], 5), ([0, 1], 7)])
def test_what_is_compared_with_a_lookup_was_written(path: list[int], last: int) -> None:
    """A drafted token that ends the text is told twice."""
    tree = TokenTree(9)
    tree.add(tree.add(0, 5), 2)
    row = walked(Draft(tree, {}, matched=4, unused=[5, 2, 7, 8]), Verdict(path, last), parse_shape("chain3"))
    wanted = {(0, 1, 2): (2, 2), (0,): (1, 1), (0, 1): (2, 1)}
    assert row.unused == wanted[tuple(path)]


def test_a_lookup_is_not_held_to_the_shape_and_told_as_such() -> None:
    made, hears = engine(cascade()), Listening("chain2~12")
    stats = made.generate(LOOPING, shape=hears, max_new_tokens=1 + NEW).stats
    looked, shaped = stats.shapes["ngram"], stats.shapes["chain2~12"]
    assert looked > 0 and looked + shaped + stats.shapes["off"] == stats.rounds
    assert len(hears.heard) == stats.rounds and sum(done.beyond for done in hears.heard) == looked
    held = Listening("chain2")
    stats = made.generate(LOOPING, shape=held, max_new_tokens=1 + NEW).stats
    assert "ngram" not in stats.shapes and len(held.heard) == stats.rounds
    assert max(stats.histogram) <= 3, "without a reach, lookups keep to the shape"


@pytest.mark.parametrize("left", [1, 2, 3, 7])
def test_lookups_never_go_beyond_the_context(left: int) -> None:
    """gpt2 has no position after its last one: a lookup that went there would fail."""
    limit = tiny("gpt2").config.n_positions
    prompt = (LOOPING * limit)[: limit - left]
    result = engine(CascadeDrafter([NgramDrafter(), lm("llama", 1)]), "gpt2").generate(
        prompt, shape="chain2~15", max_new_tokens=20
    )
    assert len(result.token_ids) == left and result.finish_reason == "length"


def test_an_unsure_drafter_stops_after_one_level() -> None:
    """Random models believe nothing strongly: no path has a probability near one."""
    drafter = lm("llama", 1)
    sure = engine(drafter).generate(PROMPT, shape="chain6", max_new_tokens=NEW).stats
    unsure = engine(drafter).generate(PROMPT, shape="chain6@0.999", max_new_tokens=NEW).stats
    assert 0 < unsure.drafted <= unsure.rounds
    assert sure.drafted > 3 * sure.rounds


def test_a_sure_drafter_goes_on() -> None:
    """One whose law is nearly one-hot, as its logits are sharpened, drafts as if nothing had been asked."""
    options = options_from({"max_new_tokens": 8})
    sampler = Sampler(options, 0, len(PROMPT), frozenset(), 48)
    state: Any = lm("llama", 1).begin([PROMPT], [sampler], 32)
    inner = state.state
    extend = inner.extend
    inner.extend = lambda tokens, parents: extend(tokens, parents) * 1000.0
    (draft,) = state.propose([list(PROMPT)], [parse_shape("chain5@0.9")])
    assert draft.tree.drafted == 5


def test_the_shapes_chosen_for_a_model_behind_lookups_adapt() -> None:
    arms = default_arms(cascade())
    assert all(arm.least and arm.reach for arm in arms) and all(
        arm.least and not arm.reach for arm in default_arms(lm("llama"))
    )
    assert not any(arm.least or arm.reach for arm in default_arms(NgramDrafter()))


def test_a_cascade_by_name_trusts_its_lookups_and_skips_off() -> None:
    target = tree_model(tiny("llama"))[0]
    made = make_drafter("ngram>off>oracle:0.5", target, None)
    assert isinstance(made, CascadeDrafter) and [d.name for d in made.drafters] == ["ngram", "oracle:0.5"]
    lookup = made.drafters[0]
    assert isinstance(lookup, NgramDrafter) and lookup.trust and not NgramDrafter().trust
    assert OFF.lookup == OFF


def test_a_tree_that_ends_early_leaves_no_trace() -> None:
    """Rounds whose rows end at different levels, in one batch."""
    rows = [PROMPT, [*PROMPT, 3, 9], PROMPT[:4]]
    results = engine(lm("mamba2", 1)).generate([list(r) for r in rows], shape="2x2x1x1@0.08", max_new_tokens=NEW)
    for row, result in zip(rows, results):
        assert result.token_ids == expected("llama", list(row), max_new_tokens=NEW)
    assert torch.is_inference_mode_enabled() is False
