"""How good a drafter is for a target, on prompts that training never saw.

Text is written plainly and with each drafter, turn by turn in one run; every round is watched on the way. Two more passes give
what chains do not show: with five children of the root, which of them the target takes; under multi-step sampling, how sure
the drafter is of its first choice and how often that is the target's token (its calibration).

TAR and the predicted speed-up follow "Decoding Speculative Decoding": throughput = N / (t_target(n) + depth * t_draft).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.bench.report import MethodReport, Run, SpeedReport
from outrider.bench.runner import Method, run_speed
from outrider.bench.tasks import Prompt, load_task, parse_tasks
from outrider.drafters.base import Drafter
from outrider.drafters.catalog import parts
from outrider.machine import settle
from outrider.models.protocol import TreeModel, scored
from outrider.train.prompts import is_held_out, prompt_text
from outrider.train.walks import MEMBERS, Walk, Watched, calibration, membership
from outrider.tree import Shape, parse_shape

if TYPE_CHECKING:
    from outrider.api import Engine

Tell = Callable[[int, int, str], None]


def pass_seconds(engine: Engine, ids: list[int], nodes: int, repeats: int = 9) -> float:
    """Median seconds of a target pass over a chain of `nodes`, and of finding what it would write."""
    state = engine.target.begin([ids], room=nodes + repeats + 2)
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        scores = scored(state, [[ids[-1]] * nodes], [list(range(-1, nodes - 1))])
        scores[0].highest(slice(nodes))
        state.commit([[0]])
        settle(engine.model.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def state_bytes(drafter: Drafter, ids: list[int], room: int) -> tuple[int, int]:
    """Memory of a drafter's state: what a further node takes, and all of it for a text with this much room."""
    models: list[Any] = [part.model for part in parts(drafter) if hasattr(part, "model")]
    totals = [sum(_bytes(model, ids, room + more) for model in models) for more in (0, 64)]
    recurrent = sum(model.state_bytes_per_node() for model in models if hasattr(model, "state_bytes_per_node"))
    return (totals[1] - totals[0]) // 64 + recurrent, totals[0]


def _bytes(model: TreeModel, ids: list[int], room: int) -> int:
    state = model.begin([ids], room)
    state.extend([[ids[-1]]], [[-1]])
    return state.bytes()


