"""Prompts in any number from what every machine has: functions of Python's standard library, and made-up sums."""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from pathlib import Path

SHORTEST_DOC, LONGEST_DOC = 30, 500  # characters
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo")
ASK = "Complete this function. Answer with the whole function in one code block.\n\n```python\n{}\n```"
SOLVE = "\n\nThink step by step and end with the answer."

NAMES = (
    "Ana",
    "Ben",
    "Chen",
    "Dora",
    "Emil",
    "Fatima",
    "Greta",
    "Hugo",
    "Ines",
    "Jamal",
    "Kira",
    "Liam",
    "Nora",
    "Omar",
)
THINGS = ("apples", "pencils", "marbles", "tickets", "cookies", "books", "shells", "coins", "stamps", "cards", "eggs")
SUMS = (
    "{n} has {a} {t}. {m} has {b} times as many. How many {t} do they have together?",
    "{n} buys {a} packs of {t} with {b} in each pack and gives {c} to {m}. How many {t} does {n} keep?",
    "A shop sells {t} at {b} for ${a}. {n} needs {c} times that many. How much does {n} pay?",
    "{n} reads {a} pages a day for {b} days, and {m} reads {c} pages more in all. How many pages does {m} read?",
    "{n} earns ${a} an hour and works {b} hours a day, {c} days a week. How much does {n} earn in 4 weeks?",
    "{n} had {a}{b} {t}, lost {c} and then doubled what was left. How many {t} does {n} have now?",
    "{n} and {m} share {a}{b} {t} so that {m} gets {c} more than {n}. How many does each of them get?",
    "A train goes {a}0 km an hour for {b} hours and then {c}0 km an hour for {b} hours. How far does it go?",
    "{n} bakes {a} trays of {b} {t} and sells them in bags of {c}. How many bags can {n} fill, and how many {t} are left?",
    "Half of the {a}{b} {t} in a box are red and {c} are blue, the others are green. How many are green?",
    "{n} saves ${a} each week and {m} saves ${b} each week. After {c} weeks, how much more does the one have than the other?",
    "A tank holds {a}00 litres. {n} fills {b} litres a minute while {c} litres a minute leak. How long until it is full?",
)


def functions(folder: Path | None = None) -> list[str]:
    """Requests to complete a function, given its signature and docstring, in the order of files and lines.

    Args:
        folder: Python files; by default those of the standard library, so that another version of Python asks otherwise.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    asked = []
    for path in sorted(root.rglob("*.py")):
        if not set(path.relative_to(root).parts) & set(LEFT_OUT):
            asked += _of_file(path)
    return list(dict.fromkeys(asked))


def _of_file(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError, OSError):
        return []
    found = []
    for node in tree.body:
        doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.FunctionDef) and doc and SHORTEST_DOC <= len(doc) <= LONGEST_DOC:
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            body = textwrap.indent(f'"""{doc}\n"""', "    ")
            found.append(ASK.format(f"def {node.name}({ast.unparse(node.args)}){returns}:\n{body}"))
    return found


def sums(count: int = 2000, seed: int = 0) -> list[str]:
    """Arithmetic in words, never the same twice."""
    rng, made = random.Random(seed), dict[str, None]()
    while len(made) < count:
        n, m = rng.sample(NAMES, 2)
        a, b, c = rng.randrange(2, 40), rng.randrange(2, 13), rng.randrange(2, 10)
        made[rng.choice(SUMS).format(n=n, m=m, t=rng.choice(THINGS), a=a, b=b, c=c) + SOLVE] = None
    return list(made)
