"""From an attention model to the folder of a Gated DeltaNet language model: its layers are fitted to the teacher's in closed form
(`linearize`), then distilled end to end on the teacher's own answers and laws.

Steps go on where a killed run stopped; what they need for that lies in `OUT/run`.

Shapes: B rows, T tokens, R written positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.bench.tasks import JUDGING_TASKS
from outrider.models.files import save_atomically
from outrider.models.gdn import GatedDeltaMixer
from outrider.train.batches import make_batch
from outrider.train.card import about, model_card
from outrider.train.data import make_held_out, read_answers
from outrider.train.distil import DistilSettings, Trainer
from outrider.train.features import Example, compute_features, examples, tell_cut
from outrider.train.hybrid import missed_layers
from outrider.train.kinds import Plan
from outrider.train.linearize import check_teacher, equally_long, kept_layers, linearize
from outrider.train.llama_student import LlamaStudent, save_transformer
from outrider.train.plots import language_curve
from outrider.train.students import Student
from outrider.train.workshop import Tell, check_data, check_laws, claim, plan_taps, silent, train

if TYPE_CHECKING:
    from outrider.api import Engine

MEASURED = 16  # held-out answers on which closeness is measured
KNOWN = 0.25  # of the learning rate, for what was taken over from the teacher as it is
ORIGIN = "origin.json"  # what is known of a model's making, beside it


@dataclass(frozen=True)
class LinearPlan:
    """What to make.

    Args:
        layers: how many of the teacher's to keep; None is all.
        attention: how many of these keep their attention, the ones in which it is missed most.
        tokens: about how many of the teacher's answers to fit on.
        held_out: tasks, and FILE.jsonl, on whose held-out prompts closeness is measured.
    """

    layers: int | None = None
    tokens: int = 32768
    held_out: tuple[str, ...] = JUDGING_TASKS
    attention: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1024:
            raise ValueError(f"{self.tokens} tokens are too few to fit layers on; give at least 1024, better 32k")


class LanguageTrainer(Trainer):
    """The loop for a whole language model, which begins near to where it should go."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW, and small steps for what the teacher had learnt already: of matrices this large, the orthogonal steps of Muon
        would cost as much as their gradients."""
        mixers = [m for m in self.module.modules() if isinstance(m, GatedDeltaMixer)]
        new = [p for mixer in mixers for p in mixer.parameters()]
        chosen = set(map(id, new))
        known = [p for p in self.module.parameters() if id(p) not in chosen]
        return [
            torch.optim.AdamW([{"params": group, "scale": scale}], weight_decay=0.0, betas=(0.9, 0.95))
            for group, scale in ((new, 1.0), (known, KNOWN))
        ]

    def gain(self, point: dict[str, float]) -> float:
        """Closeness of laws."""
        return -point["kl"]


def linear_lm(
    engine: Engine,
    data: Path,
    out: Path,
    plan: LinearPlan,
    settings: DistilSettings | None,
    *,
    every: float = 120.0,
    patience: int = 0,
    tell: Tell = silent,
) -> dict[str, Any]:
    """Make the model, or go on making it; returns what is known about it.

    Args:
        settings: of the distillation; None leaves the model as fitted.

    Raises:
        ValueError: when teacher, data or folder do not fit, or training fails.
    """
    check_teacher(engine, plan.layers, plan.attention)
    check_data(engine, data)
    held_out = make_held_out(engine, data, tasks=plan.held_out)
    claim(out, asdict(plan), engine)
    answers = [answer.ids for answer in read_answers(data)]
    tell_cut(data, answers)
    texts_NT = equally_long(answers, plan.tokens).to(engine.model.device)
    kept = kept_layers(engine, texts_NT, plan.layers, out / "run", tell)
    attention = missed_layers(engine, texts_NT, kept, plan.attention, out / "run", tell)
    model, kept = linearize(engine, texts_NT, plan.layers, out / "run", tell, attention)
    reads = Plan("llama", held_out=plan.held_out)
    taps = plan_taps(engine, reads)
    compute_features(engine, data, taps, tell, "shard-*.safetensors" if settings else held_out.name)
    compute_features(engine, data, taps, silent, held_out.name)
    held = examples(data, taps, held_out.name)
    held = held[:: max(1, len(held) // MEASURED)][:MEASURED]
    student = LlamaStudent(engine, model, torch.arange(model.config.vocab_size))
    check_laws(engine, student, held[0])
    facts: dict[str, Any] = {
        "kind": "Gated DeltaNet language model, linearized",
        "layers_of_the_teacher": kept,
        "layers_with_attention": attention,
        "parameters": sum(p.numel() for p in model.parameters()),
        "fitted_on_tokens": plan.tokens,
    }
    if settings is None:
        facts |= closeness(student, held)
    else:
        facts |= _distil(student, settings, data, out, taps, held, every, patience, tell)
    known = about(engine, data, **facts)
    model.requires_grad_(False).eval()
    save_transformer(model, out, engine, known, _card(known), ORIGIN)
    return known


def _distil(
    student: LlamaStudent,
    settings: DistilSettings,
    data: Path,
    out: Path,
    taps: tuple[int, ...],
    held: list[Example],
    every: float,
    patience: int,
    tell: Tell,
) -> dict[str, Any]:
    trainer, best = LanguageTrainer(student, settings, out / "run"), out / "run" / "best.safetensors"
    if not trainer.curve:
        start = closeness(student, held)
        trainer.curve.append({"seconds": 0.0, "tokens": 0, "loss": start["kl"], **start})
        save_atomically(dict(student.module.state_dict()), best)

    def feed() -> list[Example]:  # prompts teach as well as answers: they are read in any case
        return [replace(example, prompt_length=1) for example in examples(data, taps)]

    train(trainer, feed, lambda: closeness(student, held), language_curve, every, patience, tell)
    reached = max(trainer.curve, key=trainer.gain)
    return {
        "distilled_on_tokens": trainer.tokens,
        "minutes": trainer.seconds / 60,
        "settings": {name: getattr(settings, name) for name in ("minutes", "loss", "rate", "batch_tokens", "seed")},
        "kl_as_fitted": trainer.curve[0]["kl"],
        **{name: reached[name] for name in ("kl", "perplexity", "agreement")},
    }


@torch.no_grad()
def closeness(student: Student, held: Sequence[Example]) -> dict[str, float]:
    """How close a language model is to its teacher on held-out answers.

    Args:
        student: knows the whole vocabulary.

    Returns:
        "kl": KL(p || q), nats a token; "perplexity": of the teacher's answers; "agreement": share of positions with the same
        first choice.
    """
    divergence = nll = same = count = 0.0
    for example in held:
        batch = make_batch([example]).to(student.device)
        with torch.autocast(student.device.type, dtype=torch.bfloat16):
            out_RD = next(iter(student.outputs(batch, 1)))[batch.learnt_BT]
        logp_RV, logq_RV = student.laws(batch)(slice(None)), student.logq(out_RD)
        written_R = batch.ids_BT.roll(-1, 1)[batch.learnt_BT]
        divergence += float((logp_RV.exp() * (logp_RV - logq_RV)).sum())
        nll -= float(logq_RV.gather(-1, written_R[:, None]).sum())
        same += float((logp_RV.argmax(-1) == logq_RV.argmax(-1)).sum())
        count += len(written_R)
    return {"kl": divergence / count, "perplexity": math.exp(nll / count), "agreement": same / count}


def _card(known: dict[str, Any]) -> str:
    rest = "with attention in some of its layers" if known["layers_with_attention"] else "without attention"
    text = (
        f"A Gated DeltaNet language model, {rest}, made out of an attention model: layers fitted in closed form, then "
        "distilled on the teacher's answers. Its layout is flash-linear-attention's. KL, perplexity and agreement are those "
        "against its teacher, on answers to prompts that were never trained on."
    )
    use = 'It writes as any target does:\n\n    outrider generate "..." --target THIS_FOLDER --drafter ngram'
    return model_card(f"A linear-attention model out of {known['target']}", text, use, known)
