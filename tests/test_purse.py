"""What drafting may lose is saved for: it is bounded whatever is believed, and least where nothing was ever right."""

from __future__ import annotations

import statistics

from outrider.bench.regret import ARMS, Seconds, play, synthetic
from outrider.counterfactual import Counterfactual
from outrider.rounds import Round, Walked
from outrider.tree import parse_shape

BUDGETS = [parse_shape(f"best{nodes}x8") for nodes in (1, 3, 7, 11, 15)]
SHAPES = [parse_shape(arm) for arm in ARMS]
COSTLY = Seconds(level=0.3)


def test_the_purse_bounds_what_drafting_loses_whatever_is_believed() -> None:
    """Drafts that take ten passes each, and a prior that praises them: after the first few there are none."""
    controller = Counterfactual(BUDGETS)
    lost = 0.0
    for _ in range(600):
        shape = controller.choose()
        lost += 10.0 * bool(shape.depth)
        row = Walked((), 1, False, shape.nodes, True, 4, False, 8, [(0.9, False)] * shape.nodes)
        controller.reward(Round(shape, [row], 10.0 if shape.depth else 0.0, 1.0))
    assert 10.0 <= lost <= 20.0, "one trial, and one more once it is saved for"


def test_trials_of_a_hopeless_drafter_come_the_rarer_the_dearer_they_are() -> None:
    def trials(cost: float) -> int:
        controller, found = Counterfactual(BUDGETS), 0
        for _ in range(1000):
            shape = controller.choose()
            found += bool(shape.depth)
            row = Walked((), 1, False, shape.nodes, True, 1, True, 1, [(0.9, False)] * shape.nodes)
            controller.reward(Round(shape, [row], cost if shape.depth else 0.0, 1.0))
        return found

    cheap, dear = trials(0.2), trials(2.0)
    assert dear <= 8 < 20 <= cheap
    assert 0.2 * cheap < 16.0 and 2.0 * dear < 18.0, "both lose a share of the time"


def test_trials_cost_half_as_much_where_nothing_was_ever_kept_and_as_much_as_before_once_something_is() -> None:
    """Of 4000 tokens that are always or next to always wrong, behind the first 200."""

    def lost(law: tuple[float, ...]) -> float:
        found = list[float]()
        for seed in range(6):
            done = play(Counterfactual(SHAPES), [synthetic([(4000, law)], seed)], COSTLY, seed)
            start = next(i for i, at in enumerate(done.positions) if at >= 200)
            found.append((done.total - done.seconds[start]) / (done.tokens - done.positions[start]) - 1.0)
        return statistics.fmean(found)

    assert lost((0.0,)) < 0.008 < 0.010 < lost((0.08,))
