"""One look for every figure. No pyplot: figures draw with Agg, need no display and leave no global state behind."""

from pathlib import Path

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from gcfed.utils.files import replacing

# Okabe & Ito, "Color Universal Design": distinguishable with any of the common colour vision deficiencies. Yellow is
# last, since a thin line of it vanishes on white.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, YELLOW = PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442",
)  # fmt: skip
GREY = "#8A8A8A"

#: How figures call columns, and the factors of those that they show in another unit.
LABELS = {
    "test/acc": "test accuracy (%)", "test/loss": "test loss", "test/rmse": "root mean squared error",
    "test/relative_error": "relative error",
}  # fmt: skip
FACTORS = {"test/acc": 100}

#: Decorator: figures made inside have the style.
styled = matplotlib.rc_context({
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "axes.titlesize": 11,
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "xtick.labelcolor": "black", "ytick.labelcolor": "black",
    "axes.axisbelow": True, "axes.grid": True, "grid.color": "#E4E4E4",
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # a name may have a $
    "lines.linewidth": 1.8,
    "legend.frameon": False, "legend.fontsize": 9, "legend.title_fontsize": 9,
    "pdf.fonttype": 42,  # TrueType: text stays text, and publishers refuse Type 3
})  # fmt: skip


def ticks(axes: Axes, most: int = 6, *, whole: bool = True) -> None:
    """Ticks of the x axis; of rounds and trials, which are whole, none between them."""
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=whole, min_n_ticks=1 if whole else 2))


def logarithmic(axes: Axes, which: str) -> None:
    """A logarithmic axis, ``x`` or ``y``, with numbers in plain text."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))


@styled
def save(figure: Figure, path: str | Path) -> None:
    """Write the figure in the format of the suffix (``.png``, ``.pdf``, …); a reader never sees half a file.

    The layout is kept for the next format, which would take as long to compute again. No file says when it was made.
    """
    with replacing(Path(path)) as temporary:
        render(figure, temporary)
    figure.set_layout_engine("none")


def render(figure: Figure, path: Path) -> None:
    """As ``Figure.savefig``, which draws everything twice."""
    if path.suffix == ".png":
        figure.set_dpi(matplotlib.rcParams["savefig.dpi"])
        FigureCanvasAgg(figure).print_png(path)
    elif path.suffix == ".pdf":
        FigureCanvasPdf(figure).print_pdf(path, metadata={"CreationDate": None})
    else:
        figure.savefig(path)
