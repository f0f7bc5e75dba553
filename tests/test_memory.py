"""A process that writes text after text takes no more memory than after its first ones."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCAB, tiny
from helpers import lm
from outrider.api import Engine
from outrider.drafters.feature_head import HeadDrafter, HeadModel
from outrider.drafters.table import NgramTable, TableDrafter
from outrider.models.feature_head import FeatureHead, HeadConfig
from outrider.train.data import Answer
from outrider.train.table import make_table

GENERATIONS, WARM = 1000, 500
MOST_BYTES, MOST_OBJECTS = 1 << 20, 400  # one state kept a generation would be 10 MB


def head() -> HeadDrafter:
    torch.manual_seed(0)
    made = FeatureHead(
        HeadConfig(32, (0, 1), 4, 2, 48, VOCAB, core="hybrid", ssm_heads=2, ssm_head_size=8, ssm_state=6)
    )
    made.draft_ids = torch.arange(VOCAB)
    target = tiny("llama")
    return HeadDrafter(
        HeadModel(made.requires_grad_(False), target.get_input_embeddings(), target.get_output_embeddings())
    )


def table(folder: Path) -> TableDrafter:
    text = torch.tensor([5, 9, 13, 7] * 6)
    make_table([Answer(text, 2, 0.0)], folder / "t.safetensors")
    return TableDrafter(NgramTable(folder / "t.safetensors"))


DRAFTERS: dict[str, Callable[[Path], Any]] = {
    "ngram": lambda _: "ngram",
    "table": table,
    "small model": lambda _: lm("mamba", 1),
    "head": lambda _: head(),
}


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_is_flat_over_a_thousand_generations(tmp_path: Path) -> None:
    """In a process of its own: a heap with the holes of other tests fills them at its leisure."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        before, after = alone.submit(generations, tmp_path).result()
    assert after[0] - before[0] < MOST_BYTES and after[1] - before[1] < MOST_OBJECTS, (before, after)


def generations(folder: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """Taken after WARM and after all. Drafters, shapes, lengths and rules take turns; controllers learn on."""
    engines = [Engine(tiny("llama"), None, "llama", made(folder)) for made in DRAFTERS.values()]
    before = 0, 0
    for number in range(GENERATIONS):
        engine = engines[number % len(engines)]
        prompt = [(number * 7 + 5 * i) % VOCAB for i in range(3 + number % 11)]
        sampled = {"temperature": 0.8, "seed": number, "rule": ("coupled", "mss")[number // 8 % 2]}
        shape = ("auto", "ucb", "3x2")[number // 4 % 3]
        engine.generate(prompt, shape=shape, max_new_tokens=4 + number % 3, **(sampled if number % 3 else {}))
        if number == WARM:
            before = _taken()
    return before, _taken()


def _taken() -> tuple[int, int]:
    """Resident bytes of this process that are no file's and not free, and living Python objects."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what was freed
    if trim is not None:
        trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return resident, len(gc.get_objects())
