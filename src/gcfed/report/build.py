"""From run folders to a report: ``index.html``, ``report.md``, tables and figures."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from gcfed.report import papers
from gcfed.report.compare import Settings, compare
from gcfed.report.groups import Group, grouped
from gcfed.report.tables import MEASURES, Best, Minor, Table, all_runs, best, measured, targets
from gcfed.runs.folder import STATES, Run, find_runs, folders
from gcfed.runs.measures import FORMS, parse
from gcfed.utils.files import replacing

TRIALS = "trials.csv"
WRITTEN = ".written"  # what the last report wrote beside the page, a path a line


class Incomplete(RuntimeError):
    """The report is written, but for something that was asked for."""


def report(cfg: Mapping[str, Any]) -> Path:
    """Finds the runs, writes page, tables and figures, prints what there is; returns the page.

    Args:
        cfg: as in ``configs/report.yaml``.

    Raises:
        FileNotFoundError: a root or a paper's table is not there.
        ValueError: there is no run below the roots, or a key has a value that cannot be; names it.
        Incomplete: a figure cannot be drawn or no run has a measure; all else is written.
    """
    out, roots = Path(cfg["out"]), [Path(root) for root in _listed(cfg["roots"])]
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file; name a folder, which need not be there.")
    measures = None if cfg["measures"] is None else list(dict.fromkeys(_listed(cfg["measures"])))
    for measure in measures or ():
        parse(measure)  # before a thousand runs are read
    chosen = [papers.load(name) for name in (papers.names() if cfg["papers"] is None else _listed(cfg["papers"]))]
    runs = [run for run in find_runs(roots) if not _is_debug(run, roots)]
    if not runs:
        raise ValueError(
            f"There is no run below {', '.join(map(str, roots)) or 'roots=[]'}: a run's folder holds config.yaml and "
            "metrics.csv. `python src/train.py` makes one; roots=[…] names other folders."
        )
    groups, lacks = grouped(runs), []
    settings = Settings(groups)
    compared = [table for paper in chosen for table in compare(paper, groups, settings, empty=cfg["empty"])]
    by_federation: dict[str, Table] = {}
    for i, place in enumerate(dict.fromkeys(group.federation for group in groups), start=1):
        here = [group for group in groups if group.federation == place]
        if table := measured(here, measures or list(MEASURES), f"federation_{i}", place, federation=False):
            by_federation[place] = table
    known = {measure for table in by_federation.values() for measure in table.records["measure"]}
    if lost := [measure for measure in measures or () if measure not in known]:
        lacks.append(f"no finished run has the measures {', '.join(lost)}. {FORMS}")
    across = [table for table in (targets(groups), *_searches(roots)) if table]
    tables = {"first": best(groups), "federations": by_federation, "papers": compared, "across": across,
              "runs": all_runs(runs, groups, {run.folder: _place(run, roots) for run in runs})}  # fmt: skip
    flat = [t for t in (tables["first"], *by_federation.values(), *compared, *across, tables["runs"]) if t]

    _remove_last(out)
    for table in flat:
        table.write(out / "tables")
    pictures = []
    if cfg["figures"]:
        from gcfed.report.figures import draw  # matplotlib and seaborn

        failed: dict[str, str] = {}
        pictures = draw(groups, out / "figures", _listed(cfg["formats"]), failed)
        lacks += [f"figure {title!r}: {error}" for title, error in failed.items()]
    title = f"Runs in {', '.join(root.name or str(root) for root in roots)}"
    counts = _counts(runs, groups)
    _write(out / "report.md", "\n".join([f"# {title}\n", f"{counts}.\n", *(f"- Not in this report: {lack}\n" for lack in lacks),
                                         *(table.markdown() for table in flat)]))  # fmt: skip
    pages = Environment(loader=PackageLoader("gcfed.report", "."), autoescape=True, undefined=StrictUndefined)
    pages.tests |= {"best": lambda cell: isinstance(cell, Best), "minor": lambda cell: isinstance(cell, Minor)}
    shown = {"title": title, "counts": counts, "lacks": lacks, "tables": tables, "pictures": pictures}
    page = pages.get_template("page.html").render(**shown, created=datetime.now(), embed=_embedded)
    _write(out / "index.html", page)
    _write(out / WRITTEN, "\n".join(str(p.relative_to(out)) for f in ("tables", "figures") for p in sorted((out / f).glob("*"))))
    print(f"{counts}. Tables: {len(flat)}, figures: {len(pictures)}. Open {out / 'index.html'}")
    if lacks:
        raise Incomplete(f"The report lacks: {'; '.join(lacks)}")
    return out / "index.html"


def _listed(value: Any) -> list[str]:
    """``roots=logs`` is as good as ``roots=[logs]``, null as []."""
    return [value] if isinstance(value, str) else [str(item) for item in value or ()]


def _place(run: Run, roots: Sequence[Path]) -> str:
    """The run's folder below the root that it was found in, without the path of this machine."""
    for root in roots:
        if run.folder.is_relative_to(root.resolve()) and run.folder != root.resolve():
            below = run.folder.relative_to(root.resolve()).as_posix()
            return f"{root.name}/{below}" if len(roots) > 1 else below
    return run.folder.name  # the root itself, or through a link that leads out of it


def _is_debug(run: Run, roots: Sequence[Path]) -> bool:
    """Whether the run was made with ``debug=…`` and lies in a folder of such runs below a root."""
    return _place(run, roots).startswith("debug/")


def _searches(roots: Sequence[Path]) -> list[Table]:
    """The trials of each hyperparameter search."""
    tables = []
    for folder in sorted({folder.resolve() for folder, files in folders(roots) if TRIALS in files}):
        trials = pd.read_csv(folder / TRIALS)
        frame = trials.drop(columns="folder", errors="ignore").astype(object)
        frame = frame.where(trials.notna(), "–").map(lambda cell: f"{cell:.5g}" if isinstance(cell, float) else str(cell))
        notes = ("The best one stands in optimization_results.yaml.",)
        tables.append(Table(f"trials_{folder.name}", f"Search {folder.name}", frame, trials, notes))
    return tables


def _counts(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    states = Counter(run.state for run in runs)
    named = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    return f"{len(runs)} runs of {len(groups)} settings: {named}"


def _remove_last(out: Path) -> None:
    """The files that the last report wrote here; others stay."""
    if (out / WRITTEN).is_file():
        for line in (out / WRITTEN).read_text().splitlines():
            (out / line).unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _embedded(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
