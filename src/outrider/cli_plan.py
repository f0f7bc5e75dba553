"""Commands about choosing shapes: `plan`, `prior`, and `bench regret`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli_options import (
    EVALUATION_TASKS,
    Budget,
    Device,
    DrafterName,
    DType,
    HeldOutTasks,
    Json,
    OutFolder,
    Target,
    Tasks,
    Threads,
    Trust,
    load_pair,
    made_folder,
    print_json,
    refuse_given,
    report,
    write_json,
    writing,
)

MOST_PROMPTS = 48


def register(app: typer.Typer, bench: typer.Typer) -> None:
    """Add the commands."""
    app.command()(plan)
    app.command()(writing(prior))
    bench.command()(regret)


def plan(
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Another drafter: latency=0.5x or 2ms (a level), acceptance=0.8 or +0.1, or both; repeatable."
        ),
    ] = None,
    prompts: Tasks = EVALUATION_TASKS,
    seconds: Annotated[float, typer.Option(help="Time for measuring.")] = 40.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed when sampling.")] = 0,
    out: OutFolder = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    memory_budget: Budget = None,
    json: Json = False,
) -> None:
    """Measure a pair and tell what speculation will bring, with which shape, and when it would not pay."""
    from outrider.bench import plan_report
    from outrider.bench.plan import parse_change
    from outrider.bench.plan import plan as make_plan
    from outrider.bench.probe import measure
    from outrider.bench.tasks import load_tasks
    from outrider.models.streaming import streaming
    from outrider.progress import progress

    changes = [parse_change(text) for text in what_if or ()]
    if drafter == "off":
        raise ValueError("--drafter off leaves nothing to plan; name a drafter")
    asked = load_tasks(prompts, MOST_PROMPTS)
    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code, budget=memory_budget)
    with progress("plan", quiet=json) as tell:
        measured = measure(
            engine,
            asked,
            seconds=seconds,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            tell=tell,
        )
    found = make_plan(engine, measured, changes)
    value = plan_report.to_json(found, engine)
    if out is not None:
        path = plan_report.pictures(found, out)
        write_json(value, out / "plan.json")
    if json:
        print_json(value)
        return
    plan_report.render(found, Console())
    if streamed := streaming(engine.model):
        typer.echo(str(streamed))
    if out is not None:
        typer.echo(f"written: {path}, {out / 'plan.json'}")


def regret(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for regret.png and regret.json.", callback=made_folder)],
    target: Annotated[
        str | None, typer.Option(help="Record the walks of this target; without it, a text is made up that changes.")
    ] = None,
    drafter: DrafterName = "auto",
    prompts: Tasks = EVALUATION_TASKS,
    limit: Annotated[int, typer.Option(help="Prompts of each task, spread evenly over it.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    node: Annotated[float, typer.Option(help="Time of a further node of a pass, in plain passes.")] = 0.02,
    level: Annotated[float, typer.Option(help="Time of a level of drafting, in plain passes.")] = 0.15,
    seed: Annotated[int, typer.Option(help="Of made-up texts, of clocks, and of sampling.")] = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Compare ways to choose shapes with the best fixed shape in hindsight, on the same text and the same clock."""
    from outrider.bench.regret import Seconds, compare, record, regret_plot, synthetic
    from outrider.drafters.catalog import ARMS, default_arms
    from outrider.tree import parse_shape

    if node < 0 or level < 0:
        raise ValueError("--node and --level are shares of a plain pass; give 0 or more")
    arms = [parse_shape(name) for name in ARMS]
    if target is None:
        of_target = "drafter prompts limit max_new_tokens temperature dtype device threads trust_remote_code"
        refuse_given(context, of_target, "is of a recording; give it with --target")
        streams = [synthetic([(800, law) for law in ((0.8, 0.08, 0.03), (0.05, 0.03, 0.02)) * 2], seed)]
    else:
        from outrider.bench.tasks import load_tasks

        asked = load_tasks(prompts, limit)
        engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code)
        streams = record(engine, asked, max_new_tokens, temperature=temperature, seed=seed)
        arms = default_arms(engine.drafter) if engine.drafter else arms
    found = compare(streams, Seconds(node=node, level=level), arms, seed=seed)
    regret_plot(found, out / "regret.png")
    value = found.to_json()
    write_json(value, out / "regret.json")
    if json:
        print_json(value)
        return
    for name in found.played:
        typer.echo(
            f"{name}: {found.speed(name):.3f} of the speed of {found.best_fixed}, the best fixed shape in hindsight"
        )
    typer.echo(f"written: {out / 'regret.png'}, {out / 'regret.json'}")


def prior(
    target: Target,
    drafter: Annotated[str, typer.Option(help="A drafter with a folder, or a cascade that ends in one.")],
    tasks: HeldOutTasks = EVALUATION_TASKS,
    limit: Annotated[int | None, typer.Option(help="Prompts per task; all of them for a number that is larger.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Measure what a drafter's rounds bring and keep it in its folder: with it, tuning begins at the right shape."""
    from outrider.progress import progress
    from outrider.train.evaluate import held_out_prompts
    from outrider.train.prior import keep_prior, measure_prior, prior_file

    prompts = held_out_prompts(tasks, limit)
    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code)
    prior_file(engine)  # nobody should measure for minutes to read that it cannot be kept
    with progress("prior", quiet=json) as tell:
        found = measure_prior(engine, prompts, max_new_tokens, tell)
    path = keep_prior(engine, found)
    report({"path": str(path), **found}, f"written: {path}", json)
