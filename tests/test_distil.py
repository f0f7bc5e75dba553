"""Training: distilling every kind, going on after kills, what is predicted and what is measured, pruning and boosting."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch

from families import tiny
from outrider.api import Engine
from outrider.drafters.feature_head import HeadDrafter, HeadModel
from outrider.drafters.folder import load_module
from outrider.models import files
from outrider.models.fingerprint import fingerprint
from outrider.models.mamba_mixer import MambaMixer
from outrider.train import boost as boost_module
from outrider.train import distil as distil_module
from outrider.train.batches import make_batch
from outrider.train.data import make_data, read_answers
from outrider.train.distil import DistilSettings, Trainer, predicted_acceptance, read_checkpoint
from outrider.train.features import compute_features, examples
from outrider.train.kinds import Plan, make_student, save_student
from outrider.train.llama_student import LlamaStudent
from outrider.train.prune import choose_layers, laws, prune
from outrider.train.students import HeadStudent, frequent_tokens
from outrider.train.workshop import distil
from workshop_fixtures import TRAINING, Killed, fail, head_student, kill_at, same_text, save_target, succeed

pytest_plugins = ["workshop_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


def test_a_head_folder_is_whole(head: Path, engine: Engine) -> None:
    config, text = json.loads((head / "config.json").read_text()), (head / "README.md").read_text()
    assert config["drafter"] == "head" and config["fingerprint"] == fingerprint(engine.model)
    assert config["measured_acceptance_length"] >= 1 and config["predicted_acceptance_length"] >= 1
    assert config["provenance"]["versions"]["torch"] and config["provenance"]["data"]["tokens"] == 1000
    assert "acceptance length" in text and "outrider generate" in text
    assert (head / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [
        ("--kind", "mamba", "--layers", 1),
        ("--kind", "llama", "--layers", 1, "--neurons", 32),
        ("--core", "ssm", "--optimizer", "adamw"),
        ("--core", "hybrid"),
    ],
    ids=lambda options: options[1],
)
def test_distil_makes_every_kind(engine: Engine, target: Path, data: Path, tmp_path: Path, options: tuple) -> None:
    found = succeed("distil", "--target", target, "--data", data, "--out", tmp_path / "d", *options, *TRAINING)
    assert found["measured_acceptance_length"] == pytest.approx(found["predicted_acceptance_length"], rel=0.2)
    same_text(engine, str(tmp_path / "d"))


@pytest.mark.parametrize("kind", ["mamba", "llama", "head"])
def test_neurons_are_a_drafters_width(engine: Engine, data: Path, tmp_path: Path, kind: str) -> None:
    settings = DistilSettings(minutes=0.01, draft_vocab=100)
    _, held, _ = head_student(engine, data)
    sizes = []
    for neurons in (32, 64):
        plan = Plan(kind, taps=(0, 1), layers=None if kind == "head" else 1, neurons=neurons)
        student = make_student(engine, plan, held, settings, tmp_path)
        sizes.append(sum(p.numel() for p in student.module.parameters() if p.requires_grad))
    assert sizes[1] - sizes[0] == 3 * 32 * engine.model.config.hidden_size


@pytest.mark.parametrize(("kind", "core"), [("mamba", "attention"), ("head", "ssm"), ("head", "hybrid")])
def test_a_mixer_has_the_state_size_that_was_asked_for(
    engine: Engine, data: Path, tmp_path: Path, kind: str, core: str
) -> None:
    _, held, _ = head_student(engine, data)
    plan = Plan(kind, core, taps=(0, 1), state=24)
    student = make_student(engine, plan, held, DistilSettings(minutes=0.01, draft_vocab=100), tmp_path)
    assert {m.state_size for m in student.module.modules() if isinstance(m, MambaMixer)} == {24}


def test_prompts_are_learnt_when_asked(engine: Engine, data: Path, tmp_path: Path) -> None:
    """With them every token but the first counts, and each has the target's law."""
    found, _, student = head_student(engine, data)
    answers, both = make_batch(found[:3]), make_batch(found[:3], prompts=True)
    lengths = [len(one.ids) for one in found[:3]]
    assert both.learnt_BT.sum(1).tolist() == [length - 1 for length in lengths]
    wrote = [length - one.prompt_length for length, one in zip(lengths, found)]
    assert answers.learnt_BT.sum(1).tolist() == wrote and not (answers.learnt_BT & ~both.learnt_BT).any()
    logits = engine.model(input_ids=found[0].ids[None], use_cache=False).logits[0, :-1][:, student.draft_ids]
    laws = student.laws(make_batch(found[:1], prompts=True))(slice(None))
    torch.testing.assert_close(laws, logits.float().log_softmax(-1), rtol=2e-2, atol=2e-2)
    counted = []
    for prompts in (False, True):
        (tmp_path / str(prompts)).mkdir()
        trainer = Trainer(student, DistilSettings(minutes=0.001, prompts=prompts), tmp_path / str(prompts))
        trainer.train(lambda: found, lambda: {"acceptance_length": 1.0})
        counted.append(trainer.tokens / trainer.updates)
    assert counted[1] > counted[0]


