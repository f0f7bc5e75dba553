"""Recorded texts played again with any way to choose shapes, at given prices: differences that no clock could show.

Recording writes a text plainly and keeps, at every position, the wide tree that the drafter would have grown there. Any smaller
shape can then be grown from it, with the stops and budgets of the real one, and lookups are made as always, since they need
nothing but the text. So what a round emits is exact, and what it takes follows from a table of prices: only the choosing differs.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from torch import nn

from outrider.bench.turns import Timed, Turns, Written
from outrider.controller import Controller, Fixed
from outrider.cost import Curve
from outrider.drafters.base import Drafter, DraftState
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.growth import Growth
from outrider.drafters.wrapped import Wrapped, WrappedState
from outrider.models.fingerprint import fingerprint, weights_mark
from outrider.rounds import Round, Walked, walked
from outrider.sampling import Sampler
from outrider.tree import OFF, Shape, TokenTree, parse_shape
from outrider.verify import ONE_HOT, Draft, Verdict, verify_coupled

if TYPE_CHECKING:
    from outrider.api import Engine
    from outrider.bench.tasks import Prompt

WIDEST = "best64x8@0.001"
FORMAT = "outrider recorded texts, 2"

# ---- recording -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grown:
    """A drafted tree: of every node its parent, its token, and the log of the drafter's probability of the path to it."""

    parents: list[int]
    tokens: list[int]
    scores: list[float]


@dataclass(frozen=True)
class Track:
    """A text as recorded.

    Args:
        ids: prompt and text.
        begins: length of the prompt.
        trees: by position behind the prompt.
    """

    task: str
    ids: list[int]
    begins: int
    trees: list[Grown]


class Recording(Wrapped):
    """A drafter whose trees are kept instead of used: rounds stay plain."""

    def __init__(self, inner: Drafter, widest: Shape) -> None:
        super().__init__(inner)
        self.widest, self.trees = widest, list[Grown]()

    def around(self, state: DraftState) -> RecordingState:
        """Of one text."""
        return RecordingState(self, state)


