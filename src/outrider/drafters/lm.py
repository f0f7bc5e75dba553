"""Any TreeModel as a drafter: the tree grows level by level, each level one `extend` of the drafter.

Children are chosen by the target's own processing and, under the coupled rule, by the target's own noise, which makes
agreement likely. A recurrent drafter needs nothing special: its nodes are batch rows of the cache (Mamba Drafters, 3).

Shapes: F frontier nodes, C the model's (draft) vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from outrider import noise
from outrider.drafters.growth import Found, Growth
from outrider.models.draft_vocab import TextVocabulary, widen
from outrider.models.protocol import Follower, TreeModel, TreeState
from outrider.native.highest import best
from outrider.sampling import Sampler
from outrider.tree import Shape, TokenTree
from outrider.verify import ONE_HOT, Draft, Law, Verdict

CATCH_UP = 64  # tokens fed at once when the drafter is behind


class LMDrafter:
    """A language model that drafts.

    Args:
        model: the drafter, q.
        name: for people.
        vocab: ids that the target knows; others are never proposed.
    """

    def __init__(self, model: TreeModel, name: str, vocab: int | None = None) -> None:
        self.model, self.name = model, name
        self.vocab = min(model.vocab, vocab or model.vocab)
        self.draft_ids: Tensor | None = getattr(model, "draft_ids", None)
        self.sharpness = 1.0  # scale of its scores where tokens are drawn under the coupled rule
        self.draft_tokens = np.empty(0, int) if self.draft_ids is None else self.draft_ids.cpu().numpy()

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> LMDraftState:
        """Prefill the prompts, without the root."""
        return LMDraftState(self, prompts, samplers, room, stream)


class LMDraftState:
    """The drafter's side of B sequences."""

    def __init__(
        self, drafter: LMDrafter, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int
    ) -> None:
        self.drafter, self.samplers, self.room = drafter, list(samplers), room
        self.stream = stream
        self.offsets = [self._offset(len(prompt)) for prompt in prompts]
        self.state = self._prefill(prompts)
        self.growths: list[Growth] = []
        self.reading = 0.0  # seconds that went into text far behind

    # -- following the text ----------------------------------------------------------------------------------------

    def _offset(self, length: int) -> int:
        """How much of the text a drafter of short context must leave out: when full, it starts again with half."""
        context = self.drafter.model.context
        return 0 if context is None or length + 1 < context else length + 1 - max(context // 2, 2)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as the drafter may read them: ids that only the target has become 0."""
        return [token if token < self.drafter.model.vocab else 0 for token in tokens]

    def _prefill(self, contexts: Sequence[Sequence[int]]) -> TreeState:
        seen = [self._known(context[offset:-1]) for context, offset in zip(contexts, self.offsets)]
        return self.drafter.model.begin(seen, self.room)

    def _catch_up(self, contexts: Sequence[Sequence[int]], depth: int) -> list[Tensor]:
        """Feed what the drafter has not seen, the root last; logits after the root of each row, [1, V]."""
        limit = self.drafter.model.context
        if limit is not None:
            full = [len(c) - o + depth >= limit for c, o in zip(contexts, self.offsets)]
            if any(full):
                self.offsets = [
                    max(o, len(c) - max(min(limit // 2, limit - depth - 1), 1)) if f else o
                    for c, o, f in zip(contexts, self.offsets, full)
                ]
                self.state = self._prefill(contexts)
        begun, self.reading = time.perf_counter(), 0.0
        while True:
            behind = [self._known(c[o + n :]) for c, o, n in zip(contexts, self.offsets, self.state.lengths)]
            chunk = [row[:CATCH_UP] for row in behind]
            logits = self._follow(chunk)
            if all(len(row) <= CATCH_UP for row in behind):
                break
            # rows that are nearly there must keep their root for the last chunk
            self.state.commit(
                [range(len(row) if len(rest) > CATCH_UP else len(row) - 1) for row, rest in zip(chunk, behind)]
            )
            self.reading = time.perf_counter() - begun
        self.growths = [
            Growth(TokenTree(context[-1]), list(context), {0: len(row) - 1}, list(range(len(row))), read=len(row))
            for context, row in zip(contexts, chunk)
        ]
        return logits

    def _follow(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Feed a chain to every row; logits after its last token, [1, V] each."""
        if hasattr(self.state, "follow"):
            logits_BV = cast(Follower, self.state).follow(tokens)
            return [logits_BV] if len(tokens) == 1 else list(logits_BV[:, None].unbind())
        logits_BNV = self.state.extend(tokens, [range(-1, len(row) - 1) for row in tokens])
        return [logits_NV[len(row) - 1 : len(row)] for logits_NV, row in zip(logits_BNV, tokens)]

    # -- growing ---------------------------------------------------------------------------------------------------

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Grow every row's tree by its shape."""
        depth = max(shape.depth for shape in shapes)
        logits = self._catch_up(contexts, depth)
        if (limit := self.drafter.model.context) is not None:
            room = [limit - len(context) + offset for context, offset in zip(contexts, self.offsets)]
            shapes = [shape.cut(max(free, 0)) for shape, free in zip(shapes, room)]
            depth = max(shape.depth for shape in shapes)
        for growth, shape in zip(self.growths, shapes):
            growth.want(shape, 0)
        for level in range(depth):
            for row, growth in enumerate(self.growths):
                self._choose_children(growth, row, shapes[row], logits[row])
            wanted = [growth.want(shape, level + 1) for growth, shape in zip(self.growths, shapes)]
            if not any(wanted):
                break
            logits = self._feed_wanted()
        return [growth.finish(shape, self.reading) for growth, shape in zip(self.growths, shapes)]

    def _feed_wanted(self) -> list[Tensor]:
        """Extend the drafter by the nodes that get children next; their logits per row, [F, V]."""
        start = self.state.pending
        feeds = [list(growth.wanted) for growth in self.growths]
        tokens = [[g.tree.tokens[n] for n in feed] for g, feed in zip(self.growths, feeds)]
        parents = [[g.fed[g.tree.parents[n]] for n in feed] for g, feed in zip(self.growths, feeds)]
        logits_BFV = self.state.extend(tokens, parents)
        for growth, feed in zip(self.growths, feeds):
            growth.fed.update({node: start + i for i, node in enumerate(feed)})
        if len(feeds) == 1:
            return [logits_BFV[0]]
        return [logits_FV[: len(feed)] for logits_FV, feed in zip(logits_BFV.unbind(), feeds)]

    def _choose_children(self, growth: Growth, row: int, shape: Shape, logits_FC: Tensor) -> None:
        """Hang children under the frontier nodes that were fed, and make them the next frontier."""
        fed, counts = list(growth.wanted), list(growth.wanted.values())
        if not fed:
            growth.frontier = []
            return
        sampler = self.samplers[row]
        scores_FC, ids_C, temperature = self._scores(growth, row, fed, logits_FC, shape)
        if sampler.options.rule == "coupled" and not sampler.greedy:
            temperature /= self.drafter.sharpness
        position = len(growth.context) + growth.tree.depths[fed[0]]
        salt = noise.mix(self.stream, len(growth.context))  # of the text alone: a row never depends on its neighbours
        chosen = choose(
            scores_FC, counts, sampler, position, salt, one_hot(sampler, shape), ids_C, shape.believes, temperature
        )
        tokens = None if ids_C is None else self._tokens(row)
        found: list[Found] = []
        for node, picked in zip(fed, chosen):
            for column, law, logq in picked:
                token = column if tokens is None else int(tokens[column])
                found.append((node, token, law, growth.scores.get(node, 0.0) + logq))
        growth.hang(found, shape, sampler.eos)

    def _scores(
        self, growth: Growth, row: int, nodes: Sequence[int], logits_FC: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor | None, float]:
        """Processed logits, the token ids of their columns (None: they are the ids), and what they are still to be divided by.

        Where neither a processor nor a law asks for the target's whole vocabulary, the draft vocabulary is enough.
        """
        sampler, ids_C = self.samplers[row], self._draft_ids(row)
        if ids_C is not None and ids_C.shape[0] < logits_FC.shape[1]:  # another row has more
            logits_FC = logits_FC[:, : ids_C.shape[0]]
        if logits_FC.device != sampler.device:
            logits_FC, ids_C = logits_FC.to(sampler.device), None if ids_C is None else ids_C.to(sampler.device)
        if not sampler.processors and ids_C is not None and one_hot(sampler, shape):
            if sampler.bare and sampler.options.rule == "coupled":
                return logits_FC, ids_C, sampler.options.temperature or 1.0
            return logits_FC if sampler.greedy else sampler.scores(None, logits_FC), ids_C, 1.0
        vocab = sampler.vocab
        if ids_C is None:
            logits_FC = logits_FC[:, : min(self.drafter.vocab, vocab)]
        impossible = logits_FC.shape[-1] < vocab
        if impossible:
            logits_FC = widen(logits_FC, ids_C, vocab)
        paths = [growth.context + growth.tree.path_tokens(n)[1:] for n in nodes] if sampler.processors else None
        scores_FV = sampler.scores(paths, logits_FC)
        if sampler.processors and impossible:  # a user's processor may have made them possible again
            scores_FV = scores_FV.masked_fill(logits_FC.isneginf(), float("-inf"))
        return scores_FV, None, 1.0

    def _draft_ids(self, row: int) -> Tensor | None:
        """The draft vocabulary of a row."""
        vocabulary: TextVocabulary | None = getattr(self.state, "vocabulary", None)
        return self.drafter.draft_ids if vocabulary is None else vocabulary.ids(row)

    def _tokens(self, row: int) -> np.ndarray:
        """The same where they can be read one by one."""
        vocabulary: TextVocabulary | None = getattr(self.state, "vocabulary", None)
        return self.drafter.draft_tokens if vocabulary is None else vocabulary.tokens(row)

    # -- the verdict -----------------------------------------------------------------------------------------------

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Commit what was fed of each kept path; an accepted leaf that was never fed is caught up next time."""
        paths = []
        for growth, verdict in zip(self.growths, verdicts):
            path = list(growth.chain)
            for node in verdict.path[1:]:
                if node not in growth.fed:
                    break
                path.append(growth.fed[node])
            paths.append(path)
        self.state.commit(paths)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.state.keep(rows)
        self.samplers = [self.samplers[r] for r in rows]
        self.offsets = [self.offsets[r] for r in rows]


def one_hot(sampler: Sampler, shape: Shape) -> bool:
    """Whether children are simply the best ones, so that nothing needs to be known of the law they came from."""
    options = sampler.options
    return options.rule == "coupled" or sampler.greedy or bool(shape.budget) or options.draft_sampling == "topk"


Choice = tuple[int, Law, float]
"""A column of scores, the law it was drawn from, and, where that was asked for, the log of its chance: its probability, or what
follows from that where the noise is known."""


def choose(
    scores_FC: Tensor,
    counts: Sequence[int],
    sampler: Sampler,
    position: int,
    salt: int,
    topmost: bool,
    ids_C: Tensor | None = None,
    believe: bool = False,
    temperature: float = 1.0,
) -> list[list[Choice]]:
    """Each frontier node's children in draw order.

    Args:
        topmost: take the best scores (plus the target's noise under the coupled rule). Otherwise, by `draft_sampling`: draws
            without replacement (the sorted race of scores plus noise), or independent draws.
        ids_C: the token ids of the columns, where they are not the ids themselves.
        believe: whether the logs of chances are asked for; those of the best come in any case.
        temperature: what scores are still to be divided by, where the best are taken under the coupled rule.
    """
    size = scores_FC.shape[-1]
    if topmost:
        noise_V = None
        if sampler.options.rule == "coupled" and not sampler.greedy:
            noise_V = sampler.noise(position, size if ids_C is None else sampler.vocab, scores_FC.device)
        found = best(scores_FC, max(counts), temperature, noise_V, ids_C)
        return [[(column, ONE_HOT, logq) for column, logq in row[:count]] for row, count in zip(found, counts)]
    q_FV, chosen = scores_FC.softmax(-1), list[list[Choice]]()
    for place, count in enumerate(counts):
        q_V, picked = q_FV[place], list[Choice]()
        if sampler.options.draft_sampling == "iid":
            for draw in range(count):
                noise_V = sampler.draft_noise(noise.mix(salt, place, draw), position, size, scores_FC.device)
                picked.append((int((scores_FC[place] + noise_V).argmax()), Law(q_V), 0.0))
        else:
            noise_V = sampler.draft_noise(noise.mix(salt, place), position, size, scores_FC.device)
            for token, _ in best((scores_FC[place] + noise_V)[None], count)[0]:
                picked.append((token, Law(q_V, tuple(t for t, *_ in picked)), 0.0))
        chosen.append(picked)
    return _believed(scores_FC, chosen) if believe else chosen


def _believed(scores_FC: Tensor, chosen: Sequence[Sequence[Choice]]) -> list[list[Choice]]:
    """The same with their log probabilities, in one copy to the host."""
    pairs = [(row, column) for row, picked in enumerate(chosen) for column, *_ in picked]
    rows_X, columns_X = torch.tensor(pairs, dtype=torch.long, device=scores_FC.device).view(-1, 2).unbind(-1)
    logs = iter(scores_FC.log_softmax(-1)[rows_X, columns_X].tolist())
    return [[(column, law, next(logs)) for column, law, _ in picked] for picked in chosen]
