"""Measures methods against each other on the same prompts and checks that they write the same text.

Methods take turns prompt by prompt and the order rotates, so that none always meets a warm or a busy machine; warm-up
runs are not counted. `plain`, `auto` and tree shapes are the engine's; `transformers` and `transformers-lookup` are the
model's own `generate`, compared as text only when greedy. Where texts part, the target says how close a call it was.
"""

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider import noise
from outrider.bench.report import Difference, MethodReport, Run, SpeedReport
from outrider.bench.tasks import Prompt
from outrider.models.streaming import streaming
from outrider.tree import TUNED, parse_shape

Clock = Callable[[], float]
Progress = Callable[[int, int, str], None]
Shape = str | tuple[int, ...]
Continue = Callable[[list[int], int], Run]

# How many roundings apart two scores may lie and still be a tie. Measured on a model of 135M parameters: from one pass
# over 150 tokens to a cached pass over one, the gap of the two best logits moved by at most 4 ulps in bfloat16 and 14
# in float32.
TIE_ULPS = {torch.bfloat16: 4.0, torch.float16: 4.0, torch.float32: 32.0, torch.float64: 32.0}


class MethodFailed(ValueError):
    """A method cannot go on. A measurement leaves it out, says why, and goes on with the others."""


@dataclass(frozen=True)
class Method:
    """A way to continue a prompt. `comparable` says that its text must equal that of the other comparable methods."""

    name: str
    run: Continue
    comparable: bool = True


def with_first_token(method: Method) -> Method:
    """The same method, which before each run is asked for the first token alone, so that decoding has its own speed."""

    def run(prompt_ids: list[int], max_new_tokens: int) -> Run:
        first = method.run(prompt_ids, 1)
        return replace(method.run(prompt_ids, max_new_tokens), first_token_seconds=first.seconds)

    return replace(method, run=run)


def parse_methods(names: str) -> list[str]:
    """Splits `"transformers,plain,auto,chain5,3x2x2"`; a shape may also be written `(3,2,2)`."""
    return [name.strip() for name in re.split(r",(?![^(]*\))", names) if name.strip()]


def methods_from_names(
    engine: Any, names: Sequence[str], *, temperature: float = 0.0, seed: int = 0, clock: Clock = time.perf_counter
) -> list[Method]:
    """Methods that run on `engine`. Raises `ValueError` for unknown and repeated names."""
    methods = [_method(engine, name, temperature, seed, clock) for name in names]
    refuse_repeated([method.name for method in methods])
    return methods


def refuse_repeated(names: Sequence[str]) -> None:
    """`ValueError` when a method is named twice."""
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"Method {min(repeated)!r} is named more than once, so results would mix: name each one once.")


def _method(engine: Any, name: str, temperature: float, seed: int, clock: Clock) -> Method:
    if name in ("transformers", "transformers-lookup"):
        return Method(name, _transformers_run(engine, name, temperature, seed, clock), comparable=temperature == 0)
    name, shape = ("plain", "off") if name in ("plain", "off") else (name, name)
    try:
        drafts = shape in (*TUNED, "off") or parse_shape(shape).depth > 0
    except ValueError:
        drafts = False
    if not drafts:
        known = "transformers, transformers-lookup, plain, auto, ucb, a chain such as chain5, or a tree such as 3x2x2"
        raise ValueError(f"There is no method {name!r}: take {known}.")
    return Method(name, _engine_run(engine, shape, temperature, seed, clock))


def _engine_run(engine: Any, shape: str, temperature: float, seed: int, clock: Clock) -> Continue:
    def run(prompt_ids: list[int], max_new_tokens: int) -> Run:
        start = clock()
        result = engine.generate(
            prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, shape=shape
        )
        seconds = clock() - start
        return Run(list(result.token_ids), seconds, stats=result.stats)

    return run


def _transformers_run(engine: Any, name: str, temperature: float, seed: int, clock: Clock) -> Continue:
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 10 if name == "transformers-lookup" else None}
    options |= {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}

    def run(prompt_ids: list[int], max_new_tokens: int) -> Run:
        ids = torch.tensor([prompt_ids], device=engine.model.device)
        mask = torch.ones_like(ids)
        with _neutral(engine), torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            start = clock()
            try:
                output = engine.model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
            except ValueError as error:
                raise ValueError(f"{name} cannot run {engine.name} ({error}): leave this method out.") from error
            token_ids = output[0, len(prompt_ids) :].tolist()
            return Run(token_ids, clock() - start)

    return run


