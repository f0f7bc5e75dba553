"""A model within a memory budget writes what it always writes, reads the disk for it, and takes no more than it may."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from families import tiny
from helpers import PROMPT
from native_kernels import needs_kernels, without_kernels
from outrider.api import Engine
from outrider.bench.offload import Offloaded, cached
from outrider.models.budget import Layer, parse_bytes, split
from outrider.models.loading import load_model
from outrider.models.streaming import streamed_parts, streaming
from toy import byte_tokenizer
from workshop_fixtures import succeed

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux are files read by layers")
LEAN = ("llama", "mistral", "qwen3", "gemma3")
OTHERS = ("gpt2", "gpt_neox", "mamba", "mamba2", "qwen3_5_text", "lfm2", "zamba2", "rwkv")
TREE = ([[7, 8, 9, 10]], [[-1, 0, 0, 1]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of tiny models, by family and the dtype they are stored in."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str, stored: torch.dtype = torch.float32) -> Path:
        path = root / f"{family}-{stored}"
        if not path.exists():
            copy.deepcopy(tiny(family)).to(stored).save_pretrained(path)
        return path

    return folder


def least(folder: Path, **loading: Any) -> int:
    """The least budget that works, as the refusal of a smaller one names it; at most all layers are streamed."""
    with pytest.raises(ValueError, match="too small") as refused:
        load_model(folder, memory_budget=1, **loading)
    found = re.search(r"at least (\d+)MB", str(refused.value))
    assert found
    return int(found[1]) * 10**6


def streamed(folder: Path, **loading: Any) -> Engine:
    """An engine for a tiny model, all layers of which are streamed."""
    from outrider.models import streaming as module

    def everything(name: str, budget: int, rest: int, layers: list[Layer]) -> Any:
        return split(name, 10**9, rest, layers).__class__(tuple(range(len(layers))), rest, 0, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "split", everything)
        return outrider.load(str(folder), "ngram", memory_budget=10**9, **loading)


def logits(engine: Engine) -> torch.Tensor:
    """Of a tree behind a prompt, and of one behind its commit."""
    state = engine.target.begin([list(PROMPT)], 16)
    first = state.extend(*TREE)
    state.commit([[0, 2]])
    return torch.cat([first, state.extend(*TREE)], dim=1)


# -- sameness ----------------------------------------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize(("family", "kernels"), [(f, k) for f in LEAN + OTHERS for k in (False, True)])
def test_streamed_logits_are_bit_for_bit_those_of_the_whole_model(
    family: str, kernels: bool, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        without_kernels(monkeypatch)
    whole, small = outrider.load(str(folders(family)), "off", dtype="fp32"), streamed(folders(family), dtype="fp32")
    assert len(streamed_parts(small.model)) == len(streaming(small.model).chosen.streamed) > 1
    assert small.way.way == whole.way.way
    assert torch.equal(logits(small), logits(whole))


@LINUX
@pytest.mark.parametrize("family", ("llama", "mamba2", "gpt2"))
@pytest.mark.parametrize("stored, asked", [(torch.bfloat16, "fp32"), (torch.float32, "bf16"), (torch.bfloat16, "bf16")])
def test_weights_in_another_dtype_are_converted_on_their_way(
    family: str, stored: torch.dtype, asked: str, folders: Any
) -> None:
    folder = folders(family, stored)
    whole, small = outrider.load(str(folder), "off", dtype=asked), streamed(folder, dtype=asked)
    assert small.dtype == whole.dtype
    assert torch.equal(logits(small), logits(whole))
    assert all(w.dtype == stored for part in streamed_parts(small.model).values() for w in part.weights)


@LINUX
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.8, "seed": 5, "rule": "mss"}]
)
def test_texts_are_the_same_whatever_is_drafted(options: dict[str, Any], folders: Any) -> None:
    whole, small = outrider.load(str(folders("llama")), "ngram", dtype="fp32"), streamed(folders("llama"), dtype="fp32")
    for shape in ("off", "chain4", "3x2x1"):
        texts = [e.generate(list(PROMPT), shape=shape, max_new_tokens=24, **options).token_ids for e in (whole, small)]
        assert texts[0] == texts[1]
    batch = [e.generate([list(PROMPT), [3, 4]], shape="chain3", max_new_tokens=8, **options) for e in (whole, small)]
    assert [row.token_ids for row in batch[0]] == [row.token_ids for row in batch[1]]


@LINUX
def test_transformers_own_generate_streams_as_well(folders: Any) -> None:
    engine, ids = streamed(folders("qwen3"), dtype="fp32"), torch.tensor([PROMPT])
    wanted = tiny("qwen3").generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.model.generate(ids, max_new_tokens=12, do_sample=False), wanted)


# -- what happens to weights -------------------------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize("way", ("in place", "replaced"))
def test_a_changed_weight_is_never_lost(way: str, folders: Any) -> None:
    """A user who merges an adapter into streamed layers gets the text of the changed model."""
    engine, changed = streamed(folders("llama"), dtype="fp32"), copy.deepcopy(tiny("llama"))
    for model in (engine.model, changed):
        weight: Any = model.model.layers[1].mlp.down_proj.weight
        if way == "in place":
            weight.data.mul_(-3.0)
        else:
            weight.data = weight.data * -3.0
    wanted = Engine(changed, None, "changed", "off").generate(list(PROMPT), max_new_tokens=16).token_ids
    for _ in range(2):
        assert engine.generate(list(PROMPT), max_new_tokens=16).token_ids == wanted


@LINUX
@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_an_interrupted_pass_harms_nothing(family: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)  # which run no module that could be interrupted
    engine = streamed(folders(family, torch.bfloat16), dtype="fp32")
    wanted = engine.generate(list(PROMPT), max_new_tokens=8).token_ids
    layer = list(streamed_parts(engine.model))[-1]
    inner: Any = layer.mlp
    hook = inner.act_fn if family == "llama" else inner.act
    forward, hook.forward = hook.forward, _interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(list(PROMPT), max_new_tokens=8)
    hook.forward = forward
    assert engine.generate(list(PROMPT), max_new_tokens=8).token_ids == wanted
    assert all(w.dtype == torch.bfloat16 for part in streamed_parts(engine.model).values() for w in part.weights)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@LINUX
def test_a_copy_of_a_streamed_model_writes_the_same(folders: Any) -> None:
    engine = streamed(folders("llama"), dtype="fp32")
    twin = Engine(copy.deepcopy(engine.model), None, "twin", "off")
    assert (
        twin.generate(list(PROMPT), max_new_tokens=12).token_ids
        == engine.generate(list(PROMPT), max_new_tokens=12).token_ids
    )


@LINUX
def test_a_file_that_has_lost_its_name_still_serves(folders: Any, tmp_path: Path) -> None:
    copy.deepcopy(tiny("llama")).save_pretrained(tmp_path / "model")
    engine = streamed(tmp_path / "model", dtype="fp32")
    (tmp_path / "model" / "model.safetensors").unlink()
    wanted = outrider.load(str(folders("llama")), "off", dtype="fp32").generate(list(PROMPT), max_new_tokens=12)
    assert engine.generate(list(PROMPT), max_new_tokens=12).token_ids == wanted.token_ids


# -- the budget --------------------------------------------------------------------------------------------------------

MEASURE = """
import json, sys, torch
import outrider
from outrider.machine import disk_bytes_read
from outrider.models.streaming import streaming