def test_a_trained_drafter_keeps_its_draft_vocabulary_unless_told(
    engine: Engine, data: Path, head: Path, tmp_path: Path
) -> None:
    taps = tuple(json.loads((head / "config.json").read_text())["head"]["taps"])
    found, plan = examples(data, taps), Plan(taps=taps, init=str(head))
    known = load_module(head, None)
    kept = make_student(engine, plan, found, DistilSettings(minutes=1), tmp_path)
    assert torch.equal(kept.draft_ids, known.draft_ids)
    less = make_student(engine, plan, found, DistilSettings(minutes=1, draft_vocab=50), tmp_path)
    assert torch.equal(less.draft_ids, frequent_tokens(found, 50, engine.target.vocab)) and less.cut_CD.shape[0] == 50
    assert isinstance(less, HeadStudent) and less.head.config.draft_vocab == 50
    save_student(engine, plan, less, tmp_path / "out", {"fingerprint": fingerprint(engine.model)}, "")
    same_text(engine, str(tmp_path / "out"))


def test_distil_goes_on_after_a_kill(engine: Engine, data: Path, tmp_path: Path) -> None:
    settings = DistilSettings(minutes=0.02, steps=1, batch_tokens=256, draft_vocab=100)
    plan, out = Plan("llama", layers=1), tmp_path / "out"
    with pytest.raises(Killed):
        distil(engine, data, out, plan, settings, every=0.3, tell=kill_at(2, "acceptance_length"))
    before = read_checkpoint(out / "run" / "checkpoint.safetensors")[1]
    assert 0 < before["seconds"] < 1.2 and not (out / "config.json").exists()
    student, known = distil(engine, data, out, plan, settings, every=0.3)
    after = read_checkpoint(out / "run" / "checkpoint.safetensors")[1]
    assert after["curve"][: len(before["curve"])] == before["curve"] and after["tokens"] > before["tokens"]
    assert 1.2 <= after["seconds"] < 2.4
    again, same = distil(engine, data, out, plan, settings, every=0.3)  # done: nothing is trained any more
    assert same["tokens_trained_on"] == known["tokens_trained_on"] == after["tokens"]
    weights = zip(student.module.parameters(), again.module.parameters())
    assert all(torch.equal(a, b) for a, b in weights)


def test_training_stops_early_without_gain(engine: Engine, data: Path, tmp_path: Path) -> None:
    settings = DistilSettings(minutes=1, steps=1, batch_tokens=256, draft_vocab=100)
    _, held, student = head_student(engine, data)
    trainer = Trainer(student, settings, tmp_path)
    lengths = iter([1.0, 2.0, 1.5, 1.9, 3.0])
    trainer.train(lambda: held, lambda: {"acceptance_length": next(lengths)}, every=0.0, patience=2)
    assert [point["acceptance_length"] for point in trainer.curve] == [1.0, 2.0, 1.5, 1.9]


