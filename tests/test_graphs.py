"""Graphs of the lean decoder, with recorded operations in the place of CUDA's: same logits, fixed shapes, and a way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from devices import DEVICE
from families import tiny
from helpers import PROMPT, PROMPTS, expected
from native_kernels import without_kernels
from outrider.api import Engine
from outrider.drafters.lm import LMDrafter
from outrider.models import graphs
from outrider.models.early_exit import early_exit
from outrider.models.graphs import GraphedTreeModel, Outputs, Work, captured, graphed, shown
from outrider.models.lean import LeanTreeModel

FAMILIES = ("llama", "mistral", "qwen3", "gemma3")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no kernels for the CPU, which no graph could record."""
    without_kernels(monkeypatch)


class Recorded(TorchDispatchMode):
    """A graph made of the operations that some work ran, with the very tensors and numbers that it ran them on: it does to these
    tensors again what was done, and to nothing else, as CUDA does."""

    made = 0

    def __init__(self, work: Work, device: torch.device) -> None:
        super().__init__()
        type(self).made += 1
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        with self:
            self.outputs = work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def __call__(self) -> Outputs:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (out, again)))
            for old, new in pairs:
                if old.data_ptr() != new.data_ptr():  # views and what is written in place are there already
                    old.copy_(new)
        return self.outputs


class Broken:
    """A graph that cannot be captured."""

    def __init__(self, work: Work, device: torch.device) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand so on")


def with_graphs(family: str, capture: Any = Recorded) -> GraphedTreeModel:
    return GraphedTreeModel(LeanTreeModel(tiny(family)), capture)


