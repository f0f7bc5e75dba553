"""What users call: `load` an engine, `generate`, `stream`."""

from __future__ import annotations

import os
import sys
from collections import abc
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.controller import Controller, Fixed
from outrider.drafters.base import Drafter
from outrider.drafters.catalog import default_arms, make_controller, make_drafter, refresh
from outrider.engine import Run
from outrider.experience import Experience, Learner
from outrider.machine import machine_name
from outrider.models.catalog import DEFAULT
from outrider.models.exact import exactly
from outrider.models.fingerprint import fingerprint
from outrider.models.loading import load_model
from outrider.models.native import NativeTreeModel
from outrider.models.protocol import TreeModel
from outrider.models.screened import screen
from outrider.models.selftest import SelfTest, tree_model
from outrider.models.streaming import streaming
from outrider.options import Options, fresh_seed, options_from
from outrider.sampling import Sampler
from outrider.sequence import Piece, Sequence, TokenLogprob
from outrider.stats import Stats
from outrider.tree import TUNED

MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))
MOST_TUNED = 16  # controllers that are kept from call to call


@dataclass(frozen=True)
class _Tuned:
    """A controller that is kept from call to call, the drafter that it is for, and what keeps what it learned."""

    drafter: Drafter
    controller: Controller
    experience: Experience | None


