"""Figures of several panels: which groups go into which, the grid, the common legend, what the caption says of it."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from gcfed.report.groups import Group, federation_names, federation_of, method_name, method_names
from gcfed.report.runs import FINISHED
from gcfed.report.series import troubles
from gcfed.report.style import UNFINISHED, Look, looks

MOST_SERIES = 12  # in a panel


@dataclass(frozen=True)
class Drawn:
    """A figure that was written, and what it shows, in plain words."""

    figure: Figure
    caption: str


@dataclass(frozen=True)
class Panel:
    """Groups of one federation; ``title`` says how it differs from those of the other panels."""

    title: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Selection:
    """The panels of a figure, out of ``total`` settings."""

    panels: tuple[Panel, ...]
    total: int

    @property
    def groups(self) -> list[Group]:
        return [group for panel in self.panels for group in panel.groups]

    @property
    def names(self) -> dict[str, str]:
        """The groups' methods as this figure calls them: without keys that differ only from groups it does not draw.

        A method's longest name, where its keys differ in one data set and not in another.
        """
        drawn = self.groups
        found: dict[str, str] = {}
        for group, name in zip(drawn, method_names([group.setting for group in drawn]), strict=True):
            found[group.method] = max(found.get(group.method, ""), name, key=len)
        return found

    @property
    def told(self) -> str:
        """How much is drawn, of what, and what is left out."""
        drawn = self.groups
        runs = sum(len(group.runs) for group in drawn)
        shared = common_setting(drawn)
        text = f"{plural(runs, 'run')} of {plural(len(drawn), 'setting')}{shared and f', all with {shared}'}."
        if len(drawn) < self.total:
            text += (
                f" {len(drawn)} of {self.total} settings are drawn: the panels with most of them, and in each, up to "
                f"{MOST_SERIES}, the best of every method, then the best of the others."
            )
        return text


def room(settings: int, *, minor: bool = False) -> int:
    """How many panels a figure of so many settings has: fewer in a minor figure, and where the set is large.

    A panel takes a tenth of a second and more, and a thousand runs must not take 20.
    """
    return (4 if minor else 6) if settings > 100 else (6 if minor else 9)


def select(groups: Sequence[Group], score: Callable[[Group], float], *, most: int) -> Selection:
    """One panel a federation, the ``most`` that have most groups; in each the best, one of every method first."""
    members: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        members[group.federation].append(group)
    kept = sorted(members, key=lambda name: -len(members[name]))[:most]
    chosen = [tuple(_best(members[name], score)) for name in members if name in kept]
    titles = federation_names([part[0].setting for part in chosen])
    return Selection(tuple(Panel(*pair) for pair in zip(titles, chosen, strict=True)), len(groups))


def _best(groups: list[Group], score: Callable[[Group], float]) -> list[Group]:
    if len(groups) <= MOST_SERIES:
        return groups
    order = sorted(range(len(groups)), key=lambda i: -score(groups[i]))
    of_method: dict[str, int] = {}
    for i in order:
        of_method.setdefault(method_name(groups[i].setting), i)
    first = list(of_method.values())
    picked = [*first, *(i for i in order if i not in first)][:MOST_SERIES]
    return [groups[i] for i in sorted(picked)]


def looks_of(groups: Sequence[Group], drawn: Iterable[Group]) -> dict[str, Look]:
    """A look a method: the same in every figure of these groups, while they are few enough to tell apart."""
    names = list(dict.fromkeys(group.method for group in groups))
    return looks(names if len(names) <= 2 * MOST_SERIES else [group.method for group in drawn])


def grid(
    count: int, *, columns: int | None = None, size: tuple[float, float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels of ``size`` inches: up to two columns of a page wide, one for the only panel."""
    columns = columns or {1: 1, 2: 2, 4: 2}.get(count, 3)
    rows = -(-count // columns)
    width, height = size or {1: (5.0, 3.4), 2: (4.0, 3.0), 3: (3.3, 2.7)}.get(columns, (2.8, 2.4))
    figure = Figure(figsize=(columns * width, rows * height))
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    if count > 1:  # small
        for ax in axes[:count]:
            ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    return figure, axes[:count]


def title(axes: Axes, text: str) -> None:
    """Above the panel, broken where it would be wider."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    width = figure.get_figwidth() * axes.get_position().width
    axes.set_title(textwrap.fill(text, max(16, int(width * 12.5))), fontsize=10)


def legend(figure: Figure, handles: Mapping[str, Artist], *, inside: int = 4) -> None:
    """In the only panel if there are at most ``inside`` entries, else below all panels."""
    if not handles:
        return
    longest = max(map(len, handles))
    if len(figure.axes) == 1 and len(handles) <= inside and longest < 40:
        figure.axes[0].legend(handles.values(), handles.keys(), frameon=True, framealpha=0.8, edgecolor="none")
        return
    width, height = figure.get_size_inches()
    columns = max(1, min(len(handles), int(width / (0.6 + 0.072 * longest))))  # a handle and its text, in inches
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + 0.21 * rows + 0.1)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=-(-len(handles) // rows),
        columnspacing=1.4, handlelength=2.6,
    )  # fmt: skip


def handles_of(chosen: Selection, by_method: Mapping[str, Look]) -> dict[str, Artist]:
    """One entry a method, with what its runs came to where not all finished."""
    members: dict[str, list[Group]] = defaultdict(list)
    for group in chosen.groups:
        members[group.method].append(group)
    found: dict[str, Artist] = {}
    names = chosen.names
    for method, its in members.items():
        trouble = troubles(its)
        finished = any(run.state == FINISHED for group in its for run in group.runs)
        style = by_method[method].line(dashes=None if finished else UNFINISHED)
        found[names[method] + (f" ({trouble})" if trouble else "")] = Line2D([], [], **style)
    return found


def rounds_axis(axes: Axes, label: str = "communication round") -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))


def percent_axis(axes: Axes) -> None:
    """What is no percentage is not shown: a deviation may reach beyond 0 and 100."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 101))


def log_axis(axes: Axes, low: float, high: float) -> None:
    """Logarithmic, where the values ``low`` to ``high`` span enough of it."""
    if low > 0 and high >= 8 * low:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def outer_labels(axes: Sequence[Axes]) -> None:
    """Axis labels at the left of a row and below a column only, where all panels have the same."""
    places = [(spec.rowspan.start, spec.colspan.start) for ax in axes if (spec := ax.get_subplotspec()) is not None]
    lowest = {column: max(row for row, c in places if c == column) for _, column in places}
    if len({ax.get_xlabel() for ax in axes}) == 1:
        for ax, (row, column) in zip(axes, places, strict=True):
            ax.set_xlabel(ax.get_xlabel() if row == lowest[column] else "")
    if len({ax.get_ylabel() for ax in axes}) == 1:
        for ax, (_, column) in zip(axes, places, strict=True):
            ax.set_ylabel(ax.get_ylabel() if column == 0 else "")


def common_setting(groups: Sequence[Group]) -> str:
    """What the federations of all of them share: data, model, participation, partition, rounds."""
    parts = [federation_of(group.setting) for group in groups]
    shared = [column[0] for column in zip(*parts, strict=True) if len(set(column)) == 1]
    return ", ".join(filter(None, shared))


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
