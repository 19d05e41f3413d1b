"""Gathers the runs of a table's cells: our numbers, and in what our runs differ from the paper's
setting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import NamedTuple

from gcfed.folders.columns import GLOBAL_TESTS
from gcfed.folders.folder import Run, read_run
from gcfed.folders.measures import are_short, full_form, parse
from gcfed.reporting.decision import Decision, decide
from gcfed.reporting.verdict import interval
from gcfed.tables.plan import CellName
from gcfed.tables.records import RESULT, UNITS, Axis, Table, Unit, unit_of
from gcfed.tables.running import DONE, Work

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


@dataclass(frozen=True)
class Cell:
    """The runs of a cell and how they are compared."""

    row: Axis
    column: Axis
    works: Sequence[Work]
    runs: Sequence[Run]  # those that have finished
    measure: str | None = None
    unit: Unit = UNITS["none"]
    not_compared: str = ""  # why they are not compared with the other rows
    differences: Mapping[str, str] = field(default_factory=dict)  # dotted key → text

    @cached_property
    def numbers(self) -> Numbers:
        if not self.measure or self.not_compared:
            return Numbers()
        asked = parse(self.measure)
        values = {}
        bound = False
        for run in self.runs:
            value, is_missed = asked.bounded(run)
            if value is not None:
                values[run.seed] = self.unit.factor * value
                bound = bound or is_missed
        return Numbers(values, bound)

    @property
    def name(self) -> CellName:
        return self.row.label, self.column.label

    @property
    def heading(self) -> str:
        name = self.unit.name
        return f"{self.column.label} ({name})" if name else self.column.label


def gather(table: Table, works_of: Mapping[CellName, Sequence[Work]]) -> list[Cell]:
    """The cells that have runs, column by column, with the measure by which the report would
    compare them.

    Args:
        works_of: the works of each cell.
    """
    cells: list[Cell] = []
    for column in table.columns:
        cells_of_column = []
        for row in table.rows:
            works = works_of.get((row.label, column.label), ())
            if works:
                runs = [read_run(work.folder) for work in works if work.state == DONE]
                differences = _differences(table, row, column, works[0], runs)
                cells_of_column.append(Cell(row, column, works, runs, differences=differences))
        cells += _with_measures(table, cells_of_column)
    return cells


def _with_measures(table: Table, cells: Sequence[Cell]) -> list[Cell]:
    """The cells of a column with their measures, and why some are not compared."""
    decision = decide({cell.row.label: cell.runs for cell in cells})
    rounds = [run.rounds for cell in cells for run in cell.runs]
    measured_cells = []
    for cell in cells:
        measure = table.measure_of(cell.row, cell.column)
        not_compared = ""
        # a paper's numbers have the paper's measure
        if rounds and measure is not None and not table.cells and cell.row.measure is None:
            measure, not_compared = _following(measure, decision, cell.row.label)
        if measure == RESULT:  # no run has finished
            measure = None
        if measure is not None:
            measure = _of_short_runs(measure, rounds)
        unit = UNITS["none"] if measure is None else unit_of(measure)
        name = table.unit_of(cell.row, cell.column)
        if name is not None:
            unit = UNITS[name]
        measured_cells.append(replace(cell, measure=measure, unit=unit, not_compared=not_compared))
    return measured_cells


def _following(measure: str, decision: Decision, row: str) -> tuple[str, str]:
    """The measure by which a row of an own table is compared, and why it is not.

    A measure of the test accuracy follows methods that declare another accuracy as their result.
    """
    not_compared = decision.not_compared.get(row, "")
    if measure == RESULT:
        return decision.measure, not_compared
    if parse(measure).column != JUDGED:
        return measure, ""
    result = parse(decision.measure).column
    if result not in GLOBAL_TESTS:
        measure = full_form(measure).replace(JUDGED, result)
    return measure, not_compared


def _of_short_runs(measure: str, rounds: Sequence[int]) -> str:
    """The measure, or the last test instead of a mean over more than a third of a run."""
    asked = parse(measure)
    if asked.statistic == "mean" and asked.window and are_short(rounds, asked.window):
        return f"last:{asked.column}"
    return measure


def _differences(
    table: Table, row: Axis, column: Axis, work: Work, runs: Sequence[Run]
) -> dict[str, str]:
    """In which keys our runs of a cell differ from the paper's setting."""
    texts: dict[str, str] = {}
    for key, paper_value in table.settings(row, column).items():
        own_value = runs[0].get(key) if runs else None
        if own_value is None:
            own_value = work.get(key)
        if own_value != paper_value:
            why = table.departures.get(key, "").rstrip(".")
            texts[key] = f"{key} {own_value} (paper {paper_value}{': ' if why else ''}{why})"
    return texts
