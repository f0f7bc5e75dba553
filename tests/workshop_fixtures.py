"""A tiny target, its data, a head and a table, made by the commands; a plugin of the workshop's tests."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import outrider
from families import tiny
from outrider.api import Engine
from outrider.bench import tasks
from outrider.cli import app
from outrider.train import data as data_module
from outrider.train import prompts as prompts_module
from outrider.train import workshop as workshop_module
from outrider.train.data import make_held_out
from outrider.train.features import compute_features, examples
from outrider.train.prompts import is_held_out
from outrider.train.students import HeadStudent, new_head
from toy import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRAINING = ("--minutes", 0.004, "--every", 60, "--batch-tokens", 256, "--draft-vocab", 200, "--dtype", "fp32")


def save_target(path: Path, seed: int = 0) -> Path:
    """A tiny target with a chat template; vowels end its texts, so that it can ask itself."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = copy.deepcopy(tiny("llama", seed=seed, vocab=len(tokenizer), scale=3.0))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list("aeiou"))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def fake_task(name: str) -> list[tasks.Prompt]:
    """Two prompts of either side."""
    texts = [f"{name} question {i}" for i in range(40)]
    chosen = [text for side in (True, False) for text in [t for t in texts if is_held_out(t) == side][:2]]
    return [tasks.Prompt(name, str(i), ({"role": "user", "content": text},)) for i, text in enumerate(chosen)]


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """Made-up benchmark tasks, small batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TASKS", {name: functools.partial(fake_task, name) for name in tasks.TASKS})
        patch.setattr(data_module, "BATCH", 8)
        asks = functools.partial(prompts_module.self_asked, batch=8, longest=64)
        patch.setattr(data_module, "self_asked", asks)
        patch.setattr(workshop_module, "make_held_out", functools.partial(make_held_out, max_new_tokens=64))
        patch.setattr(workshop_module, "MEASURED", 4)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def engine(target: Path) -> Engine:
    return outrider.load(str(target), "off", dtype="fp32")


@pytest.fixture(scope="module")
def data(small: None, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, made by the command."""
    out = tmp_path_factory.mktemp("data") / "set"
    found = succeed(
        "data", "--target", target, "--dtype", "fp32", "--out", out, "--tokens", "1k", "--max-new-tokens", 24
    )
    assert found["complete"] and found["answer_tokens"] >= 1000
    return out


@pytest.fixture(scope="module")
def head(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A feature head, made by the command."""
    out = tmp_path_factory.mktemp("head") / "out"
    succeed("distil", "--target", target, "--data", data, "--out", out, "--kind", "head", *TRAINING)
    return out


@pytest.fixture(scope="module")
def table(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, made by the command."""
    out = tmp_path_factory.mktemp("table") / "out"
    succeed("table", "--target", target, "--data", data, "--out", out, "--dtype", "fp32")
    return out


def head_student(engine: Engine, data: Path, core: str = "attention") -> tuple[list, list, HeadStudent]:
    """Examples, held-out examples and a fresh head of a data set."""
    path = workshop_module.make_held_out(engine, data)
    for pattern in ("shard-*.safetensors", path.name):
        compute_features(engine, data, (0, 1), pattern=pattern)
    found, held = examples(data, (0, 1)), examples(data, (0, 1), path.name)
    return found, held, HeadStudent(engine, new_head(engine, found, (0, 1), 200, 0, core))


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def succeed(*arguments: object) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def fail(*arguments: object) -> str:
    code, out, err = run(*arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and not out.strip() and len(lines) == 1 and lines[0].startswith("outrider: "), err
    return lines[0]


def same_text(engine: Engine, name: str) -> None:
    """Greedy and sampled text with a drafter is the text without."""
    drafting = Engine(engine.model, engine.tokenizer, engine.name, name, dtype=torch.float32)
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        for shape in ("chain4", "3x2x1"):
            plain = engine.generate("humaneval question", shape="off", max_new_tokens=20, eos_token_id=None, **options)
            made = drafting.generate("humaneval question", shape=shape, max_new_tokens=20, eos_token_id=None, **options)
            assert made.token_ids == plain.token_ids


class Killed(Exception):
    """Somebody pulled the plug."""


def kill_at(count: int, word: str) -> Any:
    """A `tell` that is interrupted when it tells of `word` for the `count`-th time."""
    calls = iter(range(1, 1_000_000))

    def tell(done: int, total: int, what: str) -> None:
        if word in what and next(calls) == count:
            raise Killed

    return tell
