"""How much surer of itself a drafter should be where tokens are drawn.

Under the coupled rule target and drafter add the same noise to their scores, and a draft is right where both have the same
highest sum. A distilled law is a mean over what the drafter cannot tell, so it is flatter than the target's: scaled up, its
highest sum is more often the target's. Texts do not depend on the scale.

Shapes: R written positions, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.train.batches import make_batch
from outrider.train.features import Example
from outrider.train.students import Student

SCALES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8)
TEMPERATURE = 0.7  # of the draws
DEPTH = 3  # unrolled steps that are asked


@torch.no_grad()
def best_sharpness(student: Student, held_out: Sequence[Example], seed: int = 0) -> tuple[float, dict[float, float]]:
    """The scale of a drafter's scores with which it draws the target's token most often.

    Returns:
        The scale, and for each of `SCALES` the share of drawn tokens that agree.
    """
    rng, hits, count = torch.Generator().manual_seed(seed), dict.fromkeys(SCALES, 0), 0
    for example in held_out:
        batch = make_batch([example]).to(student.device)
        with torch.autocast(student.device.type, dtype=torch.bfloat16):
            outs = [out[batch.learnt_BT] for out in student.outputs(batch, DEPTH)]
        logp_RC = student.laws(batch)(slice(None)) / TEMPERATURE
        noise_RC = _gumbel(logp_RC, rng)
        drawn_R = (logp_RC + noise_RC).argmax(-1)
        for out_RD in outs:
            logq_RC = student.logq(out_RD) / TEMPERATURE
            count += len(drawn_R)
            for scale in SCALES:
                hits[scale] += int(((scale * logq_RC + noise_RC).argmax(-1) == drawn_R).sum())
    agreement = {scale: hit / max(count, 1) for scale, hit in hits.items()}
    return max(agreement, key=lambda scale: (agreement[scale], -abs(scale - 1))), agreement


def _gumbel(like_RC: Tensor, rng: torch.Generator) -> Tensor:
    uniform_RC = torch.rand(like_RC.shape, generator=rng).clamp_(1e-20)
    return -(-uniform_RC.log()).log().to(like_RC.device)
