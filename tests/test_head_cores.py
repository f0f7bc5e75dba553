"""Feature heads of every core: training and drafting compute the same, text stays the target's, acceptance is as predicted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCAB, tiny
from helpers import PROMPT, PROMPTS, expected
from outrider.api import Engine
from outrider.drafters import feature_head
from outrider.drafters.feature_head import HeadDrafter, HeadModel, HeadState
from outrider.drafters.folder import load_drafter, save_head
from outrider.models.feature_head import CORES, FeatureHead, HeadConfig, unrolled_attention
from outrider.models.fingerprint import fingerprint
from outrider.models.scans import UnrolledScan
from outrider.train.batches import Batch, make_batch
from outrider.train.distil import DistilSettings, Trainer, predicted_acceptance
from outrider.train.features import Example
from outrider.train.kinds import graft
from outrider.train.students import HeadStudent, new_head

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("on_device")]
TAPS = (0, 1)
DRAFTED = VOCAB - 8


# -- heads of every core -----------------------------------------------------------------------------------------------


def head(core: str, dtype: torch.dtype = torch.float64, seed: int = 7) -> FeatureHead:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"ssm_heads": 2, "ssm_head_size": 8, "ssm_state": 6, "window": 7}
    made = FeatureHead(HeadConfig(32, TAPS, 4, 2, 48, VOCAB - 8, core=core, **sizes)).to(dtype)
    made.draft_ids = torch.randperm(VOCAB)[: VOCAB - 8].sort().values
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return made.requires_grad_(False)


def model(core: str, dtype: torch.dtype = torch.float64) -> HeadModel:
    target = tiny("llama")
    embedding = torch.nn.Embedding.from_pretrained(target.get_input_embeddings().weight.to(dtype))
    unembedding = torch.nn.Linear(32, VOCAB, bias=False).to(dtype)
    unembedding.weight = torch.nn.Parameter(target.get_output_embeddings().weight.to(dtype), requires_grad=False)
    return HeadModel(head(core, dtype), embedding, unembedding)


def text(length: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randint(0, VOCAB, (length,)).tolist(), torch.randn(length, 64, dtype=torch.float64)


def begun(made: HeadModel, rows: list[tuple[list[int], torch.Tensor]]) -> HeadState:
    """A state that has committed all but the last token of each text."""
    state = made.begin([ids for ids, _ in rows], 32)
    state.see([hidden[:-1] for _, hidden in rows])
    state.extend([ids[:-1] for ids, _ in rows], [range(-1, len(ids) - 2) for ids, _ in rows])
    state.commit([range(len(ids) - 1) for ids, _ in rows])
    return state


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """What the head was cut to; tokens of the text, which joined it, follow in the order of the text."""
    torch.testing.assert_close(got[..., :DRAFTED], wanted[..., :DRAFTED], atol=1e-9, rtol=1e-9)


class Whole(torch.Tensor):
    """Keeps all its digits: float() would cost those that the tests below look at."""

    def float(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class Bare(HeadStudent):
    """A student of a head and an embedding, without a target's files."""

    def __init__(self, made: HeadModel) -> None:
        self.head, self.made = made.head, made

    def embed(self, batch: Batch) -> torch.Tensor:
        embedded_BTD: torch.Tensor = self.made.embedding(batch.ids_BT)
        return embedded_BTD


