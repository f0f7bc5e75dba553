"""The command line: one object of JSON for scripts, one line and exit 2 for mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from families import tiny
from outrider.cli import app
from toy import byte_tokenizer

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "rounds",
    "drafted",
    "accepted",
    "acceptance_length",
    "acceptance_rate",
    "tokens_per_second",
    "seconds",
    "shapes",
    "target",
    "drafter",
    "dtype",
    "rule",
    "seed",
    "memory",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, as a folder."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny("llama", vocab=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def generate(folder: Path, *more: object) -> dict:
    code, out, err = run("generate", "abcabcab", "--target", folder, "--dtype", "fp32", "--json", *more)
    assert code == 0, err
    return json.loads(out)


def test_json_is_one_object_with_the_promised_keys(folder: Path) -> None:
    got = generate(folder, "--max-new-tokens", 12, "--shape", "chain4")
    assert set(got) == KEYS
    assert set(got["seconds"]) == {"load", "prefill", "draft", "verify", "commit", "total"}
    assert got["completion_tokens"] == len(got["token_ids"]) == 12
    assert sum(got["shapes"].values()) == got["rounds"]


@pytest.mark.parametrize("more", [(), ("--temperature", "0.8", "--seed", "5", "--top-p", "0.9")])
@pytest.mark.parametrize("shape", ["auto", "3x2x2", "best8", "[[0],[0,0],[1]]"])
def test_every_shape_writes_the_text_of_plain_decoding(folder: Path, shape: str, more: tuple[str, ...]) -> None:
    plain = generate(folder, "--shape", "off", *more)
    assert generate(folder, "--shape", shape, *more)["token_ids"] == plain["token_ids"]


def test_people_get_the_text_and_one_summary_line(folder: Path) -> None:
    code, out, err = run("generate", "abc", "--target", folder, "--max-new-tokens", 5)
    assert code == 0 and out.strip()
    summary = [line for line in err.splitlines() if "tokens per pass" in line]
    assert len(summary) == 1 and "tokens/s" in summary[0] and "ngram" in summary[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("generate", "x", "--target", "no-such-model"), "no-such-model"),
        (("generate", "x", "--target", "FOLDER", "--drafter", "nosuch"), "no drafter named 'nosuch'"),
        (("generate", "x", "--target", "FOLDER", "--drafter", "ngram>"), "names nobody"),
        (("generate", "x", "--target", "FOLDER", "--drafter", "+"), "names nobody"),
        (("generate", "", "--target", "FOLDER"), "empty"),
        (("generate", "x", "--target", "FOLDER", "--max-new-tokens", "-1"), "max_new_tokens"),
        (("generate", "x", "--target", "FOLDER", "--shape", "0x2"), "shape"),
        (("generate", "x", "--target", "FOLDER", "--shape", "99x99x99"), "nodes"),
        (("generate", "x", "--target", "FOLDER", "--shape", "warp", "--drafter", "off"), "shape 'warp'"),
        (("generate", "x" * 600, "--target", "FOLDER"), "context"),
        (("generate", "x", "--target", "FOLDER", "--temperature", "-1"), "temperature"),
        (("generate", "x", "--target", "FOLDER", "--rule", "magic"), "rule"),
        (("generate", "x", "--target", "FOLDER", "--drafter", "oracle:2"), "rate"),
        (("generate", "x", "--target", "FOLDER", "--drafter", "oracle"), "rate"),
        (("generate", "x", "--target", "FOLDER", "--dtype", "int3"), "int3"),
        (("generate", "x", "--target", "FOLDER", "--device", "quantum"), "quantum"),
        (("generate", "x", "--target", "FOLDER", "--threads", "0"), "threads"),
        (("generate", "x", "--target", "FOLDER", "--memory-budget", "much"), "is no size"),
        (("generate", "x", "--target", "FOLDER", "--memory-budget", "1k"), "give at least"),
        (("doctor", "--memory-budget", "1GB"), "--target"),
        (("doctor", "--drafter", "ngram"), "--drafter is of a model"),
        (("doctor", "--device", "cpu"), "--device is of a model"),
        (("bench", "regret", "--out", "OUT", "--limit", "3"), "--limit is of a recording"),
        (
            ("prune", "--target", "FOLDER", "--out", "OUT", "--no-finetune", "--minutes", "3"),
            "--minutes is for fine-tuning",
        ),
        (("bench", "offload", "--target", "FOLDER", "--memory-budget", "1GB"), "nothing is streamed"),
        (("certify", "--target", "FOLDER", "--prompts", "no-such-task"), "no-such-task"),
        (("bench", "speed", "--target", "FOLDER", "--methods", "warp"), "warp"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(folder: Path, tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    places = {"FOLDER": str(folder), "OUT": str(tmp_path / "out")}
    code, out, err = run(*(places.get(a, a) for a in arguments))
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and not out.strip()
    assert len(lines) == 1 and lines[0].startswith("outrider: ") and word in lines[0]


@pytest.mark.parametrize("wrong", [("--shape", "0x2"), ("--temperature", "-1"), ("--top-p", "3"), ("--rule", "magic")])
def test_what_no_model_would_take_is_refused_before_one_is_loaded(wrong: tuple[str, ...]) -> None:
    code, _, err = run("generate", "x", "--target", "no-such-model", *wrong)
    assert code == 2 and "no-such-model" not in err and wrong[0].strip("-").replace("-", "_") in err


MEASURING = [
    *(("bench", name) for name in ("choice", "hostile", "forecast", "replay", "rates", "round", "context", "regret")),
    ("bench", "peers", "nowhere"),
    ("plan",),
    ("evaluate", "--drafter", "ngram"),
]


@pytest.mark.parametrize("command", MEASURING, ids=lambda command: command[min(1, len(command) - 1)])
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_loaded(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    found = CliRunner().invoke(app, [*command, "--target", "nowhere", "--out", str(tmp_path / "file" / "out")])
    assert found.exit_code == 2 and "cannot be written" in found.stderr and len(found.stderr.splitlines()) == 1


def test_recorded_texts_are_refused_a_place_that_is_none(tmp_path: Path) -> None:
    found = CliRunner().invoke(
        app, ["bench", "replay", "--tracks", str(tmp_path / "new" / "texts.json"), "--passes", "x"]
    )
    assert "no prices" in found.stderr and (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    found = CliRunner().invoke(app, ["bench", "replay", "--tracks", str(tmp_path / "file" / "texts.json")])
    assert found.exit_code == 2 and "cannot be written" in found.stderr


def test_damaged_weights_are_one_line(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = tiny("llama", seed=9, vocab=len(tokenizer))
    model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, _, err = run("generate", "x", "--target", tmp_path)
    assert code == 2 and len(err.strip().splitlines()) == 1


def test_certify_proves_a_right_pair(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"abcabc{i}"}) for i in range(3)))
    more = ("--dtype", "fp32", "--prompts", prompts, "--max-new-tokens", 16, "--samples", 200, "--json")
    code, out, err = run("certify", "--target", folder, "--drafter", folder, *more)
    assert code == 0, (out, err)
    assert json.loads(out)["certified"] is True


def test_bench_speed_reports_methods_and_provenance(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "abcabcabc"}))
    more = ("--tasks", prompts, "--dtype", "fp32", "--max-new-tokens", 16, "--methods", "transformers,plain,chain4")
    code, out, err = run("bench", "speed", "--target", folder, *more, "--json")
    assert code == 0, err
    got = json.loads(out)
    assert [m["method"] for m in got["methods"]] == ["transformers", "plain", "chain4"]
    assert all(m["equal_text"] for m in got["methods"]) and got["provenance"]


def test_bench_peers_goes_on_without_peers(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "abcabcabc"}))
    more = ("--tasks", prompts, "--dtype", "fp32", "--max-new-tokens", 8, "--methods", "plain,vllm", "--out", tmp_path)
    code, out, err = run("bench", "peers", tmp_path, "--target", folder, *more)
    assert code == 0, err
    assert "Left out: vllm. There is no" in out
    assert (tmp_path / "peers.png").exists() and json.loads((tmp_path / "peers.json").read_text())["left_out"]


def test_doctor_says_how_trees_are_scored(folder: Path) -> None:
    code, out, err = run("doctor", "--target", folder, "--dtype", "fp32", "--json")
    assert code == 0, err
    got = json.loads(out)
    assert got["target"]["way"].endswith("tree mask") and got["target"]["weight_bytes"] > 0
    assert run("doctor", "--target", folder)[0] == 0


def test_models_lists_the_aliases() -> None:
    code, out, _ = run("models", "--json")
    assert code == 0 and {m["name"] for m in json.loads(out)} == {"smollm2-135m", "gemma3-270m"}


def test_help_reads_without_torch() -> None:
    code, out, _ = run("--help")
    assert code == 0 and all(word in out for word in ("generate", "certify", "doctor", "bench", "models"))
    code_of_import = "import sys, outrider.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code_of_import], check=False).returncode == 0
