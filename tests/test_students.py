"""What a drafter reads in training is what it reads when it drafts, also from targets that scale their embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCAB, tiny
from outrider.api import Engine
from outrider.drafters.feature_head import HeadModel
from outrider.drafters.folder import save_head
from outrider.models.fingerprint import fingerprint
from outrider.models.mamba_drafter import MambaModel
from outrider.train.batches import make_batch
from outrider.train.distil import DistilSettings
from outrider.train.features import Example
from outrider.train.kinds import Plan, make_student
from outrider.train.students import HeadStudent, MambaStudent, new_head, new_mamba

TAPS = (0, 1)
IDS = [(5 * i * i + 3) % VOCAB for i in range(14)]


@pytest.mark.parametrize("kind", ["head", "mamba"])
@pytest.mark.parametrize(("family", "scale"), [("llama", 1.0), ("gemma3", 32**0.5)])
def test_training_and_drafting_see_what_the_embedding_layer_returns(family: str, scale: float, kind: str) -> None:
    """Gemma multiplies embeddings by the root of their width: trained without that, a head would draft from what it never saw."""
    engine = Engine(tiny(family), None, family, "off")
    hidden = engine.target.begin([IDS], 0, TAPS).features[0]
    example = Example(torch.tensor(IDS), 4, 0.0, lambda: hidden)
    layer: Any = engine.model.get_input_embeddings()
    borrowed = layer, engine.model.get_output_embeddings()
    student: Any
    if kind == "head":
        student = HeadStudent(engine, new_head(engine, [example], TAPS, VOCAB, 0))
    else:
        student = MambaStudent(engine, new_mamba(engine, [example], VOCAB, 0, layers=1))
    batch = make_batch([example])
    embedded_BTD = student.embed(batch)
    assert not embedded_BTD.requires_grad
    torch.testing.assert_close(embedded_BTD, scale * layer.weight[batch.ids_BT])
    with torch.no_grad():
        trained_TC = student.logq(next(iter(student.outputs(batch, 1)))[0])

    if kind == "head":
        state: Any = HeadModel(student.head, *borrowed).begin([IDS], 8)
        state.see([hidden[:-1]])
    else:
        state = MambaModel(student.blocks, *borrowed).begin([[]], 32)
    drafted_TC = state.extend([IDS], [list(range(-1, len(IDS) - 1))])[0].log_softmax(-1)
    torch.testing.assert_close(drafted_TC, trained_TC, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("old", "new"), [("ssm", "hybrid"), ("hybrid", "ssm")])
def test_another_core_keeps_the_sizes_that_a_head_was_made_with(old: str, new: str, tmp_path: Path) -> None:
    made = Engine(tiny("llama"), None, "llama", "off")
    known = new_head(made, [], (0, 1), 48, 0, old, window=7, neurons=24, state=12)
    save_head(known, tmp_path, {"fingerprint": fingerprint(made.model)}, "")
    plan = Plan(core=new, taps=(0, 1), init=str(tmp_path))
    student = make_student(made, plan, [], DistilSettings(minutes=1), tmp_path)
    assert isinstance(student, HeadStudent) and student.head.config == replace(known.config, core=new)
    own = student.head.state_dict()
    for name in ("down.weight", "ssm.in_proj.weight"):
        torch.testing.assert_close(own[name], known.state_dict()[name], rtol=1e-2, atol=1e-2)
