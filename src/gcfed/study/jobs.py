"""From a study's YAML to its jobs: rows × columns × seeds, each with its overrides and a folder of its own."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser

from gcfed.runs.identity import counts, digest
from gcfed.study.papers import PaperTable, choose, load, slug, table_of
from gcfed.utils.number import choice, flag, numbers

PARTS = ("rows", "columns", "seeds", "overrides")
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


def read_jobs(scale: str, node: Mapping[str, Any], arguments: Iterable[str] = ()) -> tuple[list[Job], Counter[str]]:
    """The jobs of a study, seed by seed; and why how many cells have none.

    Raises:
        ValueError: an unknown key, scale, row or column, or an override that a study cannot take.
        FileNotFoundError: there is no such table.
    """
    check_parts("study", node, "search", "table", "scales", "dry_run")
    scales = {"full": None} | (node.get("scales") or {})
    part = {} if scales[choice("scale", scale, scales)] is None else scales[scale]
    check_parts(f"study.scales.{scale}", part)
    cells, number = read_table(node.get("table"))
    rows, columns, seeds = (node.get(key) or part.get(key) for key in PARTS[:3])
    rows, columns = choose("rows", rows, [row for row, _ in cells]), choose("columns", columns, [c for _, c in cells])
    seeds = seeds or list(range(1, number + 1))
    common = [*(node.get("overrides") or ()), *(part.get("overrides") or ())]
    extra = check(arguments)
    text = re.sub(r"[^\w.,=~\[\]-]+", "-", "".join(f",{o.lstrip('+')}" for o in sorted(extra) if counts(key_of(o))))
    suffix = text if len(text) <= 120 else f"{text[:107]}-{digest({'': text})}"  # file systems end a name at 255 bytes
    chosen = {cell: own for cell, own in cells.items() if cell[0] in rows and cell[1] in columns}
    firsts = {effect(own): cell for cell, own in reversed(cells.items())}  # cells of equal overrides are one run
    jobs: dict[str, Job] = {}
    for seed in seeds:
        for cell, own in chosen.items():
            if not isinstance(own, str):
                short = "_".join(map(slug, firsts[effect(own)]))
                folder, overrides = f"{short}_s{seed}{suffix}", [*own, *common, f"seed={seed}", *extra]
                jobs.setdefault(folder, Job(f"{', '.join(cell)}, seed {seed}", overrides, folder, f"{short}{suffix}"))
    return list(jobs.values()), Counter(own for own in chosen.values() if isinstance(own, str))


def check_parts(key: str, node: Any, *more: str) -> None:
    """Refuses a study, or a scale of it, whose parts are not of their kinds.

    Raises:
        ValueError: names the part below ``key``.
    """
    if not isinstance(node, Mapping):
        raise ValueError(f"{key}={node} must be a group of settings.")
    if odd := {*node} - {*PARTS, *more}:
        raise ValueError(f"{key}.{min(map(str, odd))} is unknown; there are {', '.join((*PARTS, *more))}.")
    for name, kind in (("rows", str | float | int), ("columns", str | float | int), ("overrides", str)):
        words = node.get(name)
        is_list = isinstance(words, list) and all(isinstance(word, kind) for word in words)
        if words is not None and not (is_list and (words or name == "overrides")):
            raise ValueError(f"{key}.{name}={words} must be a list such as {key}.{name}=[…], or null.")
    check_seeds(f"{key}.seeds", node.get("seeds"))
    for name in ("scales", "search"):
        if not isinstance(node.get(name), Mapping | None):
            raise ValueError(f"{key}.{name}={node[name]} must be a group of settings, or null.")
    flag(f"{key}.dry_run", node.get("dry_run", False))


def check_seeds(key: str, seeds: Any) -> None:
    """Refuses seeds that are no list of different whole numbers; null passes.

    Raises:
        ValueError: names the key.
    """
    if seeds is not None and len({*numbers(key, seeds, 0, whole=True)}) != max(1, len(seeds)):
        raise ValueError(f"{key}={seeds} must be a list of different whole numbers, such as [1,2,3], or null.")


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
