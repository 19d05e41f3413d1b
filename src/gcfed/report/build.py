"""From run folders to a report: what it holds, and how it is made."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as RichTable

from gcfed.report.compare import Comparison, compare
from gcfed.report.groups import Group, grouped
from gcfed.report.measures import parse
from gcfed.report.overview import all_runs, by_measure, unmeasured
from gcfed.report.runs import STATES, Run, find_runs
from gcfed.report.searches import Search, find_searches
from gcfed.report.tables import Table, markdown, markdown_text, write_table
from gcfed.report.written import remove_stale
from gcfed.utils.files import replacing

if TYPE_CHECKING:
    from gcfed.report.gallery import Picture


class Incomplete(RuntimeError):
    """The report is written, but for something that was asked for."""


@dataclass(frozen=True)
class Report:
    """All that a page shows.

    Attributes:
        folder: where the report is written: pictures' and tables' files lie below it.
        roots: below which the runs were found, without the path of this machine.
        runs: all that were found, in whatever state.
        groups: of all of them, repetitions of one setting together.
        comparisons: with the papers' tables that were asked for, or that have matching runs.
        tables: the free ones: the chosen measures by method and federation, and all runs.
        places: what to show of a run's folder, where ``roots`` do not lead there.
        lacks: what was asked for and is not there, and why, in a sentence each.
    """

    title: str
    created: datetime
    folder: Path
    roots: tuple[str, ...]
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    comparisons: tuple[Comparison, ...]
    tables: tuple[Table, ...]
    pictures: tuple[Picture, ...]
    searches: tuple[Search, ...]
    places: Mapping[Path, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()

    def shown(self, run: Run) -> str:
        """The run's folder below the root that it was found in, without the path of this machine."""
        return self.places.get(run.folder) or shown(run, self.roots)


def root_names(roots: Sequence[str]) -> list[str]:
    """Roots as a reader may see them: relative ones as they are, of others the last parts that tell them apart."""
    paths = [Path(root) for root in roots]
    ends = [path.resolve().parts for path in paths]
    names = []
    for path, parts in zip(paths, ends, strict=True):
        rivals = [other for other in ends if other != parts]
        length = next((n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in rivals)), 1)
        absolute = path.is_absolute() or ".." in path.parts
        names.append("/".join(parts[-length:]) if absolute else path.as_posix())
    return names


def shown(run: Run, roots: Sequence[str]) -> str:
    """Its path below the first root that holds it, with that root's name before it where there are several."""
    for root, name in zip(roots, root_names(roots), strict=True):
        top = Path(root).resolve()
        if run.folder == top:
            return top.name
        if run.folder.is_relative_to(top):
            below = run.folder.relative_to(top).as_posix()
            return f"{name}/{below}" if len(roots) > 1 else below
    return run.folder.name  # through a link that leads out of the roots


def report(cfg: Mapping[str, Any]) -> Path:
    """Finds the runs, writes page, tables and figures, prints what there is; returns the page.

    Args:
        cfg: as in ``configs/report.yaml``.

    Raises:
        FileNotFoundError: a root or a paper's table is not there.
        ValueError: there is no run below the roots, or a key has a value that cannot be; names it.
        Incomplete: a figure cannot be drawn or no run has a measure; all else is written.
    """
    out = Path(cfg["out"])
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file; name a folder, which need not be there.")
    formats = _formats(cfg)
    made = _read(_listed(cfg["roots"]), out, cfg)
    from gcfed.report.page import write_page  # jinja: only once there is something to write

    paths = [path for table in _tables(made) for path in write_table(table, out / "tables")]
    failed: dict[str, Exception] = {}
    if cfg["figures"]:
        from gcfed.report.gallery import draw  # matplotlib

        pictures = draw(made.groups, out / "figures", formats, failed)
        told = (f"Figure {title!r}: {type(error).__name__}: {error}" for title, error in failed.items())
        made = replace(made, pictures=tuple(pictures), lacks=(*made.lacks, *told))
    remove_stale(out, [*paths, *(path for picture in made.pictures for path in picture.files)])
    with replacing(out / "report.md") as temporary:
        temporary.write_text("\n".join(_markdown(made)), encoding="utf-8")
    write_page(made, out / "index.html")
    _print(made, len(paths))
    if made.lacks:
        raise Incomplete(f"The report lacks: {'; '.join(made.lacks)}") from next(iter(failed.values()), None)
    return out / "index.html"


def _listed(value: Any) -> tuple[str, ...]:
    """``roots=logs`` is as good as ``roots=[logs]``, null as []."""
    return (value,) if isinstance(value, str) else tuple(map(str, value or ()))


def _formats(cfg: Mapping[str, Any]) -> tuple[str, ...]:
    """The figures' formats, if all of them can be written."""
    formats = _listed(cfg["formats"])
    if formats and cfg["figures"]:
        from matplotlib.backend_bases import FigureCanvasBase

        known = FigureCanvasBase.get_supported_filetypes()
        if unknown := [suffix for suffix in formats if suffix not in known]:
            raise ValueError(f"formats: figures cannot be written as {', '.join(unknown)}, but as {', '.join(known)}.")
    return formats


