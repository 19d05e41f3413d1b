"""Writes a report of many runs: ``index.html`` with its tables and figures."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from os.path import commonpath, relpath
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from gcfed.report.frame import frame_of, search_of
from gcfed.report.tables import Table, all_runs, comparison, targets
from gcfed.report.verdict import verdict
from gcfed.runs.folder import STATES, find_runs
from gcfed.runs.measures import parse, value
from gcfed.utils.files import replacing
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import ROOT

#: Further columns of a comparison, if the runs have them.
MEASURES = (
    "best:test/acc",
    "final:personal/global_acc",
    "final:personal/local_acc",
    "total:comm/down_bytes",
    "total:comm/up_bytes",
)


def write_report(
    *roots: str | Path,
    out: str | Path = ROOT / "logs" / "report",
    measures: str | Sequence[str] | None = None,
    figures: bool = True,
) -> Path:
    """Writes tables, figures and a page of all runs below ``roots``, as ``src/report.py`` does;
    returns the page.

    Args:
        roots: folders with runs; by default ``logs``.
        out: the folder of the report.
        measures: further columns of the comparisons (:mod:`gcfed.runs.measures`), such as
            ``"final:val/acc"``.

    Raises FileNotFoundError for a root that does not exist; ValueError without a run, or for an
    unknown measure.
    """
    out, folders = Path(out), [Path(root) for root in roots or [ROOT / "logs"]]
    asked = [measures] if isinstance(measures, str) else [*(measures or ())]
    for measure in asked:
        parse(measure, "measures")
    base = Path(commonpath([root.resolve() for root in folders]))
    found = [
        run for run in find_runs(folders) if "debug" not in run.folder.parts[len(base.parts) :]
    ]
    notes = [f"{relpath(run.folder)}: {run.note}" for run in found if not run.config]
    trials = Counter(folder for run in found if (folder := search_of(run)))
    notes += [
        f"{relpath(folder)}: {n} trials of a search, which are not compared"
        for folder, n in trials.items()
    ]
    runs = [run for run in found if run.config and not search_of(run)]
    if not runs:
        raise Refusal(
            f"There is no run below {', '.join(map(str, folders))}: a run's folder holds"
            " config.yaml and metrics.csv. `python src/train.py` makes one; roots=[…] names other"
            " folders. " + "; ".join(notes)
        )
    frame = frame_of(runs)
    verdicts = {place: verdict(rows) for place, rows in frame.groupby("place", sort=False)}
    size = {place: (len(one.table) > 1, one.table["n"].sum()) for place, one in verdicts.items()}
    verdicts = {
        place: verdicts[place] for place in sorted(size, key=size.__getitem__, reverse=True)
    }
    tables, every = dict[str, list[Table]](), all_runs(frame)
    for i, (place, one) in enumerate(verdicts.items(), start=1):
        rows, more = (
            frame[frame["place"] == place],
            [m for m in (*MEASURES, *asked) if m != one.measure],
        )
        both = (
            comparison(one, rows, more, f"comparison_{i}", place),
            targets(one, rows, f"targets_{i}", place),
        )
        tables[place] = [table for table in both if table]
        for table in tables[place]:
            write_text(out / "tables" / f"{table.name}.tex", table.latex)
    measured = dict.fromkeys([*(one.measure for one in verdicts.values()), *MEASURES, *asked])
    numbers = pd.DataFrame(
        {m: [value(run, m) for run in frame["run"]] for m in measured}, frame.index
    )
    write_text(out / "tables" / "runs.csv", every.join(numbers).to_csv(index=False))
    pictures = []
    if figures:
        from gcfed.report.figures import draw  # matplotlib

        pictures = draw(frame, verdicts, out / "figures")
    states = Counter(run.state for run in runs)
    counts = f"{len(runs)} run{'s' * (len(runs) > 1)}: "
    counts += ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    page = Environment(
        loader=PackageLoader("gcfed.report", "."), autoescape=True, undefined=StrictUndefined
    )
    html = page.get_template("page.html").render(
        title=f"Runs in {', '.join(root.resolve().name for root in folders)}",
        counts=counts,
        notes=notes,
        created=datetime.now(),
        verdicts=verdicts,
        tables=tables,
        every=every,
        pictures=pictures,
        embed=lambda file: base64.b64encode(file.read_bytes()).decode(),
    )
    write_text(out / "index.html", html)
    print(
        *(f"Not in this report: {note}" for note in notes),
        f"{counts}. {out / 'index.html'}",
        sep="\n",
    )
    return (out / "index.html").absolute()


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        # a folder may have any name
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
