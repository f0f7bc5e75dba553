"""`outrider bench mixers`: what it times is the same work, and its figures follow from its times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.bench import mixers
from outrider.bench.mixers import _Scored, cases, run_mixers
from outrider.cli import app
from outrider.machine import machine_name
from outrider.mixers.samples import Size
from outrider.topology import Entry, store
from outrider.ways import WAYS

CPU = torch.device("cpu")
SMALL = {"one": Size(2, 4, 8, 8), "two": Size(2, 2, 16, 8)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def depths(parents: list[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def test_the_trees_are_those_of_the_paper() -> None:
    trees = cases()
    for name, (top, depth, count) in {"deep": (2, 12, 16), "bushy": (4, 4, 32)}.items():
        parents = trees[name]
        assert len(parents) == count and max(depths(parents)) == depth
        assert max(parents.count(node) for node in range(count)) <= top
        assert all(parent < node for node, parent in enumerate(parents))
    assert trees["chain"] == list(range(-1, 7))
    assert max(map(len, trees.values())) == 64
    assert trees == cases()


@pytest.mark.parametrize("case", cases())
def test_every_way_and_the_replay_compute_the_same(case: str) -> None:
    torch.manual_seed(0)
    scored = _Scored(SMALL["one"], cases()[case], CPU)
    wanted = scored.replay()
    for way in WAYS:
        torch.testing.assert_close(scored.score(way), wanted, atol=1e-4, rtol=1e-4)


def test_figures_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    # times as if the clock stood in a table: every way has its own, masked is the fastest
    fixed = {
        "serial": 3.0,
        "chains": 2.0,
        "masked": 1.0,
        "replay": 4.0,
        "factors": 1.0,
        "immediate": 6.0,
        "deferred": 5.0,
    }
    monkeypatch.setattr(mixers, "best_of", lambda tasks, repeat: {name: fixed[name] for name in tasks})
    ms: Any = {kind: {"8": {"serial": 9.0, "chains": 1.0, "masked": 2.0}} for kind in ("chain", "deep", "bushy")}
    store([Entry(machine_name(CPU), "gated delta", SMALL["one"], ms)])
    report = run_mixers(CPU, 1, SMALL, layers=2)
    assert len(report["verify"]) == 2 * len(cases())
    for row in report["verify"]:
        assert row["chosen"] == "chains"
        assert row["speedup_over_replay"] == 2.0
        assert row["best_over_replay"] == 4.0
        assert row["chosen_over_best"] == 2.0
    commit = report["commit"]
    assert commit["factors_over_replay"] == 4.0
    assert commit["deferred_over_immediate"] == 1.2
    # float32: k of 2 heads, u of 4, a decay of each; bfloat16: the convolution's inputs
    channels = 2 * 2 * 8 + 4 * 8
    assert commit["bytes_per_node"] == 4 * (2 * 8 + 4 * 8 + 4) + 2 * channels
    assert commit["dense_bytes_per_node"] == 4 * 4 * 8 * 8 + 2 * 3 * channels
    assert report["provenance"]["table"] == "measured"


def test_the_command_reports_prints_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "MIXERS", SMALL)
    monkeypatch.setattr(mixers, "WIDTH", 32)
    picture = tmp_path / "new" / "mixers.png"
    options = ["bench", "mixers", "--repeat", "1", "--layers", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, [*options, "--json", "--plot", str(picture)])
    report = json.loads(done.stdout)
    assert {row["case"] for row in report["verify"]} >= {"deep", "bushy", "chain"}
    assert all(row["speedup_over_replay"] > 0 and set(row["ms"]) == {*WAYS, "replay"} for row in report["verify"])
    assert {"factors_over_replay", "deferred_over_immediate", "bytes_per_node"} <= set(report["commit"])
    assert report["provenance"]["table"] == "static"
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 0 and "bushy" in shown.stdout and "deferred" in shown.stdout
