"""What scoring and committing trees costs in one recurrent layer, against the ways that go without tree forms and factors.

Verification is compared with root-to-leaf replay: every path from the committed state, one after the other, step by step in
place. A commit from factors is compared with token replay: the accepted tokens go through the mixer's input projections,
convolution and recurrence again (nothing else of the model is counted, so a real replay costs more). Deferred commits are
compared with immediate ones on the same layers, factors and trees.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.bench.report import provenance
from outrider.mixers import gated_delta, samples, short_conv
from outrider.mixers.rules import DELTA
from outrider.mixers.samples import Size
from outrider.topology import Switch
from outrider.ways import ScoredLayer, ways_of

MIXERS = {"gated delta 1.3B": Size(8, 8, 256, 256), "qwen3-next": Size(16, 32, 128, 128)}
WIDTH, TAPS = 2048, 4  # of both models
ACCEPTED = 8  # tokens of a commit


def cases(seed: int = 0) -> dict[str, list[int]]:
    """Parents of the trees to score: the shapes that the SpecLA paper reports, a chain, and random trees."""
    rng = random.Random(seed)

    def branching(top: int, depth: int, nodes: int) -> list[int]:
        parents, levels = [-1], [0]
        while len(parents) < nodes:
            # an open node, deep ones first until the depth is reached, as trees of likely tokens grow
            free = [n for n in range(len(parents)) if levels[n] < depth and parents.count(n) < top]
            parent = free[-1] if max(levels) < depth else rng.choice(free)
            parents.append(parent)
            levels.append(levels[parent] + 1)
        return parents

    def anyhow(nodes: int) -> list[int]:
        return [-1, *(rng.randrange(node) for node in range(1, nodes))]

    return {
        "deep": branching(2, 12, 16),
        "bushy": branching(4, 4, 32),
        "chain": samples.chain(8),
        **{f"random {nodes}": anyhow(nodes) for nodes in (16, 32, 64)},
    }


def run_mixers(
    device: torch.device,
    repeat: int = 20,
    mixers: dict[str, Size] | None = None,
    layers: int = 8,
    tell: Callable[[int, int, str], Any] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Everything that `bench mixers` reports, as plain data.

    Args:
        repeat: times that everything is measured; the best counts.
        mixers: sizes by name; the first one's commits are measured.
        layers: that commits are measured over.
    """
    chosen_mixers, trees = mixers or MIXERS, cases()
    switch, found = Switch(device), []
    for number, (name, size) in enumerate(chosen_mixers.items()):
        for at, (case, parents) in enumerate(trees.items()):
            tell(number * len(trees) + at, len(chosen_mixers) * len(trees) + 1, f"{name}, {case}")
            found.append(
                {"mixer": name, "size": str(size), "case": case, **_verify(size, parents, device, switch, repeat)}
            )
    tell(len(found), len(found) + 1, "commit")
    commit = _commit(next(iter(chosen_mixers.values())), device, layers, repeat)
    facts = {"device": str(device), "table": "measured" if switch.entries else "static", "repeat": repeat}
    return {"verify": found, "commit": commit, "provenance": {**provenance(), **facts}}


# -- verification ------------------------------------------------------------------------------------------------------


class _Scored(ScoredLayer):
    """One layer and one tree behind its committed state."""

    def __init__(self, size: Size, parents: Sequence[int], device: torch.device) -> None:
        super().__init__(DELTA.name, size, parents, device)

    def replay(self) -> Tensor:
        """The same, every path on its own from the committed state."""
        out = torch.empty_like(self.x.v_BNHV)
        parents = self.nodes.parents[0]
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            state = self.state_B.clone()
            for node in self.nodes.path(0, leaf).tolist():
                out[:, node] = gated_delta.step(state, *(t[:, node] for t in self.x))[0]
        return out


def _verify(size: Size, parents: Sequence[int], device: torch.device, switch: Switch, repeat: int) -> dict[str, Any]:
    scored, ways = _Scored(size, parents, device), ways_of(DELTA.name, size, device)
    tasks: dict[str, Callable[[], Tensor]] = {way: _bound(scored.score, way) for way in ways}
    ms = best_of({**tasks, "replay": scored.replay}, repeat)
    chosen = switch(DELTA.name, scored.nodes, size.numbers)
    return {
        "nodes": len(parents),
        "depth": scored.nodes.depth,
        "ms": ms,
        "chosen": chosen,
        "speedup_over_replay": ms["replay"] / ms[chosen],
        "best_over_replay": ms["replay"] / min(ms[way] for way in ways),
        "chosen_over_best": ms[chosen] / min(ms[way] for way in ways),
    }


