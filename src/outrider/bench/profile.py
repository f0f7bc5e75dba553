"""Where a round's milliseconds go: drafting by level, verification by part, sampling, commit, and Python in between.

The engine carries no timers for this. While a profile is taken, the functions that do the work are wrapped, and every
millisecond is counted towards the innermost wrapped function that was running. A wrapper costs about a microsecond; what all of
them cost together is measured and reported.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.nn.functional
from rich.console import Console
from rich.table import Table

from outrider.machine import settle
from outrider.picture import picture

if TYPE_CHECKING:
    from outrider.api import Engine

CPU = torch.device("cpu")
REST = "Python between them"
GROUPS = ("draft", "verify", "sampling", "commit", "text", REST)


@dataclass
class Profile:
    """Exclusive seconds by part, over all rounds.

    Args:
        calls: of wrapped functions.
        overhead: seconds that the wrappers took, estimated; they are in the parts.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rounds: int = 0
    emitted: int = 0
    calls: int = 0
    overhead: float = 0.0

    def milliseconds(self) -> dict[str, float]:
        """A round's milliseconds by part, in the order of a round; they add up to a round."""
        found = {part: 1000.0 * seconds / max(self.rounds, 1) for part, seconds in self.seconds.items()}
        return dict(sorted(found.items(), key=lambda item: (_group(item[0]), item[0])))

    def whole(self) -> float:
        """Milliseconds of a round."""
        return sum(self.milliseconds().values())

    def groups(self) -> dict[str, float]:
        """A round's milliseconds by group."""
        found = dict.fromkeys(GROUPS, 0.0)
        for part, spent in self.milliseconds().items():
            found[GROUPS[_group(part)]] += spent
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rounds": self.rounds,
            "emitted": self.emitted,
            "ms_per_round": self.whole(),
            "ms_by_part": self.milliseconds(),
            "ms_by_group": self.groups(),
            "ms_overhead_of_measuring": 1000.0 * self.overhead / max(self.rounds, 1),
        }


def _group(part: str) -> int:
    return next((place for place, group in enumerate(GROUPS) if part.startswith(group)), len(GROUPS) - 1)


