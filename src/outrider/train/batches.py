"""Answers padded into batches.

Shapes: B rows, T tokens, F tapped width.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.train.features import Example


@dataclass
class Batch:
    """Padded sequences. `learnt` marks positions whose next token counts: those that the target wrote, or the prompt's too."""

    ids_BT: Tensor
    hidden_BTF: Tensor
    learnt_BT: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(t.to(device) for t in (self.ids_BT, self.hidden_BTF, self.learnt_BT)))


def make_batch(chosen: list[Example], prompts: bool = False) -> Batch:
    """Pad examples on the right, on the host.

    Args:
        prompts: whether their tokens count.
    """
    longest = max(len(e.ids) for e in chosen)
    hidden = [e.hidden() for e in chosen]
    ids = torch.zeros(len(chosen), longest, dtype=torch.long)
    features = torch.zeros(len(chosen), longest, hidden[0].shape[-1], dtype=hidden[0].dtype)
    learnt = torch.zeros(len(chosen), longest, dtype=torch.bool)
    for row, (example, rows) in enumerate(zip(chosen, hidden)):
        length = len(example.ids)
        ids[row, :length], features[row, :length] = example.ids, rows
        learnt[row, 0 if prompts else example.prompt_length - 1 : length - 1] = True
    return Batch(ids, features, learnt)


def batches(examples: list[Example], tokens: int, rng: random.Random, prompts: bool = False) -> Iterator[Batch]:
    """One pass over the examples, rows of like length together."""
    order = rng.sample(range(len(examples)), len(examples))
    for at in range(0, len(order), 512):
        window = sorted(order[at : at + 512], key=lambda i: len(examples[i].ids))
        groups: list[list[int]] = [[]]
        for index in window:
            if groups[-1] and (len(groups[-1]) + 1) * len(examples[index].ids) > tokens:
                groups.append([])
            groups[-1].append(index)
        rng.shuffle(groups)
        for group in groups:
            yield make_batch([examples[i] for i in group], prompts)