torch.set_num_threads(1)
warm, folder, budget = sys.argv[1:]
status = lambda key: next(1024 * int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key))
prompt = [1 + i % 40 for i in range(50)]
outrider.load(warm, "ngram", dtype="fp32").generate(prompt, max_new_tokens=30)
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
before = status("VmRSS")
engine = outrider.load(folder, "ngram", dtype="fp32", memory_budget=budget if budget != "0" else None)
engine.generate(prompt, max_new_tokens=2, shape="off")
read = disk_bytes_read()
done = engine.generate(prompt, max_new_tokens=30, shape="chain4")
facts = streaming(engine.model)
print(json.dumps({
    "growth": status("VmHWM") - before, "read": disk_bytes_read() - read, "passes": done.stats.rounds + 1,
    "facts": facts and facts.facts(), "text": done.token_ids,
}))
"""


def _measured(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@LINUX
def test_a_model_without_a_budget_is_held_once_at_every_moment(folders: Any, tmp_path: Path) -> None:
    """While it is loaded, too: the vocabulary head of this model is a fifth of it, and was there twice for a moment."""
    from transformers import LlamaConfig, LlamaForCausalLM

    needs_kernels()
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=16384, num_hidden_layers=8, **sizes, eos_token_id=None, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    screen = config.vocab_size * (config.hidden_size + 12)  # a copy of the head in bytes
    assert _measured(folders("llama"), tmp_path / "model", 0)["growth"] < 1.15 * size + screen


@LINUX
def test_a_model_larger_than_its_budget_keeps_to_it_and_reads_the_disk(folders: Any, tmp_path: Path) -> None:
    """Counted in a process of its own: its peak, loading included, and what the block device sent."""
    import os

    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, num_hidden_layers=40, **sizes, bos_token_id=1, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # pages that are not yet on the disk cannot leave the cache
    size = file.stat().st_size
    budget = 48 * 10**6
    small, whole = (_measured(folders("llama"), tmp_path / "model", given) for given in (budget, 0))
    assert size > 3 * budget and whole["growth"] > size
    assert 0 < small["facts"]["streamed_layers"] < 40
    assert small["growth"] < budget + 16 * 10**6, small  # keys, values and what the allocator keeps
    assert small["text"] == whole["text"]
    if small["read"]:  # else the folder is in memory, or the kernel does not count
        assert small["read"] > 0.9 * small["passes"] * small["facts"]["disk_bytes_per_pass"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with a model of eight small layers, and a budget of a few of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path, tokenizer = tmp_path_factory.mktemp("deep"), byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=8, **sizes, bos_token_id=1, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    whole = streaming(load_model(path, dtype="fp32", memory_budget="1GB").model)
    assert whole is not None
    return path, whole.chosen.resident_bytes - 1


@LINUX
def test_commands_take_a_budget_and_show_it(deep: tuple[Path, int], tmp_path: Path) -> None:
    """generate writes the same text; doctor, bench speed and bench offload say what is streamed."""
    folder, budget = deep
    common = ("--target", folder, "--dtype", "fp32", "--json", "--memory-budget")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "abcabcabc"}))
    given = ("generate", "abcabc", "--shape", "chain4", "--max-new-tokens", 24, *common)
    small, whole = succeed(*given, budget), succeed(*given, "1GB")
    assert (
        small["text"] == whole["text"] and small["memory"]["streamed_layers"] > 0 == whole["memory"]["streamed_layers"]
    )
    assert succeed("doctor", *common, budget)["target"]["streamed_layers"] == small["memory"]["streamed_layers"]
    more = ("--tasks", prompts, "--max-new-tokens", 16, "--methods", "plain,chain4", *common, budget)
    assert succeed("bench", "speed", *more)["provenance"]["disk_bytes_per_pass"] > 0
    found = succeed("bench", "offload", "--drafter", "ngram", *more)
    plain, chain = found["offload"]
    assert plain["speedup"] == plain["acceptance_length"] == 1 and chain["acceptance_length"] > 1
    assert chain["share"] == pytest.approx(chain["speedup"] / chain["acceptance_length"])
    assert all(method["equal_text"] for method in found["methods"])


@LINUX
def test_what_was_not_read_from_the_disk_is_said(deep: tuple[Path, int]) -> None:
    facts = streaming(load_model(deep[0], dtype="fp32", memory_budget=deep[1]).model)
    assert facts is not None
    read = float(facts.chosen.pass_bytes)
    assert "only 50% of" in cached([Offloaded("plain", 1.0, 1.0, 1.0, 1.0, 0.5 * read)], facts)
    assert not cached([Offloaded("plain", 1.0, 1.0, 1.0, 1.0, read)], facts)
    assert not cached([Offloaded("plain", 1.0, 1.0, 1.0, 1.0, None)], facts)


@LINUX
def test_the_least_budget_that_a_refusal_names_works(folders: Any) -> None:
    folder = folders("llama")
    budget = least(folder)
    assert load_model(folder, memory_budget=budget).model is not None


@LINUX
def test_a_budget_for_everything_streams_nothing(folders: Any) -> None:
    engine = outrider.load(str(folders("llama")), "off", memory_budget="1GB")
    assert not streamed_parts(engine.model) and "0 of 2 layers" in str(streaming(engine.model))


@pytest.mark.parametrize(
    "given, size",
    [
        ("200MB", 200e6),
        ("2GB", 2e9),
        ("1.5gb", 1.5e9),
        ("2GiB", 2**31),
        ("512 MiB", 2**29),
        ("1000", 1e3),
        (7, 7),
        ("3k", 3e3),
    ],
)
def test_sizes_are_read_as_written(given: Any, size: float) -> None:
    assert parse_bytes(given) == size


@pytest.mark.parametrize(
    "given", ["", "much", "-2GB", "0", "0MB", "2 G B", "2GBB", "nan", 0, -5, True, 1.5, None, "1e9"]
)
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(given)


def test_layers_stay_while_the_budget_lasts_and_streamed_ones_are_spread() -> None:
    layers = [Layer(10, 10)] * 8
    assert split("m", 180, 100, layers).streamed == ()
    some = split("m", 170, 100, layers)
    assert (
        some.streamed == (1, 3, 5, 7) and some.resident_bytes == 140 and some.way_bytes == 30 and some.pass_bytes == 40
    )
    assert split("m", 130, 100, layers).streamed == tuple(range(8))
    with pytest.raises(ValueError, match=r"stays take 0.0001 MB.*at least 1MB"):
        split("m", 129, 100, layers)


@LINUX
def test_what_cannot_be_streamed_is_refused_with_a_reason(folders: Any) -> None:
    with pytest.raises(ValueError, match="in memory already"):
        outrider.load(tiny("llama"), "off", memory_budget="1GB")
    with pytest.raises(ValueError, match="is no size"):
        outrider.load(str(folders("llama")), "off", memory_budget="lots")
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs the CPU"):
            outrider.load(str(folders("llama")), "off", device="cuda", memory_budget="1GB")
