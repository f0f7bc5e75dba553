"""Where a drafter comes from: what `config.json` keeps of it, and the card that people read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from outrider.api import Engine


def about(engine: Engine, data: Path | None, **facts: Any) -> dict[str, Any]:
    """Target, fingerprint and provenance.

    Args:
        data: the data set that was learnt from.
        facts: what was measured, and other things worth keeping.
    """
    from outrider.bench.report import provenance

    made = provenance()
    kept = {name: made[name] for name in ("command", "date", "versions", "cpu", "threads")}
    if data is not None and (data / "data.json").exists():
        known = json.loads((data / "data.json").read_text())
        kept["data"] = {name: known[name] for name in ("tokens", "max_new_tokens", "seed", "sources")}
    return {
        "target": engine.name,
        "fingerprint": fingerprint(engine.model),
        "dtype": str(engine.dtype).removeprefix("torch."),
        **facts,
        "provenance": kept,
    }


def card(title: str, text: str, known: dict[str, Any]) -> str:
    """The text of a drafter's `README.md`.

    Args:
        known: what `about` gave; its facts make the table.
    """
    use = f"""It drafts for `{known["target"]}` (fingerprint `{known["fingerprint"]}`) and is refused for any other target:

    outrider generate "..." --target {known["target"]} --drafter THIS_FOLDER"""
    return model_card(title, text, use, known)


def model_card(title: str, text: str, use: str, known: dict[str, Any]) -> str:
    """The text of any model's `README.md`; see `card`.

    Args:
        use: what it is for, with a command.
    """
    made = known["provenance"]
    facts = {name: value for name, value in known.items() if name not in ("provenance", "fingerprint")}
    rows = "\n".join(f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in facts.items())
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    data = ", ".join(f"{name.replace('_', ' ')} {_cell(value)}" for name, value in made.get("data", {}).items())
    return f"""# {title}

{text}

{use}

| | |
|---|---|
{rows}

* Data: {data or "none"}
* Command: `{made["command"]}`
* Made {made["date"]} with {versions}, on {made["cpu"]}, {made["threads"]} threads
"""


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value))
    return str(value)
