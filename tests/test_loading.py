"""Promises of loading: every kind of name works or fails in one sentence, and no model runs on weights it lacks."""

import json
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.models import convert, hub, loading
from outrider.models.catalog import ALIASES, DEFAULT
from outrider.models.loading import list_models, load_model, parse_dtype, pick_device, pick_dtype

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    if "real" not in request.keywords:
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def _refused(name: Any, match: str, **options: Any) -> str:
    with pytest.raises(ValueError, match=match) as error:
        load_model(name, **options)
    text = str(error.value)
    assert "\n" not in text and text.endswith(".")
    return text


def _edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or, with None, remove tensors whose names end like a key."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for ending, tensor in changes.items():
        name = next((name for name in tensors if name.split(".")[-2] == ending), f"model.{ending}.weight")
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_ready_to_run(folder: Path) -> None:
    loaded = load_model(folder, dtype="fp32", device="cpu")
    assert (loaded.source, loaded.name, loaded.tokenizer) == ("folder", str(folder), None)
    assert not loaded.model.training and not any(weight.requires_grad for weight in loaded.model.parameters())
    original = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits)


@pytest.mark.parametrize("name", ["bf16", "float64", torch.float16])
def test_the_dtype_asked_for_is_the_dtype_of_every_weight(folder: Path, name: str | torch.dtype) -> None:
    model = load_model(folder, dtype=name, device="cpu").model
    assert {weight.dtype for weight in model.parameters()} == {parse_dtype(name)}


