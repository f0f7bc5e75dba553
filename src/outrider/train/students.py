"""Drafters in training: what each computes for a batch, and the target's laws that it learns.

Shapes: B rows, T tokens, D width, C draft vocabulary, R written positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.feature_head import FeatureHead, HeadConfig, unrolled_attention
from outrider.train.batches import Batch
from outrider.train.features import Example

if TYPE_CHECKING:
    from outrider.api import Engine


class Student(Protocol):
    """A drafter in training."""

    module: nn.Module
    """What is trained."""

    draft_ids: Tensor
    """Token ids of the draft vocabulary, [C]."""

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Outputs [B, T, D] of every unrolled step: at step k a token lies k drafted tokens behind the target's text. A student
        that reads nothing of the target gives the same at every step."""
        ...

    def target_logp(self, batch: Batch, where_BT: Tensor) -> Tensor:
        """The target's laws cut to the draft vocabulary, log probabilities [R, C]."""
        ...

    def logq(self, out_RD: Tensor) -> Tensor:
        """The drafter's laws, log probabilities [R, C]."""
        ...


class HeadStudent:
    """A feature head in training, with what it borrows from the target."""

    def __init__(self, engine: Engine, head: FeatureHead) -> None:
        self.module = self.head = head
        self.draft_ids = head.draft_ids
        self.embedding = engine.model.get_input_embeddings().weight.detach()
        unembedding = engine.model.get_output_embeddings().weight.detach()
        self.cut_CD = unembedding[head.draft_ids]
        base: Any = engine.model.base_model
        self.final_norm: nn.Module = base.norm

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Outputs [B, T, D] of every unrolled step: at step k a token lies k drafted tokens behind the target's text."""
        embedded = F.embedding(batch.ids_BT, self.embedding).float()
        positions = torch.arange(batch.ids_BT.shape[1])[None].expand(batch.ids_BT.shape)
        features = delay(self.head.features(batch.hidden_BTF.float()))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(steps):
            out = self.head(embedded, features, positions, unrolled_attention(keys, values))
            yield out
            features = delay(out)

    def target_logp(self, batch: Batch, where_BT: Tensor) -> Tensor:
        """The target's laws cut to the draft vocabulary, log probabilities [R, C]."""
        width = self.head.config.width
        last_RD = batch.hidden_BTF[where_BT][:, -width:]
        with torch.no_grad():
            return F.linear(self.final_norm(last_RD), self.cut_CD).float().log_softmax(-1)

    def logq(self, out_RD: Tensor) -> Tensor:
        """The drafter's laws, log probabilities [R, C]."""
        return F.linear(out_RD.to(self.cut_CD.dtype), self.cut_CD).float().log_softmax(-1)


def delay(x_BTD: Tensor) -> Tensor:
    """Shift along time by one: a token reads what belongs to the token before it."""
    return F.pad(x_BTD, (0, 0, 1, 0))[:, :-1]


def frequent_tokens(examples: list[Example], count: int, vocab: int) -> Tensor:
    """The tokens that the target writes most, filled up with low ids, [count]."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.ids[example.prompt_length :].tolist())
    ids = [token for token, _ in counts.most_common(count)]
    known = set(ids)
    ids += [t for t in range(vocab) if t not in known][: count - len(ids)]
    return torch.tensor(ids)


def new_head(
    engine: Engine, examples: list[Example], taps: tuple[int, ...], draft_vocab: int, seed: int
) -> FeatureHead:
    """An untrained head for a target."""
    config = engine.model.config.get_text_config()
    torch.manual_seed(seed)
    heads = max(1, config.hidden_size // 64)
    head = FeatureHead(
        HeadConfig(
            width=config.hidden_size,
            taps=taps,
            num_heads=heads,
            num_kv_heads=heads // 3 if heads % 3 == 0 else heads,
            ffn=config.hidden_size * 8 // 3 // 64 * 64 or 64,
            draft_vocab=min(draft_vocab, config.vocab_size),
        )
    )
    head.draft_ids = frequent_tokens(examples, head.config.draft_vocab, config.vocab_size)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            scale = 0.5 if name.startswith(("mixed", "down")) else 1.0
            nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)
    return head
