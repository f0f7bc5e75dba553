"""Inside transformers: `model.generate(**inputs, custom_generate=outrider.custom_generate, drafter="ngram")`.

transformers prepares processors and stopping rules; this runs them on the engine. Every processor of the prepared list sees
what it would see in plain `generate`, padding included.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider import noise
from outrider.api import Engine
from outrider.engine import Run
from outrider.options import LogitsProcessor, Options, fresh_seed, refuse_stateful
from outrider.sampling import Sampler
from outrider.sequence import Sequence

MOST_ENGINES = 4  # drafters that are kept for one model
MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION


class _Padded:
    """A processor that sees its row of the batch, with left padding in front of the ids, as it does in plain `generate`."""

    def __init__(self, processor: LogitsProcessor, padding: Tensor, row: int, rows: int) -> None:
        self.processor, self.padding = _of_row(processor, row, rows), padding

    def __call__(self, ids_RL: Tensor, scores_RV: Tensor) -> Tensor:
        return self.processor(torch.cat([self.padding.expand(len(ids_RL), -1), ids_RL], dim=1), scores_RV)


def _of_row(processor: Any, row: int, rows: int) -> Any:
    """The processor, or a copy for one row where it holds something for each row of the batch: the rows that it is given are
    others, such as nodes of a tree."""
    own: dict[str, Any] = {}
    if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), Tensor):
        own["prompt_ignore_length"] = int(ignored[row])
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        own["_prefix_allowed_tokens_fn"] = lambda _, ids_L: allowed(row, ids_L)
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        prompts = processor.encoder_input_ids
        prompt = row * len(prompts) // rows  # several rows continue one prompt with `num_return_sequences`
        own["encoder_input_ids"] = prompts[prompt : prompt + 1]
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        own["generated_ngrams"] = [processor.generated_ngrams[row * processor.batch_size // rows]]
        own["batch_size"] = 1
    if not own:
        return processor
    copied = copy.copy(processor)
    vars(copied).update(own)
    return copied


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Any = "auto",
    shape: Any = "auto",
    rule: str = "coupled",
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Continue `input_ids` [B, L] as `generate` would, with speculation.

    Args:
        drafter, shape, rule, seed: as in `outrider.load` and `Engine.generate`. What a drafter's name stands for is made once and
            stays with the model, as does what controllers learn about it: the last four names, whose files are not read again.

    Returns:
        Token ids [B, L + new], padded on the right.

    Raises:
        ValueError: for generation modes and outputs that speculation does not give.
    """
    _refuse_unsupported(model, generation_config, input_ids, model_kwargs)
    refuse_stateful(logits_processor)
    streamer = _callers_streamer()
    engine = _engine(model, drafter)
    target = engine.target
    sample = bool(generation_config.do_sample)
    asked = Options(
        max_new_tokens=generation_config.max_length - input_ids.shape[1],
        temperature=1.0 if sample else 0.0,  # the prepared processors hold the real temperature
        rule=rule,
        seed=seed,
    )
    first_seed = seed if seed is not None else fresh_seed() if sample else 0
    mask = model_kwargs.get("attention_mask")
    ends = getattr(generation_config, "_eos_token_tensor", None)  # what the prepared stopping criteria end the text at
    eos = frozenset() if ends is None else frozenset(ends.flatten().tolist())
    sequences = []
    for row, ids in enumerate(input_ids):
        padding = ids[: _left_padding(mask[row])] if mask is not None else ids[:0]
        row_seed = first_seed if row == 0 else noise.mix(first_seed, row)
        chain = [_Padded(p, padding[None], row, len(input_ids)) for p in logits_processor]
        options = replace(asked, logits_processor=chain, seed=row_seed)
        prompt = ids[len(padding) :].tolist()
        if not prompt:
            raise ValueError(
                f"row {row} has no tokens to continue, or its attention_mask hides them all; give it at least one"
            )
        sampler = Sampler(options, row_seed, len(prompt), eos, target.vocab, model.device)
        limit = target.context or len(prompt) + options.max_new_tokens
        if len(prompt) + options.max_new_tokens > limit:
            warnings.warn(f"the text will end at the model's context of {limit} tokens", RuntimeWarning, stacklevel=2)
        sequence = Sequence(row, prompt, sampler, options, eos, limit, None)
        sequence.stop_when = _Criteria(stopping_criteria, padding)
        sequences.append(sequence)
    for piece in Run(target, engine.drafter, engine.controller(shape, asked), sequences).pieces():
        if streamer is not None:
            streamer.put(torch.tensor([piece.token]))
    engine.remember()
    if streamer is not None:
        streamer.end()
    out = _padded_output(input_ids, [s.new_ids for s in sequences], generation_config)
    return GenerateDecoderOnlyOutput(sequences=out) if generation_config.return_dict_in_generate else out


