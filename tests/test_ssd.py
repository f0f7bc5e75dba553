"""Mamba-2's recurrence in all its forms, against single steps one after the other, in float64."""

from __future__ import annotations

import pytest
import torch

from helpers import ancestor_sets
from outrider.cache.factors import Factors, MixerSizes
from outrider.cache.nodes import window_slots
from outrider.cache.pending import Pending
from outrider.mixers import short_conv, ssd
from outrider.models.mamba_mixer import MambaMixer
from outrider.models.scans import PromptScan, TreeScan, scan_sequence

ROWS, TOKENS, HEADS, SIZE, STATE = 2, 23, 3, 4, 5
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6, 6, 5]  # bushy, and fed in several calls


# -- the recurrence ----------------------------------------------------------------------------------------------------


def ssd_inputs(length: int, scale: float = 1.0) -> ssd.Inputs:
    shapes = (HEADS, SIZE), (STATE,), (STATE,), (HEADS,)
    x, b, c, dt = (torch.randn(ROWS, length, *shape, dtype=torch.float64) for shape in shapes)
    return ssd.Inputs(x, b, c, dt.abs() * scale)


def rates() -> tuple[torch.Tensor, torch.Tensor]:
    return -torch.rand(HEADS, dtype=torch.float64) * 4 - 0.1, torch.randn(HEADS, dtype=torch.float64)


def serial(inputs: ssd.Inputs, A: torch.Tensor, D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state, outputs = torch.zeros(ROWS, HEADS, SIZE, STATE, dtype=torch.float64), []
    for t in range(inputs.x_BTHP.shape[1]):
        outputs.append(ssd.step(state, *(part[:, t] for part in inputs), A, D))
    return torch.stack(outputs, 1), state


def test_step_is_the_definition() -> None:
    torch.manual_seed(0)
    inputs, (A, D) = ssd_inputs(1), rates()
    before = torch.randn(ROWS, HEADS, SIZE, STATE, dtype=torch.float64)
    state = before.clone()
    y = ssd.step(state, *(part[:, 0] for part in inputs), A, D)
    x, b, c, dt = (part[:, 0] for part in inputs)
    for row in range(ROWS):
        for head in range(HEADS):
            h = (A[head] * dt[row, head]).exp() * before[row, head]
            h = h + dt[row, head] * torch.outer(x[row, head], b[row])
            torch.testing.assert_close(state[row, head], h)
            torch.testing.assert_close(y[row, head], h @ c[row] + D[head] * x[row, head])


@pytest.mark.parametrize("scale", [0.1, 1.0, 300.0])
@pytest.mark.parametrize("chunk", [4, 23, 64])
def test_whole_sequences_equal_single_steps(scale: float, chunk: int) -> None:
    torch.manual_seed(1)
    inputs, (A, D) = ssd_inputs(TOKENS, scale), rates()
    wanted, state = serial(inputs, A, D)
    got, after = ssd.chunked(inputs, A, D, chunk=chunk)
    for one, other in ((got, wanted), (after, state), (ssd.quadratic(inputs, A, D), wanted)):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_chunks_go_on_from_a_state() -> None:
    torch.manual_seed(2)
    inputs, (A, D) = ssd_inputs(TOKENS), rates()
    wanted, state = serial(inputs, A, D)
    first, middle = ssd.chunked(ssd.Inputs(*(t[:, :9] for t in inputs)), A, D, chunk=4)
    second, last = ssd.chunked(ssd.Inputs(*(t[:, 9:] for t in inputs)), A, D, middle, chunk=4)
    torch.testing.assert_close(torch.cat([first, second], 1), wanted, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(last, state, atol=1e-10, rtol=1e-10)


def test_strong_decay_gives_finite_gradients() -> None:
    torch.manual_seed(3)
    inputs, (A, D) = ssd_inputs(TOKENS, 1e4), rates()
    leaves = ssd.Inputs(*(t.requires_grad_() for t in inputs))
    (ssd.chunked(leaves, A, D, chunk=8)[0] + ssd.quadratic(leaves, A, D)).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in leaves if t.grad is not None)


@pytest.mark.parametrize("step", [0, 1, 2, 4])
def test_unrolled_step_equals_a_drafted_chain(step: int) -> None:
    torch.manual_seed(4)
    steps, (A, D) = [ssd_inputs(TOKENS) for _ in range(step + 1)], rates()
    convs = [torch.randn(ROWS, TOKENS, 6, dtype=torch.float64) for _ in steps]
    weight, bias = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    got, convolved = ssd.unrolled(steps, A, D), short_conv.unrolled(convs, weight, bias)
    for t in range(step, TOKENS):
        # what position t sees at this step: step 0 up to t - step, then one token of each later step
        path = ssd.Inputs(
            *(
                torch.cat(
                    [first[:, : t - step + 1], *(steps[j][part][:, t - step + j, None] for j in range(1, step + 1))], 1
                )
                for part, first in enumerate(steps[0])
            )
        )
        torch.testing.assert_close(got[:, t], serial(path, A, D)[0][:, -1], atol=1e-10, rtol=1e-10)
        inputs = torch.cat(
            [convs[0][:, : t - step + 1], *(convs[j][:, t - step + j, None] for j in range(1, step + 1))], 1
        )
        wanted, _ = short_conv.sequence(inputs, weight, bias)
        torch.testing.assert_close(convolved[:, t], wanted[:, -1], atol=1e-10, rtol=1e-10)


def test_short_conv_forms_agree() -> None:
    torch.manual_seed(5)
    x, weight, bias = torch.randn(2, 9, 6), torch.randn(4, 6), torch.randn(6)
    wanted = torch.nn.functional.conv1d(x.mT, weight.T[:, None], bias, padding=3, groups=6)[..., :9].mT
    whole, window = short_conv.sequence(x, weight, bias)
    torch.testing.assert_close(whole, wanted)
    torch.testing.assert_close(window, x[:, -3:])
    first, middle = short_conv.sequence(x[:, :2], weight, bias)
    torch.testing.assert_close(torch.cat([first, short_conv.sequence(x[:, 2:], weight, bias, middle)[0]], 1), wanted)
    window, outputs = torch.zeros(2, 3, 6), []
    for t in range(9):
        y, window = short_conv.step(window, x[:, t], weight, bias)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), wanted)


