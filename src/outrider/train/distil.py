"""Distil a drafter from a target's laws over its own answers.

The loop knows a `Student`, which gives for a batch one set of outputs per unrolled step. Loss is taken on written
tokens only. Progress is by time: the learning rate falls to zero at the end of the budget. A checkpoint holds weights,
optimiser state and clock, and appears whole or not at all; a run that was killed goes on from it.

Shapes: T tokens, C draft vocabulary, R written positions.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.models.files import save_atomically
from outrider.train.batches import Batch, batches, make_batch
from outrider.train.features import Example
from outrider.train.losses import LOSSES, head_loss
from outrider.train.students import Student

Tell = Callable[[int, int, str], None]
OPTIMIZERS = ("muon", "adamw")
DRAFT_VOCAB = 12_000


@dataclass(frozen=True)
class DistilSettings:
    """How to train.

    Args:
        minutes: budget of wall clock.
        steps: unrolled steps, at least 1.
        ramp: share of the budget over which they grow from one to all: early on, more text teaches more than deeper steps.
        loss: a name of `LOSSES`.
        rate: peak learning rate (of Muon, matched to AdamW's scale).
        batch_tokens: tokens of a batch, padding included.
        draft_vocab: tokens that are drafted; None: as many as the drafter to start from has, or `DRAFT_VOCAB`.
        optimizer: of matrices, a name of `OPTIMIZERS`; all other parameters have AdamW.
        prompts: whether tokens of the prompts are learnt too, besides those that the target wrote.
    """

    minutes: float = 60.0
    steps: int = 4
    ramp: float = 0.6
    loss: str = "kl"
    rate: float = 2e-3
    batch_tokens: int = 2048
    draft_vocab: int | None = None
    seed: int = 0
    optimizer: str = "muon"
    prompts: bool = False

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss {self.loss!r} is unknown; use {', '.join(LOSSES)}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is unknown; use {', '.join(OPTIMIZERS)}")
        if not 0 < self.minutes < math.inf or self.steps < 1 or not 0 < self.rate < math.inf or self.batch_tokens < 64:
            raise ValueError("minutes, steps and rate must be above 0 and batch_tokens at least 64")
        if not 0.0 <= self.ramp < 1.0:
            raise ValueError(f"a ramp of {self.ramp} would never reach all steps; use 0 up to 1")

    def steps_at(self, progress: float) -> int:
        """Unrolled steps when this share of the budget is spent."""
        return self.steps if progress >= self.ramp else 1 + int(self.steps * progress / self.ramp)


class Trainer:
    """The loop, with its clock and checkpoint."""

    def __init__(self, student: Student, settings: DistilSettings, out: Path) -> None:
        self.student, self.settings, self.out = student, settings, out
        self.module = student.module
        self.optimizers = self.make_optimizers()
        self.seconds, self.tokens, self.updates, self.passes = 0.0, 0, 0, 0
        self.curve: list[dict[str, float]] = []
        self._resume()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """The chosen one for matrices, AdamW for the rest."""
        matrices = [p for p in self.module.parameters() if p.ndim == 2]
        others = [p for p in self.module.parameters() if p.ndim != 2]
        rate, betas = self.settings.rate, (0.9, 0.95)
        if self.settings.optimizer == "muon":
            first: torch.optim.Optimizer = torch.optim.Muon(
                matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            )
        else:
            first = torch.optim.AdamW(matrices, lr=rate, weight_decay=0.01, betas=betas)
        return [first, torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=betas)]

    def gain(self, point: dict[str, float]) -> float:
        """How good an evaluation found the student: acceptance length."""
        return point["acceptance_length"]

    # -- checkpoint ------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        path = self.out / "checkpoint.safetensors"
        if not path.exists():
            return
        tensors, state = read_checkpoint(path)
        known, asked = asdict(DistilSettings()) | state["settings"], asdict(self.settings)
        differ = [
            name for name in known if known[name] != asked.get(name) and not (name == "ramp" and asked["steps"] == 1)
        ]
        if differ:
            old = ", ".join(f"{name.replace('_', ' ')} {known[name]}" for name in differ)
            raise ValueError(
                f"{self.out} holds a run with other settings ({old}); continue with these, or give another folder"
            )
        self.module.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        for number, optimizer in enumerate(self.optimizers):
            for place, parameter in enumerate(optimizer.param_groups[0]["params"]):
                prefix = f"optimizer.{number}.{place}."
                known = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
                if known:  # beside the parameter, but for the count of steps, which torch keeps on the host
                    optimizer.state[parameter] = {
                        k: v if k == "step" else v.to(parameter.device) for k, v in known.items()
                    }
        for name in ("seconds", "tokens", "updates", "passes", "curve"):
            setattr(self, name, state[name])

    def save(self) -> None:
        """Write a checkpoint."""
        tensors = {f"model.{k}": _kept(v) for k, v in self.module.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for place, parameter in enumerate(optimizer.param_groups[0]["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"optimizer.{number}.{place}.{key}"] = _kept(torch.as_tensor(value))
        names = ("seconds", "tokens", "updates", "passes", "curve")
        state = {name: getattr(self, name) for name in names} | {"settings": asdict(self.settings)}
        save_atomically(tensors, self.out / "checkpoint.safetensors", {"state": json.dumps(state)})
        (self.out / "checkpoint.json").unlink(missing_ok=True)  # of an older version

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self,
        examples: Callable[[], list[Example]],
        evaluate: Callable[[], dict[str, float]],
        tell: Tell = lambda done, total, what: None,
        every: float = 120.0,
        patience: int = 0,
    ) -> None:
        """Train until the budget is spent, evaluating and saving every so many seconds.

        Args:
            examples: what there is to learn from, asked anew at every pass: data may still be growing.
            patience: stop after this many evaluations without gain; 0 never does.

        Raises:
            ValueError: when the loss is not finite.
        """
        budget, last, loss_sum, count = self.settings.minutes * 60, self.seconds, 0.0, 0
        while self.seconds < budget and not self.stalled(patience):
            # a pass that goes on after a kill has another order: it should not begin with what it has learnt already
            order = random.Random(f"{self.settings.seed} {self.passes} {self.updates}")
            for batch in batches(examples(), self.settings.batch_tokens, order, self.settings.prompts):
                start = time.perf_counter()
                loss_sum, count = loss_sum + self._update(batch, self.seconds / budget), count + 1
                self.seconds += time.perf_counter() - start
                if self.seconds - last > every or self.seconds >= budget:
                    last = self.seconds
                    found = {"seconds": self.seconds, "tokens": self.tokens, "loss": loss_sum / count, **evaluate()}
                    self.curve.append(found)
                    loss_sum, count = 0.0, 0
                    self.save()
                    tell(
                        int(self.seconds),
                        int(budget),
                        ", ".join(f"{k} {v:.3g}" for k, v in found.items() if k != "seconds"),
                    )
                    if self.stalled(patience):
                        return
                if self.seconds >= budget:
                    return
            self.passes += 1

    def stalled(self, patience: int) -> bool:
        """Whether the last `patience` evaluations found nothing better than the best before them."""
        gains = [self.gain(point) for point in self.curve]
        return 0 < patience < len(gains) and max(gains[-patience:]) <= max(gains[:-patience])

    def _update(self, batch: Batch, progress: float) -> float:
        warm = min(1.0, (self.updates + 1) / 50)
        for optimizer in self.optimizers:
            group = optimizer.param_groups[0]
            group["lr"] = self.settings.rate * group.get("scale", 1.0) * warm * max(0.02, 1.0 - progress)
        loss = self.loss(batch, self.settings.steps_at(progress))
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite; lower --rate, or check the data and the target's dtype")
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.updates += 1
        self.tokens += int(batch.learnt_BT.sum())
        return float(loss.detach())

    def loss(self, batch: Batch, steps: int) -> Tensor:
        """Mean over unrolled steps, later ones counting a little less."""
        student, batch = self.student, batch.to(self.student.device)
        with torch.autocast(student.device.type, dtype=torch.bfloat16):
            outs_KRD = torch.stack([out[batch.learnt_BT] for out in student.outputs(batch, steps)])
        losses_K = head_loss(outs_KRD, student.cut_CD, student.laws(batch), LOSSES[self.settings.loss])
        weights_K = 0.9 ** torch.arange(len(losses_K), device=losses_K.device)
        return (losses_K * weights_K).sum() / weights_K.sum()


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and optimiser state, and the clock. In one file, so that they belong together; older versions wrote two."""
    with safe_open(path, "pt") as file:
        told: dict[str, str] = file.metadata() or {}
    return load_file(path), json.loads(told["state"] if "state" in told else path.with_suffix(".json").read_text())


def _kept(tensor: Tensor) -> Tensor:
    """A copy on the host, which training goes on without changing."""
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def predicted_acceptance(student: Student, held_out: list[Example], depth: int = 5) -> dict[str, float]:
    """Acceptance of greedy chains over greedy answers that training never saw.

    Returns:
        "acceptance_length": tokens a round (N) of walking through every answer with chains of `depth`;
        "accuracy_1"...: how often the drafter's first choice at that depth is the target's token.
    """
    emitted = rounds = 0
    hits, counts = [0.0] * depth, 0
    for example in held_out:
        batch = make_batch([example]).to(student.device)
        with torch.autocast(student.device.type, dtype=torch.bfloat16):
            picks = [student.draft_ids[student.logq(out[0]).argmax(-1)] for out in student.outputs(batch, depth)]
        picks += picks[-1:] * (depth - len(picks))
        right = torch.stack(picks).cpu()[:, :-1] == example.ids[1:]  # [depth, T - 1]
        at, end = example.prompt_length - 1, len(example.ids) - 1
        hits = [h + float(right[k, at:end].float().mean()) for k, h in enumerate(hits)]
        counts += 1
        while at < end:
            accepted = 0
            while accepted < depth and at + accepted < end and right[accepted, at + accepted]:
                accepted += 1
            gained = min(accepted + 1, end - at)
            at, emitted, rounds = at + gained, emitted + gained, rounds + 1
    return {"acceptance_length": emitted / max(rounds, 1)} | {
        f"accuracy_{k + 1}": h / counts for k, h in enumerate(hits)
    }
