"""Outrider: lossless speculative decoding for language models with any kind of state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.api import Engine, Result, load
    from outrider.hf_generate import custom_generate
    from outrider.options import Options

# Threads that wait for each other spin, by default so long that a second busy process on the same cores slows every pass many
# times. GNU OpenMP reads this once, when torch is imported; who has set either variable knows better.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"
__all__ = ["Engine", "Options", "Result", "custom_generate", "load"]

_HOMES = {
    "Engine": "outrider.api",
    "Result": "outrider.api",
    "load": "outrider.api",
    "custom_generate": "outrider.hf_generate",
    "Options": "outrider.options",
}


def __dir__() -> list[str]:
    """What there is, imported or not."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """Import on first use: `outrider --help` should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    from importlib import import_module

    # kept, since importing a submodule of the same name has just put the module in its place
    globals()[name] = found = getattr(import_module(_HOMES[name]), name)
    return found
