"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_atomically(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file that is there whole or not at all.

    Raises:
        ValueError: when it cannot be written.
    """
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)
        os.replace(partial, path)
    except Exception as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written ({error}); free some space or give another folder") from error
