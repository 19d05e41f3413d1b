"""The figures of a report: curves over the rounds, the bytes that were sent, and simulated time."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from gcfed.folders.folder import FINISHED, Run
from gcfed.folders.measures import CLOCK, parse, smooth
from gcfed.plots.style import (
    MARKERS,
    axis_label,
    factor,
    logarithmic_if_spanning,
    looks,
    save,
    styled,
    ticks,
)
from gcfed.reporting.verdict import Verdict

MOST_METHODS = 12  # the first so many methods of a place are drawn
MOST_PLACES = 6  # of the first so many places
MOST_MARKERS = 8  # markers on a curve
#: The columns that are drawn, if a run has them.
DRAWN_COLUMNS = {
    "test/acc",
    "personal/local_acc",
    "personal/global_acc",
    "test/loss",
    "test/rmse",
    "test/relative_error",
    "test/perplexity",
}
#: What a curve is drawn over → the label of the axis.
ABSCISSAE = {
    "round": "communication round",
    "bytes": "sent to and by clients (MB)",
    "seconds": "simulated seconds",
}


class Picture(NamedTuple):
    place: str
    title: str
    caption: str
    file: Path  # PNG; there is a PDF of the same name


class Sketch(NamedTuple):
    """What one figure of a place shows."""

    name: str  # the beginning of the file's name
    title: str
    caption: str
    column: str
    over: str  # a key of ABSCISSAE
    smoothed: bool


class Mark(NamedTuple):
    """The marker of one of several methods in a figure."""

    marker: str
    number: int  # the method's, from 0
    methods: int

    def places(self, points: int) -> slice:
        """The points that are marked: each method has others, so that no marker hides another."""
        step = max(self.methods, points // MOST_MARKERS)
        return slice(self.number * step // self.methods % points, None, step)


@styled
def draw(frame: DataFrame, verdicts: Mapping[str, Verdict], folder: Path) -> list[Picture]:
    """Writes all figures as PNG and PDF."""
    shades = looks(frame["method"])
    pictures: list[Picture] = []
    for number, (place, verdict) in enumerate([*verdicts.items()][:MOST_PLACES], start=1):
        rows = _drawn_rows(frame, place, verdict)
        for sketch in _sketches(rows, verdict):
            file = folder / f"{sketch.name}_{number}.png"
            figure = curves(rows, sketch.column, shades, sketch.smoothed, over=sketch.over)
            save(figure, file)
            save(figure, file.with_suffix(".pdf"))
            pictures.append(Picture(place, sketch.title, sketch.caption, file))
    return pictures


def _drawn_rows(frame: DataFrame, place: str, verdict: Verdict) -> DataFrame:
    """The rows of a place's first methods, in the order of its table."""
    methods = [*verdict.table.index[:MOST_METHODS]]
    rows = frame[(frame["place"] == place) & frame["method"].isin(methods)]
    return rows.sort_values("method", key=lambda names: names.map(methods.index), kind="stable")


def _sketches(rows: DataFrame, verdict: Verdict) -> list[Sketch]:
    """The figures of a place: the column of the verdict comes first, also over bytes and time."""
    sketches: list[Sketch] = []
    first = parse(verdict.measure).column
    measured = {name for run in rows["run"] for name in run.metrics}
    for column in sorted(measured & DRAWN_COLUMNS, key=lambda name: (name != first, name)):
        smoothed = column == first and verdict.measure.startswith("last10")
        caption = _caption(rows, verdict)
        if smoothed:
            caption += " Each point is the mean of the tests in 10 rounds."
        if verdict.declared and column.startswith("test/"):
            caption += " This is the global model."
        name = column.replace("/", "_")
        title = axis_label(column)
        title = title[0].upper() + title[1:]
        sketch = Sketch(name, title, caption, column, "round", smoothed)
        sketches.append(sketch)
        if column == first and _bytes_differ(rows):
            over_bytes = f"{title} over megabytes"
            sketches.append(sketch._replace(name=f"{name}_bytes", title=over_bytes, over="bytes"))
        if column == first and all(CLOCK in run.metrics for run in rows["run"]):
            over_time = f"{title} over simulated time"
            sketches.append(
                sketch._replace(name=f"{name}_seconds", title=over_time, over="seconds")
            )
    return sketches


def _caption(rows: DataFrame, verdict: Verdict) -> str:
    """What the curves of a place show."""
    caption = ""
    if verdict.table["n"].max() > 1:
        caption += " Mean and standard deviation over the seeds that finished."
    if any(state != FINISHED for state in rows["state"]):
        caption += " Dotted: a run that did not finish."
    if len(verdict.table) > MOST_METHODS:
        caption += f" The first {MOST_METHODS} methods of the table."
    return caption