class _Engines:
    """Engines of one model by what their drafters were named by, and by where and in which dtype the model was."""

    def __init__(self) -> None:
        self.known: dict[Any, Engine] = {}

    def __reduce__(self) -> Any:
        return _Engines, ()  # a copy of the model is another model


def _engine(model: PreTrainedModel, drafter: Any) -> Engine:
    """Drafter and controllers; those of a named drafter stay with the model from call to call."""
    if not isinstance(drafter, str):
        return Engine(model, None, type(model).__name__, drafter)
    engines = vars(model).setdefault("_outrider_engines", _Engines())  # on the model, so that all are freed together
    key = drafter, model.dtype, model.device
    engine = engines.known.pop(key, None)
    if engine is None or engine.model is not model:
        engine = Engine(model, None, type(model).__name__, drafter)
    else:
        engine.follow()
    engines.known = dict([*engines.known.items()][1 - MOST_ENGINES :]) | {key: engine}
    return engine


def _left_padding(mask: Tensor) -> int:
    """Padding tokens in front.

    Raises:
        ValueError: when zeros of the attention mask are elsewhere.
    """
    zeros = int((mask == 0).sum())
    if mask[:zeros].any():
        raise ValueError(
            "attention_mask has zeros behind real tokens; pad on the left (tokenizer.padding_side = 'left')"
        )
    return zeros


def _callers_streamer() -> Any:
    """The streamer that `generate` was called with. It puts the prompt into it, but does not hand it on to a custom function, and
    whoever reads from it would wait for ever."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and "streamer" in frame.f_locals:
            return frame.f_locals["streamer"]
        frame = frame.f_back
    return None


class _Criteria:
    """transformers' stopping rules for one row."""

    def __init__(self, criteria: StoppingCriteriaList, padding: Tensor) -> None:
        self.criteria, self.padding = criteria, padding

    def __call__(self, ids: list[int]) -> bool:
        full = torch.cat([self.padding, torch.tensor(ids, device=self.padding.device)])[None]
        return bool(self.criteria(full, None)[0])


def _refuse_unsupported(
    model: PreTrainedModel, config: GenerationConfig, input_ids: Tensor, model_kwargs: dict[str, Any]
) -> None:
    """Refuse what would be ignored and give another text than `generate` does.

    Raises:
        ValueError: with one sentence.
    """
    if model.config.is_encoder_decoder:
        raise ValueError("encoder-decoder models are not supported; use a decoder-only model")
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise ValueError(
            f"{mode.value.replace('_', ' ')} cannot be speculated losslessly here; use num_beams=1 and leave out penalty_alpha, "
            "dola_layers, force_words_ids and constraints"
        )
    if "inputs_embeds" in model_kwargs:
        raise ValueError("inputs_embeds are not supported; pass input_ids")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name}=True is not supported with speculation; leave it out, or use plain generate")
    if any(map(_holds_tokens, getattr(model_kwargs.get("cache"), "layers", ()))):
        raise ValueError(
            "a cache that already holds tokens is not supported; leave it out: the whole prompt is read anew"
        )
    _refuse_positions(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    for name, value in model_kwargs.items():
        if isinstance(value, Tensor) and name not in ("attention_mask", "position_ids"):
            raise ValueError(f"{name} is not supported with speculation; leave it out, or use plain generate")


def _holds_tokens(layer: Any) -> bool:
    """Whether a layer of a cache, attention or recurrent, has read anything."""
    length = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    return bool(length > 0) or any(getattr(layer, "has_previous_state", {}).values())


def _refuse_positions(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
    """Let only positions through that count the tokens which the mask shows.

    Raises:
        ValueError: for others, and a mask of another size.
    """
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {[*mask.shape]} and input_ids are {[*input_ids.shape]}; give them the same shape"
        )
    if positions is None:
        return
    counted_BL = mask.long().cumsum(-1) - 1
    if positions.shape[-1] != len(input_ids[0]) or not ((positions == counted_BL) | (mask == 0)).all():
        raise ValueError(
            "position_ids other than those that the attention mask gives are not supported; leave them out, or use plain generate"
        )


def _padded_output(input_ids: Tensor, rows: list[list[int]], config: GenerationConfig) -> Tensor:
    pad = getattr(config, "_pad_token_tensor", None)
    fill = int(pad) if pad is not None else 0
    longest = max(map(len, rows))
    new = [row + [fill] * (longest - len(row)) for row in rows]
    return torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
