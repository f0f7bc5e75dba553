"""The stand-alone Mamba drafter: chunked training form, tree form and prefill agree; it drafts, learns, saves and loads."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCAB, tiny
from helpers import PROMPT, PROMPTS, ancestor_sets, expected, run
from outrider.api import Engine
from outrider.drafters.folder import load_drafter, save_mamba
from outrider.drafters.lm import LMDrafter
from outrider.models.draft_vocab import widen
from outrider.models.fingerprint import fingerprint
from outrider.models.mamba_drafter import MambaBlocks, MambaDrafterConfig, MambaModel
from outrider.models.selftest import tree_model
from outrider.train.batches import make_batch
from outrider.train.distil import DistilSettings, Trainer, predicted_acceptance
from outrider.train.features import Example
from outrider.train.students import MambaStudent, new_mamba

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6, 6, 5]
DRAFTED = VOCAB - 8
TEXT = [(5 * i * i + 3 * i) % VOCAB for i in range(150)]


def blocks(dtype: torch.dtype = torch.float64, ffn: int = 24) -> MambaBlocks:
    torch.manual_seed(0)
    made = MambaBlocks(MambaDrafterConfig(32, 2, 4, 8, 6, VOCAB - 8, ffn)).to(dtype)
    made.draft_ids = torch.randperm(VOCAB)[: VOCAB - 8]
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return made.requires_grad_(False)


@functools.cache
def model(dtype: torch.dtype = torch.float64, ffn: int = 24) -> MambaModel:
    target = tiny("llama")
    embedding = torch.nn.Embedding.from_pretrained(target.get_input_embeddings().weight.to(dtype))
    unembedding = torch.nn.Linear(32, VOCAB, bias=False).to(dtype)
    unembedding.weight = torch.nn.Parameter(target.get_output_embeddings().weight.to(dtype), requires_grad=False)
    return MambaModel(blocks(dtype, ffn), embedding, unembedding)


def training_form(made: MambaModel, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of the form that is trained."""
    return made.cut(made.blocks(made.embedding(torch.tensor([ids]))))[0]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """What the head was cut to; tokens of the text, which joined it, follow in the order of the text."""
    torch.testing.assert_close(got[..., :DRAFTED], wanted[..., :DRAFTED], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("ffn", [0, 24])
def test_training_equals_prefill_and_drafting(ffn: int) -> None:
    made = model(ffn=ffn)
    wanted = training_form(made, TEXT)
    for prompt in (0, 1, 2, 64, 130):
        state = made.begin([TEXT[:prompt]])
        for at in range(prompt, prompt + 12):
            close(state.extend([[TEXT[at]]], [[-1]])[0, 0], wanted[at])
            state.commit([[0]])
        # drafted one behind the other, without commits
        for place, at in enumerate(range(prompt + 12, prompt + 18)):
            close(state.extend([[TEXT[at]]], [[place - 1]])[0, 0], wanted[at])


def test_prefill_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    whole = made.begin([TEXT[:100]]).factors.committed(0)
    monkeypatch.setattr("outrider.models.mamba_drafter.PREFILL_CHUNK", 7)
    for one, other in zip(made.begin([TEXT[:100]]).factors.committed(0), whole):
        close(one, other)


def test_tree_nodes_equal_their_own_paths() -> None:
    made, tokens = model(), TEXT[40:50]
    for cuts in ((0, 10), (0, 1, 3, 6, 10)):
        state = made.begin([TEXT[:20]])
        got = torch.cat([state.extend([tokens[a:b]], [PARENTS[a:b]])[0] for a, b in itertools.pairwise(cuts)])
        for node, path in enumerate(ancestor_sets(PARENTS)):
            close(got[node], training_form(made, TEXT[:20] + [tokens[n] for n in path])[-1])


def test_commit_then_continue_equals_fresh() -> None:
    made, tokens = model(), TEXT[40:50]
    state = made.begin([TEXT[:20]])
    state.extend([tokens], [PARENTS])
    state.commit([[0, 1, 3, 6, 8]])
    fresh = made.begin([TEXT[:20] + [tokens[n] for n in (0, 1, 3, 6, 8)]])
    assert state.lengths == fresh.lengths and state.pending == 0
    for one, other in zip(state.factors.committed(0), fresh.factors.committed(0)):
        close(one, other)
    close(state.extend([[7, 8, 9]], [[-1, 0, 0]]), fresh.extend([[7, 8, 9]], [[-1, 0, 0]]))
    with pytest.raises(IndexError, match="not a path"):
        state.commit([[1, 2]])


def test_batch_rows_equal_single_rows() -> None:
    made, prompts = model(), [TEXT[:3], [], TEXT[5:90]]
    tokens, parents = [[1, 2, 3, 4], [5], [6, 7, 8]], [[-1, 0, 0, 1], [-1], [-1, 0, 1]]
    paths = [[0, 2], [], [0, 1, 2]]
    state = made.begin(prompts)
    got = state.extend(tokens, parents)
    state.commit(paths)
    assert state.lengths == [5, 0, 88]
    state.keep([2, 1])
    later = state.extend([[9, 10], [11]], [[-1, 0], [-1]])
    for row, place in ((0, None), (1, 1), (2, 0)):
        alone = made.begin([prompts[row]])
        close(got[row, : len(tokens[row])], alone.extend([tokens[row]], [parents[row]])[0])
        alone.commit([paths[row]])
        if place is not None:
            more = [[9, 10], [11]][place]
            close(later[place, : len(more)], alone.extend([more], [list(range(-1, len(more) - 1))])[0])


def test_state_does_not_grow() -> None:
    made = model()
    small, large = made.begin([TEXT[:2]], 100), made.begin([TEXT * 20], 100)
    assert small.bytes() == large.bytes()
    for _ in range(8):
        large.extend([TEXT[:60]], [range(-1, 59)])
        large.commit([range(60)])
    assert small.bytes() == large.bytes() and made.state_bytes_per_node() < 2000
    assert large.features is None
    with pytest.raises(ValueError, match="hands out no hidden states"):
        made.begin([[1]], taps=[0])


def test_only_the_draft_vocabulary_and_what_the_text_holds_is_proposed() -> None:
    made = model()
    drafted = made.draft_ids.tolist()
    known, lacking = drafted[0], sorted(set(range(VOCAB)) - set(drafted))
    state = made.begin([[known, lacking[3], known], [known]])
    logits = state.extend([[known, lacking[5]], [known]], [[-1, 0], [-1]])
    assert state.vocabulary.ids(0).tolist() == [*drafted, lacking[3], lacking[5]]
    assert state.vocabulary.ids(1).tolist() == drafted
    whole = made.cut.whole_VD @ made.blocks(made.embedding(torch.tensor([[known, lacking[3], known, known]])))[0, -1]
    close(logits[0, 0], whole[state.vocabulary.ids(0)])
    torch.testing.assert_close(logits[0, 0, DRAFTED:], whole[[lacking[3], lacking[5]]], atol=1e-9, rtol=1e-9)
    wide_V = widen(logits[1, :1, :DRAFTED], made.draft_ids, VOCAB)[0]
    assert wide_V.isfinite().nonzero().flatten().tolist() == sorted(drafted)
    state.keep([1])
    assert state.vocabulary.ids(0).tolist() == drafted


def test_a_text_of_many_rare_words_is_followed_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.draft_vocab.MOST_JOINED", 3)
    made = model()
    lacking = sorted(set(range(VOCAB)) - set(made.draft_ids.tolist()))
    state = made.begin([[]])
    for token in lacking:
        state.extend([[token]], [[-1]])
    assert state.vocabulary.ids(0).tolist()[DRAFTED:] == lacking[:3]
    whole = made.begin([[]])
    whole.extend([lacking], [list(range(-1, len(lacking) - 1))])
    assert whole.vocabulary.ids(0).tolist()[DRAFTED:] == lacking[:3]


def test_embedding_is_the_targets_own() -> None:
    target = tiny("llama")
    made = MambaModel(blocks(torch.float32), target.get_input_embeddings(), target.get_output_embeddings())
    assert made.embedding.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert not any("embed" in name for name in made.blocks.state_dict())


# -- with an engine ----------------------------------------------------------------------------------------------------


@functools.cache
def speaking() -> Engine:
    target = tiny("llama")
    made = MambaModel(blocks(torch.float32), target.get_input_embeddings(), target.get_output_embeddings())
    return Engine(target, None, "llama", LMDrafter(made, "mamba"))


@pytest.mark.parametrize("given", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 11}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [1, 4, (3, 2, 1), "best8"], ids=str)
def test_text_is_the_targets(given: dict[str, Any], shape: Any) -> None:
    result = speaking().generate(list(PROMPT), shape=shape, max_new_tokens=16, **given)
    assert result.token_ids == expected("llama", max_new_tokens=16, **given)
    assert result.stats.drafted > 0
    results = speaking().generate([list(p) for p in PROMPTS], shape=shape, max_new_tokens=16, **given)
    assert [r.token_ids for r in results] == [expected("llama", p, max_new_tokens=16, **given) for p in PROMPTS]


