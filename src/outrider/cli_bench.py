"""Commands that measure and prove: `certify`, and `bench speed`, `peers`, `offload`, `round`, `mixers`, `context`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.cli_options import (
    EVALUATION_TASKS,
    Budget,
    Device,
    DrafterName,
    DType,
    Exact,
    Json,
    OutFolder,
    OutPicture,
    Target,
    Tasks,
    Threads,
    Trust,
    load_drafters,
    load_pair,
    parse_count,
    print_json,
    write_json,
)

OWN_METHODS = ("transformers", "transformers-lookup", "plain", "auto")


def register(app: typer.Typer, bench: typer.Typer) -> None:
    """Add the commands."""
    app.command()(certify)
    bench.command()(speed)
    bench.command()(peers)
    bench.command()(offload)
    bench.command("round")(round_)
    bench.command()(mixers)
    bench.command()(context)


def certify(
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    prompts: Tasks = EVALUATION_TASKS,
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="For the sampled checks.")] = 0.7,
    samples: Annotated[int, typer.Option(help="Draws for the exact-law test of mss.")] = 400,
    shape: Annotated[list[str] | None, typer.Option(help="Shapes to try; repeatable.")] = None,
    rules: Annotated[str, typer.Option(help="What to prove: greedy, coupled, mss.")] = "greedy,coupled,mss",
    seed: Annotated[int, typer.Option(help="Seed of the sampled checks.")] = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    exact: Exact = False,
    json: Json = False,
) -> None:
    """Prove on your own pair that speculation changes nothing. Exit 0: certified; 1: not, with the evidence."""
    from outrider.bench.certify import DEFAULT_SHAPES
    from outrider.bench.certify import certify as prove
    from outrider.bench.tasks import load_tasks
    from outrider.progress import progress

    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code, exact)
    with progress("certify", quiet=json) as tell:
        certificate = prove(
            engine,
            load_tasks(prompts, limit),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            samples=samples,
            seeds=(seed,),
            shapes=tuple(shape) if shape else DEFAULT_SHAPES,
            rules=tuple(rules.split(",")),
            progress=tell,
        )
    if json:
        print_json(certificate.to_json())
    else:
        certificate.render(Console())
    raise typer.Exit(0 if certificate.certified else 1)


def speed(
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    tasks: Annotated[
        str,
        typer.Option(help="humaneval, gsm8k, mtbench, copy, hellaswag, truthfulqa and FILE.jsonl, joined by commas."),
    ] = "humaneval,gsm8k,mtbench,copy",
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    methods: Annotated[
        str, typer.Option(help="transformers, transformers-lookup, plain, auto and shapes like chain5 or 3x2x2.")
    ] = ",".join(OWN_METHODS),
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only prompts that no drafter of the workshop is trained on.")
    ] = False,
    repeat: Annotated[int, typer.Option(help="Times that every method runs every prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed when sampling.")] = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    exact: Exact = False,
    memory_budget: Budget = None,
    json: Json = False,
) -> None:
    """Compare decoding methods prompt by prompt, and check that all write the same text."""
    from outrider.bench.report import render, to_json
    from outrider.bench.runner import parse_methods, run_speed
    from outrider.bench.tasks import load_tasks
    from outrider.progress import progress
    from outrider.train.evaluate import held_out_prompts

    chosen = parse_methods(methods)
    prompts = held_out_prompts(tasks, limit) if held_out else load_tasks(tasks, limit)
    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code, exact, memory_budget)
    with progress("bench speed", quiet=json) as tell:
        report = run_speed(
            engine,
            prompts,
            chosen,
            max_new_tokens,
            repeat=repeat,
            temperature=temperature,
            seed=seed,
            progress=tell,
        )
    if json:
        print_json(to_json(report, limit=limit))
    else:
        render(report, Console())


def offload(
    memory_budget: Annotated[
        str, typer.Option(help="Most memory for the target's weights, less than they need, such as 200MB.")
    ],
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    tasks: Tasks = EVALUATION_TASKS,
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    methods: Annotated[str, typer.Option(help="plain, and auto or shapes like chain5 or 3x2x2.")] = "plain,auto",
    repeat: Annotated[int, typer.Option(help="Times that every method runs every prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed when sampling.")] = 0,
    dtype: DType = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Tell what speculation brings on a target that is streamed from the disk, against its acceptance length."""
    from outrider.bench.offload import measure, render, to_json
    from outrider.bench.runner import parse_methods
    from outrider.bench.tasks import load_tasks
    from outrider.models.streaming import streaming
    from outrider.progress import progress

    chosen, prompts = parse_methods(methods), load_tasks(tasks, limit)
    engine = load_pair(target, drafter, dtype, "cpu", threads, trust_remote_code, budget=memory_budget)
    with progress("bench offload", quiet=json) as tell:
        sampling: dict[str, Any] = {"temperature": temperature, "seed": seed}
        report, found = measure(engine, prompts, chosen, max_new_tokens, repeat, progress=tell, **sampling)
    if json:
        print_json(to_json(report, found, limit))
    elif streamed := streaming(engine.model):
        render(found, streamed, Console())


