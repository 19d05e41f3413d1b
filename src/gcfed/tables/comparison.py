"""Writes our numbers beside the paper's, as Markdown and CSV in the table's folder.

A table of your own has no printed numbers. It gets the 95 % interval of each mean, and the
difference to FedAvg or the best row, seed by seed, as the report has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd

from gcfed.folders.folder import DIVERGED, Run, read_run
from gcfed.folders.measures import parse
from gcfed.folders.summary import rounds_in_words
from gcfed.reporting.judged import judged
from gcfed.reporting.verdict import interval, reference_of
from gcfed.tables.measures import (
    UNITS,
    Unit,
    column_of,
    in_words,
    less_is_better,
    measured,
    of_short_runs,
    unit_of,
)
from gcfed.tables.plan import Place
from gcfed.tables.records import Axis, Cell, Table
from gcfed.tables.running import FINISHED, Work
from gcfed.tables.welch import Difference, Sample, compare_means
from gcfed.utils.files import replacing

#: The values of the whole table's run of a cell, by dotted key; {} if our runs are these.
Whole = Callable[[Axis, Axis], Mapping[str, Any]]
JUDGED = "test/acc"  # a measure of this column follows what the methods declare as their result


class Numbers(NamedTuple):
    """Our numbers of a cell, in the table's unit."""

    values: Mapping[int, float] = {}  # by seed
    bound: bool = False  # a run did not reach the target: it counts with all its rounds

    @property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        if self.bound or len(self.values) < 2:
            return None
        return stdev(self.values.values())

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean; None for fewer than two runs and for a bound."""
        if self.bound or len(self.values) < 2:
            return None
        return interval([*self.values.values()])


class Gain(NamedTuple):
    """A row's mean difference to the reference of its column, and the 95 % interval."""

    reference: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Compared:
    """The runs of a cell and how they are compared."""

    row: Axis
    column: Axis
    works: Sequence[Work]
    runs: Sequence[Run]  # those that have finished
    measure: str | None = None
    unit: Unit = UNITS["none"]
    apart: str = ""  # why they are not compared with the other rows
    differences: Mapping[str, str] = field(default_factory=dict)  # dotted key → text
    gain: Gain | None = None  # of a table without printed numbers

    @property
    def numbers(self) -> Numbers:
        if not self.measure or self.apart:
            return Numbers()
        values = {}
        for run in self.runs:
            value = measured(run, self.measure)
            if value is not None:
                values[run.seed] = self.unit.factor * value
        if not any(math.isinf(value) for value in values.values()):
            return Numbers(values)
        rounds = {run.seed: run.rounds for run in self.runs}
        return Numbers({seed: min(value, rounds[seed]) for seed, value in values.items()}, True)

    @property
    def heading(self) -> str:
        name = self.unit.name
        return f"{self.column.label} ({name})" if name else self.column.label


def gathered(
    table: Table, found: Mapping[Place, Sequence[Work]], whole: Whole
) -> dict[Place, Compared]:
    """The cells that have runs, with the measure by which the report would compare them."""
    cells: dict[Place, Compared] = {}
    for column in table.columns:
        own = []
        for row in table.rows:
            works = found.get((row.label, column.label), ())
            if works:
                runs = [read_run(work.folder) for work in works if work.state == FINISHED]
                differences = _differences(table, row, column, works[0], runs, whole)
                own.append(Compared(row, column, works, runs, differences=differences))
        own = _with_measures(table, own)
        if not table.cells:
            own = _with_gains(own)
        for one in own:
            cells[one.row.label, column.label] = one
    return cells


def _with_measures(table: Table, cells: Sequence[Compared]) -> list[Compared]:
    """The cells of a column with their measures, and why some are not compared."""
    decision = judged({cell.row.label: cell.runs for cell in cells})
    result = parse(decision.measure)[1]
    rounds = [run.rounds for cell in cells for run in cell.runs]
    found = []
    for cell in cells:
        measure = table.measure_of(cell.row, cell.column)
        apart = ""
        # a paper's numbers have the paper's measure
        follows = rounds and not table.cells and cell.row.measure is None
        if measure and follows and column_of(measure) == JUDGED:
            apart = decision.apart.get(cell.row.label, "")
            measure = measure.replace(JUDGED, result)
        if measure:
            measure = of_short_runs(measure, rounds)
        name = table.unit_of(cell.row, cell.column)
        unit = UNITS[name] if name else unit_of(measure or "")
        found.append(replace(cell, measure=measure, unit=unit, apart=apart))
    return found


