"""Noise is a pure function of (seed, stream, position, token): the same on every device, in every version, for ever.

Statistical tests have fixed seeds and so always the same result; each limit says how unlikely a fair source is to miss it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import chi_square_p
from outrider.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, gumbel, mix, uniform

LIMIT = 1e-4
SEEDS = st.integers(-(2**70), 2**70)
# computed once, in the first version
GOLDEN = {
    "mix(0)": 16294208416658607535,
    "mix(7, 0, 3)": 1846129603375045472,
    "mix(2**63, 3, 10**6, 5)": 13001735762629391058,
    "uniform(7, ACCEPT, 3, 1)": 0.4096443418135305,
    "gumbel(7, TARGET, 3)": [-0.1326488, 0.4565905, 0.3571574, 3.8135161],
    "gumbel(0, RESIDUAL, 0)": [0.3994301, -0.4916381, 3.4669759, 0.7947419],
    "gumbel(big, DRAFT, 4096)": [0.2242007, -0.0957632, -0.875883, 0.2167112],
    "argmax of 50000": [20611, 41370, 21574, 43899, 25138],
}


def test_golden_values_that_must_never_change() -> None:
    """A seed in somebody's notes must give the same text in every later version and on every device."""
    assert mix(0) == GOLDEN["mix(0)"]
    assert mix(7, 0, 3) == GOLDEN["mix(7, 0, 3)"]
    assert mix(2**63, 3, 10**6, 5) == GOLDEN["mix(2**63, 3, 10**6, 5)"]
    assert uniform(7, ACCEPT, 3, 1) == GOLDEN["uniform(7, ACCEPT, 3, 1)"]
    assert gumbel(7, TARGET, 3, 4).tolist() == pytest.approx(GOLDEN["gumbel(7, TARGET, 3)"], abs=1e-6)
    assert gumbel(0, RESIDUAL, 0, 4).tolist() == pytest.approx(GOLDEN["gumbel(0, RESIDUAL, 0)"], abs=1e-6)
    assert gumbel(12345678901234567890, DRAFT, 4096, 4).tolist() == pytest.approx(
        GOLDEN["gumbel(big, DRAFT, 4096)"], abs=1e-6
    )
    assert [int(gumbel(1, TARGET, p, 50000).argmax()) for p in range(5)] == GOLDEN["argmax of 50000"]
    assert (TARGET, ACCEPT, RESIDUAL, DRAFT) == (0, 1, 2, 3)


@given(SEEDS, st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40))
def test_a_token_has_its_noise_whatever_the_vocabulary(
    seed: int, stream: int, position: int, small: int, big: int
) -> None:
    small, big = sorted((small, big))
    one, other = gumbel(seed, stream, position, small), gumbel(seed, stream, position, big)
    assert torch.equal(one, other[:small])
    assert torch.equal(other, gumbel(seed, stream, position, big))
    assert other.dtype == torch.float32
    assert torch.isfinite(other).all()


def test_noise_does_not_depend_on_torchs_generator_or_on_what_was_drawn_before() -> None:
    """Python's or torch's generators made seeds useless elsewhere: a round without drafts moved them on."""
    torch.manual_seed(1)
    one = gumbel(5, TARGET, 9, 100)
    torch.manual_seed(2)
    torch.rand(17)
    gumbel(6, TARGET, 9, 3)
    assert torch.equal(gumbel(5, TARGET, 9, 100), one)


@given(SEEDS, st.integers(0, 10**9))
def test_streams_positions_and_seeds_have_different_noise(seed: int, position: int) -> None:
    drawn = [gumbel(seed, stream, position, 8) for stream in range(4)]
    drawn += [gumbel(seed, TARGET, position + 1, 8), gumbel(seed + 1, TARGET, position, 8)]
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            assert not torch.equal(one, other)
    assert len({uniform(seed, ACCEPT, position, c) for c in range(8)} | {uniform(seed, DRAFT, position)}) == 9


@given(st.lists(SEEDS, min_size=1, max_size=4))
def test_uniform_numbers_are_in_range(words: list[int]) -> None:
    assert 0.0 <= uniform(words[0], ACCEPT, 0, words[-1]) < 1.0
    assert 0 <= mix(*words) < 2**64


