"""From a study's YAML to its jobs: rows × columns × seeds, each with its overrides and a folder of its own."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser

from gcfed.runs.identity import counts, digest
from gcfed.study.papers import PaperTable, choose, load, slug, table_of
from gcfed.utils.checked import SettingError, Whole, checked, fits

Labels = list[str | float] | None
Seeds = list[Whole] | None
REFUSED = {
    "study.overrides": "say the overrides by themselves, as key=value; they go to every job",
    "seed": "a study has seeds of its own; say study.seeds=[1,2,3]",
    "ckpt_path": "a study finds the checkpoints of its jobs itself; leave it out",
}
Cells = dict[tuple[str, str], Any]  # (row, column) → overrides, or a text: why it cannot be run


class Job(NamedTuple):
    """One run of a study: its name for people, what Hydra composes it from, and the name of its folder."""

    title: str
    overrides: list[str]
    folder: str
    cell: str = ""  # the part of the folder's name that its seeds share


def different(name: str, values: list[Any] | None) -> None:
    """Refuses an empty list, and one that has something twice; null passes."""
    if values is not None and len({*map(str, values)}) != max(1, len(values)):
        raise SettingError(name, f"={values} must be a list of different ones, such as [1,2,3], or null.")


@checked
@dataclass(frozen=True)
class Choice:
    """Which part of its table a study runs; null: what its scale says, or all."""

    rows: Labels = None  # by label or short name, where * stands for anything
    columns: Labels = None
    seeds: Seeds = None
    overrides: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "seeds"):
            different(name, getattr(self, name))


@checked
@dataclass(frozen=True)
class Study(Choice):
    """The ``study`` of a config: a table, what of it is run, and at which ``scale`` less."""

    table: Any = None
    scales: dict | None = None
    search: dict | None = None
    dry_run: bool = False


def settings_of(where: str, kind: Callable[..., Any], node: Any) -> Any:
    """A group of settings as the dataclass that checks it.

    Raises:
        ValueError: it is none, or a setting that cannot be; names it below ``where``.
    """
    if not isinstance(node, Mapping):
        raise ValueError(f"{where}={node} must be a group of settings.")
    try:
        return kind(**{str(key): value for key, value in node.items()})
    except SettingError as error:
        raise ValueError(f"{where}.{error}") from None


def read_jobs(scale: str, node: Mapping[str, Any], arguments: Iterable[str] = ()) -> tuple[list[Job], Counter[str]]:
    """The jobs of a study, seed by seed; and why how many cells have none.

    Raises:
        ValueError: an unknown key, scale, row or column, or an override that a study cannot take.
        FileNotFoundError: there is no such table.
    """
    study: Study = settings_of("study", Study, node)
    scales = {"full": {}} | (study.scales or {})
    part: Choice = settings_of(f"study.scales.{scale}", Choice, scales[fits("scale", scale, Literal[tuple(scales)])])
    cells, number = read_table(study.table)
    rows = choose("rows", study.rows or part.rows, [row for row, _ in cells])
    columns = choose("columns", study.columns or part.columns, [column for _, column in cells])
    chosen = {cell: own for cell, own in cells.items() if cell[0] in rows and cell[1] in columns}
    firsts = {effect(own): cell for cell, own in reversed(cells.items())}  # cells of equal overrides are one run
    common, extra = [*(study.overrides or ()), *(part.overrides or ())], check(arguments)
    text = re.sub(r"[^\w.,=~\[\]-]+", "-", "".join(f",{o.lstrip('+')}" for o in sorted(extra) if counts(key_of(o))))
    suffix = text if len(text) <= 120 else f"{text[:107]}-{digest({'': text})}"  # file systems end a name at 255 bytes
    jobs: dict[str, Job] = {}
    for seed in study.seeds or part.seeds or range(1, number + 1):
        for cell, own in chosen.items():
            if not isinstance(own, str):
                short = "_".join(map(slug, firsts[effect(own)]))
                folder, overrides = f"{short}_s{seed}{suffix}", [*own, *common, f"seed={seed}", *extra]
                jobs.setdefault(folder, Job(f"{', '.join(cell)}, seed {seed}", overrides, folder, f"{short}{suffix}"))
    return list(jobs.values()), Counter(own for own in chosen.values() if isinstance(own, str))


def read_table(table: str | Mapping[str, Any] | None) -> tuple[Cells, int]:
    """The cells and the number of seeds.

    Args:
        table: a name in ``configs/paper``, or a study's own rows and columns (label, overrides) and overrides.
    """
    if table is None or table == "":
        raise ValueError("study.table is not set: name a table of configs/paper, or write rows and columns.")
    try:
        return _read_table(load(table) if isinstance(table, str) else table_of({**table, "name": "study.table"}))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"study.table={table}: {error}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"study.table needs rows and columns, lists of {{label, overrides}}: {error}") from None


def _read_table(paper: PaperTable) -> tuple[Cells, int]:
    cells: Cells = {}
    for row, column in ((row, column) for row in paper.rows for column in paper.columns):
        cell = row.label, column.label
        printed, only = paper.cells[cell], row.by_column.get(column.label)
        cells[cell] = paper.command_overrides(row, column)
        if cells[cell] is None:
            cells[cell] = (only and only.note) or row.note or column.note or "it cannot be run here"
        elif paper.paper and not printed.is_result:
            cells[cell] = "the paper has no number"
    return cells, paper.seeds or 1


def key_of(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


def effect(overrides: Iterable[str]) -> frozenset[str]:
    """The last word on each key."""
    return frozenset({key_of(override): override for override in overrides}.values())


def check(arguments: Iterable[str]) -> list[str]:
    """The command line's overrides that go to every job; ``ckpt_path=last`` asks for what a study does anyway."""
    extra = [argument for argument in arguments if argument != "ckpt_path=last"]
    for override in OverridesParser.create().parse_overrides(extra):
        why = REFUSED.get(override.key_or_group)
        if override.is_sweep_override():
            why = "a study sweeps over its rows, columns and seeds only; give one value, or write a study of your own"
        if why:
            raise ValueError(f"{override.input_line}: {why}.")
    return [override for override in extra if key_of(override).split(".")[0] not in ("study", "scale")]
