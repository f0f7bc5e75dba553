"""Weights that were packed are given back, and nothing that was written is ever lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from native_kernels import needs_kernels
from outrider.models import draft_vocab
from outrider.models.draft_vocab import CutHead
from outrider.models.packed import Packed
from outrider.models.resident import release
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