def _with_gains(cells: Sequence[Compared]) -> list[Compared]:
    """The cells of a column with their differences to FedAvg, or to the best row."""
    ranked: list[tuple[float, str]] = []
    values: dict[str, Mapping[int, float]] = {}
    for cell in cells:
        numbers = cell.numbers
        if numbers.mean is None or numbers.bound or cell.measure != cells[0].measure:
            continue
        sign = 1 if less_is_better(cell.measure or "") else -1
        ranked.append((sign * numbers.mean, cell.row.label))
        values[cell.row.label] = numbers.values
    reference = reference_of([label for _, label in sorted(ranked)])
    found = []
    for cell in cells:
        label = cell.row.label
        gain = None
        if label in values and label != reference:
            gain = _gain(reference, values[reference], values[label])
        found.append(replace(cell, gain=gain))
    return found


def _gain(reference: str, theirs: Mapping[int, float], ours: Mapping[int, float]) -> Gain | None:
    """The mean difference over the common seeds; None if there are fewer than two."""
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(gaps) < 2:
        return None
    return Gain(reference, fmean(gaps), *interval(gaps))


def _differences(
    table: Table, row: Axis, column: Axis, work: Work, runs: Sequence[Run], whole: Whole
) -> dict[str, str]:
    """In which keys our runs of a cell differ from the paper's setting, and from the runs of the
    whole table.
    """

    def ours(key: str) -> Any:
        if runs and runs[0].get(key) is not None:
            return runs[0].get(key)
        return work.get(key)

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


def record(table: Table, cell: Compared) -> dict[str, Any]:
    """A cell: our mean over the finished runs, the printed number, and their difference, as numbers
    and as text.
    """
    ours = cell.numbers
    printed = table.cell(cell.row, cell.column)
    tested = None
    if "rounds" not in cell.differences:
        tested = _tested(ours, printed, table.printed_seeds)
    digits = cell.unit.digits
    difference = _text_of_gain(cell.gain, digits)
    if table.cells:
        difference = _text_of_difference(tested, digits)
    return {
        "row": cell.row.label,
        "column": cell.heading,
        "ours": _text_of_ours(ours, cell, with_interval=not table.cells),
        "paper": _text_of_paper(printed, digits),
        "difference": difference,
        "mean": ours.mean,
        "std": ours.std,
        "seeds": " ".join(map(str, ours.values)),
        "values": " ".join(map(str, ours.values.values())),
        "bound": ours.bound,
        "paper_mean": printed.mean,
        "paper_std": printed.std,
        "p": tested.p if tested else None,
        "measure": cell.measure,
        "folder": str(cell.works[0].folder),
    }


def _tested(ours: Numbers, printed: Cell, seeds: int) -> Difference | None:
    """Ours less the paper's; p is NaN if the paper has no deviation or does not say its seeds."""
    if ours.mean is None or ours.bound or printed.mean is None or printed.note == "+":
        return None
    tested = compare_means(
        Sample(ours.mean, ours.std, len(ours.values)), Sample(printed.mean, printed.std, seeds)
    )
    return tested or Difference(ours.mean - printed.mean, math.nan, math.nan)


def _text_of_ours(ours: Numbers, cell: Compared, with_interval: bool) -> str:
    if not cell.runs:
        return "no run"
    if cell.apart:
        return "not compared"
    digits = cell.unit.digits
    diverged = any(run.state == DIVERGED for run in cell.runs)
    if ours.mean is None:
        return "diverged" if diverged else "–"
    text = f"{ours.mean:{digits}}"
    if ours.bound:
        text += "+"
    if with_interval and ours.ends is not None:
        low, high = ours.ends
        text += f" ({low:{digits}} to {high:{digits}})"
    elif ours.std is not None:
        text += f" ({ours.std:{digits}})"
    if diverged:
        text += " †"
    if len(ours.values) < len(cell.works):
        text += f" [{len(ours.values)} of {len(cell.works)}]"
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


def _text_of_gain(gain: Gain | None, digits: str) -> str:
    if gain is None:
        return ""
    return f"{gain.value:+{digits}} ({gain.low:{digits}} to {gain.high:{digits}})"


