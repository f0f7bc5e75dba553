"""Waiting threads give the core up soon, unless the user has said how they should wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "unset")],
)
def test_the_users_word_on_waiting_holds(given: dict[str, str], spins: str) -> None:
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import outrider, os, sys; print(os.environ.get('GOMP_SPINCOUNT', 'unset'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **given}, capture_output=True, text=True)
    assert done.stdout.split() == [spins, "False"], done.stderr  # set before torch is there to read it