@contextmanager
def _neutral(engine: Any) -> Iterator[None]:
    """No sampling defaults, penalties or warnings of the checkpoint while transformers generates."""
    from transformers import GenerationConfig
    from transformers.utils import logging

    model, verbosity = engine.model, logging.get_verbosity()
    own, ends = model.generation_config, engine.model_eos or None
    pad = own.pad_token_id if own.pad_token_id is not None or ends is None else ends[0]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad, bos_token_id=own.bos_token_id)
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        model.generation_config = own
        logging.set_verbosity(verbosity)


# ---- speed -----------------------------------------------------------------------------------------------------


def run_speed(
    engine: Any,
    prompts: Sequence[Prompt],
    methods: Sequence[str | Method],
    max_new_tokens: int,
    repeat: int = 1,
    warmup: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> SpeedReport:
    """Runs every method on every prompt, `repeat` times.

    Names become methods of this temperature, seed and clock; a `Method` carries its own. Each method first runs the
    first `warmup` prompts uncounted. One that raises `MethodFailed` is left out. Raises `ValueError` when there is
    nothing to measure.
    """
    for what, count in (("prompt", len(prompts)), ("method", len(methods)), ("repeat", repeat)):
        if count < 1:
            raise ValueError(f"There is no {what} to measure: give at least one {what}.")
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}, which is no number of prompts: give 0 or more.")
    chosen = [_method(engine, m, temperature, seed, clock) if isinstance(m, str) else m for m in methods]
    refuse_repeated([method.name for method in chosen])
    encoded = [prompt.encode(engine) for prompt in prompts]
    left_out: dict[str, str] = {}
    for ids in encoded[:warmup]:
        for method in chosen:
            _try(method, ids, max_new_tokens, left_out)
    runs = _alternate(chosen, encoded, max_new_tokens, repeat, left_out, progress)
    chosen = [method for method in chosen if method.name not in left_out]
    if not chosen:
        raise ValueError(f"No method could be measured; {next(iter(left_out.values()))}")
    counts = {"max_new_tokens": max_new_tokens, "repeat": repeat, "warmup": warmup}
    settings = counts | {"temperature": temperature, "seed": seed}
    apart = [method.name for method in chosen if not method.comparable]
    names = [method.name for method in chosen]
    return report_of(engine, names, prompts, encoded, runs, settings, apart, left_out)


def report_of(
    engine: Any,
    methods: Sequence[str],
    prompts: Sequence[Prompt],
    encoded: list[list[int]],
    runs: dict[str, list[list[Run]]],
    settings: dict[str, Any],
    apart: Sequence[str] = (),
    left_out: dict[str, str] | None = None,
) -> SpeedReport:
    """What methods did on the same prompts.

    Args:
        runs: by method, repeat and prompt.
        settings: temperature and seed among them.
        apart: methods whose texts are not to be compared.
        left_out: why others failed.
    """
    sampling = {key: settings[key] for key in ("temperature", "seed")}
    reports = _compare_methods(engine, methods, apart, prompts, encoded, runs, sampling)
    counts = {"prompts": len(prompts), "tasks": list(dict.fromkeys(prompt.task for prompt in prompts))}
    return SpeedReport(reports, {**engine_facts(engine), **counts, **settings}, left_out or {})


def engine_facts(engine: Any) -> dict[str, Any]:
    """What was measured, for a report's provenance."""
    return {
        "target": engine.name,
        "drafter": engine.drafter.name if engine.drafter else "off",
        "dtype": str(engine.dtype).removeprefix("torch."),
        "exact": getattr(engine, "exact", False),
        "device": str(engine.model.device),
        **(streamed.facts() if (streamed := streaming(engine.model)) else {}),
    }


def _try(method: Method, ids: list[int], max_new_tokens: int, left_out: dict[str, str]) -> Run | None:
    """A run of a method that has not failed; a failure goes to `left_out`."""
    if method.name in left_out:
        return None
    try:
        return method.run(ids, max_new_tokens)
    except MethodFailed as failure:
        left_out[method.name] = str(failure)
        return None


def _alternate(
    methods: list[Method],
    encoded: list[list[int]],
    max_new_tokens: int,
    repeat: int,
    left_out: dict[str, str],
    progress: Progress | None,
) -> dict[str, list[list[Run]]]:
    """Runs by method name, repeat and prompt; those of a method that failed are not complete."""
    runs: dict[str, list[list[Run]]] = {method.name: [[] for _ in range(repeat)] for method in methods}
    done, total = 0, repeat * len(encoded) * len(methods)
    for r in range(repeat):
        for i, ids in enumerate(encoded):
            first = (r + i) % len(methods)
            for method in methods[first:] + methods[:first]:
                if run := _try(method, ids, max_new_tokens, left_out):
                    runs[method.name][r].append(run)
                done += 1
                if progress:
                    progress(done, total, method.name)
    return runs


