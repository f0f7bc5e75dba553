"""The target's own answers as training data: prompts in, shards of token ids out, resumable after a kill at any moment.

A data set is a folder: `data.json` says how it was made, `shard-00000.safetensors` ... hold answers. A shard appears whole or
not at all, and which prompts it answers follows from its number and the settings, so a run goes on where the last shard ends.
"""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.bench.tasks import JUDGING_TASKS
from outrider.models.files import save_atomically, write_atomically
from outrider.models.fingerprint import fingerprint
from outrider.train.features import Recorder, feature_file
from outrider.train.more_prompts import functions, sums
from outrider.train.prompts import is_held_out, self_asked, task_prompts, templates

if TYPE_CHECKING:
    from outrider.api import Engine

BATCH = 192  # most answers written side by side: the arithmetic of a pass outweighs the reading of weights
SLOTS = 192 * 400  # of keys and values in a batch: every row takes as many as the longest
WINDOW = 3  # batches whose prompts are sorted by length
TEMPERATURES = (0.0, 0.7)  # answers of a shard alternate between them
MOST_IN_VAIN = 8  # batches of self-asked messages without a new one
SOURCES = ("tasks", "templates", "functions", "sums", "self")
FEWEST_TOKENS = 8  # an answer shorter than this teaches nothing


@dataclass(frozen=True)
class DataSettings:
    """What a data set is made of. A folder made with other settings is not continued."""

    target: str
    fingerprint: str
    vocabulary: str
    tokens: int
    max_new_tokens: int
    seed: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A prompt (in its chat template) and what the target wrote after it, EOS included."""

    ids: torch.Tensor
    prompt_length: int
    temperature: float


def make_data(
    engine: Engine,
    out: Path,
    *,
    tokens: int = 1_000_000,
    prompts: Sequence[str] = (),
    sources: Sequence[str] = ("tasks", "templates", "self"),
    max_new_tokens: int = 256,
    seed: int = 0,
    taps: tuple[int, ...] = (),
    tell: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> int:
    """Write answers until the data set holds `tokens` answer tokens.

    Args:
        prompts: further user messages; held-out ones among them are left out.
        sources: "tasks" (the training side of the benchmark prompts), "templates", "functions" (of Python's library, to be
            completed), "sums" (in words), "self" (asked by the target itself).
        taps: also keep the target's hidden states at these layers, as they come while it writes.
        tell: progress as (answer tokens, of how many, what).

    Returns:
        Answer tokens in the folder.

    Raises:
        ValueError: for an unknown source, or a folder made with other settings or by another target.
    """
    unknown = set(sources) - set(SOURCES)
    if unknown:
        raise ValueError(f"prompt source {sorted(unknown)[0]!r} is unknown; use {', '.join(SOURCES)}")
    if tokens < 1 or max_new_tokens < FEWEST_TOKENS:
        raise ValueError(f"{tokens} tokens in answers of up to {max_new_tokens} are no data; ask for more")
    # which prompts were given is part of what a data set is made of
    mark = (f"prompts {zlib.crc32(chr(0).join(prompts).encode()):08x}",) if prompts else ()
    made_of = (*sources, *mark)
    settings = DataSettings(
        engine.name, fingerprint(engine.model), vocabulary(engine), tokens, max_new_tokens, seed, made_of
    )
    claim_data(out, settings)
    shards = shard_files(out)
    done = sum(answer_tokens(load_file(path)) for path in shards)
    feed = _prompts(engine, out, prompts, settings)
    for number, batch in enumerate(_batches(engine, feed, max_new_tokens)):
        if done >= tokens:
            break
        if number < len(shards):
            continue
        tell(done, tokens, "answer tokens")
        shard, hidden = _answer(engine, list(batch), number, settings, taps=taps)
        path = out / f"shard-{number:05d}.safetensors"
        if hidden is not None:  # first: a shard that is there is whole
            save_atomically({"hidden": hidden}, feature_file(path, taps))
        save_atomically(shard, path)
        done += answer_tokens(shard)
    if done == 0:
        raise ValueError("there were no prompts to answer; give --prompts or more sources")
    tell(done, tokens, "answer tokens")
    return done


def vocabulary(engine: Engine) -> str:
    """A short mark of what token ids mean."""
    known = {} if engine.tokenizer is None else engine.tokenizer.get_vocab()
    return f"{zlib.crc32(json.dumps(sorted(known.items())).encode()):08x}"


def _batches(engine: Engine, feed: Iterator[str], room: int) -> Iterator[list[str]]:
    """Prompts of like length together."""
    while window := list(itertools.islice(feed, WINDOW * BATCH)):
        batch: list[str] = []
        for length, text in sorted((len(engine.encode(text)), text) for text in window):
            if len(batch) == BATCH or (batch and (len(batch) + 1) * (length + room) > SLOTS):
                yield batch
                batch = []
            batch.append(text)
        yield batch


def claim_data(out: Path, settings: DataSettings) -> None:
    """Make the folder ours, or check that it is. One without answers yet may be made with other settings."""
    about = out / "data.json"
    if about.exists():
        known = json.loads(about.read_text())
        mine = json.loads(json.dumps(asdict(settings)))
        differ = [key for key in mine if key != "tokens" and known.get(key) != mine[key]]
        if differ and shard_files(out):
            raise ValueError(
                f"{out} holds data made with another {differ[0]} ({known.get(differ[0])}); continue with that, or give "
                "another folder"
            )
        if {"fingerprint", "seed"} & set(differ):
            for asked in out.glob("asked-*.json"):
                asked.unlink()
    elif out.exists() and any(item.suffix != ".part" for item in out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no data set; give another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(json.dumps(asdict(settings), indent=1), about)


def _asked(engine: Engine, out: Path, settings: DataSettings) -> Iterator[str]:
    """Self-asked messages, kept in the folder so that a resumed run does not ask again."""
    seen: set[str] = set()
    in_vain = 0
    for number in itertools.count():
        path = out / f"asked-{number:05d}.json"
        if not path.exists():
            write_atomically(json.dumps(self_asked(engine, number, settings.seed * 1_000_003 + 1)), path)
        new = [text for text in json.loads(path.read_text()) if text not in seen]
        seen.update(new)
        yield from new
        in_vain = 0 if new else in_vain + 1
        if in_vain >= MOST_IN_VAIN:
            raise ValueError(f"{engine.name!r} asks itself nothing new any more; give files of prompts with --prompts")


def _prompts(engine: Engine, out: Path, given: Sequence[str], settings: DataSettings) -> Iterator[str]:
    """User messages in a fixed order, none of them held out; self-asked ones have no end."""
    fixed = [text for text in given if not is_held_out(text)]
    if "tasks" in settings.sources:
        fixed += task_prompts(held_out=False)
    if "templates" in settings.sources:
        fixed += templates()
    if "functions" in settings.sources:
        fixed += functions()
    if "sums" in settings.sources:
        fixed += sums(seed=settings.seed)
    fixed = list(dict.fromkeys(fixed))
    random.Random(settings.seed).shuffle(fixed)
    if "self" not in settings.sources:
        yield from fixed
        return
    asked = _asked(engine, out, settings)
    # one fixed prompt to three self-asked, until the fixed ones run out
    for text in fixed:
        yield text
        yield from itertools.islice(asked, 3)
    yield from asked


def _answer(
    engine: Engine,
    prompts: list[str],
    number: int,
    settings: DataSettings,
    mix: tuple[float, ...] = TEMPERATURES,
    taps: tuple[int, ...] = (),
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Answers to a batch of prompts as a shard, at the temperatures of the mix in turn, and hidden states if there are taps."""
    rows, lengths, kept, hidden = [], [], [], []
    temperatures = [mix[place % len(mix)] for place in range(len(prompts))]
    seeds = [settings.seed + number * BATCH + place for place in range(len(prompts))]
    recorder = Recorder(taps)
    with engine.drafting(recorder if taps else None):
        results = engine.generate(
            prompts, seed=seeds, shape="off", max_new_tokens=settings.max_new_tokens, temperature=temperatures
        )
    written = [engine.encode(text) + result.token_ids for text, result in zip(prompts, results)]
    recorded = recorder.rows([len(row) for row in written]) if taps else [None] * len(written)
    for row, result, temperature, states in zip(written, results, temperatures, recorded):
        if len(result.token_ids) >= FEWEST_TOKENS:
            rows.append(row)
            lengths.append(result.prompt_tokens)
            kept.append(temperature)
            hidden += [] if states is None else [states]
    shard = {
        "tokens": torch.tensor([t for row in rows for t in row], dtype=torch.int32),
        "row_lengths": torch.tensor([len(row) for row in rows], dtype=torch.int32),
        "prompt_lengths": torch.tensor(lengths, dtype=torch.int32),
        "temperatures": torch.tensor(kept, dtype=torch.float32),
    }
    return shard, torch.cat(hidden) if hidden else None


