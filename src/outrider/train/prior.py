"""What a drafter's rounds bring on held-out prompts, kept beside its weights: so the first drafted round has the right shape.

Rounds take turns over a few shapes, wide and deep enough to tell of all others. Times are kept as they were measured; where they
are used they count in plain passes, and everything counts as a few rounds only (`Counterfactual.believe`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.clocks import Clocks
from outrider.drafters.catalog import learned_arms, parts
from outrider.drafters.folder import PRIOR, read_priors
from outrider.knowledge import Knowledge, to_data
from outrider.models.files import check_writable, write_atomically
from outrider.rounds import Round
from outrider.tree import MATCHES, OFF, Shape, parse_shape

if TYPE_CHECKING:
    from outrider.api import Engine
    from outrider.bench.tasks import Prompt

SHAPES, LEAST = ("3x2x1x1x1", "chain8", "2x2x1x1x1x1", "chain3"), 0.02
ENOUGH = 0.15  # where levels of trees that grow best first end
FEWEST = 40  # drafted rounds
Tell = Callable[[int, int, str], None]


class Listening:
    """A controller that goes round a few shapes and forgets nothing of what it hears."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes, self.rounds = [*shapes, OFF], 0
        self.knowledge, self.clocks = Knowledge(), Clocks(discount=1.0)

    def choose(self) -> Shape:
        """The next one."""
        self.rounds += 1
        return self.shapes[self.rounds % len(self.shapes)]

    def reward(self, done: Round) -> None:
        """Hear of it."""
        self.clocks.hear(done)
        if done.shape.depth:
            self.knowledge.hear(done)


def measure_prior(
    engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int, tell: Tell = lambda done, total, what: None
) -> dict[str, Any]:
    """Write answers to the prompts, half of them greedily, half at temperature 0.7.

    Raises:
        ValueError: without a drafter, or when too few rounds were drafted to tell anything.
    """
    if engine.drafter is None:
        raise ValueError("there is no drafter to measure; give one with --drafter")
    widest = max(learned_arms(engine.drafter), key=lambda arm: arm.nodes)
    fixed = [parse_shape(name).adapting(LEAST, widest.reach) for name in SHAPES]
    grown = [widest.adapting(LEAST, widest.reach, enough=ENOUGH)] if widest.budget else fixed
    fixed, grown = _with_and_without_lookups(fixed), _with_and_without_lookups(grown)
    listening = Listening(grown)
    for number, prompt in enumerate(prompts):
        tell(number, len(prompts), "measuring")
        listening.shapes = [*(fixed if number % 4 == 3 else grown), OFF]
        options: dict[str, Any] = {"temperature": 0.7 * (number % 2), "seed": number, "max_new_tokens": max_new_tokens}
        engine.generate(prompt.encode(engine), shape=listening, **options)
    if listening.clocks.asked < FEWEST or not listening.clocks.weight:
        raise ValueError("too few rounds were drafted to tell anything; give more prompts or more tokens")
    return _short(to_data(listening.knowledge, listening.clocks))


def _with_and_without_lookups(shapes: Sequence[Shape]) -> list[Shape]:
    """All lookups before a model are trusted in one round, and none of them in the next one: what each would have brought is seen
    anyway."""
    found = list[Shape]()
    for shape in shapes:
        trusts = [(depth,) * len(MATCHES) for depth in (shape.reach, 0)] if shape.reach else [()]
        found += [replace(shape, trust=trust) for trust in trusts]
    return found


def keep_prior(engine: Engine, prior: dict[str, Any]) -> Path:
    """Write it beside the weights of the engine's drafter; the file is returned.

    Raises:
        ValueError: when the drafter has no folder.
    """
    assert engine.drafter is not None
    path = prior_file(engine)
    write_atomically(json.dumps(read_priors(path.parent) | {engine.drafter.name: prior}) + "\n", path)
    return path


def prior_file(engine: Engine) -> Path:
    """Where the prior of the engine's drafter is kept.

    Raises:
        ValueError: when the drafter has no folder, or one that may not be written.
    """
    if engine.drafter is None:
        raise ValueError("there is no drafter to measure; give one with --drafter")
    folders = [part.folder for part in parts(engine.drafter) if getattr(part, "folder", None)]
    if not folders:
        raise ValueError(f"drafter {engine.drafter.name!r} has no folder to keep a prior in; name one that was trained")
    check_writable(folders[-1])
    path: Path = folders[-1] / PRIOR
    return path


def _short(value: Any) -> Any:
    """Four digits are enough."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [float(f"{item:.4g}") for item in value]
