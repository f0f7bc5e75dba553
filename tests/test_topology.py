"""The way that scores a tree is the fastest one measured for its kind; without measurements a fixed rule decides."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from families import tiny
from helpers import target_of
from outrider import topology_report
from outrider.machine import machine_name
from outrider.mixers import samples
from outrider.mixers.rules import NAMES
from outrider.mixers.samples import Size
from outrider.models.factor_model import FactorTreeModel
from outrider.topology import Entry, Switch, kind_of, load_table, measure, store, time_ways
from outrider.ways import WAYS

CPU = torch.device("cpu")
SMALL, LARGE = Size(2, 4, 8, 8), Size(2, 4, 64, 64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def entry(rule: str, size: Size, fastest: dict[str, str], machine: str | None = None) -> Entry:
    """By number of nodes, the fastest way for all kinds of trees."""
    ms = {nodes: {way: 1.0 if way == best else 2.0 for way in WAYS} for nodes, best in fastest.items()}
    return Entry(machine or machine_name(CPU), rule, size, dict.fromkeys(samples.TREES, ms))


def nodes(count: int, depth: int, start: int = 0) -> Any:
    return SimpleNamespace(largest=count, depth=depth, start=start)


@pytest.mark.parametrize("count", [1, 2, 5, 16, 33])
def test_sample_trees_are_of_their_kind(count: int) -> None:
    for tree in samples.TREES.values():
        parents = tree(count)
        assert len(parents) == count and parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    depths: dict[str, int] = {}
    for kind, tree in samples.TREES.items():
        depth = [0] * count
        for node, parent in enumerate(tree(count)):
            depth[node] = depth[parent] + 1 if node else 1
        depths[kind] = max(depth)
        if count >= 16:
            assert kind_of(count, depths[kind]) == kind
    assert depths["chain"] == count


def test_the_table_decides_by_rule_size_kind_and_number_of_nodes() -> None:
    ms = {
        "chain": {"4": {"serial": 1.0, "chains": 2.0, "masked": 3.0}},
        "deep": {"4": {"serial": 3.0, "chains": 1.0, "masked": 2.0}},
        "bushy": {
            "4": {"serial": 3.0, "chains": 2.0, "masked": 1.0},
            "64": {"serial": 3.0, "chains": 1.0, "masked": 2.0},
        },
    }
    table = [
        Entry(machine_name(CPU), "gated delta", SMALL, ms),
        entry("gated delta", LARGE, {"8": "serial"}),
        entry("mamba-2", SMALL, {"8": "chains"}),
        entry("gated delta", SMALL, {"8": "serial"}, machine="another"),
    ]
    switch = Switch(CPU, table)
    assert switch("gated delta", nodes(6, 6), SMALL.numbers) == "serial"
    assert switch("gated delta", nodes(6, 4), SMALL.numbers) == "chains"
    assert switch("gated delta", nodes(6, 3), SMALL.numbers) == "masked"
    assert switch("gated delta", nodes(40, 3), SMALL.numbers) == "chains"
    assert switch("gated delta", nodes(6, 3), LARGE.numbers + 1) == "serial"
    assert switch("mamba-2", nodes(6, 3), LARGE.numbers) == "chains"
    # behind pending nodes nothing is stepped that does not have to be
    assert switch("mamba-2", nodes(6, 3, start=2), LARGE.numbers) == "masked"
    assert switch("mamba-1", nodes(6, 3, start=2), LARGE.numbers) == "chains"


def test_without_measurements_a_fixed_rule_decides() -> None:
    switch = Switch(CPU)
    assert switch("gated delta", nodes(1, 1), 4096) == "masked"
    assert switch("mamba-1", nodes(1, 1), 4096) == "chains"
    assert switch("gated delta", nodes(9, 3), 4096) == "masked"
    assert switch("gated delta per channel", nodes(8, 3), 4096) == "masked"
    assert switch("gated delta per channel", nodes(9, 3), 4096) == "chains"
    assert switch("mamba-1", nodes(3, 3), 4096) == "chains"
    assert Switch(CPU, [entry("gated delta", SMALL, {"8": "chains"}, machine="another")])(
        "gated delta", nodes(9, 3), 4096
    ) == ("masked")


def test_a_way_that_was_measured_but_is_gone_is_not_chosen() -> None:
    ms = {"8": {"triton masked": 0.5, "serial": 2.0, "chains": 1.0, "masked": 2.0}}
    switch = Switch(CPU, [Entry(machine_name(CPU), "gated delta", SMALL, dict.fromkeys(samples.TREES, ms))])
    assert switch("gated delta", nodes(8, 3), SMALL.numbers) == "chains"


def test_measurements_are_kept_and_replaced(cache: Path) -> None:
    store([entry("gated delta", SMALL, {"8": "serial"}), entry("mamba-2", SMALL, {"8": "serial"})])
    store([entry("gated delta", SMALL, {"8": "masked"})])
    assert len(load_table()) == 2
    assert Switch(CPU)("gated delta", nodes(8, 2), SMALL.numbers) == "masked"
    (cache / "topology.json").write_text('[{"machine": 3}]')
    assert load_table() == []
    (cache / "topology.json").write_text("no table")
    assert load_table() == []


@pytest.mark.parametrize("rule", NAMES)
def test_every_way_is_timed_for_every_rule(rule: str) -> None:
    made = measure(rule, SMALL, CPU, counts=(1, 5))
    assert set(made.ms) == set(samples.TREES)
    for by_nodes in made.ms.values():
        for ms in by_nodes.values():
            assert set(ms) == set(WAYS)
            assert all(0 < value < 1e3 for value in ms.values())
    assert set(time_ways(rule, SMALL, samples.bushy(4), CPU, ways=("masked",))) == {"masked"}


def watched(layers: Any) -> list[str]:
    """The ways in which layers will be run."""
    used: list[str] = []
    for layer in layers:
        inner = layer.recur
        layer.recur = lambda *args, inner=inner: used.append(args[-1]) or inner(*args)
    return used


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2", "mamba"])
def test_a_model_scores_trees_in_the_way_that_the_table_names(family: str) -> None:
    target = target_of(family)
    ((rule, size),) = target.recurrences()
    committed = target.begin([[1]]).cache.states.committed(0)
    assert {t.numel() for (kind, _, _), t in committed.items() if kind == "recurrent"} == {size.numbers}
    for way in WAYS:
        store([entry(rule, size, {"8": way})])
        state = FactorTreeModel(tiny(family)).begin([[1, 2, 3]], 16)
        used = watched(state.cache.states.layers.values())
        state.extend([[4, 5, 6, 7]], [[-1, 0, 0, 1]])
        assert used and set(used) == {way}


def test_doctor_measures_once_and_shows_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.cli import app

    monkeypatch.setattr(topology_report, "STANDARD", (("gated delta", SMALL), ("mamba-2", SMALL)))
    first = json.loads(CliRunner().invoke(app, ["doctor", "--topology", "--device", "cpu", "--json"]).stdout)
    assert [mixer["rule"] for mixer in first["topology"]["mixers"]] == ["gated delta", "mamba-2"]
    for mixer in first["topology"]["mixers"]:
        for kind, by_nodes in mixer["ms"].items():
            for count, ms in by_nodes.items():
                assert ms[mixer["choices"][kind][count]] == min(ms.values())
    monkeypatch.setattr(topology_report, "measure", lambda *args, **kwargs: pytest.fail("measured again"))
    shown = CliRunner().invoke(app, ["doctor", "--topology", "--device", "cpu"])
    assert shown.exit_code == 0 and "topology.json" in shown.stdout.replace("\n", "")
    assert "bushy" in shown.stdout


def test_doctor_reports_the_mixers_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("qwen3_next")
    (mixer,) = topology_report.examine_topology(CPU, target)["mixers"]
    assert mixer["rule"] == "gated delta" and mixer["size"] == "2/4 heads 8x8"
    nothing = topology_report.examine_topology(CPU, target_of("llama"))
    assert nothing["mixers"] == []
    out = io.StringIO()
    topology_report.render_topology(nothing, Console(file=out))
    assert "nothing to choose" in out.getvalue()
