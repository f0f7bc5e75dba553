"""From what a user names to a drafter."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.controller import Bandit, Controller, Fixed
from outrider.counterfactual import Counterfactual
from outrider.drafters.base import Drafter
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.folder import is_drafter_folder, load_drafter, shipped
from outrider.drafters.lm import LMDrafter
from outrider.drafters.merged import MergedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.oracle import OracleDrafter
from outrider.drafters.self_draft import SelfDrafter, parse_layers
from outrider.drafters.small_lm import is_small_lm, load_small_lm
from outrider.drafters.vocabulary import shared_vocabulary
from outrider.models.catalog import ALIASES
from outrider.models.loading import load_model, local_path
from outrider.models.protocol import TreeModel
from outrider.models.selftest import tree_model
from outrider.tree import OFF, TUNED, Shape, best_first, parse_shape

NAMES = (
    "'auto', 'off', 'ngram', 'table', 'head', 'hybrid', 'mamba', 'table:FOLDER', 'self:LAYERS', 'oracle:RATE', a drafter's "
    "folder, a model (alias, hub id, folder, GGUF file), several joined by '+' (one tree of all) or '>' (the first that has "
    "something)"
)
FREE = {"ngram", "table"}  # drafters that cost next to nothing
FREE_ARMS = ("chain4", "chain2", "chain7", "chain10", "chain15", "2x1x1x1", "3x1x1x1x1x1x1")
ARMS = (
    "2x2x1",
    "2x1x1",
    "chain1",
    "chain2",
    "chain4",
    "chain7",
    "3x2x1x1",
    "3x2x2x1x1",
    "3x3x2x1",
    "2x2x2x1x1x1",
    "1x1x3x1x1x1x1x1",
)
BUDGETS = 1, 2, 3, 5, 7, 11, 15, 23  # nodes of trees that grow best first: with the root, groups of eight rows are full
DEEPEST, WIDEST = 8, 3  # of these
LEAST = (
    0.08  # branches of shapes that are chosen for models end where the drafter believes in their path less than this
)
REACH = 15  # how deep lookups before a model may go
TRUST = {2: 7, 16: 15}  # how deep a lookup before a model goes after a match of so many tokens, or more
SHIPPED = ("table", "head", "hybrid", "mamba")


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
        ours, theirs = sorted((target.vocab, given.config.get_text_config().vocab_size))
        if ours < 0.75 * theirs:  # more than padding
            warnings.warn(
                f"drafter {type(given).__name__} has a vocabulary of another size than the target ({ours} and {theirs}) and no "
                "tokenizer to compare: if ids mean other tokens, nothing will be accepted",
                RuntimeWarning,
                stacklevel=3,
            )
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
    if not all(part.strip() for part in re.split("[>+]", name)):
        raise ValueError(f"drafter {name!r} names nobody on one side of '>' or '+'; write for example 'ngram>head'")
    if ">" in name:
        parts = [part for part in name.split(">") if part != "off"]
        return CascadeDrafter([_stage(part, target, tokenizer, loading) for part in parts])
    if "+" in name:
        return make_drafter(name.split("+"), target, tokenizer, **loading)
    kind, _, rest = name.partition(":")
    if name == "auto":
        return _auto(target)
    if name == "ngram":
        return NgramDrafter()
    if name in SHIPPED:
        return _shipped(name, target)
    if kind == "oracle":
        try:
            rate = float(rest)
        except ValueError:
            raise ValueError(f"drafter {name!r} needs a rate between 0 and 1; write for example 'oracle:0.8'") from None
        return OracleDrafter(target, rate)
    if kind == "self":
        return SelfDrafter(target, parse_layers(rest))
    folder = local_path(rest if kind == "table" else name)
    if kind == "table":
        return _from_folder(folder, target, must_be_table=True)
    if is_drafter_folder(folder) or is_small_lm(folder):
        return drafter_in(folder, target, tokenizer, **loading)
    if re.fullmatch(r"[\w-]+", name) and name not in ALIASES and not folder.exists():
        raise ValueError(f"there is no drafter named {name!r}; use {NAMES}")
    loaded = load_model(rest if kind == "lm" and rest else name, **loading)
    limit = shared_vocabulary(tokenizer, loaded.tokenizer, target.vocab, loaded.name)
    return LMDrafter(tree_model(loaded.model)[0], loaded.name, limit)


def drafter_in(folder: Path, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None, **loading: Any) -> Drafter:
    """The drafter that a folder holds, whatever the folder is called.

    Raises:
        ValueError: when it holds none for this target.
    """
    if is_small_lm(folder):
        return load_small_lm(folder, _model(target), tokenizer, **loading)
    return load_drafter(folder, _model(target))


def _stage(name: str, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None, loading: dict[str, Any]) -> Drafter:
    """A stage of a cascade, named by what is not "off"."""
    if name == "ngram":
        return NgramDrafter(trust=TRUST)
    return cast(Drafter, make_drafter(name, target, tokenizer, **loading))


def _model(target: TreeModel) -> PreTrainedModel:
    """The model behind a target."""
    model: PreTrainedModel = cast(Any, target).model
    return model


def _from_folder(folder: Path, target: TreeModel, must_be_table: bool = False) -> Drafter:
    drafter = load_drafter(folder, _model(target))
    if must_be_table and drafter.name != "table":
        raise ValueError(f"{folder} holds a drafter of another kind than a table; name it without 'table:'")
    return drafter


def _shipped(kind: str, target: TreeModel) -> Drafter:
    found = shipped(_model(target))
    if kind not in found:
        raise ValueError(
            f"no {kind} comes with Outrider for this target; make one with `outrider {'table' if kind == 'table' else 'distil'}` "
            "and give its folder"
        )
    return _from_folder(found[kind], target)


def _auto(target: TreeModel) -> Drafter:
    """What is there for this target: prompt lookup, then the shipped head, or the shipped table where there is no head.

    A table before a head takes rounds from it in which the head would have been right more often (`docs/drafters.md`)."""
    found = shipped(_model(target))
    behind = next((found[kind] for kind in ("head", "table") if kind in found), None)
    if behind is None:
        return NgramDrafter()
    return CascadeDrafter([NgramDrafter(trust=TRUST), _from_folder(behind, target)])


def refresh(drafter: Drafter | None, target: TreeModel) -> None:
    """Follow changes of a drafter's model, and of the target where the drafter holds it."""
    for part in getattr(drafter, "drafters", [drafter]):
        if isinstance(part, OracleDrafter):
            part.target = target
        elif isinstance(part, SelfDrafter):
            part.follow(target)
        elif isinstance(part, LMDrafter) and isinstance(getattr(part.model, "model", None), PreTrainedModel):
            part.model = tree_model(_model(part.model))[0]
        elif part is not drafter:
            refresh(part, target)