def _bound(function: Callable[[str], Tensor], way: str) -> Callable[[], Tensor]:
    return lambda: function(way)


@torch.inference_mode()
def best_of(tasks: dict[str, Callable[[], Tensor]], repeat: int) -> dict[str, float]:
    """Milliseconds that each task takes, the best of `repeat`, taken in turns so that all see the same machine."""
    best = dict.fromkeys(tasks, math.inf)
    for number in range(repeat + 1):
        for name, task in tasks.items():
            began = time.perf_counter()
            float(task().flatten()[0])  # reading a value waits for the device
            if number:  # the first time makes buffers and plans
                best[name] = min(best[name], (time.perf_counter() - began) * 1e3)
    return best


# -- commits -----------------------------------------------------------------------------------------------------------


@dataclass
class _Replayed:
    """The parts of a mixer that a replay of tokens needs."""

    size: Size
    project: Tensor
    conv_KC: Tensor
    hidden_BTD: Tensor

    @classmethod
    def make(cls, size: Size, device: torch.device) -> _Replayed:
        channels = 2 * size.key_heads * size.key + size.heads * size.value
        project = torch.randn(channels + 2 * size.heads, WIDTH, device=device) * WIDTH**-0.5
        hidden = torch.randn(1, ACCEPTED, WIDTH, device=device)
        return cls(size, project, torch.randn(TAPS, channels, device=device), hidden)

    def run(self, state_BHKV: Tensor, window_BWC: Tensor) -> Tensor:
        """The state after the tokens."""
        size = self.size
        mixed, a, b = F.linear(self.hidden_BTD, self.project).split(
            [self.conv_KC.shape[1], size.heads, size.heads], dim=-1
        )
        bias = mixed.new_zeros(())
        convolved = F.silu(short_conv.sequence(mixed, self.conv_KC, bias, window_BWC)[0])
        keys = size.key_heads * size.key
        q, k, v = convolved.split([keys, keys, size.heads * size.value], dim=-1)
        q, k = (gated_delta.normalised(t.unflatten(-1, (size.key_heads, size.key))) for t in (q, k))
        v = v.unflatten(-1, (size.heads, size.value))
        x = gated_delta.Inputs(q, k, v, -F.softplus(a)[..., None], b.sigmoid())
        return gated_delta.sequence(state_BHKV, x)[1]


def _commit(size: Size, device: torch.device, layers: int, repeat: int) -> dict[str, Any]:
    scored = [_Scored(size, samples.chain(ACCEPTED), device) for _ in range(layers)]
    replayed = _Replayed.make(size, device)
    channels = replayed.conv_KC.shape[1]
    path = torch.arange(ACCEPTED, device=device)
    with torch.inference_mode():
        for one in scored:
            one.layer.window = TAPS - 1
            inputs = torch.randn(1, TAPS - 1 + ACCEPTED, channels, device=device)
            one.layer.inputs_BSC = inputs.to(torch.bfloat16)  # the dtype that models run in; states stay in float32
            one.score("masked")

    def settle() -> Tensor:
        for one in scored:
            one.layer.due = {0: path}
            one.layer.settle()
        return scored[-1].state_B

    def replay() -> Tensor:
        for one in scored:
            assert one.layer.inputs_BSC is not None
            state = replayed.run(one.state_B, one.layer.inputs_BSC[:, : one.layer.window].float())
        return state

    def immediate() -> Tensor:
        settle()
        for one in scored:
            out = one.score("masked")
        return out

    def deferred() -> Tensor:
        for one in scored:
            one.layer.due = {0: path}
            out = one.score("masked")
        return out

    tasks = {"factors": settle, "replay": replay, "immediate": immediate, "deferred": deferred}
    ms = best_of(tasks, repeat)
    state, held = scored[0].state_B, scored[0].layer.inputs_BSC
    assert held is not None
    window = held[0, : TAPS - 1]
    per_node, dense = scored[0].layer.node_bytes(), sum(t.numel() * t.element_size() for t in (state, window))
    return {
        "size": str(size),
        "tokens": ACCEPTED,
        "layers": layers,
        "ms": ms,
        "factors_over_replay": ms["replay"] / ms["factors"],
        "deferred_over_immediate": ms["immediate"] / ms["deferred"],
        "bytes_per_node": per_node,
        "dense_bytes_per_node": dense,
        "snapshots_over_factors": dense / per_node,
    }
