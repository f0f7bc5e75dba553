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
from outrider.models.mamba_drafter import MambaBlocks, MambaDrafterConfig
from outrider.models.scans import UnrolledScan
from outrider.train.batches import Batch
from outrider.train.features import Example
from outrider.train.losses import Laws

if TYPE_CHECKING:
    from outrider.api import Engine

SSM_HEAD_SIZE = 64
STRAIGHT = 0.1  # of a token's own embedding in the stream of a fresh Mamba drafter


class Student(Protocol):
    """A drafter in training."""

    module: nn.Module
    """What is trained."""

    device: torch.device
    """The target's: where the module is, and where batches must be."""

    draft_ids: Tensor
    """Token ids of the draft vocabulary, [C]."""

    cut_CD: Tensor
    """Its vocabulary head, frozen."""

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Outputs [B, T, D] of every unrolled step: at step k a token lies k drafted tokens behind the target's text. A student
        that reads nothing of the target has one step: the others would be the same."""
        ...

    def laws(self, batch: Batch) -> Laws:
        """The target's laws at the written positions, cut to the draft vocabulary."""
        ...

    def logq(self, out_RD: Tensor) -> Tensor:
        """The drafter's laws, log probabilities [R, C]."""
        ...


class Borrower:
    """What a student borrows from its target: embedding, vocabulary head, and the laws behind stored hidden states."""

    def __init__(self, engine: Engine, draft_ids: Tensor) -> None:
        self.device = engine.model.device
        self.draft_ids = draft_ids.to(self.device)
        self.embedding: nn.Module = (
            engine.model.get_input_embeddings()
        )  # not its weight alone: some scale what they look up
        unembedding = engine.model.get_output_embeddings().weight.detach()
        self.cut_CD = unembedding[self.draft_ids]
        base: Any = engine.model.base_model
        self.final_norm: nn.Module = base.norm

    def embed(self, batch: Batch) -> Tensor:
        """What the target's embedding layer makes of the tokens, [B, T, D]."""
        with torch.no_grad():
            embedded_BTD: Tensor = self.embedding(batch.ids_BT)
        return embedded_BTD.float()

    def laws(self, batch: Batch) -> Laws:
        """The target's laws at the written positions, cut to the draft vocabulary."""
        return target_laws(batch, self.final_norm, self.cut_CD)

    def logq(self, out_RD: Tensor) -> Tensor:
        """The drafter's laws, log probabilities [R, C]."""
        return drafted_laws(out_RD, self.cut_CD)


class HeadStudent(Borrower):
    """A feature head in training."""

    def __init__(self, engine: Engine, head: FeatureHead) -> None:
        super().__init__(engine, head.draft_ids)
        self.head = head.to(self.device)
        self.module: nn.Module = self.head

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Outputs [B, T, D] of every unrolled step: at step k a token lies k drafted tokens behind the target's text."""
        embedded = self.embed(batch)
        positions = torch.arange(batch.ids_BT.shape[1], device=embedded.device)[None].expand(batch.ids_BT.shape)
        features = delay(self.head.features(batch.hidden_BTF.float()))
        attend, scan = unrolled_attention([], [], self.head.config.attention_window), UnrolledScan()
        for _ in range(steps):
            out = self.head(embedded, features, positions, attend, scan)
            yield out
            features = delay(out)


class MambaStudent(Borrower):
    """A stand-alone Mamba drafter in training. One step is enough: it reads nothing of the target's states."""

    def __init__(self, engine: Engine, blocks: MambaBlocks) -> None:
        super().__init__(engine, blocks.draft_ids)
        self.blocks = blocks.to(self.device)
        self.module: nn.Module = self.blocks

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """Outputs [B, T, D] of the one step."""
        yield self.blocks(self.embed(batch))


