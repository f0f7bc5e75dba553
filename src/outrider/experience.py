"""What controllers learned, kept from process to process: one small file for each target, drafter, machine and dtype.

It changes the first choices, never the text. A file that is damaged, foreign or cannot be written is ignored with one line.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from outrider.models.files import write_atomically
from outrider.paths import statistics_dir

FORMAT, VERSION = "outrider statistics", 5
LARGEST_FILE = 1_000_000  # bytes; a file of ours has a few thousand
WORTH_WRITING = 32  # rounds


class Learner(Protocol):
    """A controller whose knowledge outlives it."""

    rounds: int

    def state(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what was learned; `ValueError` when it is no such thing."""
        ...


class Experience:
    """The file of one pair.

    Args:
        learner: a new controller; it is restored from the file, where there is one.
        about: what its times and acceptance belong to: target, drafter, machine, dtype.
    """

    def __init__(self, learner: Learner, about: Mapping[str, str]) -> None:
        self.learner, self.about, self.kept = learner, dict(about), 0
        self.path = _path(self.about)
        if self.path is not None:
            self._recall(self.path)

    def _recall(self, path: Path) -> None:
        try:
            if not path.exists():
                return
            if path.stat().st_size > LARGEST_FILE:
                raise ValueError("it is too large")
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
                raise ValueError("it is of another version or program")
            if found.get("about") != self.about or not isinstance(found.get("state"), dict):
                raise ValueError("it belongs to another pair")
            self.learner.restore(found["state"])
        except (OSError, ValueError, RecursionError) as error:
            self._ignored(f"statistics in {path} are ignored ({error}); delete the file to be rid of this line")

    def keep(self) -> None:
        """Write what was learned, if enough is new."""
        if self.path is None or self.learner.rounds - self.kept < WORTH_WRITING:
            return
        self.kept = self.learner.rounds
        value = {"format": FORMAT, "version": VERSION, "about": self.about, "state": _short(self.learner.state())}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(json.dumps(value), self.path)
        except OSError as error:
            self._ignored(
                f"statistics cannot be kept in {self.path} ({error.strerror}); set OUTRIDER_STATISTICS to a folder, or to off"
            )
            self.path = None  # once is enough

    @staticmethod
    def _ignored(line: str) -> None:
        warnings.warn(" ".join(line.split()), RuntimeWarning, stacklevel=4)


def _path(about: Mapping[str, str]) -> Path | None:
    try:
        folder = statistics_dir()
    except ValueError:
        return None  # there is no cache folder, and whoever needs one says so
    if folder is None:
        return None
    return folder / f"{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _short(value: Any) -> Any:
    """Six digits are enough."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value
