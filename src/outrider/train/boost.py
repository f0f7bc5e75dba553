"""Boost-tuning (SpecInfer): every further drafter learns from the answers that those before it do not reproduce.

The first learns from all answers. An answer is marked when a drafter walks through it with a long enough predicted acceptance
length; the next learns from what is not marked. `OUT/1`, `OUT/2` ... are drafter folders, and together one merged drafter.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.files import write_atomically
from outrider.train.distil import DistilSettings, predicted_acceptance
from outrider.train.features import Example
from outrider.train.kinds import Plan
from outrider.train.students import Student
from outrider.train.workshop import Tell, check_run, distil, load_examples, silent

if TYPE_CHECKING:
    from outrider.api import Engine


def boost(
    engine: Engine,
    data: Path,
    out: Path,
    plan: Plan,
    settings: DistilSettings,
    *,
    drafters: int = 2,
    threshold: float | None = None,
    every: float = 120.0,
    patience: int = 0,
    tell: Tell = silent,
) -> list[dict[str, Any]]:
    """Train drafters one after the other.

    Args:
        threshold: acceptance length from which on an answer counts as reproduced; by default the drafter's own mean.

    Returns:
        What is known about each.

    Raises:
        ValueError: as `distil`, and when too few answers are left to learn from.
    """
    if drafters < 2:
        raise ValueError(f"boosting makes 2 drafters or more, not {drafters}; for one use `outrider distil`")
    if threshold is not None and threshold <= 1:
        raise ValueError(f"threshold is {threshold:g}; every drafter emits 1 token a pass or more, so give more than 1")
    if any(mark in str(out) for mark in "+>"):
        raise ValueError(f"{out} cannot be named as one drafter of several, which + and > join; give another folder")
    found, _ = load_examples(engine, data, check_run(engine, data, out / "1", plan), tell)
    known, left = [], list(range(len(found)))
    for number in range(1, drafters + 1):

        def tell_which(done: int, total: int, what: str, number: int = number) -> None:
            tell(done, total, f"drafter {number}: {what}")

        student, facts = distil(
            engine,
            data,
            out / str(number),
            plan,
            replace(settings, seed=settings.seed + number - 1),
            every=every,
            patience=patience,
            chosen=[found[i] for i in left],
            tell=tell_which,
        )
        known.append(facts)
        if number < drafters:
            left = _left(student, found, left, threshold, out / f"left-{number}.json", tell)
    return known


def _left(
    student: Student,
    found: list[Example],
    candidates: list[int],
    threshold: float | None,
    path: Path,
    tell: Tell,
) -> list[int]:
    """Which answers the next drafter learns from; remembered, since it takes a while to find out."""
    asked = {"threshold": threshold, "answers": len(found)}
    if path.exists():
        known = json.loads(path.read_text())
        differ = [name for name in asked if not isinstance(known, dict) or known.get(name) != asked[name]]
        if differ:
            was = known.get(differ[0]) if isinstance(known, dict) else "unknown"
            raise ValueError(
                f"{path} was made with another {differ[0]} ({was}); continue with that, or delete the file and the folders "
                "of the drafters after it"
            )
        left: list[int] = known["left"]
        return left
    lengths = []
    for done, index in enumerate(candidates):
        if done % 64 == 0:
            tell(done, len(candidates), "answers marked")
        lengths.append(predicted_acceptance(student, [found[index]])["acceptance_length"])
    mean = sum(lengths) / len(lengths)
    marked = [length > mean if threshold is None else length >= threshold for length in lengths]
    kept = [index for index, drop in zip(candidates, marked) if not drop]
    if not kept:
        raise ValueError(f"all answers have an acceptance length of {threshold:g} or more; raise --threshold")
    write_atomically(json.dumps(asked | {"left": kept}), path)
    return kept
