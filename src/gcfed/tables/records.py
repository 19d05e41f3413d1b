"""What a table's YAML contains: rows, columns, the overrides of each cell, a paper's numbers.

A row's value wins over its column's, and a column's over the table's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from gcfed.folders.columns import is_accuracy
from gcfed.folders.measures import parse
from gcfed.utils.checked import Count, Whole

#: The measure of a table that names none: the last tests of the column that its methods declare as
#: their result, or of the global model's test.
RESULT = "result"
PAPER_MEASURE = "mean:test/acc[10]"  # of a paper's table that names none
RULES = ConfigDict(extra="forbid", allow_inf_nan=False)


class Unit(NamedTuple):
    """How numbers are shown: the name in a column's heading, the factor, and the format."""

    name: str
    factor: float
    digits: str


UNITS = {
    "percent": Unit("%", 100.0, ".2f"),
    "points": Unit("%", 100.0, ".3g"),
    "rounds": Unit("", 1.0, ".0f"),
    "seconds": Unit("s", 1.0, ".3g"),
    "1e-3": Unit("10⁻³", 1e3, ".3f"),
    "none": Unit("", 1.0, ".4g"),
}


def unit_of(measure: str) -> Unit:
    """The unit of a measure whose table names none."""
    asked = parse(measure)
    if asked.is_to_target:
        return UNITS[asked.statistic]
    return UNITS["percent" if is_accuracy(asked.column) else "none"]


class Printed(NamedTuple):
    """A printed number in the table's unit and its deviation; ``mean`` is None where the paper has
    none.
    """

    mean: float | None = None
    std: float | None = None
    note: str = ""  # failed, diverged, N/A; "+" where a target was not reached in ``mean`` rounds


@dataclass(config=RULES, frozen=True, eq=False)
class Axis:
    """A row or a column. If ``overrides`` is None, we cannot run it, and ``note`` says why."""

    label: str = ""
    overrides: list[str] | None = field(default_factory=list)
    setting: dict[str, Any] = field(default_factory=dict)  # dotted key → the paper's value
    measure: str | None = None  # None: that of the table, also for the unit
    unit: str | None = None
    note: str = ""
    # of a row: what it adds in a column, by label
    by_column: dict[str, Axis] = field(default_factory=dict)

    def at(self, column: Axis) -> Axis:
        return self.by_column.get(column.label, Axis())


@dataclass(config=RULES, frozen=True)
class Selection:
    """Some of a table's runs. null means all rows, all columns, and the table's own seeds."""

    rows: list[str | int | float] | None = None  # labels or short names; * stands for anything
    columns: list[str | int | float] | None = None
    seeds: list[Whole] | None = None
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "seeds"):
            _check_list(name, getattr(self, name))


def _check_list(name: str, values: Sequence[Any] | None) -> None:
    if values is None:
        return
    different = {str(value) for value in values}
    if not values or len(different) < len(values):
        raise ValueError(
            f"{name}={values} must be a list without repetitions, such as [1,2,3], or null"
        )


@dataclass(config=RULES, frozen=True)
class Search:
    """An equal search for each cell before its runs (``search.py``)."""

    metric: str  # compares the trials
    n_trials: Count
    params: dict[str, str]  # key → interval(…), range(…) or choice(…), in Hydra's words
    # override → further params of cells with it
    knobs: dict[str, dict[str, str]] = field(default_factory=dict)
    # the first trials, such as a grid; then Optuna draws
    points: list[dict[str, Any]] = field(default_factory=list)
    # a trial has a run per seed; its value is their mean
    seeds: list[Whole] = field(default_factory=list)
    # of the trials: a validation split, a seed that no job has
    overrides: list[str] = field(default_factory=list)
    # None: by the name of the metric's column
    direction: Literal["maximize", "minimize"] | None = None


