"""Kernels for GPUs that compute what a rule of PyTorch computes: which there are, and whether they can run on a device."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from outrider.mixers.rules import DELTA, DELTA_PER_CHANNEL, DeltaRule, Rule

PREFIX = "triton "
FORMS = {DELTA.name: ("serial", "chains", "masked"), DELTA_PER_CHANNEL.name: ("serial", "chains")}
"""The forms that have a twin, by the name of their rule."""


def form_of(way: str) -> str:
    """What a way does, whoever computes it."""
    return way.removeprefix(PREFIX)


def resolve(rule: Rule, way: str) -> tuple[Rule, str]:
    """What computes a rule in this way, and the form in which it does."""
    return (_twin(rule.name) if way.startswith(PREFIX) else rule), form_of(way)


@cache
def _twin(rule: str) -> Rule:
    from outrider.mixers import triton_gated_delta

    return DeltaRule(rule, triton_gated_delta)


def missing(rule: str, device: torch.device) -> str:
    """Why no twin of a rule can run; empty if one can be tried."""
    if rule not in FORMS:
        return f"there are no kernels for {rule}"
    if device.type != "cuda":
        return f"kernels run on CUDA devices, and this is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set, so that kernels are only interpreted"
    return ""
