"""Token trees and the shapes they are grown in.

A tree is a parent array in topological order: `parents[0] == -1` for the root, `parents[i] < i` for every other node.
The root is the last emitted token: emitted, but not yet fed to either model. Every other node is a drafted token.
A shape says how many children each node of a level gets. Nothing here knows a model.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

MAX_NODES = 1024


@dataclass
class TokenTree:
    """Tokens with their parents; grows by `add`, in topological order.

    Args:
        root: token id of the root (node 0).
    """

    root: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    depths: list[int] = field(init=False)
    children: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.depths, self.children = [self.root], [-1], [0], [[]]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Hang a new node under `parent` and return its index."""
        node = len(self.tokens)
        assert 0 <= parent < node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.children.append([])
        self.children[parent].append(node)
        return node

    def child(self, parent: int, token: int) -> int | None:
        """The child of `parent` that carries `token`, if there is one."""
        return next((c for c in self.children[parent] if self.tokens[c] == token), None)

    def add_once(self, parent: int, token: int) -> int:
        """Like `add`, but siblings with the same token are one node."""
        found = self.child(parent, token)
        return self.add(parent, token) if found is None else found

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root to `node`, both included."""
        return [self.tokens[n] for n in self.path(node)]

    @property
    def drafted(self) -> int:
        """Number of drafted tokens: every node but the root."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Shape:
    """How a drafter grows its tree.

    Args:
        levels: `levels[d][i]` is the number of children of the i-th node of depth d. `()` drafts nothing ("off").
        budget: if positive, the tree is grown best first: nodes with the highest cumulative drafter probability, at most
            `budget` of them in all, each with at most `levels[d][0]` children.
        name: how users write it.
        least: a node that the drafter holds for less probable than this, its path included, gets no children, and of a
            best-first tree it is left out.
        within: the same happens to a node whose path is so many times less probable than the best path of its level.
        enough: a level whose parents are together less probable than this is not drafted.
        reach: how deep a drafter that costs nothing may go where it is asked first, whatever the levels say.
        trust: how deep it goes by the length of the match that it follows, at the places of `MATCHES`; 0: not at all; (): as deep
            as that drafter trusts its matches.
    """

    levels: tuple[tuple[int, ...], ...]
    name: str
    budget: int = 0
    least: float = 0.0
    reach: int = 0
    within: float = math.inf
    enough: float = 0.0
    trust: tuple[int, ...] = ()

    @property
    def believes(self) -> bool:
        """Whether it matters how probable the drafter holds its tokens."""
        return bool(self.budget or self.ends)

    @property
    def ends(self) -> bool:
        """Whether branches or levels may end early."""
        return self.least > 0.0 or self.enough > 0.0 or self.within < math.inf

    def floor(self, best: float) -> float:
        """The log probability that a path needs to go on, where the best path of its level has `best`."""
        return max(math.log(self.least) if self.least else -math.inf, best - math.log(self.within))

    @property
    def depth(self) -> int:
        """Number of sequential drafting levels."""
        return len(self.levels)

    @cached_property
    def nodes(self) -> int:
        """Largest number of drafted nodes."""
        return self.budget or sum(sum(level) for level in self.levels)

    @property
    def width(self) -> int:
        """Number of distinct continuations: the largest level."""
        return max((sum(level) for level in self.levels), default=0)

    @cached_property
    def flat(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Per node, level by level: how many children it gets, and the index of the first. Not for best-first shapes."""
        counts, firsts, frontier, free = [], [], 1, 1
        for level in (*self.levels, ()):
            for place in range(frontier):
                counts.append(level[place] if place < len(level) else 0)
                firsts.append(free)
                free += counts[-1]
            frontier = sum(counts[len(counts) - frontier :])
        return tuple(counts), tuple(firsts)

    @cached_property
    def feeds(self) -> int:
        """Nodes that the drafter itself must be fed to grow the tree: those that get children, the root among them."""
        return self.budget or sum(count > 0 for level in self.levels for count in level)

    def cut(self, depth: int) -> Shape:
        """The same shape, no deeper than `depth`."""
        if depth >= max(self.depth, self.reach):
            return self
        return replace(self, levels=self.levels[: max(depth, 0)], reach=min(self.reach, max(depth, 0)))

    def adapting(self, least: float, reach: int, within: float = math.inf, enough: float = 0.0) -> Shape:
        """The same shape with branches and levels that end early and lookups that go far; written `@least/within+enough~reach`
        behind it.

        Raises:
            ValueError: for numbers that are no probability, no ratio or no depth.
        """
        if not 0.0 <= least < 1.0:
            raise ValueError(
                f"a shape's branches cannot end at a probability of {least:g}; give a number from 0 to below 1, such as 0.05"
            )
        if not within >= 1.0:
            raise ValueError(f"no branch is within {within:g} times the best one; give a number from 1, such as 20")
        if not 0.0 <= enough < 1.0:
            raise ValueError(
                f"the levels of {self.name} cannot end at a probability of {enough:g}; give a number from 0 to below 1, such as "
                "0.2"
            )
        _count(reach)
        ends = (f"{least:g}" if least else "") + (f"/{within:g}" if within < math.inf else "")
        suffixes = (f"@{ends}" if ends else "", f"+{enough:g}" if enough else "", f"~{reach}" if reach else "")
        name = re.split("[@+~]", self.name)[0] + "".join(suffixes)
        return replace(self, name=name, least=least, reach=reach, within=within, enough=enough)

    @cached_property
    def lookup(self) -> Shape:
        """The chain that a drafter which costs nothing may draft, `reach` deep."""
        return replace(uniform((1,) * self.reach), trust=self.trust)


OFF = Shape((), "off")
TUNED = ("auto", "ucb")  # chosen from the rounds: by counterfactuals, or by the bandit of Mamba Drafters
# tokens: lookups are told apart by how long the match is that they follow; 1: one after which the text went on in several ways
CONTESTED = 1
MATCHES = CONTESTED, 2, 3, 4, 8, 16, 24


def match_class(tokens: int) -> int:
    """Place in `MATCHES` of the lookups that follow a match of so many tokens."""
    return max(bisect_right(MATCHES, tokens) - 1, 0)


def uniform(counts: Sequence[int]) -> Shape:
    """The shape in which every node of level d gets `counts[d]` children: (3, 2, 2) drafts 3 + 6 + 12 nodes."""
    levels, frontier = [], 1
    for count in counts:
        levels.append((count,) * frontier)
        frontier *= count
    if not counts:
        return OFF
    name = f"chain{len(counts)}" if set(counts) == {1} else "x".join(map(str, counts))
    return _checked(Shape(tuple(levels), name), counts)


def from_paths(paths: Sequence[Sequence[int]]) -> Shape:
    """A ragged shape from the child ranks of each node: `[[0], [0, 0], [1]]` is a root with two children, the first of
    which has one child."""
    nodes = {tuple(int(r) for r in path) for path in paths}
    for path in nodes:
        if not path or path[-1] < 0:
            raise ValueError(f"tree path {list(path)} is not a list of child ranks; write paths like [0], [0, 1]")
        before = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
        if before and before not in nodes:
            raise ValueError(f"tree path {list(path)} needs {list(before)} in the tree too; add it")
    levels: list[tuple[int, ...]] = []
    frontier: list[tuple[int, ...]] = [()]
    while frontier:
        counts = [sum(1 for p in nodes if p[:-1] == parent and len(p) == len(parent) + 1) for parent in frontier]
        if not any(counts):
            break
        levels.append(tuple(counts))
        frontier = [(*parent, rank) for parent, count in zip(frontier, counts) for rank in range(count)]
    name = "tree:" + ",".join(".".join(map(str, p)) for p in sorted(nodes))
    return _checked(Shape(tuple(levels), name), paths)


def best_first(budget: int, depth: int = 0, width: int = 4, least: float = 0.0) -> Shape:
    """At most `budget` nodes, grown where the drafter believes most; `depth` levels (0 picks one from the budget).

    With `least`, branches end where the drafter's probability of the whole path falls below it, so that an unsure drafter
    drafts less, and soon (drafters without probabilities take no notice)."""
    if budget < 1 or width < 1:
        raise ValueError(f"a best-first tree of {budget} nodes is impossible; give at least 1")
    depth = depth or max(1, min(budget, (budget + 1) // 2, 8))
    shape = _checked(Shape(((width,),) * depth, f"best{budget}x{depth}", budget), budget)
    return shape.adapting(least, 0)


def _checked(shape: Shape, given: object) -> Shape:
    if any(count < 0 for level in shape.levels for count in level):
        raise ValueError(f"shape {given!r} has a negative number of children; use positive whole numbers")
    if any(sum(level) == 0 for level in shape.levels):
        raise ValueError(f"shape {given!r} has a level without children; drop the 0 or write 'off'")
    if shape.nodes > MAX_NODES:
        raise ValueError(f"shape {given!r} has {shape.nodes} nodes, the limit is {MAX_NODES}; make it narrower")
    return shape


def parse_shape(given: Shape | str | int | Sequence[int] | Sequence[Sequence[int]]) -> Shape:
    """Read a shape as users write it.

    "off"; a chain as 5 or "chain5" or "5"; "3x2x2", "(3,2,2)" or (3, 2, 2); ragged paths as [[0], [0, 0], [1]] or
    "[[0],[0,0],[1]]", or by the name that such a shape gets, "tree:0,0.0,1"; "best16" or "best16x6" for a best-first tree of 16
    nodes (and depth 6). With "@0.05" behind any of these, branches end where the drafter holds their path for less than 5 %
    probable, with "@/20" where they hold it for 20 times less probable than the best path so deep, and with "@0.05/20" in either
    case (SpecLA's tau is the log of such a ratio); with "+0.2", levels are left out whose parents are together less than 20 %
    probable; with "~15", drafters that cost nothing may go 15 deep in a cascade.

    Raises:
        ValueError: when it is none of these.
    """
    if isinstance(given, Shape):
        return given
    if isinstance(given, bool) or not isinstance(given, (int, str, Sequence)):
        raise ValueError(f"shape {given!r} is not a shape; write 'off', 'chain5', '3x2x2' or 'best16'")
    if isinstance(given, int):
        return uniform((1,) * _count(given))
    if isinstance(given, str):
        return _parse_text(given)
    paths = [item for item in given if isinstance(item, (list, tuple))]
    if paths and len(paths) == len(given):
        return from_paths(paths)
    counts = [item for item in given if isinstance(item, int) and not isinstance(item, bool)]
    if len(counts) < len(given):
        raise ValueError(f"shape {given!r} is not a list of whole numbers; write for example (3, 2, 2)")
    if any(count < 1 for count in counts):
        raise ValueError(f"shape {given!r} has a level without children; use positive whole numbers")
    return uniform(counts)


def _count(number: int) -> int:
    if not 0 <= number <= MAX_NODES:
        raise ValueError(f"a chain of {number} tokens is impossible; give 0 to {MAX_NODES}")
    return number


def _parse_text(text: str) -> Shape:
    if re.search(r"[\d.]\s+[\d.]", text):
        raise ValueError(f"shape {text!r} has a space within a number; write '3x2x2', '(3, 2, 2)' or 'chain5'")
    word = re.sub(r"\s", "", text.lower())
    if match := re.fullmatch(
        r"([^@+~]+)(?:@(?=[\d./])(\d?\.\d{1,6})?(?:/(\d{1,4}(?:\.\d\d?)?))?)?(?:\+(\d?\.\d{1,6}))?(?:~(\d{1,6}))?", word
    ):
        word, least, within, enough, reach = match.groups()
        if least or within or enough or reach:
            numbers = float(least or 0), int(reach or 0), float(within or math.inf), float(enough or 0)
            if not (shape := _parse_text(word)).levels:
                raise ValueError(
                    f"shape {text!r} has nothing that could end early or go far; write 'off', or 'chain1~15'"
                )
            return shape.adapting(*numbers)
    if word in ("off", "()", "0"):
        return OFF
    if word in TUNED:
        raise ValueError(f"{word!r} chooses shapes and is none itself: it is written alone, where a choice is possible")
    if match := re.fullmatch(r"best(\d{1,6})(?:x(\d{1,6}))?", word):
        if match[2] is not None and not int(match[2]):
            raise ValueError(f"shape {text!r} has no level; give a depth of 1 or more, or leave it out")
        return best_first(int(match[1]), int(match[2] or 0))
    if match := re.fullmatch(r"(?:chain)?(\d{1,6})", word):
        return uniform((1,) * _count(int(match[1])))
    if re.fullmatch(r"\[(\[\d+(,\d+)*\],?)+\]", word):
        return from_paths([[int(r) for r in part.split(",")] for part in re.findall(r"\[([\d,]+)\]", word)])
    if re.fullmatch(r"tree:\d+([.,]\d+)*", word):
        return from_paths([[int(r) for r in part.split(".")] for part in word.removeprefix("tree:").split(",")])
    if re.fullmatch(r"\(?\d{1,6}([x,]\d{1,6})*,?\)?", word):
        return parse_shape([int(part) for part in re.findall(r"\d+", word)])
    raise ValueError(f"shape {text!r} is not understood; write 'auto', 'off', 'chain5', '3x2x2' or 'best16'")
