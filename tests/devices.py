"""The device that tests run on: the CPU, or what `OUTRIDER_TEST_DEVICE` names (cuda, mps ...).

"strict" is `strict_device`, which is always there. Tests marked `any_device` run on the device; all others are for the CPU.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch

import strict_device

NAME = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")
STRICT = NAME == "strict"
DEVICE = strict_device.DEVICE if STRICT else torch.device(NAME)

_for_ever = ExitStack()


def why_not() -> str:
    """Why nothing can run on the device; empty if it is there."""
    if STRICT or NAME == "cpu":
        return ""
    try:
        torch.zeros(1, device=DEVICE)
    except (RuntimeError, AssertionError) as error:
        return f"OUTRIDER_TEST_DEVICE is {NAME}, which is not here ({str(error).splitlines()[0]})"
    return ""


def set_up() -> None:
    """Make the device compute as exactly as the tests ask, for as long as the process lives."""
    if STRICT:
        _for_ever.enter_context(strict_device.strict_device())
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
