"""One look for every figure.

No pyplot: figures draw with Agg, need no display and leave no global state behind.
"""

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from gcfed.folders.columns import is_accuracy, title_of
from gcfed.utils.files import replacing

# Okabe & Ito, "Color Universal Design": distinguishable with any of the common colour vision
# deficiencies.
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
BLACK = "#000000"
GREY = "#8A8A8A"

#: Methods with a colour and a dash pattern of their own. Other names get one by their hash.
METHODS_WITH_LOOKS = Path(__file__).with_name("methods.txt").read_text("utf-8").splitlines()
_DASHES = (
    "-",
    (0, (4, 1.5)),
    (0, (8, 2)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (1, 1)),
    (0, (4, 1.5, 1, 1.5, 1, 1.5)),
    (0, (2, 2)),
    (0, (10, 1.5, 3, 1.5)),
)
_COLORS = (VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY, BLACK)
_LOOKS = [{"color": color, "linestyle": dash} for dash in _DASHES for color in _COLORS]


def looks(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and dash pattern of each method, as keywords of ``Axes.plot``. FedAvg is grey.

    Methods choose in the order of ``METHODS_WITH_LOOKS``, then in the alphabet's. If another one
    has the colour of a method's own look, the method takes the next look with a free colour.
    """
    look_of: dict[str, dict[str, Any]] = {}
    for method in sorted({*methods}, key=_turn):
        if method.lower() == "fedavg":
            look_of[method] = {"color": GREY, "linestyle": "-"}
        else:
            look_of[method] = _next_free(_position(method), look_of.values())
    return look_of


def _turn(method: str) -> tuple[bool, int, str]:
    """When a method chooses its look."""
    is_unknown = method not in METHODS_WITH_LOOKS
    return is_unknown, 0 if is_unknown else _position(method), method


def _position(method: str) -> int:
    """Where the search for a free look begins."""
    if method in METHODS_WITH_LOOKS:
        return METHODS_WITH_LOOKS.index(method)
    return zlib.crc32(method.encode()) % len(_LOOKS)


def _next_free(start: int, taken: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The first look from ``start`` on, in a circle, that is not taken; if all are, that one.

    Looks of a colour that is not taken come first.
    """
    free = [look for look in _LOOKS[start:] + _LOOKS[:start] if look not in taken]
    colours = {look["color"] for look in taken}
    free.sort(key=lambda look: look["color"] in colours)  # stable
    return free[0] if free else _LOOKS[start]


#: Markers of the methods in a figure, in their order.
MARKERS = "osD^vP*X<>hp"


def axis_label(column: str) -> str:
    """The name of a column in a figure, with its unit."""
    title = title_of(column)
    if is_accuracy(column):
        return f"{title} (%)"
    return f"{title} (bytes)" if column.endswith("_bytes") else title


def factor(column: str) -> int:
    """By what a figure multiplies a column: accuracies are in percent."""
    return 100 if is_accuracy(column) else 1


#: Decorator: figures made inside have the style.
styled = matplotlib.rc_context(fname=Path(__file__).with_name("style.mplstyle"))


def ticks(axes: Axes, most: int = 6) -> None:
    """Ticks of the x axis at whole rounds."""
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1))


def logarithmic_if_spanning(axes: Axes, times: float) -> None:
    """A logarithmic y axis with numbers in plain text, if all values are positive and the largest
    is more than ``times`` the least.
    """
    if not axes.lines:
        return
    values = np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines])
    if not values.max() > times * values.min() > 0:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))


@styled
def save(figure: Figure, path: str | Path) -> None:
    """Writes the figure in the format of the suffix (``.png``, ``.pdf``, …). A reader never sees
    half a file.
    """
    path = Path(path)
    metadata = None
    if path.suffix == ".pdf":
        metadata = {"CreationDate": None}  # equal figures are equal files
    with replacing(path) as temporary:
        figure.savefig(temporary, metadata=metadata)
    # the next format keeps the layout, which takes long to compute
    figure.set_layout_engine("none")
