"""Recurrences over trees in all their forms, against the definition stepped along every node's own path, in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from devices import DEVICE
from outrider.mixers import gated_delta, linear, selective, ssd
from outrider.mixers.chains import heavy_light, plan

J, R, K, V = 2, 3, 5, 4
H = J * R
pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("on_device")]

CHAIN = list(range(-1, 9))
STAR = [-1, *[0] * 9]
FOREST = [-1, -1, 0, 1, 1, -1, 4, 5, 2]  # several children of the committed state
BUSHY = [-1, 0, 0, 1, 1, 2, 3, 6, 6, 5]


def random_tree(seed: int, nodes: int = 24) -> list[int]:
    rng = random.Random(seed)
    return [-1, *(rng.randrange(max(-1, node - 6), node) for node in range(1, nodes))]


TREES = [CHAIN, STAR, FOREST, BUSHY, [-1], random_tree(1), random_tree(2)]


def path_of(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def seen(rows: list[list[int]], dtype: torch.dtype = torch.bool) -> torch.Tensor:
    size = max(map(len, rows))
    mask = torch.zeros(len(rows), size, size, dtype=dtype)
    for row, parents in enumerate(rows):
        for node in range(size):
            mask[row, node, path_of(parents, node) if node < len(parents) else [node]] = True
    return mask


# -- chains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parents", TREES)
def test_chains_cover_every_node_once_and_begin_where_they_can(parents: list[int]) -> None:
    chains = heavy_light(parents)
    assert sorted(node for chain in chains for node in chain.nodes) == list(range(len(parents)))
    wave_of = {node: chain.wave for chain in chains for node in chain.nodes}
    for chain in chains:
        assert [parents[node] for node in chain.nodes] == [chain.parent, *chain.nodes[:-1]]
        assert chain.wave == (wave_of[chain.parent] + 1 if chain.parent >= 0 else 0)
    # every light edge at least halves the subtree
    assert max(chain.wave for chain in chains) <= math.log2(len(parents))


def test_a_chain_is_one_chain_and_a_star_needs_two_waves() -> None:
    (chain,) = heavy_light(CHAIN)
    assert chain.nodes == list(range(10))
    assert [len(chain.nodes) for chain in heavy_light(STAR)] == [2, *[1] * 8]
    assert len(plan([STAR], 0, 10, DEVICE).waves) == 2
    assert len(plan([STAR], 0, 10, DEVICE, together=False).waves) == 9


def test_nodes_of_earlier_calls_are_known_beginnings() -> None:
    found = heavy_light([2, 4, 4, -1, 1], start=4)
    assert [(chain.parent, chain.nodes, chain.wave) for chain in found] == [
        (2, [0, 1], 0),
        (4, [2], 1),
        (-1, [3], 0),
        (1, [4], 0),
    ]
    assert plan([[2, 4, 4, -1, 1]], 4, 5, DEVICE).known == [(0, 1), (0, 2)]


@pytest.mark.parametrize("together", [True, False], ids=["chains", "serial"])
@pytest.mark.parametrize("parents", [*TREES, [2, 4, 4, -1, 1]])
def test_lanes_step_every_node_once_from_its_parents_state(parents: list[int], together: bool) -> None:
    start = 4 if parents[0] > 0 else 0
    made = plan([parents, [-1]], start, len(parents), DEVICE, together)
    bounds, steps = made.lanes.bounds_L2.tolist(), made.lanes.steps_X3.tolist()
    assert sorted(node for node, _, _ in steps) == [*range(len(parents)), len(parents)]
    kept = {slot: place for place, slot in made.slots.items() if place[1] < start}
    for first, count in made.lanes.launches:
        written = {}
        for begin, end in bounds[first : first + count]:
            behind, own = None, dict(kept)  # what a lane may load: states of earlier launches, and its own
            for node, source, target in steps[begin:end]:
                row, node = node // len(parents), node % len(parents) + start
                behind = own[source] if source >= 0 else behind
                assert behind == (row, [parents, [-1]][row][node - start])
                behind = (row, node)
                if target >= 0:
                    own[target] = written[target] = behind
        kept |= written
    assert len(made.lanes.launches) == (len(made.waves) if together else 1)


# -- gated delta rule --------------------------------------------------------------------------------------------------


def delta_inputs(rows: int, nodes: int, per_channel: bool = False, decay: float = 1.0) -> gated_delta.Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, nodes, *shape, dtype=torch.float64)

    q, k = (gated_delta.normalised(normal(J, K)) for _ in range(2))
    g = -torch.rand(rows, nodes, H, K if per_channel else 1, dtype=torch.float64) * decay
    return gated_delta.Inputs(q, k, normal(H, V), g, torch.rand(rows, nodes, H, dtype=torch.float64))


def delta_definition(state: torch.Tensor, x: gated_delta.Inputs, row: int, path: list[int]) -> tuple[Any, Any]:
    """The rule as it is written, head by head: output of the last node, and the state after it."""
    state, out = state.clone(), torch.zeros(H, V, dtype=torch.float64)
    for node in path:
        for head in range(H):
            q, k = x.q_BNJK[row, node, head // R], x.k_BNJK[row, node, head // R]
            decayed = x.g_BNHD[row, node, head].exp()[:, None] * state[head]
            correction = x.v_BNHV[row, node, head] - decayed.T @ k
            state[head] = decayed + x.beta_BNH[row, node, head] * torch.outer(k, correction)
            out[head] = state[head].T @ q
    return out, state


def delta_masked(state: torch.Tensor, x: gated_delta.Inputs, rows: list[list[int]]) -> tuple[Any, Any]:
    # u of the new nodes must not be read: it is not known yet
    unknown = torch.full_like(x.v_BNHV, float("nan"))
    return gated_delta.masked(state, x, linear.Factors(x.k_BNJK, unknown, x.g_BNHD), seen(rows))


def delta_chains(state: torch.Tensor, x: gated_delta.Inputs, rows: list[list[int]]) -> tuple[Any, Any]:
    return gated_delta.chains(state, x, plan(rows, 0, x.q_BNJK.shape[1], DEVICE))


def delta_serial(state: torch.Tensor, x: gated_delta.Inputs, rows: list[list[int]]) -> tuple[Any, Any]:
    return gated_delta.chains(state, x, plan(rows, 0, x.q_BNJK.shape[1], DEVICE, together=False))


DELTA_WAYS = {"masked": delta_masked, "chains": delta_chains, "serial": delta_serial}


def close(got: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-10) -> None:
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, wanted, atol=limit, rtol=limit)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("way", DELTA_WAYS)
@pytest.mark.parametrize("parents", TREES)
def test_every_node_of_a_tree_is_the_delta_rule_along_its_path(parents: list[int], way: str, per_channel: bool) -> None:
    torch.manual_seed(0)
    rows = [parents, random_tree(7, max(1, len(parents) - 2))]  # the second row ends in padding
    state = torch.randn(2, H, K, V, dtype=torch.float64)
    x = delta_inputs(2, len(parents), per_channel)
    before = state.clone()
    o, u = DELTA_WAYS[way](state, x, rows)
    assert torch.equal(state, before)
    assert torch.isfinite(o).all() and torch.isfinite(u).all()
    for row, row_parents in enumerate(rows):
        for node in range(len(row_parents)):
            path = path_of(row_parents, node)
            out, then = delta_definition(state[row], x, row, path)
            close(o[row, node], out)
            close(linear.after_(state[row].clone(), x.k_BNJK[row, path], u[row, path], x.g_BNHD[row, path]), then)


def test_a_delta_tree_grown_in_calls_is_the_tree_in_one() -> None:
    torch.manual_seed(1)
    state, x = torch.randn(1, H, K, V, dtype=torch.float64), delta_inputs(1, len(BUSHY))
    whole, whole_u = delta_masked(state, x, [BUSHY])
    k, u, g = x.k_BNJK, torch.full_like(x.v_BNHV, float("nan")), x.g_BNHD
    for a, b in ((0, 1), (1, 6), (6, 10)):
        part = gated_delta.Inputs(*(t[:, a:b] for t in x))
        factors = linear.Factors(k[:, :b], u[:, :b].clone(), g[:, :b])
        o, u[:, a:b] = gated_delta.masked(state, part, factors, seen([BUSHY])[:, :b, :b])
        close(o, whole[:, a:b])
        made = plan([BUSHY[a:b]], a, b - a, DEVICE)
        paths = [path_of(BUSHY, node) for _, node in made.known]
        rebuilt = [linear.after_(state[0].clone(), k[0, path], u[0, path], g[0, path]) for path in paths]
        close(gated_delta.chains(torch.stack([state[0], *rebuilt]), part, made)[0], whole[:, a:b])
    close(u, whole_u)


@pytest.mark.parametrize("way", DELTA_WAYS)
def test_swapping_siblings_changes_no_node(way: str) -> None:
    """A leak between siblings passes loose tolerances on texts; node by node it cannot hide."""
    torch.manual_seed(2)
    state, x = torch.randn(1, H, K, V, dtype=torch.float64), delta_inputs(1, 7)
    order = [0, 2, 1, 5, 6, 3, 4]  # both children of node 0 swapped, with their subtrees
    one, _ = DELTA_WAYS[way](state, x, [[-1, 0, 0, 1, 1, 2, 2]])
    other, _ = DELTA_WAYS[way](state, gated_delta.Inputs(*(t[:, order] for t in x)), [[-1, 0, 0, 1, 1, 2, 2]])
    close(other, one[:, order], 1e-13)


@pytest.mark.parametrize("way", DELTA_WAYS)
def test_strong_decay_gives_numbers(way: str) -> None:
    """Ratios of decays are 0 / 0 in float32 below about -90; sums of logs beyond -1000 lose small differences."""
    torch.manual_seed(3)
    parents = random_tree(5, 32)
    state, x = torch.randn(1, H, K, V, dtype=torch.float64), delta_inputs(1, 32, decay=60.0)
    x.g_BNHD[:, ::2] *= 1e-4  # weak decay behind strong decay
    narrow = gated_delta.Inputs(*(t.float() for t in x))
    o, u = DELTA_WAYS[way](state.float(), narrow, [parents])
    for node in range(32):
        path = path_of(parents, node)
        out, then = delta_definition(state[0], x, 0, path)
        close(o[0, node].double(), out, 2e-5)
        factors = (t[0, path] for t in (narrow.k_BNJK, u, narrow.g_BNHD))
        close(linear.after_(state[0].float(), *factors).double(), then, 2e-5)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_sequences_in_chunks_equal_single_steps(chunk: int) -> None:
    torch.manual_seed(4)
    state, x = torch.randn(2, H, K, V, dtype=torch.float64), delta_inputs(2, 11)
    o, last = gated_delta.sequence(state, x, chunk)
    for row in range(2):
        for token in range(11):
            out, then = delta_definition(state[row], x, row, list(range(token + 1)))
            close(o[row, token], out)
        close(last[row], then)


# -- state-space duality -----------------------------------------------------------------------------------------------


def ssd_factors(rows: int, nodes: int, decay: float = 1.0) -> tuple[torch.Tensor, linear.Factors, Callable[..., Any]]:
    """Reading vectors c, factors, and the definition along a path: (output without skip, state)."""
    x, b, c = (torch.randn(rows, nodes, *s, dtype=torch.float64) for s in ((H, V), (J, K), (J, K)))
    dt, A = torch.rand(rows, nodes, H, dtype=torch.float64), -torch.rand(H, dtype=torch.float64) * decay

    def definition(state: torch.Tensor, row: int, path: list[int]) -> tuple[Any, Any]:
        state, out = state.clone(), torch.zeros(H, V, dtype=torch.float64)
        for node in path:
            for head in range(H):
                added = dt[row, node, head] * torch.outer(x[row, node, head], b[row, node, head // R])
                state[head] = (A[head] * dt[row, node, head]).exp() * state[head] + added
                out[head] = state[head] @ c[row, node, head // R]
        return out, state

    return c, ssd.as_linear(x, b, dt, A), definition


@pytest.mark.parametrize("way", ["masked", "chains", "serial"])
@pytest.mark.parametrize("decay", [1.0, 1e4])
@pytest.mark.parametrize("parents", TREES)
def test_every_node_of_a_tree_is_mamba_2_along_its_path(parents: list[int], way: str, decay: float) -> None:
    torch.manual_seed(5)
    nodes, rows = len(parents), [parents, random_tree(7, max(1, len(parents) - 2))]
    state = torch.randn(2, H, V, K, dtype=torch.float64)
    c, factors, definition = ssd_factors(2, nodes, decay)
    before = state.clone()
    if way == "masked":
        y = ssd.masked_groups(state, c, factors, seen(rows))
    else:
        y = ssd.chains(state, c, factors, plan(rows, 0, nodes, DEVICE, together=way == "chains"))
    assert torch.equal(state, before)
    assert torch.isfinite(y).all()
    for row, row_parents in enumerate(rows):
        for node in range(len(row_parents)):
            path = path_of(row_parents, node)
            out, then = definition(state[row], row, path)
            close(y[row, node], out)
            close(ssd.after_groups_(state[row].clone(), *(t[row, path] for t in factors)), then)


def test_a_mamba_2_tree_grown_in_calls_is_the_tree_in_one() -> None:
    torch.manual_seed(6)
    state, (c, factors, _) = torch.randn(1, H, V, K, dtype=torch.float64), ssd_factors(1, len(BUSHY))
    whole = ssd.masked_groups(state, c, factors, seen([BUSHY]))
    for a, b in ((0, 1), (1, 6), (6, 10)):
        known = linear.Factors(*(t[:, :b] for t in factors))
        close(ssd.masked_groups(state, c[:, a:b], known, seen([BUSHY])[:, :b, :b]), whole[:, a:b])


def test_one_group_is_the_drafters_recurrence() -> None:
    """The form with groups and the lean one of the drafter are one recurrence."""
    torch.manual_seed(7)
    state, x = torch.randn(1, H, V, K, dtype=torch.float64), torch.randn(1, 6, H, V, dtype=torch.float64)
    b, c = (torch.randn(1, 6, K, dtype=torch.float64) for _ in range(2))
    dt, A, D = torch.rand(1, 6, H, dtype=torch.float64), -torch.rand(H, dtype=torch.float64), torch.randn(H).double()
    parents = [-1, 0, 0, 1, 1, 2]
    log = (dt * A).mT @ seen([parents]).double().mT
    lean = ssd.tree(state, ssd.Factors(x, b, dt.mT, log), c, seen([parents]), D)
    grouped = ssd.masked_groups(state, c[:, :, None], ssd.as_linear(x, b[:, :, None], dt, A), seen([parents]))
    close(grouped + D[:, None] * x, lean)


# -- Mamba-1 -----------------------------------------------------------------------------------------------------------


def selective_inputs(rows: int, nodes: int, decay: float = 1.0) -> tuple[selective.Inputs, torch.Tensor]:
    x, dt = (torch.randn(rows, nodes, H, dtype=torch.float64) for _ in range(2))
    b, c = (torch.randn(rows, nodes, K, dtype=torch.float64) for _ in range(2))
    return selective.Inputs(x, dt.abs(), b, c), -torch.rand(H, K, dtype=torch.float64) * decay


def selective_definition(
    state: torch.Tensor, x: selective.Inputs, A: torch.Tensor, row: int, path: list[int]
) -> tuple[Any, Any]:
    state, out = state.clone(), torch.zeros(H, dtype=torch.float64)
    for node in path:
        for channel in range(H):
            dt = x.dt_BND[row, node, channel]
            state[channel] = (A[channel] * dt).exp() * state[channel] + dt * x.x_BND[row, node, channel] * x.b_BNS[
                row, node
            ]
            out[channel] = state[channel] @ x.c_BNS[row, node]
    return out, state


@pytest.mark.parametrize("way", ["masked", "chains", "serial"])
@pytest.mark.parametrize("decay", [1.0, 1e4])
@pytest.mark.parametrize("parents", TREES)
def test_every_node_of_a_tree_is_mamba_1_along_its_path(parents: list[int], way: str, decay: float) -> None:
    torch.manual_seed(8)
    nodes, rows = len(parents), [parents, random_tree(7, max(1, len(parents) - 2))]
    state, (x, A) = torch.randn(2, H, K, dtype=torch.float64), selective_inputs(2, nodes, decay)
    before, held = state.clone(), selective.factors(x)
    if way == "masked":
        y = selective.masked(state, x.c_BNS, held, A, seen(rows))
    else:
        y = selective.chains(state, x, A, plan(rows, 0, nodes, DEVICE, together=way == "chains"))
    assert torch.equal(state, before)
    assert torch.isfinite(y).all()
    for row, row_parents in enumerate(rows):
        for node in range(len(row_parents)):
            path = path_of(row_parents, node)
            out, then = selective_definition(state[row], x, A, row, path)
            close(y[row, node], out)
            close(selective.after_(state[row].clone(), *(t[row, path] for t in held), A), then)


def test_a_mamba_1_tree_grown_in_calls_is_the_tree_in_one() -> None:
    torch.manual_seed(9)
    state, (x, A) = torch.randn(1, H, K, dtype=torch.float64), selective_inputs(1, len(BUSHY))
    held = selective.factors(x)
    whole = selective.masked(state, x.c_BNS, held, A, seen([BUSHY]))
    for a, b in ((0, 1), (1, 6), (6, 10)):
        known = selective.Factors(*(t[:, :b] for t in held))
        close(selective.masked(state, x.c_BNS[:, a:b], known, A, seen([BUSHY])[:, :b, :b]), whole[:, a:b])


def test_mamba_1_sequences_equal_single_steps() -> None:
    torch.manual_seed(10)
    state, (x, A) = torch.randn(2, H, K, dtype=torch.float64), selective_inputs(2, 7)
    before = state.clone()
    y, last = selective.sequence(state, x, A)
    assert torch.equal(state, before)
    for row in range(2):
        for token in range(7):
            out, then = selective_definition(state[row], x, A, row, list(range(token + 1)))
            close(y[row, token], out)
        close(last[row], then)
