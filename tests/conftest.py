"""One thread, no chatter, the same hypothesis examples in every run, nothing learned from or for other runs."""

from __future__ import annotations

import os

import torch
import transformers
from hypothesis import settings

os.environ["OUTRIDER_STATISTICS"] = "off"
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
settings.register_profile("outrider", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("outrider")
