"""A short mark of a target, by which data and drafters know what they were made for."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


def weights_mark(module: nn.Module) -> str:
    """A short hash of a few numbers of every weight: another training of the same model has another one."""
    digest = hashlib.sha256()
    for name, weight in module.state_dict().items():
        few = weight.flatten()[:: max(1, weight.numel() // 64)].detach().to("cpu", torch.float32)
        digest.update(name.encode() + few.numpy().tobytes())
    return digest.hexdigest()[:16]


def fingerprint(model: Any) -> str:
    """A short hash of a model's configuration and a few of its weights: which target data and drafters belong to."""
    config = model.config.get_text_config()
    digest = hashlib.sha256(f"{config.model_type} {config.vocab_size} {config.hidden_size}".encode())
    embedding = model.get_input_embeddings().weight
    rows = embedding[:: max(1, len(embedding) // 64), :16].detach().to("cpu", torch.float32)
    # rounded, so that a bf16 and an fp32 copy of the same weights are the same target
    digest.update(rows.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
