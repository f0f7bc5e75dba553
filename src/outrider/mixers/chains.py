"""Trees as chains of nodes, and the order in which chains are stepped (heavy-light decomposition).

A node's heavy child, the one with the largest subtree, goes on with its chain; every other child begins a new one. A chain is
stepped with one state that stays in its place; only states from which further chains begin are set aside. All chains whose
beginnings are known form a wave and are stepped together, or, in a serial plan, one after the other.

Shapes: B rows, N nodes of a call, X nodes in the order in which they are stepped, F nodes stepped at once, Y known states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Rows = Sequence[Sequence[int]]


@dataclass
class Chain:
    """Nodes of one call (numbered within the call) that are stepped one after the other, behind pending node `parent`."""

    parent: int
    nodes: list[int]
    wave: int
    row: int = 0


def heavy_light(parents: Sequence[int], start: int = 0) -> list[Chain]:
    """The chains of one row, each after the chain that it hangs from.

    Args:
        parents: of each node of the call: -1 is the committed state, below `start` a node of an earlier call.
        start: the pending index of the call's first node.
    """
    count = len(parents)
    local = [parent - start if parent >= start else -1 for parent in parents]
    sizes, heavy = [1] * count, [-1] * count
    for node in reversed(range(count)):
        if local[node] >= 0:
            sizes[local[node]] += sizes[node]
    for node, parent in enumerate(local):
        if parent >= 0 and (heavy[parent] < 0 or sizes[node] > sizes[heavy[parent]]):
            heavy[parent] = node
    chains: list[Chain] = []
    chain_of: list[Chain] = []
    for node, parent in enumerate(local):
        if parent >= 0 and heavy[parent] == node:
            chain = chain_of[parent]
            chain.nodes.append(node)
        else:
            chain = Chain(parents[node], [node], chain_of[parent].wave + 1 if parent >= 0 else 0)
            chains.append(chain)
        chain_of.append(chain)
    return chains


@dataclass
class _Wave:
    sources_F: Tensor  # slots of the states that its chains begin from, longest chain first
    going: list[int]  # chains that take each step
    aside: dict[int, tuple[Tensor, Tensor]]  # after these steps: places among the chains, and slots to put their states


@dataclass
class Plan:
    """How the nodes of a call are stepped. Known states are those of the B rows, then those after the nodes of `known`."""

    batch: int
    nodes: int
    known: list[tuple[int, int]]
    """Nodes of earlier calls, as (row, node), from which chains begin."""
    order_X: Tensor
    """Nodes as row * N + node, in the order in which they are stepped."""
    slots: int
    waves: list[_Wave] = field(repr=False)

    def walk(self, known_Y: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Before each step, the states of the nodes' parents, to be changed in place into those of the nodes, and the nodes."""
        held = known_Y
        if self.slots > len(known_Y):
            held = known_Y.new_empty(self.slots, *known_Y.shape[1:])
            held[: len(known_Y)] = known_Y
        at = 0
        for wave in self.waves:
            state = held.index_select(0, wave.sources_F)
            for number, going in enumerate(wave.going):
                yield state[:going], slice(at, at + going)
                if number in wave.aside:
                    places, slots = wave.aside[number]
                    held.index_copy_(0, slots, state.index_select(0, places))
                at += going

    def run(self, known_Y: Tensor, step: Callable[..., Sequence[Tensor]], inputs_BN: Sequence[Tensor]) -> list[Tensor]:
        """What `step(states, *inputs)` gives for every node, [B, N, ...]; zeros for padding nodes.

        Args:
            known_Y: known states; they are not changed.
            inputs_BN: [B, N, ...] each.
        """
        inputs_X = [t.flatten(0, 1).index_select(0, self.order_X) for t in inputs_BN]
        found = [step(state, *(t[part] for t in inputs_X)) for state, part in self.walk(known_Y)]
        return [self._placed(torch.cat(parts)) for parts in zip(*found)]

    def _placed(self, out_X: Tensor) -> Tensor:
        out = out_X.new_zeros(self.batch * self.nodes, *out_X.shape[1:])
        return out.index_copy_(0, self.order_X, out_X).unflatten(0, (self.batch, self.nodes))


def plan(parents: Rows, start: int, nodes: int, device: torch.device, together: bool = True) -> Plan:
    """How to step the nodes of a call.

    Args:
        parents: of each row's nodes; rows may have fewer than `nodes`.
        together: step the chains of a wave together; otherwise one chain of each row after the other.
    """
    chains: list[Chain] = []
    for row, row_parents in enumerate(parents):
        for number, chain in enumerate(heavy_light(row_parents, start)):
            chain.row = row
            if not together:
                chain.wave = number
            chains.append(chain)
    slots = {(row, -1): row for row in range(len(parents))}
    known = sorted({(c.row, c.parent) for c in chains if 0 <= c.parent < start})
    for place in known:
        slots[place] = len(slots)
    for chain in chains:
        slots.setdefault((chain.row, chain.parent), len(slots))
    order: list[int] = []
    waves = []
    for number in range(max((chain.wave for chain in chains), default=-1) + 1):
        wave = sorted((c for c in chains if c.wave == number), key=lambda c: -len(c.nodes))
        waves.append(_wave(wave, slots, start, device))
        order += [c.row * nodes + c.nodes[at] for at in range(len(wave[0].nodes)) for c in wave if at < len(c.nodes)]
    return Plan(len(parents), nodes, known, torch.tensor(order, device=device), len(slots), waves)


def _wave(chains: list[Chain], slots: dict[tuple[int, int], int], start: int, device: torch.device) -> _Wave:
    """Chains that are stepped together, longest first."""
    sources = torch.tensor([slots[chain.row, chain.parent] for chain in chains], device=device)
    going, aside = [], {}
    for at in range(len(chains[0].nodes)):
        active = [chain for chain in chains if at < len(chain.nodes)]
        going.append(len(active))
        kept = [(i, slots[at_node]) for i, c in enumerate(active) if (at_node := (c.row, start + c.nodes[at])) in slots]
        if kept:
            places, targets = zip(*kept)
            aside[at] = torch.tensor(places, device=device), torch.tensor(targets, device=device)
    return _Wave(sources, going, aside)