def test_a_tokenizer_in_the_folder_is_loaded_and_a_broken_one_refused(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None and tokenizer("b a c").input_ids == [1, 0, 2]
    (folder / "tokenizer.json").write_text("{")
    _refused(folder, "tokenizer")


def test_a_folder_of_pickles_is_refused(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "safetensors" in _refused(folder, "pickled")


def test_a_folder_without_weights_or_config_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    _refused(folder, "holds no weights")
    (folder / "config.json").unlink()
    _refused(folder, r"no config\.json")


def test_missing_tensors_are_never_made_up(folder: Path) -> None:
    _edit(folder, q_proj=None)
    assert "q_proj" in _refused(folder, "lacks 1 of the tensors")


def test_tied_tensors_are_not_missing(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load_model(folder).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tensors_without_a_place_are_reported(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.warns(UserWarning, match="9 tensors of the checkpoint have no place"):
        load_model(folder)


def test_tensors_of_another_shape_are_refused(folder: Path) -> None:
    _edit(folder, norm=torch.ones(7))
    _refused(folder, "cannot be loaded")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float) -> None:
    _edit(folder, norm=torch.full((32,), value))
    assert "model.norm.weight" in _refused(folder, "NaN or infinite", dtype="bf16")


def test_weights_whose_sum_overflows_are_fine(folder: Path) -> None:
    _edit(folder, norm=torch.full((32,), 3e38))
    load_model(folder, dtype="fp32")


def test_broken_files_are_one_sentence(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    _refused(folder, "cannot be loaded")
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "config.json").write_text('{"model_type": ')
    _refused(folder, "cannot be loaded")
    (folder / "config.json").write_text('{"model_type": "no_such_family"}')
    _refused(folder, "cannot be loaded")


# --- names, dtypes, devices -----------------------------------------------------------------------------------------


def test_unknown_names_list_what_there_is() -> None:
    text = _refused("smolm2-135m", "no model named")
    assert "did you mean smollm2-135m?" in text and all(alias in text for alias in ALIASES)
    _refused("./nowhere", "no file or folder")
    _refused("nowhere.gguf", "no file or folder")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    _refused(tmp_path / "model.gguf", "not a GGUF file")


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(hub, "_reachable", lambda: True)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", unreachable)
    assert "We couldn't connect" in _refused("org/name", "model hub")


def test_without_a_network_nobody_waits_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route")

    for name in ("getproxies", "create_connection"):
        monkeypatch.setattr(hub if name == "getproxies" else hub.socket, name, dict if name == "getproxies" else refuse)
    monkeypatch.delenv("ALL_PROXY", raising=False)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    start = time.monotonic()
    _refused("org/name", "cannot be reached")
    assert time.monotonic() - start < 2.0
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "/somewhere/config.json")
    assert hub.only_cached("org/name")


def test_impossible_dtypes_and_devices_are_refused(folder: Path) -> None:
    _refused(folder, "dtype 'int8'", dtype="int8")
    _refused(folder, "device 'frog'", device="frog")
    _refused(folder, "device 'meta'", device="meta")
    _refused(folder, "device 'cuda:99'", device="cuda:99")


def test_without_a_wish_the_machine_decides() -> None:
    assert pick_device(None) == pick_device("auto")
    assert pick_dtype("cpu") in (torch.bfloat16, torch.float32)


def test_a_live_model_is_used_as_it_is(saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).train()
    loaded = load_model(model, dtype="fp32", device="cpu")
    assert loaded.model is model and loaded.source == "live" and not model.training
    assert all(weight.requires_grad for weight in model.parameters())
    assert "model.to(torch.bfloat16)" in _refused(model, "live model is torch.float32", dtype="bf16")


# --- GGUF and aliases -----------------------------------------------------------------------------------------------


def _write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama of two layers with a byte-level tokenizer; returns the tensors it was given."""
    numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for setting, value in (("block_count", 2), ("context_length", 64), ("embedding_length", 32)):
        getattr(writer, f"add_{setting}")(value)
    for setting, value in (("feed_forward_length", 64), ("head_count", 4), ("head_count_kv", 2)):
        getattr(writer, f"add_{setting}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|end|>", *pre_tokenizers.ByteLevel.alphabet(), "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    given = {"token_embd.weight": numbers.standard_normal((len(tokens), 32), dtype=np.float32)}
    for layer in range(2):
        for name, rows, columns in (
            ("attn_q", 32, 32),
            ("attn_k", 16, 32),
            ("attn_v", 16, 32),
            ("attn_output", 32, 32),
            ("ffn_gate", 64, 32),
            ("ffn_up", 64, 32),
            ("ffn_down", 32, 64),
        ):
            given[f"blk.{layer}.{name}.weight"] = numbers.standard_normal((rows, columns), dtype=np.float32)
        for name in ("attn_norm", "ffn_norm"):
            given[f"blk.{layer}.{name}.weight"] = np.ones(32, dtype=np.float32)
    given["output_norm.weight"] = np.ones(32, dtype=np.float32)
    for key, array in given.items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return given


def test_a_gguf_file_is_converted_once_and_keeps_its_weights(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _write_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", dtype="bf16", device="cpu")
    assert loaded.source == "gguf" and loaded.tokenizer is not None
    expected = torch.from_numpy(given["token_embd.weight"]).bfloat16()
    assert torch.equal(loaded.model.model.embed_tokens.weight, expected)
    assert loaded.model.generation_config.eos_token_id == 0
    assert loaded.tokenizer.decode(loaded.tokenizer("a b, é").input_ids) == "a b, é"
    monkeypatch.setattr(convert, "_convert", lambda *_: pytest.fail("it was converted again"))
    again = load_model(tmp_path / "tiny.gguf", dtype="bf16", device="cpu")
    assert torch.equal(again.model.lm_head.weight, expected)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == [
        Path(again.model.name_or_path).name
    ]


def test_a_converted_model_that_lost_bytes_is_made_again(tmp_path: Path, cache: Path) -> None:
    _write_gguf(tmp_path / "tiny.gguf")
    folder = Path(load_model(tmp_path / "tiny.gguf", dtype="bf16", device="cpu").model.name_or_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(whole[:-100])
    load_model(tmp_path / "tiny.gguf", dtype="bf16", device="cpu")
    assert weights.read_bytes() == whole


def test_a_damaged_gguf_file_is_one_sentence(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    _refused(tmp_path / "bad.gguf", "cannot be converted")
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_a_half_converted_folder_is_never_taken_for_a_model(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "some.gguf"
    source.write_bytes(b"GGUF")

    def interrupted(path: Path, clean: Path) -> None:
        clean.mkdir()
        (clean / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert.convert_file(source)
    left = cache / "models" / f".{next((cache / 'models').glob('.*.lock')).name[1:-5]}.making-dead"
    left.mkdir()  # what a killed process leaves
    monkeypatch.setattr(convert, "_convert", lambda path, clean: clean.mkdir())
    assert convert.convert_file(source).is_dir()
    assert not left.exists()


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "some.gguf"
    source.write_bytes(b"GGUF")
    runs: list[Path] = []

    def slow(path: Path, clean: Path) -> None:
        runs.append(clean)
        time.sleep(0.2)
        clean.mkdir()

    monkeypatch.setattr(convert, "_convert", slow)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(convert.convert_file(source))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1 and len(set(folders)) == 1 and len(folders) == 2


def test_the_end_of_a_turn_ends_a_text() -> None:
    class Chat:
        chat_template = "...<end_of_turn>..."
        eos_token_id = 1

        def get_vocab(self) -> dict[str, int]:
            return {"<eos>": 1, "<end_of_turn>": 106, "<|im_end|>": 7}

    assert convert._end_ids(Chat(), LlamaConfig(eos_token_id=1)) == [1, 106]


def test_the_list_of_models_tells_where_they_stand() -> None:
    infos = {info.name: info for info in list_models()}
    assert set(infos) == set(ALIASES) and infos[DEFAULT].is_default
    assert not any(info.is_fetched or info.is_converted or info.bytes_on_disk for info in infos.values())


@pytest.mark.real
def test_the_default_model_speaks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_model(DEFAULT)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(loaded.model.generate(**ids, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in text
