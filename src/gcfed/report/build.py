"""From run folders to a report: ``index.html``, ``report.md``, tables and figures."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gcfed.report.compare import Settings, compare
from gcfed.report.groups import grouped
from gcfed.report.searches import read_searches, trials_table
from gcfed.report.tables import MEASURES, Table, all_runs, best, by_federation, marked, measured, targets, write_texts
from gcfed.runs.folder import STATES, find_runs, shown
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
    groups = grouped(runs)
    first, every = best(groups), all_runs(runs, groups, places)
    federations: dict[str, Table] = {}
    for place, members in by_federation(groups).items():
        if table := measured(members, measures or list(MEASURES), f"federation_{len(federations) + 1}", place):
            federations[place] = table
    settings = Settings(groups)
    others = [table for paper in chosen for table in compare(paper, groups, settings, empty=cfg["empty"])]
    lacks = [f"the run in {places[run]} cannot be read: {run.unread}" for run in runs if run.unread]
    searches = read_searches(roots, lacks)
    others += [table for table in (targets(groups), trials_table(searches)) if table]
    tables = [*([first] if first else []), *federations.values(), *others, every]
    lost = [m for m in measures if not any(m in set(table.records["measure"]) for table in federations.values())]
    lacks += [f"no finished run has the measures {', '.join(lost)}. {FORMS}"] if lost else []
    for table in tables:
        table.write(out / "tables")
    pictures = []
    if cfg["figures"]:
        from gcfed.report.figures import draw  # matplotlib and seaborn

        failed: dict[str, str] = {}
        pictures = draw(groups, searches, out / "figures", _listed(cfg["formats"]), failed)
        lacks += [f"figure {title!r}: {error}" for title, error in failed.items()]
    states = Counter(run.state for run in runs)
    counts = f"{len(runs)} runs of {len(groups)} settings: "
    counts += ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    title = f"Runs in {', '.join(root.resolve().name for root in roots)}"
    head = [f"# {title}\n", f"{counts}.\n", *(f"- Not in this report: {marked(lack, 'md')}\n" for lack in lacks)]
    page = Environment(loader=PackageLoader("gcfed.report", "."), autoescape=True, undefined=StrictUndefined)
    parts = {"first": first, "federations": federations, "others": others, "runs": every, "pictures": pictures}
    words = {"title": title, "counts": counts, "lacks": lacks, "created": datetime.now()}
    words["embed"] = lambda path: f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    texts = {
        out / "report.md": "\n".join([*head, *(table.markdown() for table in tables)]),
        out / "index.html": page.get_template("page.html").render(**parts, **words),
    }
    write_texts(texts)
    print(f"{counts}. {len(tables)} tables and {len(pictures)} figures, all on {out / 'index.html'}")
    if lacks:
        raise Incomplete(f"The report lacks: {'; '.join(lacks)}")
    return out / "index.html"


def _is_debug(folder: Path, root: Path) -> bool:
    return folder.is_relative_to(root) and "debug" in folder.relative_to(root).parts


def _listed(value: Any) -> list[str]:
    """``roots=logs`` is as good as ``roots=[logs]``, null as []."""
    return [value] if isinstance(value, str) else list(dict.fromkeys(map(str, value or ())))
