"""What the page's tables show, line by line."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from gcfed.report.drawings import scatter, sparkline
from gcfed.report.groups import Group, federation_of
from gcfed.report.measures import value
from gcfed.report.runs import Run

if TYPE_CHECKING:
    from gcfed.report.build import Report
    from gcfed.report.compare import Comparison
    from gcfed.report.entries import Entry
    from gcfed.report.searches import Search
    from gcfed.report.tables import Cell, Table

FAR = 2.0  # standard deviations from which on a difference is set off
_NUMBER = re.compile(r"[≥≤<>~+−-]?\d")


class Shown(NamedTuple):
    """A cell; ``far``: it is a difference of ``FAR`` σ or more."""

    cell: Cell
    far: bool = False


def blocks(table: Table, entries: Sequence[Entry] = ()) -> list[list[list[Shown]]]:
    """Each line with the minor lines that explain it; ``entries`` are a comparison's, one a cell of its lines."""
    found: list[list[list[Shown]]] = []
    wide = len(table.header) - 1
    for row in table.rows:
        if not (row.minor and found):
            found.append([])
        of_row: Sequence[Entry | None] = entries[wide * (len(found) - 1) :][:wide] or [None] * wide
        is_difference = row.minor and len(found[-1]) == 2
        shown = [
            Shown(
                cell,
                far=bool(entry and is_difference and entry.deviations is not None and abs(entry.deviations) >= FAR),
            )
            for cell, entry in zip(row.cells[1:], of_row, strict=True)
        ]
        found[-1].append([Shown(row.cells[0]), *shown])
    return found


def kinds(found: Sequence[Sequence[Sequence[Shown]]]) -> list[str]:
    """The names of the minor lines of blocks, [] where there are none."""
    return [row[0].cell.text for row in max(found, key=len, default=[])[1:]]


def bare(entries: Sequence[Entry], wide: int) -> list[bool]:
    """Of each of ``wide`` columns behind that of the labels whether no run of ours belongs to it."""
    return [False, *(_without_runs(entries[i::wide]) for i in range(wide))]


def bare_rows(entries: Sequence[Entry], wide: int) -> list[bool]:
    """Of each row of ``wide`` cells whether no run of ours belongs to it."""
    return [_without_runs(entries[i : i + wide]) for i in range(0, len(entries), wide)]


def _without_runs(entries: Sequence[Entry]) -> bool:
    return bool(entries) and all(entry.ours is None for entry in entries)


def numeric(table: Table) -> list[bool]:
    """Of each column whether at least half of what is in it are numbers."""
    columns = [[row.cells[i].text for row in table.rows] for i in range(len(table.header))]
    found = [[bool(_NUMBER.match(text)) for text in column if text not in ("", "–")] for column in columns]
    return [bool(column) and 2 * sum(column) >= len(column) for column in found]


def told(table: Table) -> list[tuple[str, str]]:
    """(row and column, what is to be said of the cell) wherever there is something: not everyone has a pointer."""
    return [
        (f"{row.cells[0].text}, {name}", cell.title)
        for row in table.rows
        for name, cell in zip(table.header, row.cells, strict=True)
        if cell.title
    ]


def folded(note: str) -> tuple[str, list[str]]:
    """A note that lists more than four things as its head and the list; any other with no list."""
    head, _, rest = note.partition(": ")
    items = rest.split("; ")
    return (head, items) if len(items) > 4 and len(head) < 60 else (note, [])


def missing(comparison: Comparison) -> str:
    """How much of a paper's table; runs that several columns read count once."""
    cells = [entry for entry in comparison.entries if entry.missing]
    runs = sum({entry.command: len(entry.missing) for entry in cells}.values())
    return f"{runs} run{'s' * (runs > 1)} of {len(cells)} cell{'s' * (len(cells) > 1)} missing"


