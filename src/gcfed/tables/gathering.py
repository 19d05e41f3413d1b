"""Gathers the runs of a table's cells: our numbers, and in what our runs differ from the paper's
setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, NamedTuple

from gcfed.folders.folder import Run, read_run
from gcfed.folders.measures import parse
from gcfed.reporting.judged import judged
from gcfed.reporting.verdict import interval
from gcfed.tables.measures import UNITS, Unit, column_of, measured, of_short_runs, unit_of
from gcfed.tables.plan import Place
from gcfed.tables.records import Axis, Table
from gcfed.tables.running import FINISHED, Work

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
    def place(self) -> Place:
        return self.row.label, self.column.label

    @property
    def heading(self) -> str:
        name = self.unit.name
        return f"{self.column.label} ({name})" if name else self.column.label


def gather(table: Table, works_of: Mapping[Place, Sequence[Work]], whole: Whole) -> list[Cell]:
    """The cells that have runs, column by column, with the measure by which the report would
    compare them.

    Args:
        works_of: the works of each cell.
        whole: gives what the whole table runs in a cell, by dotted key.
    """
    cells: list[Cell] = []
    for column in table.columns:
        cells_of_column = []
        for row in table.rows:
            works = works_of.get((row.label, column.label), ())
            if works:
                runs = [read_run(work.folder) for work in works if work.state == FINISHED]
                differences = _differences(table, row, column, works[0], runs, whole)
                cells_of_column.append(Cell(row, column, works, runs, differences=differences))
        cells += _with_measures(table, cells_of_column)
    return cells


def _with_measures(table: Table, cells: Sequence[Cell]) -> list[Cell]:
    """The cells of a column with their measures, and why some are not compared."""
    decision = judged({cell.row.label: cell.runs for cell in cells})
    result = parse(decision.measure)[1]
    rounds = [run.rounds for cell in cells for run in cell.runs]
    measured_cells = []
    for cell in cells:
        measure = table.measure_of(cell.row, cell.column)
        not_compared = ""
        # a paper's numbers have the paper's measure
        follows = rounds and not table.cells and cell.row.measure is None
        if measure and follows and column_of(measure) == JUDGED:
            not_compared = decision.not_compared.get(cell.row.label, "")
            measure = measure.replace(JUDGED, result)
        if measure:
            measure = of_short_runs(measure, rounds)
        name = table.unit_of(cell.row, cell.column)
        unit = UNITS[name] if name else unit_of(measure or "")
        measured_cells.append(replace(cell, measure=measure, unit=unit, not_compared=not_compared))
    return measured_cells


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
