"""At load, a model shows that trees are scored right; the first way that does is the one it gets.

transformers' families change often, and several feed a block of tokens onto a recurrent state wrongly. So nothing is
believed: a small tree behind a short prefix is compared with plain forwards of each path, after a commit as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.deviation import deviation
from outrider.models.factor_model import FactorTreeModel
from outrider.models.fallback import RecomputeTreeModel, StepwiseTreeModel
from outrider.models.graphs import graphed
from outrider.models.lean import LeanTreeModel
from outrider.models.native import NativeTreeModel
from outrider.models.protocol import TreeModel
from outrider.models.resident import release
from outrider.models.stamp import Stamp, stamp
from outrider.models.streaming import streamed_parts
from outrider.models.tree_model import CachedTreeModel, Unsupported, context_length

PREFIX = 5
PARENTS = (-1, 0, 0, 1, 2, 3)
PATH = (0, 2, 4)
SECOND = 3  # nodes of the tree after the commit
LONGEST = PREFIX + len(PATH) + 2  # positions that the test reaches
# largest allowed difference, relative to the largest logit; rounding stays far below, a leaking sibling far above
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass
class SelfTest:
    """How a model scores trees, and what led there."""

    way: str
    error: float
    chunked_prefill: bool
    notes: list[str] = field(default_factory=list)


def tree_model(model: PreTrainedModel) -> tuple[TreeModel, SelfTest]:
    """The fastest TreeModel of a model that passes; tested anew when the model's weights have changed since the last call.

    Raises:
        ValueError: when even a plain forward gives no finite logits.
    """
    if any(module.training for module in model.modules()):
        model.eval()  # with dropout no text could be told from another
    known: _Known = vars(model).get("_outrider") or _Known(None, None)
    if known.found is None or known.stamp != stamp(model, known.stamp):
        found = _choose(model)
        known = _Known(stamp(model), found)
        vars(model)["_outrider"] = known  # on the model itself, so that both are freed together
    assert known.found is not None
    return known.found


@dataclass
class _Known:
    """What was found about a model. A copy of the model is another model, about which nothing is known."""

    stamp: Stamp | None
    found: tuple[TreeModel, SelfTest] | None

    def __deepcopy__(self, memo: Any) -> _Known:
        return _Known(None, None)


def _choose(model: PreTrainedModel) -> tuple[TreeModel, SelfTest]:
    """The fastest TreeModel of a model that passes.

    Raises:
        ValueError: when even a plain forward gives no finite logits.
    """
    room = context_length(model)
    if room is not None and room < LONGEST:
        raise ValueError(f"the model's context of {room} tokens is too short to test; it must hold at least {LONGEST}")
    notes: list[str] = []
    ways: tuple[Callable[[PreTrainedModel], Any], ...] = (
        NativeTreeModel,
        LeanTreeModel,
        FactorTreeModel,
        CachedTreeModel,
        StepwiseTreeModel,
    )
    limit = TOLERANCE.get(model.dtype, 1e-4)
    plain = Plain(model)
    for way in ways:
        try:
            candidate = way(model)
            error = tree_error(candidate, plain)
        except Unsupported as reason:
            notes += [f"not {way.__name__}: {reason}"] if str(reason) else []
            continue
        except (
            RuntimeError,
            TypeError,
            IndexError,
            AttributeError,
            KeyError,
            AssertionError,
        ) as e:
            notes.append(f"not {way.__name__}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200])
            continue
        if error <= limit:
            if isinstance(candidate, LeanTreeModel) and model.device.type == "cuda" and not streamed_parts(model):
                candidate, note = graphed(candidate, limit)
                notes += [note] if note else []
            chunked = getattr(candidate, "chunked_prefill", False) or _allow_chunks(candidate, plain, limit)
            if isinstance(candidate, NativeTreeModel) and not streamed_parts(model):
                for weight in model.parameters():  # they are laid out, and were looked at for their neighbours' sake
                    release(weight)
            return candidate, SelfTest(candidate.way, error, chunked, notes)
        notes.append(f"not {way.__name__}: tree logits are off by {error:.1e} (limit {limit:.0e})")
    slow = RecomputeTreeModel(model)
    return slow, SelfTest(slow.way, tree_error(slow, plain), False, notes)


class Plain:
    """What plain forwards of the model say after every path of the test's trees.

    They are run before anything is packed: then weights need not be in memory in two layouts at once.

    Raises:
        ValueError: when they are not finite.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel) -> None:
        vocab = model.config.get_text_config().vocab_size
        tokens = [(7 * i + 3) % vocab for i in range(PREFIX + 2 * len(PARENTS))]
        self.prefix, self.first = tokens[:PREFIX], tokens[PREFIX : PREFIX + len(PARENTS)]
        self.second = tokens[PREFIX + len(PARENTS) :][:SECOND]
        committed = self.prefix + [self.first[node] for node in PATH]
        self.after_first = self._logits(model, self.prefix, self.first)
        self.after_second = self._logits(model, committed, self.second)

    @staticmethod
    def _logits(model: PreTrainedModel, prefix: list[int], tokens: list[int]) -> list[torch.Tensor]:
        """Logits [V] after each node of a tree behind a prefix, from one forward a leaf."""
        found = [torch.empty(0)] * len(tokens)
        for leaf in set(range(len(tokens))) - set(PARENTS[: len(tokens)]):
            path = [leaf]
            while (parent := PARENTS[path[0]]) >= 0:
                path.insert(0, parent)
            ids = torch.tensor([prefix + [tokens[node] for node in path]], device=model.device)
            logits_LV = model(input_ids=ids).logits[0].float()
            for node, logits_V in zip(path, logits_LV[len(prefix) :]):
                found[node] = logits_V
            if not torch.isfinite(logits_LV).all():
                raise ValueError(
                    "the model's logits are not finite on a plain forward; its weights are damaged or the dtype too narrow: "
                    "try dtype float32"
                )
        return found


@torch.inference_mode()
def tree_error(candidate: Any, plain: Plain) -> float:
    """Largest difference between tree logits and plain forwards, relative to the largest logit."""
    state = candidate.begin([plain.prefix], room=len(PARENTS))
    error = _apart(state.extend([plain.first], [PARENTS])[0], plain.after_first)
    state.commit([PATH])
    return max(error, _apart(state.extend([plain.second], [PARENTS[:SECOND]])[0], plain.after_second))


def _apart(logits_NV: torch.Tensor, expected: list[torch.Tensor]) -> float:
    return max(deviation(got_V, true_V) for got_V, true_V in zip(logits_NV.float(), expected))


def _allow_chunks(candidate: Any, plain: Plain, limit: float) -> bool:
    """Whether a block may be fed onto an existing state, so that long prompts can be prefilled in pieces."""
    if not isinstance(candidate, CachedTreeModel):
        return False
    candidate.chunked_prefill, candidate.chunk = True, 3
    try:
        candidate.chunked_prefill = tree_error(candidate, plain) <= limit
    finally:
        del candidate.chunk
    return candidate.chunked_prefill
