"""The two figures that every run writes: its learning curves and how the data lie on the clients."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from gcfed.data.label_counts import evenly
from gcfed.metrics.convergence import smooth
from gcfed.report.style import BLACK, BLUE, GREY, VERMILION, save, styled

Rows = Sequence[Mapping[str, Any]]
Array = NDArray[Any]


def column(rows: Rows, name: str) -> tuple[Array, Array]:
    """The rounds and values [n] of one column, in the order of the rounds, without empty, missing and NaN cells."""
    cells = [(row.get("round"), row.get(name)) for row in rows]
    pairs = [(float(r), float(v)) for r, v in cells if r not in ("", None) and v not in ("", None)]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    table = table[~np.isnan(table).any(axis=1)]
    table = table[table[:, 0].argsort(kind="stable")]
    return table[:, 0], table[:, 1]


@styled
def plot_curves(rows: Rows | str | Path, path: str | Path) -> Figure:
    """Draw test accuracy (raw and smoothed, best marked) and losses over the rounds; write and return the figure.

    A regression, which is tested but has no accuracies, has its relative error in their place, if it is measured.

    Args:
        rows: dicts with ``round`` and any of ``test/acc`` (0 to 1), ``train/loss``, ``test/loss``; or the metrics.csv
            that holds them. Cells may be empty: not every round is tested.
        path: where the picture goes.
    """
    if isinstance(rows, str | Path):
        with Path(rows).open(newline="") as file:
            rows = list(csv.DictReader(file))
    figure = Figure(figsize=(10, 3.8))
    accuracy_axes, loss_axes = figure.subplots(1, 2)
    tests, accuracies = (len(column(rows, name)[0]) for name in ("test/loss", "test/acc"))
    is_regression = tests > 0 and not accuracies
    if is_regression:
        _draw_error(accuracy_axes, *column(rows, "test/relative_error"))
    else:
        _draw_accuracy(accuracy_axes, *column(rows, "test/acc"))
    for name, color in (("train/loss", VERMILION), ("test/loss", BLUE)):
        rounds, values = column(rows, name)
        if len(rounds):
            loss_axes.plot(
                rounds, values, color=color, linewidth=1.4, label=name.replace("/", " "), marker=_dot(rounds)
            )
    loss_axes.set(title="Loss", ylabel="squared error / 2" if is_regression else "cross-entropy (nats)")
    if is_regression:
        loss_axes.set_yscale("log")
    for axes in (accuracy_axes, loss_axes):
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        if axes.lines:
            axes.legend()
        else:
            axes.text(0.5, 0.5, "nothing measured yet", ha="center", color=GREY, transform=axes.transAxes)
    save(figure, path)
    return figure


def _draw_accuracy(axes: Axes, rounds: Array, acc: Array) -> None:
    axes.set(title="Global model on the test split", ylabel="test accuracy (%)")
    if not len(rounds):
        return
    percent = 100 * acc
    best = int(percent.argmax())
    axes.plot(rounds, percent, color=BLUE, alpha=0.35, linewidth=1, marker=_dot(rounds), label="each test")
    axes.plot(rounds, smooth(percent), color=BLUE, linewidth=2.2, label="mean of the last 10 tests")
    label = f"best: {percent[best]:.1f} % in round {rounds[best]:.0f}"
    axes.plot(rounds[best : best + 1], percent[best : best + 1], "*", color=BLACK, markersize=10, label=label)


def _draw_error(axes: Axes, rounds: Array, error: Array) -> None:
    axes.set(title="Global model against the optimum", ylabel="‖W − W*‖ / ‖W*‖")
    if not len(rounds):
        return
    axes.set_yscale("log")
    axes.plot(rounds, error, color=BLUE, linewidth=1.8, marker=_dot(rounds), label=f"last: {error[-1]:.2e}")


def _dot(rounds: Array) -> str | None:
    """A line through a single point is invisible."""
    return "o" if len(rounds) == 1 else None


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
    """Draw how many samples of each class each client holds, as GC-Fed's Figure 5; write and return the figure.

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
    shown = evenly(num_clients, max_clients)
    counts_SC = counts_NC[shown]
    ids = shown if clients is None else np.asarray(clients)[shown]
    num_clients = of or num_clients
    cell = np.array([np.clip(10 / len(shown), 0.2, 0.5), np.clip(6 / num_classes, 0.045, 0.32)])  # inches
    width, height = np.maximum(cell * counts_SC.shape, [3.0, 1.8])

    figure = Figure(figsize=(width + 1.8, height + 1.9))
    bars, bubbles = figure.subplots(2, 1, sharex=True, height_ratios=[1, height])
    draw_sizes(bars, counts_SC)
    bars.set(ylabel="samples", title=title)

    largest = int(counts_SC.max()) or 1
    draw_bubbles(bubbles, counts_SC, largest=largest, diameter=bubble_size(counts_SC, cell, largest=largest))
    place = ticks(len(shown))
    bubbles.set_xticks(place, [str(i) for i in ids[place]])
    bubbles.set_yticks(ticks(num_classes))
    subset = "" if len(shown) == num_clients else f" ({len(shown)} of {num_clients:,}, evenly spaced)"
    bubbles.set(xlabel=f"client{subset}", ylabel="class")
    save(figure, path)
    return figure


def draw_sizes(axes: Axes, counts_SC: Array) -> None:
    """Bars of how many samples each client holds."""
    axes.bar(range(len(counts_SC)), counts_SC.sum(axis=1), color=GREY, width=0.7)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def bubble_size(counts_SC: Array, cell: Array, *, largest: int) -> float:
    """The diameter in points (1/72 inch) of the bubble of ``largest`` samples, in cells of so many inches.

    As large as can be without two neighbours overlapping, within 0.14 and 0.5 inches.
    """
    radii_SC = np.sqrt(counts_SC / largest) / 2
    gaps = [(radii_SC[1:] + radii_SC[:-1]).max(initial=0), (radii_SC[:, 1:] + radii_SC[:, :-1]).max(initial=0)]
    return float(72 * np.clip(min(cell / np.maximum(gaps, 1e-9)), 0.14, 0.5))


def draw_bubbles(axes: Axes, counts_SC: Array, *, largest: int, diameter: float, legend: bool = True) -> None:
    """Scatter the counts, that of ``largest`` so many points wide, with a legend of up to three sizes."""
    num_clients, num_classes = counts_SC.shape
    axes.set(xlim=(-0.7, num_clients - 0.3), ylim=(-0.8, num_classes - 0.2))
    clients, classes = counts_SC.nonzero()
    if not len(clients):
        return

    def draw(x: Array, y: Array, counts: Array) -> PathCollection:
        return axes.scatter(x, y, s=counts / largest * diameter**2, color=BLUE, alpha=0.85, linewidths=0, clip_on=False)

    draw(clients, classes, counts_SC[clients, classes])
    if not legend:
        return
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


def ticks(n: int, most: int = 20) -> Array:
    """At most ``most`` evenly spaced positions among n."""
    return np.arange(0, n, -(-n // most))
