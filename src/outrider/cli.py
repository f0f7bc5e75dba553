"""The `outrider` command: reads options, calls the library, prints. People get colours and tables, scripts get `--json`."""

from __future__ import annotations

import sys
import time
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from outrider import cli_bench, cli_plan, cli_proof, cli_train
from outrider.cli_options import (
    Budget,
    Device,
    DrafterName,
    DType,
    Exact,
    Json,
    Target,
    Threads,
    Trust,
    check_asked,
    load_pair,
    print_json,
    refuse_given,
)

if TYPE_CHECKING:
    from outrider.api import Engine, Result


class _Group(TyperGroup):
    """Errors that users can mend are one line and exit 2; `--debug` shows where they come from."""

    def invoke(self, ctx: Any) -> Any:
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"outrider: {message}", err=True)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"outrider: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="The same text, sooner: lossless speculative decoding for language models with any kind of state.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure methods against each other in one run.")
app.add_typer(bench, name="bench")

Chat = Annotated[bool, typer.Option("--chat/--no-chat", help="Put the prompt into the model's chat template.")]


@app.callback()
def _main(debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False) -> None:
    pass


# ---- generate --------------------------------------------------------------------------------------------------------


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    target: Target = "smollm2-135m",
    drafter: DrafterName = "auto",
    shape: Annotated[
        str, typer.Option(help="auto, ucb, off, chain5, 3x2x2, best16, best16x6@0.05, or [[0],[0,0],[1]].")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many most likely tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely, relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages tokens already seen.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text, with or without drafting.")
    ] = None,
    rule: Annotated[
        str, typer.Option(help="coupled (the very text of plain decoding) or mss (equal in law).")
    ] = "coupled",
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")] = None,
    chat: Chat = True,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    memory_budget: Budget = None,
    show_draft: Annotated[bool, typer.Option("--show-draft", help="Colour tokens that were drafted.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show shapes, acceptance and speed while it runs.")] = False,
    exact: Exact = False,
    json: Json = False,
) -> None:
    """Continue a prompt, streaming."""
    text = _standard_input() if prompt == "-" else prompt
    if not text.strip():
        raise ValueError("the prompt is empty; give some text, or - to read standard input")
    if watch and (json or show_draft):
        raise ValueError("--watch draws a view of its own; leave out --json and --show-draft")
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "rule": rule,
        "stop": stop or (),
    }
    check_asked(shape, options)  # loading takes a while
    start = time.perf_counter()
    engine = load_pair(target, drafter, dtype, device, threads, trust_remote_code, exact, memory_budget)
    loaded = time.perf_counter() - start
    console = None if json else Console(highlight=False, soft_wrap=True)
    if watch:
        result = _watch(engine, text, shape, chat, options)
    else:
        result = _follow(engine.stream(text, shape=shape, chat=chat, **options), console, show_draft)
    if json:
        print_json(_result_json(engine, result, rule, loaded))
    else:
        Console(stderr=True, highlight=False, style="dim").print(_summary(engine, result), soft_wrap=True)


def _watch(engine: Engine, text: str, shape: str, chat: bool, options: dict[str, Any]) -> Result:
    from outrider.options import options_from
    from outrider.watch import Watching, follow

    watching = Watching(engine.controller(shape, options_from(options)))
    result: Result = follow(
        engine.stream(text, shape=watching, chat=chat, **options), watching, Console(highlight=False)
    )
    return result


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueError("standard input is closed; give the prompt as an argument")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError("standard input is not UTF-8 text; give text") from error


def _follow(pieces: Any, console: Console | None, show_draft: bool) -> Result:
    """Print pieces as they come; returns the generator's result."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            if console:
                console.print()
            result: Result = end.value
            return result
        if console and piece.text:
            style = "green" if show_draft and piece.drafted else None
            console.print(piece.text, end="", style=style, markup=False)
            console.file.flush()


def _summary(engine: Engine, result: Result) -> str:
    from outrider.models.streaming import streaming

    stats = result.stats
    shapes = ", ".join(f"{name} {count}" for name, count in stats.shapes.most_common(4)) or "none"
    drafter = engine.drafter.name if engine.drafter else "off"
    streamed = streaming(engine.model)
    return (
        f"{len(result.token_ids)} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.acceptance_length:.2f} tokens per pass, drafter {drafter}, shapes {shapes}"
        + (f", {streamed}" if streamed else "")
    )


def _result_json(engine: Engine, result: Result, rule: str, loaded: float) -> dict[str, Any]:
    from outrider.models.streaming import streaming

    stats = result.stats
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_second": stats.tokens_per_second,
        "seconds": {"load": loaded, **stats.seconds},
        "shapes": dict(stats.shapes),
        "target": engine.name,
        "drafter": engine.drafter.name if engine.drafter else "off",
        "dtype": str(engine.dtype).removeprefix("torch."),
        "rule": rule,
        "seed": result.seed,
        "memory": streamed.facts() if (streamed := streaming(engine.model)) else None,
    }


# ---- models and doctor -----------------------------------------------------------------------------------------------


@app.command()
def models(json: Json = False) -> None:
    """List the models that have a short name, and where they stand."""
    from dataclasses import asdict

    from outrider.models.loading import list_models

    known = list_models()
    if json:
        print_json([asdict(info) for info in known])
        return
    from rich.table import Table

    table = Table()
    for column in ("name", "parameters", "download", "state", "license", "about"):
        table.add_column(column, no_wrap=column == "name")
    for info in known:
        state = "ready" if info.is_converted else "fetched" if info.is_fetched else "not fetched"
        name = f"{info.name} (default)" if info.is_default else info.name
        size = f"{info.num_parameters / 1e6:.0f}M", f"{info.download_bytes / 1e6:.0f} MB"
        table.add_row(name, *size, state, info.license, info.about)
    Console().print(table)


@app.command()
def doctor(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="Test this model too (it is loaded).")] = None,
    drafter: DrafterName = "off",
    dtype: DType = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    memory_budget: Budget = None,
    topology: Annotated[
        bool, typer.Option("--topology", help="Show, and measure once, which way scores which trees fastest.")
    ] = False,
    json: Json = False,
) -> None:
    """Tell what this machine is good at, how models score trees on it, and what memory a run needs."""
    from outrider.doctor import examine, render

    if target is None:
        of_model = "drafter memory_budget dtype trust_remote_code" + ("" if topology else " device")
        refuse_given(context, of_model, "is of a model; give it with --target")
    budget = {} if target is None else {"memory_budget": memory_budget}
    loading = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code, **budget}
    report = examine(target, drafter, topology, **loading)
    if json:
        print_json(report)
    else:
        render(report, Console())


cli_bench.register(app, bench)
cli_plan.register(app, bench)
cli_proof.register(bench)
cli_train.register(app)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
