"""From logits to tokens: processors that see a node's own path, and noise keyed by position.

A `Sampler` serves one sequence. It turns logits after any token sequence into the processed law, and picks from it. Target
and drafter go through the same processing, so that both are compared as what they would really write.

Shapes: R rows (nodes), L tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider import noise
from outrider.native.highest import highest
from outrider.options import LogitsProcessor, Options
from outrider.scores import Scores
from outrider.tree import TokenTree

FARTHEST = 16  # positions of a round whose noise is kept


class LogitBias:
    """Adds a constant to the logits of some tokens."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.ids, self.values = list(bias), list(bias.values())

    def __call__(self, ids_RL: Tensor, scores_RV: Tensor) -> Tensor:
        scores_RV = scores_RV.clone()
        scores_RV[:, self.ids] += torch.tensor(self.values, dtype=scores_RV.dtype, device=scores_RV.device)
        return scores_RV


class NewTokenPenalty:
    """Presence and frequency penalties over the tokens written after the prompt (OpenAI's definition)."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, ids_RL: Tensor, scores_RV: Tensor) -> Tensor:
        new_RL = ids_RL[:, self.prompt_length :]
        counts_RV = torch.zeros_like(scores_RV)
        counts_RV.scatter_add_(1, new_RL, torch.ones_like(new_RL, dtype=scores_RV.dtype))
        return scores_RV - self.frequency * counts_RV - self.presence * (counts_RV > 0)


def build_processors(options: Options, prompt_length: int, eos: frozenset[int], device: str) -> list[LogitsProcessor]:
    """What changes logits before the temperature, in transformers' order."""
    chain: list[LogitsProcessor] = []
    if options.logit_bias:
        chain.append(LogitBias({int(k): float(v) for k, v in options.logit_bias.items()}))
    if options.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.presence_penalty or options.frequency_penalty:
        chain.append(NewTokenPenalty(prompt_length, options.presence_penalty, options.frequency_penalty))
    if options.no_repeat_ngram_size:
        chain.append(NoRepeatNGramLogitsProcessor(options.no_repeat_ngram_size))
    if options.bad_words_ids:
        words = [list(map(int, word)) for word in options.bad_words_ids]
        chain.append(NoBadWordsLogitsProcessor(words, eos_token_id=sorted(eos) or None))
    if options.min_new_tokens and eos:
        chain.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, options.min_new_tokens, sorted(eos), device=device)
        )
    return [*chain, *options.logits_processor]


def build_warpers(options: Options) -> list[LogitsProcessor]:
    """What cuts the law after the temperature, in transformers' order; nothing when greedy."""
    chain: list[LogitsProcessor] = []
    if options.temperature == 0:
        return chain
    if options.top_k:
        chain.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        chain.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0.0:
        chain.append(MinPLogitsWarper(options.min_p))
    if options.typical_p < 1.0:
        chain.append(TypicalLogitsWarper(options.typical_p))
    return chain


