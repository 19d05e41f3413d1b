"""Writes a report of many runs: ``index.html`` with its tables and figures."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from pandas import DataFrame

from gcfed.folders.folder import STATES, Run, find_runs
from gcfed.folders.measures import parse, value
from gcfed.folders.run_columns import require_measured
from gcfed.reporting.frame import frame_of, search_of
from gcfed.reporting.tables import Sheet, all_runs, comparison, harmless, targets
from gcfed.reporting.verdict import Verdict, judge
from gcfed.utils.files import write_text
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import LOGS

if TYPE_CHECKING:
    from gcfed.reporting.figures import Picture

#: Further columns of a comparison, if the runs have them.
MORE_MEASURES = (
    "best:test/acc",
    "final:personal/global_acc",
    "final:personal/local_acc",
    "total:comm/down_bytes",
    "total:comm/up_bytes",
)
#: Lists the tables and figures of places that a report wrote, one a line. Their names have the
#: number of a place, and the next report may have fewer places, or other ones.
LIST = "files.txt"
_LISTED_FILE = re.compile(r"(tables/\w+\.tex|figures/\w+\.(png|pdf))", re.ASCII)


@dataclass(frozen=True)
class _Found:
    """The runs below the roots, and what is left out."""

    runs: list[Run]
    notes: list[str]  # folders that are left out, each with its reason

    @property
    def counts(self) -> str:
        """``7 runs: 6 finished, 1 failed``."""
        states = Counter(run.state for run in self.runs)
        number = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        each = [f"{states[state]} {state}" for state in STATES if states[state]]
        return f"{number}: {', '.join(each)}"


def write_report(
    *roots: str | Path,
    out: str | Path = LOGS / "report",
    measures: str | Sequence[str] | None = None,
    figures: bool = True,
) -> Path:
    """Writes tables, figures and a page of all runs below ``roots``, as ``src/report.py`` does;
    returns the page.

    Args:
        roots: folders with runs; by default ``logs``.
        out: the folder of the report.
        measures: further columns of the comparisons (:mod:`gcfed.folders.measures`), such as
            ``"final:val/acc"``.

    Raises FileNotFoundError for a root that does not exist; Refusal without a run, or for a
    measure that no run has.
    """
    out = Path(out).expanduser()
    folders = [Path(root).expanduser() for root in roots or [LOGS]]
    asked = [measures] if isinstance(measures, str) else [*(measures or ())]
    for measure in asked:
        parse(measure, "measures")
    found = _find(folders)
    require_measured(asked, found.runs, "measures")
    frame = frame_of(found.runs)
    verdicts = _verdicts(frame)
    columns = [*MORE_MEASURES, *asked]
    _remove_earlier(out)
    tables = _write_tables(frame, verdicts, columns, out / "tables")
    _write_runs(frame, verdicts, columns, out / "tables" / "runs.csv")
    pictures: list[Picture] = []
    if figures:
        from gcfed.reporting.figures import draw  # matplotlib

        pictures = draw(frame, verdicts, out / "figures")
    _list_files(out, tables, pictures)
    page = out / "index.html"
    title = f"Runs in {', '.join(root.resolve().name for root in folders)}"
    write_text(page, _page(title, found, frame, verdicts, tables, pictures))
    for note in found.notes:
        print(f"Not in this report: {note}")
    print(f"{found.counts}. {page}")
    return page.absolute()


def _find(roots: Sequence[Path]) -> _Found:
    """Reads all runs below the roots, without those below a folder ``debug``.

    Raises Refusal if there is none.
    """
    notes: list[str] = []
    runs: list[Run] = []
    trials = Counter[Path]()
    for run in find_runs(roots):
        search = search_of(run)
        if _is_debug(run.folder, roots):
            continue
        if not run.config:
            notes.append(f"{relpath(run.folder)}: {run.reason}")
        elif search is not None:
            trials[search] += 1
        else:
            runs.append(run)
    for folder, number in trials.items():
        notes.append(f"{relpath(folder)}: {number} trials of a search, which are not compared")
    if not runs:
        places = ", ".join(map(str, roots))
        raise Refusal(
            f"There is no run below {places}: a run's folder holds config.yaml and metrics.csv."
            " `python src/train.py` makes one; roots=[…] names other folders."
            f" {'; '.join(notes)}"
        )
    return _Found(runs, notes)


def _is_debug(folder: Path, roots: Sequence[Path]) -> bool:
    """Whether a folder ``debug`` lies between a run and each root above it."""
    for root in roots:
        place = root.resolve()
        if folder.is_relative_to(place) and "debug" not in folder.relative_to(place).parts:
            return False
    return True


def _remove_earlier(out: Path) -> None:
    """Removes the tables and figures of places that an earlier report wrote to the same folder.

    A user may keep files with similar names there, so only the listed ones are removed.
    """
    written = out / LIST
    if not written.is_file():
        return
    for name in written.read_text(encoding="utf-8").splitlines():
        if _LISTED_FILE.fullmatch(name):
            (out / name).unlink(missing_ok=True)


def _list_files(
    out: Path, tables: Mapping[str, Sequence[Sheet]], pictures: Sequence[Picture]
) -> None:
    """Writes the names of the tables and figures of places for the next report."""
    names = [f"tables/{table.name}.tex" for of_place in tables.values() for table in of_place]
    for picture in pictures:
        for file in (picture.file, picture.file.with_suffix(".pdf")):
            names.append(f"figures/{file.name}")
    write_text(out / LIST, "\n".join(names) + "\n")


def _verdicts(frame: DataFrame) -> dict[str, Verdict]:
    """The verdict of each place: those with several methods first, then by the number of seeds."""
    verdicts = {place: judge(rows) for place, rows in frame.groupby("place", sort=False)}

    def size(place: str) -> tuple[bool, int]:
        table = verdicts[place].table
        return len(table) > 1, int(table["n"].sum())

    return {place: verdicts[place] for place in sorted(verdicts, key=size, reverse=True)}


def _write_tables(
    frame: DataFrame, verdicts: Mapping[str, Verdict], columns: Sequence[str], folder: Path
) -> dict[str, list[Sheet]]:
    """Writes the tables of each place in LaTeX; returns them."""
    tables: dict[str, list[Sheet]] = {}
    for number, (place, one) in enumerate(verdicts.items(), start=1):
        rows = frame[frame["place"] == place]
        shown = {one.measure, f"final:{parse(one.measure).column}"}
        more = [measure for measure in columns if measure not in shown]
        tables[place] = [comparison(one, rows, more, f"comparison_{number}", place)]
        reached = targets(one, rows, f"targets_{number}", place)
        if reached is not None:
            tables[place].append(reached)
        for table in tables[place]:
            write_text(folder / f"{table.name}.tex", table.latex)
    return tables


def _write_runs(
    frame: DataFrame, verdicts: Mapping[str, Verdict], columns: Sequence[str], path: Path
) -> None:
    """Writes a line per run with all digits of its measures."""
    measures = dict.fromkeys([*(one.measure for one in verdicts.values()), *columns])
    numbers = {measure: [value(run, measure) for run in frame["run"]] for measure in measures}
    lines = harmless(all_runs(frame)).join(DataFrame(numbers, frame.index))
    write_text(path, lines.to_csv(index=False))


def _page(
    title: str,
    found: _Found,
    frame: DataFrame,
    verdicts: Mapping[str, Verdict],
    tables: Mapping[str, Sequence[Sheet]],
    pictures: Sequence[Picture],
) -> str:
    """The page in HTML, with its figures inside."""
    environment = Environment(
        loader=PackageLoader("gcfed.reporting", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        title=title,
        counts=found.counts,
        notes=found.notes,
        created=datetime.now(),
        verdicts=verdicts,
        tables=tables,
        every=all_runs(frame),
        pictures=pictures,
        embed=lambda file: base64.b64encode(file.read_bytes()).decode(),
    )