def peers(
    folder: Annotated[
        Path, typer.Argument(help="Holds a virtual environment for each peer: vllm, economize, flashspec, xllamacpp.")
    ],
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    tasks: Tasks = EVALUATION_TASKS,
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96,
    methods: Annotated[
        str | None, typer.Option(help="As of `bench speed`, and vllm-ngram and the like. Default: all.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only prompts that no drafter of the workshop is trained on.")
    ] = False,
    repeat: Annotated[int, typer.Option(help="Times that every method runs every prompt.")] = 1,
    out: OutFolder = None,
    dtype: DType = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Compare with other libraries, greedy, on the CPU, all in one run; docs/peers.md tells how to install them."""
    from outrider.bench.peers import PEERS, run_against_peers
    from outrider.bench.peers_report import plot, render
    from outrider.bench.report import to_json
    from outrider.bench.runner import parse_methods
    from outrider.bench.tasks import load_tasks
    from outrider.progress import progress
    from outrider.train.evaluate import held_out_prompts

    everything = [*OWN_METHODS, *(name for peer in PEERS for name in peer.configurations)]
    chosen = everything if methods is None else parse_methods(methods)
    prompts = held_out_prompts(tasks, limit) if held_out else load_tasks(tasks, limit)
    engine = load_pair(target, drafter, dtype, "cpu", threads, trust_remote_code)
    with progress("bench peers", quiet=json) as tell:
        report = run_against_peers(
            engine, target, prompts, chosen, folder, max_new_tokens, repeat=repeat, progress=tell
        )
    found = to_json(report, limit=limit)
    if out is not None:
        write_json(found, out / "peers.json")
        plot(report, out / "peers.png")
    if json:
        print_json(found)
    else:
        render(report, Console())


def round_(
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    tasks: Tasks = EVALUATION_TASKS,
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96,
    shape: Annotated[str, typer.Option(help="auto, off, chain5, 3x2x2 ...")] = "auto",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed when sampling.")] = 0,
    out: OutFolder = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Tell where the milliseconds of a round go: drafting, verification, sampling, commit, Python."""
    from outrider.bench.profile import plot, profile_rounds, render
    from outrider.bench.tasks import load_tasks
    from outrider.progress import progress

    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code)
    prompts = [prompt.encode(engine) for prompt in load_tasks(tasks, limit)]
    with progress("bench round", quiet=json) as tell:
        options: dict[str, Any] = {"shape": shape, "temperature": temperature, "seed": seed}
        found = profile_rounds(engine, prompts, max_new_tokens, tell, **options)
    if out is not None:
        write_json(found.to_json(), out / "round.json")
        plot(found, out / "round.png")
    if json:
        print_json(found.to_json())
    else:
        render(found, Console())


def mixers(
    repeat: Annotated[int, typer.Option(help="Times that everything is measured; the best counts.", min=1)] = 20,
    layers: Annotated[int, typer.Option(help="Layers that commits are measured over.", min=1)] = 8,
    plot: OutPicture = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure how recurrent layers score trees and commit, against replaying paths and tokens."""
    import torch

    from outrider.bench import mixers_report
    from outrider.bench.mixers import run_mixers
    from outrider.models.loading import pick_device
    from outrider.progress import progress

    if threads is not None:
        torch.set_num_threads(threads)
    with progress("bench mixers", quiet=json) as tell:
        report = run_mixers(pick_device(device), repeat, layers=layers, tell=tell)
    if plot is not None:
        mixers_report.plot(report, plot)
    if json:
        print_json(report)
    else:
        mixers_report.render(report, Console())


def context(
    drafter: Annotated[
        list[str] | None, typer.Option(help="A head, a mamba or a model; repeatable. Default: the target's own rounds.")
    ] = None,
    target: Target = "smollm2-135m",
    lengths: Annotated[str, typer.Option(help="Tokens of the contexts, joined by commas.")] = "128,1k,4k,8k",
    depth: Annotated[int, typer.Option(help="Levels of the chain that is drafted.")] = 5,
    repeats: Annotated[int, typer.Option(help="Times that each drafts; the median counts.")] = 15,
    out: OutFolder = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Tell what the target's rounds, or drafting, cost as the text grows: milliseconds, and memory of states."""
    from outrider.bench import context as drafting
    from outrider.bench import context_rounds as scoring
    from outrider.bench.report import provenance
    from outrider.bench.runner import engine_facts
    from outrider.progress import progress

    wanted = [parse_count(text, "--lengths") for text in lengths.split(",")]
    engine = load_pair(target, "off", dtype, device, threads, trust_remote_code)
    measured: Any
    with progress("bench context", quiet=json) as tell:
        if drafter:
            shown: Any = drafting
            measured = drafting.measure(load_drafters(engine, drafter, trust_remote_code), wanted, depth, repeats, tell)
        else:
            shown = scoring
            measured = scoring.measure_rounds(engine.target, wanted, depth, repeats, tell)
    found = shown.to_json(measured, depth) | {"provenance": provenance() | engine_facts(engine)}
    if out is not None:
        write_json(found, out / "context.json")
        shown.plot(measured, depth, out / "context.png")
    if json:
        print_json(found)
    else:
        shown.render(measured, depth, Console())
