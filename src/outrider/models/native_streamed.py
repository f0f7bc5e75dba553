"""A decoder by compiled kernels whose layers are in memory one after another, with the bits of one that is there as a whole.

Shapes: B rows, N nodes, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.native.decoder import Attended, Decoder, DecoderLayer


@dataclass(frozen=True)
class StreamedDecoder:
    """Layers that are passed one by one.

    Args:
        layers: of each, what holds it in memory, and what tells its weights while it is there.
        make: a decoder from its layers and its vocabulary head.
        unembed: the vocabulary head.
    """

    layers: Sequence[tuple[AbstractContextManager[Any], Callable[[], DecoderLayer]]]
    make: Callable[..., Decoder]
    unembed: nn.Linear

    def changed(self, **parts: Any) -> StreamedDecoder:
        """The same decoder with other `layers`, another `unembed` ..."""
        return replace(self, **parts)

    def __call__(
        self,
        stream_BND: Tensor,
        attended: Attended,
        taps: Sequence[int] = (),
        logits: bool = True,
        hidden: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Logits [B, N, V], outputs of the tapped layers side by side [B, N, taps * D], those of the last norm [B, N, D], as
        `Decoder` gives them."""
        logits_BNV, hidden_BND, tapped = None, None, {}
        for index, (there, layer) in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            with there:
                decoder = self.make([layer()], unembed=self.unembed if is_last and logits else None)
                held = attended.held.layer(index)
                logits_BNV, output_BND, hidden_BND = decoder(
                    stream_BND, replace(attended, held=held), taps=(0,), hidden=hidden and is_last
                )
            assert output_BND is not None
            if index in taps:
                tapped[index] = output_BND.clone()  # the next layer writes into what it reads
            stream_BND = output_BND
        return logits_BNV, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None, hidden_BND