def rounds(model: Any, prompt: Any = PROMPT, taps: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Logits and hidden states of some rounds of growing trees."""
    state, found = model.begin([list(prompt)], 60, taps), []
    for number, path in enumerate(([0, 2], [0], [0, 1], [0, 2, 5], [0])):
        logits = state.extend([[4 + number, 8, 15]], [[-1, 0, 0]])
        found += [logits, *(state.features or [])]
        base = state.pending
        found.append(state.extend([[16, 23, 42]], [[1, 2, 2]]))
        state.commit([[node if node < 3 else base + node - 3 for node in path]])
    return found


def same(model: Any, other: Any, **options: Any) -> None:
    for got, wanted in zip(rounds(model, **options), rounds(other, **options), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("taps", [(), (0, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_rounds_are_the_rounds(family: str, taps: tuple[int, ...]) -> None:
    """Other tokens, positions, slots and trees than those that were captured, in one run and in the next."""
    model, lean = with_graphs(family), LeanTreeModel(tiny(family))
    Recorded.made = 0
    for prompt in (PROMPT, PROMPTS[1], PROMPTS[2]):
        same(model, lean, prompt=prompt, taps=taps)
    assert Recorded.made == len(model.graphs) == 1 and not model.failed  # one bucket of nodes, one of slots
    assert next(iter(model.graphs)) == (4, 256, taps)


def test_texts_go_on_where_graphs_show_more_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FEWEST_SLOTS", 16)
    model, lean = with_graphs("llama"), LeanTreeModel(tiny("llama"))
    for prompt in ([5, 9, 13], [3] * 11, [7] * 90, [5, 9]):  # the memory grows, and small ones use it after large ones
        same(model, lean, prompt=prompt)
    assert {key[1] for key in model.graphs} == {16, 32, 128} and not model.failed
    assert [shown(slots) for slots in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]


def test_a_text_that_outgrows_the_memory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FEWEST_SLOTS", 16)
    model, lean = with_graphs("llama"), LeanTreeModel(tiny("llama"))
    states = [m.begin([list(PROMPT)], 0) for m in (model, lean)]  # 10 and 64 to spare: 128 slots
    for _ in range(5):
        got, wanted = (s.extend([[4] * 30], [list(range(-1, 29))]) for s in states)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        for state in states:
            state.commit([list(range(30))])
    assert not model.failed and states[0].lengths == [160]


def test_an_engine_writes_the_reference_text_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches go without; the target and a drafter of the same weights each have graphs of their own."""
    model = copy.deepcopy(tiny("llama"))
    engine: Any = Engine(model, None, "llama", "off")
    monkeypatch.setattr(Engine, "follow", lambda self: None)
    engine.target = with_graphs("llama")
    engine.drafter = LMDrafter(with_graphs("llama"), "same")
    for options in ({}, {"temperature": 0.9, "seed": 5}):
        for shape in (4, (3, 2, 1)):
            result = engine.generate(list(PROMPT), shape=shape, max_new_tokens=24, **options)
            assert result.token_ids == expected("llama", max_new_tokens=24, **options)
            assert result.stats.acceptance_rate == 1.0
        results = engine.generate([list(p) for p in PROMPTS], shape=3, max_new_tokens=12, **options)
        assert [r.token_ids for r in results] == [expected("llama", p, **options) for p in PROMPTS]
    assert engine.target.graphs and engine.drafter.model.graphs


def test_a_run_that_is_still_going_on_keeps_its_text() -> None:
    """Two runs in turns: the memory goes to the later one, the earlier one takes its keys and values along."""
    model, lean = with_graphs("llama"), LeanTreeModel(tiny("llama"))
    texts = [list(PROMPT), list(PROMPTS[2])]
    states = [[m.begin([text], 60) for text in texts] for m in (model, lean)]
    for number in range(6):
        for which in (0, 1, 1) if number else (0,):
            got, wanted = (pair[which].extend([[4 + number, 8]], [[-1, 0]]) for pair in states)
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
            for pair in states:
                pair[which].commit([[0, 1]])
    assert not model.failed


def test_the_least_recently_used_graph_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    model, lean = with_graphs("llama"), LeanTreeModel(tiny("llama"))
    states = [m.begin([list(PROMPT)], 60) for m in (model, lean)]
    Recorded.made = 0
    for nodes, keys in ((1, [1]), (3, [1, 4]), (1, [4, 1]), (7, [1, 8]), (3, [8, 4])):
        got, wanted = (s.extend([list(range(nodes))], [list(range(-1, nodes - 1))]) for s in states)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        assert [key[0] for key in model.graphs] == keys
        for state in states:
            state.commit([[]])
    assert Recorded.made == 4


def test_what_cannot_be_captured_runs_without() -> None:
    lean = LeanTreeModel(tiny("llama"))
    with pytest.warns(RuntimeWarning, match="CUDA graphs are not used any more: operation not permitted"):
        same(with_graphs("llama", Broken), lean)
    with pytest.warns(RuntimeWarning):
        found, why = graphed(lean, 1e-4, Broken)
    assert found is lean and why == "not CUDA graphs: operation not permitted when stream is capturing"
    found, why = graphed(lean, 1e-4, Recorded)
    assert isinstance(found, GraphedTreeModel) and not why and not found.graphs


def test_a_graph_that_forgets_is_found_at_load() -> None:
    """Teeth: a graph that gives what it gave when it was captured does not pass."""

    class Stale(Recorded):
        def __call__(self) -> Outputs:
            return self.outputs

    found, why = graphed(LeanTreeModel(tiny("llama")), 1e-4, Stale)
    assert not isinstance(found, GraphedTreeModel) and "logits are off" in why


def test_a_graph_that_gives_no_numbers_is_found_at_load() -> None:
    """NaN was not more than the limit."""

    class Damaged(Recorded):
        def __call__(self) -> Outputs:
            outputs = super().__call__()
            (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).fill_(float("nan"))
            return outputs

    found, why = graphed(LeanTreeModel(tiny("llama")), 1e-4, Damaged)
    assert not isinstance(found, GraphedTreeModel) and "off by inf" in why


def test_the_first_layers_have_graphs_of_their_own() -> None:
    model = with_graphs("llama")
    rounds(model)
    before = list(model.graphs)
    same(early_exit(model, 1), early_exit(LeanTreeModel(tiny("llama")), 1))
    assert list(model.graphs) == before
    same(model, LeanTreeModel(tiny("llama")))


@pytest.mark.any_device
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: OUTRIDER_TEST_DEVICE=cuda")
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_captures_and_replays_the_rounds(family: str) -> None:
    model, lean = with_graphs(family, captured), LeanTreeModel(tiny(family))
    for prompt in (PROMPT, PROMPTS[1], PROMPTS[2]):
        same(model, lean, prompt=prompt, taps=(0, 1))
    assert model.graphs and not model.failed
    assert "CUDA graphs" in Engine(tiny(family), None, family, "off").way.way
