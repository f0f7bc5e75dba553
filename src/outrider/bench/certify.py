"""Proof, on a user's own pair, that speculation does not change what the target writes.

`greedy` and `coupled`: plain and speculative tokens are the same, prompt by prompt; ties (see `runner.TIE_ULPS`) are
listed and do not fail. `mss`: drawn tokens follow the target's own law, by a chi-square test that a right sampler fails
once in 10,000 runs. Nothing passes unexamined: no prompt, no token or no draft is a `ValueError`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from outrider.bench.report import Difference, describe, provenance
from outrider.bench.runner import TIE_ULPS, Progress, Shape, compare, engine_facts, next_logits, process
from outrider.bench.tasks import Prompt

RULES = ("greedy", "coupled", "mss")
DEFAULT_SHAPES: tuple[Shape, ...] = ("auto", (3, 2, 2))
LOWEST_P_VALUE = 1e-4
LAW_TOKENS = 3  # enough for a rejection, an acceptance and a bonus to meet the law
SMALLEST_EXPECTED = 5.0  # below this the chi-square law is no longer a good guide
FEWEST_SAMPLES = 50


@dataclass(frozen=True)
class Check:
    """One rule that was examined: whether it holds, and what that rests on."""

    name: str
    passed: bool
    evidence: dict[str, Any]


@dataclass(frozen=True)
class Certificate:
    """What `certify` found. `ties` and `differences` list every place where texts part, `evidence` the settings."""

    certified: bool
    checks: list[Check]
    ties: list[Difference]
    differences: list[Difference]
    evidence: dict[str, Any]

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        if not self.certified:
            return f"not certified: {', '.join(check.name for check in self.checks if not check.passed)} failed"
        if self.evidence.get("exact"):
            return "certified: identical, exact by construction"
        return f"certified: identical up to {len(self.ties)} ties" if self.ties else "certified: identical"

    def to_json(self) -> dict[str, Any]:
        """The certificate as plain data, with its provenance."""
        plain = asdict(self) | {"verdict": self.verdict, "provenance": provenance()}
        for difference in plain["ties"] + plain["differences"]:
            difference["speculative_token"] = difference.pop("other_token")
        return plain

    def render(self, console: Console | None = None) -> None:
        """Prints the verdict, what each check rests on, and every place where texts part."""
        console = console or Console()
        console.print(self.verdict, style="bold green" if self.certified else "bold red")
        for check in self.checks:
            facts = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in check.evidence.items())
            text = f"{check.name}: {'holds' if check.passed else 'FAILS'} ({facts.replace('_', ' ')})"
            console.print(text, markup=False, highlight=False)
        for d in self.ties + self.differences:
            console.print(f"{d.prompt}, {d.run}, token {d.position}: {describe(d)}", markup=False, highlight=False)


def certify(
    engine: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.7,
    top_k: int = 0,
    top_p: float = 1.0,
    samples: int = 400,
    seeds: Sequence[int] = (0,),
    shapes: Sequence[Shape] = DEFAULT_SHAPES,
    rules: Sequence[str] = RULES,
    progress: Progress | None = None,
) -> Certificate:
    """Compares speculative with plain decoding on `prompts`, for every rule, seed and shape.

    `temperature`, `top_k` and `top_p` hold for `coupled` and `mss`; `mss` draws `samples` short generations of the
    prompt whose first token is least certain. Raises `ValueError` when nothing would be, or was, compared.
    """
    _check_arguments(prompts, max_new_tokens, temperature, samples, seeds, shapes, rules)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    encoded = {f"{prompt.task}/{prompt.id}": prompt.encode(engine) for prompt in prompts}
    checks: list[Check] = []
    found: list[Difference] = []
    for rule in rules:
        if rule == "mss":
            ids = _least_certain(engine, list(encoded.values()), sampling)
            checks.append(check_law(engine, ids, samples, shapes, sampling, progress))
        else:
            runs = [{"seed": seed, **sampling} for seed in seeds] if rule == "coupled" else [{"temperature": 0.0}]
            check, differences = check_text(rule, engine, encoded, max_new_tokens, shapes, runs, progress)
            checks.append(check)
            found += differences
    evidence = engine_facts(engine) | {"prompts": len(encoded), "max_new_tokens": max_new_tokens, "seeds": list(seeds)}
    evidence |= sampling | {"shapes": [str(shape) for shape in shapes], "tie_ulps": TIE_ULPS[engine.dtype]}
    ties, differences = [d for d in found if d.tie], [d for d in found if not d.tie]
    return Certificate(all(check.passed for check in checks), checks, ties, differences, evidence)


def _check_arguments(
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperature: float,
    samples: int,
    seeds: Sequence[int],
    shapes: Sequence[Shape],
    rules: Sequence[str],
) -> None:
    for what, given in (("prompt", prompts), ("shape", shapes), ("rule", rules), ("seed", seeds)):
        if not given:
            raise ValueError(f"No {what} is given, so nothing would be compared: give at least one {what}.")
    if len({(prompt.task, prompt.id) for prompt in prompts}) < len(prompts):
        raise ValueError("Two prompts have the same task and id, so results would mix: give every prompt its own id.")
    if unknown := [rule for rule in rules if rule not in RULES]:
        raise ValueError(f"There is no rule {unknown[0]!r} to certify: take some of {', '.join(RULES)}.")
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, which leaves nothing to speculate: give 2 or more.")
    if temperature <= 0 and set(rules) != {"greedy"}:
        raise ValueError(f"temperature is {temperature}, which samples nothing: raise it, or certify only rule greedy.")
    if "mss" in rules and samples < FEWEST_SAMPLES:
        raise ValueError(f"{samples} samples say little about a law: draw {FEWEST_SAMPLES} or more, or leave out mss.")


def _require_drafts(drafted: int, rule: str) -> None:
    if not drafted:
        raise ValueError(f"Nothing was drafted under rule {rule}, so nothing was tested: give a drafter and shapes.")


# ---- the same text ---------------------------------------------------------------------------------------------


def check_text(
    rule: str,
    engine: Any,
    encoded: dict[str, list[int]],
    max_new_tokens: int,
    shapes: Sequence[Shape],
    runs: Sequence[dict[str, Any]],
    progress: Progress | None = None,
) -> tuple[Check, list[Difference]]:
    """Plain against speculative for every prompt, run (sampling options) and shape; ties are among the differences."""
    compared = drafted = done = 0
    found: list[Difference] = []
    for label, ids in encoded.items():
        for options in runs:
            settings = {"max_new_tokens": max_new_tokens, "rule": "coupled", **options}
            plain = list(engine.generate(ids, shape="off", **settings).token_ids)
            for shape in shapes:
                result = engine.generate(ids, shape=shape, **settings)
                run = f"{rule}, shape {shape}" + (f", seed {options['seed']}" if "seed" in options else "")
                difference = compare(engine, label, ids, plain, list(result.token_ids), run=run, **options)
                found += [difference] if difference else []
                compared += difference.position + 1 if difference else len(plain)
                drafted += result.stats.drafted
            done += 1
            if progress:
                progress(done, len(encoded) * len(runs), rule)
    if not compared:
        raise ValueError(f"Every text under rule {rule} ended at once, so no token was compared: give other prompts.")
    _require_drafts(drafted, rule)
    differences = sum(not d.tie for d in found)
    evidence = {"runs": done * len(shapes), "tokens_compared": compared, "tokens_drafted": drafted}
    evidence |= {"ties": len(found) - differences, "differences": differences}
    return Check(rule, not differences, evidence), found


# ---- the same law ----------------------------------------------------------------------------------------------

Tokens = tuple[int, ...]
OTHER = -1  # ends the cell "this beginning, then any token that has no cell of its own"


def _least_certain(engine: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> list[int]:
    """The prompt whose first token's law has the highest entropy: the one that shows a bias soonest."""

    def entropy(ids: list[int]) -> float:
        return float(torch.special.entr(process(next_logits(engine, ids), **sampling).exp()).sum())

    return max(prompts, key=entropy)


