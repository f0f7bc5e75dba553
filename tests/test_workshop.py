"""The workshop: every command from end to end on a tiny target, kills and mistakes, and what the figures mean."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import outrider
from families import tiny
from outrider.api import Engine
from outrider.bench import tasks
from outrider.cli import app
from outrider.drafters.cascade import CascadeDrafter
from outrider.drafters.catalog import make_drafter
from outrider.drafters.feature_head import HeadDrafter, HeadModel
from outrider.drafters.table import NgramTable, TableDrafter
from outrider.models import files
from outrider.models.fingerprint import fingerprint
from outrider.train import boost as boost_module
from outrider.train import data as data_module
from outrider.train import distil as distil_module
from outrider.train import prompts as prompts_module
from outrider.train import workshop as workshop_module
from outrider.train.batches import make_batch
from outrider.train.data import Answer, make_data, make_held_out, read_answers, shard_files
from outrider.train.distil import DistilSettings, Trainer, predicted_acceptance
from outrider.train.features import compute_features, examples
from outrider.train.kinds import Plan
from outrider.train.llama_student import LlamaStudent
from outrider.train.prompts import is_held_out, task_prompts
from outrider.train.prune import choose_layers, laws, prune
from outrider.train.students import HeadStudent, new_head
from outrider.train.table import make_table
from outrider.train.walks import Walk, calibration, membership, rates_by_depth
from outrider.train.workshop import distil
from outrider.tree import parse_shape
from outrider.verify import Verdict
from toy import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRAINING = ("--minutes", 0.004, "--every", 60, "--batch-tokens", 256, "--draft-vocab", 200, "--dtype", "fp32")


def save_target(path: Path, seed: int = 0) -> Path:
    """A tiny target with a chat template; vowels end its texts, so that it can ask itself."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = copy.deepcopy(tiny("llama", seed=seed, vocab=len(tokenizer), scale=3.0))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list("aeiou"))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def fake_task(name: str) -> list[tasks.Prompt]:
    """Two prompts of either side."""
    texts = [f"{name} question {i}" for i in range(40)]
    chosen = [text for side in (True, False) for text in [t for t in texts if is_held_out(t) == side][:2]]
    return [tasks.Prompt(name, str(i), ({"role": "user", "content": text},)) for i, text in enumerate(chosen)]


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Made-up benchmark tasks, small batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TASKS", {name: functools.partial(fake_task, name) for name in tasks.TASKS})
        patch.setattr(data_module, "BATCH", 8)
        asks = functools.partial(prompts_module.self_asked, batch=8, longest=64)
        patch.setattr(data_module, "self_asked", asks)
        patch.setattr(workshop_module, "make_held_out", functools.partial(make_held_out, max_new_tokens=64))
        patch.setattr(workshop_module, "MEASURED", 4)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def engine(target: Path) -> Engine:
    return outrider.load(str(target), "off", dtype="fp32")


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, made by the command."""
    out = tmp_path_factory.mktemp("data") / "set"
    found = succeed(
        "data", "--target", target, "--dtype", "fp32", "--out", out, "--tokens", "1k", "--max-new-tokens", 24
    )
    assert found["complete"] and found["answer_tokens"] >= 1000
    return out


@pytest.fixture(scope="module")
def head(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A feature head, made by the command."""
    out = tmp_path_factory.mktemp("head") / "out"
    succeed("distil", "--target", target, "--data", data, "--out", out, "--kind", "head", *TRAINING)
    return out


