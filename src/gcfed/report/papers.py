"""The papers' own numbers: each ``configs/paper/<name>.yaml`` is one table, with its setting.

A table has rows and columns (``Axis``), and a ``Cell`` where they meet. ``match`` says which runs are a cell's: those
whose config has these values. ``setting`` says under which values the paper made it, ``departures`` which of them our
runs do not keep on purpose, ``overrides`` which command makes our run. A row's word wins over its column's, a column's
over the table's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from gcfed.report.runs import Loader
from gcfed.utils.resolvers import ROOT

FOLDER = ROOT / "configs" / "paper"


@dataclass(frozen=True)
class Cell:
    """A printed number in the table's unit, and its deviation; ``mean`` is None where there is a word or nothing."""

    mean: float | None = None
    std: float | None = None
    note: str = ""  # failed, diverged, N/A; + where a target was not reached in ``mean`` rounds


@dataclass(frozen=True)
class Axis:
    """A row or a column. ``overrides`` None: we cannot run it, and ``note`` says why."""

    label: str
    overrides: tuple[str, ...] | None = ()
    match: dict[str, Any] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)
    measure: str | None = None  # None here and in the next two: the table's
    unit: str | None = None
    higher_is_better: bool | None = None
    note: str = ""
    by_column: dict[str, Axis] = field(default_factory=dict)  # of a row: what it adds in the column of that label


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One table of a paper. The methods take one of its ``rows`` and one of its ``columns``."""

    name: str  # of the file
    paper: str
    table: str
    title: str
    source: str
    unit: str  # percent (our 0…1 times 100), 1e-3 (ours times 1000), rounds, seconds, none
    columns: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    cells: dict[tuple[str, str], Cell]  # by the labels of row and column
    higher_is_better: bool | None = None  # None: neither
    seeds: int | None = None  # that the paper averaged; None: it does not say
    deviation: str | None = None  # std, what the second numbers of cells must be
    measure: str | None = None  # of gcfed.report.measures
    common_match: dict[str, Any] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)
    departures: dict[str, str] = field(default_factory=dict)  # key of a setting → why our runs do not keep it
    overrides: tuple[str, ...] = ()
    note: str = ""

    def match(self, row: Axis, column: Axis) -> dict[str, Any]:
        """Dotted keys and values that the configs of the cell's runs have."""
        return self.common_match | column.match | row.match | _extra(row, column).match

    def settings(self, row: Axis, column: Axis) -> dict[str, Any]:
        """Dotted keys and the values that the paper used in this cell."""
        return self.setting | column.setting | row.setting | _extra(row, column).setting

    def command_overrides(self, row: Axis, column: Axis) -> tuple[str, ...] | None:
        """What follows ``python src/train.py`` for the cell's run, but for the seed; None where we cannot run it."""
        parts = (column.overrides, self.overrides, row.overrides, _extra(row, column).overrides)
        return None if None in parts else tuple(override for part in parts for override in part or ())

    def measure_of(self, row: Axis, column: Axis) -> str | None:
        return row.measure or column.measure or self.measure

    def unit_of(self, row: Axis, column: Axis) -> str:
        return row.unit or column.unit or self.unit

    def higher_is_better_of(self, row: Axis, column: Axis) -> bool | None:
        wishes = (row.higher_is_better, column.higher_is_better, self.higher_is_better)
        return next((wish for wish in wishes if wish is not None), None)


