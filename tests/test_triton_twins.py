"""Triton kernels compute what PyTorch computes: here in Triton's interpreter, and compiled for GPUs that need not be there."""

from __future__ import annotations

import functools
import io
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from families import tiny
from outrider import topology_report
from outrider.machine import machine_name
from outrider.mixers import gated_delta, linear, samples, twins
from outrider.mixers.chains import plan
from outrider.mixers.samples import Size
from outrider.models.factor_model import FactorTreeModel
from outrider.topology import Entry, measure, store
from outrider.ways import TOLERANCE, WAYS, difference, trouble, ways_of

pytest.importorskip("triton", reason="Triton is not installed (pip install triton); it has wheels for Linux only")

from outrider.mixers import triton_gated_delta

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = Size(2, 4, 5, 12)  # no power of two: blocks of kernels are never full
FORMS = twins.FORMS["gated delta"]


def tree(nodes: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [-1, *(rng.randrange(max(-1, node - 6), node) for node in range(1, nodes))][:nodes]


def seen(rows: list[list[int]], nodes: int) -> torch.Tensor:
    mask = torch.eye(nodes, dtype=torch.bool).repeat(len(rows), 1, 1)
    for row, parents in enumerate(rows):
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[row, node] |= mask[row, parent]
    return mask


def scored(maths: Any, form: str, state: torch.Tensor, x: gated_delta.Inputs, rows: list[list[int]]) -> Any:
    """Outputs and corrected values."""
    nodes = x.q_BNJK.shape[1]
    if form != "masked":
        return maths.chains(state, x, plan(rows, 0, nodes, CPU, together=form == "chains"))
    unknown = torch.full_like(x.v_BNHV, float("nan"))  # u of new nodes must not be read
    return maths.masked(state, x, linear.Factors(x.k_BNJK, unknown, x.g_BNHD), seen(rows, nodes))


def close(found: Any, wanted: Any, limit: float = 1e-5) -> None:
    for got, right in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32 and torch.isfinite(got).all()
        torch.testing.assert_close(got.double(), right.double(), atol=limit * float(right.abs().max()), rtol=0)


def as_pytorch(form: str, size: Size, rows: list[list[int]], x: gated_delta.Inputs, limit: float = 1e-5) -> Any:
    """The kernels' outputs and corrected values, if they are PyTorch's in float64; padding nodes stay finite."""
    state = samples.state("gated delta", size, len(rows), CPU)
    before = state.clone()
    found = scored(triton_gated_delta, form, state, x, rows)
    assert torch.equal(state, before)
    wanted = scored(gated_delta, form, state.double(), gated_delta.Inputs(*(t.double() for t in x)), rows)
    close(found, wanted, limit)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nodes", [1, 3, 16, 33])
def test_trees_of_any_number_of_nodes_are_scored_as_in_pytorch(nodes: int, form: str) -> None:
    torch.manual_seed(nodes)
    x = samples.delta_inputs(SMALL, 2, nodes, CPU)
    as_pytorch(form, SMALL, [tree(nodes), tree(max(1, nodes - 2), 1)], x)  # the second row ends in padding


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", samples.TREES)
def test_a_full_tree_is_scored_as_in_pytorch(kind: str, form: str) -> None:
    torch.manual_seed(1)
    as_pytorch(
        form, Size(1, 2, 16, 16), [samples.TREES[kind](64)], samples.delta_inputs(Size(1, 2, 16, 16), 1, 64, CPU)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [Size(16, 32, 128, 128), Size(8, 8, 256, 256)], ids=["qwen3-next", "1.3B"])
def test_real_sizes_are_scored_as_in_pytorch(size: Size, form: str) -> None:
    torch.manual_seed(2)
    as_pytorch(form, size, [[-1, 0, 0]], samples.delta_inputs(size, 1, 3, CPU))


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_inputs_meet_a_float32_state(form: str) -> None:
    torch.manual_seed(3)
    x = samples.delta_inputs(SMALL, 1, 7, CPU)
    as_pytorch(form, SMALL, [tree(7)], gated_delta.Inputs(*(t.bfloat16() for t in x)))


@pytest.mark.parametrize("form", twins.FORMS["gated delta per channel"])
def test_channels_that_decay_on_their_own_are_scored_as_in_pytorch(form: str) -> None:
    torch.manual_seed(4)
    as_pytorch(form, SMALL, [tree(9), tree(9, 1)], samples.per_channel_inputs(SMALL, 2, 9, CPU))


@pytest.mark.parametrize("form", FORMS)
def test_strong_decay_gives_numbers(form: str) -> None:
    """Ratios of decays would be 0 / 0, and sums of logs beyond -1000 lose the small differences behind them."""
    torch.manual_seed(5)
    x = samples.delta_inputs(SMALL, 1, 32, CPU)
    x.g_BNHD.mul_(60)
    x.g_BNHD[:, ::2] *= 1e-4  # weak decay behind strong decay
    as_pytorch(form, SMALL, [tree(32)], x, 2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_equal_keys_do_no_harm(form: str) -> None:
    """Powers of the triangular matrix would have entries of 1e17 here."""
    torch.manual_seed(6)
    size = Size(1, 1, 5, 12)
    x = samples.delta_inputs(size, 1, 64, CPU)
    x.k_BNJK[:], x.beta_BNH[:], x.g_BNHD[:] = x.k_BNJK[:, :1].clone(), 1, 0
    as_pytorch(form, size, [samples.chain(64)], x)


@pytest.mark.parametrize("form", FORMS)
def test_swapping_siblings_changes_no_node(form: str) -> None:
    torch.manual_seed(7)
    state, x = samples.state("gated delta", SMALL, 1, CPU), samples.delta_inputs(SMALL, 1, 7, CPU)
    order, rows = [0, 2, 1, 5, 6, 3, 4], [[-1, 0, 0, 1, 1, 2, 2]]  # both children of node 0, with their subtrees
    one = scored(triton_gated_delta, form, state, x, rows)
    other = scored(triton_gated_delta, form, state, gated_delta.Inputs(*(t[:, order] for t in x)), rows)
    close(other, [t[:, order] for t in one], 1e-6)


def test_nodes_behind_pending_nodes_read_their_factors() -> None:
    torch.manual_seed(8)
    parents = tree(10)
    state, x = samples.state("gated delta", SMALL, 1, CPU), samples.delta_inputs(SMALL, 1, 10, CPU)
    whole, whole_u = scored(gated_delta, "masked", state, x, [parents])
    u_BNHV = torch.full_like(x.v_BNHV, float("nan"))
    for a, b in ((0, 1), (1, 6), (6, 10)):
        part = gated_delta.Inputs(*(t[:, a:b] for t in x))
        factors = linear.Factors(x.k_BNJK[:, :b], u_BNHV[:, :b].clone(), x.g_BNHD[:, :b])
        o, u_BNHV[:, a:b] = triton_gated_delta.masked(state, part, factors, seen([parents], 10)[:, :b, :b])
        close([o, u_BNHV[:, a:b]], [whole[:, a:b], whole_u[:, a:b]])


def test_what_kernels_do_not_take_is_left_to_pytorch() -> None:
    for size, nodes, dtype in ((SMALL, 5, torch.float64), (Size(1, 1, 4, 4), 65, torch.float32)):
        state, x = samples.state("gated delta", size, 1, CPU), samples.delta_inputs(size, 1, nodes, CPU)
        state, x = state.to(dtype), gated_delta.Inputs(*(t.to(dtype) for t in x))
        for form in FORMS if dtype == torch.float64 else ("masked",):
            found, wanted = (scored(m, form, state, x, [tree(nodes)]) for m in (triton_gated_delta, gated_delta))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted))