def check_law(
    engine: Any,
    prompt_ids: list[int],
    samples: int,
    shapes: Sequence[Shape],
    sampling: dict[str, Any],
    progress: Progress | None = None,
) -> Check:
    """Tests `samples` short generations with rule `mss` against the target's own joint law.

    A cell is a beginning of up to `LAW_TOKENS` tokens, as fine as an expected count of 5 allows. A drawn token that the
    law excludes fails the check whatever the statistic says. The shapes take turns. Half precision knows the law only
    up to the rounding of its logits: with many samples, test in float32.
    """
    law = Law(engine, prompt_ids, samples, sampling)
    if len(pool(Counter(), law.cells, samples)[1]) < 2:
        raise ValueError("The target is all but sure of its tokens, so mss cannot be tested: raise the temperature.")
    counts: Counter[Tokens] = Counter()
    drafted = excluded = 0
    for seed in range(samples):
        shape = shapes[seed % len(shapes)]
        budget = LAW_TOKENS + 1  # one token more than is tested, or the budget would cut the tree short
        result = engine.generate(prompt_ids, max_new_tokens=budget, seed=seed, shape=shape, rule="mss", **sampling)
        counts[law.cell(result.token_ids)] += 1
        excluded += law.excludes(result.token_ids)
        drafted += result.stats.drafted
        if progress:
            progress(seed + 1, samples, "mss")
    _require_drafts(drafted, "mss")
    observed, expected = pool(counts, law.cells, samples)
    statistic, freedom, p_value = chi_square(observed, expected)
    shares = torch.tensor(expected, dtype=torch.float64) / samples
    distance = (torch.tensor(observed) / samples - shares).abs().sum() / 2
    noise = (2 * shares * (1 - shares) / (math.pi * samples)).sqrt().sum() / 2
    evidence: dict[str, Any] = {"samples": samples, "cells": len(expected)}
    evidence |= {"tokens_drafted": drafted, "excluded_tokens": excluded}
    evidence |= {"chi_square": statistic, "degrees_of_freedom": freedom, "p_value": p_value}
    evidence |= {"total_variation": float(distance), "total_variation_by_chance": float(noise)}
    return Check("mss", p_value >= LOWEST_P_VALUE and not excluded, evidence)


