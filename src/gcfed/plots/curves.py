"""``curves.png``, which every run writes: its learning curves."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gcfed.plots.style import BLACK, BLUE, GREY, VERMILION, logarithmic, save, styled
from gcfed.runs.measures import smooth
from gcfed.runs.reading import column, read_metrics


@styled
def plot_curves(metrics: pd.DataFrame | str | Path, path: str | Path) -> Figure:
    """Draw test accuracy (raw and smoothed, best marked) and losses over the rounds; write and return the figure.

    A regression, which is tested but has no accuracies, has its relative error in their place, if it is measured.

    Args:
        metrics: by round, any of ``test/acc`` (0 to 1), ``train/loss``, ``test/loss``, NaN where a round was not
            tested; or the ``metrics.csv`` that holds them.
        path: where the picture goes.
    """
    table = metrics if isinstance(metrics, pd.DataFrame) else read_metrics(Path(metrics))
    figure = Figure(figsize=(10, 3.8))
    left, right = figure.subplots(1, 2)
    acc, loss, error = (column(table, f"test/{name}") for name in ("acc", "loss", "relative_error"))
    is_regression = acc.empty and not loss.empty
    if is_regression:
        left.set(title="Global model against the optimum", ylabel="‖W − W*‖ / ‖W*‖")
        logarithmic(left, "y")
        logarithmic(right, "y")
        _line(left, error, BLUE, f"last: {error.iloc[-1]:.2e}" if len(error) else "")
    else:
        left.set(title="Global model on the test split", ylabel="test accuracy (%)")
        _line(left, 100 * acc, BLUE, "each test", alpha=0.35, linewidth=1)
        _line(left, 100 * smooth(acc), BLUE, f"mean of the last {min(10, len(acc))} tests", linewidth=2.2)
        best = 100 * acc.nlargest(1)
        label = "".join(f"best: {top:.1f} % in round {t}" for t, top in best.items())
        _line(left, best, BLACK, label, marker="*", markersize=10)
    _line(right, column(table, "train/loss"), VERMILION, "train loss", linewidth=1.4)
    _line(right, loss, BLUE, "test loss", linewidth=1.4)
    right.set(title="Loss", ylabel="squared error / 2" if is_regression else "cross-entropy (nats)")
    for axes in (left, right):
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        if axes.lines:
            axes.legend()
        else:
            axes.text(0.5, 0.5, "nothing measured yet", ha="center", color=GREY, transform=axes.transAxes)
    save(figure, path)
    return figure


def _line(axes: Axes, curve: pd.Series, color: str, label: str, **look: Any) -> None:
    if len(curve):
        look.setdefault("marker", "o" if len(curve) == 1 else None)  # a line through a single point is invisible
        axes.plot(curve.index, curve, color=color, label=label, **look)
