"""From a data set to a drafter folder, in steps that go on where a killed run stopped.

`OUT` ends as a drafter folder; what a run needs to go on lies in `OUT/run`: `run.json` (what is being made), the checkpoint,
the draft vocabulary, and the weights of the evaluation with the longest predicted acceptance, which are the ones kept.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from outrider.drafters.folder import write_card
from outrider.models.files import check_writable, save_atomically, write_atomically
from outrider.models.fingerprint import fingerprint
from outrider.train.card import about, card
from outrider.train.data import make_held_out, read_answers
from outrider.train.distil import DistilSettings, Trainer, predicted_acceptance
from outrider.train.features import Example, check_taps, compute_features, examples, tell_cut
from outrider.train.kinds import Plan, check_plan, default_taps, keep_draft_ids, make_student, save_student
from outrider.train.llama_student import save_transformer
from outrider.train.plots import elimination, learning_curve
from outrider.train.prune import TEXTS, prune
from outrider.train.sharpness import best_sharpness
from outrider.train.students import Student
from outrider.train.table import make_table

if TYPE_CHECKING:
    from outrider.api import Engine

FEWEST_ANSWER_TOKENS = 512
MEASURED = 12  # held-out prompts that a finished drafter is run on
Tell = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str) -> None:
    """Tell nobody."""


def check_data(engine: Engine, data: Path) -> None:
    """Refuse a folder that is no data set, or that another target wrote.

    Raises:
        ValueError: in these cases.
    """
    try:
        known = json.loads((data / "data.json").read_text())
    except (OSError, ValueError):
        raise ValueError(f"{data} holds no data set; make one with `outrider data --out {data}`") from None
    if known.get("fingerprint") != fingerprint(engine.model):
        raise ValueError(
            f"the data in {data} was written by {known.get('target', 'another model')}, not by {engine.name}; make new data "
            "with `outrider data --target ...`"
        )


def claim(out: Path, making: dict[str, Any], engine: Engine, write: bool = True) -> None:
    """Make a folder ours, or check that it holds this very run.

    Args:
        write: False only checks.

    Raises:
        ValueError: when it holds something else.
    """
    making = _resolved({**json.loads(json.dumps(making)), "fingerprint": fingerprint(engine.model)})
    path = out / "run" / "run.json"
    if path.exists():
        known = _resolved(json.loads(path.read_text()))
        differ = [name for name in {**known, **making} if known.get(name) != making.get(name)]
        if differ:
            raise ValueError(
                f"{out} holds a run with another {differ[0]} ({known.get(differ[0])}); continue with that, or give another "
                "folder"
            )
    elif out.exists() and any(item.name != "run" and item.suffix != ".png" for item in out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no run to continue; give another folder")
    if not write:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_atomically(json.dumps(making, indent=1) + "\n", path)


def _resolved(making: dict[str, Any]) -> dict[str, Any]:
    """The same with whole paths: a folder may be called by several names."""
    return making | {"init": str(Path(making["init"]).resolve())} if making.get("init") else making


def distil(
    engine: Engine,
    data: Path,
    out: Path,
    plan: Plan,
    settings: DistilSettings,
    *,
    every: float = 120.0,
    patience: int = 0,
    chosen: list[Example] | None = None,
    tell: Tell = silent,
) -> tuple[Student, dict[str, Any]]:
    """Train a drafter, or go on with it, and write its folder.

    Args:
        chosen: the examples to train on; by default all.

    Returns:
        The student with its best weights, and what is known about it.

    Raises:
        ValueError: when data, folder or target do not fit, or training fails.
    """
    asked, plan = plan, check_run(engine, data, out, plan)
    found, held = load_examples(engine, data, plan, tell)
    chosen = found if chosen is None else chosen
    taps = plan_taps(engine, plan)

    def feed() -> list[Example]:
        return examples(data, taps) if chosen is found else chosen

    answered = sum(len(e.ids) - e.prompt_length for e in chosen)
    if answered < FEWEST_ANSWER_TOKENS:
        raise ValueError(
            f"{data} gives {answered} answer tokens to learn from, too little for a drafter; make at least "
            f"{FEWEST_ANSWER_TOKENS}, better a million, with `outrider data --tokens ...`"
        )
    student = make_student(engine, plan, chosen, settings, out / "run")
    check_laws(engine, student, held[0])
    claim(out, asdict(asked), engine)  # only now: what was refused leaves the folder to the command that is right
    keep_draft_ids(student, out / "run")
    trainer = Trainer(student, settings, out / "run")
    train(trainer, feed, lambda: predicted_acceptance(student, held), learning_curve, every, patience, tell)
    best = max(trainer.curve, key=lambda point: point["acceptance_length"])
    return student, write_drafter(
        engine, data, out, plan, student, held, _facts(plan, settings, trainer, answered), best
    )


def write_drafter(
    engine: Engine,
    data: Path,
    out: Path,
    plan: Plan,
    student: Student,
    held: list[Example],
    made: dict[str, Any],
    predicted: Mapping[str, float],
) -> dict[str, Any]:
    """Write the folder of a finished drafter, and measure it there; returns what is known about it.

    Args:
        made: how it came to be.
        predicted: what `predicted_acceptance` found.
    """
    sharpness, agreement = best_sharpness(student, held)
    known = about(
        engine,
        data,
        kind=plan.kind if plan.kind != "head" else f"head, {plan.core} core",
        parameters=sum(p.numel() for p in student.module.parameters() if p.requires_grad),
        draft_vocabulary=len(student.draft_ids),
        **made,
        predicted_acceptance_length=predicted["acceptance_length"],
        predicted_accuracy=[v for k, v in predicted.items() if k.startswith("accuracy_")],
        sharpness=sharpness,
        drawn_agreement={str(s): agreement[s] for s in (1.0, sharpness)},
    )
    save_student(engine, plan, student, out, known, _card(plan, known))
    known["measured_acceptance_length"] = measured_acceptance(engine, out, held)
    save_student(engine, plan, student, out, known, _card(plan, known))
    return known


def check_run(engine: Engine, data: Path, out: Path, plan: Plan) -> Plan:
    """Refuse a run that cannot be, before hidden states are computed for it; the plan as `check_plan` completes it.

    Raises:
        ValueError: when data, folder, target or the drafter to start from do not fit.
    """
    check_data(engine, data)
    claim(out, asdict(plan), engine, write=False)
    check_writable(out)
    return check_plan(engine, plan)


def plan_taps(engine: Engine, plan: Plan) -> tuple[int, ...]:
    """Layers whose hidden states a plan's training reads; the last one gives the target's laws.

    Raises:
        ValueError: as `check_taps`.
    """
    taps = plan.taps or default_taps(engine)
    check_taps(engine, taps)
    return taps if plan.kind == "head" else taps[-1:]


def load_examples(engine: Engine, data: Path, plan: Plan, tell: Tell) -> tuple[list[Example], list[Example]]:
    """The training and the held-out answers with their hidden states, computed if they are not there yet."""
    taps = plan_taps(engine, plan)
    answers = read_answers(data)
    tell_cut(data, [answer.ids for answer in answers])
    compute_features(engine, data, taps, tell)
    return examples(data, taps), held_out_examples(engine, data, plan)


def held_out_examples(engine: Engine, data: Path, plan: Plan) -> list[Example]:
    """The held-out answers with their hidden states, made if they are not there yet."""
    held, taps = make_held_out(engine, data, tasks=plan.held_out), plan_taps(engine, plan)
    compute_features(engine, data, taps, silent, held.name)
    return examples(data, taps, held.name)


@torch.no_grad()
def check_laws(engine: Engine, student: Student, example: Example) -> None:
    """Make sure that the target's laws follow from its last hidden states by norm and vocabulary head alone.

    Raises:
        ValueError: when they do not, as in models that scale or cap their logits.
    """
    from outrider.train.batches import make_batch

    batch = make_batch([example]).to(student.device)
    got_RC = student.laws(batch)(slice(None)).exp()
    logits_TV = engine.model(input_ids=batch.ids_BT, use_cache=False).logits[0]
    true_RC = logits_TV[batch.learnt_BT[0]][:, student.draft_ids].float().log_softmax(-1).exp()
    apart = float((got_RC - true_RC).abs().sum(-1).mean()) / 2
    if not apart < 0.05:
        raise ValueError(
            f"{engine.name} does more to its last hidden states than a norm and a vocabulary head (laws are {apart:.2f} apart); "
            "drafters cannot be distilled from this family yet, only `outrider table` works"
        )


def train(
    trainer: Trainer,
    feed: Callable[[], list[Example]],
    measure: Callable[[], dict[str, float]],
    draw: Callable[[Sequence[Mapping[str, float]], Path], None],
    every: float,
    patience: int,
    tell: Tell,
) -> None:
    """Run the loop, keep the best weights, draw the curve.

    Args:
        measure: evaluates the student.
        draw: a picture of the curve.
    """
    best = trainer.out / "best.safetensors"

    def evaluate() -> dict[str, float]:
        found = measure()
        if trainer.gain(found) > max(map(trainer.gain, trainer.curve), default=-math.inf):
            save_atomically(dict(trainer.module.state_dict()), best)
        return found

    def show(done: int, total: int, what: str) -> None:
        draw(trainer.curve, trainer.out.parent / "learning_curve.png")
        tell(done, total, what)

    tell(int(trainer.seconds), int(trainer.settings.minutes * 60), "seconds of training")
    trainer.train(feed, evaluate, show, every, patience)
    if best.exists():
        trainer.module.load_state_dict(load_file(best))


def measured_acceptance(engine: Engine, folder: Path, held: Sequence[Example]) -> float:
    """Tokens a pass of the finished drafter in the engine: chains of 5, greedy, over held-out prompts."""
    from outrider.drafters.catalog import drafter_in

    drafter = drafter_in(folder, engine.target, engine.tokenizer, dtype=engine.dtype, device=engine.model.device)
    emitted = rounds = 0
    with engine.drafting(drafter), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # how little it brings yet is what is measured
        for example in held[:: max(1, len(held) // MEASURED)][:MEASURED]:
            new = len(example.ids) - example.prompt_length
            prompt = example.ids[: example.prompt_length].tolist()
            stats = engine.generate(prompt, shape="chain5", max_new_tokens=new).stats
            emitted, rounds = emitted + stats.emitted, rounds + stats.rounds
    return emitted / max(rounds, 1)


def _facts(plan: Plan, settings: DistilSettings, trainer: Trainer, answered: int) -> dict[str, Any]:
    idle = (
        {"draft_vocab"} if plan.kind == "head" else {"draft_vocab", "steps", "ramp"}
    )  # told besides, or of heads alone
    return {
        "answer_tokens": answered,
        "tokens_trained_on": trainer.tokens,
        "minutes": trainer.seconds / 60,
        "settings": {name: value for name, value in asdict(settings).items() if name not in idle},
        **({"started_from": plan.init} if plan.init else {}),
    }


def _card(plan: Plan, known: dict[str, Any]) -> str:
    what = {
        "head": "A feature head: it drafts from the target's hidden states.",
        "mamba": "A stand-alone Mamba-2 model that drafts, with a state of constant size.",
        "llama": "A stand-alone transformer that drafts, wide and shallow.",
    }[plan.kind]
    note = (
        "Acceptance length is tokens a target pass, for chains of 5, greedy, on prompts that were never trained on: predicted "
        "from teacher-forced choices, and measured in the engine."
    )
    return card(f"A drafter for {known['target']}", f"{what} {note}", known)


# ---- tables and pruned models ----------------------------------------------------------------------------------------


def make_table_folder(engine: Engine, data: Path, out: Path, fewest: int = 2) -> dict[str, Any]:
    """Count a data set into a drafter folder; returns what is known about it."""
    check_data(engine, data)
    claim(out, {"kind": "table", "fewest": fewest}, engine, write=False)
    answers = read_answers(data)
    claim(out, {"kind": "table", "fewest": fewest}, engine)
    contexts = make_table(answers, out / "model.safetensors", fewest)
    tokens = sum(len(answer.ids) - answer.prompt_length for answer in answers)
    known = about(engine, data, kind="table", contexts=contexts, answer_tokens=tokens)
    text = (
        "An n-gram table of what the target tends to write: after the last one to five tokens, the likeliest next ones."
    )
    write_card(out, card(f"A table for {engine.name}", text, known), {"drafter": "table", **known})
    return known


def prune_folder(
    engine: Engine,
    data: Path | None,
    out: Path,
    plan: Plan,
    layers: int,
    width: float,
    settings: DistilSettings | None,
    *,
    every: float = 120.0,
    patience: int = 0,
    tell: Tell = silent,
) -> dict[str, Any]:
    """Prune the target into a model folder, and distil it if there are settings for that: the pruned model is then
    `OUT/run/pruned`, and `OUT` the distilled one."""
    if data is not None:
        check_data(engine, data)
    place = out if settings is None else out / "run" / "pruned"
    making = {"layers": layers, "width": width}
    claim(place, making, engine, write=False)
    if not (place / "config.json").exists():
        texts = [answer.ids for answer in read_answers(data)] if data is not None else []
        small = prune(engine, layers, width, texts[:: max(1, len(texts) // TEXTS)], tell)
        claim(place, making, engine)
        elimination([r.layer for r in small.removed], [r.divergence for r in small.removed], out / "importance.png")
        facts = {
            "kind": "llama, pruned",
            "layers_kept": small.kept,
            "layers_removed": [f"{r.layer} (KL {r.divergence:.3f})" for r in small.removed],
            "attention_groups": small.groups,
            "neurons": small.neurons,
            "parameters": sum(p.numel() for p in small.model.parameters()),
        }
        known = about(engine, data, **facts)
        text = "Some layers of the target, not trained further. Layers went one by one, the least missed first."
        save_transformer(small.model, place, engine, known, card(f"A pruned {engine.name}", text, known))
    pruned: dict[str, Any] = json.loads((place / "drafter.json").read_text())
    if settings is None or data is None:
        return pruned
    _, known = distil(
        engine, data, out, replace(plan, init=str(place)), settings, every=every, patience=patience, tell=tell
    )
    return {**known, "layers_kept": pruned["layers_kept"]}