@pytest.fixture(scope="module")
def table(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, made by the command."""
    out = tmp_path_factory.mktemp("table") / "out"
    succeed("table", "--target", target, "--data", data, "--out", out, "--dtype", "fp32")
    return out


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def succeed(*arguments: object) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def fail(*arguments: object) -> str:
    code, out, err = run(*arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and not out.strip() and len(lines) == 1 and lines[0].startswith("outrider: "), err
    return lines[0]


def same_text(engine: Engine, name: str) -> None:
    """Greedy and sampled text with a drafter is the text without."""
    drafting = Engine(engine.model, engine.tokenizer, engine.name, name, dtype=torch.float32)
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        for shape in ("chain4", "3x2x1"):
            plain = engine.generate("humaneval question", shape="off", max_new_tokens=20, eos_token_id=None, **options)
            made = drafting.generate("humaneval question", shape=shape, max_new_tokens=20, eos_token_id=None, **options)
            assert made.token_ids == plain.token_ids


class Killed(Exception):
    """Somebody pulled the plug."""


def kill_at(count: int, word: str) -> Any:
    """A `tell` that is interrupted when it tells of `word` for the `count`-th time."""
    calls = iter(range(1, 1_000_000))

    def tell(done: int, total: int, what: str) -> None:
        if word in what and next(calls) == count:
            raise Killed

    return tell


# ---- data ------------------------------------------------------------------------------------------------------------


def test_data_is_prompts_and_answers_of_the_target(engine: Engine, data: Path) -> None:
    answers = read_answers(data)
    about = json.loads((data / "data.json").read_text())
    assert about["fingerprint"] == fingerprint(engine.model) and about["tokens"] == 1000
    assert {answer.temperature for answer in answers} == {0.0, 0.7}
    greedy = next(answer for answer in answers if answer.temperature == 0.0)
    prompt, written = greedy.ids[: greedy.prompt_length].tolist(), greedy.ids[greedy.prompt_length :].tolist()
    assert engine.generate(prompt, shape="off", max_new_tokens=24).token_ids == written


def test_held_out_prompts_never_enter_data(engine: Engine, data: Path, tmp_path: Path) -> None:
    given = [f"my own question {i}" for i in range(12)]
    make_data(engine, tmp_path / "own", tokens=10**6, prompts=given, sources=("tasks",), max_new_tokens=8)
    asked = {
        engine.tokenizer.decode(answer.ids[: answer.prompt_length])
        for folder in (data, tmp_path / "own")
        for answer in read_answers(folder)
    }
    held = task_prompts(held_out=True) + [text for text in given if is_held_out(text)]
    assert held and not any(text in prompt for text in held for prompt in asked)
    assert any(text in prompt for text in task_prompts(held_out=False) for prompt in asked)


def test_data_goes_on_after_a_kill_with_the_same_answers(engine: Engine, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokens": 900, "sources": ("tasks", "self"), "max_new_tokens": 16}
    make_data(engine, tmp_path / "whole", **options)
    for count in (2, 3):
        with pytest.raises(Killed):
            make_data(engine, tmp_path / "killed", **options, tell=kill_at(count, "answer tokens"))
    make_data(engine, tmp_path / "killed", **options)
    whole, killed = shard_files(tmp_path / "whole"), shard_files(tmp_path / "killed")
    assert len(whole) == len(killed) > 3
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(whole, killed))


def test_data_mistakes_are_one_line(target: Path, data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    to = ("data", "--target", target, "--dtype", "fp32", "--out")
    assert "max_new_tokens" in fail(*to, data, "--max-new-tokens", 99)
    assert "sources" in fail(*to, data, "--max-new-tokens", 24, "--sources", "tasks")
    assert "many" in fail(*to, tmp_path / "x", "--tokens", "many")
    assert "hearsay" in fail(*to, tmp_path / "x", "--sources", "hearsay")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear diary")
    assert "not empty" in fail(*to, tmp_path / "mine")
    assert "no prompts" in fail(*to, tmp_path / "y", "--sources", "none")
    monkeypatch.setattr(data_module, "self_asked", lambda engine, number, seed: ["the same question as ever"])
    assert "nothing new" in fail(*to, tmp_path / "z", "--sources", "self", "--tokens", "9k", "--max-new-tokens", 8)


# ---- tables and cascades ---------------------------------------------------------------------------------------------


def test_a_table_gives_true_shares(tmp_path: Path) -> None:
    text = torch.tensor([9, 9, 1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 3])
    make_table([Answer(text, 2, 0.0)], tmp_path / "t.safetensors")
    table = NgramTable(tmp_path / "t.safetensors")
    after = dict(table.following([7, 7, 1, 2], 3))
    assert set(after) == {3, 4}
    assert after[3] == pytest.approx(3 / 4, abs=1 / 255) and after[4] == pytest.approx(1 / 4, abs=1 / 255)
    assert table.following([7, 7, 1, 2], 1) == [(3, after[3])]
    assert [token for token, _ in table.following([2, 3, 1], 3)] == [2]
    assert table.following([8], 3) == []


def test_a_cascade_asks_in_order(engine: Engine, tmp_path: Path) -> None:
    make_table([Answer(torch.tensor([1, 5, 6, 7, 5, 6, 7, 5, 6, 7]), 1, 0.0)], tmp_path / "t.safetensors")
    cascade = CascadeDrafter(
        [make_drafter("ngram", engine.target, None), TableDrafter(NgramTable(tmp_path / "t.safetensors"))]
    )
    assert cascade.name == "ngram>table"
    shape = parse_shape("chain2")

    def drafted(context: list[int]) -> list[int]:
        state = cascade.begin([context], [], 0)
        tree = state.propose([context], [shape])[0].tree
        state.observe([Verdict([0], 0)])
        return tree.tokens[1:]

    assert drafted([5, 6, 30, 31, 5, 6]) == [30, 31]  # lookup knows better than the table
    assert drafted([40, 41, 42, 5, 6]) == [7, 5]  # nothing to look up
    assert drafted([50]) == []


def test_table_and_cascade_write_the_same_text(engine: Engine, table: Path, head: Path) -> None:
    for name in (str(table), f"ngram>table:{table}", f"ngram>table:{table}>{head}", f"ngram+{head}"):
        same_text(engine, name)


def test_names_of_drafters_are_checked(engine: Engine, target: Path, head: Path, tmp_path: Path) -> None:
    for name in ("table", "head", "mamba"):
        with pytest.raises(ValueError, match=f"no {name} comes with Outrider"):
            make_drafter(name, engine.target, engine.tokenizer)
    with pytest.raises(ValueError, match="another kind than a table"):
        make_drafter(f"table:{head}", engine.target, engine.tokenizer)
    with pytest.raises(ValueError, match="holds no drafter"):
        make_drafter(f"table:{tmp_path}", engine.target, engine.tokenizer)
    assert make_drafter("auto", engine.target, engine.tokenizer).name == "ngram"
    other = save_target(tmp_path / "other", seed=5)
    assert "not for this target" in fail("generate", "x", "--target", other, "--drafter", head, "--dtype", "fp32")


def test_what_is_shipped_makes_auto(engine: Engine, table: Path, head: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from outrider.drafters import folder

    monkeypatch.setattr(folder, "SHIPPED", tmp_path)
    (tmp_path / "some-model").mkdir()
    names = []
    for kind, place in (("", None), ("table", table), ("head", head)):
        if place is not None:
            (tmp_path / "some-model" / kind).symlink_to(place)
        names.append(make_drafter("auto", engine.target, engine.tokenizer).name)
    assert names == ["ngram", "ngram>table", "ngram>head"]
    assert make_drafter("ngram>table>head", engine.target, engine.tokenizer).name == "ngram>table>head"


# ---- distil ----------------------------------------------------------------------------------------------------------


def test_a_head_folder_is_whole(head: Path, engine: Engine) -> None:
    config, text = json.loads((head / "config.json").read_text()), (head / "README.md").read_text()
    assert config["drafter"] == "head" and config["fingerprint"] == fingerprint(engine.model)
    assert config["measured_acceptance_length"] >= 1 and config["predicted_acceptance_length"] >= 1
    assert config["provenance"]["versions"]["torch"] and config["provenance"]["data"]["tokens"] == 1000
    assert "acceptance length" in text and "outrider generate" in text
    assert (head / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [("--kind", "mamba", "--layers", 1), ("--kind", "llama", "--layers", 1), ("--core", "ssm"), ("--core", "hybrid")],
    ids=lambda options: options[1],
)
def test_distil_makes_every_kind(engine: Engine, target: Path, data: Path, tmp_path: Path, options: tuple) -> None:
    found = succeed("distil", "--target", target, "--data", data, "--out", tmp_path / "d", *options, *TRAINING)
    assert found["measured_acceptance_length"] == pytest.approx(found["predicted_acceptance_length"], rel=0.2)
    same_text(engine, str(tmp_path / "d"))


def test_distil_goes_on_after_a_kill(engine: Engine, data: Path, tmp_path: Path) -> None:
    settings = DistilSettings(minutes=0.02, steps=1, batch_tokens=256, draft_vocab=100)
    plan, out = Plan("llama", layers=1), tmp_path / "out"
    with pytest.raises(Killed):
        distil(engine, data, out, plan, settings, every=0.3, tell=kill_at(2, "acceptance_length"))
    before = json.loads((out / "run" / "checkpoint.json").read_text())
    assert 0 < before["seconds"] < 1.2 and not (out / "config.json").exists()
    student, known = distil(engine, data, out, plan, settings, every=0.3)
    after = json.loads((out / "run" / "checkpoint.json").read_text())
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


def head_student(engine: Engine, data: Path, core: str = "attention") -> tuple[list, list, HeadStudent]:
    """Examples, held-out examples and a fresh head of a data set."""
    path = workshop_module.make_held_out(engine, data)
    for pattern in ("shard-*.safetensors", path.name):
        compute_features(engine, data, (0, 1), pattern=pattern)
    found, held = examples(data, (0, 1)), examples(data, (0, 1), path.name)
    return found, held, HeadStudent(engine, new_head(engine, found, (0, 1), 200, 0, core))


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
    drafted = [state.outputs_BMD]
    for step in range(1, depth):
        state.extend([[ids[known + step]]], [[known + step - 1]])
        drafted.append(state.outputs_BMD)
    for step in range(depth):
        expected = trained[step][0, known + step]
        torch.testing.assert_close(drafted[-1][0, known + step], expected, atol=2e-4, rtol=2e-4)


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
    left, answers = json.loads((out / "left-1.json").read_text()), read_answers(data)
    assert left == list(range(0, len(answers), 2))
    assert second["answer_tokens"] == sum(len(answers[i].ids) - answers[i].prompt_length for i in left)
    assert first["answer_tokens"] > second["answer_tokens"]
    same_text(engine, found["drafter"])
    more = ("--data", data, "--out", out, *TRAINING)
    assert "2 drafters or more" in fail("boost", "--target", target, "--drafters", 1, *more)


# ---- evaluate --------------------------------------------------------------------------------------------------------


def test_evaluate_measures_two_drafters_side_by_side(target: Path, head: Path, table: Path, tmp_path: Path) -> None:
    names = (f"ngram>table:{table}", str(head))
    to = ("evaluate", "--target", target, "--drafter", names[0], "--drafter", names[1], "--limit", 1)
    more = ("--tasks", "humaneval,gsm8k", "--max-new-tokens", 16, "--dtype", "fp32", "--out", tmp_path / "e")
    found = succeed(*to, *more)
    lookup, model = found["drafters"]
    assert (lookup["drafter"], model["drafter"]) == names
    for one in (lookup, model):
        assert set(one["per_task"]) == {"humaneval", "gsm8k"} and one["equal_text"]
        assert one["acceptance_length"] >= 1 and one["measured_speedup"] > 0 and one["predicted_speedup"] > 0
        assert len(one["top_k_membership"]) == 5 and one["top_k_membership"] == sorted(one["top_k_membership"])
    assert lookup["calibration"] is None and 0 <= model["calibration"]["ece"] <= 1
    assert lookup["state_bytes"] == 0 < model["state_bytes_per_node"] < model["state_bytes"]
    assert found["provenance"]["prompts"] == 2
    assert {p.name for p in (tmp_path / "e").iterdir()} == {
        "evaluation.json",
        "acceptance_by_depth.png",
        "reliability.png",
    }
    code, out, _ = run(*to, "--tasks", "gsm8k", "--max-new-tokens", 8, "--dtype", "fp32", "--temperature", 0.7)
    assert code == 0 and "calibration error" in out
    assert "drafts nothing" in fail(*to, *more, "--shape", "off")
    only = tmp_path / "p.jsonl"
    only.write_text(json.dumps({"prompt": next(p for p in map(str, range(99)) if not is_held_out(p))}))
    assert "held-out side" in fail(*to, "--tasks", only)


def test_figures_follow_from_walks() -> None:
    walks = [
        Walk([0, 0, None], [(0.9, True), (0.8, True), (0.6, False)], 5, 5),
        Walk([1, None], [(0.4, False)], 5, 5),
        Walk([None], [(0.3, False)], 5, 5),
        Walk([], [], 0, 0),
    ]
    assert rates_by_depth(walks) == [2 / 3, 1 / 2, 0.0]
    assert membership(walks) == [1 / 4, 2 / 4, 2 / 4, 2 / 4, 2 / 4]
    found = calibration(walks)
    assert found["ece"] == pytest.approx((0.1 + 0.2 + 0.6 + 0.4 + 0.3) / 5)
    assert sum(count for _, _, count in found["bins"]) == 5
    assert calibration(walks[3:]) is None


def test_calibration_of_a_perfect_drafter_is_small(engine: Engine) -> None:
    """The target as its own drafter is as sure as it is right; draws are seeded."""
    from outrider.train.walks import Watched

    watched = Watched(make_drafter(engine.model, engine.target, engine.tokenizer))
    own = Engine(engine.model, engine.tokenizer, engine.name, watched)
    for seed in range(12):
        own.generate(
            [5, 9, 13, 7], shape="chain5", max_new_tokens=40, temperature=1.0, seed=seed, rule="mss", draft_sampling="iid",
            eos_token_id=None,
        )  # fmt: skip
    found = calibration(watched.walks)
    assert sum(count for _, _, count in found["bins"]) > 300 and found["ece"] < 0.12
