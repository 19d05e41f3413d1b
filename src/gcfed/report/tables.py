"""Tables for people (Markdown, LaTeX, the page) and for programs (CSV), and those of any runs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from gcfed.report.groups import SYMBOLS, Group, Sample, described, paired, sample
from gcfed.runs.folder import STATES, UNFINISHED, Run
from gcfed.runs.measures import higher_is_better, parse, value
from gcfed.utils.files import replacing


class Unit(NamedTuple):
    """``label`` stands behind a column's name, our numbers are multiplied by ``factor``, ``digits`` are Python's."""

    label: str
    factor: float
    digits: str

    def text(self, number: float) -> str:
        """The number, already in this unit, as tables show it."""
        digits = ".0f" if "g" in self.digits and 1000 <= abs(number) < 1e9 else self.digits
        return f"{number:{digits}}".removesuffix(".0")

    def rank(self, s: Sample) -> float | None:
        """The mean as it is shown, by which the best is marked; None where there is none, or a bound."""
        return None if s.mean is None or s.bound else float(self.text(s.mean))

    def heading(self, title: str) -> str:
        return f"{title} ({self.label})" if self.label not in ("", "rounds") else title


UNITS = {
    "percent": Unit("%", 100.0, ".2f"),
    "points": Unit("%", 100.0, ".3g"),
    "rounds": Unit("rounds", 1.0, ".1f"),
    "seconds": Unit("s", 1.0, ".3g"),
    "MB": Unit("MB", 1e-6, ".4g"),
    "1e-3": Unit("10⁻³", 1e3, ".3f"),
    "none": Unit("", 1.0, ".4g"),
}
#: The measures that are shown unless others are asked for, and their titles.
MEASURES = {
    "mean:test/acc[10]": "accuracy, last 10 rounds",
    "max:test/acc": "best accuracy",
    "last:test/acc": "accuracy at the end",
    "last:test/relative_error": "relative error at the end",
    "last:test/loss": "test loss at the end",
    "sum:comm/down_bytes": "sent to clients",
    "sum:comm/up_bytes": "sent by clients",
    "time/round_s": "a round, median",
}
#: The unit of what the column of a measure holds; the first that fits.
_COLUMNS = {
    "_std": "percent", "personal/": "percent", "comm/": "MB", "time/": "seconds", "bytes": "MB", "acc": "percent",
    "seconds": "seconds", "": "none",
}  # fmt: skip
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
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}"}  # no \\[length]
_LATEX |= {character: rf"\{character}" for character in "&%$#_{}"}
_FLOAT = r"""%% For LuaLaTeX or XeLaTeX, with booktabs, graphicx and a font that has Greek letters.
\begin{table}
\centering\small
\caption{%s}\label{tab:%s}
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%%
%s}
%s
\end{table}
"""
#: A cell's text in md, tex or html: how it is escaped, set in bold, and shown as the first of a minor line.
_MARKUP = {
    "md": (
        lambda text: re.sub(r"([\\`*|]|(?<=])\()", r"\\\1", " ".join(text.split())).replace("<", "&lt;"),
        "**{}**",
        "*{}*",
    ),
    "tex": (lambda text: text.translate(str.maketrans(_LATEX)), r"\textbf{{{}}}", r"\quad {}"),
    "html": (html.escape, "<strong>{}</strong>", "<small>{}</small>"),
}


class Best(str):
    """A cell in bold."""


class Minor(str):
    """The first cell of a line that explains the line above it."""


def write_texts(texts: Mapping[Path, str]) -> None:
    """Each file whole or not at all."""
    for path, text in texts.items():
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")  # a folder's odd name


def marked(text: str, kind: str) -> str:
    """The text of a cell in ``md``, ``tex`` or ``html``."""
    escape, bold, minor = _MARKUP[kind]
    form = bold if isinstance(text, Best) else minor if isinstance(text, Minor) else "{}"
    return form.format(escape(text))


@dataclass(frozen=True)
class Table:
    """``frame`` is of texts; ``records``, a line a number, are for programs."""

    name: str  # of its files
    title: str
    frame: pd.DataFrame
    records: pd.DataFrame
    notes: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """``<name>.md``, ``.tex`` and ``.csv``."""
        texts = {"md": self.markdown(), "tex": self.latex(), "csv": self.records.to_csv(index=False)}
        write_texts({folder / f"{self.name}.{suffix}": text for suffix, text in texts.items()})

    def _marked(self, kind: str) -> pd.DataFrame:
        return self.frame.map(marked, kind=kind).rename(columns=partial(marked, kind=kind))

    def markdown(self) -> str:
        title, *notes = (marked(text, "md") for text in (self.title, *self.notes))
        lines = self._marked("md").to_markdown(index=False, disable_numparse=True)
        return "\n\n".join([f"## {title}", lines, *notes]) + "\n"

    def latex(self) -> str:
        """A float, not wider than the text."""
        title, *notes = (marked(text, "tex") for text in (self.title, *self.notes))
        columns = "l" + "r" * (len(self.frame.columns) - 1)
        body = self._marked("tex").to_latex(index=False, column_format=columns).strip()
        return _FLOAT % (title, self.name, body, "\n".join(rf"\par\smallskip{{\footnotesize {n}\par}}" for n in notes))

    def html(self) -> str:
        """The ``<table>``, without notes."""
        return self._marked("html").to_html(index=False, escape=False, border=0)


def mark_best(cells: Iterable[str], numbers: Iterable[Any], higher_is_better: bool | None) -> list[str]:
    """The cells with the best of their numbers in bold, ties too. None takes no part; one number alone is not best."""
    known = {number for number in numbers if pd.notna(number)}
    if higher_is_better is None or len(known) < 2:
        return list(cells)
    best = max(known) if higher_is_better else min(known)
    return [Best(cell) if number == best else cell for cell, number in zip(cells, numbers, strict=True)]


def mean_text(s: Sample, unit: Unit, wanted: int) -> str:
    """``61.20 (0.80) [2 of 3] †``: mean, deviation, seeds where there should be more, diverged runs; or why none."""
    if s.mean is None:
        return f"diverged at seed {', '.join(map(str, s.diverged))}" if s.diverged else states(s.others) or "–"
    std = "" if s.std is None else f" ({unit.text(s.std)})"
    count = f" [{len(s.values)} of {wanted}]" if len(s.values) < wanted else ""
    return f"{unit.text(s.mean)}{'+' * s.bound}{std}{count}{' †' * bool(s.diverged)}"


def states(runs: Iterable[Run]) -> str:
    """``failed at seed 2, 50 of 800 rounds at seed 3``, of runs that have not come to their end."""
    lost = [(run, f"{run.rounds} of {run.planned} rounds" if run.state == UNFINISHED else run.state) for run in runs]
    return ", ".join(f"{state} at seed {run.seed}" for run, state in lost if not run.has_ended)


def describe(measure: str) -> tuple[str, Unit, bool | None]:
    """Title, unit and whether more is better, of any measure."""
    parts = parse(measure)
    if parts.is_target:
        goal = f"{100 * parts.number:g} %" if "acc" in parts.column else f"{parts.number:g}"
        of = f" of {parts.column}" * (parts.column != "test/acc") + f", mean of {parts.window}" * (parts.window > 1)
        return f"rounds to {goal}{of}", UNITS["rounds"], False
    title = MEASURES.get(measure, measure)
    if match := re.fullmatch(r"(\w+)_to_target/([\d.]+)", measure):
        title = f"{match[1].replace('_', ' ')} to {100 * float(match[2]):g} %"
    unit = next(unit for part, unit in _COLUMNS.items() if part in parts.column)
    return title, UNITS[unit], higher_is_better(measure)


def main_measure(groups: Sequence[Group]) -> str:
    """What the runs are judged by: accuracy, else the relative error, else the loss."""
    wanted = ("mean:test/acc[10]", "last:test/relative_error", "last:test/loss")
    columns = {name for group in groups for run in group.runs for name in run.metrics}
    return next((measure for measure in wanted if parse(measure).column in columns), wanted[-1])


def by_federation(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each federation; they come in its order."""
    return {place: list(members) for place, members in groupby(groups, key=lambda group: group.federation)}