def _bytes_differ(rows: DataFrame) -> bool:
    """Whether the methods send different numbers of bytes in all their rounds."""
    finished = rows[rows["state"] == FINISHED]
    totals = finished["run"].map(lambda run: _megabytes(run).sum())
    means = totals.groupby(finished["method"]).mean()
    return len(means) > 1 and bool(means.max() > 1.01 * means.min())


def _megabytes(run: Run) -> Series:
    """What was sent in each round, down and up, in megabytes."""
    return (run.curve("comm/down_bytes") + run.curve("comm/up_bytes")) / 1e6


@styled
def curves(
    rows: DataFrame,
    column: str,
    shades: Mapping[str, Mapping[str, Any]],
    smoothed: bool = False,
    *,
    over: str = "round",
) -> Figure:
    """A column over the rounds, one line per method, with the legend below the axes.

    Args:
        over: ``round``, ``bytes`` for the megabytes that were sent until then, or ``seconds`` for
            the simulated time.
    """
    figure = Figure(figsize=(5.6, 3.4))
    axes = figure.subplots()
    panel = _Panel(axes, column, smoothed, over)
    counted = rows[~rows["repeated"]]
    methods = [*dict.fromkeys(counted["method"])]
    for number, method in enumerate(methods):
        runs = [*counted["run"][counted["method"] == method]]
        mark = None
        if len(methods) > 1:
            mark = Mark(MARKERS[number % len(MARKERS)], number, len(methods))
        panel.draw_method(method, runs, shades[method], mark)
    if factor(column) == 1:
        logarithmic_if_spanning(axes, 1000)
    axes.set(xlabel=ABSCISSAE[over], ylabel=axis_label(column))
    if over == "round":
        ticks(axes)
    _legend(figure, axes)
    return figure


class _Panel(NamedTuple):
    """The axes of a figure, and what its curves show."""

    axes: Axes
    column: str
    smoothed: bool
    over: str  # a key of ABSCISSAE

    def draw_method(
        self, method: str, runs: list[Run], look: Mapping[str, Any], mark: Mark | None
    ) -> None:
        """Draws the mean of the finished runs, and each other run dotted. The legend names the
        method once.
        """
        label = fill(method, 40)
        finished = [run for run in runs if run.state == FINISHED]
        if self._draw(finished, look, label, mark):
            label = ""
        dotted = {**look, "linestyle": ":", "linewidth": 1.3}
        for run in runs:
            if run.state != FINISHED and self._draw([run], dotted, label, None):
                label = ""

    def _draw(
        self, runs: list[Run], look: Mapping[str, Any], label: str, mark: Mark | None
    ) -> bool:
        """Draws the mean of these runs and a band; returns whether they have values.

        Args:
            mark: markers lie above all lines, so that they show where curves coincide. None: none.
        """
        each = {i: _curve(run, self.column, self.smoothed) for i, run in enumerate(runs)}
        values = DataFrame(each).dropna()
        if values.empty:
            return False
        mean = values.mean(axis=1)
        spread = values.std(axis=1)
        x = self._abscissae(runs, values.index)
        y = mean.to_numpy()
        color = look["color"]
        axes = self.axes
        axes.plot(x, y, label=label, marker="o" if len(x) == 1 else None, **look)
        axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)
        if mark is not None:
            marked = mark.places(len(x))
            axes.scatter(x[marked], y[marked], 18, color, marker=mark.marker, label=label, zorder=3)
        return True

    def _abscissae(self, runs: list[Run], rounds: pd.Index) -> np.ndarray:
        """Where the values of these rounds are drawn."""
        if self.over == "round":
            return rounds.to_numpy(dtype=float)
        each = {}  # from the start to the end of each round
        for i, run in enumerate(runs):
            each[i] = _megabytes(run).cumsum() if self.over == "bytes" else run.curve(CLOCK)
        until = DataFrame(each)
        return until.mean(axis=1).reindex(rounds).to_numpy()


def _legend(figure: Figure, axes: Axes) -> None:
    """One entry per method, with its line and its marker, below the axes."""
    entries: dict[str, list[Any]] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        entries.setdefault(label, []).append(handle)
    if not entries:
        return
    letters = 6 + max(map(len, entries))  # of an entry; 66 fit below the axes
    abreast = max(1, min(len(entries), 66 // letters))
    num_rows = -(-len(entries) // abreast)
    figure.set_figheight(3.4 + 0.2 * num_rows)
    handles: list[Any] = [tuple(parts) for parts in entries.values()]
    figure.legend(handles, [*entries], loc="outside lower center", ncols=abreast)


def _curve(run: Run, column: str, smoothed: bool) -> Series:
    curve = run.curve(column).replace([np.inf, -np.inf], np.nan).dropna()
    if smoothed:
        curve = smooth(curve)
    return factor(column) * curve
