"""The README tells the truth about commands and files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_file_tree_names_every_module_and_nothing_else() -> None:
    tree = README.split("## File tree")[1].split("```")[1]
    named, folder = set(), ""
    for line in tree.strip().splitlines():
        name = line.split()[0]
        if name.endswith("/"):
            folder = "" if name == "outrider/" else name
        else:
            named.add((folder if line.startswith("    ") else "") + name)
    package = ROOT / "src" / "outrider"
    sources = (
        path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h") and path.name != "__init__.py"
    )
    real = {str(path.relative_to(package)) for path in sources}
    assert named == real


def test_the_test_command_is_the_one_that_ci_runs() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.S)
    assert len(commands) == 2 and commands[1] in (ROOT / ".ci" / "run").read_text()


def test_the_python_example_is_valid_and_names_real_things() -> None:
    import outrider

    example = re.search(r"```python\n(.*?)```", README, re.S)
    assert example
    used = {
        node.attr
        for node in ast.walk(ast.parse(example[1]))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "outrider"
    }
    assert used and all(hasattr(outrider, name) for name in used)


def test_files_stay_readable_in_one_sitting() -> None:
    long = {str(p): n for p in (ROOT / "src").rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long
