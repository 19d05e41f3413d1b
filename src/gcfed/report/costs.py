"""What accuracy costs in bytes: FedGC's Figure 6 and Table 2."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gcfed.report.curves import curves_told, draw_curves
from gcfed.report.groups import Group, method_names
from gcfed.report.panels import (
    Drawn,
    Panel,
    Selection,
    grid,
    handles_of,
    legend,
    looks_of,
    outer_labels,
    room,
    select,
    title,
)  # fmt: skip
from gcfed.report.runs import Run
from gcfed.report.series import ACCURACY, ENDED, Array, drawing, mean_std, measured, score, target_of
from gcfed.report.style import Look, save, styled

UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


def sent(run: Run) -> Array:
    """Bytes down and up, of all clients together, from the first round to each row of the run's metrics, [rows]."""
    known = [run.columns[name] for name in ("comm/down_bytes", "comm/up_bytes") if name in run.columns]
    return np.cumsum(np.nan_to_num(known).sum(0)) if known else np.zeros(len(run.columns["round"]))


def bytes_to(run: Run, target: float) -> float | None:
    """Bytes until the first test with that accuracy (0 to 1), as in the summary's ``bytes_to_target``; None: never."""
    hits = np.flatnonzero(np.nan_to_num(run.columns["test/acc"]) >= target)
    return float(sent(run)[hits[0]]) if len(hits) else None


def unit_of(most: float) -> tuple[str, float]:
    """The largest unit of which there is at least one."""
    return next((unit for unit in UNITS if most >= unit[1]), UNITS[-1])


@styled
def plot_bytes(groups: Sequence[Group], path: Path) -> Drawn | None:
    """Test accuracy against the bytes sent so far (FedGC, Figure 6).

    Only where the groups of a federation send different amounts: else the curves are those over the rounds.
    """
    rates: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        rates[group.federation] |= {f"{sent(run)[-1] / run.rounds:.2g}" for run in group.runs if run.columns}
    chosen = _chosen([group for group in groups if len(rates[group.federation]) > 1])
    if chosen is None:
        return None
    by_method = looks_of(groups, chosen.groups)
    figure, axes = grid(len(chosen.panels))
    drawn = []
    for ax, panel in zip(axes, chosen.panels, strict=True):
        unit, size = unit_of(max(sent(run)[-1] for group in panel.groups for run in group.runs if run.columns))
        parts = [drawing(group, ACCURACY, x=partial(_sent, size=size)) for group in panel.groups]
        draw_curves(ax, parts, ACCURACY, by_method)
        ax.set_xlabel(f"sent in both directions ({unit})")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
        title(ax, panel.title)
        drawn += parts
    outer_labels(axes)
    legend(figure, handles_of(chosen, by_method))
    save(figure, path)
    what = "Test accuracy against all bytes that server and clients have sent each other so far."
    return Drawn(figure, f"{what} {curves_told(drawn)} {chosen.told}")


def _sent(run: Run, *, size: float) -> Array:
    return sent(run) / size


@styled
def plot_bytes_to_target(groups: Sequence[Group], path: Path) -> Drawn | None:
    """Bytes until a target accuracy was first reached, a bar a setting (FedGC, Table 2)."""
    chosen = _chosen(groups)
    if chosen is None:
        return None
    found = []
    for panel in chosen.panels:
        target = target_of([drawing(group, ACCURACY) for group in panel.groups])
        ended = tuple(group for group in panel.groups if any(run.state in ENDED for run in group.runs))
        if target and ended:
            found.append((Panel(panel.title, ended), target[0]))
    if not found:
        return None
    sizes = [len(panel.groups) for panel, _ in found]
    columns = min(len(found), 2 if max(sizes) <= 2 * min(sizes) else 1)  # those of a row are equally high
    rows = [found[i : i + columns] for i in range(0, len(found), columns)]
    heights = [0.85 + 0.27 * max(len(panel.groups) for panel, _ in row) for row in rows]
    figure = Figure(figsize=(5.2 if columns == 1 else 4.6 * columns, sum(heights)))
    axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    by_method = looks_of(groups, chosen.groups)
    for row, line in zip(rows, axes, strict=True):
        for ax, (panel, goal) in zip(line, row, strict=False):
            _draw_bars(ax, panel, goal, by_method, most=max(len(p.groups) for p, _ in row))
        for unused in line[len(row) :]:
            unused.remove()
    save(figure, path)
    return Drawn(
        figure,
        "Bytes that server and clients have sent each other until a test first had the accuracy named below the bars: "
        "the highest of the runs' targets that half of the smoothed curves reach, FedAvg's peak where there is none. "
        "Mean over the seeds that reached it, with one standard deviation; pale where not all of them did. "
        f"{Selection(tuple(panel for panel, _ in found), chosen.total).told}",
    )


def _draw_bars(axes: Axes, panel: Panel, goal: float, by_method: dict[str, Look], *, most: int) -> None:
    costs = [[bytes_to(run, goal / 100) for run in group.runs if run.state in ENDED] for group in panel.groups]
    unit, size = unit_of(max((cost for its in costs for cost in its if cost is not None), default=1.0))
    for i, (group, its) in enumerate(zip(panel.groups, costs, strict=True)):
        known = np.array([cost for cost in its if cost is not None]) / size
        mean, std, text = 0.0, 0.0, "not reached"
        if len(known):
            mean, std = mean_std(known)
            all_of_them = len(known) == len(its)
            text = f"{mean:.3g} {unit}" + ("" if all_of_them else f" ({len(known)} of {len(its)} seeds)")
            axes.barh(i, mean, height=0.66, color=by_method[group.method].color, alpha=1 if all_of_them else 0.45)
            if len(known) > 1:
                axes.errorbar(mean, i, xerr=std, color="black", capsize=2, elinewidth=1)
        axes.annotate(text, (mean + std, i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(panel.groups)), method_names([group.setting for group in panel.groups]))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.margins(x=0.36)
    axes.set(ylim=(most - 0.4, -0.6), xlabel=f"sent until {goal:.3g} % ({unit})")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    title(axes, panel.title)


def _chosen(groups: Sequence[Group]) -> Selection | None:
    members = [
        group
        for group in measured(groups, ACCURACY.column)
        if any(run.columns and sent(run)[-1] > 0 for run in group.runs)
    ]
    return select(members, partial(score, quantity=ACCURACY), most=room(len(members), minor=True)) if members else None
