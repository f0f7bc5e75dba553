"""What many tests need: cached engines and reference texts, drafters with a known character, and exact statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from devices import DEVICE
from families import VOCAB, tiny
from outrider.api import Engine
from outrider.controller import Fixed
from outrider.drafters.lm import LMDrafter
from outrider.drafters.oracle import OracleDrafter
from outrider.engine import Run
from outrider.models.selftest import tree_model
from outrider.options import options_from
from outrider.reference import reference_generate
from outrider.sampling import Sampler
from outrider.sequence import Sequence as Row
from outrider.tree import TokenTree, parse_shape
from outrider.verify import Draft

PROMPT = (5, 9, 13, 7, 5, 9, 13, 7, 5, 9)
PROMPTS = ((3, 11, 4), (5, 9, 13, 7, 5, 9, 13), (2, 6, 2, 6, 2, 6, 2, 30, 31, 2, 6, 2))
NEW = 12

SHAPES: dict[str, Any] = {
    "off": "off",
    "chain": 5,
    "3x2x2": (3, 2, 2),
    "bulge": (1, 1, 3, 1, 1),
    "best12": "best12",
    "ragged": [[0], [0, 0], [0, 0, 0], [0, 0, 1], [1], [1, 0], [2]],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 11},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 2,
    },
    "bias": {
        "logit_bias": {5: -3.0, 8: 2.0, 21: 1.5},
        "min_new_tokens": 6,
        "eos_token_id": [8, 9, 21, 40],
        "temperature": 0.7,
        "seed": 3,
    },
}

# -- reference ---------------------------------------------------------------------------------------------------------

_references: dict[Any, list[int]] = {}


def expected(
    family: str, prompt: Sequence[int] = PROMPT, *, model_seed: int = 0, vocab: int = VOCAB, **given: Any
) -> list[int]:
    """What the slow, obvious loop writes with a tiny model; computed once per question."""
    given.setdefault("max_new_tokens", NEW)
    key = (family, tuple(prompt), model_seed, vocab, repr(sorted(given.items())))
    if key not in _references:
        options = options_from(given)
        model = tiny(family, model_seed, vocab)
        _references[key] = reference_generate(model, prompt, options, options.eos_ids([]), options.seed or 0)
    return _references[key]


# -- drafters ----------------------------------------------------------------------------------------------------------


class _Wrapped:
    """A drafter around another one. Subclasses change what is proposed or heard."""

    state: type

    def __init__(self, inner: Any) -> None:
        self.inner, self.name = inner, f"{type(self).__name__.lower()} {inner.name}"

    def begin(self, prompts: Any, samplers: Any, room: int, stream: int = 0) -> Any:
        return self.state(self, self.inner.begin(prompts, samplers, room, stream))


class _WrappedState:
    def __init__(self, owner: Any, inner: Any) -> None:
        self.owner, self.inner, self.round = owner, inner, -1

    def propose(self, contexts: Any, shapes: Any) -> list[Draft]:
        self.round += 1
        return self.inner.propose(contexts, shapes)

    def observe(self, verdicts: Any) -> None:
        self.inner.observe(verdicts)

    def keep(self, rows: Sequence[int]) -> None:
        self.inner.keep(rows)


class _AlternateState(_WrappedState):
    def propose(self, contexts: Any, shapes: Any) -> list[Draft]:
        self.round += 1
        self.on = self.owner.pattern[self.round % len(self.owner.pattern)]
        if self.on:
            return self.inner.propose(contexts, shapes)
        return [Draft(TokenTree(context[-1]), {}) for context in contexts]

    def observe(self, verdicts: Any) -> None:
        if self.on:
            self.inner.observe(verdicts)


class Alternate(_Wrapped):
    """Lets a drafter draft only in some rounds: `pattern` says which, over and over; in the others it sees nothing."""

    state = _AlternateState

    def __init__(self, inner: Any, pattern: Sequence[bool] = (True, False)) -> None:
        super().__init__(inner)
        self.pattern = tuple(pattern)


class _WatchState(_WrappedState):
    def propose(self, contexts: Any, shapes: Any) -> list[Draft]:
        self.drafts = super().propose(contexts, shapes)
        self.contexts = [list(context) for context in contexts]
        return self.drafts

    def observe(self, verdicts: Any) -> None:
        self.owner.rounds.append((self.contexts, self.drafts, list(verdicts)))
        super().observe(verdicts)


class Watch(_Wrapped):
    """Passes everything through and remembers it: `rounds` holds (contexts, drafts, verdicts)."""

    state = _WatchState

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.rounds: list[tuple[list[list[int]], list[Draft], list[Any]]] = []

    def walks(self) -> Iterator[tuple[Draft, Any]]:
        """Drafts that held something, with what became of them."""
        for _, drafts, verdicts in self.rounds:
            yield from ((d, v) for d, v in zip(drafts, verdicts) if d.tree.drafted)

    def misses(self) -> int:
        """Walks that ended at a node with children: something was drafted there, and it was wrong."""
        return sum(bool(draft.tree.children[verdict.path[-1]]) for draft, verdict in self.walks())

    def accepted(self) -> int:
        return sum(verdict.accepted for _, verdict in self.walks())


class _SpoiledState(_WrappedState):
    def propose(self, contexts: Any, shapes: Any) -> list[Draft]:
        self.drafts = super().propose(contexts, shapes)
        if self.round % 2 == 0:
            self.drafts = [self._spoil(draft, 1 + self.round // 2 % 4) for draft in self.drafts]
        return self.drafts

    def _spoil(self, draft: Draft, depth: int) -> Draft:
        tree = draft.tree
        copy, wrong = TokenTree(tree.root), next(t for t in range(VOCAB - 1, -1, -1) if t not in tree.tokens)
        for node in range(1, len(tree)):
            copy.add(tree.parents[node], wrong if tree.depths[node] == depth else tree.tokens[node])
        return Draft(copy, draft.trials)

    def observe(self, verdicts: Any) -> None:
        for draft, verdict in zip(self.drafts, verdicts):
            missed = bool(draft.tree.children[verdict.path[-1]])
            if self.round % 2 == 0:
                self.owner.spoiled += missed
            else:
                self.owner.misses += missed
                self.owner.accepted += verdict.accepted
        super().observe(verdicts)


class Spoiled(_Wrapped):
    """Every other round has wrong tokens forced into it, at a depth that changes from round to round.

    The walk ends in the middle of the tree, and the drafter must go on from there. Counts the walks that so ended, and
    what became of the rounds in between.
    """

    state = _SpoiledState

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.spoiled = self.misses = self.accepted = 0


@functools.cache
def _tested(family: str, seed: int, vocab: int) -> Any:
    return tree_model(tiny(family, seed, vocab))[0]


def target_of(family: str, seed: int = 0, vocab: int = VOCAB) -> Any:
    """The TreeModel of a tiny model, self-tested once."""
    return _tested(family, seed, vocab)


def lm(family: str, seed: int = 0, vocab: int = VOCAB) -> LMDrafter:
    """A tiny model as a drafter."""
    return LMDrafter(target_of(family, seed, vocab), f"{family}-{seed}")


class Oracle(OracleDrafter):
    """Writes each text ahead only once."""

    # by the target itself, not by its address: another one may come to lie there
    written: ClassVar[WeakKeyDictionary[Any, dict[Any, list[int]]]] = WeakKeyDictionary()

    def _write(self, ids: list[int], sampler: Sampler, count: int) -> list[int]:
        texts = self.written.setdefault(self.target, {})
        key = (tuple(ids), repr(sampler.options), sampler.seed, sampler.eos, count)
        if key not in texts:
            texts[key] = super()._write(ids, sampler, count)
        return texts[key]


def oracle(family: str, rate: float) -> OracleDrafter:
    return Oracle(target_of(family), rate)


DRAFTERS: dict[str, Callable[[str], Any]] = {
    "same": lm,
    "wrong": lambda family: oracle(family, 0.0),
    "half": lambda family: oracle(family, 0.5),
    "none": lambda family: Alternate(oracle(family, 1.0), (False,)),
    "alternate": lambda family: Alternate(oracle(family, 1.0)),
    "ngram": lambda family: "ngram",
    "merged": lambda family: [oracle(family, 0.4), "ngram", lm(family, 1)],
    "recurrent": lambda family: lm("mamba", 1),
    "off": lambda family: "off",
}


@functools.cache
def engine(family: str, drafter: str = "off") -> Engine:
    """An engine for a tiny target with one of `DRAFTERS`."""
    return Engine(tiny(family), None, family, DRAFTERS[drafter](family))


def generate(family: str, drafter: str, shape: str, key: str, prompt: Any = PROMPT, **more: Any) -> Any:
    """A speculative result (a list for a list of prompts) under names of `DRAFTERS`, `SHAPES`, `OPTIONS`."""
    rows = list(prompt) if isinstance(prompt[0], int) else [list(row) for row in prompt]
    options = {"max_new_tokens": NEW, **OPTIONS[key], **more}
    return engine(family, drafter).generate(rows, shape=SHAPES[shape], **options)


# -- inside a run ------------------------------------------------------------------------------------------------------


def run(target: Any, drafter: Any, prompts: Sequence[Sequence[int]], shape: Any, **given: Any) -> Run:
    """A run that has not begun; `run.state` is the target's state once it has."""
    given.setdefault("max_new_tokens", NEW)
    options = options_from(given)
    eos = options.eos_ids([])
    rows = []
    for i, prompt in enumerate(prompts):
        sampler = Sampler(options, options.seed or 0, len(prompt), eos, target.vocab, DEVICE)
        limit = target.context or len(prompt) + options.max_new_tokens
        rows.append(Row(i, list(prompt), sampler, options, eos, limit, None))
    return Run(target, drafter, Fixed(parse_shape(shape)), rows)