def measured(groups: Sequence[Group], measures: Sequence[str], name: str, title: str) -> Table | None:
    """A row a group, a column a measure; None where no run has any. Each federation's best is in bold."""
    places = by_federation(groups)
    firsts = [place if i == 0 else "" for place, members in places.items() for i in range(len(members))]
    columns = {"federation": firsts} if len(places) > 1 else {}
    columns["method"] = [group.method for group in groups]
    records: list[dict[str, Any]] = []
    for measure in measures:
        title_of_measure, unit, higher = describe(measure)
        samples = {group: sample(group, measure, unit.factor) for group in groups}
        if all(s.mean is None for s in samples.values()):
            continue
        cells: list[str] = []
        for members in places.values():
            most = max(len(samples[group].values) for group in members)
            # Why a run has no number stands in the first measure's column only.
            texts = [mean_text(samples[g], unit, most) if g.has_ended or not records else "–" for g in members]
            cells += mark_best(texts, [unit.rank(samples[group]) for group in members], higher)
        columns[unit.heading(title_of_measure)] = cells
        for group, s in samples.items():
            about = {"federation": group.federation, "method": group.method, "setting": group.setting}
            records += [{**about, "measure": measure, "unit": unit.label, **s.record}] if s.mean is not None else []
    if not records:
        return None
    frame, notes = pd.DataFrame(columns, dtype=object), [NOTE]
    if len(places) == 1:
        values = {key: {str(group.values.get(key, "")) for group in groups} for key in SYMBOLS}
        common = [described(key, *texts) for key, texts in values.items() if len(texts) == 1 and any(texts)]
        notes[0] += f" All: {', '.join(common)}." * bool(common)
    if lost := [f"{group.label}: {text}" for group in groups if (text := states(group.runs))]:
        notes.append(f"In no mean: {'; '.join(lost)}.")
    if again := [f"{group.method}, seed {run.seed}: {run.folder.name}" for group in groups for run in group.repeated]:
        notes.append(
            f"Further runs of a seed; the one that measured the most counts, of equals the last: {'; '.join(again)}."
        )
    return Table(name, title, frame, pd.DataFrame(records), tuple(notes))


