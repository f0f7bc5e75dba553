"""A trained drafter as a folder: `config.json`, `model.safetensors`, and a card that says where it comes from.

`config.json` names the kind, the sizes, and the fingerprint of the target that it was trained for; another target is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from outrider.drafters.base import Drafter
from outrider.drafters.feature_head import HeadDrafter, HeadModel
from outrider.drafters.lm import LMDrafter
from outrider.drafters.table import NgramTable, TableDrafter
from outrider.models.feature_head import FeatureHead, HeadConfig
from outrider.models.files import save_atomically, write_atomically
from outrider.models.fingerprint import fingerprint
from outrider.models.mamba_drafter import MambaBlocks, MambaDrafterConfig, MambaModel
from outrider.models.resident import give_back_freed
from outrider.options import Options
from outrider.sampling import Sampler
from outrider.tree import parse_shape

M = TypeVar("M", bound=nn.Module)

SHIPPED = Path(__file__).parent.parent / "weights"
PRIOR = "prior.json"


def is_drafter_folder(path: Path) -> bool:
    """Whether a folder holds a drafter of ours (and not a plain model)."""
    try:
        return "drafter" in json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False


def save_head(head: FeatureHead, folder: Path, about: dict[str, Any], card: str) -> None:
    """Write a feature head.

    Args:
        about: target, fingerprint and provenance, kept in `config.json`.
        card: the text of `README.md`.
    """
    _save(head, "head", head.config.to_json(), folder, about, card)


def save_mamba(blocks: MambaBlocks, folder: Path, about: dict[str, Any], card: str) -> None:
    """Write a stand-alone Mamba drafter; `about` and `card` as for `save_head`."""
    _save(blocks, "mamba", blocks.config.to_json(), folder, about, card)


def _save(
    module: nn.Module, kind: str, sizes: dict[str, object], folder: Path, about: dict[str, Any], card: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: t.detach().to(torch.bfloat16) if t.is_floating_point() else t.to(torch.int32)
        for name, t in module.state_dict().items()
    }
    save_atomically(tensors, folder / "model.safetensors")
    write_card(folder, card, {"drafter": kind, kind: sizes, **about})


def write_card(folder: Path, card: str, config: dict[str, Any]) -> None:
    """The card, and last `config.json`: a folder with one is whole."""
    write_atomically(card, folder / "README.md")
    write_atomically(json.dumps(config, indent=1) + "\n", folder / "config.json")


def read_config(folder: Path, target: PreTrainedModel | None) -> dict[str, Any]:
    """The configuration in a drafter's folder.

    Args:
        target: None takes a drafter of any target.

    Raises:
        ValueError: when there is none, or the drafter was made for another target.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        config["drafter"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} holds no drafter ({error}); make one with `outrider distil` or `outrider table`"
        ) from error
    if target is not None and config.get("fingerprint") != fingerprint(target):
        raise ValueError(
            f"the drafter in {folder} was made for {config.get('target', 'another model')}, not for this target; train one "
            "with `outrider distil --target ...`"
        )
    return config


def load_drafter(folder: Path, target: PreTrainedModel) -> Drafter:
    """The drafter in a folder.

    Raises:
        ValueError: when the folder is broken, or the drafter was made for another target.
    """
    drafter: Any = _load(folder, target)
    drafter.folder, drafter.priors = folder, read_priors(folder)
    give_back_freed()
    return cast(Drafter, drafter)


def read_priors(folder: Path) -> dict[str, Any]:
    """What its rounds brought (`train/prior.py`), by the name of the drafter that it is, or is a part of; {}: unknown."""
    try:
        found = json.loads((folder / PRIOR).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def sharpness(known: dict[str, Any]) -> float:
    """The scale of scores that suits a drafter where tokens are drawn (`train/sharpness.py`), out of what is known about it."""
    scale = known.get("sharpness", 1.0)
    if not isinstance(scale, (int, float)) or not 0 < scale < 100:
        raise ValueError(f"the drafter's sharpness is {scale!r} and no scale; train it again, or leave the entry out")
    return float(scale)


def _load(folder: Path, target: PreTrainedModel) -> Drafter:
    config = read_config(folder, target)
    if config["drafter"] == "table":
        return TableDrafter(NgramTable(folder / "model.safetensors"))
    borrowed = target.get_input_embeddings(), target.get_output_embeddings()
    module = load_module(folder, target)
    if isinstance(module, FeatureHead):
        drafter: LMDrafter = HeadDrafter(HeadModel(module, *borrowed))
    else:
        model = MambaModel(module, *borrowed)
        drafter = LMDrafter(model, "mamba", model.vocab)
    drafter.sharpness = sharpness(config)
    _settle(drafter)
    return drafter


@torch.inference_mode()
def _settle(drafter: LMDrafter) -> None:
    """Draft once for nobody. What is made at first use then is there: in a text it would look like the price of drafting, which
    ends where it is thought too dear."""
    model = cast(Any, drafter.model)
    sampler = Sampler(Options(), 0, 2, frozenset(), drafter.vocab, model.device)
    state: Any = drafter.begin([[0, 0]], [sampler], 8)
    if isinstance(drafter, HeadDrafter):
        config = model.head.config
        state.see([torch.zeros(1, len(config.taps) * config.width, dtype=model.dtype, device=model.device)])
    state.propose([[0, 0]], [parse_shape("best7x4")])


def load_module(folder: Path, target: PreTrainedModel | None) -> FeatureHead | MambaBlocks:
    """The trained part of the drafter in a folder, as it was saved.

    Args:
        target: None takes a drafter of any target.

    Raises:
        ValueError: when the folder is broken, or holds no such drafter for this target.
    """
    config = read_config(folder, target)
    if config["drafter"] == "head":
        return _load_module(folder, config, _new_head)
    if config["drafter"] == "mamba":
        return _load_module(folder, config, _new_mamba)
    raise ValueError(
        f"the drafter in {folder} is of kind {config['drafter']!r}, which cannot be loaded here; use a head or a mamba, or "
        "update outrider"
    )


def _new_head(config: dict[str, Any]) -> FeatureHead:
    return FeatureHead(HeadConfig(**{**config["head"], "taps": tuple(config["head"]["taps"])}))


def _new_mamba(config: dict[str, Any]) -> MambaBlocks:
    return MambaBlocks(MambaDrafterConfig(**config["mamba"]))


def _load_module(folder: Path, config: dict[str, Any], make: Callable[[dict[str, Any]], M]) -> M:
    try:
        with torch.device("meta"):  # whose weights are those of the file, and no others before
            module = make(config)
        tensors = load_file(folder / "model.safetensors")
        tensors["draft_ids"] = tensors["draft_ids"].long()
        module.load_state_dict(tensors, assign=True)
    except Exception as error:
        raise ValueError(
            f"the drafter in {folder} is damaged ({str(error).splitlines()[-1].strip()[:160]}); fetch or train it again"
        ) from error
    return module


def shipped(target: PreTrainedModel) -> dict[str, Path]:
    """Drafters that come with Outrider for this target, by kind."""
    found: dict[str, Path] = {}
    mark = fingerprint(target)
    for path in sorted(SHIPPED.glob("*/*/config.json")):
        config = json.loads(path.read_text())
        if config.get("fingerprint") == mark:
            found[path.parent.name] = path.parent
    return found
