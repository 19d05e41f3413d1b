"""Tables as YAML: the papers' printed numbers, and the overrides that train each cell.

``configs/<name>.yaml`` has rows and columns (:class:`Axis`). A paper's table also has ``cells``:
the printed numbers. A row's value wins over its column's, and a column's over the table's.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from fnmatch import filter as matching
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from gcfed.folders.identity import counted, digest, key_of
from gcfed.folders.reading import read_yaml

CONFIGS = Path(__file__).parent / "configs"
RULES = ConfigDict(extra="forbid", allow_inf_nan=False)


class Cell(NamedTuple):
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
class Part:
    """A part of a table. null means all rows, all columns, and as many seeds as
    the paper averaged.
    """

    rows: list[str | int | float] | None = None  # labels or short names; * stands for anything
    columns: list[str | int | float] | None = None
    seeds: list[int] | None = None
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, values in (("rows", self.rows), ("columns", self.columns), ("seeds", self.seeds)):
            if values is not None and len({*map(str, values)}) != max(1, len(values)):
                raise ValueError(
                    f"{name}={values} must be a list without repetitions, such as [1,2,3], or null"
                )


@dataclass(config=RULES, frozen=True)
class Search:
    """An equal search for each cell before its runs (``search.py``)."""

    metric: str  # compares the trials
    n_trials: int
    params: dict[str, str]  # key → interval(…), range(…) or choice(…), in Hydra's words
    # override → further params of cells with it
    knobs: dict[str, dict[str, str]] = field(default_factory=dict)
    # the first trials, such as a grid; then Optuna draws
    points: list[dict[str, Any]] = field(default_factory=list)
    # a trial has a run per seed; its value is their mean
    seeds: list[int] = field(default_factory=list)
    # of the trials: a validation split, a seed that no job has
    overrides: list[str] = field(default_factory=list)
    seed: int = 1  # of the sampler


@dataclass(config=RULES, frozen=True, kw_only=True)
class Table:
    """A table of a paper, or rows and columns of our own."""

    name: str  # of the file
    columns: list[Axis]
    rows: list[Axis]
    # row's label → an entry for each column
    cells: dict[str, list[Any]] = field(default_factory=dict)
    paper: str = ""
    table: str = ""  # its number, or where in the text the numbers are
    title: str = ""
    source: str = ""
    unit: str = "percent"  # of compare.UNITS
    seeds: int | None = None  # how many the paper averaged; None: it does not say
    measure: str | None = "mean:test/acc[10]"  # as compare.measured reads it
    setting: dict[str, Any] = field(default_factory=dict)
    unstated: str = ""  # what the paper does not say about its setting
    # key of a setting → why our runs have another value
    departures: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    note: str = ""
    # full is the whole table, unless it is here
    scales: dict[str, Part] = field(default_factory=dict)
    search: Search | None = None

    def __post_init__(self) -> None:
        rows, columns = ([axis.label for axis in axes] for axes in (self.rows, self.columns))
        if not (rows and columns) or any(
            len({*labels}) < len(labels) for labels in (rows, columns)
        ):
            raise ValueError(f"each label must occur once: rows {rows}, columns {columns}")
        if self.cells and {*self.cells} != {*rows}:
            raise ValueError(f"cells must have each row once: {[*self.cells]} instead of {rows}")
        for row in self.rows:
            if unknown := row.by_column.keys() - {*columns}:
                raise ValueError(
                    f"row {row.label}: by_column names no column: {', '.join(sorted(unknown))}"
                )
            if len(self.cells.get(row.label, columns)) != len(columns):
                raise ValueError(
                    f"row {row.label}: give one entry for each of the {len(columns)} columns"
                )
            for column in self.columns:
                self.cell(row, column)

    @property
    def chosen(self) -> set[str]:
        """The keys that differ between the runs of a cell: the seed, and what its search chose."""
        keys = {"seed"}
        if self.search is not None:
            for params in (self.search.params, *self.search.knobs.values()):
                keys |= params.keys()
        return keys

    def cell(self, row: Axis, column: Axis) -> Cell:
        """What the paper prints there. ValueError if the entry has none of the forms."""
        match entry := self.cells[row.label][self.columns.index(column)] if self.cells else None:
            case str() if entry.endswith("+") and entry[:-1].isdecimal():
                return Cell(float(entry[:-1]), note="+")
            case str() | None:
                return Cell(note=entry or "")
            case [int() | float() as mean, int() | float() as std]:
                return Cell(float(mean), float(std))
            case {"mean": int() | float() as mean, "note": str() as note}:
                return Cell(float(mean), note=note)
            case int() | float():
                return Cell(float(entry))
        where = f"row {row.label}, column {column.label}"
        raise ValueError(
            f"{where}: {entry} is no number, [mean, std], 1000+, word, {{mean, note}} or null"
        )

    def settings(self, row: Axis, column: Axis) -> dict[str, Any]:
        """Dotted key → the value that the paper used in this cell."""
        return self.setting | column.setting | row.setting | row.at(column).setting

    def overrides_of(self, row: Axis, column: Axis) -> list[str] | None:
        """The overrides of the cell's run, except the seed; None if we cannot run it."""
        parts = (column.overrides, self.overrides, row.overrides, row.at(column).overrides)
        return None if None in parts else [override for part in parts for override in part or ()]

    def gap(self, row: Axis, column: Axis) -> str:
        """Why this cell has no run; "" if it has one. "diverged" is a result, too."""
        if self.overrides_of(row, column) is None:
            return row.at(column).note or row.note or column.note or "it cannot be run here"
        printed = self.cell(row, column)
        empty = printed.mean is None and printed.note[:3] in ("", "N/A")
        return "the paper has no number" if self.cells and empty else ""

    def of(self, name: str, row: Axis, column: Axis) -> Any:
        """The ``measure`` or the ``unit`` of a cell."""
        return next(
            (value for one in (row, column, self) if (value := getattr(one, name)) is not None),
            None,
        )


