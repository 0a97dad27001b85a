"""Pictures of the scripted day: rewards among others and alone, waits beside the flood, shares of the device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlaas_jax.bench.service.driver import Record, Shares
from marlaas_jax.bench.service.plan import Sizes


def write(folder: Path, records: Sequence[Record], shares: Shares, sizes: Sizes) -> list[Path]:
    """Draws rewards.png, waits.png and shares.png; returns their paths."""
    figures = {"rewards": _rewards(records, sizes), "waits": _waits(records), "shares": _shares(shares)}
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _figure(columns: int, title: str) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns, 3.6), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _rewards(records: Sequence[Record], sizes: Sizes) -> Any:
    """One panel per task kind: each seed alone (grey) and in the crowd."""
    figure, panels = _figure(len(sizes.kinds), "mean reward of each batch: alone (grey) and in the crowd")
    for axes, kind in zip(panels, sizes.kinds, strict=True):
        for record in (r for r in records if r.planned.kind == kind and r.planned.phase in ("alone", "crowd")):
            points = [(step, reward) for step, reward in enumerate(record.rewards, 1) if reward is not None]
            colour = "0.6" if record.planned.phase == "alone" else None
            axes.plot(*zip(*points, strict=True), linewidth=1, color=colour)
        axes.set_title(kind, fontsize="medium")
        axes.set_xlabel("step")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    return figure


def _waits(records: Sequence[Record]) -> Any:
    """How long the small tenant's turns took, as distributions."""
    figure, (axes,) = _figure(1, "turns of the small tenant")
    alone, beside = ([r for r in records if r.turn_s and (r.planned.phase == "small") is small] for small in (False, True))
    for label, found in (("alone", alone), ("beside the flood", beside)):
        seconds = sorted(s for record in found for s in record.turn_s)
        axes.plot(seconds, [(i + 1) / len(seconds) for i in range(len(seconds))], label=label)
    axes.set_xlabel("seconds from request to completion")
    axes.set_ylabel("share of turns")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _shares(shares: Shares) -> Any:
    """Device seconds of each backlogged tenant, and what its weight says."""
    figure, (axes,) = _figure(1, f"device time in {shares.window_s:.0f} s")
    names = list(shares.seconds)
    served, weight = sum(shares.seconds.values()), sum(shares.weights.values())
    axes.bar(names, [shares.seconds[name] for name in names])
    axes.plot(names, [served * shares.weights[name] / weight for name in names], "k_", markersize=24, label="by weight")
    axes.set_ylabel("device seconds")
    axes.tick_params(axis="x", rotation=45)
    axes.legend()
    return figure