# -- choosing them -----------------------------------------------------------------------------------------------------


@pytest.fixture
def as_if_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CPU with its interpreter passes for a GPU."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    missing = twins.missing
    monkeypatch.setattr(twins, "missing", lambda rule, device: "" if rule in twins.FORMS else missing(rule, device))
    trouble.cache_clear()
    yield
    trouble.cache_clear()


def test_reasons_are_given_where_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA" in twins.missing("gated delta", CPU)
    assert "no kernels for mamba-1" in twins.missing("mamba-1", GPU)
    assert "TRITON_INTERPRET" in twins.missing("gated delta", GPU)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert twins.missing("gated delta", GPU) == ""
    monkeypatch.setattr(twins.importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in twins.missing("gated delta", GPU)
    assert ways_of("gated delta", SMALL, CPU) == list(WAYS)


def test_kernels_are_measured_beside_pytorch(as_if_gpu: None) -> None:
    for rule, count in (("gated delta", 6), ("gated delta per channel", 5), ("mamba-2", 3)):
        ways = ways_of(rule, Size(1, 1, 4, 4), CPU)
        assert len(ways) == count and ways[:3] == list(WAYS)
        made = measure(rule, Size(1, 1, 4, 4), CPU, counts=(3,))
        assert all(set(by_nodes["3"]) == set(ways) for by_nodes in made.ms.values())


def test_doctor_measures_again_when_there_are_more_ways_and_says_why_there_are_not(
    as_if_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, out = Size(1, 1, 4, 4), io.StringIO()
    monkeypatch.setattr(topology_report, "STANDARD", (("gated delta", size), ("mamba-2", size)))
    monkeypatch.setattr(topology_report, "measure", functools.partial(measure, counts=(2,)))
    before = {kind: {"3": dict.fromkeys(WAYS, 1.0)} for kind in samples.TREES}
    store([Entry(machine_name(CPU), rule, size, before) for rule in ("gated delta", "mamba-2")])
    report = topology_report.examine_topology(CPU)
    delta, mamba = report["mixers"]
    assert (
        len(delta["ways"]) == 6 and delta["no_kernels"] is None and set(delta["ms"]["chain"]["2"]) == set(delta["ways"])
    )
    assert mamba["ways"] == list(WAYS) and "no kernels for mamba-2" in mamba["no_kernels"]
    assert set(mamba["ms"]["chain"]) == {"3"}
    topology_report.render_topology(report, Console(file=out, width=200))
    assert (
        "triton masked ms" in out.getvalue() and "no Triton kernels: there are no kernels for mamba-2" in out.getvalue()
    )


def test_kernels_that_err_are_not_used(as_if_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_gated_delta.masked

    def off(*args: Any) -> Any:
        o, u = right(*args)
        return o, u * (1 + 3 * TOLERANCE)

    def broken(*args: Any) -> Any:
        raise NotImplementedError("no such instruction\nand more")

    size = Size(1, 1, 4, 4)
    assert difference("gated delta", size, CPU) == ""
    monkeypatch.setattr(triton_gated_delta, "masked", off)
    assert "masked kernel is off by 3" in difference("gated delta", size, CPU)
    monkeypatch.setattr(triton_gated_delta, "chains", broken)
    reason = difference("gated delta", size, CPU)
    assert reason == "the serial kernel fails: NotImplementedError: no such instruction"
    assert ways_of("gated delta", size, CPU) == list(WAYS)


def test_a_check_leaves_random_numbers_as_they_were(as_if_gpu: None) -> None:
    torch.manual_seed(9)
    wanted = torch.rand(3)
    torch.manual_seed(9)
    ways_of("gated delta", Size(1, 1, 4, 4), CPU)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_a_model_scores_and_commits_with_kernels_as_without(family: str, form: str, as_if_gpu: None) -> None:
    def rounds(way: str) -> list[torch.Tensor]:
        target = FactorTreeModel(tiny(family))
        ((rule, size),) = target.recurrences()
        ms = {w: 1.0 if w == way else 2.0 for w in ways_of(rule, size, CPU)}
        store([Entry(machine_name(CPU), rule, size, {kind: {"4": ms} for kind in samples.TREES})])
        state = FactorTreeModel(tiny(family)).begin([[1, 2, 3]], 16)
        found = [state.extend([[4, 5, 6, 7]], [[-1, 0, 0, 1]])]
        state.commit([[0, 1, 3]])  # deferred: applied when the next round is scored
        found += [state.extend([[8, 9, 5]], [[-1, 0, 1]]), state.extend([[3]], [[1]])]
        committed = state.cache.states.committed(0)
        return found + [t for _, t in sorted(committed.items())]

    for got, wanted in zip(rounds(twins.PREFIX + form), rounds("chains"), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


# -- compiling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_as_they_are_launched(capability: int, tmp_path: Path) -> None:
    """The interpreter takes much that the compiler refuses."""
    code = Path(__file__).parent / "compile_kernels.py"
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, code, str(capability)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _ in made} == {"_step_lanes", "_relate_nodes", "_score_nodes"}
    assert all(int(shared) <= 48 * 1024 for _, _, shared in made)  # bytes that every GPU has for a program