def sample(count: int = 2**16, size: int = 16, seed: int = 1) -> torch.Tensor:
    """Noise of many positions, [count / size, size]."""
    return torch.stack([gumbel(seed, TARGET, position, size) for position in range(count // size)])


def test_the_noise_is_gumbel() -> None:
    """Mean and variance within 5 standard errors (a fair source misses one of them once in a million), and a chi-square over
    32 equally likely cells."""
    x = sample().double().flatten()
    n = len(x)
    variance = math.pi**2 / 6
    assert abs(float(x.mean()) - 0.5772156649) < 5 * math.sqrt(variance / n)
    # the kurtosis of the law is 5.4: Var(s^2) = (5.4 - 1) * sigma^4 / n
    assert abs(float(x.var()) - variance) < 5 * math.sqrt(4.4 * variance**2 / n)
    cells = (torch.exp(-torch.exp(-x)) * 32).long().clamp(0, 31).bincount(minlength=32)
    assert chi_square_p(cells.tolist(), [1 / 32] * 32) > LIMIT


def test_the_tail_that_decides_draws_is_fine_grained() -> None:
    """Large noise decides: its tail must reach as far as that of a fair source, in steps too small to matter."""
    x = torch.cat([gumbel(2, TARGET, position, 2**16) for position in range(16)])  # 2**20 numbers
    top = x.sort(descending=True).values
    assert 10 < float(top[0]) < 25  # log(2**20) = 13.9; outside with a chance below 1e-4
    assert len(top[:5000].unique()) > 4950  # float32 alone merges a few
    assert float((x > 10).sum()) == pytest.approx(2**20 * -math.expm1(-math.exp(-10.0)), rel=0.6)


@pytest.mark.parametrize("shift", ["token", "position", "seed", "stream", "both"])
def test_neighbours_are_not_correlated(shift: str) -> None:
    """The correlation of 2**16 fair pairs is below 4.5 / 2**8 but once in 150,000 times."""
    count, size = 2**12, 16
    one = sample(count * size, size)
    if shift == "token":
        a, b = one[:, :-1], one[:, 1:]
    elif shift == "position":
        a, b = one[:-1], one[1:]
    elif shift == "seed":
        a, b = one, sample(count * size, size, seed=2)
    elif shift == "stream":
        a, b = one, torch.stack([gumbel(1, RESIDUAL, position, size) for position in range(count)])
    else:
        a, b = one[:-1, 1:], one[1:, :-1]
    correlation = float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])
    assert abs(correlation) < 4.5 / math.sqrt(a.numel())


def test_no_number_comes_twice() -> None:
    """Of 2**15 fair 32-bit numbers some 0.1 pairs are equal; five or more come with a chance below 1e-6."""
    x = torch.cat([gumbel(seed, TARGET, position, 64) for seed in range(16) for position in range(32)])
    assert len(x) == 2**15
    assert len(x) - len(x.unique()) < 40  # float32 rounds 32 bits to 24, which merges some neighbours
    words = [mix(seed, TARGET, position) for seed in range(100) for position in range(100)]
    assert len(set(words)) == 10_000


LOGITS = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, float("-inf")])


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_the_argmax_of_logits_and_noise_has_their_law(along: str) -> None:
    """20,000 draws against the softmax: a fair source gives a p-value below 1e-4 once in 10,000 times."""
    seen: Counter[int] = Counter()
    for i in range(20_000):
        key = (3, i) if along == "positions" else (i, 3)
        seen[int((LOGITS + gumbel(key[0], TARGET, key[1], 6)).argmax())] += 1
    assert chi_square_p([seen[t] for t in range(6)], LOGITS.softmax(-1).tolist()) > LIMIT


def test_the_best_two_of_logits_and_noise_are_draws_without_replacement() -> None:
    seen: Counter[tuple[int, ...]] = Counter()
    for i in range(20_000):
        seen[tuple((LOGITS + gumbel(4, DRAFT, i, 6)).topk(2).indices.tolist())] += 1
    p = LOGITS.softmax(-1).tolist()
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
    wanted = [p[a] * p[b] / (1 - p[a]) for a, b in pairs]
    assert chi_square_p([seen[pair] for pair in pairs], wanted) > LIMIT


def test_two_streams_of_a_position_draw_independently() -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for i in range(20_000):
        a = int((LOGITS + gumbel(4, TARGET, i, 6)).argmax())
        b = int((LOGITS + gumbel(4, RESIDUAL, i, 6)).argmax())
        seen[a, b] += 1
    p = LOGITS.softmax(-1).tolist()
    pairs = [(a, b) for a in range(6) for b in range(6)]
    assert chi_square_p([seen[pair] for pair in pairs], [p[a] * p[b] for a, b in pairs]) > LIMIT


def test_uniform_numbers_are_uniform() -> None:
    drawn = [
        uniform(seed, ACCEPT, position, trial) for seed in range(10) for position in range(200) for trial in range(5)
    ]
    cells = Counter(int(u * 20) for u in drawn)
    assert chi_square_p([cells[c] for c in range(20)], [1 / 20] * 20) > LIMIT
    pairs = Counter((int(a * 5), int(b * 5)) for a, b in itertools.pairwise(drawn))
    assert chi_square_p([pairs[a, b] for a in range(5) for b in range(5)], [1 / 25] * 25) > LIMIT