# ---- the measurement -------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One drafter: its watched rounds per prompt, and what the other passes found."""

    name: str
    walks: list[list[Walk]]
    report: MethodReport
    members: list[float] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    step_seconds: float | None = None
    predicted_speedup: float | None = None
    bytes_per_node: int = 0
    bytes_total: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Drafters side by side, on the same prompts in the same run."""

    speed: SpeedReport
    drafters: list[Measured]
    tasks: list[str]
    shape: str


def held_out_prompts(names: str, limit: int | None) -> list[Prompt]:
    """The evaluation side of tasks and files, evenly thinned to `limit` prompts of each.

    Raises:
        ValueError: when a task has none.
    """
    chosen: list[Prompt] = []
    for task in parse_tasks(names):
        held = [prompt for prompt in load_task(task) if is_held_out(prompt_text(prompt))]
        if not held:
            raise ValueError(f"no prompt of {task} falls on the held-out side; give more prompts")
        count = len(held) if limit is None else min(limit, len(held))
        if count < 1:
            raise ValueError(f"limit is {limit}; give 1 or more prompts per task")
        chosen += [held[(2 * i + 1) * len(held) // (2 * count)] for i in range(count)]
    return chosen


def evaluate(
    engine: Engine,
    drafters: dict[str, Drafter],
    prompts: list[Prompt],
    *,
    shape: str = "chain5",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    tell: Tell = lambda done, total, what: None,
) -> Evaluation:
    """Measure drafters.

    Args:
        drafters: by the name to show.

    Raises:
        ValueError: when there is nothing to measure.
    """
    if not drafters or not prompts:
        raise ValueError("there is nothing to measure; give at least one drafter and one prompt")
    if not parse_shape(shape).depth:
        raise ValueError(f"shape {shape!r} drafts nothing; give a chain such as chain5, or a tree")
    watched = {name: Watched(drafter) for name, drafter in drafters.items()}
    notes: dict[str, dict[tuple[int, ...], list[Walk]]] = {name: {} for name in drafters}
    options: dict[str, Any] = {"temperature": temperature, "seed": seed}
    methods = [Method("plain", lambda ids, new: _run(engine, None, ids, new, "off", options))]
    for name, drafter in watched.items():

        def run(ids: list[int], new: int, name: str = name, drafter: Watched = drafter) -> Run:
            drafter.walks = []
            done = _run(engine, drafter, ids, new, shape, options)
            notes[name][tuple(ids)] = drafter.walks
            return done

        methods.append(Method(name, run))
    speed = run_speed(engine, prompts, methods, max_new_tokens, **options, progress=tell)
    encoded = [prompt.encode(engine) for prompt in prompts]
    found = []
    for report, (name, drafter) in zip(speed.methods[1:], watched.items()):
        one = Measured(name, [notes[name][tuple(ids)] for ids in encoded], report)
        _more(engine, one, drafter, encoded, max_new_tokens, parse_shape(shape), options, tell)
        found.append(one)
    return Evaluation(speed, found, list(dict.fromkeys(prompt.task for prompt in prompts)), shape)


def _run(engine: Engine, drafter: Any, ids: list[int], new: int, shape: str, options: dict[str, Any]) -> Run:
    with engine.drafting(drafter):
        start = time.perf_counter()
        result = engine.generate(ids, max_new_tokens=new, shape=shape, **options)
        seconds = time.perf_counter() - start
    return Run(list(result.token_ids), seconds, result.stats.seconds["prefill"], result.stats)


def _more(
    engine: Engine,
    one: Measured,
    drafter: Watched,
    encoded: list[list[int]],
    new: int,
    shape: Shape,
    options: dict[str, Any],
    tell: Tell,
) -> None:
    """Membership, calibration, latency, prediction and memory."""
    one.members = membership(_pass(engine, drafter, encoded, new, f"({MEMBERS},)", options, tell, "membership"))
    sure = {**options, "temperature": options["temperature"] or 1.0, "rule": "mss", "draft_sampling": "iid"}
    one.calibration = calibration(_pass(engine, drafter, encoded, new, "chain5", sure, tell, "calibration"))
    walks = [w for prompt in one.walks for w in prompt]
    levels, seconds = sum(w.depth for w in walks), one.report.totals().stage_seconds["draft"]
    one.step_seconds = seconds / levels if levels else None
    one.predicted_speedup = predict(engine, one, walks, encoded[0], shape.nodes)
    longest = max(encoded, key=len)
    one.bytes_per_node, one.bytes_total = state_bytes(drafter.inner, longest, new + shape.nodes)


def _pass(
    engine: Engine,
    drafter: Watched,
    encoded: list[list[int]],
    new: int,
    shape: str,
    options: dict[str, Any],
    tell: Tell,
    what: str,
) -> list[Walk]:
    """All prompts once more, watched."""
    drafter.walks = []
    for done, ids in enumerate(encoded):
        tell(done, len(encoded), f"{drafter.name}: {what}")
        _run(engine, drafter, ids, new, shape, options)
    return drafter.walks


def predict(engine: Engine, one: Measured, walks: list[Walk], ids: list[int], nodes: int) -> float | None:
    """Speed-up by the throughput model; rounds in which nothing was proposed cost a plain pass."""
    length = one.report.totals().acceptance_length
    if length is None or not walks:
        return None
    plain, tree = pass_seconds(engine, ids, 1), pass_seconds(engine, ids, 1 + nodes)
    drafting = sum(w.depth for w in walks) / len(walks) * (one.step_seconds or 0.0)
    share = sum(w.drafted > 0 for w in walks) / len(walks)
    return length * plain / (share * tree + (1 - share) * plain + drafting)
