"""From what a user names to a drafter."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.controller import Bandit, Controller, Fixed
from outrider.drafters.base import Drafter
from outrider.drafters.lm import LMDrafter
from outrider.drafters.merged import MergedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.oracle import OracleDrafter
from outrider.drafters.vocabulary import shared_vocabulary
from outrider.models.protocol import TreeModel
from outrider.models.selftest import tree_model
from outrider.tree import OFF, Shape, parse_shape

NAMES = "'auto', 'off', 'ngram', 'oracle:RATE', a model (alias, hub id, folder, GGUF file), several joined by '+'"


def make_drafter(
    given: Any, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None, **loading: Any
) -> Drafter | None:
    """A drafter from a name, a model, a `Drafter`, or a list of these (merged).

    Args:
        loading: dtype, device and the like, for a model that must be loaded.

    Raises:
        ValueError: for anything else, or a drafter that does not fit the target.
    """
    if given is None or given == "off":
        return None
    if isinstance(given, (list, tuple)):
        made = [make_drafter(item, target, tokenizer, **loading) for item in given]
        drafters = [drafter for drafter in made if drafter is not None]
        return drafters[0] if len(drafters) == 1 else MergedDrafter(drafters)
    if isinstance(given, PreTrainedModel):
        limit = shared_vocabulary(tokenizer, None, target.vocab, type(given).__name__)
        return LMDrafter(tree_model(given)[0], type(given).__name__, limit)
    if isinstance(given, str):
        return _named(given, target, tokenizer, loading)
    if hasattr(given, "begin") and hasattr(given, "name"):
        drafter: Drafter = given
        return drafter
    raise ValueError(f"drafter {given!r} is not a drafter; use {NAMES}, a model, or an object with begin and name")


def _named(
    name: str, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None, loading: dict[str, Any]
) -> Drafter | None:
    if "+" in name:
        return make_drafter(name.split("+"), target, tokenizer, **loading)
    kind, _, rest = name.partition(":")
    if kind in ("auto", "ngram") and not rest:
        return NgramDrafter()
    if kind == "oracle":
        try:
            rate = float(rest)
        except ValueError:
            raise ValueError(f"drafter {name!r} needs a rate between 0 and 1; write for example 'oracle:0.8'") from None
        return OracleDrafter(target, rate)
    from outrider.models.loading import load_model

    loaded = load_model(rest if kind == "lm" and rest else name, **loading)
    limit = shared_vocabulary(tokenizer, loaded.tokenizer, target.vocab, loaded.name)
    return LMDrafter(tree_model(loaded.model)[0], loaded.name, limit)


def default_arms(drafter: Drafter) -> list[Shape]:
    """Shapes that "auto" chooses from: chains where drafting is free, small trees too where a model drafts."""
    texts = ("chain4", "chain10", "chain15") if drafter.name == "ngram" else ("chain2", "chain4", "chain7", "3x2x1x1")
    return [parse_shape(text) for text in texts]


def make_controller(given: Any, drafter: Drafter | None) -> Controller:
    """A controller from "auto", a shape, or a `Controller`."""
    if drafter is None:
        return Fixed(OFF)
    if given is None or given == "auto":
        return Bandit(default_arms(drafter))
    if hasattr(given, "choose") and hasattr(given, "reward"):
        controller: Controller = given
        return controller
    return Fixed(parse_shape(given))
