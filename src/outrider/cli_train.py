"""The workshop's commands: data, table, distil, prune, linearize, boost, average, evaluate. Options are read, `train` called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.cli_options import (
    EVALUATION_TASKS,
    BatchTokens,
    Core,
    Data,
    Device,
    DraftVocab,
    DType,
    Every,
    HeldOut,
    HeldOutTasks,
    Init,
    Json,
    Kind,
    Layers,
    LearnPrompts,
    Loss,
    Minutes,
    Neurons,
    OptimizerName,
    Out,
    OutFolder,
    Patience,
    Ramp,
    Rate,
    Seed,
    StateSize,
    Steps,
    Taps,
    Target,
    Threads,
    Trust,
    load_drafters,
    load_target,
    parse_count,
    plan_from,
    print_json,
    refuse_given,
    report,
    settings_from,
    write_json,
    writing,
)
from outrider.progress import progress

SOURCES = "tasks,templates,self"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (data, table, distil, prune, linearize, boost, average, evaluate):
        app.command()(writing(command))


def data(
    target: Target,
    out: Out,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="FILE.jsonl, or a task whose training side is asked (gsm8k ...); repeatable."),
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option(help="A data set of the same vocabulary, to be read instead of written: five times as fast."),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(
            help="Answer tokens to make, such as 500k or 2M, in batches of up to 192 prompts; the last one is whole."
        ),
    ] = "1M",
    sources: Annotated[
        str | None,
        typer.Option(
            help="Further prompts: tasks, templates, functions, sums, self (asked by the target itself), or none. "
            "Default: tasks,templates,self."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    taps: Annotated[str, typer.Option(help="Also keep the hidden states of these layers, such as 7,17,29.")] = "",
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Let the target answer prompts: what drafters learn from. Prompts of the held-out side are never asked."""
    from outrider.bench.tasks import load_task
    from outrider.train.data import make_data, read_answers
    from outrider.train.features import check_taps, compute_features
    from outrider.train.prompts import prompt_text
    from outrider.train.reading import take_texts

    if read is not None and (prompts or sources):
        raise ValueError("--read takes texts as they are; leave out --prompts and --sources, or --read")
    wanted = parse_count(tokens, "--tokens")
    chosen = [name.strip() for name in (sources or SOURCES).split(",") if name.strip() not in ("", "none")]
    layers = plan_from("head", "attention", taps, None, None, "").taps
    given = [prompt_text(prompt) for name in prompts or [] for prompt in load_task(name)]
    engine = load_target(target, dtype, device, threads, trust_remote_code)
    if layers:
        check_taps(engine, layers)
    with progress("data", quiet=json) as tell:
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed, "taps": layers, "tell": tell}
        if read is not None:
            made = take_texts(engine, read, out, wanted)
        else:
            made = make_data(engine, out, tokens=wanted, prompts=given, sources=chosen, **options)
        if layers:
            compute_features(engine, out, layers, tell)
    answers = len(read_answers(out))
    what = "prompts" if read is None else "texts"
    note = "" if made >= wanted else f"; the {what} ran out before {wanted}, give more to go on"
    found = {"out": str(out), "answer_tokens": made, "answers": answers, "complete": made >= wanted}
    report(found, f"{out} holds {made} answer tokens in {answers} answers{note}", json)


