"""Work of which no gradient is wanted. Saying so again where it is settled takes torch as long as a small product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def inference(function: Callable[P, R]) -> Callable[P, R]:
    """The function in torch's inference mode."""

    @functools.wraps(function)
    def without_gradients(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return without_gradients
