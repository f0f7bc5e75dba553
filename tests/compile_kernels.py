"""Compile the kernels for a GPU that need not be there, as they would be launched: prints names, sizes and shared memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from outrider.mixers import samples
from outrider.mixers.samples import Size
from outrider.mixers.twins import FORMS, PREFIX
from outrider.ways import ScoredLayer


class Absent:
    """A driver without a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(self: Any, grid: Any) -> Any:
    def launch(*args: Any, **kwargs: Any) -> None:
        made = self.run(*args, grid=grid, warmup=True, **kwargs)
        print(self.fn.__name__, len(made.asm["cubin"]), made.metadata.shared)

    return launch


driver.set_active(Absent())
JITFunction.__getitem__ = compiled
size, nodes = Size(8, 8, 256, 256), 64  # the largest
for rule, forms in FORMS.items():
    for form in forms:
        ScoredLayer(rule, size, samples.chain(nodes), torch.device("cpu")).score(PREFIX + form)
