"""The pieces of verification: residuals, acceptance, laws of unequal length, and the coupled walk."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from outrider.tree import TokenTree
from outrider.verify import ONE_HOT, Law, Trial, Verdict, acceptance, residual, verify_coupled, verify_mss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_residual_of_equal_laws_is_the_law_itself_and_never_nan(dtype: torch.dtype) -> None:
    """Where p and q are equal, the residual sums to zero: elsewhere that became NaN, a uniform token, or a crash."""
    p_V = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=dtype)
    assert torch.equal(residual(p_V, p_V.clone()), p_V)
    assert torch.equal(residual(p_V, p_V * 1.01), p_V)
    point = torch.tensor([0, 0, 1, 0], dtype=dtype)
    assert torch.equal(residual(point, ONE_HOT.probs(2, point)), point)


def test_a_residual_does_not_change_its_arguments() -> None:
    p_V, q_V = torch.tensor([0.7, 0.3]), torch.tensor([0.2, 0.8])
    kept = p_V.clone(), q_V.clone()
    assert torch.equal(residual(p_V, q_V), torch.tensor([1.0, 0.0]))
    assert torch.equal(p_V, kept[0])
    assert torch.equal(q_V, kept[1])


def test_acceptance_is_the_ratio_up_to_one() -> None:
    p_V, q_V = torch.tensor([0.2, 0.8, 0.0]), torch.tensor([0.8, 0.2, 0.0])
    assert acceptance(p_V, q_V, 0) == pytest.approx(0.25)
    assert acceptance(p_V, q_V, 1) == 1.0
    assert acceptance(p_V, q_V, 2) == 0.0


def test_a_law_fits_a_vocabulary_padded_to_another_length() -> None:
    q_V = torch.tensor([0.5, 0.25, 0.25])
    longer, shorter = torch.zeros(5, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    assert Law(q_V).probs(0, longer).tolist() == [0.5, 0.25, 0.25, 0, 0]
    assert Law(q_V).probs(0, longer).dtype == torch.float64
    assert Law(q_V).probs(0, shorter).tolist() == pytest.approx([2 / 3, 1 / 3])
    assert Law(q_V, (0,)).probs(1, longer).tolist() == [0, 0.5, 0.5, 0, 0]
    assert ONE_HOT.probs(3, longer).tolist() == [0, 0, 0, 1, 0]
    assert q_V.tolist() == [0.5, 0.25, 0.25]


def test_a_law_with_everything_taken_out_accepts_nothing() -> None:
    """Drawing without replacement can exhaust q: trials stop, and nothing is NaN."""
    q_V = torch.tensor([0.0, 1.0, 0.0])
    law_V = Law(q_V, (1,)).probs(0, torch.zeros(3))
    assert law_V.tolist() == [0, 0, 0]
    assert acceptance(torch.tensor([0.5, 0.3, 0.2]), law_V, 0) == 0.0


# -- the coupled rule --------------------------------------------------------------------------------------------------


def test_the_coupled_walk_asks_the_target_once_per_node_and_follows_it() -> None:
    tree = TokenTree(9)
    a, b = tree.add(0, 1), tree.add(0, 2)
    tree.add(a, 3)
    c = tree.add(b, 3)
    tree.add(c, 4)
    asked: Counter[int] = Counter()
    picks = {0: 2, b: 3, c: 7}

    def pick(node: int) -> int:
        asked[node] += 1
        return picks[node]

    assert verify_coupled(tree, pick) == Verdict([0, b, c], 7)
    assert asked == Counter({0: 1, b: 1, c: 1})
    assert verify_coupled(tree, pick).accepted == 2
    assert verify_coupled(TokenTree(9), lambda node: 5) == Verdict([0], 5)


def test_the_coupled_walk_ends_at_a_leaf_with_a_bonus_token() -> None:
    tree = TokenTree(9)
    leaf = tree.add(tree.add(0, 1), 1)
    assert verify_coupled(tree, lambda node: 1) == Verdict([0, 1, leaf], 1)


def test_nobody_is_asked_what_follows_the_end_of_a_text() -> None:
    """A processor with a grammar has no answer there."""
    tree = TokenTree(9)
    end = tree.add(tree.add(0, 5), 3)
    tree.add(end, 4)

    def pick(node: int) -> int:
        assert node != end
        return tree.tokens[node + 1]

    found = verify_coupled(tree, pick, ends={3})
    assert found.path == [0, 1, end] and found.next_token == 3

    def law(node: int) -> torch.Tensor:
        return torch.eye(10)[pick(node)]

    trials = {node: [Trial(child) for child in children] for node, children in enumerate(tree.children)}
    found = verify_mss(tree, trials, law, lambda node, trial: 0.5, lambda node, p_V: int(p_V.argmax()), {3})
    assert found.path == [0, 1, end]
