"""Whether two models mean the same by a token id."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def shared_vocabulary(
    target: PreTrainedTokenizerBase | None, drafter: PreTrainedTokenizerBase | None, target_vocab: int, name: str
) -> int:
    """How many ids, counted from 0, the drafter may propose.

    Token maps must agree on every id that both know; embeddings padded to another size do not matter. Without a tokenizer on
    both sides nothing can be compared, and ids are taken to mean the same.

    Raises:
        ValueError: when an id means different tokens.
    """
    if target is None or drafter is None:
        return min(target_vocab, len(target)) if target is not None else target_vocab
    of_target = {i: token for token, i in target.get_vocab().items()}
    of_drafter = {i: token for token, i in drafter.get_vocab().items()}
    clash = [i for i in sorted(of_target.keys() & of_drafter.keys()) if of_target[i] != of_drafter[i]]
    if clash or not of_target.keys() & of_drafter.keys():
        examples = ", ".join(f"{i} is {of_drafter[i]!r} there and {of_target[i]!r} here" for i in clash[:3])
        raise ValueError(
            f"drafter {name!r} has another vocabulary than the target ({len(clash)} ids differ: {examples}); use a drafter "
            "with the target's tokenizer"
        )
    return min(target_vocab, max(of_target.keys() & of_drafter.keys()) + 1)