class RecordingState(WrappedState[Recording]):
    """The drafter's side of one text."""

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Keep what the drafter proposes, and propose nothing."""
        (draft,) = self.inner.propose(contexts, [self.owner.widest])
        tree, scores = draft.tree, [0.0] + [math.log(draft.beliefs[node]) for node in range(1, len(draft.tree))]
        self.owner.trees.append(Grown(tree.parents, tree.tokens, scores))
        return [Draft(TokenTree(contexts[0][-1]), {})]


def record(
    engine: Engine,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    tell: Callable[[int, int, str], None] = lambda done, total, what: None,
    widest: str = WIDEST,
) -> list[Track]:
    """Write greedily, and keep what the engine's drafter would have drafted everywhere.

    Args:
        widest: the shape that is recorded; others are played as far as they lie inside.

    Raises:
        ValueError: when the drafter is no model that says how probable its tokens are, alone or behind lookups.
    """
    recording, tracks = Recording(model_of(engine.drafter), parse_shape(widest)), list[Track]()
    for number, prompt in enumerate(prompts):
        tell(number, len(prompts), prompt.task)
        ids, recording.trees = prompt.encode(engine), []
        with engine.drafting(recording):
            written = engine.generate(ids, shape=widest, max_new_tokens=max_new_tokens).token_ids
        tracks.append(Track(prompt.task, [*ids, *written], len(ids), recording.trees))
    return tracks


def model_of(drafter: Any) -> Drafter:
    """The model behind lookups.

    Raises:
        ValueError: when there is none that says how probable its tokens are.
    """
    from outrider.drafters.catalog import believes

    if drafter is None or not believes(drafter):
        raise ValueError(
            "only a drafter that is a model, alone or behind lookups, can be recorded; give one with --drafter"
        )
    while inner := getattr(drafter, "drafters", None):
        drafter = inner[-1]
    found: Drafter = drafter
    return found


def save(tracks: Sequence[Track], path: Path, engine: Engine) -> None:
    """Write what was recorded with an engine to a file."""
    found = {"format": FORMAT, **_recorded_with(engine), "tracks": [asdict(track) for track in tracks]}
    path.write_text(json.dumps(found), encoding="utf-8")


def _recorded_with(engine: Engine) -> dict[str, str]:
    """Names, and marks of the weights: two heads have one name."""
    model: Any = model_of(engine.drafter)
    weights = next(part for part in vars(model.model).values() if isinstance(part, nn.Module))
    return {
        "target": f"{engine.name} ({fingerprint(engine.model)})",
        "model": f"{model.name} ({weights_mark(weights)})",
    }


def load(path: Path, engine: Engine) -> list[Track]:
    """Tracks that `save` wrote.

    Raises:
        ValueError: when the file holds none, or such as were recorded with another target or model than the engine's.
    """
    wanted = _recorded_with(engine)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError
        tracks, known = found["tracks"], {name: found[name] for name in wanted}
        texts = [Track(t["task"], t["ids"], t["begins"], [Grown(**tree) for tree in t["trees"]]) for t in tracks]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no recorded texts; record them anew into another file") from error
    if known != wanted:
        raise ValueError(
            f"{path} was recorded with {known['model']} for {known['target']}, and this is {wanted['model']} for "
            f"{wanted['target']}; record anew into another file"
        )
    return texts


# ---- drafting again --------------------------------------------------------------------------------------------------


class Recorded:
    """A drafter that grows shapes from the recorded trees of one text."""

    name = "recorded"

    def __init__(self, track: Track) -> None:
        self.track = track

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> RecordedState:
        """Start the text."""
        return RecordedState(self.track)


class RecordedState:
    """The recorded drafter's side of its text."""

    def __init__(self, track: Track) -> None:
        self.track, self.known, self.seen = track, track.begins - 1, 0

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Grow the shape from the tree of this position."""
        (context,), (shape,) = contexts, shapes
        self.seen = len(context)
        read = max(len(context) - self.known, 1)
        return [_grow(self.track.trees[len(context) - self.track.begins], list(context), shape, read)]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """What was kept is read again with the next root, as by feature heads."""
        self.known = self.seen

    def keep(self, rows: Sequence[int]) -> None:
        """There is one."""


def _grow(grown: Grown, context: list[int], shape: Shape, read: int) -> Draft:
    """A tree whose children are recorded instead of computed."""
    children: list[list[int]] = [[] for _ in grown.tokens]
    for node, parent in enumerate(grown.parents[1:], 1):
        children[parent].append(node)
    for nodes in children:
        nodes.sort(key=lambda node: -grown.scores[node])
    growth, at = Growth(TokenTree(context[-1]), context, {0: 0}, [0], read=read), {0: 0}
    growth.want(shape, 0)
    for level in range(shape.depth):
        growth.fed.update(dict.fromkeys(growth.wanted, 0))
        found = [(node, child) for node, count in growth.wanted.items() for child in children[at[node]][:count]]
        hung = growth.hang([(node, grown.tokens[c], ONE_HOT, grown.scores[c]) for node, c in found], shape)
        at.update({new: child for new, (_, child) in zip(hung, found) if new is not None})
        if not growth.want(shape, level + 1):
            break
    return growth.finish(shape)


# ---- playing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """What rounds take, in milliseconds.

    Args:
        passes: of a pass over so many rows, straight lines in between.
        level: of a level of the drafter; `proposal`: of a proposal besides; `lookup`: of one that is looked up.
        around: of a round besides, whatever it drafts.
        noise: spread of the logarithm of all of it.
    """

    passes: Mapping[int, float]
    level: float = 0.95
    proposal: float = 0.65
    lookup: float = 0.1
    around: float = 0.2
    noise: float = 0.03

    def seconds(self, draft: Draft, chance: random.Random) -> tuple[float, float]:
        """Of drafting, and of the target's pass."""
        factor = 1e-3 * math.exp(chance.gauss(0.0, self.noise))
        if draft.beyond:
            drafting = self.lookup
        else:
            drafting = self.proposal + self.level * draft.levels if draft.levels else 0.0
        return drafting * factor, self.curve(1 + draft.tree.drafted) * factor

    @property
    def curve(self) -> Curve:
        """Of passes."""
        return Curve([*self.passes.items()])


def parse_prices(text: str) -> dict[int, float]:
    """Read "1:11.1,8:12.9,9:19.6": rows and milliseconds.

    Raises:
        ValueError: for anything else.
    """
    try:
        found = {int(rows): float(ms) for rows, ms in (part.split(":") for part in text.split(","))}
        if min(found) < 1 or not all(0 < ms < math.inf for ms in found.values()):
            raise ValueError
    except ValueError:
        raise ValueError(f"--passes {text!r} are no prices; write rows:milliseconds, such as 1:11,8:13,9:20") from None
    return found