@dataclass(frozen=True)
class RunLine:
    """A line of the list of runs.

    ``variant`` is what the method's label has beside its name; a number is its text and what to sort by.
    """

    id: str
    run: Run
    method: str
    variant: str
    federation: str
    folder: str
    link: str
    curve: Markup
    numbers: Mapping[str, tuple[str, float | None]]


def run_lines(report: Report, base: str) -> list[RunLine]:
    """All runs, with links from the folder ``base``."""
    groups = {run.folder: group for group in report.groups for run in group.runs}
    highest: dict[Any, float] = defaultdict(float)
    for run in report.runs:
        highest[run.get("tags.data")] = max(highest[run.get("tags.data")], value(run, "max:test/acc") or 0)
    return [
        _run_line(i, run, groups.get(run.folder), highest[run.get("tags.data")], report.shown(run), base)
        for i, run in enumerate(report.runs, start=1)
    ]


def _run_line(number: int, run: Run, group: Group | None, highest: float, folder: str, base: str) -> RunLine:
    """``group`` is None where the config cannot be read."""
    method, _, variant = group.method.partition(", ") if group else ("–", "", "")
    return RunLine(
        id=f"run-{number}",
        run=run,
        method=method,
        variant=variant,
        federation=_federation(group) if group else "–",
        folder=folder,
        link=relative(run.folder, base),
        curve=sparkline(run.curve("test/acc")[1], highest),
        numbers=_numbers(run),
    )


def _federation(group: Group) -> str:
    """All of it but the rounds, which have a column, and what tells it from others."""
    *parts, rounds = federation_of(group.setting)
    further = [part for part in group.federation.split(", ") if part != rounds]
    return ", ".join(filter(None, dict.fromkeys([*parts, *further])))


def _numbers(run: Run) -> dict[str, tuple[str, float | None]]:
    """Accuracies in percent; of a run that measures none, its error or loss."""
    measured = [(name, *how) for name, how in _RESULTS.items() if name in run.columns]
    name, best, factor, digits = measured[0] if measured else ("test/acc", *_RESULTS["test/acc"])
    seconds = run.curve("time/round_s")[1]
    sent = [value(run, f"sum:comm/{way}_bytes") or 0.0 for way in ("up", "down")]
    found = {
        "last": (value(run, f"last:{name}"), factor, digits),
        "best": (value(run, f"{best}:{name}"), factor, digits),
        "last 10": (value(run, f"mean:{name}[10]"), factor, digits),
        "seconds": (float(np.median(seconds)) if len(seconds) else None, 1, ".3g"),
        "gigabytes": (sum(sent) / 1e9 if any(sent) else None, 1, ".3g"),
    }
    rounds = f"{run.rounds}/{run.get('rounds', '?')}"
    return {"rounds": (rounds, float(run.rounds))} | {
        key: ("–" if number is None else f"{scale * number:{form}}", number)
        for key, (number, scale, form) in found.items()
    }


#: column → (how its best is found, factor, digits)
_RESULTS = {
    "test/acc": ("max", 100, ".2f"),
    "test/relative_error": ("min", 1, ".2e"),
    "test/loss": ("min", 1, ".4g"),
}


def search_lines(search: Search) -> dict[str, Any]:
    """The search, its best value as (word, trial, value), its parameters' names, its picture.

    Of a search that does not say which is best: its highest and its lowest value.
    """
    values = {trial.number: trial.value for trial in search.trials if trial.value is not None}
    ends: list[tuple[str, int, float]] = []
    if search.best in values:
        ends = [("best", search.best, values[search.best])]
    elif values:
        picks = (("highest", max), ("lowest", min))
        ends = [(word, *pick(values.items(), key=lambda pair: pair[1])) for word, pick in picks]
    names = list(dict.fromkeys(name for trial in search.trials for name in trial.parameters))
    drawing = scatter(list(values), list(values.values()))
    return {"search": search, "ends": ends, "names": names, "drawing": drawing}


def relative(target: str | Path, base: str) -> str:
    """The link from one resolved path to another."""
    return quote(os.path.relpath(target, base).replace(os.sep, "/"))
