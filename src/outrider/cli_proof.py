"""Commands that hold promises to account: `bench choice`, `bench hostile`, `bench forecast`, `bench replay`, `bench rates`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.cli_options import (
    EVALUATION_TASKS,
    Device,
    DrafterName,
    DType,
    Json,
    OutFile,
    OutFolder,
    Target,
    Tasks,
    Threads,
    Trust,
    file_in_folder,
    load_drafters,
    load_pair,
    load_target,
    print_json,
    refuse_given,
    write_json,
)

SHAPES = (
    "chain1,chain2,chain4,chain7,2x2x1,3x2x1x1,chain2@0.08~15,chain4@0.08~15,2x2x1@0.08~15,2x2x1x1x1@0.08~15,"
    "best7x8@0.05+0.2~7"
)
HeldOut = Annotated[
    bool, typer.Option("--held-out", help="Only prompts that no drafter of the workshop is trained on.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Seed when sampling, and of random prompts.")]


def register(bench: typer.Typer) -> None:
    """Add the commands."""
    for command in (choice, hostile, forecast, replay, rates):
        bench.command()(command)


def _prompts(tasks: str, limit: int, held_out: bool = False) -> list[Any]:
    from outrider.bench.tasks import load_tasks
    from outrider.train.evaluate import held_out_prompts

    return held_out_prompts(tasks, limit) if held_out else load_tasks(tasks, limit)


def _told(value: dict[str, Any], out: Path | None, json: bool) -> bool:
    """Write the JSON where it is wanted; whether people are still to be told."""
    if out is not None:
        write_json(value, out)
    if json:
        print_json(value)
    return not json


def choice(
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    tasks: Tasks = "humaneval,gsm8k,mtbench,copy",
    held_out: HeldOut = False,
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    shapes: Annotated[str, typer.Option(help="Fixed shapes, joined by commas.")] = SHAPES,
    repeat: Annotated[int, typer.Option(help="Times that every method runs every prompt.")] = 1,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    out: OutFile = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Compare "auto" with the best fixed shape of each task in hindsight, and with the best single one for the mix."""
    from outrider.bench.choice import measure_choice, render
    from outrider.bench.runner import parse_methods
    from outrider.progress import progress

    prompts = _prompts(tasks, limit, held_out)
    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code)
    with progress("bench choice", quiet=json) as tell:
        options: dict[str, Any] = {"repeat": repeat, "temperature": temperature, "seed": seed, "progress": tell}
        found = measure_choice(engine, prompts, parse_methods(shapes), max_new_tokens, **options)
    if _told(found.to_json(), out, json):
        render(found, Console())


