"""Writes our numbers beside the paper's, as Markdown and CSV in the table's folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import OmegaConf

from gcfed.runs.folder import DIVERGED, Run, read_run
from gcfed.utils.files import replacing
from reproductions.tables import Axis, Cell, Part, Table
from reproductions.welch import Difference, Sample, compare_means

UNITS = {  # the unit in a column's name, the factor of our numbers, and their format
    "percent": ("%", 100.0, ".2f"),
    "points": ("%", 100.0, ".3g"),
    "rounds": ("", 1.0, ".0f"),
    "seconds": ("s", 1.0, ".3g"),
    "1e-3": ("10⁻³", 1e3, ".3f"),
    "none": ("", 1.0, ".4g"),
}
FORMS = [
    # of all or the last rounds
    re.compile(r"(?P<how>max|min|mean|last):(?P<column>[^\[\]]+)(?:\[(?P<number>\d+)\])?"),
    # to a target
    re.compile(
        r"(?P<how>rounds):(?P<column>[^\[\]]+?)(?:\[(?P<window>\d+)\])?>=(?P<number>[\d.]+)"
    ),
    re.compile(r"(?P<column>[^:@]+)(?P<how>@)(?P<number>\d+)"),  # the last test up to a round
    re.compile(r"(?P<column>[^:@]+)(?P<how>)(?P<number>)"),  # a number of summary.json
]


def measured(run: Run, measure: str) -> float | None:
    """A measure of a run, in its own unit.

    Infinite: it did not reach the target. None: there is no finite number.
    """
    match = _form_of(measure)
    how = match["how"]
    name = match["column"]
    if not how:
        return _finite(run.summary.get(name))
    curve = run.metrics[name].dropna() if name in run.metrics else pd.Series(dtype=float)
    if not len(curve):
        return None
    if how == "rounds":
        return _rounds_to(curve, float(match["number"]), match["window"])
    number = float(match["number"] or math.inf)
    if how == "@":
        before = curve[curve.index <= number]
        return _finite(before.iloc[-1]) if run.rounds >= number and len(before) else None
    last = curve[curve.index > run.rounds - number]
    if not len(last):
        return None
    return _finite(last.iloc[-1] if how == "last" else getattr(last, how)())


def column_of(measure: str) -> str:
    """The column, or the number of ``summary.json``, from which a measure is computed.

    Raises ValueError for a measure of another form.
    """
    return _form_of(measure)["column"]


def _form_of(measure: str) -> re.Match[str]:
    for form in FORMS:
        if match := form.fullmatch(measure):
            return match
    raise ValueError(
        f"measure={measure} must be max:test/acc (min:, mean:, last:), mean:test/acc[10],"
        " rounds:test/acc>=0.8, test/acc@500 or a number of summary.json."
    )


def _rounds_to(curve: pd.Series, target: float, window: str | None) -> float:
    """The first round at the target; with a window, of the mean of the tests in so many rounds."""
    if window:
        rounds = range(1, curve.index[-1] + 1)
        means = curve.reindex(rounds).rolling(int(window), min_periods=1).mean()
        curve = means[curve.index]
    reached = curve.index[curve >= target]
    return float(reached[0]) if len(reached) else math.inf


def _finite(value: Any) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def compared(table: Table, row: Axis, column: Axis, works: Sequence[Any]) -> dict[str, Any]:
    """A cell: our mean over the finished runs, the printed number, and their difference, as numbers
    and as text.
    """
    measure = table.of("measure", row, column)
    unit, factor, digits = UNITS[table.of("unit", row, column)]
    runs = [read_run(work.folder) for work in works if work.state == "finished"]
    ours = _ours(runs, measure, factor)
    printed = table.cell(row, column)
    difference = _difference(ours, printed, table.seeds)
    return {
        "row": row.label,
        "column": f"{column.label} ({unit})" if unit else column.label,
        "ours": _text_of_ours(ours, runs, len(works), digits),
        "paper": _text_of_paper(printed, digits),
        "difference": _text_of_difference(difference, digits),
        "mean": ours.mean,
        "std": ours.std,
        "seeds": " ".join(map(str, ours.values)),
        "values": " ".join(map(str, ours.values.values())),
        "bound": ours.bound,
        "paper_mean": printed.mean,
        "paper_std": printed.std,
        "p": difference.p if difference else None,
        "folder": str(works[0].folder),
    }


class Ours(NamedTuple):
    """Our numbers of a cell, in the table's unit."""

    values: dict[int, float]  # by seed
    bound: bool  # a run did not reach the target: it counts with all its rounds

    @property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        if self.bound or len(self.values) < 2:
            return None
        return stdev(self.values.values())