def play(controller: Controller, track: Track, drafter: Drafter, prices: Prices, chance: random.Random) -> list[Timed]:
    """Let a controller choose its way through a text.

    Args:
        drafter: of recorded trees, or lookups before it.
    """
    state, rounds, at = drafter.begin([track.ids[: track.begins]], [], 0), list[Timed](), track.begins
    while at < len(track.ids):
        left, shape = len(track.ids) - at, controller.choose()
        cut = shape.cut(left - 1)
        if not cut.depth:
            shape = OFF
        draft = state.propose([track.ids[:at]], [cut])[0] if shape.depth else Draft(TokenTree(track.ids[at - 1]), {})
        verdict = verify_coupled(draft.tree, _follower(track.ids, at, draft.tree))
        if shape.depth:
            state.observe([verdict])
        drafting, verifying = prices.seconds(draft, chance)
        row = walked(draft, verdict, cut) if shape.depth else Walked((), 0, False, 0, True)
        done = Round(shape, [row], drafting, verifying)
        controller.reward(done)
        tokens = min(row.emitted, left)
        rounds.append(Timed(tokens, done.seconds + 1e-3 * prices.around, done.seconds, object()))  # no clock, no stalls
        at += tokens
    return rounds


def _follower(ids: Sequence[int], at: int, tree: TokenTree) -> Callable[[int], int]:
    """The text's own token behind every node."""
    return lambda node: ids[at + tree.depths[node]] if at + tree.depths[node] < len(ids) else -1


def played_drafter(drafter: Any, track: Track) -> Drafter:
    """The engine's drafter with recorded trees in the place of its model."""
    inner = getattr(drafter, "drafters", None)
    return CascadeDrafter([*inner[:-1], Recorded(track)]) if inner else Recorded(track)


def replay(
    tracks: Sequence[Track],
    drafter: Any,
    methods: Mapping[str, Callable[[], Controller]],
    prices: Prices,
    seeds: int = 3,
) -> Turns:
    """All methods on all texts, one after the other, as often as there are seeds; each time they begin anew.

    Args:
        drafter: the engine's.

    Raises:
        ValueError: when there is nothing to play.
    """
    if not tracks or seeds < 1:
        raise ValueError(f"{len(tracks)} texts, {seeds} times, are nothing to play; give one or more")
    found = list[Written]()
    for seed in range(seeds):
        begun = {name: make() for name, make in methods.items()}
        for number, track in enumerate(tracks):
            again, rounds = played_drafter(drafter, track), dict[str, list[Timed]]()
            for name, controller in begun.items():
                rounds[name] = play(controller, track, again, prices, random.Random(1000 * seed + number))
            found.append(Written(track.task, rounds, {}, number))
    return Turns(found)


def methods_of(engine: Engine, shapes: Sequence[str]) -> dict[str, Callable[[], Controller]]:
    """Plain decoding, "auto" with what comes with the drafter, and fixed shapes."""
    from outrider.drafters.catalog import make_controller

    fixed = {name: lambda name=name: Fixed(parse_shape(name)) for name in shapes}
    return {"plain": lambda: Fixed(OFF), "auto": lambda: make_controller("auto", engine.drafter), **fixed}


def to_json(turns: Turns) -> dict[str, Any]:
    """Speeds and ratios by task, and over all."""
    fixed = [name for name in turns.methods if name != "auto"]
    return {
        task or "mix": {
            "tokens_per_second": {name: turns.speed(name, task) for name in turns.methods},
            "auto_over_best_fixed": turns.ratio("auto", fixed, task).to_json(),
            "auto_over": {name: turns.ratio("auto", [name], task).to_json() for name in fixed},
        }
        for task in (*dict.fromkeys(turns.tasks), None)
    }


def render(turns: Turns, console: Console) -> None:
    """One row per method, one column per task."""
    found = to_json(turns)
    table = Table(title="texts played again: tokens/s at these prices")
    for name in ("method", *found):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method in turns.methods:
        table.add_row(method, *(f"{part['tokens_per_second'][method]:.1f}" for part in found.values()))
    table.add_section()
    fixed = [name for name in turns.methods if name != "auto"]
    ratios = [turns.ratio("auto", fixed, None if name == "mix" else name) for name in found]
    table.add_row("auto over best fixed", *(one.told for one in ratios))
    table.add_row("95 % of resamplings", *(one.between for one in ratios))
    console.print(table)
