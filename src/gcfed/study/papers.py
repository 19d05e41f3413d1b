"""The papers' own numbers: each ``configs/paper/<name>.yaml`` is one table, with the overrides that make its cells.

A table has rows and columns (:class:`Axis`), and a :class:`Cell` where they meet. ``overrides`` say which command makes
our run, ``setting`` under which values the paper made its own, as far as it says. A row's word wins over its column's,
a column's over the table's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

import yaml

from gcfed.runs.reading import Loader
from gcfed.utils.checked import checked
from gcfed.utils.resolvers import CONFIGS

FOLDER = CONFIGS / "paper"


@dataclass(frozen=True)
class Cell:
    """A printed number in the table's unit, and its deviation; ``mean`` is None where there is a word or nothing."""

    mean: float | None = None
    std: float | None = None
    note: str = ""  # failed, diverged, N/A; + where a target was not reached in ``mean`` rounds

    @property
    def is_result(self) -> bool:
        """Whether the paper's run had a result, which "diverged" is, too."""
        return self.mean is not None or self.note[:3] not in ("", "N/A")


@checked
@dataclass(frozen=True, eq=False)
class Axis:
    """A row or a column. ``overrides`` None: we cannot run it, and ``note`` says why."""

    label: str
    overrides: list[str] | None = field(default_factory=list)
    setting: dict[str, Any] = field(default_factory=dict)
    measure: str | None = None  # None here and in the next two: the table's
    unit: str | None = None
    higher_is_better: bool | None = None
    note: str = ""
    by_column: Mapping[str, Axis] = field(default_factory=dict)  # of a row: what it adds in the column of that label


@checked
@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One table of a paper. The methods take one of its ``rows`` and one of its ``columns``."""

    name: str  # of the file
    columns: Sequence[Axis]
    rows: Sequence[Axis]
    cells: Mapping[tuple[str, str], Cell]  # by the labels of row and column
    paper: str = ""
    table: str = ""  # its number, or the place of the text that has the numbers
    title: str = ""
    source: str = ""
    unit: str = "none"  # percent (our 0…1 times 100), points (of percent), 1e-3 (ours times 1000), rounds, seconds
    higher_is_better: bool | None = None  # None: neither
    methods_in: str = "rows"  # or columns: numbers are compared along the other one
    seeds: int | None = None  # that the paper averaged; None: it does not say
    measure: str | None = None  # of gcfed.runs.measures
    setting: dict[str, Any] = field(default_factory=dict)
    unstated: str = ""  # what the paper does not say of its setting
    departures: dict[str, str] = field(default_factory=dict)  # key of a setting → why our runs do not keep it
    overrides: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def place(self) -> str:
        """Where the paper has it: ``Table 5``, ``Section 4.2.4``."""
        return f"Table {self.table}" if self.table.isalnum() else self.table

    def settings(self, row: Axis, column: Axis) -> dict[str, Any]:
        """Dotted keys and the values that the paper used in this cell."""
        return self.setting | column.setting | row.setting | _extra(row, column).setting

    def command_overrides(self, row: Axis, column: Axis) -> tuple[str, ...] | None:
        """What follows ``python src/train.py`` for the cell's run, but for the seed; None where we cannot run it."""
        parts = (column.overrides, self.overrides, row.overrides, _extra(row, column).overrides)
        return None if None in parts else tuple(override for part in parts for override in part or ())

    def gap(self, row: Axis, column: Axis) -> str:
        """Why a study has no run of this cell; "" where it has one."""
        if self.command_overrides(row, column) is None:
            notes = (_extra(row, column).note, row.note, column.note)
            return next(filter(None, notes), "it cannot be run here")
        return "the paper has no number" * bool(self.paper and not self.cells[row.label, column.label].is_result)

    def of(self, name: str, row: Axis, column: Axis) -> Any:
        """``measure``, ``unit`` or ``higher_is_better`` of a cell; None where nobody says."""
        words = (getattr(part, name) for part in (row, column, self))
        return next((word for word in words if word is not None), None)


