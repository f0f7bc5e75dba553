"""Pictures of the workshop, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.picture import picture


def learning_curve(curve: Sequence[Mapping[str, float]], path: Path) -> None:
    """Acceptance length on held-out prompts, and loss, against training tokens."""
    tokens = [point["tokens"] / 1e6 for point in curve]
    with picture(path, 2) as (left, right):
        left.plot(tokens, [point["acceptance_length"] for point in curve], marker=".")
        left.set(xlabel="training tokens, millions", ylabel="acceptance length N, held out, chain of 5, greedy")
        right.plot(tokens, [point["loss"] for point in curve], marker=".", color="tab:red")
        right.set(xlabel="training tokens, millions", ylabel="loss")
        for axes in (left, right):
            axes.grid(alpha=0.3)


def language_curve(curve: Sequence[Mapping[str, float]], path: Path) -> None:
    """How far a language model's laws are from its teacher's on held-out answers, and how often both choose the same token,
    against training tokens."""
    tokens = [point["tokens"] / 1e6 for point in curve]
    with picture(path, 2) as (left, right):
        left.plot(tokens, [point["kl"] for point in curve], marker=".")
        left.set(xlabel="training tokens, millions", ylabel="KL from the teacher, held out, nats a token")
        right.plot(tokens, [point["agreement"] for point in curve], marker=".", color="tab:red")
        right.set(xlabel="training tokens, millions", ylabel="same first choice, held out")
        for axes in (left, right):
            axes.grid(alpha=0.3)


def elimination(layers: Sequence[int], divergences: Sequence[float], path: Path) -> None:
    """How the laws drift from the target's as layers go."""
    with picture(path) as (axes,):
        places = range(1, len(layers) + 1)
        axes.plot(places, divergences, marker=".")
        for place, layer, value in zip(places, layers, divergences):
            axes.annotate(str(layer), (place, value), textcoords="offset points", xytext=(0, 5), fontsize=7)
        axes.set(xlabel="layers gone (labels: which)", ylabel="KL from the target, nats a token")
        axes.grid(alpha=0.3)


def acceptance_by_depth(rates: Mapping[str, Sequence[float]], path: Path) -> None:
    """Acceptance rate at each depth, one line per drafter."""
    with picture(path) as (axes,):
        for name, values in rates.items():
            axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
        axes.set(xlabel="depth", ylabel="acceptance rate", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()


def reliability(drafters: Mapping[str, tuple[float, Sequence[tuple[float, float, int]]]], path: Path) -> None:
    """Confidence against agreement, one panel per drafter.

    Args:
        drafters: per name the expected calibration error and bins of (mean confidence, agreement, count).
    """
    with picture(path, len(drafters)) as panels:
        for axes, (name, (error, bins)) in zip(panels, drafters.items()):
            total = sum(count for _, _, count in bins)
            axes.plot((0, 1), (0, 1), color="grey", linestyle=":")
            axes.bar(
                [confidence for confidence, _, _ in bins],
                [agreement for _, agreement, _ in bins],
                width=0.06,
                alpha=0.7,
            )
            axes.set(
                xlabel="confidence of the first choice", ylabel="agreement with the target", xlim=(0, 1), ylim=(0, 1)
            )
            axes.set_title(f"{name}: ECE {error:.3f}, {total} positions", fontsize=9)