def committed_tensors(state: Any, row: int = 0) -> list[torch.Tensor]:
    """Everything that a state holds of the committed prefix of a row: keys, values, recurrent and convolution states."""
    length = state.lengths[row]
    if not hasattr(state, "cache"):
        return list(_tensors(state.states[row]))
    cache, found = state.cache, []
    for _, layer in sorted(cache.attention.items()):
        keys_HSD = layer.blocks()[row].flatten(1, 2).flatten(2) if layer.in_blocks else layer.keys_BHSD[row]
        found += [keys_HSD[:, :length], layer.values_BHSD[row, :, :length]]
    if cache.states is not None:
        found += [tensor for _, tensor in sorted(cache.states.committed(row).items())]
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def assert_same_tensors(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], limit: float = 1e-5) -> None:
    """Equal up to `limit`, relative to the largest entry of each tensor."""
    assert got and len(got) == len(wanted)
    for one, other in zip(got, wanted):
        assert one.shape == other.shape
        assert torch.isfinite(one).all()
        assert float((one - other).abs().max()) <= limit * max(float(other.abs().max()), 1e-3)


def ancestor_sets(parents: Sequence[int]) -> list[list[int]]:
    """For every node the list of its ancestors and itself, in order of depth."""
    ancestors: list[list[int]] = []
    for node, parent in enumerate(parents):
        ancestors.append([*(ancestors[parent] if parent >= 0 else []), node])
    return ancestors


