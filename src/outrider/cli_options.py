"""Options that several commands share, and how they are read."""

from __future__ import annotations

import errno
import functools
import json as jsonlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.bench.tasks import JUDGING_TASKS

if TYPE_CHECKING:
    from outrider.api import Engine
    from outrider.drafters.base import Drafter
    from outrider.train.distil import DistilSettings
    from outrider.train.kinds import Plan

EVALUATION_TASKS = ",".join(JUDGING_TASKS)

Tasks = Annotated[str, typer.Option(help="Tasks (humaneval,gsm8k,mtbench,copy ...) and FILE.jsonl, joined by commas.")]
HeldOutTasks = Annotated[
    str, typer.Option(help="Tasks and FILE.jsonl, joined by commas; only their held-out prompts are used.")
]
Target = Annotated[str, typer.Option(help="Alias (see `outrider models`), hub id, folder or GGUF file.")]
DrafterName = Annotated[
    str,
    typer.Option(
        help="auto, off, ngram, head, hybrid, mamba, table, self:LAYERS, oracle:RATE, a drafter's folder, or a model like "
        "--target; 'a>b' asks b where a has nothing, 'a+b' merges both (in quotes)."
    ),
]
Data = Annotated[Path, typer.Option(help="A data set that `outrider data` made.")]
Out = Annotated[Path, typer.Option(help="Folder to write; a killed run goes on from what is there.")]
DType = Annotated[
    str | None, typer.Option(help="bf16, fp16, fp32 or fp64. Default: bf16 where the machine is good at it.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps ... Default: a GPU where there is one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: torch's choice.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")]
