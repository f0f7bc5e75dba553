"""The gated delta rule as Triton kernels: twins of `gated_delta.chains` and `gated_delta.masked`, with the same arguments.

Every program has a few columns of one head's state to itself: the rule never mixes columns of values. `chains` keeps them in
registers from node to node of its lane, so that a state is read once, and written only where another chain begins. `masked`
reads them once and scores the whole tree: decays between nodes are sums over those ancestors of one that the other has not,
which lose nothing, so that no float64 is needed; the triangular system is solved node by node, because the powers of its
matrix, which would be products alone, grow too large for float32 when keys are alike.

States and all sums are float32; inputs may be narrower. Other states, and trees of more nodes than registers hold, are left to
`gated_delta`. Imported only where it is used: Triton need not be installed.

Shapes: B rows, N new nodes, M pending nodes with the new ones last, L lanes of a launch, J key heads, H value heads, K key size,
V value size, D decays of a head: 1, or K for one per channel (`chains` only); in kernels I some of the K, C some of the V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.mixers import gated_delta, linear
from outrider.mixers.chains import Plan
from outrider.mixers.gated_delta import Inputs

TILE = 8192  # numbers of a state that a program of `chains` holds in registers
LARGEST = 64  # nodes of a tree that `masked` scores; with more, registers spill and compiling takes minutes
COLUMNS, CHANNELS = 32, 32  # that a program of `masked` works on at once
PRECISION = tl.constexpr("tf32x3")  # float32 in three products on tensor cores


def chains(known_YHKV: Tensor, x: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """Outputs and corrected values [B, N, H, V] of a tree, stepped in the lanes of a plan; zeros for padding nodes."""
    if known_YHKV.dtype != torch.float32:
        return gated_delta.chains(known_YHKV, x, plan)
    known_YHKV, x = known_YHKV.contiguous(), Inputs(*(t.contiguous() for t in x))
    (heads, key, value), key_heads = known_YHKV.shape[1:], x.q_BNJK.shape[2]
    o_BNHV, u_BNHV = known_YHKV.new_zeros(2, *x.v_BNHV.shape)
    aside = known_YHKV.new_empty(len(plan.slots) - len(known_YHKV), heads, key, value)
    channels = triton.next_power_of_2(key)
    columns = min(triton.next_power_of_2(value), max(TILE // channels, 1))
    with torch.cuda.device_of(known_YHKV):
        for first, count in plan.lanes.launches:
            grid = count, heads, triton.cdiv(value, columns)
            _step_lanes[grid](
                *x, known_YHKV, aside, o_BNHV, u_BNHV, *plan.lanes[1:], first, len(known_YHKV),
                key_heads, heads, key, value, x.g_BNHD.shape[-1], channels, columns
            )  # fmt: skip
    return o_BNHV, u_BNHV


def masked(state_BHKV: Tensor, x: Inputs, factors: linear.Factors, seen_BMM: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and corrected values [B, N, H, V] of the new nodes of a tree, all at once.

    Args:
        factors: of all pending nodes; u of the new ones is not read.
        seen: which pending nodes are ancestors of a node, or itself.
    """
    pending = seen_BMM.shape[1]
    if state_BHKV.dtype != torch.float32 or pending > LARGEST:
        return gated_delta.masked(state_BHKV, x, factors, seen_BMM)
    state_BHKV, (q, _, v, _, beta) = state_BHKV.contiguous(), (t.contiguous() for t in x)
    k, u, g = (t.contiguous() for t in factors)
    (rows, heads, key, value), key_heads = state_BHKV.shape, q.shape[2]
    known, nodes = pending - q.shape[1], max(16, triton.next_power_of_2(pending))  # 16: the least that products take
    lower_BHMM, weights_BHMM = state_BHKV.new_empty(2, rows, heads, nodes, nodes)
    start_BHM, (o_BNHV, u_BNHV) = state_BHKV.new_empty(rows, heads, nodes), state_BHKV.new_empty(2, *v.shape)
    with torch.cuda.device_of(state_BHKV):
        _relate_nodes[rows, heads](
            q, beta, k, g, seen_BMM.contiguous().view(torch.uint8), lower_BHMM, weights_BHMM, start_BHM, known, pending,
            key_heads, heads, key, nodes, CHANNELS
        )  # fmt: skip
        _score_nodes[rows, heads, triton.cdiv(value, COLUMNS)](
            q, v, beta, k, u, state_BHKV, lower_BHMM, weights_BHMM, start_BHM, o_BNHV, u_BNHV, known, pending,
            key_heads, heads, key, value, nodes, CHANNELS, COLUMNS
        )  # fmt: skip
    return o_BNHV, u_BNHV