def names() -> list[str]:
    """The tables of ``configs/paper``."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(path_or_name: str | Path) -> PaperTable:
    """Reads a table of ``configs/paper`` by its name, or any file by its path.

    Raises:
        FileNotFoundError: there is no such table.
        ValueError: an unknown or a missing key, a label twice, not one entry for each row and column, or an entry that
            is no cell; names the file and the row.
    """
    path = Path(path_or_name)
    path = path if path.suffix else FOLDER / f"{path}.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}; the tables are {_listed(names())}.")
    raw = _checked(yaml.load(path.read_text(encoding="utf-8"), Loader), PaperTable, str(path), own="name")
    if not isinstance(raw["columns"], list) or not isinstance(raw["rows"], list) or not isinstance(raw["cells"], dict):
        raise ValueError(f"{path}: columns and rows must be lists, cells a mapping of the rows' labels to lists.")
    columns = tuple(_axis(item, f"{path}, a column") for item in raw["columns"])
    rows = tuple(_axis(item, f"{path}, a row") for item in raw["rows"])
    labels = [column.label for column in columns]
    for axes in (labels, [row.label for row in rows]):
        if len(set(axes)) < len(axes):
            raise ValueError(f"{path}: the label {max(axes, key=axes.count)} is there twice.")
    if unlike := raw["cells"].keys() ^ {row.label for row in rows}:
        raise ValueError(f"{path}: rows and cells differ in {_listed(unlike)}.")
    cells = {}
    for row in rows:
        entries = raw["cells"][row.label]
        if not isinstance(entries, list) or len(entries) != len(columns):
            raise ValueError(f"{path}, row {row.label}: give one entry for each of the {len(columns)} columns.")
        if unknown := row.by_column.keys() - set(labels):
            raise ValueError(f"{path}, row {row.label}: by_column names no column: {_listed(unknown)}.")
        for label, entry in zip(labels, entries, strict=True):
            cells[row.label, label] = _cell(entry, f"{path}, row {row.label}, column {label}")
    if raw.get("deviation") != "std" and any(cell.std is not None for cell in cells.values()):
        raise ValueError(f"{path}: cells are [mean, std], so say deviation: std; differences are given in units of it.")
    made = {"name": path.stem, "columns": columns, "rows": rows, "cells": cells}
    return PaperTable(**raw | made | {"overrides": tuple(raw.get("overrides") or ())})


def _extra(row: Axis, column: Axis) -> Axis:
    return row.by_column.get(column.label, Axis(column.label))


def _axis(raw: Any, where: str) -> Axis:
    raw = _checked(raw, Axis, where)
    overrides = raw.get("overrides", ())
    nested = {label: _axis(extra | {"label": label}, where) for label, extra in raw.get("by_column", {}).items()}
    return Axis(**raw | {"by_column": nested, "overrides": None if overrides is None else tuple(overrides)})


def _cell(raw: Any, where: str) -> Cell:
    match raw:
        case str() if raw.endswith("+") and raw[:-1].isdecimal():
            return Cell(float(raw[:-1]), note="+")
        case str():
            return Cell(note=raw)
        case [mean, std] if _number(mean) and _number(std):
            return Cell(float(mean), float(std))
        case dict() if raw.keys() <= {"mean", "note"} and _number(raw.get("mean", 0)):
            return Cell(float(raw["mean"]) if "mean" in raw else None, note=str(raw.get("note", "")))
        case None:
            return Cell()
    if _number(raw):
        return Cell(float(raw))
    raise ValueError(f"{where}: {raw} is no number, [mean, std], 1000+, word, {{mean, note}} or null.")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(raw: Any, kind: type[PaperTable | Axis], where: str, own: str = "") -> dict[str, Any]:
    """``raw``, if it has all keys that the dataclass needs and no other; ``own`` is one that the file does not give."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: {raw} is no mapping of keys to values.")
    where = f"{where} {raw['label']}" if "label" in raw else where
    known = {f.name: f for f in fields(kind) if f.name != own}
    if unknown := raw.keys() - known.keys():
        raise ValueError(f"{where}: unknown keys: {_listed(unknown)}. Known are {', '.join(known)}.")
    needed = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if missing := needed - raw.keys():
        raise ValueError(f"{where}: missing keys: {_listed(missing)}.")
    if not isinstance(raw.get("label", ""), str):
        raise ValueError(f"{where}: a label must be a text, so put it in quotes.")
    return raw


def _listed(words: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, words)))