def test_draws_keep_the_law_in_reach() -> None:
    # mss with a reduced vocabulary: tokens that the drafter cannot propose still come, by correction
    result = speaking().generate(list(PROMPT), shape=(2, 1), max_new_tokens=40, temperature=1.0, seed=5, rule="mss")
    drafter: Any = speaking().drafter
    assert set(result.token_ids) - set(drafter.model.blocks.draft_ids.tolist())


def answers(target: Engine, count: int, length: int) -> list[Example]:
    made = []
    for number in range(count):
        prompt = [(7 * number + i * i) % VOCAB for i in range(4)]
        ids = prompt + target.generate(prompt, shape="off", max_new_tokens=length).token_ids
        features = target.target.begin([ids], 0, (1,)).features
        assert features is not None
        hidden = features[0].clone()
        made.append(Example(torch.tensor(ids), len(prompt), 0.0, lambda hidden=hidden: hidden))
    return made


def test_overfitting_pays_and_predictions_hold(tmp_path: Path) -> None:
    target = Engine(tiny("llama"), None, "llama", "off")
    examples = answers(target, 3, 24)
    student = MambaStudent(target, new_mamba(target, examples, VOCAB, seed=0, layers=2))
    trainer = Trainer(student, DistilSettings(minutes=1, steps=1, batch_tokens=256, rate=1e-2), tmp_path)
    batch = make_batch(examples)
    before, loss = (
        predicted_acceptance(student, examples, 3)["acceptance_length"],
        float(trainer.loss(batch, 1).detach()),
    )
    for _ in range(60):
        trainer._update(batch, 0.0)
    assert float(trainer.loss(batch, 1).detach()) < 0.5 * loss
    after = predicted_acceptance(student, examples, 3)["acceptance_length"]
    assert after > before + 0.8
    made = MambaModel(student.blocks, target.model.get_input_embeddings(), target.model.get_output_embeddings())
    drafting = Engine(tiny("llama"), None, "llama", LMDrafter(made, "mamba"))
    rounds = 0
    for example in examples:
        result = drafting.generate(example.ids[: example.prompt_length].tolist(), shape=3, max_new_tokens=24)
        assert result.token_ids == example.ids[example.prompt_length :].tolist()
        rounds += result.stats.rounds
    assert 24 * len(examples) / rounds == pytest.approx(after, rel=0.05)


