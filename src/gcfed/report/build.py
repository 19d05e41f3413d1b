"""From run folders to a report: ``index.html``, ``report.md``, tables and figures."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gcfed.report.compare import Settings, compare
from gcfed.report.groups import Group, by_federation, grouped
from gcfed.report.results import all_runs, measured, usual
from gcfed.report.searches import read_searches, search_of, trials_table
from gcfed.report.tables import Table, marked, write_texts
from gcfed.report.verdict import verdict
from gcfed.runs.folder import STATES, Run, find_runs, shown
from gcfed.runs.measures import FORMS, parse
from gcfed.study import papers


class Incomplete(ValueError):
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
    out, roots, measures = Path(cfg["out"]), [Path(root) for root in _listed(cfg["roots"])], _listed(cfg["measures"])
    if out.is_file():
        raise ValueError(f"out={out} is a file; name a folder, which need not be there.")
    if cfg["figures"] not in (True, False, "all"):
        raise ValueError(f"figures={cfg['figures']} must be true, false or all.")
    for measure in measures:
        parse(measure)  # before a thousand runs are read
    chosen = [papers.load(name) for name in (papers.names() if cfg["papers"] is None else _listed(cfg["papers"]))]
    places = {run: shown(run.folder) for run in find_runs(roots)}
    runs = [run for run in places if not any(_is_debug(run.folder, root.resolve()) for root in roots)]
    if not runs:
        raise ValueError(
            f"There is no run below {', '.join(map(str, roots)) or 'roots=[]'}: a run's folder holds config.yaml and "
            "metrics.csv. `python src/train.py` makes one; roots=[…] names other folders."
        )
    lacks = [f"the run in {places[run]} cannot be read: {run.unread}" for run in runs if run.unread]
    searches = read_searches(roots, lacks)
    trials = {run: folder for run in runs if (folder := search_of(run))}  # what a search tried is no method
    groups = grouped(run for run in runs if run not in trials)
    federations = by_federation(groups)
    verdicts = {place: found for place, members in federations.items() if (found := verdict(members))}
    details: dict[str, Table | None] = {}
    for place, found in verdicts.items():
        shown_first = [found.column.measure, *(measures or usual(found.groups))]
        details[place] = measured(found.groups, shown_first, f"federation_{len(details) + 1}", place, found)
    alone = [group for group in groups if group.federation not in verdicts]
    singles = measured(alone, measures or usual(alone), "singles", "Settings that nothing is compared with")
    there = {measure for table in (*details.values(), singles) if table for measure in table.records["measure"]}
    if lost := [measure for measure in measures if measure not in there]:
        lacks.append(f"no finished run has the measures {', '.join(lost)}. {FORMS}")
    settings = Settings(groups)
    others = [table for paper in chosen for table in compare(paper, groups, settings, empty=cfg["empty"])]
    tried, every = trials_table(searches), all_runs(runs, [*groups, *grouped(trials)], places)
    tables = [table for table in (*details.values(), singles, *others, tried, every) if table]
    for table in tables:
        table.write(out / "tables")
    pictures, notes = [], []
    if cfg["figures"]:
        from gcfed.report import figures  # matplotlib

        failed: dict[str, str] = {}
        most = len(federations) if cfg["figures"] == "all" else figures.FEDERATIONS
        plots = [*figures.plots(groups, verdicts, most), *figures.of_searches(trials, searches)]
        pictures = figures.draw(plots, groups, out / "figures", _listed(cfg["formats"]), failed)
        lacks += [f"figure {title!r}: {error}" for title, error in failed.items()]
        if most < len(federations):
            notes.append(f"Curves are drawn of the first {most} federations alone; figures=all draws those of all.")
    counts = _counts(runs, groups, trials)
    title = f"Runs in {', '.join(root.resolve().name for root in roots)}"
    page = Environment(loader=PackageLoader("gcfed.report", "."), autoescape=True, undefined=StrictUndefined)
    words = {"title": title, "counts": counts, "lacks": lacks, "notes": notes, "created": datetime.now()}
    words |= {"verdicts": verdicts, "details": details, "singles": singles, "alone": alone, "papers": others}
    words |= {"searches": tried, "runs": every, "pictures": pictures, "places": {*federations}, "embed": _embedded}
    head = [f"# {title}\n", f"{counts}.\n", *(f"- Not in this report: {marked(lack, 'md')}\n" for lack in lacks)]
    for place, found in verdicts.items():
        said = " ".join([f"{found.headline} ({found.sureness}).", *found.remarks])
        head.append(marked(f"- {place}: {said}", "md"))
    texts = {
        out / "report.md": "\n".join([*head, "", *(table.markdown for table in tables)]),
        out / "index.html": page.get_template("page.html").render(**words),
    }
    write_texts(texts)
    made = f"{_count(len(tables), 'table')} and {_count(len(pictures), 'figure')}"
    print(f"{counts}. {made}, all on {out / 'index.html'}")
    if lacks:
        raise Incomplete(f"The report lacks: {'; '.join(lacks)}")
    return out / "index.html"


def _embedded(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _counts(runs: Sequence[Run], groups: Sequence[Group], trials: Mapping[Run, Path]) -> str:
    states = Counter(run.state for run in runs)
    ended = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    of = f" of {_count(len(groups), 'setting')}" if groups else ""
    return f"{_count(len(runs), 'run')}{of}: {ended}" + f"; {len(trials)} are trials of searches" * bool(trials)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _is_debug(folder: Path, root: Path) -> bool:
    return folder.is_relative_to(root) and "debug" in folder.relative_to(root).parts


def _listed(value: Any) -> list[str]:
    """``roots=logs`` is as good as ``roots=[logs]``, null as []."""
    return [value] if isinstance(value, str) else list(dict.fromkeys(map(str, value or ())))