def _ours(runs: Sequence[Run], measure: str | None, factor: float) -> Ours:
    if not measure:
        return Ours({}, False)
    values = {}
    for run in runs:
        if (value := measured(run, measure)) is not None:
            values[run.seed] = factor * value
    bound = any(math.isinf(value) for value in values.values())
    if bound:
        rounds = {run.seed: run.rounds for run in runs}
        values = {seed: min(value, rounds[seed]) for seed, value in values.items()}
    return Ours(values, bound)


def _difference(ours: Ours, printed: Cell, seeds: int | None) -> Difference | None:
    """Ours less the paper's; p is NaN if the paper has no deviation or does not say its seeds."""
    if ours.mean is None or ours.bound or printed.mean is None or printed.note == "+":
        return None
    tested = compare_means(
        Sample(ours.mean, ours.std, len(ours.values)),
        Sample(printed.mean, printed.std, seeds or 1),
    )
    return tested or Difference(ours.mean - printed.mean, math.nan, math.nan)


def _text_of_ours(ours: Ours, runs: Sequence[Run], wanted: int, digits: str) -> str:
    if not runs:
        return "no run"
    diverged = any(run.state == DIVERGED for run in runs)
    if ours.mean is None:
        return "diverged" if diverged else "–"
    text = f"{ours.mean:{digits}}"
    if ours.bound:
        text += "+"
    if ours.std is not None:
        text += f" ({ours.std:{digits}})"
    if diverged:
        text += " †"
    if len(ours.values) < wanted:
        text += f" [{len(ours.values)} of {wanted}]"
    return text


def _text_of_paper(printed: Cell, digits: str) -> str:
    if printed.mean is None:
        return printed.note or "–"
    text = f"{printed.mean:{digits}}"
    if printed.std is not None:
        text += f" ({printed.std:{digits}})"
    if printed.note == "+":
        return f"{text}+"
    return f"{text}, {printed.note}" if printed.note else text


def _text_of_difference(difference: Difference | None, digits: str) -> str:
    if difference is None:
        return ""
    text = f"{difference.value:+{digits}}"
    return text if math.isnan(difference.p) else f"{text} (p {difference.p:.2g})"


def write_comparison(
    table: Table,
    scale: str,
    found: Mapping[tuple[str, str], Sequence[Any]],
    root: Path,
    command: str,
) -> str:
    """Writes ``comparison.md`` and ``comparison.csv``; returns the first.

    ``found`` has the works of each cell.
    """
    records, differs = [], dict[str, dict[str, None]]()
    for row, column in ((row, column) for row in table.rows for column in table.columns):
        if works := found.get((row.label, column.label)):
            records.append(compared(table, row, column, works))
            for key, wish in table.settings(row, column).items():
                if (have := OmegaConf.select(works[0].cfg, key)) != wish:
                    why = (
                        f": {table.departures[key].rstrip('.')}" if key in table.departures else ""
                    )
                    differs.setdefault(f"{key} {have} (paper {wish}{why})", {})[row.label] = None
    cells = pd.DataFrame(records)
    kinds = (
        {"ours": "", "paper": "*paper*", "difference": "*difference*"}
        if table.cells
        else {"ours": ""}
    )
    columns, lines = [*dict.fromkeys(cells["column"])], []
    for row, own in cells.set_index("column").groupby("row", sort=False):
        shown = {
            kind: own[kind].reindex(columns, fill_value="–") for kind in kinds if own[kind].any()
        }
        lines += [[kinds[kind] or row, *texts] for kind, texts in shown.items()]
    said = [
        f"{text} [{', '.join(of)}]" if len(of) < cells["row"].nunique() else text
        for text, of in differs.items()
    ]
    notes = [
        f"Source: {table.source}. {table.note}" * bool(table.source),
        f"Ours differs in {'; '.join(said)}." * bool(said),
        f"Not stated: {table.unstated.strip().rstrip('.')}; ours are the experiment's."
        * bool(table.unstated),
        (
            "Mean (sample standard deviation) over seeds; [n of m]: of n seeds; †: a run diverged;"
            " +: a lower bound; p: Welch's test of the two means, where a single run of ours has"
            " the paper's standard deviation."
        ),
        f"Made by: {command}",
    ]
    markdown = pd.DataFrame(lines, columns=["", *columns]).to_markdown(
        index=False, disable_numparse=True
    )
    place = f"Table {table.table}" if table.table.isalnum() else table.table or table.name
    less = " ".join([f"scale={scale}", *table.scales.get(scale, Part()).overrides])
    title = f"## {', '.join(filter(None, [table.paper, place, table.title]))} ({less})"
    text = "\n\n".join([title, markdown, *filter(None, notes)]) + "\n"
    for suffix, content in (("md", text), ("csv", cells.to_csv(index=False))):
        with replacing(root / f"comparison.{suffix}") as temporary:
            temporary.write_text(content, encoding="utf-8")
    return text
