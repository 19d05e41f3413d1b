"""``partition.png``: how the data lie on the clients, as GC-Fed's Figure 5."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from gcfed.data.partition import ByGroup
from gcfed.data.shift import Shift
from gcfed.plots.style import BLUE, GREY, save, styled
from gcfed.runs.label_counts import evenly, label_counts

if TYPE_CHECKING:
    from gcfed.data.datamodule import FederatedDataModule


def draw_partition(folder: Path, data: FederatedDataModule) -> Path | None:
    """Draws ``partition.png`` into a run's folder and returns its path; None where there are no classes to draw."""
    if (held := label_counts(data)) is None:
        return None
    deals = data.partitioner
    kind = "natural" if isinstance(deals, ByGroup) else type(deals).__name__
    if isinstance(deals, Shift):
        deals = deals.of
        kind += f" of {type(deals).__name__}"
    # What a partitioner has first is what it is about.
    first = [f"{key} = {value}".replace("alpha", "α") for key, value in [*vars(deals).items()][:1] if value is not None]
    title = ", ".join([f"{data.dataset.name}: {held.of:,} clients", kind, *first])
    path = folder / "partition.png"
    plot_partition(held.counts, path, title, clients=held.clients, of=held.of, names=held.names)
    return path


@styled
def plot_partition(
    label_counts: ArrayLike,
    path: str | Path | None,
    title: str | None = None,
    max_clients: int = 50,
    *,
    clients: ArrayLike | None = None,
    of: int | None = None,
    names: Sequence[str] = (),
) -> Figure:
    """Draw how many samples of each class each client holds; write and return the figure.

    A bubble's area is proportional to the number of samples; the bars above count the samples of each client.

    Args:
        label_counts: integers [N, C], samples of class c on client n.
        path: where the picture goes.
        title: goes above the picture.
        max_clients: of more clients than this only so many are drawn, evenly spaced by their ids.
        clients: their ids, [N], where the rows are some of ``of`` clients.
        names: of the classes, [C], in place of their numbers.
    """
    counts_NC = np.asarray(label_counts)
    drawn = evenly(len(counts_NC), max_clients)
    counts_SC = counts_NC[drawn]
    ids = drawn if clients is None else np.asarray(clients)[drawn]
    of = of or len(counts_NC)
    cell = np.clip(np.array([10, 6]) / counts_SC.shape, [0.2, 0.045], [0.5, 0.32])  # inches
    width, height = np.maximum(cell * counts_SC.shape, [3.0, 1.8])

    figure = Figure(figsize=(width + 1.8, height + 1.9))
    bars, bubbles = figure.subplots(2, 1, sharex=True, height_ratios=[1, height])
    bars.bar(range(len(drawn)), counts_SC.sum(axis=1), color=GREY, width=0.7)
    bars.grid(axis="x", visible=False)
    bars.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    bars.yaxis.set_major_formatter("{x:,.0f}")
    bars.set(ylabel="samples", title=title)

    area = (72 * max(cell.min(), 0.14)) ** 2 / max(counts_SC.max(), 1)  # points² a sample: the largest fills its cell
    rows, classes = counts_SC.nonzero()
    points = bubbles.scatter(rows, classes, s=area * counts_SC[rows, classes], color=BLUE, alpha=0.85, linewidths=0)
    if len(rows):
        few = len(np.unique(counts_SC[rows, classes])) < 4
        examples = points.legend_elements(
            "sizes", num=None if few else 4, fmt="{x:,.0f}", func=lambda s: s / area, color=BLUE
        )
        bubbles.legend(*examples, title="samples", loc="upper left", bbox_to_anchor=(1, 1), labelspacing=1)
    steps = (step * 10**e for e in count() for step in (1, 2, 5))
    place = np.arange(0, len(drawn), next(step for step in steps if len(drawn) <= 20 * step))
    bubbles.set_xticks(place, [str(i) for i in ids[place]])
    bubbles.yaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    if names:
        shown = evenly(len(names), 30)
        bubbles.set_yticks(shown, [names[c][:20] for c in shown])
    subset = "" if len(drawn) == of else f" ({len(drawn)} of {of:,}, evenly spaced)"
    limits = {"xlim": (-0.7, len(drawn) - 0.3), "ylim": (-0.8, counts_SC.shape[1] - 0.2)}
    bubbles.set(xlabel=f"client{subset}", ylabel="class", **limits)
    if path is not None:
        save(figure, path)
    return figure