@dataclass(config=RULES, frozen=True, kw_only=True)
class Table:
    """A table of a paper, or rows and columns of your own."""

    name: str  # of the file
    rows: list[Axis]
    columns: list[Axis] = field(default_factory=lambda: [Axis(label="result")])
    # row's label → an entry for each column
    cells: dict[str, list[Any]] = field(default_factory=dict)
    paper: str = ""
    table: str = ""  # its number, or where in the text the numbers are
    title: str = ""
    source: str = ""
    unit: str | None = None  # of units.UNITS; None: that of the measure
    # the seeds, or how many the paper averaged; None: it does not say
    seeds: int | list[Whole] | None = None
    # of gcfed.folders.measures; RESULT: by which a report compares the methods; None: none
    measure: str | None = RESULT
    setting: dict[str, Any] = field(default_factory=dict)
    unstated: str = ""  # what the paper does not say about its setting
    # key of a setting → why our runs have another value
    departures: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    note: str = ""
    # full is the whole table, unless it is here
    scales: dict[str, Selection] = field(default_factory=dict)
    search: Search | None = None

    def __post_init__(self) -> None:
        rows = [row.label for row in self.rows]
        columns = [column.label for column in self.columns]
        are_different = len({*rows}) == len(rows) and len({*columns}) == len(columns)
        if not (rows and columns and are_different):
            raise ValueError(f"each label must occur once: rows {rows}, columns {columns}")
        if isinstance(self.seeds, list):
            _check_list("seeds", self.seeds)
        elif self.seeds is not None and self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} must be at least 1, or a list such as [1,2,3]")
        self._check_measures()
        if self.cells and {*self.cells} != {*rows}:
            raise ValueError(f"cells must have each row once: {[*self.cells]} instead of {rows}")
        for row in self.rows:
            self._check_row(row, columns)

    def _check_measures(self) -> None:
        """Raises ValueError for a measure or unit that the comparison could not show."""
        for measure in self.measures:
            parse(measure)
        for unit in (self.unit, *(axis.unit for axis in self._axes())):
            if unit is not None and unit not in UNITS:
                raise ValueError(f"unit={unit} must be {', '.join(UNITS)} or null")

    @property
    def measures(self) -> list[str]:
        """The measures of the table, of its rows and of its columns."""
        named = [self.measure, *(axis.measure for axis in self._axes())]
        return [measure for measure in named if measure is not None and measure != RESULT]

    def _axes(self) -> list[Axis]:
        axes = [*self.rows, *self.columns]
        for row in self.rows:
            axes += row.by_column.values()
        return axes

    def _check_row(self, row: Axis, columns: Sequence[str]) -> None:
        unknown = row.by_column.keys() - {*columns}
        if unknown:
            raise ValueError(
                f"row {row.label}: by_column names no column: {', '.join(sorted(unknown))}"
            )
        if self.cells and len(self.cells[row.label]) != len(columns):
            raise ValueError(
                f"row {row.label}: give one entry for each of the {len(columns)} columns"
            )
        for column in self.columns:
            self.printed(row, column)

    @property
    def own_seeds(self) -> Sequence[int]:
        """The seeds of its runs, unless a scale or the command names others."""
        if isinstance(self.seeds, list):
            return self.seeds
        return range(1, (self.seeds or 1) + 1)

    @property
    def printed_seeds(self) -> int:
        """How many runs a printed mean has; 1 if the paper does not say."""
        return self.seeds if isinstance(self.seeds, int) else 1

    def printed(self, row: Axis, column: Axis) -> Printed:
        """What the paper prints there. ValueError if the entry has none of the forms."""
        entry = None
        if self.cells:
            entry = self.cells[row.label][self.columns.index(column)]
        match entry:
            case str() if entry.endswith("+") and entry[:-1].isdecimal():
                return Printed(float(entry[:-1]), note="+")
            case str() | None:
                return Printed(note=entry or "")
            case [int() | float() as mean, int() | float() as std]:
                return Printed(float(mean), float(std))
            case {"mean": int() | float() as mean, "note": str() as note}:
                return Printed(float(mean), note=note)
            case int() | float():
                return Printed(float(entry))
        where = f"row {row.label}, column {column.label}"
        raise ValueError(
            f"{where}: {entry} is no number, [mean, std], 1000+, word, {{mean, note}} or null"
        )

    def settings(self, row: Axis, column: Axis) -> dict[str, Any]:
        """Dotted key → the value that the paper used in this cell."""
        return self.setting | column.setting | row.setting | row.at(column).setting

    def overrides_of(self, row: Axis, column: Axis) -> list[str] | None:
        """The overrides of the cell's run, except the seed; None if we cannot run it."""
        words: list[str] = []
        in_turn = (self.overrides, column.overrides, row.overrides, row.at(column).overrides)
        for overrides in in_turn:
            if overrides is None:
                return None
            words += overrides
        return words

    def why_no_run(self, row: Axis, column: Axis) -> str:
        """Why this cell has no run; "" if it has one. "diverged" is a result, too."""
        if self.overrides_of(row, column) is None:
            return row.at(column).note or row.note or column.note or "it cannot be run here"
        printed = self.printed(row, column)
        is_empty = printed.mean is None and printed.note[:3] in ("", "N/A")
        return "the paper has no number" if self.cells and is_empty else ""

    def measure_of(self, row: Axis, column: Axis) -> str | None:
        """None: the cell's number is not measured."""
        for one in (row, column):
            if one.measure is not None:
                return one.measure
        return PAPER_MEASURE if self.cells and self.measure == RESULT else self.measure

    def unit_of(self, row: Axis, column: Axis) -> str | None:
        return row.unit or column.unit or self.unit
