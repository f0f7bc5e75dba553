"""Gated-delta mixers by compiled kernels compute what they compute without them, for trees, batches and all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import PROMPT, committed_tensors
from native_kernels import needs_kernels, without_kernels
from outrider.models.factor_model import FactorTreeModel
from outrider.models.gdn import GatedDeltaMixer, GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from outrider.native.delta import DeltaKernel
from outrider.native.linear import FEW_ROWS

pytestmark = pytest.mark.usefixtures("kernels")
VOCAB = 48
SIZES: dict[str, dict[str, Any]] = {
    "even": {"num_heads": 2, "head_dim": 16, "expand_v": 1.0},
    "shared key heads, odd sizes": {"num_heads": 2, "num_v_heads": 4, "head_dim": 9, "expand_v": 7 / 9},
    "biases, no gate": {"num_heads": 3, "head_dim": 5, "expand_v": 2.0, "conv_bias": True, "use_gate": False},
    "doubled beta, long windows": {"num_heads": 1, "head_dim": 33, "allow_neg_eigval": True, "conv_size": 6},
    "two taps, hybrid": {"num_heads": 2, "head_dim": 8, "conv_size": 2, "attn": {"layers": [1], "num_heads": 2}},
}


@pytest.fixture
def kernels() -> None:
    needs_kernels()


def model(sizes: str, dtype: torch.dtype) -> GatedDeltaNetForCausalLM:
    torch.manual_seed(0)
    options = {"hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 40, "vocab_size": VOCAB, **SIZES[sizes]}
    made = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(initializer_range=0.2, **options))
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return made.to(dtype).eval().requires_grad_(False)


def rounds(target: FactorTreeModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of trees of two rows of unlike length, fed in one or several calls, and what is committed at the end."""
    state = target.begin([list(PROMPT), list(PROMPT)[:3]], 8)
    found = []
    for turn in range(4):
        found.append(state.extend([[turn, 8, 15, 16], [7, 9, 4, 5]], [[-1, 0, 0, 2], [-1, 0, 1, 2]]))
        found.append(state.extend([[3, 4], [6, 2]], [[3, 1], [1, 3]]))
        state.commit([[0, 2, 3, 4], [0, 1] if turn % 2 else []])
    for token in range(24):  # buffers grow
        found.append(state.extend([[token], [token + 1]], [[token - 1], [-1]]))
    state.commit([list(range(12)), [23]])
    state.keep([1])
    found.append(state.extend([[5]], [[-1]]))
    state.commit([[0]])
    return found, committed_tensors(state)


@pytest.mark.parametrize("sizes", SIZES)
def test_trees_score_as_without_kernels(sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FactorTreeModel(model(sizes, torch.float32))
    assert len(target.kernels) == sum(isinstance(mixer, GatedDeltaMixer) for mixer in target.mixers) > 0
    got, held = rounds(target)
    without_kernels(monkeypatch)
    plain = FactorTreeModel(model(sizes, torch.float32))
    assert not plain.kernels
    wanted, kept = rounds(plain)
    for ours, theirs in zip([*got, *held], [*wanted, *kept]):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("sizes", SIZES)
def test_bf16_is_as_near_to_the_truth_as_without_kernels(sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The truth: the same weights in float32. Errors are compared over all logits, since single ones are luck."""
    got, _ = rounds(FactorTreeModel(model(sizes, torch.bfloat16)))
    without_kernels(monkeypatch)
    plain, _ = rounds(FactorTreeModel(model(sizes, torch.bfloat16)))
    truth, _ = rounds(FactorTreeModel(model(sizes, torch.bfloat16).float()))

    def error(logits: list[torch.Tensor]) -> float:
        return float(torch.cat([(a.float() - b).flatten() for a, b in zip(logits, truth)]).square().mean().sqrt())

    assert 0 < error(got) < 1.25 * error(plain)


def test_kernels_are_asked_for_few_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, inner = [], DeltaKernel.__call__

    def counted(self: DeltaKernel, x_BND: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(x_BND.shape[1])
        return inner(self, x_BND, *rest)

    monkeypatch.setattr(DeltaKernel, "__call__", counted)
    target = FactorTreeModel(model("even", torch.float32))
    state = target.begin([list(PROMPT)], 64)
    for many in (FEW_ROWS, FEW_ROWS + 1):
        state.extend([[1] * many], [list(range(-1, many - 1))])
        state.commit([[0]])
    assert calls == [FEW_ROWS] * len(target.kernels)


def test_wide_states_and_other_devices_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not FactorTreeModel(model("even", torch.float64)).kernels
    target = FactorTreeModel(model("even", torch.float32))
    state = target.begin([list(PROMPT)], 8)
    for layer in state.cache.states.layers.values():
        layer.state_B = layer.state_B.double()
    monkeypatch.setattr(DeltaKernel, "__call__", lambda *args: pytest.fail("the kernel cannot read these"))
    state.extend([[1, 2]], [[-1, 0]])
