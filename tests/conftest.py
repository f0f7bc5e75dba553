"""One thread, no chatter, kernels interpreted, the same hypothesis examples in every run, nothing learned between runs."""

from __future__ import annotations

import os

import torch
import transformers
from hypothesis import settings

os.environ["OUTRIDER_STATISTICS"] = "off"
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
settings.register_profile("outrider", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("outrider")