@triton.jit(do_not_specialize=["first", "known"])
def _step_lanes(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, g_ptr: tl.tensor, beta_ptr: tl.tensor, known_ptr: tl.tensor,
    aside_ptr: tl.tensor, o_ptr: tl.tensor, u_ptr: tl.tensor, bounds_ptr: tl.tensor, steps_ptr: tl.tensor,
    first: int, known: int,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DECAYS: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One lane, one head, some columns."""
    lane, head = first + tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, CHANNELS)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < KEY)[:, None] & (c < VALUE)[None, :]
    place_IC = (head * KEY + i[:, None]) * VALUE + c[None, :]
    state_IC = tl.zeros([CHANNELS, COLUMNS], tl.float32)
    for step in range(tl.load(bounds_ptr + 2 * lane), tl.load(bounds_ptr + 2 * lane + 1)):
        node = tl.load(steps_ptr + 3 * step)
        source = tl.load(steps_ptr + 3 * step + 1)
        target = tl.load(steps_ptr + 3 * step + 2)
        if source >= known:
            state_IC = tl.load(aside_ptr + (source - known).to(tl.int64) * HEADS * KEY * VALUE + place_IC, inside, 0.0)
        elif source >= 0:
            state_IC = tl.load(known_ptr + source.to(tl.int64) * HEADS * KEY * VALUE + place_IC, inside, 0.0)
        at_key, at_head = (node * KEY_HEADS + key_head) * KEY + i, node * HEADS + head
        q_I = tl.load(q_ptr + at_key, i < KEY, 0.0).to(tl.float32)
        k_I = tl.load(k_ptr + at_key, i < KEY, 0.0).to(tl.float32)
        g_I = tl.load(g_ptr + at_head * DECAYS + (i if DECAYS > 1 else 0 * i), i < KEY, 0.0).to(tl.float32)
        v_C = tl.load(v_ptr + at_head * VALUE + c, c < VALUE, 0.0).to(tl.float32)
        beta = tl.load(beta_ptr + at_head).to(tl.float32)
        state_IC = state_IC * tl.exp(g_I)[:, None]
        u_C = beta * (v_C - tl.sum(k_I[:, None] * state_IC, 0))
        state_IC += k_I[:, None] * u_C[None, :]
        tl.store(u_ptr + at_head * VALUE + c, u_C, c < VALUE)
        tl.store(o_ptr + at_head * VALUE + c, tl.sum(q_I[:, None] * state_IC, 0), c < VALUE)
        if target >= 0:
            tl.store(aside_ptr + (target - known).to(tl.int64) * HEADS * KEY * VALUE + place_IC, state_IC, inside)
            tl.debug_barrier()  # a later chain of this lane may begin from it


@triton.jit(do_not_specialize=["known", "pending"])
def _relate_nodes(
    q_ptr: tl.tensor, beta_ptr: tl.tensor, k_ptr: tl.tensor, g_ptr: tl.tensor, seen_ptr: tl.tensor, lower_ptr: tl.tensor,
    weights_ptr: tl.tensor, start_ptr: tl.tensor,
    known: int, pending: int,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, NODES: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """One row, one head: the triangular matrix, the weights of outputs, and the decay since the committed state."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    m = tl.arange(0, NODES)
    held, new = m < pending, (m >= known) & (m < pending)
    at_all, at_new = row * pending + m, row * (pending - known) + m - known
    by_keys_MM = tl.zeros([NODES, NODES], tl.float32)
    by_queries_MM = tl.zeros([NODES, NODES], tl.float32)
    for begin in range(0, KEY, CHANNELS):
        i = begin + tl.arange(0, CHANNELS)
        inside = (i < KEY)[None, :]
        at_k, at_q = (at_all * KEY_HEADS + key_head) * KEY, (at_new * KEY_HEADS + key_head) * KEY
        k_MI = tl.load(k_ptr + at_k[:, None] + i[None, :], held[:, None] & inside, 0.0).to(tl.float32)
        q_MI = tl.load(q_ptr + at_q[:, None] + i[None, :], new[:, None] & inside, 0.0).to(tl.float32)
        by_keys_MM = tl.dot(k_MI, tl.trans(k_MI), by_keys_MM, input_precision=PRECISION)
        by_queries_MM = tl.dot(q_MI, tl.trans(k_MI), by_queries_MM, input_precision=PRECISION)
    at_MM = at_all[:, None] * pending + m[None, :]
    seen_MM = tl.load(seen_ptr + at_MM, held[:, None] & held[None, :], 0) != 0
    sight_MM = seen_MM.to(tl.float32)
    log_MM = sight_MM * tl.load(g_ptr + at_all * HEADS + head, held, 0.0).to(tl.float32)[None, :]
    between_MM = tl.exp(tl.dot(log_MM, tl.trans(1 - sight_MM), input_precision=PRECISION))
    between_MM = tl.where(seen_MM, between_MM, 0.0)
    beta_M = tl.load(beta_ptr + at_new * HEADS + head, new, 0.0).to(tl.float32)
    own = (row * HEADS + head) * NODES + m
    place_MM = own[:, None] * NODES + m[None, :]
    tl.store(start_ptr + own, tl.exp(tl.sum(log_MM, 1)))
    tl.store(lower_ptr + place_MM, tl.where(m[:, None] > m[None, :], beta_M[:, None] * between_MM * by_keys_MM, 0.0))
    tl.store(weights_ptr + place_MM, between_MM * by_queries_MM)


@triton.jit(do_not_specialize=["known", "pending"])
def _score_nodes(
    q_ptr: tl.tensor, v_ptr: tl.tensor, beta_ptr: tl.tensor, k_ptr: tl.tensor, u_ptr: tl.tensor, state_ptr: tl.tensor,
    lower_ptr: tl.tensor, weights_ptr: tl.tensor, start_ptr: tl.tensor, o_ptr: tl.tensor, new_u_ptr: tl.tensor,
    known: int, pending: int,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, NODES: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """All pending nodes of one row, one head, some columns. Rows of nodes that are known stay as they are."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    m, c = tl.arange(0, NODES), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    held, new, in_v = m < pending, (m >= known) & (m < pending), (c < VALUE)[None, :]
    at_all, at_new = row * pending + m, row * (pending - known) + m - known
    u_MC = tl.zeros([NODES, COLUMNS], tl.float32)
    o_MC = tl.zeros([NODES, COLUMNS], tl.float32)
    for begin in range(0, KEY, CHANNELS):
        i = begin + tl.arange(0, CHANNELS)
        inside = (i < KEY)[None, :]
        at_k, at_q = (at_all * KEY_HEADS + key_head) * KEY, (at_new * KEY_HEADS + key_head) * KEY
        k_MI = tl.load(k_ptr + at_k[:, None] + i[None, :], held[:, None] & inside, 0.0).to(tl.float32)
        q_MI = tl.load(q_ptr + at_q[:, None] + i[None, :], new[:, None] & inside, 0.0).to(tl.float32)
        at_IC = ((row * HEADS + head) * KEY + i[:, None]) * VALUE + c[None, :]
        state_IC = tl.load(state_ptr + at_IC, (i < KEY)[:, None] & in_v, 0.0)
        u_MC = tl.dot(k_MI, state_IC, u_MC, input_precision=PRECISION)
        o_MC = tl.dot(q_MI, state_IC, o_MC, input_precision=PRECISION)
    own = (row * HEADS + head) * NODES + m
    start_M = tl.load(start_ptr + own)
    at_MC = ((at_new * HEADS + head) * VALUE)[:, None] + c[None, :]
    beta_M = tl.load(beta_ptr + at_new * HEADS + head, new, 0.0).to(tl.float32)
    v_MC = tl.load(v_ptr + at_MC, new[:, None] & in_v, 0.0).to(tl.float32)
    at_u = ((at_all * HEADS + head) * VALUE)[:, None] + c[None, :]
    known_MC = tl.load(u_ptr + at_u, (m < known)[:, None] & in_v, 0.0).to(tl.float32)
    u_MC = known_MC + beta_M[:, None] * (v_MC - start_M[:, None] * u_MC)
    for node in range(known, pending):
        lower_M = tl.load(lower_ptr + ((row * HEADS + head) * NODES + node) * NODES + m)
        seen_C = tl.sum(lower_M[:, None] * u_MC, 0)
        u_MC = tl.where((m == node)[:, None], u_MC - seen_C[None, :], u_MC)
    weights_MM = tl.load(weights_ptr + own[:, None] * NODES + m[None, :])
    o_MC = tl.dot(weights_MM, u_MC, start_M[:, None] * o_MC, input_precision=PRECISION)
    tl.store(new_u_ptr + at_MC, u_MC, new[:, None] & in_v)
    tl.store(o_ptr + at_MC, o_MC, new[:, None] & in_v)
