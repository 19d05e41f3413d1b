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
from pandas import DataFrame

from gcfed.data.distances import label_skew, spaced
from gcfed.folders.measures import smooth
from gcfed.folders.reading import column
from gcfed.folders.summary import skew_in_words
from gcfed.plots.style import (
    BLUE,
    GREY,
    VERMILION,
    axis_label,
    factor,
    logarithmic_if_spanning,
    save,
    styled,
    ticks,
)

if TYPE_CHECKING:
    from gcfed.data.datamodule import FederatedDataModule


@styled
def plot_curves(table: DataFrame, path: str | Path) -> Figure:
    """Test accuracy (each test, and the mean of ten rounds) and losses over the rounds.

    A regression shows its relative error instead of the accuracy, or another test measure. An axis
    is logarithmic if its values are positive and fall far. ``table`` has a run's metrics by round.
    """
    measure = _measure_of_tests(table)
    is_regression = measure != "test/acc"
    tests = factor(measure) * column(table, measure)
    figure = Figure(figsize=(10, 3.8))
    left, right = figure.subplots(1, 2)
    if is_regression:
        _line(left, tests, "each test", color=BLUE, alpha=1, linewidth=1)
    else:
        _line(left, tests, "each test", color=BLUE, alpha=0.35, linewidth=1)
        _line(left, smooth(tests), "mean of 10 rounds", color=BLUE, linewidth=2.2)
    _line(right, column(table, "train/loss"), "train loss", color=VERMILION, linewidth=1.4)
    _line(right, column(table, "test/loss"), "test loss", color=BLUE, linewidth=1.4)
    left.set(title="Global model on the test split", ylabel=axis_label(measure))
    right.set(title="Loss", ylabel="squared error / 2" if "test/rmse" in table else "loss")
    for axes in (left, right):
        if is_regression:
            logarithmic_if_spanning(axes, 30)
        axes.set_xlabel("communication round")
        ticks(axes, 8)
        if axes.lines:
            axes.legend()
    save(figure, path)
    return figure


def _measure_of_tests(table: DataFrame) -> str:
    """The column that shows how well a run does: the first of these that has a value."""
    names = ["test/acc", "test/relative_error"]
    names += [name for name in table if name.startswith("test/") and name != "test/loss"]
    for name in names:
        if len(column(table, name)):
            return name
    return "test/acc"


def _line(axes: Axes, curve: pd.Series, label: str, **look: Any) -> None:
    if len(curve):
        marker = "o" if len(curve) == 1 else None  # a line through a single point is invisible
        axes.plot(curve.index, curve, label=label, marker=marker, **look)


def draw_partition(data: FederatedDataModule, held_NC: ndarray, path: Path) -> None:
    """Draws a run's ``partition.png`` from the samples of each class at each client; of many
    clients, 50.
    """
    words = [f"{data.dataset.name}: {data.num_clients:,} clients", type(data.partitioner).__name__]
    words += _first_setting(data.partitioner)
    title = f"{', '.join(words)}\nlabel skew: {skew_in_words(label_skew(held_NC))}"
    counts = DataFrame(held_NC)
    names = data.dataset.class_names or ()
    if len(names) == data.num_classes:
        counts.columns = pd.Index(names)
    drawn = spaced(np.arange(len(counts)), 50)
    plot_partition(counts.iloc[drawn], path, title, len(counts))


def _first_setting(partitioner: object) -> list[str]:
    """The partitioner's first setting, such as "α = 0.1", if it is a number."""
    for key, value in vars(partitioner).items():
        if isinstance(value, int | float):
            return [f"{key.replace('alpha', 'α')} = {value}"]
        break
    return []


