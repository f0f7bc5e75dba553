"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_atomically(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that is there whole or not at all.

    Raises:
        ValueError: when it cannot be written.
    """
    kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    try:
        _replace(path, lambda partial: save_file(kept, partial, metadata))
    except Exception as error:
        raise ValueError(f"{path} cannot be written ({error}); free some space or give another folder") from error


def write_atomically(text: str, path: Path) -> None:
    """A text file that is there whole or not at all."""
    _replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written.

    Raises:
        ValueError: in that case.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{folder} cannot be written; give another folder, or the right to")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # there only if something went wrong