def test_folder_round_trip(tmp_path: Path) -> None:
    target, made = tiny("llama"), blocks(torch.float32)
    save_mamba(made, tmp_path, {"target": "tiny", "fingerprint": fingerprint(target)}, "a card")
    loaded = load_drafter(tmp_path, target)
    assert isinstance(loaded, LMDrafter) and loaded.name == "mamba"
    assert isinstance(loaded.model, MambaModel) and loaded.model.blocks.config == made.config
    rounded = {k: v.bfloat16().float() if v.is_floating_point() else v for k, v in made.state_dict().items()}
    torch.testing.assert_close(dict(loaded.model.blocks.state_dict()), rounded)
    with pytest.raises(ValueError, match="not for this target"):
        load_drafter(tmp_path, tiny("llama", 1))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is damaged"):
        load_drafter(tmp_path, target)


def test_a_recurrent_target_takes_it_too() -> None:
    target = tiny("mamba2")
    made = MambaModel(blocks(torch.float32), target.get_input_embeddings(), target.get_output_embeddings())
    going = run(tree_model(target)[0], LMDrafter(made, "mamba"), [PROMPT], (2, 1, 1), max_new_tokens=16)
    tokens = [piece.token for piece in going.pieces()]
    assert tokens == expected("mamba2", max_new_tokens=16)