@dataclass(frozen=True)
class Result:
    """What was written after one prompt.

    Args:
        text: the new text; stop strings and special tokens are left out.
        token_ids: the new tokens, EOS included.
        finish_reason: "stop" (EOS or a stop string) or "length" (budget or context).
        prompt_tokens: length of the prompt.
        seed: the seed in force; the same seed gives the same result (under "mss": with the same drafter and shape).
        stats: counts and clocks.
        logprobs: per new token, when asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    seed: int
    stats: Stats
    logprobs: list[TokenLogprob] | None = None


class Engine:
    """A target, a drafter, and the tokenizer between them and text. Made by `load`."""

    target: TreeModel
    _found: TreeModel | None = None
    _deepest = sys.maxsize  # levels of drafted tokens that stay exact, where that is asked for

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        drafter: Any = "auto",
        exact: bool = False,
        **loading: Any,
    ) -> None:
        self.model, self.tokenizer, self.name, self._tried_exact = model, tokenizer, name, exact
        self._tuned: dict[tuple[str, int, str], _Tuned] = {}
        self._find_target()
        self.drafter: Drafter | None = make_drafter(drafter, self.target, tokenizer, **loading)

    @property
    def exact(self) -> bool:
        """Whether plain and speculative decoding have the same bits, by construction."""
        return self._tried_exact or isinstance(self.target, NativeTreeModel)

    @property
    def dtype(self) -> torch.dtype:
        """Of the target's weights."""
        return self.model.dtype

    @property
    def way(self) -> SelfTest:
        """How the target scores trees."""
        return self.selftest

    @property
    def model_eos(self) -> list[int]:
        """Ids that end a text by the model's own configuration."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        if own is None and self.tokenizer is not None:
            own = self.tokenizer.eos_token_id
        return [] if own is None else [own] if isinstance(own, int) else list(own)

    def encode(self, prompt: Any, chat: bool = True) -> list[int]:
        """Token ids of a text (as a user's message where the tokenizer has a chat template), messages, or ids.

        Raises:
            ValueError: for an empty prompt, ids outside the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.flatten().tolist()
        if not isinstance(prompt, (str, abc.Sequence)) or isinstance(prompt, (bytes, bytearray)):
            raise ValueError(f"the prompt is a {type(prompt).__name__}; give text, token ids or chat messages")
        if len(prompt) == 0:
            raise ValueError("the prompt is empty; give at least one token or character to continue")
        if not isinstance(prompt, str) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in prompt):
            prompt = [int(i) for i in prompt]
            bad = [i for i in prompt if not 0 <= i < self.target.vocab]
            if bad:
                raise ValueError(
                    f"token id {bad[0]} is outside the vocabulary of {self.target.vocab}; check the tokenizer"
                )
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError(f"model {self.name!r} has no tokenizer; pass token ids instead of text")
        if isinstance(prompt, str) and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise ValueError("the prompt holds half a character (a lone surrogate); give valid text")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if isinstance(prompt, str) and not (chat and self.tokenizer.chat_template):
            ids = self.tokenizer(prompt)["input_ids"]
        else:
            ids = self._apply_template(messages)
        if not ids:
            raise ValueError("the prompt has no tokens; give some text to continue")
        return list(ids)

    def _apply_template(self, messages: list[Any]) -> list[int]:
        assert self.tokenizer is not None
        if not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
            raise ValueError("chat messages must be dicts with 'role' and 'content'; got something else")
        if not self.tokenizer.chat_template:
            raise ValueError(f"model {self.name!r} has no chat template; pass text or token ids instead of messages")
        out = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(out["input_ids"])

    # -- running ---------------------------------------------------------------------------------------------------

    @contextmanager
    def drafting(self, drafter: Drafter | None) -> Iterator[None]:
        """Use another drafter, or none, within the block."""
        before, self.drafter = self.drafter, drafter
        try:
            yield
        finally:
            self.drafter = before

    def generate(
        self,
        prompt: Any,
        *,
        shape: Any = "auto",
        chat: bool = True,
        seed: int | list[int] | None = None,
        **options: Any,
    ) -> Any:
        """Continue one prompt, or each of a list of prompts.

        Args:
            prompt: text, chat messages, token ids, or a list of these for a batch.
            shape: "auto", "ucb", "off", anything `parse_shape` reads, or a `Controller`.
            chat: put a text into the tokenizer's chat template.
            seed: one for all rows, or one per row.
            options: see `Options`; a list of temperatures is one per row.

        Returns:
            A `Result`, or a list of them for a batch; each row is what it would be alone.

        Raises:
            ValueError: for options that are unknown or impossible.
        """
        prompts, single = _as_batch(prompt)
        run, seeds = self._run(prompts, shape, chat, seed, options)
        for _ in run.pieces():
            pass
        return self._results(run, seeds, single)

    def stream(
        self,
        prompt: Any,
        *,
        shape: Any = "auto",
        chat: bool = True,
        seed: int | list[int] | None = None,
        **options: Any,
    ) -> Generator[Piece, None, Any]:
        """Like `generate`, but hands out every token as it is committed, with a mark on drafted ones. The iterator's return
        value is what `generate` would return."""
        prompts, single = _as_batch(prompt)
        run, seeds = self._run(prompts, shape, chat, seed, options)

        def pieces() -> Generator[Piece, None, Any]:
            yield from run.pieces()
            return self._results(run, seeds, single)

        return pieces()

    def follow(self) -> None:
        """Follow changes of the models' weights, hooks or dtype since the last call."""
        self._find_target()
        refresh(self.drafter, self.target)

    def _find_target(self) -> None:
        """How the model's trees are scored now."""
        found, self.selftest = tree_model(self.model)
        if found is not self._found:
            self._found, self.target = found, found
            self._tuned = {}  # what was learned is not of these weights
            if (why := screen(found)) and why not in self.selftest.notes:
                self.selftest.notes.append(why)
            if self._tried_exact:
                self.target = exact = exactly(found)
                self._deepest = exact.deepest

    def _run(
        self, prompts: list[Any], shape: Any, chat: bool, seed: int | list[int] | None, given: dict[str, Any]
    ) -> tuple[Run, list[int]]:
        self.follow()
        seeds = list(seed) if isinstance(seed, (list, tuple)) else [seed] * len(prompts)
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one seed, or one per prompt")
        options = [
            options_from({**given, **own, "seed": one}) for one, own in zip(seeds, _per_row(given, len(prompts)))
        ]
        # all rows of an unseeded call share one fresh seed, as rows of a seeded call share theirs
        fresh = fresh_seed() if any(o.temperature > 0 for o in options) and None in seeds else 0
        used = [fresh if one is None else one for one in seeds]
        ids = [self.encode(prompt, chat) for prompt in prompts]
        sequences = [self._sequence(i, row, o, s) for i, (row, o, s) in enumerate(zip(ids, options, used))]
        controller = self.controller(shape, *options)
        return Run(self.target, self.drafter, controller, sequences, self._deepest), used

    def controller(self, shape: Any = "auto", *rows: Options) -> Controller:
        """Who chooses the shapes of a call. Those that learn are kept from call to call, one for each drafter.

        Args:
            rows: what is asked for each row.
        """
        name = "auto" if shape is None else shape
        if not isinstance(name, str) or name not in TUNED or self.drafter is None:
            return make_controller(shape, self.drafter)
        drawn = [row for row in rows if row.temperature > 0]
        if any(row.rule == "mss" and row.seed is not None for row in drawn):
            # they listen to the clock; under mss the text depends on the shape, and a seed must give one text
            return Fixed(default_arms(self.drafter)[0])
        # what a drafter believes of its tokens is worth something else where the target draws them
        rule = drawn[0].rule if drawn else "greedy"
        key = name, id(self.drafter), rule
        if (known := self._tuned.get(key)) is None:
            made = make_controller(name, self.drafter, rule == "mss")
            about = self._about(self.drafter) | ({"tokens": rule} if drawn else {})
            known = _Tuned(self.drafter, made, Experience(cast(Learner, made), about) if name == "auto" else None)
            newest = [*self._tuned.items()][1 - MOST_TUNED :]  # drafters that came and went are not held for ever
            self._tuned = dict([*newest, (key, known)])
        return known.controller

    def _about(self, drafter: Drafter) -> dict[str, str]:
        """What statistics belong to."""
        return {
            "target": fingerprint(self.model),
            "drafter": drafter.name,
            "machine": machine_name(self.model.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            **({"memory": str(streamed)} if (streamed := streaming(self.model)) else {}),
        }

    def remember(self) -> None:
        """Keep what controllers learned, where enough is new."""
        for tuned in [*self._tuned.values()]:
            if tuned.experience is not None:
                tuned.experience.keep()

    def _results(self, run: Run, seeds: list[int], single: bool) -> Any:
        """Of a run that has ended; what its controller learned is kept."""
        self.remember()
        results = [_result(s, used) for s, used in zip(run.sequences, seeds)]
        return results[0] if single else results

    def _sequence(self, row: int, ids: list[int], options: Options, seed: int) -> Sequence:
        limit = self.target.context or len(ids) + options.max_new_tokens
        if len(ids) >= limit and options.max_new_tokens > 0 and self.target.context is not None:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the model's context is {limit}; shorten the prompt to at most {limit - 1}"
            )
        eos = options.eos_ids(self.model_eos)
        sampler = Sampler(options, seed, len(ids), eos, self.target.vocab, self.model.device)
        return Sequence(row, ids, sampler, options, eos, limit, self.tokenizer)


