"""The rows and columns of a study: those of a paper's table, or its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcfed.report.papers import load
from gcfed.study.overrides import merge

_GRID_KEYS = {"rows", "columns", "overrides"}
_LINE_KEYS = {"label", "overrides", "note"}


@dataclass(frozen=True)
class Grid:
    """What can be run, by row and column label, in the order of the table.

    Attributes:
        cells: the overrides of a cell's run.
        left_out: why a cell cannot be run, or is none.
        seeds: how many the paper averaged; None where it does not say.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], tuple[str, ...]]
    left_out: Mapping[tuple[str, str], str]
    seeds: int | None = None


def read_grid(table: str | Mapping[str, Any]) -> Grid:
    """A grid from the name of a file of ``configs/paper``, or from a study's own rows and columns.

    Raises:
        ValueError: a key of the study's own table is wrong; names it.
        FileNotFoundError: there is no such table; lists those that exist.
    """
    return _own(table) if isinstance(table, Mapping) else _of_paper(table)


def _own(table: Mapping[str, Any]) -> Grid:
    if odd := sorted(map(str, table.keys() - _GRID_KEYS)):
        raise ValueError(f"study.table.{odd[0]} is unknown: a table of its own has {', '.join(sorted(_GRID_KEYS))}.")
    rows, columns = _lines(table, "rows"), _lines(table, "columns")
    common = [str(o) for o in table.get("overrides") or ()]
    cells, left_out = {}, {}
    for row, of_row in rows.items():
        for column, of_column in columns.items():
            notes = [line.get("note") or "" for line in (of_row, of_column) if line.get("overrides") is None]
            if notes:
                left_out[row, column] = "; ".join(filter(None, notes)) or "it cannot be run"
            else:
                cells[row, column] = merge(of_column["overrides"], common, of_row["overrides"])
    return Grid(tuple(rows), tuple(columns), cells, left_out)


def _lines(table: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    lines: Sequence[Any] = table.get(key) or ()
    found: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        if not isinstance(line, Mapping) or "label" not in line or line.keys() - _LINE_KEYS:
            raise ValueError(f"study.table.{key}: each needs label and overrides (and may have a note), not {line}.")
        label = str(line["label"])
        if label in found:
            raise ValueError(f"study.table.{key}: {label!r} is there twice.")
        found[label] = line
    if not found:
        raise ValueError(f"study.table.{key} is empty: name a table of configs/paper, or write rows and columns.")
    return found


def _of_paper(name: str) -> Grid:
    table = load(name)
    cells, left_out = {}, {}
    for row in table.rows:
        for column in table.columns:
            place = row.label, column.label
            cell, overrides = table.cells[place], table.command_overrides(row, column)
            only = row.by_column.get(column.label)
            if overrides is None:
                left_out[place] = (only and only.note) or row.note or column.note or "it cannot be run here"
            elif cell.mean is None and (not cell.note or cell.note.startswith("N/A")):  # "diverged" is a result
                left_out[place] = f"the paper has none{f': {cell.note}' if cell.note else ''}"
            else:
                cells[place] = merge(overrides)
    rows, columns = (tuple(axis.label for axis in axes) for axes in (table.rows, table.columns))
    return Grid(rows, columns, cells, left_out, table.seeds)