def _read(roots: tuple[str, ...], out: Path, cfg: Mapping[str, Any]) -> Report:
    from gcfed.report import papers

    names = papers.names() if cfg["papers"] is None else _listed(cfg["papers"])
    tables = [papers.load(name) for name in names]
    measures = None if cfg["measures"] is None else list(dict.fromkeys(_listed(cfg["measures"])))
    for measure in measures or ():
        parse(measure)  # before a thousand runs are read
    runs = find_runs(roots)
    if not runs:
        raise ValueError(
            f"There is no run below {', '.join(roots) or 'roots=[]'}: a run's folder holds config.yaml and "
            "overrides.yaml. `python src/train.py` makes one; roots=[…] names other folders."
        )
    groups = grouped(runs)
    places = {run.folder: shown(run, roots) for run in runs}

    def place(run: Run) -> str:
        return places[run.folder]

    comparisons = [compare(table, groups, place) for table in tables]
    free = [*by_measure(groups, measures, place), all_runs(runs, groups, place)]
    return Report(
        title=f"Runs in {', '.join(root_names(roots))}",
        created=datetime.now(),
        folder=out,
        roots=tuple(root_names(roots)),
        runs=tuple(runs),
        groups=tuple(groups),
        comparisons=tuple(c for c in comparisons if c.found or cfg["papers"] is not None),
        tables=tuple(free),
        pictures=(),
        searches=tuple(find_searches(roots)),
        places=places,
        lacks=unmeasured(runs, measures or ()),
    )


def _tables(made: Report) -> list[Table]:
    return [*(comparison.table for comparison in made.comparisons), *made.tables]


def _markdown(made: Report) -> Iterator[str]:
    yield f"# {made.title}\n"
    yield f"{_counts(made)}. Written on {made.created:%Y-%m-%d %H:%M}; the same as a page: [index.html](index.html).\n"
    for lack in made.lacks:
        yield f"- Not in this report: {markdown_text(lack)}\n"
    for comparison in made.comparisons:
        yield markdown(comparison.table)
        if comparison.missing:
            yield f"<details><summary>What is missing, and how to run it: {_missing(comparison)}</summary>\n"
            yield "```bash"
            if comparison.command:
                yield f"{comparison.command}  # all at once, finished runs skipped"
            for places, command in comparison.missing:
                yield f"{command}  # {places}"
            yield "```\n\n</details>\n"
    *measures, runs = made.tables
    yield from map(markdown, measures)
    for picture in made.pictures:
        yield f"## {picture.title}\n"
        yield f"![{picture.title}]({Path(os.path.relpath(picture.path_png, made.folder)).as_posix()})\n"
        yield f"{picture.caption}\n"
    for search in made.searches:
        yield markdown(_of_search(search))
    yield markdown(runs)


def _missing(comparison: Comparison) -> str:
    """Runs that several columns read count once."""
    cells = [entry for entry in comparison.entries if entry.missing]
    runs = sum({entry.command: len(entry.missing) for entry in cells}.values())
    return f"{runs} run{'s' * (runs > 1)} of {len(cells)} cell{'s' * (len(cells) > 1)}"


def _of_search(search: Search) -> Table:
    from gcfed.report.tables import Cell, Row

    names = list(dict.fromkeys(name for trial in search.trials for name in trial.parameters))
    rows = [
        Row(
            tuple(
                map(
                    Cell,
                    (
                        str(trial.number),
                        trial.state,
                        "–" if trial.value is None else f"{trial.value:.5g}",
                        *(trial.parameters.get(name, "–") for name in names),
                    ),
                )
            )
        )
        for trial in search.trials
    ]
    told = () if search.best is None else (f"The best is trial {search.best}.",)
    header = ("trial", "state", "value", *names)
    return Table(f"trials_{search.name}", f"Search {search.name}", header, tuple(rows), told)


def _counts(made: Report) -> str:
    states = Counter(run.state for run in made.runs)
    told = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    return f"{len(made.runs)} runs in {len(made.groups)} settings: {told}"


def _print(made: Report, files: int) -> None:
    table = RichTable(title=_counts(made), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for comparison in made.comparisons:
        shown = sum(entry.mean is not None for entry in comparison.entries)
        missing = f", missing {_missing(comparison)}" if comparison.missing else ""
        table.add_row(comparison.table.title, f"{shown} of {len(comparison.entries)} cells{missing}")
    for free in made.tables:
        table.add_row(free.title, f"{len(free.rows)} rows")
    if made.pictures:
        table.add_row("Figures", ", ".join(picture.name for picture in made.pictures))
    for search in made.searches:
        table.add_row(f"Search {search.name}", f"{len(search.trials)} trials")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"index.html, report.md, {files} files in tables/ are in\n  {made.folder}", highlight=False)