def answer_tokens(shard: dict[str, torch.Tensor]) -> int:
    """Tokens of a shard that the target wrote."""
    return int(shard["row_lengths"].sum() - shard["prompt_lengths"].sum())


def shard_files(folder: Path) -> list[Path]:
    """The shards of a data set, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def load_shard(path: Path) -> dict[str, torch.Tensor]:
    """A shard.

    Raises:
        ValueError: for one that is damaged.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and make the data set again") from error


def read_answers(folder: Path) -> list[Answer]:
    """All answers of a data set.

    Raises:
        ValueError: when the folder holds none.
    """
    answers = []
    for path in shard_files(folder):
        shard = load_shard(path)
        rows = torch.split(shard["tokens"], shard["row_lengths"].tolist())
        about = zip(rows, shard["prompt_lengths"].tolist(), shard["temperatures"].tolist())
        answers += [Answer(ids, length, round(temperature, 3)) for ids, length, temperature in about]
    if not answers:
        raise ValueError(f"{folder} holds no answers; make some with `outrider data --out {folder}`")
    return answers


def make_held_out(
    engine: Engine,
    out: Path,
    per_task: int = 16,
    max_new_tokens: int = 128,
    tasks: tuple[str, ...] = JUDGING_TASKS,
) -> Path:
    """Greedy answers to prompts that training never sees, for evaluation while training; made once per folder and tasks.

    Args:
        tasks: names of tasks, or FILE.jsonl; of each the held-out side.

    Raises:
        ValueError: when the held-out side has no prompts.
    """
    name = "00000" if tasks == JUDGING_TASKS else f"{zlib.crc32(','.join(tasks).encode()):08x}"
    path = out / f"heldout-{name}.safetensors"
    if path.exists():
        return path
    prompts = [text for task in tasks for text in task_prompts(True, (task,))[:per_task]]
    if not prompts:
        raise ValueError(f"no prompt of {', '.join(tasks)} falls on the held-out side; give more prompts")
    settings = DataSettings(engine.name, "", "", 0, max_new_tokens, 0, ())
    save_atomically(_answer(engine, prompts, 0, settings, (0.0,))[0], path)
    return path