def table(
    target: Target,
    data: Data,
    out: Out,
    fewest: Annotated[int, typer.Option(help="Leave out contexts that were seen less often.")] = 2,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Count the target's answers into an n-gram table: a drafter that costs nothing and needs no training."""
    from outrider.train.workshop import make_table_folder

    engine = load_target(target, dtype, device, threads, trust_remote_code)
    known = make_table_folder(engine, data, out, fewest)
    report({"out": str(out), **known}, f"{out} is a table of {known['contexts']} contexts", json)


def distil(
    target: Target,
    data: Data,
    out: Out,
    kind: Kind = "head",
    core: Core = None,
    minutes: Minutes = 60.0,
    steps: Steps = None,
    ramp: Ramp = None,
    loss: Loss = "kl",
    rate: Rate = 2e-3,
    optimizer: OptimizerName = "muon",
    prompts: LearnPrompts = False,
    draft_vocab: DraftVocab = None,
    taps: Taps = "",
    layers: Layers = None,
    neurons: Neurons = None,
    state: StateSize = None,
    init: Init = None,
    held_out: HeldOut = EVALUATION_TASKS,
    batch_tokens: BatchTokens = 2048,
    every: Every = 120.0,
    patience: Patience = 0,
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Train a drafter on the target's answers and laws; tells the acceptance length that it predicts as it goes."""
    plan = plan_from(kind, core, taps, layers, init, held_out, neurons, state)
    settings = settings_from(
        kind, minutes, steps, ramp, loss, rate, draft_vocab, batch_tokens, seed, optimizer, prompts
    )
    from outrider.train.workshop import distil as run

    engine = load_target(target, dtype, device, threads, trust_remote_code)
    with progress("distil", quiet=json) as tell:
        _, known = run(engine, data, out, plan, settings, every=every, patience=patience, tell=tell)
    report({"out": str(out), **known}, f"{out} is a drafter with {_lengths(known)}", json)


def _lengths(known: dict[str, Any]) -> str:
    predicted, measured = known["predicted_acceptance_length"], known["measured_acceptance_length"]
    return f"acceptance length {measured:.2f} on held-out prompts (predicted {predicted:.2f})"


def prune(
    context: typer.Context,
    target: Target,
    out: Out,
    layers: Annotated[int, typer.Option(help="Layers to keep.")] = 6,
    width: Annotated[float, typer.Option(help="Share of heads and feed-forward neurons to keep; 1 is wide.")] = 1.0,
    data: Annotated[Path | None, typer.Option(help="A data set to measure on, and to fine-tune with.")] = None,
    finetune: Annotated[
        bool, typer.Option("--finetune/--no-finetune", help="Distil the pruned model for --minutes afterwards.")
    ] = True,
    minutes: Minutes = 10.0,
    loss: Loss = "kl",
    rate: Rate = 5e-4,
    draft_vocab: DraftVocab = None,
    held_out: HeldOut = EVALUATION_TASKS,
    batch_tokens: BatchTokens = 2048,
    every: Every = 120.0,
    patience: Patience = 0,
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Cut the target down to a wide and shallow drafter, and distil what is left."""
    from outrider.train.workshop import prune_folder

    if finetune and data is None:
        raise ValueError("fine-tuning needs --data; give a data set, or --no-finetune")
    if not finetune:
        settings_of = "minutes loss rate draft_vocab held_out batch_tokens every patience seed"
        refuse_given(context, settings_of, "is for fine-tuning; leave it out, or leave out --no-finetune")
    settings = (
        settings_from("llama", minutes, None, None, loss, rate, draft_vocab, batch_tokens, seed) if finetune else None
    )
    plan = plan_from("llama", None, "", None, None, held_out)
    engine = load_target(target, dtype, device, threads, trust_remote_code)
    with progress("prune", quiet=json) as tell:
        known = prune_folder(
            engine, data, out, plan, layers, width, settings, every=every, patience=patience, tell=tell
        )
    lengths = f", {_lengths(known)}" if finetune else ""
    report({"out": str(out), **known}, f"{out} is a model of layers {known['layers_kept']}{lengths}", json)


def linearize(
    target: Target,
    data: Data,
    out: Out,
    layers: Annotated[int | None, typer.Option(help="Layers to keep. Default: all.")] = None,
    attention: Annotated[int, typer.Option(help="Layers that keep their attention: a hybrid.")] = 0,
    tokens: Annotated[str, typer.Option(help="Answer tokens to fit the layers on, such as 32k.")] = "32k",
    minutes: Annotated[float, typer.Option(help="Distil so long afterwards; 0 leaves the layers as fitted.")] = 60.0,
    loss: Loss = "kl",
    rate: Rate = 1e-3,
    held_out: HeldOut = EVALUATION_TASKS,
    batch_tokens: BatchTokens = 1024,
    every: Every = 120.0,
    patience: Patience = 0,
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Make a Gated DeltaNet language model, or a hybrid, out of an attention model: a target of its own."""
    from outrider.train.linear_lm import LinearPlan, linear_lm

    settings = None
    if minutes:
        settings = settings_from("llama", minutes, None, None, loss, rate, "1", batch_tokens, seed)
    tasks = plan_from("llama", None, "", None, None, held_out).held_out
    plan = LinearPlan(layers, parse_count(tokens, "--tokens"), tasks, attention)
    engine = load_target(target, dtype, device, threads, trust_remote_code)
    with progress("linearize", quiet=json) as tell:
        known = linear_lm(engine, data, out, plan, settings, every=every, patience=patience, tell=tell)
    closeness = ", ".join(f"{name} {known[name]:.3g}" for name in ("kl", "perplexity", "agreement"))
    report(
        {"out": str(out), **known},
        f"{out} is a Gated DeltaNet model of {len(known['layers_of_the_teacher'])} layers: {closeness}",
        json,
    )


def boost(
    target: Target,
    data: Data,
    out: Out,
    drafters: Annotated[
        int, typer.Option(help="How many; each learns from what those before it do not reproduce.")
    ] = 2,
    kind: Kind = "head",
    core: Core = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Acceptance length from which on an answer counts as reproduced. Default: the drafter's mean."
        ),
    ] = None,
    minutes: Minutes = 60.0,
    steps: Steps = None,
    ramp: Ramp = None,
    loss: Loss = "kl",
    rate: Rate = 2e-3,
    optimizer: OptimizerName = "muon",
    prompts: LearnPrompts = False,
    draft_vocab: DraftVocab = None,
    taps: Taps = "",
    layers: Layers = None,
    neurons: Neurons = None,
    state: StateSize = None,
    init: Init = None,
    held_out: HeldOut = EVALUATION_TASKS,
    batch_tokens: BatchTokens = 2048,
    every: Every = 120.0,
    patience: Patience = 0,
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Boost-tune several drafters; use them together as --drafter OUT/1+OUT/2. --minutes are for each."""
    plan = plan_from(kind, core, taps, layers, init, held_out, neurons, state)
    settings = settings_from(
        kind, minutes, steps, ramp, loss, rate, draft_vocab, batch_tokens, seed, optimizer, prompts
    )
    from outrider.train.boost import boost as run

    engine = load_target(target, dtype, device, threads, trust_remote_code)
    with progress("boost", quiet=json) as tell:
        options: dict[str, Any] = {"every": every, "patience": patience, "tell": tell}
        known = run(engine, data, out, plan, settings, drafters=drafters, threshold=threshold, **options)
    names = "+".join(str(out / str(number + 1)) for number in range(len(known)))
    text = "\n".join(f"{out / str(number)}: {_lengths(one)}" for number, one in enumerate(known, 1))
    report({"drafter": names, "drafters": known}, f"{text}\nuse them with --drafter {names}", json)


def average(
    folders: Annotated[
        list[Path], typer.Argument(help="Drafters that were trained on from the same one, two or more.")
    ],
    target: Target,
    data: Data,
    out: Out,
    held_out: HeldOut = EVALUATION_TASKS,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Average the weights of heads, or of Mamba drafters: often better than each of them, and as fast."""
    from outrider.train.average import average_folders

    tasks = plan_from("head", None, "", None, None, held_out).held_out
    engine = load_target(target, dtype, device, threads, trust_remote_code)
    with progress("average", quiet=json) as tell:
        tell(0, 1, "measuring")
        known = average_folders(engine, folders, data, out, tasks)
    report({"out": str(out), **known}, f"{out}: {_lengths(known)}", json)


def evaluate(
    target: Target,
    drafter: Annotated[list[str], typer.Option(help="What to measure; give it twice for two side by side.")],
    tasks: HeldOutTasks = EVALUATION_TASKS,
    limit: Annotated[int | None, typer.Option(help="Prompts per task; all of them for a number that is larger.")] = 8,
    shape: Annotated[str, typer.Option(help="A chain such as chain5, or a tree such as 3x2x1x1.")] = "chain5",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Seed = 0,
    out: OutFolder = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Measure drafters on held-out prompts: acceptance, calibration, latency, memory, predicted and measured speed-up."""
    from outrider.train.evaluate import evaluate as measure
    from outrider.train.evaluate import held_out_prompts
    from outrider.train.evaluation_report import pictures, render, to_json

    prompts = held_out_prompts(tasks, limit)
    engine = load_target(target, dtype, device, threads, trust_remote_code)
    drafters = load_drafters(engine, drafter, trust_remote_code)
    with progress("evaluate", quiet=json) as tell:
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        found = measure(engine, drafters, prompts, shape=shape, tell=tell, **options)
    if out is not None:
        write_json(to_json(found), out / "evaluation.json")
        pictures(found, out)
    if json:
        print_json(to_json(found))
    else:
        render(found, Console())
