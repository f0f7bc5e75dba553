"""A stand-alone transformer of ours as a drafter: a transformers folder with `drafter.json` beside it.

The folder is an ordinary model; what `drafter.json` adds is the target that it was made for, and `draft_ids.safetensors`
the tokens that it learnt: its vocabulary head is then cut to these, which also makes a step cheaper.

Shapes: D width, C draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.drafters.folder import sharpness
from outrider.drafters.lm import LMDrafter
from outrider.drafters.vocabulary import shared_vocabulary
from outrider.models.draft_vocab import CutHead
from outrider.models.fingerprint import fingerprint
from outrider.models.lean import LeanTreeModel
from outrider.models.loading import load_model
from outrider.models.selftest import tree_model

ABOUT = "drafter.json"
DRAFT_IDS = "draft_ids.safetensors"


def is_small_lm(folder: Path) -> bool:
    """Whether a folder holds a stand-alone transformer of ours."""
    return (folder / ABOUT).is_file()


def load_small_lm(
    folder: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **loading: Any
) -> LMDrafter:
    """The drafter in a folder.

    Raises:
        ValueError: when it is broken, or was made for another target.
    """
    try:
        about = json.loads((folder / ABOUT).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / ABOUT} is damaged ({error}); train the drafter again") from error
    if about.get("fingerprint") != fingerprint(target):
        raise ValueError(
            f"the drafter in {folder} was made for {about.get('target', 'another model')}, not for this target; train one "
            "with `outrider distil --target ...`"
        )
    loaded = load_model(str(folder), **loading)
    limit = shared_vocabulary(tokenizer, loaded.tokenizer, target.config.get_text_config().vocab_size, str(folder))
    model: Any = tree_model(loaded.model)[0]  # tested with its whole vocabulary head, which is cut only now
    if (folder / DRAFT_IDS).exists():
        ids, whole = load_file(folder / DRAFT_IDS)["draft_ids"].long(), cast(Any, loaded.model.get_output_embeddings())
        head = CutHead(whole.weight, ids[ids < limit])
        model.draft_ids = head.ids
        if isinstance(model, LeanTreeModel):
            model.speak_through(head)
        else:
            loaded.model.set_output_embeddings(head)
    drafter = LMDrafter(model, "llama", limit)
    drafter.sharpness = sharpness(about)
    return drafter
