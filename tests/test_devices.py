"""Nothing mixes devices, and rounds wait for the device as rarely as they can: found on a device that is not there."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCAB, tiny
from helpers import OPTIONS, PROMPT, PROMPTS, SHAPES, expected
from native_kernels import without_kernels
from outrider.api import Engine
from outrider.drafters.feature_head import HeadDrafter, HeadModel
from outrider.drafters.lm import LMDrafter
from outrider.models.feature_head import CORES
from outrider.models.mamba_drafter import MambaModel
from outrider.models.selftest import tree_model
from outrider.train import workshop
from outrider.train.batches import make_batch
from outrider.train.data import make_held_out
from outrider.train.distil import DistilSettings, Trainer, predicted_acceptance
from outrider.train.features import Example
from outrider.train.linearize import linearize
from outrider.train.llama_student import LlamaStudent, new_llama
from outrider.train.prune import prune
from outrider.train.students import HeadStudent, MambaStudent, Student, new_head, new_mamba
from strict_device import DEVICE, StrictTensor, counting, strict_device
from workshop_fixtures import run

pytest_plugins = ["workshop_fixtures"]
FAMILIES = ("llama", "gemma3", "gpt2", "mamba", "mamba2", "qwen3_5_text", "lfm2", "rwkv")
TAPS = (0, 1)


@pytest.fixture
def device() -> Iterator[torch.device]:
    with strict_device() as found:
        yield found


def moved(family: str, seed: int = 0) -> Any:
    return copy.deepcopy(tiny(family, seed)).to(DEVICE)


# -- the device itself -------------------------------------------------------------------------------------------------


def test_the_device_refuses_what_a_gpu_refuses(device: torch.device) -> None:
    ours, host = torch.ones(3, device=device), torch.ones(3)
    for mixed in (
        lambda: ours + host,
        lambda: host + ours,
        lambda: torch.cat([ours, host]),
        lambda: ours.index_select(0, torch.tensor([0])),
        lambda: host.add_(ours[0]),
        lambda: torch.nn.functional.linear(ours[None], torch.ones(2, 3)),
    ):
        with pytest.raises(RuntimeError, match="and on the host"):
            mixed()
    with pytest.raises(TypeError, match="copy the tensor to the host first"):
        ours.numpy()
    assert (ours * 2 + torch.tensor(1.0)).tolist() == [3.0, 3.0, 3.0]  # single numbers of the host are welcome
    assert host.copy_(ours).device.type == "cpu" and ours[[0, 2]].device == device


def test_the_device_counts_what_makes_the_host_wait(device: torch.device) -> None:
    ours = torch.ones(3, device=device)
    for count, work in (
        (0, lambda: ours[1:] * 2 + torch.tensor([1.0], device=device)),
        (1, lambda: float(ours[0])),
        (1, lambda: bool(ours[0] > 0)),
        (1, lambda: ours.tolist()),
        (1, lambda: ours[ours > 0]),
        (1, lambda: ours.cpu()),
    ):
        for inference in (False, True):
            with torch.inference_mode(inference), counting() as waits:
                work()
            assert waits == [count]


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_the_reference_texts(family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moved(family)
    drafter = LMDrafter(tree_model(moved("llama", 1))[0], "llama-1")
    engine = Engine(model, None, family, [drafter, "ngram"])
    without_kernels(monkeypatch)  # which are for the CPU
    assert (
        engine.way.way == Engine(copy.deepcopy(tiny(family)), None, family, "off").way.way
    )  # none was lost to the device
    for key, shape in (("greedy", "3x2x2"), ("bias", "chain")) if family != "rwkv" else (("sampled", "chain"),):
        result = engine.generate(list(PROMPT), shape=SHAPES[shape], max_new_tokens=8, **OPTIONS[key])
        assert result.token_ids == expected(family, max_new_tokens=8, **OPTIONS[key])


def test_every_rule_and_option_runs(device: torch.device) -> None:
    engine = Engine(moved("llama"), None, "llama", LMDrafter(tree_model(moved("mamba", 1))[0], "mamba-1"))
    for key in OPTIONS:
        for shape in ("best6x2@0.01", (2, 1)):
            result = engine.generate(list(PROMPT), shape=shape, max_new_tokens=6, logprobs=2, **OPTIONS[key])
            assert result.token_ids == expected("llama", max_new_tokens=6, **OPTIONS[key])
    for draft_sampling in ("iid", "without_replacement"):
        options = {"temperature": 1.0, "seed": 3, "rule": "mss", "draft_sampling": draft_sampling}
        assert len(engine.generate(list(PROMPT), shape=(2, 1), max_new_tokens=6, **options).token_ids) == 6
    results = engine.generate([list(p) for p in PROMPTS], shape=2, max_new_tokens=6)
    assert [r.token_ids for r in results] == [expected("llama", p, max_new_tokens=6) for p in PROMPTS]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 1}], ids=["greedy", "sampled"])
def test_a_round_waits_once_for_the_target_and_twice_a_level_for_the_drafter(
    options: dict[str, Any], device: torch.device
) -> None:
    for drafter, levels in (("ngram", 0), (LMDrafter(tree_model(moved("llama", 1))[0], "llama-1"), 3)):
        engine = Engine(moved("llama"), None, "llama", drafter)
        waits = []
        for new in (4, 16):
            with counting() as count:
                stats = engine.generate(list(PROMPT), shape="2x1x1@0.0001", max_new_tokens=new, **options).stats
            waits.append((count[0], stats.rounds))
        (few, short), (many, long) = waits
        assert many - few <= (1 + 2 * levels) * (long - short)


def test_exact_steps_aside_with_a_reason(device: torch.device) -> None:
    with pytest.raises(ValueError, match="no device but a CPU; leave out exact"):
        Engine(moved("llama"), None, "llama", "off", exact=True)


# -- training ----------------------------------------------------------------------------------------------------------


def answers(engine: Engine) -> list[Example]:
    """Examples as they come from files: on the host."""
    made = []
    for number in range(3):
        ids = torch.tensor([(7 * number + i * i) % VOCAB for i in range(16)])
        hidden = engine.target.begin([ids.tolist()], 0, TAPS).features[0].cpu()
        made.append(Example(ids, 4, 0.0, lambda hidden=hidden: hidden))
    return made


def student_of(kind: str, engine: Engine, examples: list[Example]) -> Student:
    if kind == "mamba":
        return MambaStudent(engine, new_mamba(engine, examples, VOCAB, seed=0, layers=1))
    if kind == "llama":
        return LlamaStudent(engine, new_llama(engine, 1, 0), torch.arange(VOCAB))
    return HeadStudent(engine, new_head(engine, examples, TAPS, VOCAB - 8, 0, kind, window=8))


@pytest.mark.parametrize("kind", [*CORES, "mamba", "llama"])
def test_every_student_trains_where_its_target_is(kind: str, device: torch.device, tmp_path: Path) -> None:
    """The same loss as on a CPU, parameters that move, a checkpoint that goes on, and a drafter that drafts."""
    settings = DistilSettings(minutes=1, steps=2, ramp=0.0, batch_tokens=256)
    losses: dict[str, list[float]] = {}
    for place in ("host", "device"):
        engine = Engine(moved("llama") if place == "device" else tiny("llama"), None, "llama", "off")
        examples, out = answers(engine), tmp_path / place
        batch, student = make_batch(examples), student_of(kind, engine, examples)
        out.mkdir()
        trainer = Trainer(student, settings, out)
        found = [trainer._update(batch, 0.0) for _ in range(2)]
        trainer.save()
        again = Trainer(student_of(kind, engine, examples), settings, out)
        losses[place] = [*found, again._update(batch, 0.0)]
        lengths = predicted_acceptance(again.student, examples, 2)
        assert 1.0 <= lengths["acceptance_length"] <= 3.0
    # products are bf16 on the host only: there is no autocast for a device that is not there
    assert losses["device"] == pytest.approx(losses["host"], rel=0.02)
    assert all(isinstance(p, StrictTensor) for p in again.module.parameters())
    if kind != "llama":
        borrowed = engine.model.get_input_embeddings(), engine.model.get_output_embeddings()
        drafter = (
            HeadDrafter(HeadModel(again.student.head, *borrowed))
            if isinstance(again.student, HeadStudent)
            else LMDrafter(MambaModel(again.student.blocks, *borrowed), "mamba")
        )
        drafting = Engine(engine.model, None, "llama", drafter)
        result = drafting.generate(list(PROMPT), shape=(2, 1, 1), max_new_tokens=8)
        assert result.token_ids == expected("llama", max_new_tokens=8)


def test_autocast_is_for_the_device(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(moved("llama"), None, "llama", "off")
    examples, asked = answers(engine), list[str]()
    student = student_of("ssm", engine, examples)
    real = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda kind, **more: asked.append(kind) or real(kind, **more))
    Trainer(student, DistilSettings(minutes=1), tmp_path).loss(make_batch(examples), 1)
    predicted_acceptance(student, examples, 2)
    assert set(asked) == {device.type}


def test_targets_are_pruned_and_linearized_where_they_are(device: torch.device, tmp_path: Path) -> None:
    rng, found = random.Random(0), []
    texts = [torch.tensor([rng.randrange(VOCAB) for _ in range(24)]) for _ in range(4)]
    for model in (tiny("llama"), moved("llama")):
        engine = Engine(model, None, "llama", "off")
        small = prune(engine, 1, 0.5, texts)
        made, _ = linearize(engine, torch.stack(texts).to(model.device), None, tmp_path / model.device.type)
        assert {p.device.type for p in (*small.model.parameters(), *made.parameters())} == {model.device.type}
        ids = torch.tensor([list(PROMPT)], device=model.device)
        found.append([m(input_ids=ids).logits.cpu() for m in (small.model, made)])
    for got, wanted in zip(*found):
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_workshop_follows_device(
    small: None, target: Path, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """data, distil and evaluate with --device, from an empty folder to figures."""
    monkeypatch.setattr(workshop, "MEASURED", 1)
    monkeypatch.setattr(workshop, "make_held_out", functools.partial(make_held_out, max_new_tokens=10))

    def command(name: str, *more: object) -> str:
        code, out, err = run(name, "--target", target, "--dtype", "fp32", "--device", device, *more, "--json")
        assert code == 0, err
        return out

    data, head = tmp_path / "data", tmp_path / "head"
    command(
        "data", "--out", data, "--tokens", 600, "--max-new-tokens", 16, "--sources", "tasks,templates", "--taps", "0,1"
    )
    training = ("--minutes", 0.001, "--batch-tokens", 256, "--draft-vocab", 200)
    command("distil", "--data", data, "--out", head, *training, "--taps", "0,1")
    command("evaluate", "--drafter", head, "--tasks", "gsm8k", "--limit", 1, "--max-new-tokens", 8)
