"""What a shape brings and takes: estimates against enumeration, simulation and other programs' least squares."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cost import Acceptance, Curve, Fit, best_trees, beyond, drafted_by, fastest_tree, leaving, reached, tails
from outrider.rounds import Walked, walked
from outrider.tree import OFF, Shape, TokenTree, from_paths, parse_shape
from outrider.verify import Draft, Verdict, verify_coupled

SHAPES = [parse_shape(text) for text in ("chain1", "chain4", "3x2x1", "2x2x2", "tree:0,0.0,0.0.0,0.1,1,2,2.0")]


def grown(shape: Shape) -> tuple[TokenTree, list[tuple[int, ...]]]:
    """The tree of a shape, each node's token its rank; and the ranks that lead to each node."""
    tree, ranks, frontier = TokenTree(9), [()], [0]
    for level in shape.levels:
        following = []
        for node, count in zip(frontier, level):
            for rank in range(count):
                following.append(tree.add(node, rank))
                ranks.append((*ranks[node], rank))
        frontier = following
    return tree, ranks


def walk(shape: Shape, ranks: list[int]) -> Walked:
    """What the shape meets where the target's tokens are the children of these ranks, one level after the other."""
    tree, _ = grown(shape)
    steps = [*ranks, 99]
    return walked(Draft(tree, {}), verify_coupled(tree, lambda node: steps[min(tree.depths[node], len(ranks))]), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_nodes_lie_level_by_level_with_their_children_side_by_side(shape: Shape) -> None:
    tree, _ = grown(shape)
    counts, firsts = shape.flat
    assert len(counts) == len(tree) == shape.nodes + 1
    for node in range(len(tree)):
        assert counts[node] == len(tree.children[node])
        assert [firsts[node] + rank for rank in range(counts[node])] == tree.children[node]
    assert shape.feeds == sum(bool(children) for children in tree.children)
    assert parse_shape(shape.name).levels == shape.levels


def test_a_walk_says_which_child_was_right_and_how_many_were_wrong() -> None:
    shape = parse_shape("3x2x1")
    assert walk(shape, [2, 1, 0]) == Walked((2, 1, 0), 0, False, shape.nodes, True, 3, False, shape.feeds, [])
    assert walk(shape, [2, 5]) == Walked((2,), 2, False, shape.nodes, True, 3, False, shape.feeds, [])
    assert walk(shape, [7]) == Walked((), 3, False, shape.nodes, True, 3, False, shape.feeds, [])


def test_a_drafter_with_nothing_more_to_offer_ends_the_walk_for_all_shapes() -> None:
    tree = TokenTree(9)
    tree.add(0, 4)
    assert walked(Draft(tree, {}), Verdict([0, 1], 5), parse_shape("chain3")).ended
    assert walked(Draft(tree, {}), Verdict([0], 5), parse_shape("3x2")).ended
    assert not walked(Draft(tree, {}), Verdict([0, 1], 5), parse_shape("chain1")).ended
    assert not walked(Draft(tree, {}), Verdict([0, 1], 5), parse_shape("chain3").cut(1)).ended


@given(st.lists(st.integers(0, 3), max_size=6))
def test_what_a_smaller_shape_would_have_emitted_is_certain_and_right(ranks: list[int]) -> None:
    """One verified tree tells what every smaller tree inside it would have got: checked by really playing both."""
    large = parse_shape("3x2x2x1x1")
    met = walk(large, ranks)
    for text in ("chain1", "chain2", "chain5", "2x1", "3x2x2", "2x2x1x1", "tree:0,0.0,1,1.0,2"):
        small = parse_shape(text)
        emitted, _, open_width = reached(small, met)
        assert open_width is None
        assert emitted == walk(small, ranks).emitted
        assert drafted_by(small, met) == small.nodes


def test_certainty_ends_where_the_tree_ends() -> None:
    met = walk(parse_shape("chain2"), [0, 0])
    assert reached(parse_shape("chain4"), met) == (3, 2, 0)
    met = walk(parse_shape("chain2"), [0, 1])
    assert reached(parse_shape("chain4"), met)[2] is None  # one child is all that a chain tries
    assert reached(parse_shape("2x2x1"), met) == (2, 1, 1)


def _chances(rows: list[list[float]]) -> list[list[float]]:
    return [[*row, *[0.0] * (4 - len(row))] for row in (rows * 16)[:16]]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_expected_tokens_are_the_sum_of_all_nodes_chances(shape: Shape) -> None:
    chances = _chances([[0.5, 0.2, 0.1], [0.6, 0.15, 0.1], [0.7, 0.1, 0.05]])
    _, ranks = grown(shape)
    by_node = sum(np.prod([chances[depth][rank] for depth, rank in enumerate(path)]) for path in ranks)
    found = tails(shape, chances)
    assert 1 + found[0] == pytest.approx(by_node)
    assert beyond(shape, 0, 0, 0, found, chances) == pytest.approx(by_node - 1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_chance_to_leave_by_a_leaf_is_that_of_all_paths_to_leaves(shape: Shape) -> None:
    chances = _chances([[0.5, 0.2, 0.1], [0.6, 0.15, 0.1], [0.7, 0.1, 0.05]])
    tree, ranks = grown(shape)
    by_leaf = dict[int, float]()
    for node, path in enumerate(ranks):
        if not tree.children[node]:
            chance = float(np.prod([chances[depth][rank] for depth, rank in enumerate(path)]))
            by_leaf[len(path)] = by_leaf.get(len(path), 0.0) + chance
    assert leaving(shape, chances)[0] == pytest.approx(by_leaf)


def test_expectation_after_wrong_children_is_the_mean_over_the_texts_that_fit() -> None:
    shape, chances = parse_shape("3x1"), _chances([[0.5, 0.2, 0.1], [0.6]])
    rng = random.Random(0)
    texts = [
        [rng.choices((0, 1, 2, 9), (0.5, 0.2, 0.1, 0.2))[0], rng.choices((0, 9), (0.6, 0.4))[0]] for _ in range(40_000)
    ]
    means = [walk(shape, text).emitted for text in texts if text[0] != 0]
    assert 1 + beyond(shape, 0, 0, 1, tails(shape, chances), chances) == pytest.approx(np.mean(means), abs=0.02)


def test_acceptance_is_learned_from_walks_that_tried_different_widths() -> None:
    """Chains never see the second child; walks that could not see it must not count against it."""
    rng, acceptance = random.Random(1), Acceptance()
    law = (0.55, 0.2, 0.1, 0.15)
    for number in range(6000):
        shape = parse_shape("chain3" if number % 4 else "3x2x1")
        acceptance.see(walk(shape, rng.choices((0, 1, 2, 9), law, k=3)))
    chances = acceptance.chances()
    assert chances[0][:3] == pytest.approx(law[:3], abs=0.03)
    assert chances[1][:2] == pytest.approx(law[:2], abs=0.04)
    assert chances[9][0] == pytest.approx(law[0], abs=0.05)  # never reached: leans on all levels together


def test_later_walks_can_weigh_more() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.see(Walked((), 1, False, 1, True))
    acceptance.scale(0.01)
    for _ in range(5):
        acceptance.see(Walked((0,), 0, False, 1, True))
    assert acceptance.chances(1.0)[0][0] > 0.7


# -- the best tree -----------------------------------------------------------------------------------------------------


def _all_trees(nodes: int, depth: int, ranks: int) -> set[frozenset[tuple[int, ...]]]:
    """Every tree of up to so many nodes in which children have the lowest ranks."""
    found, latest = {frozenset[tuple[int, ...]]()}, {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        bigger = set()
        for tree in latest:
            for parent in [(), *tree]:
                rank = sum(len(path) == len(parent) + 1 and path[:-1] == parent for path in tree)
                if len(parent) < depth and rank < ranks:
                    bigger.add(tree | {(*parent, rank)})
        latest = bigger
        found |= bigger
    return found


@pytest.mark.parametrize(
    "rows",
    [
        [[0.6, 0.2, 0.1, 0.05]],
        [[0.9, 0.01, 0.0, 0.0]],
        [[0.3, 0.25, 0.2, 0.2], [0.9, 0.05, 0.02, 0.0]],
        [[0.1, 0.6, 0.1, 0.1], [0.2, 0.1, 0.6, 0.0], [0.5, 0.4, 0.0, 0.0]],
    ],
)
def test_the_best_tree_is_the_best_of_all_trees(rows: list[list[float]]) -> None:
    """Sequoia's recursion against every tree there is, also where a later child is likelier than an earlier one."""
    chances = _chances(rows)
    for depth in (1, 2, 5):
        everything = _all_trees(5, depth, 4)
        for nodes, (expected, shape) in enumerate(best_trees(chances, 5, depth), 1):
            best = max(
                1 + sum(np.prod([chances[d][r] for d, r in enumerate(path)]) for path in tree)
                for tree in everything
                if len(tree) <= nodes
            )
            assert expected == pytest.approx(best)
            assert shape.nodes <= nodes and shape.depth <= depth
            assert 1 + tails(shape, chances)[0] == pytest.approx(expected)
            assert parse_shape(shape.name).levels == shape.levels


def test_the_fastest_tree_weighs_tokens_against_seconds() -> None:
    sure, unsure = _chances([[0.95]]), _chances([[0.3, 0.25, 0.2, 0.15]])
    cheap = lambda shape: 1 + 0.01 * shape.nodes + 0.01 * shape.depth  # noqa: E731
    deep = lambda shape: 1 + 0.01 * shape.nodes + 0.5 * shape.depth  # noqa: E731
    assert fastest_tree(sure, cheap, 8, (2, 8))[1] == parse_shape("chain8")
    speed, shape = fastest_tree(unsure, deep, 8, (2, 8))
    assert shape.levels[0] == (4,) and shape.depth == 1
    assert speed == pytest.approx((1 + 0.9) / deep(shape))
    assert fastest_tree(_chances([[0.0]]), cheap, 8, (4,)) == (0.0, OFF)


# -- seconds -----------------------------------------------------------------------------------------------------------


def test_costs_are_least_squares_when_there_is_enough_to_see() -> None:
    rng, fit = random.Random(2), Fit(0.1, trust=1e-9)
    rows = [(rng.randint(1, 8), rng.randint(0, 20)) for _ in range(200)]
    seconds = [0.3 * u + 0.02 * v + rng.gauss(0, 0.01) for u, v in rows]
    for (u, v), y in zip(rows[:1] + rows, seconds[:1] + seconds):
        fit.see(u, v, y)
    weights = np.array([0.25] + [1.0] * 200) ** 0.5
    solved, *_ = np.linalg.lstsq(
        np.array(rows[:1] + rows, dtype=float) * weights[:, None], np.array(seconds[:1] + seconds) * weights, rcond=None
    )
    assert fit.solve() == pytest.approx(tuple(solved), rel=1e-6)


def test_before_anything_varied_the_slope_is_what_was_believed() -> None:
    fit = Fit(0.1)
    assert fit.solve() == (0.0, 0.0)
    for _ in range(5):
        fit.see(1, 4, 1.4)
    assert fit.solve() == pytest.approx((1.0, 0.1))


def test_costs_never_go_below_zero_and_one_stall_of_the_machine_does_not_count_for_much() -> None:
    fit = Fit(0.1)
    for v, y in ((1, 3.0), (2, 2.0), (3, 1.0)) * 5:
        fit.see(1, v, y)
    assert min(fit.solve()) >= 0
    steady = Fit(0.1)
    for _ in range(20):
        steady.see(1, 0, 1.0)
    steady.see(1, 0, 1000.0)
    assert steady.solve()[0] < 1.2


def test_a_curve_goes_through_what_was_measured() -> None:
    curve = Curve([(4, 2.0), (1, 1.0), (8, 2.5)])
    assert [curve(x) for x in (0, 1, 2.5, 4, 6, 8, 16)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.25, 2.5, 3.5])
    assert [Curve([(3, 5.0)])(x) for x in (1, 3, 9)] == [5.0] * 3
    with pytest.raises(ValueError, match="measurement"):
        Curve([])


def test_ragged_names_are_read_back() -> None:
    paths = [[0], [0, 0], [0, 1], [1]]
    assert parse_shape(from_paths(paths).name) == from_paths(paths)
    for wrong in ("tree:", "tree:0,,1", "tree:1", "tree:0..1"):
        with pytest.raises(ValueError, match=r"tree|shape"):
            parse_shape(wrong)
