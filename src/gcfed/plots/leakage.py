"""Images that an attack recovered, below their originals."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from numpy import ndarray

from gcfed.plots.style import save, styled


@styled
def plot_recovered(
    original: ndarray, recovered: ndarray, above: Sequence[str], below: Sequence[str], path: str | Path
) -> Figure:
    """Draw images [B, C, H, W] in 0…1, one or three channels, with a title each; write and return the figure.

    Args:
        original, recovered: the upper and the lower row.
        above, below: titles of their images, [B].
        path: where the picture goes.
    """
    figure = Figure(figsize=(max(2.1 * len(original), 2.8), 4.6))
    rows = figure.subplots(2, len(original), squeeze=False)
    for axes, images, titles in zip(rows, (original, recovered), (above, below), strict=True):
        for ax, image, title in zip(axes, images, titles, strict=True):
            ax.imshow(image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            ax.set_title(title, fontsize=9)
            ax.set_axis_off()
    save(figure, path)
    return figure