Exact = Annotated[bool, typer.Option("--exact", help="Insist on the same bits as plain decoding in bf16 too.")]
Budget = Annotated[
    str | None,
    typer.Option(
        help="Most memory for the target's weights, such as 2GB; the rest is read from the disk, layer by layer."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same run.")]
Kind = Annotated[str, typer.Option(help="head (reads the target's hidden states), mamba or llama (stand-alone).")]
Core = Annotated[str | None, typer.Option(help="Of a head: attention (default), ssm or hybrid.")]
Minutes = Annotated[
    float,
    typer.Option(help="Budget of training, in minutes of wall clock; hidden states and measuring come on top."),
]
Steps = Annotated[int | None, typer.Option(help="Unrolled steps of a head's training. Default: 4.")]
Ramp = Annotated[
    float | None,
    typer.Option(help="Share of the budget over which a head's unrolled steps grow from one to all. Default: 0.6."),
]
Loss = Annotated[str, typer.Option(help="kl, reverse_kl, tv (total variation) or acceptance.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
DraftVocab = Annotated[
    str | None,
    typer.Option(
        help="Most frequent tokens that are drafted; more than there are takes all. Default: 12k, or those of --init."
    ),
]
OptimizerName = Annotated[str, typer.Option(help="Of matrices: muon or adamw; all else has adamw.")]
Neurons = Annotated[
    int | None, typer.Option(help="Feed-forward neurons of every block; with --init a Mamba or head grows.")
]
StateSize = Annotated[
    int | None, typer.Option(help="State size of a fresh Mamba mixer: what it can remember. Default: 32, in a head 64.")
]
LearnPrompts = Annotated[bool, typer.Option("--prompts", help="Learn the tokens of prompts too, not only answers.")]
BatchTokens = Annotated[int, typer.Option(help="Tokens of a training batch.")]
Taps = Annotated[
    str, typer.Option(help="Target layers that a head reads, such as 7,17,29; the last must be the last layer.")
]
Layers = Annotated[int | None, typer.Option(help="Blocks of a fresh stand-alone drafter.")]
Init = Annotated[
    str | None,
    typer.Option(
        help="Folder to start from: a drafter to train on, or a pruned model. A Mamba grows to --layers, --neurons and --state."
    ),
]
HeldOut = Annotated[
    str, typer.Option(help="Tasks and FILE.jsonl, on whose held-out prompts acceptance is predicted, joined by commas.")
]
Every = Annotated[float, typer.Option(help="Seconds of training between evaluations, each with a checkpoint.")]
Patience = Annotated[int, typer.Option(help="Stop after this many evaluations without gain; 0 never does.")]


def made_folder(path: Path | None) -> Path | None:
    """A folder to write into, made at once: nobody should measure for minutes to read that it cannot be."""
    if path is not None:
        from outrider.models.files import check_writable

        check_writable(path)
        path.mkdir(parents=True, exist_ok=True)
    return path


def file_in_folder(path: Path | None) -> Path | None:
    """A file to write, whose folder is made at once."""
    if path is not None:
        made_folder(path.parent)
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise ValueError(f"{path} cannot be written as a file; give another path")
    return path


OutFolder = Annotated[Path | None, typer.Option(help="Folder for the JSON and the pictures.", callback=made_folder)]
OutPicture = Annotated[Path | None, typer.Option(help="Write a picture to this PNG file.", callback=file_in_folder)]
OutFile = Annotated[Path | None, typer.Option(help="Write the JSON to this file too.", callback=file_in_folder)]


def refuse_given(context: typer.Context, options: str, why: str) -> None:
    """Refuse options that were written and would do nothing.

    Args:
        context: of the command.
        options: their Python names, with spaces between.
        why: the end of the sentence that begins with the option.

    Raises:
        ValueError: when one of them was written.
    """
    for name in options.split():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            written = next(option.opts[0] for option in context.command.params if option.name == name)
            raise ValueError(f"{written} {why}")


def check_asked(shape: str, options: Mapping[str, Any]) -> None:
    """Read a shape and options of a text as if it were to be written.

    Raises:
        ValueError: for what would be refused whatever the model.
    """
    from outrider.options import options_from
    from outrider.tree import TUNED, parse_shape

    options_from(options)
    if shape not in TUNED:
        parse_shape(shape)


def parse_count(text: str, what: str) -> int:
    """A number such as 500k or 2M.

    Raises:
        ValueError: when it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    if not match:
        raise ValueError(f"{what} {text!r} is not a number; write for example 800, 500k or 2M")
    return int(float(match[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[match[2].lower()])


def load_pair(
    target: str,
    drafter: str,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    trust: bool,
    exact: bool = False,
    budget: str | None = None,
) -> Engine:
    from outrider.api import load

    loading: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust, "memory_budget": budget}
    return load(target, drafter, threads=threads, exact=exact, **loading)


def load_drafters(engine: Engine, names: list[str], trust: bool) -> dict[str, Drafter]:
    """Drafters for an engine's target by name, without "off"."""
    from outrider.drafters.catalog import make_drafter

    loading = {"dtype": engine.dtype, "device": engine.model.device, "trust_remote_code": trust}
    made = {name: make_drafter(name, engine.target, engine.tokenizer, **loading) for name in names}
    return {name: drafter for name, drafter in made.items() if drafter is not None}


def print_json(value: Any) -> None:
    typer.echo(jsonlib.dumps(value, ensure_ascii=False))


def write_json(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(jsonlib.dumps(value, indent=1, ensure_ascii=False) + "\n")


def load_target(target: str, dtype: str | None, device: str | None, threads: int | None, trust: bool) -> Engine:
    return load_pair(target, "off", dtype, device, threads, trust)


def report(found: dict[str, Any], text: str, json: bool) -> None:
    if json:
        typer.echo(jsonlib.dumps(found, ensure_ascii=False, default=str))
    else:
        Console(highlight=False, soft_wrap=True).print(text, markup=False)


def settings_from(
    kind: str,
    minutes: float,
    steps: int | None,
    ramp: float | None,
    loss: str,
    rate: float,
    draft_vocab: str | None,
    batch_tokens: int,
    seed: int,
    optimizer: str = "muon",
    prompts: bool = False,
) -> DistilSettings:
    from outrider.train.distil import DistilSettings

    count = None if draft_vocab is None else parse_count(draft_vocab, "--draft-vocab")
    if count == 0:
        raise ValueError("--draft-vocab 0 leaves nothing to draft; give 1 or more")
    _heads_only(kind, steps=steps, ramp=ramp)
    steps = (4 if steps is None else steps) if kind == "head" else 1  # others read nothing of the target to unroll
    ramp = 0.6 if ramp is None else ramp
    return DistilSettings(minutes, steps, ramp, loss, rate, batch_tokens, count, seed, optimizer, prompts)


def _heads_only(kind: str, **given: Any) -> None:
    """Refuse options that nothing but a head listens to."""
    names = [f"--{name}" for name, value in given.items() if value not in (None, "")]
    if names and kind != "head":
        raise ValueError(f"{' and '.join(names)}: for --kind head alone; leave that out for --kind {kind}")


def plan_from(
    kind: str,
    core: str | None,
    taps: str,
    layers: int | None,
    init: str | None,
    held_out: str,
    neurons: int | None = None,
    state: int | None = None,
) -> Plan:
    from outrider.models.feature_head import CORES
    from outrider.train.kinds import KINDS, Plan

    given, core = core, core or "attention"
    for value, allowed, name in ((kind, KINDS, "--kind"), (core, CORES, "--core")):
        if value not in allowed:
            raise ValueError(f"{name} {value!r} is unknown; use {', '.join(allowed)}")
    _heads_only(kind, core=given, taps=taps)
    for name, size in (("--layers", layers), ("--neurons", neurons), ("--state", state)):
        if size is not None and size < 1:
            raise ValueError(f"{name} {size} is no size; give 1 or more")
    fixed = init is not None and kind != "mamba"  # a Mamba grows, a head only in width
    if layers is not None and (kind == "head" or fixed):
        raise ValueError("--layers is for fresh drafters of kind mamba or llama, or a Mamba that grows; leave it out")
    if neurons is not None and fixed and kind != "head":
        raise ValueError("--neurons is for fresh drafters, or a Mamba or head that grows; leave it out")
    if state is not None and (fixed or kind == "llama" or (kind, core) == ("head", "attention")):
        raise ValueError("--state is for fresh drafters with a Mamba mixer, or a Mamba that grows; leave it out")
    if taps and not re.fullmatch(r"\d+(,\d+)*", taps):
        raise ValueError(f"--taps {taps!r} is not a list of layers; write for example 7,17,29")
    chosen = tuple(int(layer) for layer in taps.split(",")) if taps else ()
    tasks = tuple(name.strip() for name in held_out.split(",") if name.strip())
    return Plan(kind, core, chosen, layers, neurons, init, tasks, state)


def writing(command: Callable[..., None]) -> Callable[..., None]:
    """A disk that is full or not ours is the user's to mend, and told in one sentence."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except OSError as error:
            where = error.filename or kwargs.get("out") or "the output folder"
            advice = "free some space or give another folder" if error.errno == errno.ENOSPC else "give another folder"
            raise ValueError(f"{where} cannot be read or written ({error.strerror or error}); {advice}") from error

    return run
