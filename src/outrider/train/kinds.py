"""The kinds of drafters that can be trained: how each begins and how each is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from outrider.bench.tasks import JUDGING_TASKS
from outrider.drafters.small_lm import DRAFT_IDS
from outrider.models.feature_head import FeatureHead
from outrider.models.files import save_atomically
from outrider.models.mamba_drafter import MambaBlocks
from outrider.train.distil import DRAFT_VOCAB, DistilSettings
from outrider.train.features import Example
from outrider.train.larger import larger_head, larger_mamba
from outrider.train.llama_student import LlamaStudent, new_llama, save_llama
from outrider.train.students import HeadStudent, MambaStudent, Student, frequent_tokens, new_head, new_mamba

if TYPE_CHECKING:
    from outrider.api import Engine

KINDS = ("head", "mamba", "llama")


@dataclass(frozen=True)
class Plan:
    """What to train.

    Args:
        kind: "head" (reads the target's hidden states), "mamba" or "llama" (stand-alone models).
        core: of a head: "attention", "ssm" or "hybrid".
        taps: layers of the target that a head reads, the last layer last; by default about 1/4, 3/5 and the last.
        layers: blocks of a fresh stand-alone model; by default 3 of Mamba, 2 of a transformer. These and the sizes below are also
            what a Mamba to start from grows to.
        neurons: feed-forward neurons of every block of a fresh drafter; by default none of Mamba, 8/3 of its width of a head, and
            the target's of a transformer.
        init: a folder to start from: a drafter of the same kind to train on, or, for a llama, what `prune` writes.
        held_out: tasks, and FILE.jsonl, on whose held-out prompts acceptance is predicted.
        state: state size of a fresh Mamba mixer; by default 32, and 64 in a head.
    """

    kind: str = "head"
    core: str = "attention"
    taps: tuple[int, ...] = ()
    layers: int | None = None
    neurons: int | None = None
    init: str | None = None
    held_out: tuple[str, ...] = JUDGING_TASKS
    state: int | None = None


def default_taps(engine: Engine) -> tuple[int, ...]:
    """About a quarter and three fifths up the stack, and the last layer."""
    last = engine.model.config.get_text_config().num_hidden_layers - 1
    return tuple(sorted({last // 4, last * 3 // 5, last}))


def check_plan(engine: Engine, plan: Plan) -> Plan:
    """Refuse what can be refused before anything is computed.

    Returns:
        The plan, with the taps of the head to start from if it says none.

    Raises:
        ValueError: for a target that cannot be learnt from, or a drafter that cannot be started from.
    """
    if not hasattr(engine.model.base_model, "norm"):
        raise ValueError(
            f"{engine.name} is of type {engine.model.config.model_type}, from which drafters cannot be distilled yet; use a "
            "llama-like target, or `outrider table`"
        )
    if plan.init is not None and not (Path(plan.init) / "config.json").is_file():
        raise ValueError(
            f"{plan.init} holds nothing to start from; give a drafter's folder, or what `outrider prune --no-finetune` writes"
        )
    if plan.init is None or plan.kind == "llama":
        return plan
    module = _to_start_from(engine, plan)
    return replace(plan, taps=module.config.taps) if isinstance(module, FeatureHead) else plan


def _to_start_from(engine: Engine, plan: Plan) -> FeatureHead | MambaBlocks:
    from outrider.drafters.folder import load_module

    folder = Path(plan.init or "")
    module = load_module(folder, None).float()
    config = engine.model.config.get_text_config()
    if module.config.width != config.hidden_size or int(module.draft_ids.max()) >= config.vocab_size:
        raise ValueError(
            f"the drafter in {folder} was made for a target of another width or vocabulary than {engine.name}; start afresh"
        )
    head = isinstance(module, FeatureHead)
    if plan.kind != ("head" if head else "mamba") or (
        isinstance(module, FeatureHead) and plan.taps not in ((), module.config.taps)
    ):
        raise ValueError(
            f"{folder} holds another drafter than the one asked for; start from one of the same kind and taps"
        )
    return module


def make_student(engine: Engine, plan: Plan, found: list[Example], settings: DistilSettings, run: Path) -> Student:
    """An untrained student.

    Args:
        run: folder that may remember the draft vocabulary, which must not change when a run goes on with more data.

    Raises:
        ValueError: for an unknown kind, or a target that it cannot learn from.
    """
    plan = check_plan(engine, plan)
    if plan.init is not None and plan.kind in ("head", "mamba"):
        return _known(engine, plan, found, settings, run)
    known = Path(plan.init or "") / DRAFT_IDS
    if plan.init is not None and settings.draft_vocab is None and known.exists():
        ids = load_file(known)["draft_ids"].long()
    else:
        ids = _draft_ids(engine, found, settings.draft_vocab or DRAFT_VOCAB, run)
    if plan.kind == "head":
        return _head(engine, plan, found, settings, ids)
    if plan.kind == "mamba":
        blocks = new_mamba(
            engine, found, len(ids), settings.seed, plan.layers or 3, plan.neurons or 0, plan.state or 32
        )
        blocks.draft_ids = ids
        return MambaStudent(engine, blocks)
    if plan.kind == "llama":
        return LlamaStudent(engine, _llama(engine, plan, settings.seed), ids)
    raise ValueError(f"drafters of kind {plan.kind!r} cannot be trained; use {', '.join(KINDS)}")


def _draft_ids(engine: Engine, found: list[Example], count: int, run: Path) -> torch.Tensor:
    """The most frequent tokens, or those that were when the run began.

    Raises:
        ValueError: when these were not as many.
    """
    vocab, path = engine.model.config.get_text_config().vocab_size, run / DRAFT_IDS
    count = min(count, vocab)
    if not path.exists():
        return frequent_tokens(found, count, vocab)
    ids = load_file(path)["draft_ids"]
    if len(ids) != count:
        raise ValueError(
            f"the run in {run} began with a draft vocabulary of {len(ids)} tokens, not {count}; continue with "
            f"--draft-vocab {len(ids)}, or give another folder"
        )
    return ids


def keep_draft_ids(student: Student, run: Path) -> None:
    """Remember the draft vocabulary of a run that begins."""
    if not (run / DRAFT_IDS).exists():
        save_atomically({"draft_ids": student.draft_ids}, run / DRAFT_IDS)


def _head(engine: Engine, plan: Plan, found: list[Example], settings: DistilSettings, ids: torch.Tensor) -> Student:
    taps = plan.taps or default_taps(engine)
    head = new_head(
        engine, found, taps, len(ids), settings.seed, plan.core, neurons=plan.neurons, state=plan.state or 64
    )
    head.draft_ids = ids
    return HeadStudent(engine, head)


def _known(engine: Engine, plan: Plan, found: list[Example], settings: DistilSettings, run: Path) -> Student:
    """A trained head or Mamba, to be trained on; a head may get another core. Its target may be another one of the same width and
    vocabulary, such as the one that this one was made out of. The vocabulary head is borrowed, so it may be cut anew."""
    module = _to_start_from(engine, plan)
    if settings.draft_vocab not in (None, len(module.draft_ids)):
        module.draft_ids = _draft_ids(engine, found, settings.draft_vocab or DRAFT_VOCAB, run)
        module.config = replace(module.config, draft_vocab=len(module.draft_ids))
    if isinstance(module, MambaBlocks):
        return MambaStudent(engine, larger_mamba(engine, module, settings.seed, plan.layers, plan.neurons, plan.state))
    if module.config.core != plan.core:
        size, old = len(module.draft_ids), module.config
        sizes = {"window": old.window, "neurons": old.ffn, "state": old.ssm_state}
        module = graft(new_head(engine, found, old.taps, size, settings.seed, plan.core, **sizes), module)
    return HeadStudent(engine, larger_head(engine, module, settings.seed, plan.neurons))


@torch.no_grad()
def graft(fresh: FeatureHead, known: FeatureHead) -> FeatureHead:
    """A head of another core that keeps all that a trained one can give it. What is new in it starts by adding nothing."""
    own, given = fresh.state_dict(), known.state_dict()
    shared = {name: t for name, t in given.items() if name in own and own[name].shape == t.shape}
    fresh.load_state_dict({**own, **shared})
    if fresh.scans and not known.scans:
        fresh.ssm.out_proj.weight.zero_()
    if fresh.attends and not known.attends:
        fresh.mixed.weight.zero_()
    return fresh


def _llama(engine: Engine, plan: Plan, seed: int) -> Any:
    from outrider.models.loading import load_model

    if plan.init is None:
        return new_llama(engine, plan.layers or 2, seed, plan.neurons)
    model = load_model(plan.init, dtype=torch.float32, device=engine.model.device).model
    theirs, ours = model.config.vocab_size, engine.model.config.get_text_config().vocab_size
    if theirs != ours:
        raise ValueError(f"{plan.init} has {theirs} tokens and {engine.name} {ours}; start from a model pruned from it")
    return model


def save_student(engine: Engine, plan: Plan, student: Student, out: Path, about: dict[str, Any], card: str) -> None:
    """Write the drafter folder."""
    from outrider.drafters.folder import save_head, save_mamba

    if isinstance(student, HeadStudent):
        save_head(student.head, out, about, card)
    elif isinstance(student, MambaStudent):
        save_mamba(student.blocks, out, about, card)
    elif isinstance(student, LlamaStudent):
        save_llama(student, out, engine, about, card)