def _compare_methods(
    engine: Any,
    methods: Sequence[str],
    apart: Sequence[str],
    prompts: Sequence[Prompt],
    encoded: list[list[int]],
    runs: dict[str, list[list[Run]]],
    sampling: dict[str, Any],
) -> list[MethodReport]:
    """Every comparable method against `plain`, or against the first comparable one; at most one difference a prompt."""
    comparable = [name for name in methods if name not in apart]
    reference = "plain" if "plain" in comparable else next(iter(comparable), "")
    reports = []
    for name in methods:
        differences = []
        for i, prompt in enumerate(prompts) if name in comparable else ():
            run = f"{name} against {reference}"
            label, plain = f"{prompt.task}/{prompt.id}", runs[reference][0][i].token_ids
            for repeat in runs[name]:
                if found := compare(engine, label, encoded[i], plain, repeat[i].token_ids, run=run, **sampling):
                    differences.append(found)
                    break
        equal = None if name not in comparable or len(comparable) < 2 else not differences
        reports.append(MethodReport(name, [p.task for p in prompts], runs[name], equal, differences))
    return reports


# ---- sameness --------------------------------------------------------------------------------------------------


def compare(
    engine: Any, prompt: str, prompt_ids: list[int], plain: list[int], other: list[int], *, run: str, **sampling: Any
) -> Difference | None:
    """The first difference between two continuations, None when equal. `sampling`: what `margin_ulps` also takes."""
    if plain == other:
        return None
    common = min(len(plain), len(other))
    position = next((i for i in range(common) if plain[i] != other[i]), common)
    if position == common:  # one text goes on where the other ended: no two tokens to weigh
        pair = [tokens[position] if position < len(tokens) else None for tokens in (plain, other)]
        return Difference(prompt, position, pair[0], pair[1], None, False, run)
    tokens = (plain[position], other[position])
    margin = margin_ulps(engine, prompt_ids + plain[:position], tokens, **sampling)
    exact = getattr(engine, "exact", False)  # promises the same bits: then nothing is a tie
    tie = not exact and margin is not None and margin <= TIE_ULPS[engine.dtype]
    return Difference(prompt, position, *tokens, margin, tie, run)


def margin_ulps(
    engine: Any,
    context: list[int],
    tokens: Sequence[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> float | None:
    """How far the worst of `tokens` lies below the best score after `context`, in ulps of the engine's dtype.

    The score is the logit of a full forward pass, plus temperature times the noise of that seed and position. One ulp
    is the spacing of the dtype's numbers at the largest logit involved. None when a token is excluded or not finite.
    """
    logits = next_logits(engine, context)
    scores = logits
    if temperature > 0:
        gumbel = noise.gumbel(seed, noise.TARGET, len(context), len(logits)).double()
        scores = temperature * (process(logits, temperature, top_k, top_p) + gumbel)
    best = int(scores.argmax())
    gap = float(scores[best] - scores[list(tokens)].min())
    size = float(logits[[best, *tokens]].abs().max())
    if not math.isfinite(gap) or not math.isfinite(size):
        return None
    limits = torch.finfo(engine.dtype)
    return gap / (limits.eps * 2.0 ** math.floor(math.log2(max(size, limits.tiny))))


@torch.no_grad()
def next_logits(engine: Any, token_ids: list[int]) -> torch.Tensor:
    """The target's logits after `token_ids`, float64 on the CPU, from one full forward pass without a cache."""
    ids = torch.tensor([token_ids], device=engine.model.device)
    output = engine.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    logits: torch.Tensor = output.logits[0, -1].double().cpu()
    return logits


def process(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the sampled law: temperature, then the likeliest `top_k`, then the least set of `top_p`.

    Written apart from the engine's own processors, so that the two check each other.
    """
    log_p = torch.log_softmax(logits / temperature, -1)
    if 0 < top_k < len(log_p):
        log_p = torch.log_softmax(log_p.masked_fill(log_p < log_p.topk(top_k).values[-1], -math.inf), -1)
    if top_p < 1:
        ordered, order = torch.sort(log_p.exp(), descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        log_p[order[mass_before >= top_p]] = -math.inf
    return torch.log_softmax(log_p, -1)
