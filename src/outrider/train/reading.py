"""Texts of another data set, read by a target instead of written by it.

Reading costs a fifth of writing. The target's laws over a text are what a drafter learns from, whoever wrote it: so a model that
was made out of another one can begin with the other's answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.models.files import save_atomically
from outrider.models.fingerprint import fingerprint
from outrider.train.data import (
    DataSettings,
    answer_tokens,
    claim_data,
    load_shard,
    read_answers,
    shard_files,
    vocabulary,
)

if TYPE_CHECKING:
    from outrider.api import Engine


def take_texts(engine: Engine, source: Path, out: Path, tokens: int) -> int:
    """Copy shards of another data set until there are so many answer tokens; returns how many there are.

    Prompts that are held out are in no data set, and so not in this one.

    Raises:
        ValueError: when the source holds no data set, or one in another vocabulary, or `out` holds something else.
    """
    if tokens < 1:
        raise ValueError(f"{tokens} tokens are no data; ask for more")
    try:
        known = json.loads((source / "data.json").read_text())
        sources = (*known["sources"], f"read, written by {known['target']} ({known['fingerprint']})")
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{source} holds no data set to read; make one with `outrider data --out {source}`") from None
    if known.get("vocabulary") != vocabulary(engine):
        raise ValueError(
            f"the texts in {source} are not in the vocabulary of {engine.name}; let it write a data set of its own"
        )
    read_answers(source)  # tells when there are none
    settings = DataSettings(
        engine.name,
        fingerprint(engine.model),
        known["vocabulary"],
        tokens,
        known["max_new_tokens"],
        known["seed"],
        sources,
    )
    claim_data(out, settings)
    done = 0
    for path in shard_files(source):
        if done >= tokens:
            break
        copy = out / path.name
        if not copy.exists():
            save_atomically(load_shard(path), copy)
        done += answer_tokens(load_shard(copy))
    return sum(answer_tokens(load_shard(path)) for path in shard_files(out))
