"""From run folders to a report: ``index.html``, ``report.md``, tables and figures."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from gcfed.report.groups import by_federation, grouped
from gcfed.report.tables import all_runs, marked, measured, read_searches, search_of, trials_table, usual, write_texts
from gcfed.report.verdict import main_measure, verdict
from gcfed.runs.folder import STATES, find_runs, shown
from gcfed.runs.measures import FORMS, parse
from gcfed.utils.checked import checked
from gcfed.utils.resolvers import ROOT

Words = str | Sequence[str]  # one, or several


class Incomplete(ValueError):
    """The report is written, but for something that was asked for."""


@checked
def write_report(
    *roots: str | Path,
    out: str | Path = ROOT / "logs" / "report",
    measures: Words | None = None,
    figures: Literal[True, False, "all"] = True,
    formats: Words | None = ("png", "pdf"),
) -> Path:
    """Tables, figures and a page of finished runs, as ``python src/report.py`` makes them; returns the page.

    Args:
        roots: folders below which runs are looked for; none: ``logs``, where runs go.
        out: folder of the report.
        measures: of the tables by federation, ``"mean:test/acc[10]"``; None: the usual ones.
        figures: whether to draw; "all": the curves of all federations, not of the first six alone.
        formats: of the figures, beside PNG.

    Raises:
        FileNotFoundError: a root is not there.
        ValueError: there is no run below the roots, or an argument that cannot be; names it.
        Incomplete: a figure cannot be drawn, no run has a measure, or a folder cannot be read; all else is written.
    """
    out, folders, asked = Path(out), [Path(root) for root in roots or [ROOT / "logs"]], _listed(measures)
    if out.is_file():
        raise ValueError(f"out={out} is a file; name a folder, which need not be there.")
    for measure in asked:
        parse(measure)  # before a thousand runs are read
    places = {run: shown(run.folder) for run in find_runs(folders)}
    inside = [(run, root.resolve()) for run in places for root in folders]
    below = [(run, run.folder.relative_to(root)) for run, root in inside if root in run.folder.parents]
    debug = {run for run, path in below if "debug" in path.parts}
    runs = [run for run in places if run not in debug]
    if not runs:
        raise ValueError(
            f"There is no run below {', '.join(map(str, folders))}: a run's folder holds config.yaml and "
            "metrics.csv. `python src/train.py` makes one; roots=[…] names other folders."
        )
    lacks = [f"the run in {places[run]} cannot be read: {run.unread}" for run in runs if run.unread]
    searches = read_searches(folders, lacks)
    trials = {run: folder for run in runs if (folder := search_of(run))}  # what a search tried is no method
    groups = grouped(run for run in runs if run not in trials)
    federations = by_federation(groups)
    verdicts = {place: found for place, members in federations.items() if (found := verdict(members))}
    details = {}
    for i, (place, found) in enumerate(verdicts.items(), start=1):
        first = [found.column.measure, *(asked or usual(found.groups))]
        details[place] = measured(found.groups, first, f"federation_{i}", place, found)
    alone = [group for group in groups if group.federation not in verdicts]
    singles = measured(
        alone, asked or [main_measure(alone), *usual(alone)], "singles", "Settings that nothing is compared with"
    )
    there = {measure for table in (*details.values(), singles) if table for measure in table.records["measure"]}
    if lost := [measure for measure in asked if measure not in there]:
        lacks.append(f"no finished run has the measures {', '.join(lost)}. {FORMS}")
    tried, every = trials_table(searches), all_runs(runs, [*groups, *grouped(trials)], places)
    tables = [table for table in (*details.values(), singles, tried, every) if table]
    for table in tables:
        table.write(out / "tables")
    pictures, notes = [], []
    if figures:
        from gcfed.report.figures import FEDERATIONS, draw, of_searches, partitions, plots  # matplotlib

        most, failed = len(federations) if figures == "all" else FEDERATIONS, dict[str, str]()
        wished = [*plots(groups, verdicts, most), *of_searches(trials, searches), *partitions(groups)]
        pictures = draw(wished, out / "figures", _listed(formats), failed)
        lacks += [f"figure {title!r}: {error}" for title, error in failed.items()]
        if most < len(federations):
            notes.append(f"Curves are drawn of the first {most} federations alone; figures=all draws those of all.")
    states = Counter(run.state for run in runs)
    of_settings = f" of {_count(len(groups), 'setting')}" if groups else ""
    counts = f"{_count(len(runs), 'run')}{of_settings}: "
    counts += ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    counts += f"; {len(trials)} are trials of searches" * bool(trials)
    title = f"Runs in {', '.join(root.resolve().name for root in folders)}"
    page = Environment(loader=PackageLoader("gcfed.report", "."), autoescape=True, undefined=StrictUndefined)
    html = page.get_template("page.html").render(
        title=title, counts=counts, lacks=lacks, notes=notes, created=datetime.now(), verdicts=verdicts,
        details=details, singles=singles, alone=alone, searches=tried, runs=every, pictures=pictures,
        places={*federations}, embed=lambda file: base64.b64encode(file.read_bytes()).decode(),
    )  # fmt: skip
    head = [f"# {title}\n", f"{counts}.\n", *(f"- Not in this report: {marked(lack, 'md')}\n" for lack in lacks)]
    for place, found in verdicts.items():
        said = " ".join([f"{found.headline} ({found.sureness}).", *found.remarks])
        head.append(marked(f"- {place}: {said}", "md"))
    text = "\n".join([*head, "", *(table.markdown for table in tables)])
    write_texts({out / "report.md": text, out / "index.html": html})
    made = f"{_count(len(tables), 'table')} and {_count(len(pictures), 'figure')}"
    print(f"{counts}. {made}, all on {out / 'index.html'}")
    if lacks:
        raise Incomplete(f"The report lacks: {'; '.join(lacks)}")
    return (out / "index.html").absolute()


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _listed(words: Words | None) -> list[str]:
    """``formats=pdf`` is as good as ``formats=[pdf]``, null as []."""
    return [words] if isinstance(words, str) else list(dict.fromkeys(words or ()))