def unrolled(made: HeadModel, ids: list[int], hidden: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Logits of the training form, [T, V] for every step."""
    batch = Batch(torch.tensor([ids]), hidden[None].as_subclass(Whole), torch.ones(1, len(ids), dtype=torch.bool))
    return [made.cut(out)[0] for out in Bare(made).outputs(batch, steps)]


@pytest.mark.parametrize("core", CORES)
def test_training_equals_drafting(core: str) -> None:
    made, (ids, hidden), depth = model(core), text(26), 4
    steps = unrolled(made, ids, hidden, depth + 1)
    for root in (9, 14, 21):
        state = begun(made, [(ids[: root + 1], hidden[: root + 1])])
        # teacher forced: the drafted chain carries the text's own tokens, and a sibling that must not leak into it
        got = [state.extend([[ids[root]]], [[-1]])[0, 0]]
        node = 0
        for step in range(1, depth + 1):
            pair = state.extend([[(ids[root + step] + 1) % VOCAB, ids[root + step]]], [[node, node]])
            got.append(pair[0, 1])
            node = state.pending - 1
        for step in range(depth + 1):
            close(got[step], steps[step][root + step])


@pytest.mark.parametrize("core", CORES)
def test_commit_then_continue_equals_fresh(core: str) -> None:
    made, (ids, hidden) = model(core), text(24)
    state = begun(made, [(ids[:12], hidden[:12])])
    for start, end in ((11, 15), (15, 16), (16, 23)):
        state.extend([[ids[start]]], [[-1]])
        state.extend([[3, 4]], [[0, 0]])  # drafts that come to nothing
        state.commit([[0]])
        state.see([hidden[start:end]])
        state.extend([ids[start + 1 : end]], [range(-1, end - start - 2)]) if end - start > 1 else None
        state.commit([range(end - start - 1)])
    fresh = begun(made, [(ids, hidden)])
    assert state.lengths == fresh.lengths
    for tokens, parents in (([ids[-1]], [-1]), ([4, 5], [0, 0])):
        one, other = (s.extend([tokens], [parents]) for s in (state, fresh))
        close(one, other)


@pytest.mark.parametrize("core", CORES)
def test_batch_rows_equal_single_rows(core: str) -> None:
    made, rows = model(core), [text(5, 1), text(19, 2), text(11, 3)]
    levels: list[tuple[list[list[int]], list[list[int]]]] = [
        ([[1], [5], [6]], [[-1], [-1], [-1]]),
        ([[2, 3], [], [7]], [[0, 0], [], [0]]),
        ([[4], [], [8, 9]], [[1], [], [1, 1]]),
    ]
    together, alone = begun(made, rows), [begun(made, [row]) for row in rows]

    def check(order: list[int]) -> None:
        for tokens, parents in levels:
            got = together.extend([tokens[row] for row in order], [parents[row] for row in order])
            for place, row in enumerate(order):
                if tokens[row]:
                    wanted = alone[row].extend([tokens[row]], [parents[row]])
                    close(got[place, : len(tokens[row])], wanted[0])

    check([0, 1, 2])
    together.commit([[0, 2], [0], [0, 1]])
    for row, path in enumerate([[0, 2], [0], [0, 1]]):
        alone[row].commit([path])
        more = torch.randn(len(path), 64, dtype=torch.float64)
        alone[row].see([more])
        rows[row] = ([], more)
    together.see([more for _, more in rows])
    together.keep([2, 1, 0])
    check([2, 1, 0])


def test_the_core_decides_what_is_held() -> None:
    names = {core: {name.split(".")[0] for name in head(core).state_dict()} for core in CORES}
    assert "ssm" not in names["attention"] and {"qkv", "mixed"} <= names["attention"]
    assert "qkv" not in names["ssm"] and "ssm" in names["ssm"]
    assert {"qkv", "mixed", "ssm"} <= names["hybrid"]
    with pytest.raises(ValueError, match="core 'fourier' is unknown"):
        head("fourier")
    with pytest.raises(ValueError, match="needs sizes"):
        HeadConfig(32, TAPS, 4, 2, 48, 40, core="ssm")


@pytest.mark.parametrize("core", ["ssm", "hybrid"])
def test_cost_does_not_grow_with_the_text(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(core)
    state = begun(made, [text(60)])
    before = state.factors.bytes()
    for _ in range(6):
        state.see([torch.randn(30, 64, dtype=torch.float64)])
        state.extend([list(range(30))], [range(-1, 29)])
        state.commit([range(30)])
    assert state.factors.bytes() == before
    if core == "hybrid":
        read: list[int] = []
        real = torch.nn.functional.scaled_dot_product_attention

        def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
            read.append(k.shape[2])
            return real(q, k, v, **more)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        state.extend([[1]], [[-1]])
        assert read == [64]  # of 239 slots


# -- with an engine ----------------------------------------------------------------------------------------------------


def engine(core: str) -> Engine:
    target = tiny("llama")
    made = HeadModel(head(core, torch.float32), target.get_input_embeddings(), target.get_output_embeddings())
    return Engine(target, None, "llama", HeadDrafter(made))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("given", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 11}], ids=["greedy", "sampled"])
def test_text_is_the_targets(core: str, given: dict[str, Any]) -> None:
    speaking = engine(core)
    for shape in (4, (3, 2, 1)):
        result = speaking.generate(list(PROMPT), shape=shape, max_new_tokens=16, **given)
        assert result.token_ids == expected("llama", max_new_tokens=16, **given)
    results = speaking.generate([list(p) for p in PROMPTS], shape=(2, 1, 1), max_new_tokens=16, **given)
    assert [r.token_ids for r in results] == [expected("llama", p, max_new_tokens=16, **given) for p in PROMPTS]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("lengths", [(200, 3), (3, 200, 70), (1, 130)])
def test_short_and_long_prompts_side_by_side_are_read_in_pieces(core: str, lengths: tuple[int, ...]) -> None:
    """While a long one is still read, a short one has nothing to commit."""
    prompts = [[(3 * i + length) % VOCAB for i in range(length)] for length in lengths]
    results = engine(core).generate(prompts, shape=(2, 1), max_new_tokens=8)
    assert [r.token_ids for r in results] == [expected("llama", p, max_new_tokens=8) for p in prompts]


def answers(target: Engine, count: int, length: int) -> list[Example]:
    """The target's own greedy answers with their hidden states."""
    made = []
    for number in range(count):
        prompt = [(7 * number + i * i) % VOCAB for i in range(4)]
        ids = prompt + target.generate(prompt, shape="off", max_new_tokens=length).token_ids
        hidden = target.target.begin([ids], 0, TAPS).features[0]
        ids_T = torch.tensor(ids, device="cpu")  # examples come from files
        made.append(Example(ids_T, len(prompt), 0.0, lambda hidden=hidden: hidden.to("cpu", copy=True)))
    return made


@pytest.mark.parametrize("core", CORES)
def test_overfitting_pays_and_predictions_hold(core: str, tmp_path: Path) -> None:
    plain = Engine(tiny("llama"), None, "llama", "off")
    examples = answers(plain, 3, 24)
    student = HeadStudent(plain, new_head(plain, examples, TAPS, VOCAB, seed=0, core=core, window=8))
    trainer = Trainer(student, DistilSettings(minutes=1, steps=3, ramp=0.0, batch_tokens=256, rate=1e-2), tmp_path)
    batch = make_batch(examples)
    before, loss = (
        predicted_acceptance(student, examples, 3)["acceptance_length"],
        float(trainer.loss(batch, 3).detach()),
    )
    for _ in range(40):
        trainer._update(batch, 0.0)
    assert float(trainer.loss(batch, 3).detach()) < 0.7 * loss
    after = predicted_acceptance(student, examples, 3)["acceptance_length"]
    assert after > before + 0.4

    # drafting does what training promised: the head reads target features wherever the target has been
    spoken = Engine(tiny("llama"), None, "llama", HeadDrafter(HeadModel(student.head, *borrowed(plain))))
    rounds = emitted = 0
    for example in examples:
        result = spoken.generate(example.ids[: example.prompt_length].tolist(), shape=3, max_new_tokens=24)
        assert result.token_ids == example.ids[example.prompt_length :].tolist()
        rounds, emitted = rounds + result.stats.rounds, emitted + 24
    assert emitted / rounds == pytest.approx(after, rel=0.05)


def borrowed(engine: Engine) -> tuple[Any, Any]:
    return engine.model.get_input_embeddings(), engine.model.get_output_embeddings()


@pytest.mark.parametrize("core", CORES)
def test_folder_round_trip(core: str, tmp_path: Path) -> None:
    target = tiny("llama")
    made = head(core, torch.float32)
    save_head(made, tmp_path, {"target": "tiny", "fingerprint": fingerprint(target)}, "a card")
    loaded: Any = load_drafter(tmp_path, target)
    assert isinstance(loaded, HeadDrafter) and loaded.taps == TAPS
    model_back: Any = loaded.model
    assert model_back.head.config == made.config
    for name, tensor in made.state_dict().items():
        kept = model_back.head.state_dict()[name]
        torch.testing.assert_close(
            kept, tensor.to(torch.bfloat16).to(kept.dtype) if tensor.is_floating_point() else tensor
        )
    with pytest.raises(ValueError, match="not for this target"):
        load_drafter(tmp_path, tiny("llama", 1))


def test_old_configs_load() -> None:
    new = {"core", "window", "ssm_heads", "ssm_head_size", "ssm_state"}
    old = {k: v for k, v in dataclasses.asdict(head("attention").config).items() if k not in new}
    assert HeadConfig(**old).core == "attention"


@pytest.mark.parametrize(("old", "new"), [("attention", "hybrid"), ("ssm", "hybrid"), ("attention", "ssm")])
def test_a_head_keeps_what_it_learnt_when_it_gets_another_core(old: str, new: str) -> None:
    """A hybrid that was an attention head or a state-space head begins as that very head (within the window)."""
    known, fresh = head(old), head(new, seed=1)
    grafted = graft(fresh, known)
    assert torch.equal(grafted.fuse.weight, known.fuse.weight) and torch.equal(grafted.draft_ids, known.draft_ids)
    if new == "hybrid":
        embedded, features = torch.randn(2, 1, 6, known.config.width, dtype=torch.float64).unbind(0)
        positions = torch.arange(6)[None]
        outs = [m(embedded, features, positions, unrolled_attention([], []), UnrolledScan()) for m in (known, grafted)]
        torch.testing.assert_close(outs[0], outs[1])


def test_a_window_gives_up_what_nobody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unlike length, fed in pieces with drafts between: logits as if everything were kept, in constant memory."""
    texts, made = [text(700, 1), text(640, 2)], model("hybrid")

    def run(spare: int) -> tuple[list[torch.Tensor], HeadState, int]:
        monkeypatch.setattr(feature_head, "SPARE", spare)
        state, found, half = made.begin([[], []], 8), [], 0
        for at in range(0, 640, 20):
            part = slice(at, at + 20)
            state.see([hidden[part] for _, hidden in texts])
            found.append(state.extend([ids[part] for ids, _ in texts], [range(-1, 19)] * 2))
            found.append(state.extend([[3, 4], [5]], [[19, 19], [19]]))
            state.commit([range(20), range(20 if at else 11)])  # the second row lags behind
            half = state.bytes() if at == 320 else half
        return found, state, half

    kept, whole, _ = run(10**6)
    for spare in (64, 128):
        found, state, half = run(spare)
        assert state.forgotten > 400 and state.bytes() == half < whole.bytes()
        for got, wanted in zip(found, kept, strict=True):
            close(got, wanted)
