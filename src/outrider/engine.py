"""The engine: prefill, then rounds of propose, score, verify, commit, until every sequence has stopped.

It knows protocols (`TreeModel`, `Drafter`, `Controller`) and no class behind them. Plain decoding is the same loop with
nothing drafted.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from outrider.controller import Controller
from outrider.drafters.base import Drafter, DraftState, FeatureDraftState
from outrider.machine import settle
from outrider.models.protocol import TreeModel, scored
from outrider.rounds import Round, walked
from outrider.sequence import Piece, Sequence, alive
from outrider.stats import Clock
from outrider.tree import OFF, Shape, TokenTree
from outrider.verify import Draft

FAIR_TRIAL, CHANCE = 40, 0.02  # tries after which a share of acceptance below this is worth a warning
SPARE_NODES = 64  # room for a tree behind the longest text


@dataclass
class Run:
    """Sequences on their way through rounds."""

    target: TreeModel
    drafter: Drafter | None
    controller: Controller
    sequences: list[Sequence]
    deepest: int = sys.maxsize  # levels of drafted tokens

    def __post_init__(self) -> None:
        self.clock, self.start = Clock(), time.perf_counter()
        self.rows = [self.sequences[i] for i in alive(self.sequences)]
        self.drafting: DraftState | None = None
        self.warned = False

    def pieces(self) -> Iterator[Piece]:
        """Run to the end, handing out tokens as they are committed."""
        if self.rows:
            self._begin()
        while self.rows:
            yield from self._round()
        self._warn_if_useless()
        total = time.perf_counter() - self.start
        for sequence in self.sequences:
            sequence.stats.seconds = {**self.clock.seconds, "total": total}

    @torch.inference_mode()
    def _begin(self) -> None:
        with self.clock.phase("prefill"):
            room = max(row.remaining for row in self.rows) + SPARE_NODES
            taps = getattr(self.drafter, "taps", ())
            self.state = self.target.begin([row.ids[:-1] for row in self.rows], room, taps)
            if self.drafter is not None:
                samplers = [row.sampler for row in self.rows]
                self.drafting = self.drafter.begin([row.ids for row in self.rows], samplers, room)
                if taps:
                    self._see(self.state.features)
            settle(self.rows[0].sampler.device)

    @torch.inference_mode()
    def _round(self) -> list[Piece]:
        before, shape = dict(self.clock.seconds), self.controller.choose() if self.drafting else OFF
        # never deeper than what a row may still write
        shapes = [shape.cut(min(row.remaining - 1, self.deepest)) for row in self.rows]
        if not any(cut.depth for cut in shapes):
            shape = OFF
        with self.clock.phase("draft"):
            drafts = self._propose(shapes) if shape.depth else [Draft(TokenTree(row.ids[-1]), {}) for row in self.rows]
        with self.clock.phase("verify"):
            trees = [draft.tree for draft in drafts]
            scores = scored(self.state, [tree.tokens for tree in trees], [tree.parents for tree in trees])
            verdicts = [row.verify(draft, of_row) for row, draft, of_row in zip(self.rows, drafts, scores)]
        with self.clock.phase("commit"):
            self.state.commit([verdict.path for verdict in verdicts])
            if self.drafting and shape.depth:
                self.drafting.observe(verdicts)
            if self.drafting and self.state.features is not None:
                self._see([_along(rows, verdict.path) for rows, verdict in zip(self.state.features, verdicts)])
        pieces = []
        for i, (row, tree, verdict) in enumerate(zip(self.rows, trees, verdicts)):
            emitted = row.emit(tree, verdict, scores[i])
            name = drafts[i].beyond or shape.name if tree.drafted else OFF.name
            tried = verdict.accepted + bool(tree.children[verdict.path[-1]])
            row.stats.add_round(name, tree.drafted, verdict.accepted, tried, len(emitted))
            pieces += emitted
        walks = [walked(*one) for one in zip(drafts, verdicts, shapes)]
        spent = self.clock.since(before)
        spent["draft"] -= max(draft.reading for draft in drafts)  # a prompt is read once, whatever is drafted
        self.controller.reward(Round(shape, walks, **spent))
        self._drop_finished()
        return pieces

    def _warn_if_useless(self) -> None:
        """A drafter whose tokens are next to never accepted is broken or does not belong to this target: say so."""
        tried, accepted = (sum(getattr(s.stats, name) for s in self.sequences) for name in ("tried", "accepted"))
        if self.drafter is not None and not self.warned and tried >= FAIR_TRIAL and accepted < CHANCE * tried:
            self.warned = True
            warnings.warn(
                f"drafter {self.drafter.name!r} was right {accepted} times in {tried}: the text is right, but nothing is gained; "
                "check that it was made for this target (weights, vocabulary, chat template), or use drafter='off'",
                RuntimeWarning,
                stacklevel=2,
            )

    def _see(self, hidden: list[Tensor] | None) -> None:
        """Hand the target's hidden states of newly committed tokens to the drafter that asked for them."""
        cast(FeatureDraftState, self.drafting).see(hidden or [])

    def _propose(self, shapes: list[Shape]) -> list[Draft]:
        """A tree per row."""
        return cast(DraftState, self.drafting).propose([row.ids for row in self.rows], shapes)

    def _drop_finished(self) -> None:
        keep = alive(self.rows)
        if len(keep) == len(self.rows):
            return
        # rows from the end take the places of finished ones, so that caches move as little as possible
        stay = [i for i in keep if i < len(keep)]
        movers = iter([i for i in keep if i >= len(keep)])
        keep = [i if i in stay else next(movers) for i in range(len(keep))]
        self.rows = [self.rows[i] for i in keep]
        if keep:
            with self.clock.phase("commit"):
                self.state.keep(keep)
                if self.drafting:
                    self.drafting.keep(keep)


def _along(rows_NF: Tensor, path: list[int]) -> Tensor:
    """The rows of a path; where they lie side by side nothing is copied, and in plain rounds nothing is done."""
    if len(path) == len(rows_NF):
        return rows_NF
    return rows_NF[: len(path)] if path[-1] == len(path) - 1 else rows_NF[path]
