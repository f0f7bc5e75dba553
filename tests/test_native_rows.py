"""What a round takes from rows of numbers by compiled kernels: the best scores, joined inputs, embeddings, keys that move."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from families import tiny
from native_kernels import needs_kernels, without_kernels
from outrider import noise
from outrider.models.native import NativeTreeModel
from outrider.native import layout
from outrider.native.embedding import embedded, token_places
from outrider.native.highest import FEW, SURE, best, highest
from outrider.native.joined import JoinedProduct

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def kernels() -> None:
    needs_kernels()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 51, 300])
def test_the_best_scores_come_in_order_with_their_log_probabilities(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = torch.randint(-9, 9, (30, 2 * width), generator=generator).to(dtype)[
        :, :width
    ]  # many equal ones; rows lie apart
    scores[1] = float("-inf")
    scores[2, 1:] = float("-inf")
    logs = scores.float().log_softmax(-1)
    for count in (1, 3, FEW, FEW + 1):
        found = best(scores, count)
        for row, pairs in enumerate(found):
            order = sorted(range(width), key=lambda at: (-float(scores[row, at]), at))
            wanted = [at for at in order if scores[row, at] > -math.inf][:count]
            if count <= FEW:
                assert [place for place, _ in pairs] == wanted
            torch.testing.assert_close(
                torch.tensor([log for _, log in pairs]), logs[row, [place for place, _ in pairs]], atol=1e-5, rtol=1e-5
            )
        with monkeypatch.context() as patched:
            without_kernels(patched)
            plain = best(scores, count)
        assert [len(row) for row in plain] == [len(row) for row in found]
        for ours, theirs in zip(found, plain):
            assert [log for _, log in ours] == pytest.approx([log for _, log in theirs], abs=1e-4)


def test_the_highest_score_does_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    scores = torch.randint(-50, 50, (9, 1003)).bfloat16()
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(highest(scores))
    finally:
        torch.set_num_threads(before)
    assert found[0][0] == scores.float().argmax(-1).tolist() and found[0] == found[1] == found[2]


@pytest.mark.parametrize("size", [1, 16, 51, 1003])
def test_noise_has_the_bits_that_it_has_without_kernels(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [noise.gumbel(seed, noise.TARGET, seed + 5, size) for seed in range(40)]
    without_kernels(monkeypatch)
    for seed, ours in enumerate(found):
        assert torch.equal(ours, noise.gumbel(seed, noise.TARGET, seed + 5, size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 51, 1003])
def test_scores_with_noise_are_picked_by_the_same_bits(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = (3 * torch.randn(20, width, generator=generator)).to(dtype)
    scores[1, width // 2 :] = float("-inf")
    noise_V = noise.gumbel(0, noise.TARGET, 3, 2 * width)
    ids = torch.randperm(2 * width, generator=generator)[:width]
    found = [highest(scores, t, noise_V[:width]) for t in (0.7, 1.0, 1.3)]
    chosen = [best(scores, 4, 0.7, *given) for given in ((noise_V,), (noise_V, ids))]
    without_kernels(monkeypatch)
    assert found == [highest(scores, t, noise_V[:width]) for t in (0.7, 1.0, 1.3)]
    for ours, plain in zip(chosen, [best(scores, 4, 0.7, *given) for given in ((noise_V,), (noise_V, ids))]):
        assert [[place for place, _ in row] for row in ours] == [[place for place, _ in row] for row in plain]
        logs = [[log for row in rows for _, log in row] for rows in (ours, plain)]
        assert logs[0] == pytest.approx(logs[1], abs=1e-4)


@pytest.mark.parametrize("kernels", [True, False])
def test_chances_under_shared_noise_are_those_of_a_target_that_differs_by_noise(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same noise on top of p's scores, which are q's and Gumbel noise of scale 1 / SURE, picks each token so often."""
    if not kernels:
        without_kernels(monkeypatch)
    generator = torch.Generator().manual_seed(4)
    scores, noise_V = 2 * torch.randn(1, 8, generator=generator), noise.gumbel(0, noise.TARGET, 1, 8)
    chances = {place: math.exp(log) for place, log in best(scores, 8, 0.8, noise_V)[0]}
    uniform = torch.rand(40_000, 8, generator=generator, dtype=torch.float64).clamp(1e-12)
    target = scores[0] / 0.8 - (-uniform.log()).log() / SURE
    picked = (target + noise_V).argmax(-1).bincount(minlength=8) / len(target)
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-5)
    assert picked.tolist() == pytest.approx([chances[place] for place in range(8)], abs=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_joined_inputs_are_normed_and_multiplied_from_where_they_lie(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "multiplies_bytes", lambda: False)
    torch.manual_seed(0)
    norms = [nn.RMSNorm(40, eps=1e-5, dtype=dtype) for _ in range(2)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    linear = nn.Linear(80, 24, bias=False, dtype=dtype)
    product = JoinedProduct([norm.weight.detach() for norm in norms], 1e-5, linear)
    parts = [torch.randn(40).to(dtype) for _ in range(10)]
    found = product([part.data_ptr() for part in parts])
    first, second = torch.stack(parts[::2]), torch.stack(parts[1::2])
    wanted = linear(torch.cat([norms[0](first), norms[1](second)], dim=-1)).detach()
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5)
    many = product([part.data_ptr() for part in parts] * 60)  # more than are joined at a time
    assert torch.equal(many, found.repeat(60, 1))
    for row in range(5):
        assert torch.equal(product([parts[2 * row].data_ptr(), parts[2 * row + 1].data_ptr()])[0], found[row])


class _Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(ids)


@pytest.mark.parametrize("make", [nn.Embedding, _Scaled])
def test_embeddings_are_the_modules_own(make: Callable[[int, int], nn.Embedding]) -> None:
    embedding = make(20, 7).requires_grad_(False)
    for shape in ((1, 3), (2, 40), (1, 0)):
        ids = torch.randint(0, 20, shape)
        found = embedded(embedding, ids)
        assert torch.equal(found, embedding(ids))
        found += 1  # of its own
        places, held = token_places(embedding, ids.flatten().tolist())
        rows = [torch.frombuffer(bytearray(ctypes.string_at(place, 28)), dtype=torch.float32) for place in places]
        assert held is not None and all(torch.equal(a, b) for a, b in zip(rows, embedding(ids.flatten())))
    embedding.register_forward_hook(lambda module, given, out: -out)
    assert torch.equal(embedded(embedding, torch.tensor([[1, 2]])), embedding(torch.tensor([[1, 2]])))


def test_keys_of_a_path_come_to_lie_where_they_would_have_been_fed() -> None:
    target = NativeTreeModel(copy.deepcopy(tiny("llama")))
    tree = [[-1, -1, 1, 0, 2, 2, 5], [-1, 0, 0]]
    state, plain = (target.begin([[3, 4, 5], [6]], room=20) for _ in range(2))
    state.extend([[7, 8, 9, 10, 11, 12, 13], [14, 15, 16]], tree)
    assert state.cache.beside is not None
    state.commit([[1, 2, 5, 6], [0, 2]])
    for tokens in ([[8], [14]], [[9], [16]], [[12], []], [[13], []]):
        plain.extend(tokens, [[-1] * len(row) for row in tokens])
        plain.commit([[0] * len(row) for row in tokens])
    assert state.lengths == plain.lengths
    found, wanted = (one.extend([[17], [18]], [[-1], [-1]]) for one in (state, plain))
    assert torch.equal(found, wanted)
