"""Writes our numbers beside the paper's, as Markdown and CSV in the table's folder."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd

from gcfed.folders.folder import DIVERGED, Run, read_run
from gcfed.folders.measures import parse
from gcfed.folders.summary import rounds_in_words
from gcfed.reporting.judged import judged
from gcfed.reporting.verdict import TITLES
from gcfed.utils.files import replacing
from reproductions.tables import Axis, Cell, Table
from reproductions.welch import Difference, Sample, compare_means

#: The values of the whole table's run of a cell, by dotted key; {} if our runs are these.
Whole = Callable[[Axis, Axis], Mapping[str, Any]]
UNITS = {  # the unit in a column's name, the factor of our numbers, and their format
    "percent": ("%", 100.0, ".2f"),
    "points": ("%", 100.0, ".3g"),
    "rounds": ("", 1.0, ".0f"),
    "seconds": ("s", 1.0, ".3g"),
    "1e-3": ("10⁻³", 1e3, ".3f"),
    "none": ("", 1.0, ".4g"),
}
#: Words for a measure of several tests.
HOW = {"max": "highest of the", "min": "lowest of the", "mean": "mean of the"}
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


@dataclass(frozen=True)
class Works:
    """The runs of a cell and how they are compared."""

    works: Sequence[Any]
    runs: Sequence[Run]  # those that have finished
    measure: str | None = None
    apart: str = ""  # why they are not compared with the other rows
    differences: Mapping[str, str] = field(default_factory=dict)  # dotted key → text

    @property
    def first(self) -> Any:
        return self.works[0]


def gathered(
    table: Table, found: Mapping[tuple[str, str], Sequence[Any]], whole: Whole
) -> dict[tuple[str, str], Works]:
    """The runs of each cell, with the measure by which the report would compare them."""
    cells: dict[tuple[str, str], Works] = {}
    for column in table.columns:
        runs: dict[str, list[Run]] = {}
        for row in table.rows:
            works = found.get((row.label, column.label), ())
            finished = [read_run(work.folder) for work in works if work.state == "finished"]
            if works:
                runs[row.label] = finished
        apart: Mapping[str, str] = {}
        result = ""
        if not table.cells:  # a paper's numbers have the paper's measure
            decision = judged(runs)
            apart = decision.apart
            result = parse(decision.measure)[1]
        for row in table.rows:
            if row.label not in runs:
                continue
            works = found[row.label, column.label]
            measure = table.of("measure", row, column)
            own = runs[row.label]
            why = ""
            if measure and column_of(measure) == "test/acc" and row.measure is None:
                why = apart.get(row.label, "")
                if result.startswith("personal/"):
                    measure = measure.replace("test/acc", result)
            every = [run.rounds for one in runs.values() for run in one]
            measure = measure and of_short_runs(measure, every)
            differences = _differences(table, row, column, works[0], own, whole)
            cells[row.label, column.label] = Works(works, own, measure, why, differences)
    return cells


def of_short_runs(measure: str, rounds: Sequence[int]) -> str:
    """The measure, or the last test instead of a mean over more than a third of a run."""
    match = _form_of(measure)
    is_mean = match["how"] == "mean" and match["number"]
    if is_mean and min(rounds, default=0) < 3 * int(match["number"]):
        return f"last:{match['column']}"
    return measure


def in_words(measure: str) -> str:
    """``test accuracy, mean of the tests in the last 10 rounds``."""
    match = _form_of(measure)
    how = match["how"]
    name = TITLES.get(match["column"], match["column"])
    if not how:
        return name
    if how == "@":
        return f"{name} at round {match['number']}"
    if how == "rounds":
        window = match.groupdict().get("window")
        mean = f", mean of the tests in the last {window} rounds" if window else ""
        return f"rounds until {name}{mean} is at least {match['number']}"
    if how == "last":
        return f"{name}, last test"
    which = "tests"
    if match["number"]:
        which += f" in the last {match['number']} rounds"
    return f"{name}, {HOW[how]} {which}"


def _differences(
    table: Table, row: Axis, column: Axis, work: Any, runs: Sequence[Run], whole: Whole
) -> dict[str, str]:
    """In which keys our runs of a cell differ from the paper's setting, and from the runs of the
    whole table.
    """
    run = runs[0] if runs else None

    def ours(key: str) -> Any:
        value = run.get(key) if run is not None else None
        return work.get(key) if value is None else value

    texts: dict[str, str] = {}
    wishes = table.settings(row, column)
    for key, wish in wishes.items():
        have = ours(key)
        if have != wish:
            why = table.departures.get(key, "").rstrip(".")
            texts[key] = f"{key} {have} (paper {wish}{': ' if why else ''}{why})"
    full = whole(row, column)
    if full:
        here = {**work.leaves, "rounds": ours("rounds"), "eval_every": ours("eval_every")}
        for key in sorted((full.keys() | here.keys()) - table.chosen):
            if key not in wishes and full.get(key) != here.get(key):
                texts[key] = f"{key} {here.get(key)} (whole table {full.get(key)})"
    return texts


def compared(table: Table, row: Axis, column: Axis, works: Works) -> dict[str, Any]:
    """A cell: our mean over the finished runs, the printed number, and their difference, as numbers
    and as text.
    """
    unit, factor, digits = UNITS[table.of("unit", row, column)]
    ours = _ours(works.runs, None if works.apart else works.measure, factor)
    printed = table.cell(row, column)
    difference = None
    if "rounds" not in works.differences:
        difference = _difference(ours, printed, table.seeds)
    return {
        "row": row.label,
        "column": f"{column.label} ({unit})" if unit else column.label,
        "ours": _text_of_ours(ours, works, digits),
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
        "measure": works.measure,
        "folder": str(works.first.folder),
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


def _text_of_ours(ours: Ours, works: Works, digits: str) -> str:
    if not works.runs:
        return "no run"
    if works.apart:
        return "not compared"
    wanted = len(works.works)
    diverged = any(run.state == DIVERGED for run in works.runs)
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
    whole: Whole = lambda row, column: {},
) -> str:
    """Writes ``comparison.md`` and ``comparison.csv``; returns the first.

    Args:
        found: the works of each cell.
        whole: gives what the whole table runs in a cell, by dotted key.
    """
    ours = gathered(table, found, whole)
    records = [
        compared(table, row, column, ours[row.label, column.label])
        for row in table.rows
        for column in table.columns
        if (row.label, column.label) in ours
    ]
    cells = pd.DataFrame(records)
    text = "\n\n".join(
        [
            _title(table, scale, ours),
            _markdown(table, cells),
            *_notes(table, ours),
            f"Made by: {command}",
        ]
    )
    text += "\n"
    for suffix, content in (("md", text), ("csv", cells.to_csv(index=False))):
        with replacing(root / f"comparison.{suffix}") as temporary:
            temporary.write_text(content, encoding="utf-8")
    return text


def _title(table: Table, scale: str, ours: Mapping[tuple[str, str], Works]) -> str:
    """The heading, with the rounds of the runs that have finished."""
    place = table.table or table.name
    if table.table.isalnum():
        place = f"Table {table.table}"
    names = ", ".join(name for name in (table.paper, place, table.title) if name)
    rounds = sorted({run.rounds for one in ours.values() for run in one.runs})
    length = "no finished run"
    if rounds:
        length = rounds_in_words(rounds[-1])
    if len(rounds) > 1:
        length = f"{rounds[0]} to {length}"
    return f"## {names} (scale={scale}, {length})"


def _markdown(table: Table, cells: pd.DataFrame) -> str:
    """A row for ours, the paper's and their difference."""
    kinds = {"ours": ""}
    if table.cells:
        kinds |= {"paper": "*paper*", "difference": "*difference*"}
    columns = [*dict.fromkeys(cells["column"])]
    lines = []
    for row, own in cells.set_index("column").groupby("row", sort=False):
        for kind, heading in kinds.items():
            if own[kind].any():
                lines.append([heading or row, *own[kind].reindex(columns, fill_value="–")])
    frame = pd.DataFrame(lines, columns=["", *columns])
    return frame.to_markdown(index=False, disable_numparse=True)


