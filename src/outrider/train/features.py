"""The target's hidden states over its own answers, computed once per shard and kept beside it.

Rows of a feature file belong to the tokens of the shard of the same number. The last tap is the last layer, from which the
target's laws follow by its final norm and vocabulary head.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from outrider.models.files import save_atomically
from outrider.sampling import Sampler
from outrider.tree import Shape, TokenTree
from outrider.verify import Draft, Verdict

if TYPE_CHECKING:
    from outrider.api import Engine

LONGEST = 512  # tokens of a training sequence; longer answers are cut


class Recorder:
    """Takes a drafter's place in the engine, drafts nothing, and keeps the target's hidden states of all that is written.

    Args:
        taps: which layers.
    """

    name = "recorder"

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.hidden: list[list[Tensor]] = []

    def begin(
        self, prompts: Sequence[Sequence[int]], samplers: Sequence[Sampler], room: int, stream: int = 0
    ) -> RecorderState:
        """Record B further texts."""
        new: list[list[Tensor]] = [[] for _ in prompts]
        self.hidden += new
        return RecorderState(new)

    def rows(self, lengths: Sequence[int]) -> list[Tensor]:
        """What was recorded of every text, [tokens, taps * D], as long as the texts: a last token, never read, has zeros."""
        found = [torch.cat(parts).to("cpu", torch.bfloat16) for parts in self.hidden]
        return [F.pad(rows[:length], (0, 0, 0, max(0, length - len(rows)))) for rows, length in zip(found, lengths)]


class RecorderState:
    """The texts in flight."""

    def __init__(self, hidden: list[list[Tensor]]) -> None:
        self.hidden = hidden

    def propose(self, contexts: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Draft]:
        """Nothing but roots."""
        return [Draft(TokenTree(context[-1]), {}) for context in contexts]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Nothing to learn."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep recording only these."""
        self.hidden = [self.hidden[row] for row in rows]

    def see(self, hidden: Sequence[Tensor]) -> None:
        """Hidden states of tokens that the target has read."""
        for kept, rows in zip(self.hidden, hidden):
            kept.append(rows.clone())


@dataclass(frozen=True)
class Example:
    """One answer with its hidden states. `hidden` reads [tokens, taps * D] from disk when called."""

    ids: Tensor
    prompt_length: int
    temperature: float
    hidden: Callable[[], Tensor]


def check_taps(engine: Engine, taps: tuple[int, ...]) -> None:
    """Refuse taps that are no layers of the target, or the same, or do not end with the last layer.

    Raises:
        ValueError: in these cases.
    """
    named, last = ",".join(map(str, taps)), engine.model.config.get_text_config().num_hidden_layers - 1
    if taps[-1] != last:
        raise ValueError(f"taps {named} must end with the target's last layer, {last}")
    if max(taps) > last or len(set(taps)) < len(taps):
        raise ValueError(f"taps {named} must be different layers of the target's, 0 to {last}")


def feature_file(shard: Path, taps: tuple[int, ...]) -> Path:
    """Where the hidden states of a shard are kept."""
    return shard.with_name(f"features-{'-'.join(map(str, taps))}-{shard.name}")


def find_features(shard: Path, taps: tuple[int, ...]) -> tuple[Path, tuple[int, ...]] | None:
    """A feature file of a shard that holds these taps, and all the taps that it holds."""
    for path in sorted(shard.parent.glob(f"features-*-{shard.name}")):
        named = path.name.removeprefix("features-").removesuffix(f"-{shard.name}")
        held = tuple(int(tap) for tap in named.split("-") if tap.isdigit())
        if set(taps) <= set(held):
            return path, held
    return None


@torch.inference_mode()
def compute_features(
    engine: Engine,
    folder: Path,
    taps: tuple[int, ...],
    tell: Callable[[int, int, str], None] = lambda done, total, what: None,
    pattern: str = "shard-*.safetensors",
) -> None:
    """Run the target over every shard that has no feature file yet."""
    shards = sorted(folder.glob(pattern))
    for number, shard in enumerate(shards):
        tell(number, len(shards), "hidden states of shards")
        if find_features(shard, taps):
            continue
        data = load_file(shard)
        rows = torch.split(data["tokens"], data["row_lengths"].tolist())
        hidden = []
        for row in rows:
            state = engine.target.begin([row.tolist()], 0, taps)
            assert state.features is not None
            hidden.append(state.features[0].to("cpu", torch.bfloat16))
        save_atomically({"hidden": torch.cat(hidden)}, feature_file(shard, taps))
    tell(len(shards), len(shards), "hidden states of shards")


def tell_cut(folder: Path, texts: Sequence[Tensor]) -> None:
    """Warn of answers that are longer than what is learnt of them."""
    if long := sum(len(ids) > LONGEST for ids in texts):
        warnings.warn(
            f"{long} of {len(texts)} answers in {folder} have more than {LONGEST} tokens with their prompts; what is behind is "
            "not learnt",
            RuntimeWarning,
            stacklevel=3,
        )


def examples(folder: Path, taps: tuple[int, ...], pattern: str = "shard-*.safetensors") -> list[Example]:
    """All answers of a data set whose hidden states are there.

    Raises:
        ValueError: when there are none.
    """
    found = [example for shard in sorted(folder.glob(pattern)) for example in _of_shard(shard, taps)]
    if not found and any(find_features(shard, taps) for shard in folder.glob(pattern)):
        raise ValueError(
            f"all prompts in {folder} have {LONGEST - 1} tokens or more, too long to learn from; give shorter ones"
        )
    if not found:
        raise ValueError(f"{folder} holds no answers; make some with `outrider data --out {folder}`")
    return found


def _of_shard(shard: Path, taps: tuple[int, ...]) -> Iterator[Example]:
    features = find_features(shard, taps)
    if features is None:
        return
    data, start = load_file(shard), 0
    rows = torch.split(data["tokens"], data["row_lengths"].tolist())
    for ids, prompt, temperature in zip(rows, data["prompt_lengths"].tolist(), data["temperatures"].tolist()):
        length = min(len(ids), LONGEST)
        if prompt < length - 1:
            hidden = _reader(*features, taps, slice(start, start + length))
            yield Example(ids[:length].long(), prompt, round(temperature, 3), hidden)
        start += len(ids)


def _reader(path: Path, held: tuple[int, ...], taps: tuple[int, ...], rows: slice) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(path, "pt") as file:
            hidden: Tensor = file.get_slice("hidden")[rows]
        if held == taps:
            return hidden
        parts = hidden.chunk(len(held), dim=-1)
        return torch.cat([parts[held.index(tap)] for tap in taps], dim=-1)

    return read