def targets(groups: Sequence[Group]) -> Table | None:
    """Rounds and bytes to each of the runs' own target accuracies that one of them reached."""
    runs = [run for group in groups for run in group.runs if run.has_ended]
    asked = sorted({float(target) for run in runs for target in run.get("targets") or ()})
    reached = [t for t in asked if any(value(run, f"rounds:test/acc>={t:g}") is not None for run in runs)]
    measures = [f"rounds:test/acc>={t:g}" for t in reached] + [f"bytes_to_target/{t:g}" for t in reached]
    known = [g for g in groups if any(value(r, measure) is not None for r in g.runs for measure in measures[:1])]
    places = {group.federation for group in known}  # with those of its methods that reached none
    return measured(
        [g for g in groups if g.federation in places], measures, "targets", "Rounds and bytes to a target accuracy"
    )


def best(groups: Sequence[Group]) -> Table | None:
    """The best method of each federation, and the next one."""
    rows, records = [], []
    for place, members in by_federation(groups).items():
        heading, unit, higher = describe(main := main_measure(members))
        results = [(s.mean, g.method, s) for g in members if (s := sample(g, main, unit.factor)).mean is not None]
        results.sort(key=lambda result: result[0], reverse=bool(higher))
        if not results:
            continue
        most = max(len(s.values) for *_, s in results)
        texts = [f"{method}: {mean_text(s, unit, most)} {unit.label}".strip() for _, method, s in results[:2]]
        tests = [None, *(paired(results[0][2], s) for *_, s in results[1:])]
        row = {"federation": place, "by": heading, "best": Best(texts[0]), "next": (*texts, "–")[1]}
        rows.append(row | {"seed by seed": next((str(test) for test in tests[1:2] if test), "–")})
        for (_, method, s), test in zip(results, tests, strict=True):
            about = {"federation": place, "method": method, "by": heading, **s.record}
            records.append(about | (test._asdict() if test else {}))
    note = (
        "The two best means, each over its seeds (sample standard deviation). Seed by seed: the mean difference over "
        "the seeds that both have, the p of an exact two-sided permutation test, which knows nothing of other methods, "
        "and the number of pairs. The CSV has it of every method against the best."
    )
    table = Table("best", "Best of each federation", pd.DataFrame(rows, dtype=object), pd.DataFrame(records), (note,))
    return table if rows else None


def all_runs(runs: Sequence[Run], groups: Sequence[Group], places: Mapping[Run, str]) -> Table:
    """Every run with its place, those that did not end well first."""
    names = {run: group for group in groups for run in (*group.runs, *group.repeated)}
    lines = []
    for run in sorted(runs, key=lambda run: -STATES.index(run.state)):
        method, federation = (names[run].method, names[run].federation) if run in names else ("?", "?")
        about = {"state": run.state, "method": method, "federation": federation, "seed": run.seed}
        about |= {"rounds": f"{run.rounds} of {run.planned}"}
        numbers = {name: value(run, measure) for name, (measure, _) in _RUN.items()}
        lines.append({**about, **numbers, "folder": places[run], "note": run.note})
    records = pd.DataFrame(lines, dtype=object)
    frame = records.copy()
    for name, (_, form) in _RUN.items():
        frame[name] = ["–" if number is None else form.format(number) for number in records[name]]
    frame = frame.loc[:, (frame != "–").any()].astype(str)
    return Table("runs", "All runs", frame, records, ("Seconds are those of all rounds together.",))