def target_laws(batch: Batch, final_norm: nn.Module, head_CD: Tensor) -> Laws:
    """Laws behind the last of the stored hidden states."""
    with torch.no_grad():
        last_RD: Tensor = final_norm(batch.hidden_BTF[batch.learnt_BT][:, -head_CD.shape[1] :].to(head_CD.dtype))

    def laws(rows: slice) -> Tensor:
        return F.linear(last_RD[rows], head_CD).float().log_softmax(-1)

    return laws


def drafted_laws(out_RD: Tensor, head_CD: Tensor) -> Tensor:
    """Laws that a vocabulary head makes of a drafter's outputs, log probabilities [R, C]."""
    return F.linear(out_RD.to(head_CD.dtype), head_CD).float().log_softmax(-1)


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
    engine: Engine,
    examples: list[Example],
    taps: tuple[int, ...],
    draft_vocab: int,
    seed: int,
    core: str = "attention",
    window: int = 128,
    neurons: int | None = None,
    state: int = 64,
) -> FeatureHead:
    """An untrained head for a target; with feed-forward neurons of 8/3 of its width if nothing else is said."""
    config = engine.model.config.get_text_config()
    heads = max(1, config.hidden_size // 64)
    sizes = HeadConfig(
        width=config.hidden_size,
        taps=taps,
        num_heads=heads,
        num_kv_heads=heads // 3 if heads % 3 == 0 else heads,
        ffn=neurons or config.hidden_size * 8 // 3 // 64 * 64 or 64,
        draft_vocab=min(draft_vocab, config.vocab_size),
        core=core,
        window=window,
        ssm_heads=max(1, 2 * config.hidden_size // SSM_HEAD_SIZE),
        ssm_head_size=SSM_HEAD_SIZE,
        ssm_state=state,
    )
    head = untrained_head(engine, sizes, seed)
    head.draft_ids = frequent_tokens(examples, sizes.draft_vocab, config.vocab_size)
    return head


def untrained_head(engine: Engine, config: HeadConfig, seed: int) -> FeatureHead:
    """The same for given sizes, without a draft vocabulary of its own."""
    torch.manual_seed(seed)
    head = FeatureHead(config)
    _initialize(head, engine)
    return head


def new_mamba(
    engine: Engine,
    examples: list[Example],
    draft_vocab: int,
    seed: int,
    layers: int = 3,
    ffn: int = 0,
    state_size: int = 32,
) -> MambaBlocks:
    """An untrained stand-alone Mamba drafter for a target."""
    config = engine.model.config.get_text_config()
    sizes = MambaDrafterConfig(
        width=config.hidden_size,
        layers=layers,
        num_heads=max(1, 2 * config.hidden_size // SSM_HEAD_SIZE),
        head_size=SSM_HEAD_SIZE,
        state_size=state_size,
        draft_vocab=min(draft_vocab, config.vocab_size),
        ffn=ffn,
    )
    blocks = untrained_mamba(engine, sizes, seed)
    blocks.draft_ids = frequent_tokens(examples, sizes.draft_vocab, config.vocab_size)
    return blocks


def untrained_mamba(engine: Engine, config: MambaDrafterConfig, seed: int) -> MambaBlocks:
    """The same for given sizes, without a draft vocabulary of its own."""
    torch.manual_seed(seed)
    blocks = MambaBlocks(config)
    _initialize(blocks, engine)
    # embedding and vocabulary head are tied: what goes straight through would foretell every token as its own successor
    nn.init.constant_(blocks.in_norm.weight, STRAIGHT)
    return blocks


def _initialize(module: FeatureHead | MambaBlocks, engine: Engine) -> None:
    """Matrices that keep the size of what they read; those that add to the residual stream start at half of it. Outputs start
    in the scale that the target's vocabulary head is used to."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            scale = 0.5 if name.split(".")[-2] in ("mixed", "down", "out_proj") else 1.0
            nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)
    base: Any = engine.model.base_model
    weight = module.out_norm.weight
    with torch.no_grad():  # of a vector of ones, a norm leaves its weights, however it stores them
        weight.copy_(base.norm(torch.ones(1, len(weight), dtype=engine.dtype, device=engine.model.device))[0])