def default_arms(drafter: Drafter) -> list[Shape]:
    """Shapes that "auto" and "ucb" choose from: long chains and few branches where drafting is free, small trees where a model
    drafts, the shapes of Mamba Drafters and SpecInfer among them. The first is the one to take when none may be learned."""
    if set(re.split("[+>]", drafter.name)) <= FREE:
        return [parse_shape(text) for text in FREE_ARMS]
    reach = REACH if isinstance(drafter, CascadeDrafter) else 0
    return [parse_shape(text).adapting(LEAST, reach) for text in ARMS]


def learned_arms(drafter: Drafter) -> list[Shape]:
    """Shapes that "auto" chooses from, unless children must be draws: trees that grow best first, of several sizes, where the
    drafter says how probable nodes are."""
    arms = default_arms(drafter)
    if not believes(drafter):
        return arms
    return [best_first(nodes, DEEPEST, WIDEST).adapting(LEAST, arms[0].reach) for nodes in BUDGETS]


def believes(drafter: Any) -> bool:
    """Whether a drafter says of every node how probable it is, so that trees can grow best first; of a cascade, its last one."""
    inner = getattr(drafter, "drafters", None)
    if inner:
        return not isinstance(drafter, MergedDrafter) and believes(inner[-1])
    return isinstance(drafter, LMDrafter)


def parts(drafter: Any) -> list[Any]:
    """The drafters that a merged one or a cascade is made of."""
    inner = getattr(drafter, "drafters", None)
    return [drafter] if not inner else [part for one in inner for part in parts(one)]


def _learning(drafter: Drafter, draws: bool) -> Counterfactual:
    """A controller that begins with what is known of a drafter."""
    controller = Counterfactual(default_arms(drafter) if draws else learned_arms(drafter))
    for part in parts(drafter):
        prior = getattr(part, "priors", {}).get(drafter.name)
        try:
            if prior is not None:
                controller.believe(prior)
        except (ValueError, AttributeError) as error:
            warnings.warn(
                f"the prior in {part.folder} is ignored ({error}); measure it again", RuntimeWarning, stacklevel=4
            )
    return controller


def make_controller(given: Any, drafter: Drafter | None, draws: bool = False) -> Controller:
    """A controller from "auto", "ucb", a shape, or a `Controller`.

    Args:
        draws: children are to be draws from the drafter's law, as multi-step speculative sampling wants them.
    """
    if hasattr(given, "choose") and hasattr(given, "reward"):
        controller: Controller = given
        return controller
    shape = None if given is None or given in TUNED else parse_shape(given)
    if drafter is None:
        return Fixed(OFF)
    if given == "ucb":
        return Bandit(default_arms(drafter))
    return _learning(drafter, draws) if shape is None else Fixed(shape)
