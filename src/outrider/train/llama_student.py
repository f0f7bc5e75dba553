"""A stand-alone transformer in training: wide and shallow, with the target's width, embedding and vocabulary.

It starts from a pruned target (`train/prune.py`) or fresh, and ends as an ordinary transformers folder beside which
`drafter.json` names the target and, where its vocabulary was cut, `draft_ids.safetensors` the tokens that it learnt.

Shapes: B rows, T tokens, D width, C draft vocabulary, R written positions.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.drafters.small_lm import ABOUT, DRAFT_IDS
from outrider.models.convert import quiet_transformers
from outrider.models.files import save_atomically
from outrider.train.batches import Batch
from outrider.train.losses import Laws
from outrider.train.students import drafted_laws, target_laws

if TYPE_CHECKING:
    from outrider.api import Engine


class Trunk(nn.Module):
    """What is trained of a transformer: its layers and final norm, not the embedding and the vocabulary head."""

    draft_ids: Tensor

    def __init__(self, model: PreTrainedModel, draft_ids: Tensor) -> None:
        super().__init__()
        base: Any = model.base_model
        self.layers, self.norm = base.layers, base.norm
        self.register_buffer("draft_ids", draft_ids)


class LlamaStudent:
    """A llama-like model in training, float32.

    Args:
        model: reads token ids only; its embedding and vocabulary head stay as they are.
    """

    def __init__(self, engine: Engine, model: PreTrainedModel, draft_ids: Tensor) -> None:
        self.device = engine.model.device
        self.model = model.float().to(self.device).train()
        self.draft_ids = draft_ids.to(self.device)
        self.module: nn.Module = Trunk(self.model, self.draft_ids)
        self.model.requires_grad_(False)
        self.module.requires_grad_(True)
        # the drafter's own vocabulary head, which stays as it is, and the target's
        self.cut_CD = self.model.get_output_embeddings().weight.detach()[self.draft_ids].to(engine.dtype)
        self.target_CD = engine.model.get_output_embeddings().weight.detach()[self.draft_ids]
        base: Any = engine.model.base_model
        self.final_norm: nn.Module = base.norm

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """The final hidden states [B, T, D] of the one step: nothing is read of the target."""
        base: Any = self.model.base_model
        yield base(input_ids=batch.ids_BT, use_cache=False).last_hidden_state

    def laws(self, batch: Batch) -> Laws:
        """The target's laws at the written positions, cut to the draft vocabulary."""
        return target_laws(batch, self.final_norm, self.target_CD)

    def logq(self, out_RD: Tensor) -> Tensor:
        """The drafter's laws, log probabilities [R, C]."""
        return drafted_laws(out_RD, self.cut_CD)


def new_llama(engine: Engine, layers: int, seed: int, neurons: int | None = None) -> PreTrainedModel:
    """An untrained transformer of the target's width with the target's embedding and vocabulary head, and as many neurons."""
    config = engine.model.config.get_text_config()
    width = config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or max(1, width // 64)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=width,
            intermediate_size=neurons or getattr(config, "intermediate_size", None) or width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            max_position_embeddings=getattr(config, "max_position_embeddings", None) or 8192,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=getattr(config, "pad_token_id", None),
        )
    )
    for name, parameter in model.base_model.layers.named_parameters():
        if parameter.ndim == 2:
            scale = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(engine.model.get_input_embeddings().weight)
        model.get_output_embeddings().weight.copy_(engine.model.get_output_embeddings().weight)
    return model


def save_transformer(
    model: PreTrainedModel, folder: Path, engine: Engine, about: dict[str, Any], card: str, name: str = ABOUT
) -> None:
    """Write a transformers folder with the target's tokenizer, what is known about it (as `name`) and a card; `config.json` comes
    last, so that a folder with one is whole."""
    partial = folder / "part"
    partial.mkdir(parents=True, exist_ok=True)
    try:
        with quiet_transformers():
            copy.deepcopy(model).to(engine.dtype).save_pretrained(partial)
        if engine.tokenizer is not None:
            engine.tokenizer.save_pretrained(partial)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError(f"{folder} cannot be written ({error}); free some space or give another folder") from error
    (partial / name).write_text(json.dumps(about, indent=1) + "\n")
    (partial / "README.md").write_text(card)
    for path in sorted(partial.iterdir(), key=lambda p: p.name == "config.json"):
        os.replace(path, folder / path.name)
    partial.rmdir()


def save_llama(student: LlamaStudent, folder: Path, engine: Engine, about: dict[str, Any], card: str) -> None:
    """Write a trained transformer."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(student.draft_ids) < student.model.get_input_embeddings().weight.shape[0]:
        save_atomically({"draft_ids": student.draft_ids.to(torch.int32)}, folder / DRAFT_IDS)
    save_transformer(student.model, folder, engine, about, card)
