"""One look for every figure. No pyplot: figures draw with Agg, need no display and leave no global state behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from gcfed.utils.files import replacing

# Okabe & Ito, "Color Universal Design": distinguishable with any of the common colour vision deficiencies.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW, BLACK = PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
GREY = "#8A8A8A"

MARKERS = ("o", "s", "^", "D", "v", "X", "P", "<", ">", "*")
TURNS: tuple[Any, ...] = ("solid", (0, (7, 1.5, 1.2, 1.5)), (0, (1.2, 1.2)), (0, (7, 1.5, 1.2, 1.5, 1.2, 1.5)))
UNFINISHED: Any = (0, (3, 1.8))  # no series' own: dashes say that a run did not come to its end


@dataclass(frozen=True)
class Look:
    """How one series is told from the others, in colour and without: colour, dashes, marker."""

    color: str
    dashes: Any
    marker: str
    hollow: bool

    def line(self, *, dashes: Any = None) -> dict[str, Any]:
        """Keywords of ``Axes.plot``."""
        return {
            "color": self.color,
            "linestyle": dashes or self.dashes,
            "marker": self.marker,
            "markersize": 5.5 if self.marker == "*" else 4.2,
            "markeredgewidth": 1,
            "markerfacecolor": "white" if self.hollow else self.color,
        }


def look(i: int) -> Look:
    """The look of series i; those of 0 to 27 differ in colour or dashes, and in marker or dashes.

    Yellow is left out: a thin line of it vanishes on white.
    """
    colors = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
    turn = i // len(colors) % len(TURNS)
    return Look(colors[i % len(colors)], TURNS[turn], MARKERS[i % len(MARKERS)], hollow=turn % 2 == 1)


def looks(labels: Sequence[str], known: Mapping[str, Look] | None = None) -> dict[str, Look]:
    """A look for each different label, in the order in which they appear; the known ones keep theirs."""
    known = known or {}
    found = {label: known[label] for label in labels if label in known}
    free = (look(i) for i in count() if i > 99 or look(i) not in found.values())
    return {label: found[label] if label in found else next(free) for label in dict.fromkeys(labels)}


#: Decorator: figures made inside have the style.
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
        "axes.formatter.useoffset": False,
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
        "pdf.fonttype": 42,  # TrueType: text stays text, and publishers refuse Type 3
    }
)


@styled
def save(figure: Figure, path: str | Path) -> None:
    """Write the figure in the format of the suffix (``.png``, ``.pdf``, …); a reader never sees half a file.

    The layout is kept for the next format, which would take as long to compute again. No file says when it was made.
    """
    path = Path(path)
    with replacing(path) as temporary:
        render(figure, temporary)
    figure.set_layout_engine("none")


def render(figure: Figure, path: Path) -> None:
    """As ``Figure.savefig``, which draws everything twice, once to no avail."""
    if path.suffix == ".png":
        figure.set_dpi(matplotlib.rcParams["savefig.dpi"])
        FigureCanvasAgg(figure).print_png(path)
    elif path.suffix == ".pdf":
        FigureCanvasPdf(figure).print_pdf(path, metadata={"CreationDate": None})
    else:
        figure.savefig(path)