class Stopwatch:
    """Counts every moment towards the innermost part that is running."""

    def __init__(self, profile: Profile, device: torch.device = CPU) -> None:
        self.profile, self.stack, self.since, self.device = profile, list[str](), 0.0, device

    def wrap(self, function: Any, part: str | Callable[..., str], inside: str = "") -> Any:
        """A function whose own time counts towards a part, where it runs inside of another one."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if inside and not any(outer.startswith(inside) for outer in self.stack):
                return function(*args, **kwargs)
            self._enter(part if isinstance(part, str) else part(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def _enter(self, part: str) -> None:
        settle(self.device)
        now = time.perf_counter()
        if self.stack:
            self.profile.seconds[self.stack[-1]] += now - self.since
        self.stack.append(part)
        self.profile.calls += 1
        self.since = time.perf_counter()

    def _leave(self) -> None:
        settle(self.device)
        now = time.perf_counter()
        self.profile.seconds[self.stack.pop()] += now - self.since
        self.since = time.perf_counter()


def _level(state: Any) -> str:
    """Which level a drafter is being fed for."""
    growth = next(growth for growth in state.growths if growth.wanted)
    return f"draft, level {growth.tree.depths[next(iter(growth.wanted))] + 1}"


def _parts() -> list[tuple[Any, str, str | Callable[..., str], str]]:
    """What is wrapped: owner, function, part, and the part that it must run inside of."""
    from outrider.drafters.feature_head import HeadDraftState
    from outrider.drafters.lm import LMDraftState
    from outrider.drafters.ngram import NgramDraftState
    from outrider.drafters.table import TableDraftState
    from outrider.engine import Run
    from outrider.models.lean import LeanTreeModel, Norm
    from outrider.models.native import NativeTextState, NativeTreeModel, NativeTreeState
    from outrider.models.packed import Product
    from outrider.models.tree_model import CachedTreeModel, CachedTreeState
    from outrider.native.decoder import Decoder, TextPass
    from outrider.native.screen import Screen
    from outrider.sequence import Sequence as Text

    return [
        (Run, "_round", REST, ""),
        (LMDraftState, "propose", "draft, bookkeeping", REST),
        (LMDraftState, "_catch_up", "draft, level 1", REST),
        (LMDraftState, "_feed_wanted", _level, REST),
        (LMDraftState, "_choose_children", "draft, choosing children", REST),
        (LMDraftState, "observe", "commit, drafter", REST),
        (HeadDraftState, "observe", "commit, drafter", REST),
        (HeadDraftState, "see", "draft, reading hidden states", REST),
        (NgramDraftState, "propose", "draft, prompt lookup", REST),
        (TableDraftState, "propose", "draft, table", REST),
        (CachedTreeState, "extend", "verify, masks and positions", REST),
        *((state, "score", "verify, masks and positions", REST) for state in (NativeTreeState, NativeTextState)),
        (NativeTextState, "extend", "verify, masks and positions", REST),
        (CachedTreeModel, "forward", "verify, other operations", "verify"),
        (LeanTreeModel, "forward", "verify, other operations", "verify"),
        (NativeTreeModel, "forward", "verify, other operations", "verify"),
        (NativeTreeModel, "hidden", "verify, other operations", "verify"),
        *((passes, "__call__", "verify, compiled kernels", "verify") for passes in (Decoder, TextPass)),
        *((Screen, name, "verify, vocabulary head", REST) for name in ("highest", "bounds", "drawn", "logits")),
        (Product, "__call__", "verify, linear layers", "verify"),
        (Norm, "__call__", "verify, norms", "verify"),
        (torch.nn.functional, "scaled_dot_product_attention", "verify, attention", "verify"),
        *((state, "commit", "commit, target", REST) for state in (CachedTreeState, NativeTextState)),
        (Text, "verify", "sampling", REST),
        (Text, "emit", "text and stop rules", REST),
    ]


@contextmanager
def profiling(profile: Profile, device: torch.device = CPU) -> Iterator[None]:
    """Count what engines do within the block.

    Args:
        device: of the target; elsewhere than on a CPU every part waits for it, which makes the whole slower.
    """
    watch = Stopwatch(profile, device)
    with ExitStack() as patches:
        for owner, name, part, inside in _parts():
            if name in vars(owner):
                patches.enter_context(mock.patch.object(owner, name, watch.wrap(vars(owner)[name], part, inside)))
        yield
    profile.overhead = profile.calls * _cost_of_a_wrapper()


def _cost_of_a_wrapper(calls: int = 2000) -> float:
    """Seconds that one wrapped call takes longer than a plain one."""

    def nothing() -> None:
        pass

    wrapped = Stopwatch(Profile()).wrap(nothing, "nothing")
    spent = []
    for function in (nothing, wrapped):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        spent.append(time.perf_counter() - start)
    return max(0.0, spent[1] - spent[0]) / calls


def profile_rounds(
    engine: Engine,
    prompts: Sequence[Any],
    max_new_tokens: int,
    tell: Callable[[int, int, str], None] = lambda done, total, what: None,
    **options: Any,
) -> Profile:
    """Continue prompts and say where the time of their rounds went; prefill is left out.

    Args:
        prompts: what `Engine.generate` takes; the first is also run once before, to warm up.
        options: shape, temperature and whatever else `Engine.generate` takes.

    Raises:
        ValueError: without prompts.
    """
    if not prompts:
        raise ValueError("there are no prompts to profile; give some tasks or files")
    engine.generate(prompts[0], max_new_tokens=min(16, max_new_tokens), **options)
    profile = Profile()
    with profiling(profile, engine.model.device):
        for number, prompt in enumerate(prompts):
            tell(number, len(prompts), "prompts")
            stats = engine.generate(prompt, max_new_tokens=max_new_tokens, **options).stats
            profile.rounds += stats.rounds
            profile.emitted += stats.emitted
    tell(len(prompts), len(prompts), "prompts")
    return profile


# ---- for people ------------------------------------------------------------------------------------------------------


def render(profile: Profile, console: Console) -> None:
    """The table."""
    found, whole = profile.milliseconds(), profile.whole()
    table = Table("part of a round", "ms", "share")
    group = 0
    for part, spent in found.items():
        if _group(part) != group:
            table.add_section()
            group = _group(part)
        table.add_row(part, f"{spent:.2f}", f"{spent / whole:.0%}" if whole else "")
    table.add_section()
    table.add_row("a round", f"{whole:.2f}", "")
    console.print(table)
    console.print(
        f"{profile.rounds} rounds, {profile.emitted / max(profile.rounds, 1):.2f} tokens a round; measuring took about "
        f"{1000 * profile.overhead / max(profile.rounds, 1):.2f} ms of a round",
        highlight=False,
        soft_wrap=True,
    )


def plot(profile: Profile, path: Path) -> None:
    """A round as one bar of its parts."""
    with picture(path) as (axes,):
        left = 0.0
        for part, spent in profile.milliseconds().items():
            axes.barh([0], [spent], left=left, label=f"{part}: {spent:.2f}")
            left += spent
        axes.set(xlabel="milliseconds of a round", yticks=[], ylim=(-0.4, 3.2))
        axes.legend(fontsize=7, ncols=2, loc="upper left")