# -- statistics --------------------------------------------------------------------------------------------------------


def chi_square_p(counts: Sequence[float], probs: Sequence[float], least: float = 5.0) -> float:
    """Chance that counts of these laws are at least this far off (Pearson). Rare cells are pooled into one.

    A count in a cell of probability 0 gives 0: it cannot happen at all.
    """
    total = float(sum(counts))
    cells, rare = [], [0.0, 0.0]
    for count, prob in zip(counts, probs):
        if prob <= 0:
            if count:
                return 0.0
        elif prob * total < least:
            rare[0] += count
            rare[1] += prob * total
        else:
            cells.append((count, prob * total))
    if rare[1] > 0:
        cells.append((rare[0], rare[1]))
    if len(cells) < 2:
        raise ValueError("too few cells for a test")
    distance = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def assert_rounds_leave_what_a_prefill_leaves(target: Any, limit: float) -> None:
    """After rounds of trees the states are those of a fresh run over the tokens that were committed."""
    state = target.begin([list(PROMPT)], 40)
    for token in range(6):
        state.extend([[token, 8, 15, 16]], [[-1, 0, 0, 2]])
        state.commit([[0, 2, 3]])
    ids = [*PROMPT, *(t for token in range(6) for t in (token, 15, 16))]
    assert_same_tensors(committed_tensors(state), committed_tensors(target.begin([ids])), limit)
