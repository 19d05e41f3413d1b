"""Tables for people (Markdown, LaTeX, the page) and for programs (CSV): methods by measures, every run, searches."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from gcfed.report.groups import SYMBOLS, Group, by_federation, described, in_few_digits, unlike
from gcfed.report.verdict import Verdict
from gcfed.runs.folder import FINISHED, RESULTS, STATES, STORAGE, TRIALS, Run, folders, shown
from gcfed.runs.measures import MEASURES, describe, parse, states, value
from gcfed.runs.reading import FINITE, LABEL, NODES, ROUNDS, SIZE, naming, read_text, read_yaml, short
from gcfed.utils.checked import fits
from gcfed.utils.files import replacing

_MARKS = re.compile(r"([\\`*|]|(?<=])\()")  # of Markdown, in a line of text
_LATEX = {character: rf"\{character}" for character in "&%$#_{}"}  # and "[", or it would be the length of a \\
_LATEX |= {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",
}  # no \\[length]
_FLOAT = r"""%% For LuaLaTeX or XeLaTeX, with booktabs, graphicx and a font that has Greek letters.
\begin{table}
\centering\small
\caption{%s}\label{tab:%s}
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%%
%s}
%s
\end{table}
"""
#: A cell's text in md, tex or html: how it is escaped and set in bold.
_MARKUP = {
    "md": (lambda text: _MARKS.sub(r"\\\1", " ".join(text.split())).replace("<", "&lt;"), "**{}**"),
    "tex": (lambda text: text.translate(str.maketrans(_LATEX)), r"\textbf{{{}}}"),
    "html": (html.escape, "<strong>{}</strong>"),
}
#: Of each run: measure and form.
_RUN = {
    "final": ("last:test/acc", "{:.2%}"), "best": ("max:test/acc", "{:.2%}"),
    "error": ("last:test/relative_error", "{:.3g}"), "seconds": ("sum:time/round_s", "{:.0f}"),
}  # fmt: skip
NOTE = (
    "Mean (sample standard deviation) over seeds, the best in bold. [n of m]: of n seeds, where there should be m; †: "
    "a run diverged, and is in the mean unless its value is not finite; +: a run that did not reach the target counts "
    "with all its rounds or bytes, so that the mean is a lower bound."
)
EQUAL = (
    " Methods are ranked over equal seeds, their differences taken seed by seed, with a 95 % interval (Student's t) "
    "that knows nothing of the other methods."
)


class Best(str):
    """A cell in bold."""


def write_texts(texts: Mapping[Path, str]) -> None:
    """Each file whole or not at all."""
    for path, text in texts.items():
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")  # a folder's odd name


def marked(text: str, kind: str) -> str:
    """The text of a cell in ``md``, ``tex`` or ``html``."""
    escape, bold = _MARKUP[kind]
    form = bold if isinstance(text, Best) else "{}"
    return form.format(escape(text))


@dataclass(frozen=True)
class Table:
    """``frame`` is of texts; ``records``, a line a number, are for programs."""

    name: str  # of its files
    title: str
    frame: pd.DataFrame
    records: pd.DataFrame
    notes: Sequence[str] = ()

    def write(self, folder: Path) -> None:
        """``<name>.md``, ``.tex`` (a float, not wider than the text) and ``.csv``."""
        title, *notes = (marked(text, "tex") for text in (self.title, *self.notes))
        tabular = self._marked("tex").to_latex(index=False, column_format=f"l{'r' * (self.frame.shape[1] - 1)}")
        lines = "\n".join(rf"\par\smallskip{{\footnotesize {note}\par}}" for note in notes)
        latex = _FLOAT % (title, self.name, tabular.rstrip(), lines)
        texts = {"md": self.markdown, "tex": latex, "csv": self.records.to_csv(index=False)}
        write_texts({folder / f"{self.name}.{suffix}": text for suffix, text in texts.items()})

    def _marked(self, kind: str, columns: int | None = None) -> pd.DataFrame:
        return self.frame.iloc[:, :columns].map(marked, kind=kind).rename(columns=partial(marked, kind=kind))

    @cached_property
    def markdown(self) -> str:
        title, *notes = (marked(text, "md") for text in (self.title, *self.notes))
        lines = self._marked("md").to_markdown(index=False, disable_numparse=True)
        return "\n\n".join([f"## {title}", lines, *notes]) + "\n"

    def html(self, columns: int | None = None) -> str:
        """The ``<table>``, or its first columns, without notes."""
        return self._marked("html", columns).to_html(index=False, escape=False, border=0)


def in_bold(lines: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """The column ``text``, in bold where ``rank`` is the best of its group, ties too.

    ``higher`` says which is the best. Who has no rank takes no part; one number alone is not best, nor are equal ones.
    """
    ranks = lines["rank"].astype(float).where(lines["higher"].notna())
    ranks *= lines["higher"].map({True: 1, False: -1})
    groups = ranks.groupby([lines[key] for key in by], sort=False)
    most = groups.transform("max")
    is_best = (ranks == most) & (most > groups.transform("min"))
    texts = [Best(text) if best else text for text, best in zip(lines["text"], is_best, strict=True)]
    return pd.Series(texts, lines.index, dtype=object)


def usual(groups: Sequence[Group]) -> list[str]:
    """What is shown beside the measure that decides, unless others are asked for: rounds and bytes, too, to each target
    that a run set itself and one of them reached."""
    runs = [run for group in groups for run in group.runs if run.has_ended]
    asked = sorted({float(target) for run in runs for target in run.get("targets") or ()})
    reached = [t for t in asked if any(value(run, f"rounds:test/acc>={t:g}") is not None for run in runs)]
    return [*MEASURES, *(f"{cost}{t:g}" for cost in ("rounds:test/acc>=", "bytes_to_target/") for t in reached)]


def measured(
    groups: Sequence[Group], measures: Iterable[str], name: str, title: str, verdict: Verdict | None = None
) -> Table | None:
    """A row a group, a column a measure; None where no run has any. Each federation's best is in bold.

    With a verdict over the seeds that it is of, and with the differences in its measure.
    """
    places, notes = pd.Series([group.federation for group in groups], dtype=object), [NOTE + EQUAL * bool(verdict)]
    texts: dict[str, Sequence[str]] = {"method": [group.method for group in groups]}
    records: list[dict[str, Any]] = []
    for column in map(describe, dict.fromkeys(measures)):
        samples = [verdict.sample(i, column) if verdict else column.of(group.runs) for i, group in enumerate(groups)]
        if not any(s.values for s in samples):
            continue
        wanted = pd.Series([len(s.values) for s in samples]).groupby(places).transform("max")
        cells = [  # why a run has no number stands in the first column alone
            column.cell(group.runs, s, n) if group.ended or not records else "–"
            for group, s, n in zip(groups, samples, wanted, strict=True)
        ]
        ranks = [column.rank(s) if verdict is None or i < verdict.ranked else None for i, s in enumerate(samples)]
        cells_of = {"federation": places, "text": cells, "rank": ranks, "higher": column.higher}
        texts[column.heading] = [*in_bold(pd.DataFrame(cells_of, dtype=object), ["federation"])]
        decides = verdict if verdict and column == verdict.column else None
        against = [decides.against(i) if decides else ({}, "") for i in range(len(groups))]
        for group, s, (apart, _) in zip(groups, samples, against, strict=True):
            about = {"federation": group.federation, "method": group.method, "setting": group.runs[0].setting}
            about |= {"measure": column.measure, "unit": column.unit, **s.record, **apart}
            records += [about] * bool(s.values)
        if decides:
            texts["seeds"] = [str(len(s.values)) for s in samples]
            texts[f"against {groups[decides.reference].method}"] = [text for _, text in against]
    if not records:
        return None
    if places.nunique() > 1:
        texts = {"federation": [*places.mask(places == places.shift(), "")], **texts}
    else:
        told = [key for key in SYMBOLS if key.startswith(("client.", "gc.", "methods."))]  # and not by the federation
        own = [group.runs[0].leaves for group in groups]
        values = {key: {*in_few_digits(pd.Series([str(one.get(key, "")) for one in own]))} for key in told}
        common = [described(key, *found) for key, found in values.items() if len(found) == 1 and any(found)]
        every = groups[0].runs[0].get("eval_every") or 1  # a federation's are equal
        common += [f"tested every {every} rounds"] * (every > 1)
        notes[0] += f" All: {', '.join(common)}." * bool(common)
    if lost := [f"{group.method} ({group.federation}): {text}" for group in groups if (text := states(group.runs))]:
        notes.append(f"In no mean: {'; '.join(lost)}.")
    if again := [f"{group.method}, seed {run.seed}: {run.folder.name}" for group in groups for run in group.repeated]:
        notes.append(
            f"Further runs of a seed; the one that measured the most counts, of equals the last: {'; '.join(again)}."
        )
    for place, members in by_federation(groups).items():
        if differ := unlike(members):
            notes.append(f"Local training is not alike{f' ({place})' * (places.nunique() > 1)}: {'; '.join(differ)}.")
    early = [(g.method, run) for g in groups for run in g.runs if run.state == FINISHED and run.rounds < run.planned]
    if early:
        of = [f"{method}, seed {run.seed}: {run.rounds} of {run.planned} rounds" for method, run in early]
        notes.append(f"In the mean, though stopped early: {'; '.join(of)}.")
    lines = pd.DataFrame(records, dtype=object).drop(columns="n", errors="ignore")  # seeds has them
    return Table(name, title, pd.DataFrame(texts, dtype=object), lines, notes)


def all_runs(runs: Sequence[Run], groups: Sequence[Group], places: Mapping[Run, str]) -> Table:
    """Every run with its place, those that did not end well first."""
    names = {run: (group.method, group.federation) for group in groups for run in (*group.runs, *group.repeated)}
    lines = []
    for run in sorted(runs, key=lambda run: -STATES.index(run.state)):
        method, federation = names.get(run, ("?", "?"))
        about = {"state": run.state, "method": method, "federation": federation, "seed": run.seed}
        about |= {"rounds": f"{run.rounds} of {run.planned}"}
        numbers = {name: value(run, measure) for name, (measure, _) in _RUN.items()}
        lines.append({**about, **numbers, "folder": places[run], "note": run.note})
    records = pd.DataFrame(lines, dtype=object)
    frame = records.copy()
    for name, (_, form) in _RUN.items():
        frame[name] = ["–" if number is None else form.format(number) for number in records[name]]
    frame = frame.loc[:, (frame != "–").any()].astype(str)
    return Table("runs", "All runs", frame, records, ["Seconds are those of all rounds together."])


class Search(NamedTuple):
    """``metric`` is what trials are compared by; "" where none has a value, or an older version did not write it."""

    trials: pd.DataFrame  # a row a trial
    metric: str
    higher: bool | None  # whether more is better; None without a metric


def read_searches(roots: Sequence[Path], lacks: list[str]) -> dict[Path, Search]:
    """The searches below the roots, by folder; ``lacks`` takes those that cannot be read."""
    searches = {}
    for folder in sorted({folder.resolve() for folder, files in folders(roots) if TRIALS in files}):
        try:
            searches[folder] = _read(folder / TRIALS, folder / RESULTS)
        except ValueError as error:
            lacks.append(f"the search in {shown(folder)} cannot be read: {error}")
    return searches


def _read(path: Path, results: Path) -> Search:
    """Raises ValueError, which names the file, where a number, a value or a metric is none."""
    with naming(path):
        trials = pd.read_csv(io.StringIO(read_text(path, SIZE)))
        if lack := {"number", "value"} - {*trials}:
            raise ValueError(f"it has no column {min(lack)}")
        trials[["number", "value"]] = trials[["number", "value"]].astype(float)
        odd = ~(trials["number"].between(0, ROUNDS) & (trials["value"].isna() | (trials["value"].abs() < FINITE)))
        if odd.any() or len(trials) > NODES or len(trials.columns) > LABEL:
            raise ValueError("its numbers are not finite, or it is too large")
    found = read_yaml(results) if results.exists() else {}
    with naming(results):
        metric = found.get("metric", "")
        short("metric", metric)
        if "metric" in found:
            parse(metric or "")
        direction = fits("direction", found.get("direction"), Literal["maximize", "minimize"] | None)
    return Search(trials.astype({"number": int}), metric, direction != "minimize" if metric else None)


def search_of(run: Run) -> Path | None:
    """The folder of the search that the run is a trial of, or one of a trial's seeds."""
    above = run.folder.parents[:2]
    return next((folder for folder in above if (folder / TRIALS).exists() or (folder / STORAGE).exists()), None)


def trials_table(searches: Mapping[Path, Search]) -> Table | None:
    """The trials of all searches, one below the other, the best value of each whose direction is known in bold."""
    parts = [
        trials.astype(object).assign(search=shown(folder), metric=metric, higher=higher, rank=trials["value"])
        for folder, (trials, metric, higher) in searches.items()
        if len(trials)
    ]
    if not parts:
        return None
    lines = pd.concat(parts, ignore_index=True)
    texts = lines.drop(columns=["folder", "metric", "higher", "rank", "search"], errors="ignore").fillna("–")
    texts = texts.map(lambda cell: f"{cell:.5g}" if isinstance(cell, float) else str(cell)).astype(object)
    texts["value"] = in_bold(lines.assign(text=texts["value"]), ["search"])
    texts.insert(0, "search", lines["search"].mask(lines["search"] == lines["search"].shift(), ""))
    note = "Each search's best value in bold; its optimization_results.yaml has it with all its digits."
    return Table("searches", "Searches", texts, lines.drop(columns=["higher", "rank"]), [note])