# -- the mixer over trees ----------------------------------------------------------------------------------------------


def mixer() -> MambaMixer:
    torch.manual_seed(6)
    made = MambaMixer(8, HEADS, SIZE, STATE).double()
    torch.nn.init.normal_(made.conv_bias)
    return made.requires_grad_(False)


def tree_step(
    made: MambaMixer, factors: Factors, nodes: Pending, x: torch.Tensor, parents: list[list[int]]
) -> torch.Tensor:
    start, _ = nodes.add(parents, x.shape[1])
    return made(x, TreeScan(factors, nodes, start))


def test_tree_nodes_equal_their_own_paths() -> None:
    made, prefix = mixer(), torch.randn(2, 5, 8, dtype=torch.float64)
    factors, nodes = Factors([made.sizes()], 2, 3, prefix.device), Pending(2)  # buffers too small: they grow
    tree_step(made, factors, nodes, prefix, [list(range(-1, 4))] * 2)
    for row in range(2):
        factors.commit(row, range(5))
    nodes.clear()
    x = torch.randn(2, len(PARENTS), 8, dtype=torch.float64)
    rows = [PARENTS, [-1, -1, *PARENTS[2:]]]
    got = torch.cat(
        [tree_step(made, factors, nodes, x[:, a:b], [row[a:b] for row in rows]) for a, b in ((0, 1), (1, 6), (6, 10))],
        1,
    )
    for row, parents in enumerate(rows):
        for node, path in enumerate(ancestor_sets(parents)):
            wanted = made(torch.cat([prefix[row], x[row, path]])[None], scan_sequence)[0, -1]
            torch.testing.assert_close(got[row, node], wanted, atol=1e-10, rtol=1e-10)


def test_commit_and_prompt_leave_the_same_state() -> None:
    made, x = mixer(), torch.randn(1, 8, 8, dtype=torch.float64)
    scan = PromptScan()
    made(x[:, :3], scan)
    made(x[:, 3:], scan)
    factors, nodes = Factors([made.sizes()], 1, 16, x.device), Pending(1)
    junk = torch.randn(1, 1, 8, dtype=torch.float64)
    tree_step(made, factors, nodes, torch.cat([x[:, :2], junk, x[:, 2:3]], 1), [[-1, 0, 1, 1]])
    factors.commit(0, [0, 1, 3])
    nodes.clear()
    tree_step(made, factors, nodes, x[:, 3:], [list(range(-1, 4))])
    factors.commit(0, range(5))
    window, state = factors.committed(0)
    torch.testing.assert_close(window, scan.windows[0][0])
    torch.testing.assert_close(state, scan.states[0][0])
    prefilled = Factors([made.sizes()], 1, 16, x.device)
    prefilled.set_committed(0, 0, scan.windows[0][0], scan.states[0][0])
    torch.testing.assert_close(prefilled.committed(0), factors.committed(0))


def test_window_slots_walk_to_ancestors() -> None:
    nodes = Pending(1)
    nodes.add([[-1, 0, 0, 2]], 4)
    assert window_slots(nodes, 0, 3, 4)[0].tolist() == [[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [2, 3, 5, 6]]
    # a window may hold more than is convolved
    assert window_slots(nodes, 2, 4, 3)[0].tolist() == [[3, 4, 6], [4, 6, 7]]


def test_a_node_leaves_little() -> None:
    size = MixerSizes(18, 64, 64, 1280, 3, torch.float32)
    assert size.node_bytes() < 11_000 < 18 * 64 * 64 * 4