def test_distil_mistakes_are_one_line(
    target: Path, data: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(*more: object, data: Path = data, target: Path = target) -> str:
        return fail("distil", "--target", target, "--data", data, "--out", tmp_path / "o", *TRAINING, *more)

    assert "no data set" in attempt(data=tmp_path)
    assert "written by" in attempt(target=save_target(tmp_path / "other", seed=4))
    assert "parrot" in attempt("--kind", "parrot")
    assert "hinge" in attempt("--loss", "hinge")
    assert "sgd" in attempt("--optimizer", "sgd")
    assert "--neurons" in attempt("--neurons", 0)
    assert "--neurons" in attempt("--neurons", 8, "--init", head)
    assert "--state" in attempt("--kind", "mamba", "--state", 0)
    assert "--state" in attempt("--kind", "llama", "--state", 8)
    assert "--state" in attempt("--core", "attention", "--state", 8)
    assert "--taps" in attempt("--taps", "first")
    assert "last layer" in attempt("--taps", "0")
    assert "to start from" in attempt("--kind", "llama", "--init", tmp_path)
    assert "another taps" in fail("distil", "--target", target, "--data", data, "--out", head, *TRAINING, "--taps", "1")
    assert "holds no run" in fail("distil", "--target", target, "--data", data, "--out", data, *TRAINING)
    few = tmp_path / "few"
    options = ("--sources", "tasks", "--tokens", 8, "--max-new-tokens", 8, "--dtype", "fp32")
    succeed("data", "--target", target, "--out", few, *options)
    assert "too little" in attempt(data=few)
    with monkeypatch.context() as patch:
        nan = lambda p_RC, logp_RC, logq_RC: (logq_RC.sum(-1) * torch.nan, logq_RC)  # noqa: E731
        patch.setitem(distil_module.LOSSES, "kl", nan)
        assert "not finite" in attempt()
    with monkeypatch.context() as patch:

        def full(*arguments: object, **more: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(files, "save_file", full)
        assert "No space left" in fail(
            "distil", "--target", target, "--data", data, "--out", tmp_path / "full", *TRAINING
        )
        patch.setattr(Path, "write_text", full)
        assert "No space left" in fail("table", "--target", target, "--data", data, "--out", tmp_path / "t")


@pytest.mark.parametrize("core", ["attention", "ssm", "hybrid"])
def test_unrolled_training_computes_what_drafting_computes(engine: Engine, data: Path, core: str) -> None:
    _, held, student = head_student(engine, data, core)
    batch, known, depth = make_batch(held[:1]), 9, 4
    with torch.no_grad():
        trained = list(student.outputs(batch, depth))
    model = HeadModel(
        copy.deepcopy(student.head), engine.model.get_input_embeddings(), engine.model.get_output_embeddings()
    )
    ids = batch.ids_BT[0].tolist()
    state = model.begin([ids])
    state.see([batch.hidden_BTF[0, :known].float()])
    state.extend([ids[: known + 1]], [list(range(-1, known))])
    drafted = [state.outputs[0][-1]]
    for step in range(1, depth):
        state.extend([[ids[known + step]]], [[known + step - 1]])
        drafted.append(state.outputs[0][-1])
    for step in range(depth):
        expected = trained[step][0, known + step]
        torch.testing.assert_close(drafted[step], expected, atol=2e-4, rtol=2e-4)


def test_hidden_states_are_kept_while_writing_and_serve_fewer_taps(engine: Engine, tmp_path: Path) -> None:
    """What the target's states were while it wrote in batches is what a pass over the finished text finds; a drafter that reads
    fewer layers finds them in the same files."""
    out, taps = tmp_path / "data", (0, 1)
    make_data(engine, out, tokens=60, sources=("templates",), max_new_tokens=12, taps=taps)
    recorded, last = examples(out, taps), examples(out, (1,))
    compute_features(engine, out, (1,))
    assert not list(out.glob("features-1-*"))  # they were there
    width = recorded[0].hidden().shape[-1] // 2
    for example, fewer in zip(recorded, last, strict=True):
        state = engine.target.begin([example.ids.tolist()], 0, taps)
        assert state.features is not None
        wanted = state.features[0].float()
        found = example.hidden().float()
        torch.testing.assert_close(found[:-1], wanted[: len(found) - 1], atol=0.05, rtol=0.05)
        assert torch.equal(found[:, width:], fewer.hidden().float())


def test_predicted_acceptance_is_what_the_engine_measures(engine: Engine, data: Path, tmp_path: Path) -> None:
    """Trained on the very texts that it is measured on, so that there is something to accept."""
    _, held, student = head_student(engine, data)
    held = held[:4]
    settings = DistilSettings(minutes=0.1, steps=3, ramp=0.0, rate=1e-2, batch_tokens=1024, draft_vocab=200)
    trainer = Trainer(student, settings, tmp_path)
    trainer.updates = 50  # warm
    for _ in range(30):
        trainer._update(make_batch(held), 0.0)
    predicted = predicted_acceptance(student, held)["acceptance_length"]
    model = HeadModel(student.head, engine.model.get_input_embeddings(), engine.model.get_output_embeddings())
    drafting = Engine(engine.model, engine.tokenizer, engine.name, HeadDrafter(model))
    emitted = rounds = 0
    for example in held:
        prompt, new = example.ids[: example.prompt_length].tolist(), len(example.ids) - example.prompt_length
        stats = drafting.generate(prompt, shape="chain5", max_new_tokens=new).stats
        emitted, rounds = emitted + stats.emitted, rounds + stats.rounds
    assert predicted > 2
    assert emitted / rounds == pytest.approx(predicted, rel=0.1)


def test_fingerprints_tell_weights_not_dtypes() -> None:
    model, other = copy.deepcopy(tiny("llama")).to(torch.bfloat16), tiny("llama", seed=1)
    assert fingerprint(model) == fingerprint(copy.deepcopy(model).float())
    assert fingerprint(model) == fingerprint(tiny("llama"))
    assert fingerprint(model) != fingerprint(other)


# ---- prune and boost -------------------------------------------------------------------------------------------------


def test_pruning_nothing_changes_nothing(engine: Engine) -> None:
    ids_BT = torch.tensor([[5, 9, 13, 7, 5, 9]])
    whole = prune(engine, 2, 1.0, list(ids_BT))
    assert whole.kept == [0, 1] and not whole.removed
    torch.testing.assert_close(laws(whole.model, ids_BT), laws(engine.model, ids_BT))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_pruning_cuts_layers_groups_and_neurons(family: str) -> None:
    model = tiny(family)
    narrow = prune(Engine(model, None, family, "off"), 1, 0.5, [torch.tensor([5, 9, 13, 7, 5, 9, 2, 4])])
    config = narrow.model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.num_attention_heads) == (1, 1, 2)
    assert config.intermediate_size == 24 and len(narrow.removed) == 1 and narrow.removed[0].divergence > 0
    assert torch.isfinite(laws(narrow.model, torch.arange(8)[None])).all()


def test_the_least_missed_layer_goes_first(engine: Engine) -> None:
    model = copy.deepcopy(tiny("qwen2", seed=2))
    idle = model.model.layers[0]
    for matrix in (idle.self_attn.o_proj.weight, idle.mlp.down_proj.weight):
        matrix.zero_()
    kept, removed = choose_layers(model, 1, torch.tensor([[5, 9, 13, 7, 5, 9]]))
    assert kept == [1] and removed[0].divergence == pytest.approx(0, abs=1e-5)
    assert len(model.model.layers) == 2


def test_prune_makes_a_model_and_tunes_it(engine: Engine, target: Path, data: Path, tmp_path: Path) -> None:
    plain = succeed(
        "prune", "--target", target, "--out", tmp_path / "p", "--layers", 1, "--no-finetune", "--dtype", "fp32"
    )
    assert len(plain["layers_kept"]) == 1 and (tmp_path / "p" / "importance.png").exists()
    same_text(engine, str(tmp_path / "p"))
    to = ("prune", "--target", target, "--out", tmp_path / "q", "--layers", 1, "--width", 0.5)
    tuned = succeed(*to, "--data", data, *TRAINING)
    assert tuned["layers_kept"] == plain["layers_kept"] and tuned["measured_acceptance_length"] >= 1
    same_text(engine, str(tmp_path / "q"))
    assert "--data" in fail(*to)
    assert "cannot be kept" in fail(
        "prune", "--target", target, "--out", tmp_path / "r", "--layers", 9, "--no-finetune"
    )


def test_a_student_with_all_of_the_target_is_always_accepted(engine: Engine, data: Path) -> None:
    _, held, _ = head_student(engine, data)
    student = LlamaStudent(engine, prune(engine, 2, 1.0, [held[0].ids]).model, torch.arange(engine.target.vocab))
    assert predicted_acceptance(student, held)["acceptance_length"] > 5


def test_boost_trains_the_second_on_what_the_first_fails(
    engine: Engine, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b"
    lengths = itertools.cycle([1.5, 4.0])
    monkeypatch.setattr(boost_module, "predicted_acceptance", lambda *_: {"acceptance_length": next(lengths)})
    options = ("--kind", "llama", "--layers", 1, *TRAINING)
    found = succeed("boost", "--target", target, "--data", data, "--out", out, *options)
    assert found["drafter"] == f"{out}/1+{out}/2"
    first, second = found["drafters"]
    left, answers = json.loads((out / "left-1.json").read_text())["left"], read_answers(data)
    assert left == list(range(0, len(answers), 2))
    assert second["answer_tokens"] == sum(len(answers[i].ids) - answers[i].prompt_length for i in left)
    assert first["answer_tokens"] > second["answer_tokens"]
    same_text(engine, found["drafter"])
    with pytest.raises(ValueError, match=r"another threshold \(None\)"):
        settings = DistilSettings(minutes=0.004, steps=1, batch_tokens=256, draft_vocab=200)
        boost_module.boost(engine, data, out, Plan("llama", layers=1), settings, threshold=2.0)
    more = ("--data", data, "--out", out, *TRAINING)
    assert "2 drafters or more" in fail("boost", "--target", target, "--drafters", 1, *more)
