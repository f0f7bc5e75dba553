"""Prompts of named tasks and of users' files."""

from __future__ import annotations

import gzip
import io
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench_fakes import FakeEngine
from outrider.bench import tasks
from outrider.bench.tasks import load_task, parse_tasks
from outrider.train.more_prompts import functions, sums

CODE = '    """Adds things. """\n' + "    total = total + values[0]  # and so on\n" * 8
TEXT = "Several honest people walked along another crowded street while everybody talked. " * 5
ROWS: dict[str, list[dict[str, Any]]] = {
    "HumanEval.jsonl.gz": [
        {"task_id": f"H/{i}", "prompt": f"def f{i}(values):\n", "canonical_solution": CODE, "entry_point": f"f{i}"}
        for i in range(40)
    ],
    "cases.jsonl": [
        {
            "id": f"c{i}",
            "prompt": TEXT,
            "upstream_answer": "It is <<1+1=2>>2.",
            "ctx": TEXT,
            "endings": ["a", "b", "c", "d"],
            "expected_index": 1,
            "question": "Why?",
        }
        for i in range(40)
    ],
    "question.jsonl": [{"question_id": i, "turns": [TEXT, "And then?"]} for i in range(40)],
}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index, replaced by rows made up above."""
    fetch = types.ModuleType("outrider.models.fetch")

    @contextmanager
    def open_member(path: Path, member: str) -> Iterator[io.BytesIO]:
        content = "\n".join(map(json.dumps, ROWS[Path(member).name])).encode()
        yield io.BytesIO(gzip.compress(content) if member.endswith(".gz") else content)

    vars(fetch).update(fetch_package=lambda name, version, sha256: Path(name), open_member=open_member)
    monkeypatch.setitem(sys.modules, "outrider.models.fetch", fetch)


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_tasks_are_the_same_every_time(packages: None, name: str) -> None:
    found = load_task(name)
    assert len(found) >= 40 and found == load_task(name)
    assert len({prompt.id for prompt in found}) == len(found)
    assert {prompt.task for prompt in found} == {name} and all(prompt.source for prompt in found)


def test_a_limit_takes_an_evenly_spaced_subset(packages: None) -> None:
    everything = load_task("mtbench")
    assert [everything.index(prompt) for prompt in load_task("mtbench", 4)] == [5, 15, 25, 35]
    assert load_task("mtbench", 999) == everything
    with pytest.raises(ValueError, match="limit"):
        load_task("mtbench", 0)


def test_a_small_subset_of_copy_holds_every_kind(packages: None) -> None:
    kinds = {prompt.id.split(":")[0] for prompt in load_task("copy", 6)}
    assert kinds == {"rename function", "rename argument", "fix typos", "replace word", "add line"}


def test_mtbench_keeps_later_turns(packages: None) -> None:
    assert load_task("mtbench")[0].later_turns == ("And then?",)


@pytest.mark.real
def test_real_packages_hold_the_documented_tasks() -> None:
    counts = {name: len(load_task(name)) for name in tasks.TASKS}
    few = {"gsm8k": 100, "hellaswag": 100, "truthfulqa": 100}
    assert counts == {"humaneval": 164, **few, "mtbench": 80, "copy": 96}


def test_user_files_may_hold_every_usual_form(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = [
        {"prompt": "Say hi", "id": "a"},
        {"messages": chat},
        {"text": "Once upon"},
        {"question_id": 81, "category": "writing", "turns": ["First?", "Second?"]},
        {"document": "Long news.", "summary": "News."},
        {"article": "Long news.", "highlights": "News."},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    found = load_task(str(path))
    assert [prompt.id for prompt in found] == ["a", "line 3", "line 5", "81", "line 9", "line 11"]
    assert found[1].messages == tuple(chat) and found[2].text == "Once upon"
    assert found[3].messages[0]["content"] == "First?" and found[3].later_turns == ("Second?",)
    assert found[4].messages == found[5].messages and found[4].messages[0]["content"].endswith("Long news.")
    assert found[2].encode(FakeEngine()) == [2] * 9, "raw text gets no chat template"


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": ["a"]}',
        '{"turns": []}',
        '{"turns": "a"}',
        '{"messages": {"role": "user", "content": "a"}}',
        '{"messages": [{"role": "user"}]}',
        '{"prompt": "a", "text": "b"}',
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"line 2: .* write a JSON object"):
        load_task(str(path))


def test_task_lists_are_checked(tmp_path: Path) -> None:
    assert parse_tasks("humaneval, gsm8k,x.jsonl") == ["humaneval", "gsm8k", "x.jsonl"]
    for names, reason in (("nonsense", "take one of"), (" ,", "No task"), ("gsm8k,gsm8k", "named 2 times")):
        with pytest.raises(ValueError, match=reason):
            parse_tasks(names)
    with pytest.raises(ValueError, match="check the path"):
        load_task(str(tmp_path / "missing.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        load_task(str(tmp_path / "empty.jsonl"))


def test_functions_of_a_folder_are_asked_by_signature_and_docstring(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        'def add(a: int, b=2) -> int:\n    """Add two numbers.\n\n    Both may be negative, and are."""\n    return a + b\n'
        "def silent(a):\n    return a\n"
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skip.py").write_text((tmp_path / "good.py").read_text())
    (asked,) = functions(tmp_path)
    assert (
        'def add(a: int, b=2) -> int:\n    """Add two numbers.\n\n    Both may be negative, and are.\n    """' in asked
    )
    assert "return a + b" not in asked


def test_the_standard_library_gives_many_different_functions() -> None:
    assert len(functions()) == len(set(functions())) > 500


def test_sums_are_as_many_as_asked_never_twice_and_the_same_for_a_seed() -> None:
    assert len(set(sums(300, seed=4))) == 300 and sums(300, seed=4) == sums(300, seed=4) != sums(300, seed=5)
