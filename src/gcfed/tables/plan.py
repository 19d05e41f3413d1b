"""The jobs of a table: which runs it has, what composes each, and the names of their folders."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import filter as matching
from itertools import product
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from gcfed.folders.identity import changing_results, digest, key_of
from gcfed.tables.records import RESULT, Axis, Selection, Table
from gcfed.utils.hints import explained
from gcfed.utils.refusal import Refusal

CellName = tuple[str, str]  # the labels of a row and a column
#: Keys of a run that the command sets itself → what to write instead.
RESERVED_KEYS = {
    "seed": "write seeds=[1,2,3]",
    "ckpt_path": "interrupted runs are continued anyway",
}


class Job(NamedTuple):
    """One run: its name for people, what composes it, and the name of its folder."""

    title: str
    overrides: list[str]
    folder: str
    cell: str  # the part of the folder's name that its seeds share
    seed: int


@dataclass(frozen=True)
class Plan:
    """What a command has to run."""

    jobs: dict[str, Job] = field(default_factory=dict)  # by folder, seed by seed
    folders: dict[CellName, list[str]] = field(default_factory=dict)  # a cell → its folders
    without_run: Counter[str] = field(default_factory=Counter)  # why cells have no run → how many

    @property
    def first_jobs(self) -> list[Job]:
        """The first job of each cell."""
        cells: dict[str, Job] = {}
        for job in self.jobs.values():
            cells.setdefault(job.cell, job)
        return [*cells.values()]


def make_plan(
    table: Table, scale: str, selection: Selection, arguments: Sequence[str] = ()
) -> Plan:
    """The jobs of a selection of a table.

    Args:
        selection: wins over that of the scale.
        arguments: overrides of every job.

    Raises Refusal if the table has no such row, column or scale.
    """
    scales = {"full": Selection()} | table.scales
    if scale not in scales:
        raise Refusal(f"scale={scale} must be {' or '.join(scales)}.")
    _check_arguments(arguments)
    usual = scales[scale]
    rows = choose("rows", selection.rows or usual.rows, table.rows)
    columns = choose("columns", selection.columns or usual.columns, table.columns)
    names = _names_of_cells(table)
    suffix = _suffix(arguments)
    planned = Plan()
    cells = []
    for row, column in product(table.rows, table.columns):
        if row.label not in rows or column.label not in columns:
            continue
        why = table.why_no_run(row, column)
        if why:
            planned.without_run[why] += 1
        else:
            cells.append((row, column))
    for seed in selection.seeds or usual.seeds or table.own_seeds:
        for row, column in cells:
            overrides = table.overrides_of(row, column) or []
            _check_overrides(f"{row.label}, {column.label}", [*overrides, *usual.overrides])
            cell = names[_effect(overrides)]
            job = Job(
                title=f"{row.label}, {column.label}, seed {seed}",
                overrides=[*overrides, *usual.overrides, f"seed={seed}", *arguments],
                folder=f"{cell}_s{seed}{suffix}",
                cell=f"{cell}{suffix}",
                seed=seed,
            )
            planned.jobs.setdefault(job.folder, job)
            planned.folders.setdefault((row.label, column.label), []).append(job.folder)
    return planned


def measures_of_cells(table: Table, planned: Plan) -> dict[str, dict[str, str]]:
    """The measure of each cell, with the key that names it; a cell without one has none."""
    measures: dict[str, dict[str, str]] = {}
    for row, column in product(table.rows, table.columns):
        measure = table.measure_of(row, column)
        for folder in planned.folders.get((row.label, column.label), ()):
            of_cell = measures.setdefault(planned.jobs[folder].cell, {})
            if measure is not None and measure != RESULT:
                of_cell[measure] = f"measure={measure}"
    return measures


def _check_arguments(arguments: Sequence[str]) -> None:
    try:
        overrides = OverridesParser.create().parse_overrides([*arguments])
    except HydraException as error:
        raise Refusal(explained(error)) from None
    for override in overrides:
        why = RESERVED_KEYS.get(override.key_or_group)
        if override.is_sweep_override():
            why = "a table sweeps over its rows, columns and seeds only"
        if why:
            raise Refusal(f"{override.input_line}: {why}.")


def _check_overrides(cell: str, overrides: Iterable[str]) -> None:
    """Raises Refusal for a key of a cell's overrides that the command sets itself."""
    for override in overrides:
        why = RESERVED_KEYS.get(key_of(override))
        if why:
            raise Refusal(f"{cell}: {override} is set by the command: {why}.")


def _suffix(arguments: Sequence[str]) -> str:
    """What the arguments that change results add to the names of folders."""
    words = "".join(f",{override.lstrip('+')}" for override in changing_results(arguments))
    text = re.sub(r"[^\w.,=~\[\]-]+", "-", words)
    # file systems end a name at 255 bytes
    return text if len(text) <= 120 else f"{text[:107]}-{digest({'': text})}"


def _names_of_cells(table: Table) -> dict[frozenset[str], str]:
    """What a cell's overrides do → its name. Cells that do the same have the name of the first."""
    names: dict[frozenset[str], str] = {}
    for row, column in product(table.rows, table.columns):
        if not table.why_no_run(row, column):
            effect = _effect(table.overrides_of(row, column) or ())
            names.setdefault(effect, f"{slug(row.label)}_{slug(column.label)}")
    return names


def _effect(overrides: Iterable[str]) -> frozenset[str]:
    """The last override of each key."""
    return frozenset({key_of(override): override for override in overrides}.values())


def slug(label: str) -> str:
    """A label as a part of a folder's name: ``CIFAR-10, 5/100, α 0.05`` →
    ``cifar-10-5-100-alpha-0.05``.
    """
    text = re.sub("[α-ω]", _name_of_letter, label).lower()
    # only dots within numbers stay
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text.replace("lamda", "lambda"))
    return re.sub(r"[^\w.]+|_+", "-", text).strip("-")


def _name_of_letter(letter: re.Match[str]) -> str:
    """`` ALPHA `` for α."""
    name = unicodedata.name(letter[0]).split()[-1]
    return f" {name} "


def choose(key: str, words: Sequence[Any] | None, axes: Sequence[Axis]) -> set[str]:
    """The labels that the words name, by label or short name; ``*`` stands for anything, and None
    for all.
    """
    known = _short_names(key, axes)
    chosen = set()
    for word in map(str, words or ["*"]):
        matches = matching(known, word.lower() if "*" in word else slug(word))
        if not matches:
            listed = "; ".join(f"{label} ({name})" for name, label in known.items())
            raise Refusal(
                f"{key}: there is no {word!r}. There are, with their short names: {listed}."
            )
        chosen |= {known[name] for name in matches}
    return chosen


def _short_names(key: str, axes: Sequence[Axis]) -> Mapping[str, str]:
    known: dict[str, str] = {}
    for axis in axes:
        name = slug(axis.label)
        other = known.setdefault(name, axis.label)
        if other != axis.label:
            raise Refusal(
                f"{key}: {other} and {axis.label} have the same short name, {name}: rename one."
            )
    return known
