"""Two slow ways to score a tree that need nothing from a model but its own forward.

`StepwiseTreeModel` copies the model's own cache per node and feeds one token: right wherever single steps are right.
`RecomputeTreeModel` runs every path from its beginning without any cache: right always.

Shapes: B rows, N new nodes, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.cache.pending import Pending
from outrider.models.protocol import Rows
from outrider.models.tree_model import Unsupported, context_length


class _PathModel(ABC):
    """Shared by both: nodes are visited one at a time, each from the state of its parent."""

    way = ""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.vocab = int(model.config.get_text_config().vocab_size)
        self.context = context_length(model)
        self.device, self.dtype = model.device, model.dtype

    @abstractmethod
    def step(self, state: Any, tokens: list[int]) -> tuple[Tensor, Any]:
        """Logits [V] after the last of the tokens, and the state there, from the state before it."""

    def absorb(self, tokens: list[int]) -> Any:
        """State after a prompt."""
        state = None
        for end in range(1, len(tokens) + 1):
            _, state = self.step(state, tokens[:end])
        return state

    @torch.inference_mode()
    def begin(self, prompts: Rows, room: int = 0, taps: Sequence[int] = ()) -> PathState:
        """Feed each prompt."""
        if taps:
            raise ValueError(
                f"{type(self.model).__name__} is run by {self.way}, which gives no hidden states; use another drafter"
            )
        return PathState(self, [list(p) for p in prompts], [self.absorb(list(p)) for p in prompts])

    def state_bytes_per_node(self) -> int:
        """Unknown here: states are the model's own objects."""
        return 0


class StepwiseTreeModel(_PathModel):
    """One copied cache and one single-token forward per node.

    Raises:
        Unsupported: when the model's forward neither takes nor returns a state that can be handed on.
    """

    way = "a copied cache per node"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        accepted = inspect.signature(model.forward).parameters
        names = [n for n in ("cache", "state", "past_key_values", "cache_params") if n in accepted]
        if not names:
            raise Unsupported("its forward takes no state")
        self._name = names[0]
        self._positions = "position_ids" in accepted

    def step(self, state: Any, tokens: list[int]) -> tuple[Tensor, Any]:
        """Feed the last of `tokens` onto a copy of the state."""
        kwargs: dict[str, Any] = {self._name: copy.deepcopy(state), "use_cache": True}
        if self._positions:
            kwargs["position_ids"] = torch.tensor([[len(tokens) - 1]], device=self.device)
        out = self.model(input_ids=torch.tensor([tokens[-1:]], device=self.device), **kwargs)
        return out.logits[0, -1], getattr(out, self._name)


class RecomputeTreeModel(_PathModel):
    """Every path from its beginning, no cache at all."""

    way = "every path recomputed"

    def step(self, state: Any, tokens: list[int]) -> tuple[Tensor, Any]:
        """Feed all of `tokens`."""
        logits = self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits
        return logits[0, -1], None

    def absorb(self, tokens: list[int]) -> Any:
        """Nothing to keep."""
        return None


class PathState:
    """Sequences in flight of a path model."""

    def __init__(self, model: _PathModel, tokens: list[list[int]], states: list[Any]) -> None:
        self.model, self.tokens, self.states = model, tokens, states
        self.nodes = Pending(len(tokens))
        self.features: list[Tensor] | None = None
        self.paths: list[dict[int, list[int]]] = [{} for _ in tokens]
        self.node_states: list[dict[int, Any]] = [{} for _ in tokens]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [len(row) for row in self.tokens]

    @property
    def pending(self) -> int:
        """Pending nodes of each row."""
        return self.nodes.count

    @torch.inference_mode()
    def extend(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes, return logits [B, N, V]; see `TreeState`."""
        new = max(map(len, tokens))
        start, _ = self.nodes.add(parents, new)
        logits_BNV = torch.zeros(len(tokens), new, self.model.vocab, device=self.model.device, dtype=self.model.dtype)
        for row, (row_tokens, row_parents) in enumerate(zip(tokens, parents)):
            for offset, (token, parent) in enumerate(zip(row_tokens, row_parents)):
                before = self.paths[row][parent] if parent >= 0 else []
                state = self.node_states[row][parent] if parent >= 0 else self.states[row]
                path = [*before, token]
                logits_V, after = self.model.step(state, self.tokens[row] + path)
                logits_BNV[row, offset] = logits_V
                self.paths[row][start + offset], self.node_states[row][start + offset] = path, after
        return logits_BNV

    @torch.inference_mode()
    def commit(self, paths: Rows) -> None:
        """A path per row joins the committed state."""
        for row, path in enumerate(paths):
            self.nodes.check_path(row, path)
            if path:
                self.tokens[row] = self.tokens[row] + self.paths[row][path[-1]]
                self.states[row] = self.node_states[row][path[-1]]
            self.paths[row], self.node_states[row] = {}, {}
        self.nodes.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        for name in ("tokens", "states", "paths", "node_states"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        self.nodes.keep(rows)

    def bytes(self) -> int:
        """Unknown: states are the model's own objects."""
        return 0
