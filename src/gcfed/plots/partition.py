"""``partition.png``: how the data lie on the clients, as GC-Fed's Figure 5."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from gcfed.data.label_counts import evenly, label_counts
from gcfed.plots.style import BLUE, GREY, save, styled

if TYPE_CHECKING:
    from gcfed.data.datamodule import FederatedDataModule


def draw_partition(folder: Path, data: FederatedDataModule) -> Path | None:
    """Draws ``partition.png`` into a run's folder and returns its path; None where there are no classes to draw."""
    if (held := label_counts(data)) is None:
        return None
    title = f"{data.dataset.name}, {data.partitioner}"
    plot_partition(held.counts, folder / "partition.png", title, clients=held.clients, of=held.of)
    return folder / "partition.png"


@styled
def plot_partition(
    label_counts: ArrayLike,
    path: str | Path,
    title: str | None = None,
    max_clients: int = 50,
    *,
    clients: ArrayLike | None = None,
    of: int | None = None,
) -> Figure:
    """Draw how many samples of each class each client holds; write and return the figure.

    A bubble's area is proportional to the number of samples; the bars above count the samples of each client.

    Args:
        label_counts: integers [N, C], samples of class c on client n.
        path: where the picture goes.
        title: goes above the picture.
        max_clients: of more clients than this only so many are drawn, evenly spaced by their ids.
        clients: their ids, [N], where the rows are some of ``of`` clients.
    """
    counts_NC = np.asarray(label_counts)
    if counts_NC.ndim != 2 or not counts_NC.size:
        raise ValueError(f"label_counts has shape {counts_NC.shape}; give one row a client and one column a class")
    num_clients, num_classes = counts_NC.shape
    drawn = evenly(num_clients, max_clients)
    counts_SC = counts_NC[drawn]
    ids = drawn if clients is None else np.asarray(clients)[drawn]
    num_clients = of or num_clients
    cell = np.array([np.clip(10 / len(drawn), 0.2, 0.5), np.clip(6 / num_classes, 0.045, 0.32)])  # inches
    width, height = np.maximum(cell * counts_SC.shape, [3.0, 1.8])

    figure = Figure(figsize=(width + 1.8, height + 1.9))
    bars, bubbles = figure.subplots(2, 1, sharex=True, height_ratios=[1, height])
    bars.bar(range(len(counts_SC)), counts_SC.sum(axis=1), color=GREY, width=0.7)
    bars.grid(axis="x", visible=False)
    bars.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    bars.yaxis.set_major_formatter("{x:,.0f}")
    bars.set(ylabel="samples", title=title)
    _draw_bubbles(bubbles, counts_SC, cell)
    place = np.arange(0, len(drawn), -(-len(drawn) // 20))
    bubbles.set_xticks(place, [str(i) for i in ids[place]])
    bubbles.yaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    subset = "" if len(drawn) == num_clients else f" ({len(drawn)} of {num_clients:,}, evenly spaced)"
    bubbles.set(xlabel=f"client{subset}", ylabel="class", ylim=(-0.8, num_classes - 0.2), xlim=(-0.7, len(drawn) - 0.3))
    save(figure, path)
    return figure


def _draw_bubbles(axes: Axes, counts_SC: NDArray[Any], cell: NDArray[Any]) -> None:
    """Bubbles as large as can be without two neighbours overlapping, in cells of so many inches, and their legend."""
    largest = int(counts_SC.max()) or 1
    radii_SC = np.sqrt(counts_SC / largest) / 2
    gaps = [(radii_SC[1:] + radii_SC[:-1]).max(initial=0), (radii_SC[:, 1:] + radii_SC[:, :-1]).max(initial=0)]
    diameter = float(72 * np.clip(min(cell / np.maximum(gaps, 1e-9)), 0.14, 0.5))  # points, of the largest one
    clients, classes = counts_SC.nonzero()

    def draw(x: NDArray[Any], y: NDArray[Any], counts: NDArray[Any]) -> Any:
        return axes.scatter(x, y, s=counts / largest * diameter**2, color=BLUE, alpha=0.85, linewidths=0, clip_on=False)

    draw(clients, classes, counts_SC[clients, classes])
    examples = sorted({_round_down(largest / fraction) for fraction in (1, 4, 20)}, reverse=True)
    axes.legend(
        [draw(np.empty(0), np.empty(0), np.array([n])) for n in examples],
        [f"{n:,}" for n in examples],
        title="samples",
        loc="upper left",
        bbox_to_anchor=(1, 1),
        labelspacing=max(0.7, diameter / 18),
        handletextpad=1,
    )


def _round_down(x: float) -> int:
    """The nearest of 1, 2, 5, 10, 20, … that is not above x, at least 1."""
    power = 10 ** int(np.log10(max(x, 1)))
    return max(power * digit for digit in (1, 2, 5) if power * digit <= max(x, 1))
