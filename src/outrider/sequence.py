"""One sequence in flight: its tokens, its stop rules, and what was reported about each emitted token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.options import Options
from outrider.sampling import Sampler
from outrider.scores import Scores
from outrider.stats import Stats
from outrider.stop import Decoder, TextStream
from outrider.tree import TokenTree
from outrider.verify import Draft, Verdict, verify_coupled, verify_mss

TEXT_CONTEXT = 16  # prompt tokens that the text decoder sees


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of an emitted token, and the most likely alternatives as (token, logprob)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """A token as it is committed.

    Args:
        row: which prompt of the call.
        token: its id.
        text: text that became final with it; may be empty, or hold characters of earlier tokens.
        drafted: whether a drafter proposed it.
        logprob: when asked for.
    """

    row: int
    token: int
    text: str
    drafted: bool
    logprob: TokenLogprob | None = None


@dataclass
class Sequence:
    """A prompt and what was written after it."""

    row: int
    ids: list[int]
    sampler: Sampler
    options: Options
    eos: frozenset[int]
    limit: int
    """Most tokens of prompt and text together that the target's context allows."""
    tokenizer: Decoder | None
    prompt_length: int = field(init=False)
    finish_reason: str | None = None
    stop_when: Callable[[list[int]], bool] | None = None
    """A further stop rule on prompt and text, asked after every token."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)
        context = self.ids[-TEXT_CONTEXT:]
        self.text = TextStream(self.tokenizer, context, self.options.stop_strings, self.options.skip_special_tokens)
        if self.remaining == 0:
            self.finish_reason = "length"

    @property
    def new_ids(self) -> list[int]:
        """Tokens written after the prompt."""
        return self.ids[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be written."""
        return max(0, min(self.options.max_new_tokens - len(self.new_ids), self.limit - len(self.ids)))

    def verify(self, draft: Draft, scores: Scores) -> Verdict:
        """Apply the rule in force."""
        if self.options.rule == "coupled":
            if self.options.logprobs is not None:
                scores = Scores(scores.logits_NV)  # they are made anyway
            return verify_coupled(draft.tree, self.sampler.picker(self.ids, draft.tree, scores), self.eos)
        tree, sampler, logits_NV = draft.tree, self.sampler, scores.logits_NV

        def position(node: int) -> int:
            return len(self.ids) + tree.depths[node]

        return verify_mss(
            tree,
            draft.trials,
            lambda node: sampler.law([*self.ids, *tree.path_tokens(node)[1:]], logits_NV[node]),
            lambda node, trial: sampler.accept_uniform(position(node), trial),
            lambda node, law_V: sampler.draw(position(node), law_V),
            self.eos,
        )

    def emit(self, tree: TokenTree, verdict: Verdict, scores: Scores) -> list[Piece]:
        """Append a round's tokens one by one, up to the first that ends the sequence."""
        tokens = [tree.tokens[node] for node in verdict.path[1:]] + [verdict.next_token]
        pieces = []
        for place, token in enumerate(tokens):
            entry = None
            if self.options.logprobs is not None:
                entry = self._logprob(token, scores.logits_NV[verdict.path[place]])
                self.logprobs.append(entry)
            self.ids.append(token)
            self.text.push(token)
            self.finish_reason = self._finished(token)
            if self.finish_reason:
                self.text.finish()
            piece = self.text.take(final=self.finish_reason is not None)
            pieces.append(Piece(self.row, token, piece, place < verdict.accepted, entry))
            if self.finish_reason:
                break
        return pieces

    def _finished(self, token: int) -> str | None:
        if token in self.eos or self.text.stopped or (self.stop_when is not None and self.stop_when(self.ids)):
            return "stop"
        return "length" if self.remaining == 0 else None

    def _logprob(self, token: int, logits_V: Tensor) -> TokenLogprob:
        """Of the law after the tokens so far."""
        if self.options.logprobs_mode == "raw":
            logp_V = logits_V.float().log_softmax(-1)
        else:
            logp_V = self.sampler.scores([self.ids], logits_V[None])[0].log_softmax(-1)
        values, tokens = torch.topk(logp_V, min(self.options.logprobs or 0, len(logp_V)))
        # to the host in one copy; float32 holds token ids exactly
        own, *both = torch.cat([logp_V[token : token + 1], tokens.float(), values]).tolist()
        return TokenLogprob(token, own, list(zip(map(int, both[: len(tokens)]), both[len(tokens) :])))


def alive(sequences: Seq[Sequence]) -> list[int]:
    """Indexes of sequences that still write."""
    return [i for i, sequence in enumerate(sequences) if sequence.finish_reason is None]
