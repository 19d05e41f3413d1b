"""The figures of a report: curves over the rounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gcfed.plots.style import FACTORS, LABELS, logarithmic, looks, save, styled, ticks
from gcfed.reporting.verdict import Verdict
from gcfed.runs.folder import FINISHED, Run
from gcfed.runs.measures import parse, smooth

METHODS, PLACES = 12, 6  # the first so many methods of the first so many places are drawn


class Picture(NamedTuple):
    place: str
    title: str
    caption: str
    file: Path  # PNG; there is a PDF of the same name


@styled
def draw(frame: pd.DataFrame, verdicts: Mapping[str, Verdict], folder: Path) -> list[Picture]:
    """Writes all figures as PNG and PDF."""
    shades, pictures = looks(frame["method"]), list[Picture]()
    for i, (place, found) in enumerate([*verdicts.items()][:PLACES], start=1):
        rows = frame[(frame["place"] == place) & frame["method"].isin(found.table.index[:METHODS])]
        rows = rows.sort_values(
            "method", key=lambda methods: methods.map([*found.table.index].index), kind="stable"
        )
        caption = " Mean and standard deviation over the seeds that finished." * bool(
            found.table["n"].max() > 1
        )
        caption += " Dotted: a run that did not finish." * any(
            state != FINISHED for state in rows["state"]
        )
        caption += f" The first {METHODS} methods of the table." * (len(found.table) > METHODS)
        measured, first = (
            {name for run in rows["run"] for name in run.metrics},
            parse(found.measure)[1],
        )
        for column in sorted(measured & {*LABELS}, key=lambda name: (name != first, name)):
            smoothed = column == "test/acc" and found.measure.startswith("last10")
            more = " Each point is the mean of the tests in 10 rounds." * smoothed
            figure, file = (
                curves(rows, column, shades, smoothed),
                folder / f"{column.replace('/', '_')}_{i}.png",
            )
            save(figure, file)
            save(figure, file.with_suffix(".pdf"))
            pictures.append(Picture(place, LABELS[column].capitalize(), caption + more, file))
    return pictures


@styled
def curves(
    rows: pd.DataFrame, column: str, shades: Mapping[str, Mapping[str, Any]], smoothed: bool = False
) -> Figure:
    """A column over the rounds, one line per method, with the legend below the axes."""
    figure = Figure(figsize=(5.6, 3.4))
    axes = figure.subplots()
    for method, own in rows[~rows["repeated"]].groupby("method", sort=False):
        label, done = fill(method, 40), [run for run in own["run"] if run.state == FINISHED]
        for runs in [done, *([run] for run in own["run"] if run.state != FINISHED)]:
            y = pd.DataFrame(
                {i: _curve(run, column, smoothed) for i, run in enumerate(runs)}
            ).dropna()
            if y.empty:
                continue
            look = {
                **shades[method],
                **({} if runs is done else {"linestyle": ":", "linewidth": 1.3}),
            }
            mean, std = y.mean(axis=1), y.std(axis=1)
            axes.plot(mean, label=label, marker="o" if len(y) == 1 else None, **look)
            axes.fill_between(
                y.index, mean - std, mean + std, color=look["color"], alpha=0.2, linewidth=0
            )
            label = ""
    values = np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines] or [np.zeros(1)])
    if column != "test/acc" and values.min() > 0 and values.max() > 1000 * values.min():
        logarithmic(axes)
    axes.set(xlabel="communication round", ylabel=LABELS.get(column, column))
    ticks(axes)
    if known := dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)):
        abreast = max(1, min(len(known), 66 // (6 + max(map(len, known)))))
        figure.set_figheight(3.4 + 0.2 * -(-len(known) // abreast))
        figure.legend([*known.values()], [*known], loc="outside lower center", ncols=abreast)
    return figure


def _curve(run: Run, column: str, smoothed: bool) -> pd.Series:
    curve = run.curve(column).replace([np.inf, -np.inf], np.nan).dropna()
    return FACTORS.get(column, 1) * (smooth(curve) if smoothed else curve)