@styled
def plot_partition(
    label_counts: ArrayLike | DataFrame,
    path: str | Path,
    title: str,
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
    counts = DataFrame(label_counts)
    num_drawn, num_classes = counts.shape
    cell = np.clip(np.array([10, 6]) / counts.shape, [0.2, 0.045], [0.5, 0.32])  # inches
    width, height = np.clip(cell * counts.shape, [3.0, 1.8], 12.0)  # inches

    figure = Figure(figsize=(width + 1.2, height + 1.9))
    bars, bubbles = figure.subplots(2, 1, sharex=True, height_ratios=[1, height])
    bars.bar(range(num_drawn), counts.to_numpy().sum(axis=1), color=GREY, width=0.7)
    bars.grid(axis="x", visible=False)
    bars.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    bars.yaxis.set_major_formatter("{x:,.0f}")
    bars.set(ylabel="samples", title=title)

    _draw_bubbles(bubbles, counts, diameter=72 * max(cell.min(), 0.14))
    xlabel = "client"
    if clients not in (None, num_drawn):
        xlabel += f" ({num_drawn} of {clients:,}, evenly spaced)"
    bubbles.set(xlabel=xlabel, ylabel="class")
    bubbles.set(xlim=(-0.7, num_drawn - 0.3), ylim=(-0.8, num_classes - 0.2))
    save(figure, path)
    return figure


def _draw_bubbles(axes: Axes, label_counts: DataFrame, diameter: float) -> None:
    """A bubble for each client and class. The largest has this diameter, in points."""
    counts_NC = label_counts.to_numpy()
    area = diameter**2 / max(counts_NC.max(), 1)  # of one sample
    clients, classes = counts_NC.nonzero()
    sizes = area * counts_NC[clients, classes]
    axes.scatter(clients, classes, s=sizes, color=BLUE, alpha=0.85, linewidths=0)
    ticked = _ticks(len(label_counts), 20)
    axes.set_xticks(ticked, label_counts.index[ticked].astype(str))
    if label_counts.columns.dtype == int:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    else:
        ticked = _ticks(len(label_counts.columns), 30)
        axes.set_yticks(ticked, label_counts.columns[ticked].str[:20])


def _ticks(count: int, most: int) -> ndarray:
    """At most ``most`` of the positions 0 … count − 1, all at the same distance."""
    return np.arange(0, count, -(-count // most))


@styled
def plot_confusion(
    counts: ArrayLike, names: Sequence[str] | ndarray, path: str | Path, title: str
) -> Figure:
    """The share of each class's samples by predicted class. Up to 20 classes show it in percent.

    ``counts`` [C, C] has true classes as rows and predictions as columns. The title gets the
    accuracy over all samples.
    """
    counts_CC = np.asarray(counts)
    num_classes = len(counts_CC)
    tested = counts_CC.sum(1, keepdims=True)
    untested_CC = np.broadcast_to(tested == 0, counts_CC.shape)
    share_CC = np.ma.masked_array(counts_CC / np.maximum(tested, 1), mask=untested_CC)
    side = float(np.clip(0.45 * num_classes, 3.4, 9.0))  # inches
    figure = Figure(figsize=(side + 1.9, side + 0.9))
    axes = figure.subplots()
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(
        image, ax=axes, label="share of the class", format=PercentFormatter(1), shrink=0.8
    )
    if num_classes <= 20:
        _write_percentages(axes, counts_CC, share_CC)
    _name_classes(axes, [str(name) for name in names], num_classes)
    accuracy = counts_CC.trace() / max(counts_CC.sum(), 1)
    title = f"{title}\naccuracy {accuracy:.1%}".strip()
    axes.set(xlabel="predicted class", ylabel="class", title=title)
    axes.grid(visible=False)
    save(figure, path)
    return figure


def _write_percentages(axes: Axes, counts_CC: ndarray, share_CC: ndarray) -> None:
    for row, predicted in np.argwhere(counts_CC):
        share = share_CC[row, predicted]
        color = "white" if share > 0.55 else "black"
        text = f"{100 * share:.0f}"
        axes.text(predicted, row, text, ha="center", va="center", fontsize=8, color=color)


def _name_classes(axes: Axes, names: Sequence[str], num_classes: int) -> None:
    """Ticks on both axes with the names of at most 50 classes."""
    words = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
    ticked = _ticks(num_classes, 50)
    labels = [words[index] for index in ticked]
    size = 9 if num_classes <= 25 else 6
    rotation = 90 if max(map(len, words)) > 3 else 0
    axes.set_xticks(ticked, labels, rotation=rotation, fontsize=size)
    axes.set_yticks(ticked, labels, fontsize=size)
