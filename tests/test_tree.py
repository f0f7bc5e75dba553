"""Trees and shapes as users write them, and the bookkeeping of nodes behind a prefix, against brute force."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.cache.attention import additive_mask, visibility
from outrider.cache.pending import Pending
from outrider.tree import MAX_NODES, OFF, Shape, TokenTree, best_first, from_paths, parse_shape, uniform


@st.composite
def parent_arrays(draw: st.DrawFn, size: int = 12, prefix: bool = False) -> list[int]:
    """Parents before children; with `prefix`, any node may hang at the committed prefix."""
    count = draw(st.integers(1, size))
    low = [-1 if prefix or node == 0 else 0 for node in range(count)]
    return [draw(st.integers(low[node], max(node - 1, low[node]))) for node in range(count)]


def climb(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


# -- trees -------------------------------------------------------------------------------------------------------------


@given(parent_arrays(), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_a_tree_knows_its_paths_depths_and_children(parents: list[int], tokens: list[int]) -> None:
    tree = TokenTree(tokens[0])
    for node in range(1, len(parents)):
        assert tree.add(parents[node], tokens[node]) == node
    assert len(tree) == len(parents) == tree.drafted + 1
    for node in range(len(parents)):
        path = climb(parents, node)
        assert tree.path(node) == path
        assert tree.path_tokens(node) == [tokens[n] for n in path]
        assert tree.depths[node] == len(path) - 1
        assert tree.children[node] == [child for child, parent in enumerate(parents) if parent == node]
        for token in range(4):
            same = [child for child in tree.children[node] if tokens[child] == token]
            assert tree.child(node, token) == (same[0] if same else None)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12))
def test_adding_once_makes_a_trie(branches: list[list[int]]) -> None:
    tree = TokenTree(9)
    for branch in branches:
        node = 0
        for token in branch:
            node = tree.add_once(node, token)
        assert tree.path_tokens(node)[1:] == branch
    paths = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
    assert len(set(paths)) == len(paths) == 1 + len({tuple(b[:n]) for b in branches for n in range(1, len(b) + 1)})


def test_a_node_without_a_parent_cannot_be_added() -> None:
    tree = TokenTree(1)
    for parent in (-1, 1, 5):
        with pytest.raises(AssertionError):
            tree.add(parent, 2)


# -- shapes ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3), max_size=5))
def test_the_size_of_a_uniform_shape(counts: list[int]) -> None:
    shape = uniform(counts)
    widths = [prod(counts[: level + 1]) for level in range(len(counts))]
    assert shape.nodes == sum(widths)
    assert shape.depth == len(counts)
    assert shape.width == max(widths, default=0)
    assert [sum(level) for level in shape.levels] == widths


def test_the_sizes_that_papers_name() -> None:
    sizes = {(3, 2, 2, 1, 1): 45, (3, 3, 2, 1): 48, (2, 2, 2, 1, 1, 1): 38, (1,) * 5: 5, (): 0}
    assert {counts: parse_shape(counts).nodes for counts in sizes} == sizes


@given(parent_arrays(size=14))
def test_ragged_paths_make_the_tree_that_they_describe(parents: list[int]) -> None:
    """Users want any tree of their own, given as lists of child ranks."""
    ranks = [sum(parents[other] == parents[node] for other in range(node)) for node in range(len(parents))]
    paths = [[ranks[n] for n in climb(parents, node)[1:]] for node in range(1, len(parents))]
    if not paths:
        return
    shape = from_paths(paths[::-1])  # in any order
    depths = [len(path) for path in paths]
    assert shape.nodes == len(paths)
    assert shape.depth == max(depths)
    assert [sum(level) for level in shape.levels] == [depths.count(d) for d in range(1, max(depths) + 1)]
    grown, frontier = [], [()]
    for level in shape.levels:
        assert len(level) == len(frontier)
        frontier = [(*node, rank) for node, count in zip(frontier, level) for rank in range(count)]
        grown += frontier
    assert sorted(grown) == sorted(map(tuple, paths))
    assert parse_shape([list(path) for path in paths]) == shape
    assert parse_shape(str(paths)) == shape


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(-1, 7))
def test_a_cut_shape_is_the_same_but_no_deeper(counts: list[int], depth: int) -> None:
    shape = uniform(counts)
    cut = shape.cut(depth)
    assert cut.depth == min(max(depth, 0), shape.depth)
    assert cut.levels == shape.levels[: cut.depth]
    assert cut.name == shape.name


def test_best_first_shapes() -> None:
    shape = best_first(12)
    assert (shape.nodes, shape.budget) == (12, 12)
    assert 1 <= shape.depth <= 12
    assert parse_shape("best12") == shape
    assert parse_shape("best16x6") == best_first(16, 6)
    assert best_first(16, 6).depth == 6
    assert best_first(1).depth == 1
    assert (
        parse_shape("best16x6@0.05") == best_first(16, 6, least=0.05) == parse_shape(best_first(16, 6, least=0.05).name)
    )
    assert parse_shape("best16@.5").cut(2).least == 0.5 and parse_shape("best16").least == 0.0
    for impossible in ("best16@1.0", "best16@2.5"):
        with pytest.raises(ValueError, match="probability"):
            parse_shape(impossible)


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ("off", ()),
        ("()", ()),
        (0, ()),
        ("0", ()),
        ((), ()),
        (3, ((1,), (1,), (1,))),
        ("3", ((1,), (1,), (1,))),
        ("chain3", ((1,), (1,), (1,))),
        ("CHAIN 3", ((1,), (1,), (1,))),
        ((3, 2), ((3,), (2, 2, 2))),
        ([3, 2], ((3,), (2, 2, 2))),
        ("3x2", ((3,), (2, 2, 2))),
        ("(3,2)", ((3,), (2, 2, 2))),
        ("3, 2", ((3,), (2, 2, 2))),
        ([[0], [0, 0], [1]], ((2,), (1, 0))),
        ("[[0],[0,0],[1]]", ((2,), (1, 0))),
        (((0,), (1,), (1, 0)), ((2,), (0, 1))),
    ],
)
def test_every_way_to_write_a_shape(given: Any, levels: tuple) -> None:
    shape = parse_shape(given)
    assert shape.levels == levels
    assert parse_shape(shape) is shape
    assert OFF.depth == OFF.nodes == 0


@pytest.mark.parametrize(
    "given",
    [
        "wide",
        "3xx2",
        "3x",
        "-1",
        "best",
        "best0",
        "best0x3",
        "best16x0",
        "",
        " ",
        "best99999",
        "5 5",
        "best1 6",
        "chain5@0. 05",
        "off~15",
        "off@0.1",
        "0+0.2",
        "best8@",
        "best8@5",
        "best8@-0.1",
        "chain5@1.5",
        "chain5~",
        "chain5~x",
        "chain9999999",
        "chain2000",
        "3x0x2",
        "0x3",
        "[[1]]",
        "[[0],[0,1]]",
        "[]x",
        "3.5",
        -1,
        5000,
        True,
        (3, 0),
        (3, -2),
        (0,),
        (32, 32, 32),
        (2.5,),
        ("3", "2"),
        (True, 2),
        [[0], 1],
        [[1]],
        [[0], [0, 1]],
        [[0, 0]],
        [[]],
        [[-1]],
        None,
        3.5,
        {"a": 1},
    ],
)
def test_a_shape_that_is_none_is_refused_in_one_sentence(given: Any) -> None:
    with pytest.raises(ValueError, match=r"shape|chain|tree"):
        parse_shape(given)


@pytest.mark.parametrize("text", ["auto", "auto~15", "ucb@0.05"])
def test_what_chooses_shapes_is_no_shape(text: str) -> None:
    with pytest.raises(ValueError, match="chooses shapes"):
        parse_shape(text)


def test_the_largest_shapes_are_possible() -> None:
    assert parse_shape(MAX_NODES).nodes == MAX_NODES
    assert parse_shape((MAX_NODES,)).nodes == MAX_NODES
    with pytest.raises(ValueError, match=f"limit is {MAX_NODES}"):
        parse_shape((MAX_NODES, 1))
    assert isinstance(parse_shape("best1024"), Shape)


@given(st.text(alphabet="0123456789x,()[] bestchainof-.", max_size=14))
def test_any_text_is_a_shape_or_refused(text: str) -> None:
    try:
        assert parse_shape(text).nodes <= MAX_NODES
    except ValueError as error:
        assert 10 < len(str(error)) < 300


# -- pending nodes -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(parent_arrays(8, prefix=True), parent_arrays(8, prefix=True)), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_waves_and_ancestors_of_rows_that_grow_in_several_calls(
    calls: list[tuple[list[int], list[int]]], room: int
) -> None:
    pending = Pending(2, capacity=room)
    parents: list[list[int]] = [[], []]  # of every node, padding included
    for call in calls:
        size = max(map(len, call))
        rows = [list(row) for row in call]  # indices count from the first node ever
        start, waves = pending.add(rows, size)
        for row, own in enumerate(rows):
            parents[row] += own + [-1] * (size - len(own))
        assert start + size == pending.count == len(parents[0])
        flat = [entry for wave in waves for entry in wave]
        assert sorted(flat) == [(row, start + i) for row in range(2) for i in range(size)]
        wave_of = {entry: number for number, wave in enumerate(waves) for entry in wave}
        for (row, node), number in wave_of.items():
            parent = parents[row][node]
            assert number == (wave_of[row, parent] + 1 if parent >= start else 0)
        for row in range(2):
            for node in range(pending.count):
                path = climb(parents[row], node)
                assert pending.depths_BM[row, node] == len(path) - 1
                assert np.flatnonzero(pending.ancestors_BMM[row, node, : pending.count]).tolist() == path
    pending.clear()
    assert pending.count == 0


def test_a_cleared_table_remembers_nothing() -> None:
    pending = Pending(1)
    pending.add([[-1, 0, 1]], 3)
    pending.clear()
    pending.add([[-1, -1, 0]], 3)
    assert pending.depths_BM[0, :3].tolist() == [0, 0, 1]
    assert pending.ancestors_BMM[0, :3, :3].tolist() == [
        [True, False, False],
        [False, True, False],
        [True, False, True],
    ]


def test_parents_that_do_not_exist_are_refused() -> None:
    for parents in ([0], [-2], [-1, 1], [-1, 5]):
        with pytest.raises(IndexError, match="parents come before children"):
            Pending(1).add([parents], len(parents))


def test_paths_are_checked() -> None:
    pending = Pending(2)
    pending.add([[-1, 0, 0], [-1]], 3)
    pending.check_path(0, [])
    pending.check_path(0, [0, 2])
    pending.keep([1, 0])
    pending.check_path(1, [0, 2])
    for path in ([1], [0, 0], [0, 1, 2], [3], [-1]):
        with pytest.raises(IndexError, match="not a path"):
            pending.check_path(1, path)


# -- visibility --------------------------------------------------------------------------------------------------------


@given(
    parent_arrays(9, prefix=True),
    parent_arrays(9, prefix=True),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.one_of(st.none(), st.integers(1, 7)),
    st.integers(1, 9),
)
def test_a_node_sees_its_prefix_and_ancestors_within_the_window(
    one: list[int], other: list[int], lengths: tuple[int, int], window: int | None, last: int
) -> None:
    pending = Pending(2)
    rows, size = [one, other], max(len(one), len(other))
    pending.add(rows, size)
    new, base = min(last, size), max(lengths)
    seen = visibility(
        lengths,
        base,
        pending.depths_BM[:, :size],
        pending.ancestors_BMM[:, size - new : size, :size],
        window,
    )
    assert seen.shape == (2, new, base + size)
    for row, own in enumerate(rows):
        padded = own + [-1] * (size - len(own))
        for node in range(size - new, size):
            # the sequence that the node ends, as slots
            slots = [*range(lengths[row]), *(base + n for n in climb(padded, node))]
            wanted = set(slots if window is None else slots[-window:])
            got = set(np.flatnonzero(seen[row, node - size + new]).tolist())
            assert got == wanted


def test_the_mask_is_zero_where_visible_and_finite_elsewhere() -> None:
    """A boolean mask is silently misread by eager attention, and minus infinity makes NaN of a row that sees nothing."""
    seen = np.array([[[True, False], [False, False]]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = additive_mask(seen, dtype, torch.device("cpu"))
        assert mask.shape[:3] == (1, 1, 2)
        assert mask.dtype == dtype
        assert (mask == 0).nonzero().tolist() == [[0, 0, 0, 0]]
        assert (mask[mask != 0] == torch.finfo(dtype).min).all()
        assert torch.isfinite(mask.softmax(-1)).all()
