"""With and without compiled kernels."""

from __future__ import annotations

import pytest

from outrider.native import library as module
from outrider.native.library import Unavailable, library


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows finds no compiled kernels."""
    monkeypatch.setattr(module, "_load", lambda: "compiled kernels are switched off (OUTRIDER_NATIVE)")


def needs_kernels() -> None:
    """Skip where they cannot be compiled."""
    try:
        library()
    except Unavailable as reason:
        pytest.skip(str(reason))