class Sampler:
    """Laws and picks of one sequence.

    Args:
        options: what the caller asked for.
        seed: the seed in force.
        prompt_length: tokens before the first new one.
        eos: ids that end the text.
        vocab: size of the target's vocabulary, V.
        device: where logits live.
    """

    def __init__(
        self,
        options: Options,
        seed: int,
        prompt_length: int,
        eos: frozenset[int],
        vocab: int,
        device: torch.device | str = "cpu",
    ) -> None:
        for token in [*options.logit_bias, *(t for word in options.bad_words_ids for t in word)]:
            if not 0 <= int(token) < vocab:
                raise ValueError(
                    f"token id {token} is outside the vocabulary of {vocab}; check logit_bias and bad_words_ids"
                )
        self.options, self.seed, self.vocab, self.device = options, seed, vocab, torch.device(device)
        self.eos = eos
        self.greedy = options.temperature == 0
        self.processors = build_processors(options, prompt_length, eos, str(device))
        self.warpers = build_warpers(options)
        self.bare = not self.processors and not self.warpers  # the law is logits over the temperature, and no more
        self._noise: dict[int, Tensor] = {}

    def scores(self, ids: Sequence[Sequence[int]] | None, logits_RV: Tensor) -> Tensor:
        """Processed, tempered, cut logits, float32 [R, V], after each of R token sequences of one length.

        Args:
            ids: the sequences; only processors read them, without any they may be None.
        """
        scores_RV = logits_RV.float()
        ids_RL = torch.empty(len(scores_RV), 0, dtype=torch.long, device=scores_RV.device)
        if self.processors:
            ids_RL = torch.tensor(ids, dtype=torch.long, device=scores_RV.device)
            if scores_RV.data_ptr() == logits_RV.data_ptr():
                scores_RV = scores_RV.clone()  # some processors write into their argument
            for processor in self.processors:
                scores_RV = _same_shape(processor(ids_RL, scores_RV), scores_RV, processor)
        if not self.greedy:
            scores_RV = scores_RV / self.options.temperature
            for warper in self.warpers:
                scores_RV = warper(ids_RL, scores_RV)
        return scores_RV

    def noise(self, position: int, size: int, device: torch.device) -> Tensor:
        """The target's noise for the token at `position`, [size]; zero when greedy."""
        if self.greedy:
            return torch.zeros(size, device=device)
        if position not in self._noise:
            # rounds look only a tree's depth ahead; what lies far behind is not asked for again
            self._noise = {known: held for known, held in self._noise.items() if known + FARTHEST >= position}
            self._noise[position] = noise.gumbel(self.seed, noise.TARGET, position, self.vocab, device)
        return self._noise[position][:size]

    def perturbed(self, ids: Sequence[Sequence[int]], logits_RV: Tensor) -> Tensor:
        """Scores plus the target's noise at the next position: its argmax is what the coupled rule picks."""
        scores_RV = self.scores(ids, logits_RV)
        if self.greedy:
            return scores_RV
        return scores_RV + self.noise(len(ids[0]), scores_RV.shape[-1], scores_RV.device)

    def pick(self, ids: Sequence[int], logits_V: Tensor) -> int:
        """The token that the coupled rule writes after `ids`; ties go to the lowest id."""
        if self._takes_highest(logits_V.device) and not self.greedy:
            return self._drawn(len(ids), Scores(logits_V[None]), 0)
        return self._picked(logits_V[None], self.perturbed([ids], logits_V[None]))[0]

    def _takes_highest(self, device: torch.device) -> bool:
        """Whether picks ask for the highest scores alone."""
        return self.bare and device.type == "cpu"

    def _drawn(self, position: int, scores: Scores, node: int) -> int:
        """The token at a position, drawn after a node."""
        noise_V, nodes = self.noise(position, scores.vocab, scores.device), slice(node, node + 1)
        tokens, values = scores.highest(nodes, self.options.temperature, noise_V)
        # noise is finite, so that logits are where the sum is
        return _sound(tokens, values if math.isfinite(values[0]) else scores.highest(nodes)[1], values)[0]

    def _picked(self, logits_NV: Tensor, perturbed_NV: Tensor) -> list[int]:
        """The best tokens of N rows. What they are and whether they are sound comes to the host in one copy.

        Raises:
            ValueError: for logits that no law can be made of, or where processors left no token.
        """
        if perturbed_NV.device.type == "cpu":
            tokens, values = highest(perturbed_NV)
            return _sound(tokens, *([] if perturbed_NV is logits_NV else [highest(logits_NV)[1]]), values)
        checked = [] if perturbed_NV is logits_NV else [logits_NV.amax(-1)]
        highest_N, tokens_N = perturbed_NV.max(-1)
        # token ids are whole numbers far below 2**24, which float32 holds exactly
        picked, *found = torch.stack([t.float() for t in (tokens_N, *checked, highest_N)]).tolist()
        return _sound([int(token) for token in picked], *found)

    def law(self, ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """The processed law after `ids`, probabilities [V]; one-hot at the argmax when greedy."""
        scores_V = self.scores([ids], logits_V[None])[0]
        (best,) = self._picked(logits_V[None], scores_V[None])
        if self.greedy:
            law_V = torch.zeros_like(scores_V)
            law_V[best] = 1.0
            return law_V
        return scores_V.softmax(-1)

    def picker(self, ids: Sequence[int], tree: TokenTree, scores: Scores) -> Callable[[int], int]:
        """The coupled rule's pick at a node of a tree rooted at the last token of `ids`.

        Where nothing but temperature and noise is between logits and picks, these ask for the highest scores alone. Without
        processors, which want to see their paths, greedy picks of all nodes are made in one go, and elsewhere than on a CPU all
        others, since waiting for the device costs more than its work. Else only nodes that the walk visits are processed.
        """
        if self._takes_highest(scores.device):
            if self.greedy:
                tokens, values = scores.highest(slice(len(tree)))  # what is behind are padding nodes
                return _sound(tokens, values).__getitem__
            return lambda node: self._drawn(len(ids) + tree.depths[node], scores, node)
        logits_NV = scores.logits_NV
        if not self.processors and (self.greedy or logits_NV.device.type != "cpu"):
            return self._picks(len(ids), tree, logits_NV[: len(tree)]).__getitem__
        return lambda node: self.pick([*ids, *tree.path_tokens(node)[1:]], logits_NV[node])

    def _picks(self, length: int, tree: TokenTree, logits_NV: Tensor) -> list[int]:
        """The coupled rule's picks at all nodes of a tree whose root is token `length` of its text."""
        if self.greedy:
            return self._picked(logits_NV, logits_NV)
        vocab, device = logits_NV.shape[-1], logits_NV.device
        noise_DV = torch.stack([self.noise(length + depth, vocab, device) for depth in range(max(tree.depths) + 1)])
        depths_N = torch.tensor(tree.depths, device=device)
        return self._picked(logits_NV, self.scores(None, logits_NV) + noise_DV.index_select(0, depths_N))

    def accept_uniform(self, position: int, trial: int) -> float:
        """The number that decides a trial of multi-step speculative sampling."""
        return noise.uniform(self.seed, noise.ACCEPT, position, trial)

    def draw(self, position: int, law_V: Tensor) -> int:
        """A token from a law, by a stream that neither drafter nor acceptance uses."""
        gumbel_V = noise.gumbel(self.seed, noise.RESIDUAL, position, len(law_V), law_V.device)
        return int((law_V.log() + gumbel_V).argmax())

    def draft_noise(self, salt: int, position: int, size: int, device: torch.device) -> Tensor:
        """Noise for a drafter's own draws; `salt` must differ from round to round."""
        return noise.gumbel(noise.mix(self.seed, salt), noise.DRAFT, position, size, device)


def _same_shape(out: object, before: Tensor, processor: object) -> Tensor:
    if not isinstance(out, Tensor) or out.shape != before.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"logits_processor {processor!r} returned {got}; it must return scores of shape {tuple(before.shape)}"
        )
    return out


def _sound(tokens: list[int], *found: list[float]) -> list[int]:
    """The tokens.

    Args:
        found: the highest logits of their rows, and last what processing and noise made of them.
    """
    for known in found[0]:
        _refuse_not_finite(known)
    for known in found[-1]:
        _refuse_impossible(known)
    return tokens


def _refuse_impossible(highest: float) -> None:
    if not math.isfinite(highest):
        raise ValueError(
            "after processing no token is possible; check bad_words_ids, no_repeat_ngram_size, logit_bias and logits_processor"
        )


def _refuse_not_finite(highest: float) -> None:
    if not math.isfinite(highest):
        raise ValueError("the model's logits are not finite; check its weights, or load it with dtype float32")
