"""A lean stand-alone Mamba-2 language model that drafts: a few wide blocks between the target's embedding and its cut head.

Embedding and vocabulary head are the target's, frozen and shared in memory; the head is cut to the most frequent tokens. The
state has constant size, so a step costs the same at every context length, and nodes of a tree leave only factors.

Shapes: B rows, T or N tokens, D width, C draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.cache.factors import Factors
from outrider.cache.pending import Pending
from outrider.models.draft_vocab import CutHead, DraftState, TextVocabulary
from outrider.models.inference import inference
from outrider.models.mamba_mixer import MambaMixer, Scan
from outrider.models.norm import Norm
from outrider.models.packed import Packed
from outrider.models.protocol import Rows
from outrider.models.scans import PromptScan, mixer_kernels, scan_sequence, tree_scan

PREFILL_CHUNK = 1024
NODES = 128  # that buffers hold before they grow


@dataclass(frozen=True)
class MambaDrafterConfig:
    """Sizes of a Mamba drafter.

    Args:
        width: D, the target's.
        ffn: width of the gated MLP of a block; 0 is a block without one.
        draft_vocab: C.
    """

    width: int
    layers: int
    num_heads: int
    head_size: int
    state_size: int
    draft_vocab: int
    ffn: int = 0

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


class MambaBlock(nn.Module):
    """Mixer and, if asked for, a gated MLP, each behind a norm and added to what came in."""

    def __init__(self, config: MambaDrafterConfig, layer: int) -> None:
        super().__init__()
        d = config.width
        self.norm = Norm(d)
        self.mixer = MambaMixer(d, config.num_heads, config.head_size, config.state_size, layer)
        self.gated = config.ffn > 0
        if self.gated:
            self.ffn_norm = Norm(d)
            self.up, self.down = nn.Linear(d, 2 * config.ffn, bias=False), nn.Linear(config.ffn, d, bias=False)

    def forward(self, x_BND: Tensor, scan: Scan) -> Tensor:
        """Outputs [B, N, D]."""
        x_BND = x_BND + self.mixer(self.norm(x_BND), scan)
        if self.gated:
            gate, value = self.up(self.ffn_norm(x_BND)).chunk(2, dim=-1)
            x_BND = x_BND + self.down(F.silu(gate) * value)
        return x_BND


class MambaBlocks(nn.Module):
    """What is trained: the blocks, without the target's embedding and vocabulary head."""

    draft_ids: Tensor
    """Token ids of the draft vocabulary, most frequent first, [C]."""

    def __init__(self, config: MambaDrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.in_norm = Norm(config.width)
        self.blocks = nn.ModuleList(MambaBlock(config, layer) for layer in range(config.layers))
        self.out_norm = Norm(config.width)
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab))

    def forward(self, embedded_BND: Tensor, scan: Scan = scan_sequence) -> Tensor:
        """Outputs [B, N, D], which the target's vocabulary head turns into logits."""
        x_BND = self.in_norm(embedded_BND)
        for block in self.blocks:
            x_BND = block(x_BND, scan)
        out: Tensor = self.out_norm(x_BND)
        return out


class MambaModel:
    """The blocks as a `TreeModel`, with the embedding and the vocabulary head that they borrow from the target.

    Args:
        blocks: trained; they are moved to the target's dtype and device.
        embedding: the target's input embedding.
        unembedding: the target's vocabulary head.
    """

    way = "tree mask"
    context: int | None = None

    def __init__(self, blocks: MambaBlocks, embedding: nn.Embedding, unembedding: nn.Linear) -> None:
        weight = unembedding.weight
        self.blocks = blocks.to(weight.device, weight.dtype).eval().requires_grad_(False)
        self.embedding, self.vocab = embedding, weight.shape[0]
        self.dtype, self.device = weight.dtype, weight.device
        self.cut = CutHead(weight, blocks.draft_ids)
        self.draft_ids = self.cut.ids
        self.packed = Packed(self.blocks, rounds=True)
        self.sizes = [m.sizes() for m in blocks.modules() if isinstance(m, MambaMixer)]
        self.kernels = mixer_kernels(blocks.modules())

    @inference
    def begin(self, prompts: Rows, room: int = 0, taps: Sequence[int] = ()) -> MambaState:
        """Prefill each prompt on its own, so that a row never depends on its neighbours."""
        if taps:
            raise ValueError("a Mamba drafter hands out no hidden states; use a transformers model as the target")
        state = MambaState(self, len(prompts))
        state.vocabulary.follow(prompts)
        for row, prompt in enumerate(prompts):
            scan = PromptScan()
            for at in range(0, len(prompt), PREFILL_CHUNK):
                ids = torch.tensor([list(prompt[at : at + PREFILL_CHUNK])], device=self.device)
                self.blocks(self.embedding(ids), scan)
            for layer, final in scan.states.items():
                state.factors.set_committed(row, layer, scan.windows[layer][0], final[0])
            state.lengths[row] = len(prompt)
        return state

    def state_bytes_per_node(self) -> int:
        """Memory of what one pending node leaves."""
        return sum(size.node_bytes() for size in self.sizes)


class MambaState(DraftState):
    """States of B rows and their pending nodes."""

    def __init__(self, model: MambaModel, batch: int) -> None:
        self.model, self.lengths = model, [0] * batch
        self.nodes = Pending(batch)
        self.factors = Factors(model.sizes, batch, NODES, model.device)
        self.features: list[Tensor] | None = None
        self.vocabulary = TextVocabulary(model.cut, batch)

    @property
    def pending(self) -> int:
        """Pending nodes of each row, padding included."""
        return self.nodes.count

    def _outputs(self, tokens: Rows, parents: Rows) -> Tensor:
        """Feed nodes, return the blocks' outputs [B, N, D]."""
        new = max(map(len, tokens))
        start, _ = self.nodes.add(parents, new)
        scan = tree_scan(self.factors, self.nodes, start, self.model.kernels)
        ids = torch.tensor([[*row, *[0] * (new - len(row))] for row in tokens], device=self.model.device)
        self.vocabulary.follow(tokens)
        outputs_BND: Tensor = self.model.blocks(self.model.embedding(ids), scan)
        return outputs_BND

    @inference
    def commit(self, paths: Rows) -> None:
        """A path per row joins the committed state."""
        for row, path in enumerate(paths):
            self.nodes.check_path(row, path)
            if path:
                self.factors.commit(row, path)
            self.lengths[row] += len(path)
        self.nodes.clear()

    @inference
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.factors.keep(rows)
        self.nodes.keep(rows)
        self.vocabulary.keep(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def bytes(self) -> int:
        """Memory of states and factors."""
        return self.factors.bytes()