def load(
    target: str | PreTrainedModel = DEFAULT,
    drafter: Any = "auto",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    exact: bool = False,
    memory_budget: str | int | None = None,
) -> Engine:
    """An engine for a target.

    Args:
        target: an alias (`outrider models` lists them), a hub id, a folder, a GGUF file, or a live model.
        drafter: "auto", "off", "ngram", "oracle:RATE", a model in any of these forms, a `Drafter`, or a list (merged).
        tokenizer: for a live model, which brings none.
        dtype: by default bfloat16 where the machine is good at it, else float32.
        device: by default a GPU where there is one.
        threads: CPU threads of torch; by default left as they are.
        trust_remote_code: run code that comes with a model.
        exact: insist on the same bits for plain and speculative decoding in half precision too. With compiled
            kernels they always have them; with torch's that costs some speed.
        memory_budget: most memory for the target's weights, such as "2GB" or bytes; what does not fit stays in its files and is
            read layer by layer in every pass. A drafter is loaded whole, beside it. By default everything is loaded.

    Raises:
        ValueError: with one sentence, when something does not exist or does not fit.
    """
    if threads is not None:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
            raise ValueError(f"threads is {threads!r}; give a whole number from 1 to {MOST_THREADS}")
        torch.set_num_threads(threads)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}; give a transformers tokenizer, or None")
    loading: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    loaded = load_model(target, memory_budget=memory_budget, **loading)
    loading["dtype"] = dtype or loaded.model.dtype
    loading["device"] = device or loaded.model.device
    return Engine(loaded.model, tokenizer or loaded.tokenizer, loaded.name, drafter, exact, **loading)


def _as_batch(prompt: Any) -> tuple[list[Any], bool]:
    """Prompts of a call, and whether it was a single one."""
    if isinstance(prompt, torch.Tensor):
        return ([*prompt], False) if prompt.ndim == 2 else ([prompt], True)
    if isinstance(prompt, str) or not isinstance(prompt, (list, tuple)):
        return [prompt], True
    if len(prompt) == 0:
        raise ValueError("the prompt is empty, or the list of prompts; give at least one token or prompt")
    return ([prompt], True) if isinstance(prompt[0], (Integral, Mapping)) else (list(prompt), False)


def _per_row(given: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """Options that were given row by row."""
    heat = given.get("temperature")
    if not isinstance(heat, (list, tuple)):
        return [{}] * rows
    if len(heat) != rows:
        raise ValueError(f"{len(heat)} temperatures for {rows} prompts; give one temperature, or one per prompt")
    return [{"temperature": one} for one in heat]


def _result(sequence: Sequence, seed: int) -> Result:
    return Result(
        text=sequence.text.text,
        token_ids=sequence.new_ids,
        finish_reason=sequence.finish_reason or "length",
        prompt_tokens=sequence.prompt_length,
        seed=seed,
        stats=sequence.stats,
        logprobs=sequence.logprobs if sequence.options.logprobs is not None else None,
    )
