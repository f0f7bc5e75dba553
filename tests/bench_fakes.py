"""A small made-up engine, whose clock only the engine moves, for the tests of `outrider.bench`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from outrider import noise
from outrider.bench import runner
from outrider.bench.runner import Method, Run
from outrider.bench.tasks import Prompt

VOCAB, END = 8, 0


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeModel:
    """Logits that depend on the last token only; ids 1 to 7 are written for ever unless `ends` lets 0 in."""

    device = torch.device("cpu")

    def __init__(self, ends: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
        if not ends:
            self.table[:, END] = -60.0

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


class FakeEngine:
    """Writes the target's tokens one by one and pretends to have drafted them.

    `wrong_at` makes speculation write the second choice there, `bias` makes rule mss write token 1 that often.
    """

    name, drafter = "fake", SimpleNamespace(name="pretence")

    def __init__(self, *, dtype: torch.dtype = torch.float32, ends: bool = False, clock: Clock | None = None) -> None:
        self.model, self.dtype, self.clock = FakeModel(ends, dtype), dtype, clock
        self.seconds_per_token: dict[object, float] = {}
        self.wrong_at: int | None = None
        self.bias = 0.0
        self.drafts = True
        self.exact = False
        self.calls: list[object] = []
        self.model_eos = [END]

    def encode(self, prompt: str | list[dict[str, str]], chat: bool = True) -> list[int]:
        return [1 + len(prompt) % (VOCAB - 1)] if chat else [2] * len(prompt)

    def generate(
        self,
        ids: list[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        shape: object = "auto",
        rule: str = "coupled",
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> SimpleNamespace:
        self.calls.append(shape)
        generator = torch.Generator().manual_seed(seed or 0)
        new: list[int] = []
        while len(new) < max_new_tokens and END not in new:
            scores = self.model.table[[*ids, *new][-1]].double()
            if temperature > 0:
                scores = runner.process(scores, temperature, top_k, top_p)
            if temperature > 0 and rule == "mss":
                biased = new and float(torch.rand(1, generator=generator)) < self.bias
                new.append(1 if biased else int(torch.multinomial(scores.exp(), 1, generator=generator)))
                continue
            if temperature > 0:
                scores = scores + noise.gumbel(seed or 0, noise.TARGET, len(ids) + len(new), VOCAB)
            wrong = shape != "off" and len(new) == self.wrong_at
            new.append(int(scores.argsort(descending=True)[1 if wrong else 0]))
        if self.clock:
            self.clock.now += len(new) * self.seconds_per_token.get(shape, 1.0)
        return SimpleNamespace(token_ids=new, stats=self.stats(len(new), shape))

    def stats(self, tokens: int, shape: object) -> SimpleNamespace:
        """Rounds of two tokens, one of them drafted; plain decoding drafts nothing."""
        speculative = shape != "off" and self.drafts
        rounds = (tokens + 1) // 2 if speculative else tokens
        accepted = tokens - rounds
        seconds = {"prefill": 0.5, "draft": 0.1, "verify": 0.2, "commit": 0.1, "total": 1.0}
        counts = {"rounds": rounds, "emitted": tokens, "accepted": accepted}
        counts |= {"drafted": 3 * rounds, "tried": rounds} if speculative else {"drafted": 0, "tried": 0}
        return SimpleNamespace(**counts, seconds=seconds)


def prompts(count: int, task: str = "t") -> list[Prompt]:
    return [Prompt(task, str(i), ({"role": "user", "content": "x" * i},)) for i in range(count)]


def fixed(name: str, clock: Clock, answers: list[tuple[list[int], float]], log: list[str]) -> Method:
    """A method that writes given tokens in given seconds, one answer after the other."""
    left = iter(answers)

    def run(ids: list[int], max_new_tokens: int) -> Run:
        log.append(name)
        tokens, seconds = next(left)
        return Run(tokens, seconds)

    return Method(name, run)
