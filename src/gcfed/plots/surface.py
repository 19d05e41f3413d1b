"""The loss on the plane through three local models, as FedACG's Figure 2(a)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray

from gcfed.plots.style import BLACK, BLUE, ORANGE, VERMILION, save, styled

# Of a local model there is no entry.
MARKS = {
    "mean": ("D", ORANGE, 7, "their mean"),
    "broadcast": ("s", BLUE, 7, "broadcast model"),
    "global": ("*", VERMILION, 13, "new global model"),
}


@styled
def plot_surface(surface: Mapping[str, ndarray], path: str | Path) -> Figure:
    """Draw contour lines of the loss and the six models on the plane; write and return the figure.

    Args:
        surface: what ``surface_round_<t>.npz`` holds (:mod:`gcfed.metrics.surface`), for instance by ``numpy.load``.
        path: where the picture goes.
    """
    figure = Figure(figsize=(7.6, 5.2))
    axes = figure.subplots()
    loss_GG = np.ma.masked_invalid(surface["loss"])
    low, high = loss_GG.min(), loss_GG.max()
    if low < high:
        levels = np.geomspace(max(low, 1e-6 * high), high, 16)[1:-1]  # in equal ratios
        lines = axes.contour(surface["x"], surface["y"], loss_GG, levels=levels, cmap="cividis", linewidths=1.2)
        axes.clabel(lines, levels[::2], fmt="%.3g", fontsize=7)
    else:
        axes.text(0.5, 0.5, "one loss everywhere", ha="center", transform=axes.transAxes)
    rows = zip(surface["names"], surface["points"], surface["point_loss"], surface["distance"], strict=True)
    for i, (name, (x, y), loss, distance) in enumerate(rows):
        marker, colour, size, words = MARKS.get(name, ("o", BLACK, 7, f"w{'₁₂₃'[i % 3]}, {name}"))
        if name not in MARKS:
            axes.annotate(words[:2], (x, y), xytext=(5, 5), textcoords="offset points")
        label = f"{words}: {loss:.3g}" + (f",\n{distance:.3g} off the plane" if distance > 0 else "")
        axes.plot(x, y, marker, color=colour, markersize=size, markeredgecolor="white", label=label, zorder=3)
    unit = "nats" if "acc" in surface else "squared error / 2"
    axes.set(
        title=f"{surface['split']} loss ({unit}) around three clients of round {surface['round']}".capitalize(),
        xlabel="along w₂ − w₁ (Euclidean distance of the weights)",
        ylabel="across, towards w₃ (same unit)",
        xlim=surface["x"][[0, -1]],
        ylim=surface["y"][[0, -1]],
        aspect="equal",
    )
    axes.grid(visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), title=f"{surface['split']} loss", alignment="left")
    save(figure, path)
    return figure
