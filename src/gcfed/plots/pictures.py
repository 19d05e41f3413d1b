"""The pictures that runs leave: each function draws one, writes it to ``path`` and returns the
figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy import ndarray
from numpy.typing import ArrayLike

from gcfed.plots.style import (
    BLUE,
    GREY,
    LABELS,
    VERMILION,
    factor,
    logarithmic,
    save,
    styled,
    ticks,
)
from gcfed.runs.measures import smooth
from gcfed.runs.reading import column, label_skew
from gcfed.runs.summary import skew_in_words

if TYPE_CHECKING:
    from gcfed.data.datamodule import FederatedDataModule


@styled
def plot_curves(table: pd.DataFrame, path: str | Path) -> Figure:
    """Test accuracy (each test, and the mean of ten rounds) and losses over the rounds.

    A regression shows its relative error instead of the accuracy, or another test measure. An axis
    is logarithmic if its values are positive and fall far. ``table`` has a run's metrics by round.
    """
    known = [
        "test/acc",
        "test/relative_error",
        *(n for n in table if n.startswith("test/") and n != "test/loss"),
    ]
    measure = next((name for name in known if len(column(table, name))), "test/acc")
    is_regression, tests = measure != "test/acc", factor(measure) * column(table, measure)
    figure = Figure(figsize=(10, 3.8))
    left, right = figure.subplots(1, 2)
    _line(left, tests, "each test", color=BLUE, alpha=1 if is_regression else 0.35, linewidth=1)
    if not is_regression:
        _line(left, smooth(tests), "mean of 10 rounds", color=BLUE, linewidth=2.2)
    _line(right, column(table, "train/loss"), "train loss", color=VERMILION, linewidth=1.4)
    _line(right, column(table, "test/loss"), "test loss", color=BLUE, linewidth=1.4)
    left.set(title="Global model on the test split", ylabel=LABELS.get(measure, measure))
    right.set(title="Loss", ylabel="squared error / 2" if "test/rmse" in table else "loss")
    for axes in (left, right):
        values = [y for line in axes.lines for y in line.get_ydata()]
        if is_regression and max(values, default=0) > 30 * min(values, default=0) > 0:
            logarithmic(axes)
        axes.set_xlabel("communication round")
        ticks(axes, 8)
        if axes.lines:
            axes.legend()
    save(figure, path)
    return figure


def _line(axes: Axes, curve: pd.Series, label: str, **look: Any) -> None:
    if len(curve):
        marker = "o" if len(curve) == 1 else None  # a line through a single point is invisible
        axes.plot(curve.index, curve, label=label, marker=marker, **look)


def draw_partition(data: FederatedDataModule, held_NC: ndarray, path: Path) -> None:
    """Draws a run's ``partition.png`` from the samples of each class at each client; of many
    clients, 50.
    """
    deals = data.partitioner
    first = [
        f"{key} = {value}"
        for key, value in [*vars(deals).items()][:1]
        if isinstance(value, int | float)
    ]
    title = ", ".join(
        [f"{data.dataset.name}: {data.num_clients:,} clients", type(deals).__name__, *first]
    )
    title = f"{title.replace('alpha', 'α')}\nlabel skew: {skew_in_words(label_skew(held_NC))}"
    names = data.dataset.class_names or ()
    held = pd.DataFrame(held_NC, columns=names if len(names) == data.num_classes else None)
    plot_partition(held.iloc[np.unique(np.arange(50) * len(held) // 50)], path, title, len(held))


@styled
def plot_partition(
    label_counts: ArrayLike | pd.DataFrame,
    path: str | Path,
    title: str | None = None,
    clients: int | None = None,
) -> Figure:
    """How many samples of each class each client holds, as GC-Fed's Figure 5.

    A bubble's area is proportional to the number of samples; the bars above count the samples of
    each client.

    Args:
        label_counts: integers [N, C], samples of class c on client n; a frame also names clients
            and classes.
        clients: the number of all clients, if ``label_counts`` has only some of them.
    """
    held = pd.DataFrame(label_counts)
    counts_NC, n = held.to_numpy(), len(held)
    cell = np.clip(np.array([10, 6]) / counts_NC.shape, [0.2, 0.045], [0.5, 0.32])  # inches
    width, height = np.clip(cell * counts_NC.shape, [3.0, 1.8], 12.0)

    figure = Figure(figsize=(width + 1.2, height + 1.9))
    bars, bubbles = figure.subplots(2, 1, sharex=True, height_ratios=[1, height])
    bars.bar(range(n), counts_NC.sum(axis=1), color=GREY, width=0.7)
    bars.grid(axis="x", visible=False)
    bars.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    bars.yaxis.set_major_formatter("{x:,.0f}")
    bars.set(ylabel="samples", title=title)

    # points² a sample: the largest fills its cell
    area = (72 * max(cell.min(), 0.14)) ** 2 / max(counts_NC.max(), 1)
    rows, classes = counts_NC.nonzero()
    bubbles.scatter(
        rows, classes, s=area * counts_NC[rows, classes], color=BLUE, alpha=0.85, linewidths=0
    )
    ticked = np.arange(0, n, -(-n // 20))
    bubbles.set_xticks(ticked, held.index[ticked].astype(str))
    bubbles.yaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    if held.columns.dtype != int:
        shown = np.arange(0, len(held.columns), -(-len(held.columns) // 30))
        bubbles.set_yticks(shown, held.columns[shown].str[:20])
    some = f" ({n} of {clients:,}, evenly spaced)" if clients not in (None, n) else ""
    limits = {"xlim": (-0.7, n - 0.3), "ylim": (-0.8, counts_NC.shape[1] - 0.2)}
    bubbles.set(xlabel=f"client{some}", ylabel="class", **limits)
    save(figure, path)
    return figure


@styled
def plot_confusion(
    counts: ArrayLike, names: Sequence[str] | ndarray, path: str | Path, title: str = ""
) -> Figure:
    """The share of each class's samples by predicted class. Up to 20 classes show it in percent.

    ``counts`` [C, C] has true classes as rows and predictions as columns. The title gets the
    accuracy over all samples.
    """
    counts_CC = np.asarray(counts)
    n, tested = len(counts_CC), counts_CC.sum(1, keepdims=True)
    share_CC = np.ma.masked_array(
        counts_CC / np.maximum(tested, 1), mask=np.broadcast_to(tested == 0, counts_CC.shape)
    )
    side = float(np.clip(0.45 * n, 3.4, 9.0))  # inches
    figure = Figure(figsize=(side + 1.9, side + 0.9))
    axes = figure.subplots()
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(
        image, ax=axes, label="share of the class", format=PercentFormatter(1), shrink=0.8
    )
    for row, taken in zip(*np.nonzero(counts_CC if n <= 20 else []), strict=True):
        share = share_CC[row, taken]
        color = "white" if share > 0.55 else "black"
        axes.text(
            taken, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=color
        )
    ticks = np.arange(0, n, -(-n // 50))
    words = [name if len(name) <= 18 else f"{name[:17]}…" for name in map(str, names)]
    labels, size = [words[i] for i in ticks], 9 if n <= 25 else 6
    axes.set_xticks(ticks, labels, rotation=90 if max(map(len, words)) > 3 else 0, fontsize=size)
    axes.set_yticks(ticks, labels, fontsize=size)
    accuracy = counts_CC.trace() / max(counts_CC.sum(), 1)
    axes.set(
        xlabel="predicted class", ylabel="class", title=f"{title}\naccuracy {accuracy:.1%}".strip()
    )
    axes.grid(visible=False)
    save(figure, path)
    return figure


@styled
def plot_recovered(
    original: ndarray,
    recovered: ndarray,
    above: Sequence[str],
    below: Sequence[str],
    path: str | Path,
) -> Figure:
    """Images [B, C, H, W] in 0…1, one or three channels, that an attack recovered, below their
    originals.

    ``above`` and ``below`` are the titles of the two rows, [B].
    """
    figure = Figure(figsize=(max(2.1 * len(original), 2.8), 4.6))
    rows = figure.subplots(2, len(original), squeeze=False)
    for axes, images, titles in zip(rows, (original, recovered), (above, below), strict=True):
        for ax, image, title in zip(axes, images, titles, strict=True):
            ax.imshow(
                image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=1, interpolation="nearest"
            )
            ax.set_title(title, fontsize=9)
            ax.set_axis_off()
    save(figure, path)
    return figure
