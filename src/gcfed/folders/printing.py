"""The table that a run prints at its end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gcfed.data.distances import FEATURE_SKEW, LABEL_SKEW
from gcfed.folders.columns import ERRORS
from gcfed.folders.measures import OWN_TESTS, WINDOW
from gcfed.folders.reading import column
from gcfed.folders.summary import (
    distance_in_words,
    formatted,
    rounds_in_words,
    skew_in_words,
)

if TYPE_CHECKING:
    import pandas as pd

Rows = dict[str, str]  # the label of a row → its text
#: First parts of the columns that have rows of their own in the printed table.
SECTIONS_WITH_ROWS = {"train", "test", "comm", "time", "personal"}
#: Which model was tested, by the beginning of the column.
TESTED_MODELS = {
    "personal/global": "global model on clients' tests",
    "personal/local": "clients' own models",
}


def print_summary(
    summary: Mapping[str, Any], metrics: pd.DataFrame, folder: Path, stopped: str = ""
) -> None:
    """Prints the figures of :func:`summary_of`, other metrics and the files."""
    title = rounds_in_words(summary["rounds"])
    if stopped:
        title += f", stopped early: {stopped}"
    rows = _result(summary)
    rows |= _tests(summary, metrics)
    rows |= _personal(metrics)
    rows |= _costs(summary, metrics)
    rows |= _measured(metrics)
    table = Table(title=title, title_justify="left", show_header=False)
    for label, text in rows.items():
        table.add_row(f"[bold]{label}[/bold]", text)
    files = sorted(p.name for p in folder.iterdir() if not p.name.startswith((".", "events.out.")))
    place = Text(f"{', '.join(files)} are in\n  {min(str(folder), relpath(folder), key=len)}")
    Console(soft_wrap=True).print(table, place, sep="\n")


def _result(summary: Mapping[str, Any]) -> Rows:
    """The result of a method that is not judged by the global model's test."""
    name = summary["result"]
    if name.startswith("test/"):
        return {}
    model = TESTED_MODELS.get(name.rpartition("_")[0], name)
    number = summary.get(name)
    if number is not None and math.isfinite(number):
        return {"result": f"{formatted(name, number)}, {model}"}
    text = f"{model}, not measured"
    if name.startswith("personal/"):
        text += f" (measure it by {OWN_TESTS})"
    return {"result": text}


def _tests(summary: Mapping[str, Any], metrics: pd.DataFrame) -> Rows:
    """The tests of the global model."""
    rows: Rows = {}
    tests = len(column(metrics, "test/acc"))
    if tests:
        rows["global model, test accuracy"] = f"{summary['test/acc']:.2%}"
        rows["best"] = f"{summary['test/acc_best']:.2%} in round {summary['best_round']}"
    for name in ERRORS:
        if name in summary and not (tests and name == "test/loss"):
            best = f"{summary[f'{name}_best']:.4g}"
            rows[f"global model, {name}"] = f"{summary[name]:.4g}, at best {best}"
    if tests > 1:
        window = rounds_in_words(min(summary["rounds"], WINDOW))
        rows[f"mean of the last {window}"] = f"{summary['test/acc_smooth10']:.2%}"
    for target, reached in summary["rounds_to_target"].items():
        if reached:
            size = filesize.decimal(summary["bytes_to_target"][target])
            text = f"{rounds_in_words(reached)}, {size}"
            seconds = summary["seconds_to_target"].get(target)
            if seconds is not None:
                text += f", {seconds:,.4g} simulated seconds"
            rows[f"to {100 * float(target):g}%"] = text
    return rows


def _personal(metrics: pd.DataFrame) -> Rows:
    """A row for each model that clients tested on their own samples."""
    figures = {"acc": "", "worst10": "worst tenth ", "std": "standard deviation "}
    rows: Rows = {}
    for prefix, model in TESTED_MODELS.items():
        texts = []
        for figure, words in figures.items():
            curve = column(metrics, f"{prefix}_{figure}")
            if len(curve):
                texts.append(f"{words}{curve.iloc[-1]:.2%}")
        others = [name for name in metrics if name.startswith(f"{prefix}_")]
        for name in others:
            figure = name.removeprefix(f"{prefix}_")
            curve = column(metrics, name)
            if figure not in figures and len(curve):
                texts.append(f"{figure} {curve.iloc[-1]:.4g}")
        if texts:
            rows[model] = ", ".join(texts)
    return rows


def _costs(summary: Mapping[str, Any], metrics: pd.DataFrame) -> Rows:
    """Skews, bytes, seconds, and clients that did not count."""
    rows: Rows = {}
    if LABEL_SKEW[0] in summary:
        rows["label skew"] = skew_in_words(summary)
    if FEATURE_SKEW in summary:
        rows["feature skew"] = distance_in_words(summary)
    down = filesize.decimal(summary["comm/down_bytes"])
    up = filesize.decimal(summary["comm/up_bytes"])
    rows["bytes down, up"] = f"{down}, {up}"
    rows["seconds a round, a client"] = (
        f"{summary['time/round_s']:.3f}, {summary['client_seconds']:.3g} (medians)"
    )
    for what in ("nonfinite_clients", "dropped_clients", "stragglers"):
        count = column(metrics, f"train/{what}").sum()
        if count:
            rows[what.replace("_", " ")] = f"{count:.0f}"
    return rows


def _measured(metrics: pd.DataFrame) -> Rows:
    """The last values of the columns that only some runs have: one row for each first part of their
    names.
    """
    rows = defaultdict[str, list[str]](list)
    for name in metrics:
        kind, _, figure = name.partition("/")
        curve = column(metrics, name)
        if kind not in SECTIONS_WITH_ROWS and len(curve):
            rows[kind].append(f"{figure} {formatted(name, curve.iloc[-1])}")
    return {kind: ", ".join(texts) for kind, texts in rows.items()}
