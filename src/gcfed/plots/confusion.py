"""``confusion.png``: which class is taken for which."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike

from gcfed.plots.style import save, styled


@styled
def plot_confusion(counts: ArrayLike, names: Sequence[str] | np.ndarray, path: str | Path, title: str = "") -> Figure:
    """Draw the shares of each class's samples that were taken for each class; write and return the figure.

    Up to 20 classes have their shares written in percent; of more than 50 some names are left out.

    Args:
        counts: integers [C, C], samples of the class of a row that were taken for that of a column.
        names: of the classes, [C].
        path: where the picture goes.
        title: goes above the picture, with the accuracy over all samples.
    """
    counts_CC = np.asarray(counts)
    n, tested = len(counts_CC), counts_CC.sum(1, keepdims=True)
    share_CC = np.ma.masked_array(counts_CC / np.maximum(tested, 1), mask=np.broadcast_to(tested == 0, counts_CC.shape))
    shown = [name if len(name) <= 18 else f"{name[:17]}…" for name in map(str, names)]
    side = float(np.clip(0.45 * n, 3.4, 9.0))  # inches
    figure = Figure(figsize=(side + 1.9, side + 0.9))
    axes = figure.subplots()
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the class", format=PercentFormatter(1), shrink=0.8)
    for row, column in zip(*np.nonzero(counts_CC if n <= 20 else []), strict=True):
        share = share_CC[row, column]
        colour = "white" if share > 0.55 else "black"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=colour)
    ticks = np.arange(0, n, -(-n // 50))
    size = 9 if n <= 25 else 6
    axes.set_xticks(ticks, [shown[i] for i in ticks], rotation=90 if max(map(len, shown)) > 3 else 0, fontsize=size)
    axes.set_yticks(ticks, [shown[i] for i in ticks], fontsize=size)
    accuracy = counts_CC.trace() / max(counts_CC.sum(), 1)
    axes.set(xlabel="taken for", ylabel="class", title=f"{title}\naccuracy {accuracy:.1%}".strip())
    axes.grid(visible=False)
    save(figure, path)
    return figure