def _notes(table: Table, ours: Mapping[tuple[str, str], Works]) -> list[str]:
    """What a reader must know: source, measure, differences, and what is not compared."""
    notes = []
    if table.source:
        notes.append(f"Source: {table.source}. {table.note}")
    notes += _measures(table, ours)
    rows: dict[str, dict[str, None]] = {}  # a difference → the rows that have it
    for (row, _), one in ours.items():
        for text in one.differences.values():
            rows.setdefault(text, {})[row] = None
    number = len({row for row, _ in ours})
    texts = [
        f"{text} [{', '.join(having)}]" if len(having) < number else text
        for text, having in rows.items()
    ]
    if texts:
        notes.append(f"Ours differs in {'; '.join(texts)}.")
    if table.cells and any("rounds" in one.differences for one in ours.values()):
        notes.append("Runs with other rounds than the paper's have no difference to its numbers.")
    notes += dict.fromkeys(f"Not compared: {one.apart}." for one in ours.values() if one.apart)
    if table.unstated:
        unstated = table.unstated.strip().rstrip(".")
        notes.append(f"Not stated: {unstated}; ours are the experiment's.")
    notes.append(
        "Mean (sample standard deviation) over seeds; [n of m]: of n seeds; †: a run diverged;"
        " +: a lower bound; p: Welch's test of the two means, where a single run of ours has"
        " the paper's standard deviation."
    )
    return notes


def _measures(table: Table, ours: Mapping[tuple[str, str], Works]) -> list[str]:
    """The measure of our numbers, or of each column if they differ."""
    by_column: dict[str, dict[str, None]] = {}
    for (_, column), one in ours.items():
        if one.measure:
            by_column.setdefault(column, {})[in_words(one.measure)] = None
    texts = {column: " or ".join(words) for column, words in by_column.items()}
    if len({*texts.values()}) == 1:
        return [f"Measure: {next(iter(texts.values()))}."]
    return [f"Measures: {'; '.join(f'{column}: {text}' for column, text in texts.items())}."]
