"""What a caller may ask of a generation: names, meanings and limits, checked once.

Names are those of transformers' `GenerationConfig` where it has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

RULES = ("coupled", "mss")
SMALLEST, LARGEST = 1e-6, 1e9  # beyond these, processed logits leave float32
DRAFT_SAMPLING = ("auto", "topk", "without_replacement", "iid")

# of transformers' processors those that remember earlier calls, or run a model of their own along with the text
STATEFUL = {
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperNoSpeechDetection",
}

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Options:
    """How to continue a prompt.

    Args:
        max_new_tokens: most tokens to write; 0 writes none.
        min_new_tokens: EOS is impossible before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it and tokens drawn.
        top_k, top_p, min_p, typical_p: keep only likely tokens (sampling only).
        repetition_penalty: above 1 makes tokens of the prompt and text less likely (transformers' rule).
        presence_penalty, frequency_penalty: subtracted once, and per occurrence, for tokens of the new text (OpenAI's rule).
        no_repeat_ngram_size: no n-gram of this size occurs twice.
        logit_bias: {token id: added to its logit}.
        bad_words_ids: token sequences that must not appear.
        logits_processor: further processors, `(input_ids [R, L], scores [R, V]) -> scores`, applied before the temperature;
            each must be a pure function of its arguments.
        seed: keys the noise by position; None draws a seed from torch's global generator and reports it.
        eos_token_id: none, one or several ids that end the text; "model" takes the model's own.
        stop: strings that end the text; the text is cut before the earliest, the token ids end with the token that
            completes it.
        rule: "coupled" (the text equals plain decoding with the same seed) or "mss" (equal in law).
        draft_sampling: how a drafter model chooses children: "topk", "without_replacement", "iid", or "auto".
        logprobs: number of alternatives reported beside each emitted token's log probability; None reports nothing.
        logprobs_mode: "raw" (the model's law) or "processed" (the law that tokens are drawn from).
        skip_special_tokens: leave special tokens out of the text.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_ids: Sequence[Sequence[int]] = ()
    logits_processor: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    eos_token_id: int | Sequence[int] | str | None = "model"
    stop: str | Sequence[str] = ()
    rule: str = "coupled"
    draft_sampling: str = "auto"
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_ranges()
        for name, allowed in (
            ("rule", RULES),
            ("draft_sampling", DRAFT_SAMPLING),
            ("logprobs_mode", ("raw", "processed")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; use {' or '.join(map(repr, allowed))}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ValueError(f"seed {self.seed!r} is not a whole number; give an int or None")
        if not isinstance(self.skip_special_tokens, bool):
            raise ValueError(f"skip_special_tokens is {self.skip_special_tokens!r}; give True or False")
        self._check_collections()

    def _check_collections(self) -> None:
        if not isinstance(self.stop, (str, list, tuple)) or any(
            not isinstance(t, str) or not t for t in self.stop_strings
        ):
            raise ValueError(f"stop is {self.stop!r}; give one non-empty string or a list of such strings")
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            _is_id(k) and _is_finite(v) and abs(v) <= LARGEST for k, v in bias.items()
        ):
            raise ValueError(f"logit_bias is {bias!r}; give a dict of token ids and finite numbers")
        words = self.bad_words_ids
        if not _is_list(words) or not all(_is_list(word) and word and all(map(_is_id, word)) for word in words):
            raise ValueError(f"bad_words_ids is {words!r}; give a list of non-empty lists of token ids")
        chain = self.logits_processor
        if not _is_list(chain) or not all(map(callable, chain)):
            raise ValueError(f"logits_processor is {chain!r}; give a list of functions of (input_ids, scores)")
        refuse_stateful(chain)

    def _check_ranges(self) -> None:
        whole = ("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size")
        for name in whole + (("logprobs",) if self.logprobs is not None else ()):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of 0 or more")
        ranges = {
            "temperature": (0.0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "typical_p": (0.0, 1.0),
            "presence_penalty": (-math.inf, math.inf),
            "frequency_penalty": (-math.inf, math.inf),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not _is_finite(value) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}; it must be a finite number{_within(low, high)}")
        if 0 < self.temperature < SMALLEST:
            raise ValueError(
                f"temperature is {self.temperature!r}; give 0 for greedy decoding, or at least {SMALLEST:g}"
            )
        if max(abs(self.presence_penalty), abs(self.frequency_penalty), self.temperature) > LARGEST:
            raise ValueError(f"temperature, presence_penalty and frequency_penalty must not exceed {LARGEST:g}")
        if self.top_p == 0 or self.typical_p == 0:
            raise ValueError("top_p and typical_p must be above 0; for greedy decoding use temperature 0")
        if not _is_finite(self.repetition_penalty) or not SMALLEST <= self.repetition_penalty <= LARGEST:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty!r}; it must be a number above 0 (1 is none)"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def eos_ids(self, model_eos: Sequence[int]) -> frozenset[int]:
        """The ids that end the text, given the model's own."""
        if isinstance(self.eos_token_id, str):
            if self.eos_token_id != "model":
                raise ValueError(f"eos_token_id {self.eos_token_id!r} is not an id; give ids, None, or 'model'")
            return frozenset(model_eos)
        if self.eos_token_id is None:
            return frozenset()
        given: Any = self.eos_token_id
        ids: list[Any] = list(given) if _is_list(given) else [given]
        if not all(map(_is_id, ids)):
            raise ValueError(
                f"eos_token_id {self.eos_token_id!r} is not a token id; give an id, a list of ids, or None"
            )
        return frozenset(ids)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _within(low: float, high: float) -> str:
    """A range in words, to go on behind "a number"."""
    if low == -math.inf:
        return ""
    return f" of {low:g} or more" if high == math.inf else f" from {low:g} to {high:g}"


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def options_from(given: Mapping[str, Any]) -> Options:
    """Options from keyword arguments.

    Raises:
        ValueError: for a name that is not an option, so that nothing is ignored silently.
    """
    known = {f.name for f in fields(Options)}
    given = dict(given)
    sample = given.pop("do_sample", None)  # None is not given
    if sample and given.get("temperature") is None:
        given["temperature"] = 1.0
    elif sample and given["temperature"] == 0:
        raise ValueError("do_sample=True contradicts temperature 0, which is greedy; leave one of them out")
    elif sample is not None and not sample:
        given["temperature"] = 0.0
    if given.get("stop_strings") and given.get("stop"):
        raise ValueError("stop and stop_strings are two names of one option; give one of them")
    if "stop_strings" in given:  # transformers' name
        given["stop"] = given.pop("stop_strings") or given.get("stop")
    unknown = sorted(set(given) - known)
    if unknown:
        import difflib

        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {close[0]!r}?" if close else "see outrider.Options for the names"
        raise ValueError(f"generate() has no option {unknown[0]!r}; {hint}")
    if given.get("stop") is None:
        given.pop("stop", None)
    return Options(**given)


def refuse_stateful(chain: Sequence[LogitsProcessor]) -> None:
    """Let only processors through that are functions of their arguments, as far as their names tell.

    Raises:
        ValueError: for one that wants to see every token once and in order, which drafting does not do.
    """
    for processor in chain:
        for name in STATEFUL & {kind.__name__ for kind in type(processor).__mro__}:
            raise ValueError(
                f"{name} remembers earlier calls, and drafts that are rejected would change the text; leave out what needs it "
                "(guidance_scale, or a SynthID watermarking_config), or use plain generate"
            )


def fresh_seed() -> int:
    """A seed from torch's global generator, so that `torch.manual_seed` governs unseeded runs."""
    return int(torch.randint(0, 2**31 - 1, (1,)).item())
