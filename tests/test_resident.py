"""Weights that were packed are given back, and nothing that was written is ever lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from families import tiny
from native_kernels import needs_kernels
from outrider.models import draft_vocab
from outrider.models.draft_vocab import CutHead
from outrider.models.packed import Packed
from outrider.models.resident import private_maps, release, were_written
from outrider.models.stamp import stamp
from outrider.native import layout
from outrider.native.layout import CHUNK, TILE, Layout

SIZE = 512

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are a file's")


def mapped(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor that is mapped from a file, and its values."""
    values = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"weight": values}, folder / "weights.safetensors")
    with safe_open(folder / "weights.safetensors", "pt") as file:
        return file.get_tensor("weight"), values


def test_a_mapped_tensor_is_given_back_and_reads_the_same(tmp_path: Path) -> None:
    weight, values = mapped(tmp_path)
    assert torch.equal(weight, values)  # now in memory
    assert release(weight) > 0.9 * weight.numel() * 2
    assert release(weight) == 0  # nothing of it is in memory any more
    assert torch.equal(weight, values)


def test_what_was_written_stays(tmp_path: Path) -> None:
    weight, values = mapped(tmp_path)
    weight[SIZE // 2] = 1.0
    assert 0 < release(weight) < weight.numel() * 2
    values[SIZE // 2] = 1.0
    assert torch.equal(weight, values)


def test_what_was_written_is_told_without_reading_it(tmp_path: Path) -> None:
    weight, _ = mapped(tmp_path)
    release(weight)
    at = weight.data_ptr()
    places = [at, at + weight[SIZE // 2].storage_offset() * 2]
    assert were_written(places) == [False, False] and were_written([]) == []
    assert release(weight) == 0, "nothing was read in"
    weight.data[SIZE // 2].add_(1.0)
    assert were_written(places) == [False, True]


def test_only_private_mappings_of_files_are_told_from_other_memory(tmp_path: Path) -> None:
    weight, _ = mapped(tmp_path)
    own, shared = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE).share_memory_()
    assert private_maps([weight, own, shared, torch.empty(0)]) == {weight.data_ptr()}


def test_asking_whether_a_model_changed_brings_no_weight_back(tmp_path: Path) -> None:
    """The system maps sixteen pages around each one that is looked at: of some hundred weights that would be megabytes."""
    tiny("llama").save_pretrained(tmp_path)
    model = type(tiny("llama")).from_pretrained(tmp_path)
    known, before = stamp(model), sum(release(weight) for weight in model.parameters())
    assert before >= 0 and stamp(model, known) == known and stamp(model) == known
    assert sum(release(weight) for weight in model.parameters()) == 0
    model.lm_head.weight.data[0, 0] += 1.0
    changed = stamp(model, known)
    assert changed != known and stamp(model, changed) == changed
    model.lm_head.weight.data[0, 0] += 1.0
    assert stamp(model, changed) != changed


@pytest.mark.parametrize("tensor", [torch.ones(SIZE, SIZE), torch.ones(3), torch.empty(0)])
def test_ordinary_memory_stays(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    assert release(tensor) == 0 and torch.equal(tensor, before)


def test_a_weight_that_was_laid_out_is_given_back_and_reads_the_same(tmp_path: Path) -> None:
    needs_kernels()
    weight, values = mapped(tmp_path)
    assert torch.equal(weight, values)  # now in memory
    layout = Layout([weight])
    assert layout.address(weight) and layout.address(values) is None
    assert release(weight) == 0  # nothing of it is in memory any more
    assert torch.equal(weight, values)


@pytest.mark.parametrize("outs", [16, 47, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + TILE - 1, CHUNK + TILE, 2 * CHUNK + 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_laid_out_alike_in_one_part_or_in_many(
    outs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts end where whole pieces do, and the last one is a tile or more."""
    needs_kernels()
    weight = torch.randn(outs, 8, generator=torch.Generator().manual_seed(outs)).to(dtype)
    parts = Layout([weight]).memory.clone()
    monkeypatch.setattr(layout, "CHUNK", 3 * CHUNK)
    assert torch.equal(parts, Layout([weight]).memory)


def test_a_packed_layer_still_has_its_weights(tmp_path: Path) -> None:
    weight, values = mapped(tmp_path)
    layer = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.ones(2, SIZE, dtype=torch.bfloat16)
    plain, packed = layer(x), Packed(torch.nn.Sequential(layer))
    with packed.active():
        assert torch.equal(layer(x), plain)
    assert torch.equal(layer.weight, values)


@pytest.mark.parametrize("ids", [[-1, 2], [0, SIZE]])
def test_a_draft_vocabulary_beyond_the_targets_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="damaged"):
        CutHead(torch.zeros(SIZE, 4), torch.tensor(ids))


def test_rows_of_a_head_are_cut_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read part after part."""
    monkeypatch.setattr(draft_vocab, "ROWS", 100)
    weight, values = mapped(tmp_path)
    ids = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))[:300]
    assert torch.equal(CutHead(weight, ids).linear.weight, values[ids])
