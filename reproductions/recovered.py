"""The picture of the images that an attack recovered."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

from gcfed.plots.style import save, styled


@styled
def plot_recovered(
    original: ndarray,
    recovered: ndarray,
    above: Sequence[str],
    below: Sequence[str],
    path: str | Path,
) -> Figure:
    """Images that an attack recovered, below their originals.

    Both are [B, C, H, W] in 0…1, with one or three channels. ``above`` and ``below`` are the titles
    of the two rows, [B].
    """
    figure = Figure(figsize=(max(2.1 * len(original), 2.8), 4.6))
    rows = figure.subplots(2, len(original), squeeze=False)
    _draw_images(rows[0], original, above)
    _draw_images(rows[1], recovered, below)
    save(figure, path)
    return figure


def _draw_images(row: Sequence[Axes], images_BCHW: ndarray, titles: Sequence[str]) -> None:
    for axes, image_CHW, title in zip(row, images_BCHW, titles, strict=True):
        image_HWC = image_CHW.transpose(1, 2, 0)
        axes.imshow(image_HWC, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.set_axis_off()
