"""The slow, obvious way: one full forward over the whole text for every token, no cache, no tree.

Every test compares with this. Only the sampler is shared with the engine, since the promise is the same text for the
same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from outrider.options import Options
from outrider.sampling import Sampler


@torch.inference_mode()
def reference_generate(
    model: PreTrainedModel, prompt: Sequence[int], options: Options, eos: frozenset[int] = frozenset(), seed: int = 0
) -> list[int]:
    """New token ids, one full forward each.

    Args:
        model: the target.
        prompt: token ids, at least one.
        options: as for the engine; stop strings are not looked at.
        eos: ids that end the text.
        seed: keys the noise.
    """
    ids = list(prompt)
    vocab = model.config.get_text_config().vocab_size
    sampler = Sampler(options, seed, len(ids), eos, vocab, model.device)
    for _ in range(options.max_new_tokens):
        logits_V = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]
        ids.append(sampler.pick(ids, logits_V))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]
