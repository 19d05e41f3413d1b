"""Results with error bars against a number that varies, in panels: what sweeps, λ and subspaces are drawn with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from gcfed.report.groups import Group
from gcfed.report.panels import (
    MOST_SERIES,
    Drawn,
    common_setting,
    grid,
    legend,
    log_axis,
    outer_labels,
    percent_axis,
    plural,
    title,
)  # fmt: skip
from gcfed.report.runs import DIVERGED
from gcfed.report.series import Array, Quantity, ended, mean_std
from gcfed.report.style import Look, looks, save

LEVELS = ((0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))  # dashes of horizontal lines, which have no markers


@dataclass(frozen=True, eq=False)
class Points:
    """A series, all [n]: mean and standard deviation over seeds at x; ``diverged`` where one of them did."""

    x: Array
    mean: Array
    std: Array
    diverged: NDArray[np.bool_]
    groups: tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class PointsPanel:
    """One panel: series by their labels, and levels (mean, std) that do not depend on x."""

    title: str
    xlabel: str
    quantity: Quantity
    series: dict[str, Points]
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)


def points_of(pairs: Iterable[tuple[float, Group]], quantity: Quantity) -> Points | None:
    """The quantity's measure of each group at its x; None where fewer than two of them have one."""
    rows = [(x, group, ended(group, quantity.measure, quantity.factor)) for x, group in pairs]
    rows = sorted((row for row in rows if len(row[2])), key=lambda row: row[0])
    if len(rows) < 2:
        return None
    mean, std = np.array([mean_std(values) for _, _, values in rows]).T
    diverged = np.array([any(run.state == DIVERGED for run in group.runs) for _, group, _ in rows])
    return Points(np.array([x for x, _, _ in rows]), mean, std, diverged, tuple(group for _, group, _ in rows))


def plot_points(panels: Sequence[PointsPanel], path: Path, what: str, *, most: int, known: Mapping[str, Look]) -> Drawn:
    """Draws the ``most`` panels that have most points, and in each the series with most points, then the best.

    Args:
        what: the first sentence of the caption.
        known: looks of methods in the other figures of the same groups.
    """
    chosen = sorted(panels, key=lambda panel: -sum(len(s.x) for s in panel.series.values()))[:most]
    chosen = [panel for panel in panels if panel in chosen]
    kept = [_best(panel) for panel in chosen]
    labels = [*(label for part in kept for label in part), *(name for panel in chosen for name in panel.levels)]
    by_label = looks(labels, known)
    dashes = {name: LEVELS[i % 3] for i, name in enumerate(dict.fromkeys(n for panel in chosen for n in panel.levels))}
    figure, axes = grid(len(chosen))
    for ax, panel, series in zip(axes, chosen, kept, strict=True):
        for i, (label, points) in enumerate(series.items()):
            _draw(ax, points, by_label[label], shift=min(2.2, 9 / len(series)) * (i - (len(series) - 1) / 2))
        for name, (mean, std) in panel.levels.items():
            ax.axhline(mean, color=by_label[name].color, linestyle=dashes[name], linewidth=1.4, zorder=1.5)
            ax.axhspan(mean - std, mean + std, color=by_label[name].color, alpha=0.1, linewidth=0)
        value_axis(ax, [x for points in series.values() for x in points.x])
        ax.set(xlabel=panel.xlabel, ylabel=panel.quantity.label)
        ax.margins(x=0.08)
        title(ax, panel.title)
        shown = np.array([*(y for p in series.values() for y in p.mean), *(mean for mean, _ in panel.levels.values())])
        if panel.quantity.log:
            log_axis(ax, shown.min(), shown.max())
        if "%" in panel.quantity.label:
            percent_axis(ax)
    outer_labels(axes)
    handles: dict[str, Artist] = {
        label: Line2D([], [], **look.line()) for label, look in by_label.items() if label not in dashes
    }
    for name, dash in dashes.items():
        handles[name] = Line2D([], [], color=by_label[name].color, linestyle=dash, linewidth=1.4)
    legend(figure, handles, inside=0)
    save(figure, path)
    return Drawn(figure, f"{what} {_told(panels, chosen, kept)}")


def _best(panel: PointsPanel) -> dict[str, Points]:
    sign = 1 if panel.quantity.higher_is_better else -1
    order = sorted(panel.series, key=lambda label: (-len(panel.series[label].x), -max(sign * panel.series[label].mean)))
    return {label: points for label, points in panel.series.items() if label in order[:MOST_SERIES]}


def _draw(axes: Axes, points: Points, look: Look, *, shift: float) -> None:
    """``shift``: points (of a page) to the right, so that bars of several series at one x stay apart."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    place = axes.transData + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
    style = look.line() | {"linewidth": 1.5}
    axes.errorbar(points.x, points.mean, yerr=points.std, capsize=2.5, elinewidth=1.1, transform=place, **style)
    if points.diverged.any():
        x, y = points.x[points.diverged], points.mean[points.diverged]
        axes.plot(x, y, linestyle="", marker="x", color="black", markersize=8, markeredgewidth=1.5, transform=place)
    # A shifted line does not count for the limits.
    axes.update_datalim(np.array([points.x, points.mean - points.std]).T)
    axes.update_datalim(np.array([points.x, points.mean + points.std]).T)
    axes.autoscale_view()


def value_axis(axes: Axes, values: Iterable[float]) -> None:
    """Ticks at the values themselves where they are few; by their logarithm where they span a factor of ten."""
    ticks = sorted(set(values))
    positive = [x for x in ticks if x > 0]
    if positive and positive[-1] >= 10 * positive[0] and ticks[0] >= 0:
        if ticks[0] > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    if len(ticks) <= 6:
        axes.xaxis.set_major_locator(FixedLocator(_apart(axes, ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _apart(axes: Axes, ticks: Sequence[float]) -> list[float]:
    """Those whose labels do not touch, both ends among them."""
    places = axes.xaxis.get_transform().transform(np.array(ticks, dtype=np.float64))
    places = (places - places[0]) / max(places[-1] - places[0], 1e-12)
    kept = [0]
    for i in range(1, len(ticks)):
        if places[i] - places[kept[-1]] >= 0.13 and (places[-1] - places[i] >= 0.13 or i == len(ticks) - 1):
            kept.append(i)
    return [ticks[i] for i in kept]


def _told(panels: Sequence[PointsPanel], chosen: Sequence[PointsPanel], kept: Sequence[dict[str, Points]]) -> str:
    """What the points are, of how many runs, in which federation, and what is left out."""
    shown = [points for part in kept for points in part.values()]
    groups = list({id(group): group for points in shown for group in points.groups}.values())
    column = chosen[0].quantity.column
    runs = sum(len(ended(group, chosen[0].quantity.measure)) for group in groups)
    shared = common_setting(groups)
    sentences = ["Points: mean over the seeds that came to their end, with bars of one standard deviation."]
    if column == "test/acc":
        sentences.append("The accuracy of a run is the mean of the tests in its last 10 rounds.")
    if any(points.diverged.any() for points in shown):
        sentences.append("Crossed out: settings of which a run diverged.")
    sentences.append(f"{plural(runs, 'run')} of {plural(len(groups), 'setting')}{shared and f', all with {shared}'}.")
    if len(chosen) < len(panels):
        sentences.append(f"{len(chosen)} of {len(panels)} panels are drawn, those with most points.")
    if any(len(part) < len(panel.series) for part, panel in zip(kept, chosen, strict=True)):
        sentences.append(f"At most {MOST_SERIES} series a panel are drawn: those with most points, then the best.")
    return " ".join(sentences)
