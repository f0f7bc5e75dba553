"""Which layers keep their attention when the others of a model become recurrent: those in which it is missed most.

Each layer is tried alone: its mixer linearized and fitted, all else the teacher's; how far have the teacher's laws gone
from its own. Some layers look things up in the whole text, which a state of constant size cannot; most do not.

Shapes: N texts of T tokens, D width, R positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.models.files import save_atomically
from outrider.models.gdn import GatedDeltaBlock
from outrider.train.linearize import MEASURED, Teacher, Tell, fit_mixer, new_model
from outrider.train.prune import divergence

if TYPE_CHECKING:
    from outrider.api import Engine

TOKENS = 8192  # on which each mixer is fitted


def missed_layers(
    engine: Engine, texts_NT: Tensor, kept: Sequence[int], count: int, run: Path, tell: Tell
) -> list[int]:
    """So many of the kept layers, in order; what is measured is remembered in `run`."""
    if not count:
        return []
    path = run / "attention.safetensors"
    if not path.exists():
        texts_NT = texts_NT[: max(MEASURED, TOKENS // texts_NT.shape[1])]
        half = engine.dtype is torch.bfloat16
        with torch.inference_mode(), torch.autocast(engine.model.device.type, torch.bfloat16, enabled=half):
            farthest = sorted(_distances(engine, texts_NT, kept, tell), reverse=True)
        layers, distances = torch.tensor([layer for _, layer in farthest]), torch.tensor([kl for kl, _ in farthest])
        save_atomically({"layers": layers, "distances": distances}, path)
    found: list[int] = load_file(path)["layers"].tolist()
    return sorted(found[:count])


def _distances(engine: Engine, texts_NT: Tensor, kept: Sequence[int], tell: Tell) -> list[tuple[float, int]]:
    """How far the teacher's laws go without a layer's attention (KL, nats a token), and which layer that was."""
    teacher, found = Teacher(engine, texts_NT), []
    block = new_model(engine, 1).to(engine.model.device).model.layers[0]
    assert isinstance(block, GatedDeltaBlock)
    for index in range(len(teacher.layers)):
        tell(index, len(teacher.layers), "layers tried without attention")
        stream_NTD = teacher.stream_NTD
        mixed_NTD = teacher.advance(index, index + 1)
        if index in kept:
            own_NTD = fit_mixer(block, teacher.layers[index], stream_NTD, mixed_NTD)
            logp_RV, logq_RV = (_laws(engine, teacher.rest(index, x[:MEASURED])) for x in (mixed_NTD, own_NTD))
            found.append((divergence(logp_RV, logq_RV), index))
    tell(len(teacher.layers), len(teacher.layers), "layers tried without attention")
    return found


def _laws(engine: Engine, stream_NTD: Tensor) -> Tensor:
    """Log probabilities after every second token, [R, V]."""
    model: Any = engine.model
    logits_RV: Tensor = model.get_output_embeddings()(model.base_model.norm(stream_NTD[:, 1::2].flatten(0, 1)))
    return logits_RV.float().log_softmax(-1)