def write_comparison(
    table: Table,
    scale: str,
    found: Mapping[Place, Sequence[Work]],
    root: Path,
    command: str,
    whole: Whole = lambda row, column: {},
) -> str:
    """Writes ``comparison.md`` and ``comparison.csv``; returns the first.

    Args:
        found: the works of each cell.
        whole: gives what the whole table runs in a cell, by dotted key.
    """
    cells = gathered(table, found, whole)
    in_order = []
    for row in table.rows:
        for column in table.columns:
            cell = cells.get((row.label, column.label))
            if cell is not None:
                in_order.append(cell)
    frame = pd.DataFrame([record(table, cell) for cell in in_order])
    title = _title(table, scale, in_order)
    notes = _notes(table, in_order)
    text = "\n\n".join([title, _markdown(table, frame), *notes, f"Made by: {command}"]) + "\n"
    for suffix, content in (("md", text), ("csv", frame.to_csv(index=False))):
        with replacing(root / f"comparison.{suffix}") as temporary:
            temporary.write_text(content, encoding="utf-8")
    return text


def _title(table: Table, scale: str, cells: Sequence[Compared]) -> str:
    """The heading, with the rounds of the runs that have finished."""
    place = table.table or table.name
    if table.table.isalnum():
        place = f"Table {table.table}"
    names = ", ".join(name for name in (table.paper, place, table.title) if name)
    rounds = sorted({run.rounds for cell in cells for run in cell.runs})
    length = "no finished run"
    if rounds:
        length = rounds_in_words(rounds[-1])
    if len(rounds) > 1:
        length = f"{rounds[0]} to {length}"
    return f"## {names} (scale={scale}, {length})"


def _markdown(table: Table, cells: pd.DataFrame) -> str:
    """A row for ours, the paper's and their difference."""
    kinds = {"ours": "", "paper": "*paper*", "difference": "*difference*"}
    if not table.cells:
        del kinds["paper"]
    columns = [*dict.fromkeys(cells["column"])]
    lines = []
    for row, own in cells.set_index("column").groupby("row", sort=False):
        for kind, heading in kinds.items():
            if own[kind].any():
                lines.append([heading or row, *own[kind].reindex(columns, fill_value="–")])
    frame = pd.DataFrame(lines, columns=["", *columns])
    return frame.to_markdown(index=False, disable_numparse=True)


def _notes(table: Table, cells: Sequence[Compared]) -> list[str]:
    """What a reader must know: source, measure, differences, and what is not compared."""
    notes = []
    if table.source:
        notes.append(f"Source: {table.source}. {table.note}")
    notes += _measures(cells)
    notes += _listed_differences(cells)
    if table.cells and any("rounds" in cell.differences for cell in cells):
        notes.append("Runs with other rounds than the paper's have no difference to its numbers.")
    notes += dict.fromkeys(f"Not compared: {cell.apart}." for cell in cells if cell.apart)
    if table.unstated:
        unstated = table.unstated.strip().rstrip(".")
        notes.append(f"Not stated: {unstated}; ours are the experiment's.")
    marks = "[n of m]: of n seeds; †: a run diverged; +: a lower bound"
    if table.cells:
        notes.append(
            f"Mean (sample standard deviation) over seeds; {marks}; p: Welch's test of the two"
            " means, where a single run of ours has the paper's standard deviation."
        )
        return notes
    notes.append(f"Mean (95 % interval, Student's t) over seeds; {marks}.")
    references = dict.fromkeys(cell.gain.reference for cell in cells if cell.gain)
    if references:
        notes.append(
            f"Differences are to {' or '.join(references)}, seed by seed, with their 95 % interval."
        )
    return notes


def _listed_differences(cells: Sequence[Compared]) -> list[str]:
    """In what ours differ, with the rows that do if it is not all."""
    rows: dict[str, dict[str, None]] = {}  # a difference → the rows that have it
    for cell in cells:
        for text in cell.differences.values():
            rows.setdefault(text, {})[cell.row.label] = None
    number = len({cell.row.label for cell in cells})
    texts = []
    for text, having in rows.items():
        texts.append(f"{text} [{', '.join(having)}]" if len(having) < number else text)
    return [f"Ours differs in {'; '.join(texts)}."] if texts else []


def _measures(cells: Sequence[Compared]) -> list[str]:
    """The measure of our numbers, or of each column if they differ."""
    by_column: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.measure:
            by_column.setdefault(cell.column.label, {})[in_words(cell.measure)] = None
    texts = {column: " or ".join(words) for column, words in by_column.items()}
    if len({*texts.values()}) == 1:
        return [f"Measure: {next(iter(texts.values()))}."]
    return [f"Measures: {'; '.join(f'{column}: {text}' for column, text in texts.items())}."]