class Law:
    """The target's exact law of the first `LAW_TOKENS` tokens after a prompt, as `cells`: {beginning: probability}.

    Only beginnings that `samples` draws should meet 5 times are followed; the rest of each goes to one OTHER cell.
    """

    def __init__(self, engine: Any, prompt_ids: list[int], samples: int, sampling: dict[str, Any]) -> None:
        self.engine, self.prompt_ids, self.sampling = engine, prompt_ids, sampling
        self.smallest, self.ends = SMALLEST_EXPECTED / samples, set(engine.model_eos)
        self.laws: dict[Tokens, torch.Tensor] = {}
        self.cells = dict(self._grow((), 1.0))

    def _grow(self, beginning: Tokens, probability: float) -> Iterator[tuple[Tokens, float]]:
        if len(beginning) == LAW_TOKENS or (beginning and beginning[-1] in self.ends):
            yield beginning, probability
            return
        law = process(next_logits(self.engine, [*self.prompt_ids, *beginning]), **self.sampling).exp()
        self.laws[beginning] = law
        likely = (law * probability >= self.smallest).nonzero()[:, 0].tolist()
        for token in likely:
            yield from self._grow((*beginning, token), probability * float(law[token]))
        yield (*beginning, OTHER), probability * max(0.0, 1.0 - float(law[likely].sum()))

    def cell(self, token_ids: Sequence[int]) -> Tokens:
        """The cell that a generation falls into."""
        tokens = tuple(token_ids[:LAW_TOKENS])
        beginnings = [tokens[:end] for end in range(len(tokens) + 1)]
        if whole := [beginning for beginning in beginnings if beginning in self.cells]:
            return whole[0]
        return (*[beginning for beginning in beginnings if beginning in self.laws][-1], OTHER)

    def excludes(self, token_ids: Sequence[int]) -> bool:
        """Whether a generation cannot come from the law: a token of probability 0, or an end that is none."""
        tokens = tuple(token_ids[:LAW_TOKENS])
        if len(tokens) < LAW_TOKENS and not (tokens and tokens[-1] in self.ends):
            return True
        known = [end for end in range(len(tokens)) if tokens[:end] in self.laws]
        return any(float(self.laws[tokens[:end]][tokens[end]]) == 0.0 for end in known)


def pool(counts: Counter[Tokens], cells: dict[Tokens, float], samples: int) -> tuple[list[int], list[float]]:
    """Observed and expected counts. Cells that expect fewer than 5 become one, which joins another if still small."""
    ordered = sorted(cells, key=lambda cell: -cells[cell])
    large = [cell for cell in ordered if samples * cells[cell] >= SMALLEST_EXPECTED]
    groups = [[cell] for cell in large] + [[cell for cell in ordered if cell not in set(large)]]
    if len(groups) > 1 and samples * sum(cells[cell] for cell in groups[-1]) < SMALLEST_EXPECTED:
        small = groups.pop()
        groups[-1] += small
    observed = [sum(counts[cell] for cell in group) for group in groups]
    return observed, [samples * sum(cells[cell] for cell in group) for group in groups]


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> tuple[float, int, float]:
    """Pearson's statistic, its degrees of freedom and the chance of a larger one. Needs two cells or more."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(observed) - 1
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return statistic, freedom, float(torch.special.gammaincc(halves[0], halves[1]))