def names() -> list[str]:
    """The tables of ``configs/paper``."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(path_or_name: str | Path) -> PaperTable:
    """Reads a table of ``configs/paper`` by its name, or any file by its path; a ValueError names the file.

    ``shared_setting`` names a file of ``configs/paper/setting``: any keys, before which the table's own go, and rows
    and columns by label.
    """
    path = Path(path_or_name) if Path(path_or_name).suffix else FOLDER / f"{path_or_name}.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}; the tables are {', '.join(names())}.")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader)
        if shared := raw.pop("shared_setting", None):  # a file of configs/paper/setting
            common = yaml.load((FOLDER / "setting" / f"{shared}.yaml").read_text(encoding="utf-8"), Loader)
            raw["setting"] = common["setting"] | raw.get("setting", {})
            for kind in ("rows", "columns"):  # a label alone is that of a shared one
                known = common.pop(kind, {})
                raw[kind] = [{"label": one} | known[one] if isinstance(one, str) else one for one in raw[kind]]
            raw = common | raw
        return table_of(raw | {"name": path.stem})
    except (OSError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is no table of a paper: {error}") from None


def table_of(raw: Mapping[str, Any]) -> PaperTable:
    """The table that a YAML file holds, or a study of its own, which has no ``cells``.

    It raises ValueError, TypeError or AttributeError, with the place, of an unknown or a missing key, a label twice,
    not one entry for each row and column, or an entry that is no cell.
    """
    rows, columns = ([_axis(**item) for item in raw.get(kind) or ()] for kind in ("rows", "columns"))
    labels, across = [row.label for row in rows], [column.label for column in columns]
    entries = raw.get("cells", dict.fromkeys(labels, [None] * len(across)))
    if not (labels and across) or {*entries} != {*labels} or any(len({*axis}) < len(axis) for axis in (labels, across)):
        raise ValueError(f"each label must be there once: rows {labels}, columns {across}, cells of {[*entries]}")
    cells = {}
    for row in rows:
        if not isinstance(entries[row.label], list) or len(entries[row.label]) != len(across):
            raise ValueError(f"row {row.label}: give one entry for each of the {len(across)} columns")
        if unknown := row.by_column.keys() - {*across}:
            raise ValueError(f"row {row.label}: by_column names no column: {', '.join(sorted(unknown))}")
        for label, entry in zip(across, entries[row.label], strict=True):
            cells[row.label, label] = _cell(entry, f"row {row.label}, column {label}")
    return PaperTable(**{**raw, "rows": rows, "columns": columns, "cells": cells})


def slug(label: str) -> str:
    """A label as a part of a folder's name: ``CIFAR-10, 5/100, α 0.05`` → ``cifar-10-5-100-alpha-0.05``."""
    text = re.sub("[α-ω]", lambda m: f" {unicodedata.name(m[0]).split()[-1]} ", label).lower()
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text.replace("lamda", "lambda"))  # a dot is for numbers
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")


def choose(key: str, words: Sequence[Any] | None, labels: Sequence[str]) -> set[str]:
    """The labels that are asked for by themselves or by short name, where ``*`` stands for anything; None: all."""
    names: dict[str, str] = {}
    for label in labels:
        if (other := names.setdefault(slug(label), label)) != label:
            raise ValueError(f"study.table: {other} and {label} have the same short name, {slug(label)}: rename one.")
    chosen = set()
    for word in map(str, words or ["*"]):
        found = matching(names, word.lower() if "*" in word else slug(word))
        if not found:
            known = "; ".join(f"{label} ({name})" for name, label in names.items())
            raise ValueError(f"study.{key}: there is no {word!r}. There are, with their short names: {known}.")
        chosen |= {names[name] for name in found}
    return chosen


def _extra(row: Axis, column: Axis) -> Axis:
    return row.by_column.get(column.label, Axis(column.label))


def _axis(label: str, by_column: Mapping[str, Any] | None = None, **keys: Any) -> Axis:
    return Axis(label, by_column={name: _axis(name, **extra) for name, extra in (by_column or {}).items()}, **keys)


def _cell(raw: Any, where: str) -> Cell:
    match raw:
        case str() if raw.endswith("+") and raw[:-1].isdecimal():
            return Cell(float(raw[:-1]), note="+")
        case str() | None:
            return Cell(note=raw or "")
        case [int() | float() as mean, int() | float() as std]:
            return Cell(float(mean), float(std))
        case {"mean": int() | float() as mean, "note": str() as note}:
            return Cell(float(mean), note=note)
        case int() | float():
            return Cell(float(raw))
    raise ValueError(f"{where}: {raw} is no number, [mean, std], 1000+, word, {{mean, note}} or null")
