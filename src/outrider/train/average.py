"""Several trainings that went on from one drafter, made into one: the average of their weights.

Trainings that begin with the same weights end around a better place than each of them finds, and their average lies nearer to it
(Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned models"). It takes a minute, and the drafter is as
fast as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.bench.tasks import JUDGING_TASKS
from outrider.drafters.folder import load_module
from outrider.models.feature_head import FeatureHead
from outrider.models.mamba_drafter import MambaBlocks
from outrider.train.distil import predicted_acceptance
from outrider.train.kinds import Plan
from outrider.train.students import HeadStudent, MambaStudent, Student
from outrider.train.workshop import check_data, claim, held_out_examples, write_drafter

if TYPE_CHECKING:
    from outrider.api import Engine


def average_folders(
    engine: Engine, folders: Sequence[Path], data: Path, out: Path, tasks: tuple[str, ...] = JUDGING_TASKS
) -> dict[str, Any]:
    """Average drafters and write the folder of what they make.

    Args:
        folders: of feature heads or of Mamba drafters for this target, of the same sizes and draft vocabulary.
        data: a data set, on whose held-out answers the average is judged.
        tasks: whose held-out prompts these answer.

    Returns:
        What is known about it.

    Raises:
        ValueError: for folders that cannot be averaged.
    """
    check_data(engine, data)
    making = {"averaged": [str(folder.resolve()) for folder in folders]}
    claim(out, making, engine, write=False)
    module = averaged([load_module(folder, engine.model) for folder in folders])
    if isinstance(module, FeatureHead):
        plan = Plan("head", module.config.core, module.config.taps, held_out=tasks)
        student: Student = HeadStudent(engine, module)
    else:
        plan, student = Plan("mamba", held_out=tasks), MambaStudent(engine, module)
    held = held_out_examples(engine, data, plan)
    claim(out, making, engine)
    made = {"averaged": [str(folder) for folder in folders]}
    return write_drafter(engine, data, out, plan, student, held, made, predicted_acceptance(student, held))


@torch.no_grad()
def averaged(modules: Sequence[FeatureHead | MambaBlocks]) -> FeatureHead | MambaBlocks:
    """The average of several, in float32.

    Raises:
        ValueError: for fewer than two, or such as differ in more than their weights.
    """
    if len(modules) < 2:
        raise ValueError("an average takes two drafters or more; give their folders")
    first, *others = modules
    for number, other in enumerate(others, start=2):
        if type(other) is not type(first) or other.config != first.config:
            raise ValueError(
                f"drafter {number} is of another kind or size than the first; only trainings of one drafter can be averaged"
            )
        if not torch.equal(other.draft_ids, first.draft_ids):
            raise ValueError(
                f"drafter {number} drafts other tokens than the first; only trainings of one drafter can be averaged"
            )
    states = [module.float().state_dict() for module in modules]
    first.load_state_dict(
        {
            name: torch.stack([state[name] for state in states]).mean(0) if value.is_floating_point() else value
            for name, value in states[0].items()
        }
    )
    return first
