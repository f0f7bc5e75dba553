"""Trees as chains of nodes, and the order in which chains are stepped (heavy-light decomposition).

A node's heavy child, the one with the largest subtree, goes on with its chain; every other child begins a new one. A chain is
stepped with one state that stays in its place; only states from which further chains begin are set aside. All chains whose
beginnings are known form a wave and are stepped together, or, in a serial plan, one after the other. Kernels are given the same
order as lanes: what one program steps, with a state that never leaves it.

Shapes: B rows, N nodes of a call, X nodes in the order in which they are stepped, F nodes stepped at once, Y known states,
L lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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


class _Wave(NamedTuple):
    sources_F: Tensor  # slots of the states that its chains begin from, longest chain first
    going: list[int]  # chains that take each step
    aside: dict[int, tuple[Tensor, Tensor]]  # after these steps: places among the chains, and slots to put their states


class Lanes(NamedTuple):
    """An order for kernels. Lanes of one launch are independent of each other; launches follow one another."""

    launches: list[tuple[int, int]]
    """The first lane of each launch, and how many there are."""
    bounds_L2: Tensor
    """The first step of a lane, and the one behind its last."""
    steps_X3: Tensor
    """Of each step the node as row * N + node, the slot that its parent's state is loaded from, and the slot that its own goes
    to; -1 for none."""


@dataclass
class Plan:
    """How the nodes of a call are stepped. Known states are those of the B rows, then those after the nodes of `known`."""

    batch: int
    nodes: int
    start: int
    """The pending index of the call's first node."""
    device: torch.device
    together: bool
    waves: list[list[Chain]]
    """Longest chain first."""
    slots: dict[tuple[int, int], int]
    """Where states are kept, by row and pending node: the committed one of each row (-1), those that are known, those that are
    set aside."""

    @property
    def known(self) -> list[tuple[int, int]]:
        """Nodes of earlier calls, as (row, node), from which chains begin."""
        return [(row, node) for row, node in self.slots if 0 <= node < self.start]

    @cached_property
    def lanes(self) -> Lanes:
        """The order for kernels: a chain is a lane and a wave a launch; in a serial plan a row is a lane and all one launch."""
        launches: list[tuple[int, int]] = []
        bounds: list[tuple[int, int]] = []
        steps: list[tuple[int, int, int]] = []
        by_row = [[c for wave in self.waves for c in wave if c.row == row] for row in range(self.batch)]
        together = [[[chain] for chain in wave] for wave in self.waves]
        for launch in together if self.together else [by_row]:
            launches.append((len(bounds), len(launch)))
            for lane in launch:
                first = len(steps)
                steps += [step for chain in lane for step in self._steps(chain)]
                bounds.append((first, len(steps)))
        made = (torch.tensor(rows, dtype=torch.int32, device=self.device) for rows in (bounds, steps))
        return Lanes(launches, *made)

    def _steps(self, chain: Chain) -> Iterator[tuple[int, int, int]]:
        load = self.slots[chain.row, chain.parent]
        for node in chain.nodes:
            yield chain.row * self.nodes + node, load, self.slots.get((chain.row, self.start + node), -1)
            load = -1

    @cached_property
    def order_X(self) -> Tensor:
        """Nodes as row * N + node, in the order in which they are stepped."""
        order: list[int] = []
        for wave in self.waves:
            for at in range(len(wave[0].nodes)):
                order += [chain.row * self.nodes + chain.nodes[at] for chain in wave if at < len(chain.nodes)]
        return torch.tensor(order, device=self.device)

    @cached_property
    def _moves(self) -> list[_Wave]:
        return [_wave(wave, self.slots, self.start, self.device) for wave in self.waves]

    def walk(self, known_Y: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Before each step, the states of the nodes' parents, to be changed in place into those of the nodes, and the nodes."""
        held = known_Y
        if len(self.slots) > len(known_Y):
            held = known_Y.new_empty(len(self.slots), *known_Y.shape[1:])
            held[: len(known_Y)] = known_Y
        at = 0
        for wave in self._moves:
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
    for place in sorted({(c.row, c.parent) for c in chains if 0 <= c.parent < start}):
        slots[place] = len(slots)
    for chain in chains:
        slots.setdefault((chain.row, chain.parent), len(slots))
    count = max((chain.wave for chain in chains), default=-1) + 1
    waves = [sorted((c for c in chains if c.wave == number), key=lambda c: -len(c.nodes)) for number in range(count)]
    return Plan(len(parents), nodes, start, device, together, waves, slots)


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
