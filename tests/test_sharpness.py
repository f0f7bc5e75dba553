"""The scale of a drafter's scores where tokens are drawn: found by training, kept in the folder, without influence on texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from outrider.api import Engine
from outrider.drafters.catalog import make_drafter
from outrider.drafters.lm import LMDrafter
from outrider.train.batches import Batch
from outrider.train.features import Example
from outrider.train.losses import Laws
from outrider.train.sharpness import SCALES, best_sharpness

pytest_plugins = ["workshop_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


class Flat:
    """A student whose law is the target's, flattened: its logits are the target's divided by a number."""

    module, device = nn.Identity(), torch.device("cpu")

    def __init__(self, flatter: float) -> None:
        self.flatter, self.logits_RC = flatter, 3 * torch.randn(400, 50, generator=torch.Generator().manual_seed(1))
        self.draft_ids, self.cut_CD = torch.arange(50), torch.empty(50, 0)

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        yield self.logits_RC[None]

    def laws(self, batch: Batch) -> Laws:
        return lambda rows: self.logits_RC[batch.learnt_BT[0]][rows].log_softmax(-1)

    def logq(self, out_RD: Tensor) -> Tensor:
        return (out_RD / self.flatter).float().log_softmax(-1)


@pytest.mark.parametrize("flatter", [0.8, 1.0, 1.4])
def test_the_scale_undoes_what_flattened_a_law(flatter: float) -> None:
    student = Flat(flatter)
    text = Example(torch.zeros(400, dtype=torch.long), 1, 0.7, lambda: torch.zeros(400, 1))
    scale, agreement = best_sharpness(student, [text])
    assert scale == pytest.approx(flatter, abs=0.11)
    assert agreement[scale] > 0.97 and agreement[SCALES[-1]] < agreement[scale]


def test_a_trained_drafter_keeps_its_scale_and_texts_do_not_depend_on_it(
    engine: Engine, head: Path, tmp_path: Path
) -> None:
    known = json.loads((head / "config.json").read_text())
    assert known["sharpness"] in SCALES and set(known["drawn_agreement"]) >= {"1.0"}
    texts, folder = [], tmp_path / "head"
    shutil.copytree(head, folder)
    for scale in (0.5, 1.0, 3.0):
        (folder / "config.json").write_text(json.dumps({**known, "sharpness": scale}))
        drafter = make_drafter(str(folder), engine.target, engine.tokenizer, dtype=engine.dtype)
        assert isinstance(drafter, LMDrafter) and drafter.sharpness == scale
        with engine.drafting(drafter):
            texts.append(engine.generate("abc", seed=3, temperature=0.9, shape="2x2x1", max_new_tokens=24).token_ids)
    assert (
        texts[0]
        == texts[1]
        == texts[2]
        == engine.generate("abc", seed=3, temperature=0.9, shape="off", max_new_tokens=24).token_ids
    )
    (folder / "config.json").write_text(json.dumps({**known, "sharpness": "very"}))
    with pytest.raises(ValueError, match="sharpness"):
        make_drafter(str(folder), engine.target, engine.tokenizer, dtype=engine.dtype)


def test_scores_are_scaled_where_tokens_are_drawn_and_nowhere_else(engine: Engine, target: Path) -> None:
    drafter = make_drafter(str(target), engine.target, engine.tokenizer, dtype=engine.dtype)
    assert isinstance(drafter, LMDrafter) and drafter.sharpness == 1.0
    kept = {}
    for scale, temperature in ((1.0, 0.9), (0.2, 0.9), (0.2, 0.0)):
        drafter.sharpness = scale
        with engine.drafting(drafter):
            stats = engine.generate("abc", seed=3, temperature=temperature, shape="chain3", max_new_tokens=24).stats
        kept[scale, temperature] = stats.accepted / stats.tried
    assert kept[1.0, 0.9] == kept[0.2, 0.0] == 1.0  # the target as its own drafter
    assert kept[0.2, 0.9] < 0.9
