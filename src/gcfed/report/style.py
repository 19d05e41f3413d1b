"""One look for every figure. No pyplot: figures draw with Agg, need no display and leave no global state behind."""

from pathlib import Path

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from gcfed.utils.files import replacing

# Okabe & Ito, "Color Universal Design": distinguishable with any of the common colour vision deficiencies.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW, BLACK = PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
GREY = "#8A8A8A"

#: Decorator and context manager: figures made inside have the style.
styled = matplotlib.rc_context(
    {
        "figure.constrained_layout.use": True,
        "figure.dpi": 100,
        "savefig.dpi": 160,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.labelsize": 10,
        "axes.prop_cycle": cycler(color=PALETTE),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": GREY,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#E4E4E4",
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": "black",
        "ytick.labelcolor": "black",
        "legend.frameon": False,
        "legend.fontsize": 9,
    }
)


@styled
def save(figure: Figure, path: str | Path) -> None:
    """Write the figure in the format of the suffix (``.png``, ``.pdf``, …); a reader never sees half a file."""
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary)
