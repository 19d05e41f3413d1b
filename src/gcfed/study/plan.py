"""From a study to its jobs: rows × columns × seeds, each with its overrides and the folder that is its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count, takewhile, zip_longest
from typing import Any

from gcfed.study.grid import Grid, read_grid
from gcfed.study.overrides import key_of, merge, single_valued, slug, suffix

_KEYS = {"table", "seeds", "rows", "columns", "overrides", "scales", "dry_run"}
_SCALE_KEYS = {"seeds", "rows", "columns", "overrides"}


@dataclass(frozen=True)
class Study:
    """A table, or the part of it that a scale and the command line choose.

    Attributes:
        overrides: of every job, behind those of its row and column.
        extra: the command line's, behind all others.
    """

    name: str
    scale: str
    grid: Grid
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass(frozen=True)
class Job:
    """One run of a study.

    Attributes:
        title: as people read it.
        folder: the name of its folder, which is its own.
    """

    title: str
    seed: int
    overrides: tuple[str, ...]
    folder: str


def read_study(name: str, scale: str, node: Mapping[str, Any], arguments: Sequence[str] = ()) -> Study:
    """A study from its config node and the command line's overrides.

    Raises:
        ValueError: an unknown key, scale, row or column, or an override that a study cannot take; says which exist.
        FileNotFoundError: no such table.
    """
    _known(node, _KEYS, "study")
    scales: Mapping[str, Any] = node.get("scales") or {}
    for label, entry in scales.items():
        _known(entry or {}, _SCALE_KEYS, f"study.scales.{label}")
    if scale != "full" and scale not in scales:
        raise ValueError(f"scale={scale} is unknown: {name} has {', '.join(dict.fromkeys(['full', *scales]))}.")
    reduced: Mapping[str, Any] = scales.get(scale) or {}
    if not node.get("table"):
        raise ValueError(f"study.table is not set in configs/study/{name}.yaml: name a table of configs/paper.")
    grid = read_grid(node["table"])
    seeds = node.get("seeds") or reduced.get("seeds") or range(1, (grid.seeds or 1) + 1)
    dry_run = node.get("dry_run", False)
    if not isinstance(dry_run, bool):
        raise ValueError(f"study.dry_run={dry_run} must be true or false.")
    return Study(
        name=name,
        scale=scale,
        grid=grid,
        rows=_chosen(node.get("rows") or reduced.get("rows"), grid.rows, "study.rows"),
        columns=_chosen(node.get("columns") or reduced.get("columns"), grid.columns, "study.columns"),
        seeds=tuple(dict.fromkeys(_seed(seed) for seed in _list(seeds, "study.seeds"))),
        overrides=(*_texts(node.get("overrides")), *_texts(reduced.get("overrides"))),
        extra=_extra(arguments),
        dry_run=dry_run,
    )


def jobs_of(study: Study) -> tuple[list[Job], dict[str, list[str]]]:
    """The jobs in the order of the table, and the chosen cells that are none: reason → "row, column".

    Cells with the same overrides, such as two numbers of one run, are one job. Seeds come last, so that a study which
    is stopped early has all rows of its first seed.
    """
    runs = _runs(study.grid)
    tail = suffix(study.extra)
    jobs: dict[str, Job] = {}
    left_out: dict[str, list[str]] = {}
    for seed in study.seeds:
        for cell in ((row, column) for row in study.rows for column in study.columns):
            if cell in runs:
                title, name = runs[cell]
                overrides = merge(study.grid.cells[cell], study.overrides, [f"seed={seed}"], study.extra)
                folder = f"{name}_s{seed}{tail}"
                jobs.setdefault(folder, Job(f"{title}, seed {seed}", seed, overrides, folder))
            elif seed == study.seeds[0]:
                left_out.setdefault(study.grid.left_out[cell], []).append(", ".join(cell))
    return list(jobs.values()), left_out


def _runs(grid: Grid) -> dict[tuple[str, str], tuple[str, str]]:
    """Title and folder name of each cell's run, whichever cells are chosen; cells with the same overrides share one.

    Such a run is called by what its rows and columns have in common: the columns ``CIFAR-10, 500R`` and ``CIFAR-10,
    1000R`` make it ``CIFAR-10``.
    """
    shared: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for cell, overrides in grid.cells.items():
        shared.setdefault(tuple(sorted(overrides)), []).append(cell)
    titles, names = [], []
    for cells in shared.values():
        labels = [_common(axis) for axis in zip(*cells, strict=True)]
        titles.append(", ".join(filter(None, labels)) or ", ".join(cells[0]))
        names.append("_".join(filter(None, map(slug, labels))) or slug(titles[-1]))
    called = zip(titles, _numbered(names), strict=True)
    return {cell: run for cells, run in zip(shared.values(), called, strict=True) for cell in cells}


def _common(labels: Sequence[str]) -> str:
    """What labels have in common in front, up to a comma."""
    parts = [label.split(", ") for label in dict.fromkeys(labels)]
    together = takewhile(lambda group: len(set(group)) == 1, zip_longest(*parts))
    return ", ".join(group[0] for group in together)


def _numbered(names: Iterable[str]) -> list[str]:
    """Each name once: one that is taken gets the first number, from 2 on, with which it is not."""
    taken: dict[str, None] = {}
    for name in names:
        free = (f"{name}-{i}" if i > 1 else name for i in count(1))
        taken[next(each for each in free if each not in taken)] = None
    return list(taken)


def _chosen(wanted: Any, labels: Sequence[str], key: str) -> tuple[str, ...]:
    """The labels that are wanted, in the table's order, by label or by slug; ``*`` stands for anything in a slug."""
    if wanted is None:
        return tuple(labels)
    names = dict(zip(labels, _numbered(slug(label) or "none" for label in labels), strict=True))
    found = set()
    for word in map(str, _list(wanted, key)):
        pattern = word.lower() if "*" in word else slug(word)
        matching = [label for label in labels if label == word] or [
            label for label in labels if fnmatchcase(names[label], pattern)
        ]
        if not matching:
            listed = "; ".join(f"{label} ({names[label]})" for label in labels)
            raise ValueError(f"{key}: there is no {word!r}. Those that exist, with short names: {listed}.")
        found.update(matching)
    return tuple(label for label in labels if label in found)


def _extra(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line's overrides that go to every job."""
    for argument in arguments:
        if key_of(argument) == "study.overrides":  # it would replace the file's, in the folders of the file's runs
            raise ValueError(f"{argument}: say the overrides by themselves, as key=value; they go to every job.")
    extra = [a for a in arguments if key_of(a) not in ("study", "scale") and not key_of(a).startswith("study.")]
    extra = [a for a in extra if a != "ckpt_path=last"]  # a study continues what it finds, as that asks elsewhere
    for argument in extra:
        if key_of(argument) == "seed":
            raise ValueError(f"{argument}: a study has seeds of its own; say study.seeds=[1,2,3].")
        if key_of(argument) == "ckpt_path":
            raise ValueError(f"{argument}: a study finds the checkpoints of its jobs itself; leave it out.")
    single_valued(extra)
    return tuple(extra)


def _seed(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"study.seeds: {value!r} must be a whole number of at least 0.")
    return value


def _list(value: Any, key: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{key}={value} must be a list, such as {key}=[{value}].")
    return value


def _texts(overrides: Any) -> list[str]:
    return [str(override) for override in overrides or ()]


def _known(node: Mapping[str, Any], keys: set[str], where: str) -> None:
    if odd := sorted(map(str, node.keys() - keys)):
        raise ValueError(f"{where}.{odd[0]} is unknown: there are {', '.join(sorted(keys))}.")