def load(path_or_name: str | Path, changes: Mapping[str, Any] | None = None) -> Table:
    """A table of ``configs`` by its name, or any file by its path.

    ``changes`` has new values of ``search.<key>``.

    Raises ValueError, with the file and the place, if it is not a table.
    """
    path = Path(path_or_name) if Path(path_or_name).suffix else CONFIGS / f"{path_or_name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        raise FileNotFoundError(f"There is no {path}; the tables are {known}.")
    try:
        raw = {"name": path.stem} | read_yaml(path)
        if shared := raw.pop("shared_setting", None):  # a file of configs/setting
            common = read_yaml(CONFIGS / "setting" / f"{shared}.yaml")
            raw["setting"] = common["setting"] | raw.get("setting", {})
            for kind in ("rows", "columns"):  # a label alone names a shared row or column
                known = common.pop(kind, {})
                raw[kind] = [
                    {"label": one} | known[one] if isinstance(one, str) else one
                    for one in raw[kind]
                ]
            raw = common | raw
        for key, value in (changes or {}).items():
            group, _, last = key.rpartition(".")
            (raw[group] if group else raw)[last] = value
        return Table(**raw)
    except ValidationError as error:
        said = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise ValueError(f"{path} is no table: {'; '.join(said)}") from None
    except (OSError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no table: {type(error).__name__}: {error}") from None


class Job(NamedTuple):
    """One run: its name for people, what composes it, and the name of its folder."""

    title: str
    overrides: list[str]
    folder: str
    cell: str  # the part of the folder's name that its seeds share
    seed: int


def plan(
    table: Table, scale: str, part: Part, arguments: Sequence[str] = ()
) -> tuple[dict[str, Job], dict[tuple[str, str], list[str]], Counter[str]]:
    """Jobs by folder, seed by seed; the folders of each cell, by its labels; how many cells have no
    run, by reason.

    ``part`` wins over the scale's; ``arguments`` go to every job. ValueError if the table has no
    such part.
    """
    scales = {"full": Part()} | table.scales
    if scale not in scales:
        raise ValueError(f"scale={scale} must be {' or '.join(scales)}.")
    for override in OverridesParser.create().parse_overrides([*arguments]):
        why = {"seed": "say seeds=[1,2,3]", "ckpt_path": "begun runs go on anyway"}.get(
            override.key_or_group
        )
        if why or override.is_sweep_override():
            raise ValueError(
                f"{override.input_line}:"
                f" {why or 'a table sweeps over its rows, columns and seeds only'}."
            )
    usual = scales[scale]
    rows = choose("rows", part.rows or usual.rows, [row.label for row in table.rows])
    columns = choose(
        "columns", part.columns or usual.columns, [column.label for column in table.columns]
    )
    text = re.sub(
        r"[^\w.,=~\[\]-]+",
        "-",
        "".join(f",{override.lstrip('+')}" for override in counted(arguments)),
    )
    # file systems end a name at 255 bytes
    suffix = text if len(text) <= 120 else f"{text[:107]}-{digest({'': text})}"
    cells = {cell: table.gap(*cell) for cell in product(table.rows, table.columns)}
    # cells with equal overrides are one run, named by the first of them
    first: dict[frozenset[str], str] = {}
    for row, column in (cell for cell, gap in cells.items() if not gap):
        first.setdefault(
            _effect(table.overrides_of(row, column)), f"{slug(row.label)}_{slug(column.label)}"
        )
    chosen = {
        cell: gap
        for cell, gap in cells.items()
        if cell[0].label in rows and cell[1].label in columns
    }
    jobs, places = dict[str, Job](), dict[tuple[str, str], list[str]]()
    for seed in part.seeds or usual.seeds or range(1, (table.seeds or 1) + 1):
        for row, column in (cell for cell, gap in chosen.items() if not gap):
            own = table.overrides_of(row, column) or []
            cell, title = first[_effect(own)], f"{row.label}, {column.label}, seed {seed}"
            overrides = [*own, *usual.overrides, f"seed={seed}", *arguments]
            job = Job(title, overrides, f"{cell}_s{seed}{suffix}", f"{cell}{suffix}", seed)
            jobs.setdefault(job.folder, job)
            places.setdefault((row.label, column.label), []).append(job.folder)
    return jobs, places, Counter(filter(None, chosen.values()))


def _effect(overrides: Iterable[str] | None) -> frozenset[str]:
    """The last override of each key."""
    return frozenset({key_of(override): override for override in overrides or ()}.values())


def slug(label: str) -> str:
    """A label as a part of a folder's name: ``CIFAR-10, 5/100, α 0.05`` →
    ``cifar-10-5-100-alpha-0.05``.
    """
    text = re.sub("[α-ω]", lambda m: f" {unicodedata.name(m[0]).split()[-1]} ", label).lower()
    # only dots within numbers stay
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text.replace("lamda", "lambda"))
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")


def choose(key: str, words: Sequence[Any] | None, labels: Sequence[str]) -> set[str]:
    """The labels that the words name, by label or short name; ``*`` stands for anything, and None
    for all.
    """
    known: dict[str, str] = {}
    for label in labels:
        if (other := known.setdefault(slug(label), label)) != label:
            raise ValueError(
                f"{key}: {other} and {label} have the same short name, {slug(label)}: rename one."
            )
    chosen = set()
    for word in map(str, words or ["*"]):
        found = matching(known, word.lower() if "*" in word else slug(word))
        if not found:
            listed = "; ".join(f"{label} ({name})" for name, label in known.items())
            raise ValueError(
                f"{key}: there is no {word!r}. There are, with their short names: {listed}."
            )
        chosen |= {known[name] for name in found}
    return chosen