def hostile(
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    tasks: Tasks = "mtbench,gsm8k",
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 256,
    delay: Annotated[
        float, typer.Option(help="Milliseconds that the slow drafter takes longer for every level.")
    ] = 30.0,
    seed: Seed = 0,
    out: OutFile = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Show what "auto" costs where speculation cannot pay: random text, drafters that are always wrong, or slow."""
    from outrider.bench.hostile import PROMISE, hostile_cases, measure_hostile, render
    from outrider.bench.report import provenance
    from outrider.bench.runner import engine_facts
    from outrider.progress import progress

    prompts = _prompts(tasks, limit)
    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code)
    cases = hostile_cases(engine, [prompt.encode(engine) for prompt in prompts], delay / 1e3, seed)
    with progress("bench hostile", quiet=json) as tell:
        measure_hostile(engine, cases, max_new_tokens, seed=seed, tell=tell)
    value = {"promise": PROMISE, "cases": [case.to_json() for case in cases]}
    if _told(value | {"provenance": provenance() | engine_facts(engine)}, out, json):
        render(cases, Console())


def forecast(
    drafter: Annotated[
        list[str] | None, typer.Option(help="As for `plan`; repeatable. Default: ngram>head, head, table.")
    ] = None,
    target: Target = "smollm2-135m",
    tasks: Tasks = EVALUATION_TASKS,
    limit: Annotated[int, typer.Option(help="Prompts of each task; half are measured, half are run.")] = 12,
    seconds: Annotated[float, typer.Option(help="Time for measuring a pair.")] = 40.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    out: OutFile = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Compare what `plan` predicts for some pairs with what they then do, on other prompts."""
    from outrider.bench.forecast import PROMISE, render
    from outrider.bench.forecast import forecast as compare
    from outrider.bench.report import provenance
    from outrider.bench.runner import engine_facts
    from outrider.progress import progress

    prompts = _prompts(tasks, limit)
    engine = load_target(target, dtype, device, threads, trust_remote_code)
    drafters = load_drafters(engine, drafter or ["ngram>head", "head", "table"], trust_remote_code)
    with progress("bench forecast", quiet=json) as tell:
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        found = compare(engine, drafters, prompts, seconds=seconds, tell=tell, **options)
    value = {"promise": PROMISE, "pairs": [one.to_json() for one in found]}
    if _told(value | {"provenance": provenance() | engine_facts(engine)}, out, json):
        render(found, Console())


def replay(
    context: typer.Context,
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    tasks: Tasks = "humaneval,gsm8k,mtbench,copy",
    held_out: HeldOut = False,
    limit: Annotated[int, typer.Option(help="Prompts of each task.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    shapes: Annotated[str, typer.Option(help="Fixed shapes, joined by commas.")] = SHAPES,
    passes: Annotated[
        str, typer.Option(help="Milliseconds of passes by rows, rows:ms, joined by commas.")
    ] = "1:10.6,2:11.4,8:12.4,9:19,16:20.2,17:30,24:31.8",
    level: Annotated[float, typer.Option(help="Milliseconds of a level of the drafter.")] = 0.95,
    proposal: Annotated[float, typer.Option(help="Milliseconds of a proposal besides.")] = 0.65,
    noise: Annotated[float, typer.Option(help="Spread of all times, as a share.")] = 0.03,
    seeds: Annotated[int, typer.Option(help="Times that all is played.")] = 3,
    tracks: Annotated[Path | None, typer.Option(help="File of recorded texts; written if it is not there.")] = None,
    out: OutFile = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Record texts with all that could have been drafted, and play them again at given prices: what choosing alone changes."""
    from outrider.bench import replay as again
    from outrider.bench.report import provenance
    from outrider.bench.runner import engine_facts, parse_methods
    from outrider.progress import progress
    from outrider.tree import parse_shape

    if tracks is not None and tracks.exists():
        refuse_given(
            context, "tasks held_out limit max_new_tokens", f"is for a recording, and {tracks} is one; leave it out"
        )
    elif tracks is not None:
        file_in_folder(tracks)
    methods = parse_methods(shapes)
    for method in methods:
        parse_shape(method)
    if seeds < 1:
        raise ValueError(f"--seeds {seeds} plays nothing; give 1 or more")
    prices = again.Prices(again.parse_prices(passes), level, proposal, noise=noise)
    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code)
    if tracks is not None and tracks.exists():
        texts = again.load(tracks, engine)
    else:
        with progress("bench replay", quiet=json) as tell:
            texts = again.record(engine, _prompts(tasks, limit, held_out), max_new_tokens, tell)
        if tracks is not None:
            again.save(texts, tracks, engine)
    turns = again.replay(texts, engine.drafter, again.methods_of(engine, methods), prices, seeds)
    if _told({"played": again.to_json(turns), "provenance": provenance() | engine_facts(engine)}, out, json):
        again.render(turns, Console())


def rates(
    target: Target = "smollm2-135m",
    rates: Annotated[
        str, typer.Option(help="Chances that a drafted token is right, joined by commas.")
    ] = "0.3,0.4,0.5,0.6,0.7,0.8,0.9,1",
    shapes: Annotated[str, typer.Option(help="chain3, 3x2x2, auto ..., joined by commas.")] = "chain1,chain3,chain7",
    limit: Annotated[int, typer.Option(help="Random prompts of 64 tokens.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    out: OutFolder = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Draw the speed-up over plain decoding against the acceptance rate, with drafts of known quality that cost nothing."""
    from outrider.bench.rates import measure_rates, plot, render, to_json
    from outrider.bench.report import provenance
    from outrider.bench.runner import engine_facts, parse_methods
    from outrider.progress import progress

    try:
        chances = [float(text) for text in rates.split(",")]
    except ValueError:
        raise ValueError(f"--rates {rates!r} are no numbers; write for example 0.3,0.6,0.9") from None
    chosen = parse_methods(shapes)
    engine = load_target(target, dtype, device, threads, trust_remote_code)
    with progress("bench rates", quiet=json) as tell:
        options: dict[str, Any] = {"prompts": limit, "temperature": temperature, "seed": seed, "tell": tell}
        points = measure_rates(engine, chances, chosen, max_new_tokens, **options)
    found = to_json(points) | {
        "provenance": provenance() | engine_facts(engine) | {"drafter": "oracle", "way": engine.way.way}
    }
    if out is not None:
        plot(points, out / "rates.png")
    if _told(found, out and out / "rates.json", json):
        render(points, Console())
