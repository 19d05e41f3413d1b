"""The tables of a report, in HTML and in LaTeX."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import relpath

import pandas as pd

from gcfed.reporting.frame import described, symbol, varying
from gcfed.reporting.verdict import FEWEST, Verdict, per_seed, scale_of
from gcfed.runs.folder import DIVERGED, STATES
from gcfed.runs.measures import value

TARGETS = 4  # at most so many columns of targets
_LATEX = {character: rf"\{character}" for character in "&%$#_{}"}
_LATEX |= {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",
    "–": "--",
}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "†": r"$^\dagger$", "\u00a0": "~"}
_LATEX |= {
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "η": r"$\eta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "ρ": r"$\rho$",
}
_FLOAT = r"""%% needs \usepackage{booktabs}; fits a column of a two-column paper
\begin{table}
\centering\small\setlength{\tabcolsep}{3pt}
\caption{%s}\label{tab:%s}
%s\end{table}
"""


@dataclass(frozen=True)
class Table:
    """A table whose ``frame`` holds texts. The first cell of ``bold`` rows is emphasised."""

    name: str  # of the file
    title: str
    frame: pd.DataFrame
    bold: Sequence[bool] = ()
    notes: Sequence[str] = ()
    printed: int = 0  # the first so many columns are in LaTeX

    @property
    def latex(self) -> str:
        marks = str.maketrans(_LATEX)
        cells = self._marked(marks, r"\textbf{%s}").iloc[:, : self.printed]
        caption = re.compile(r"^rounds to |, last \d+ rounds")  # words that the caption has, too
        cells = cells.rename(columns=lambda name: caption.sub("", name))
        tabular = cells.to_latex(
            index=False, column_format=f"@{{}}l{'r' * (self.printed - 1)}@{{}}"
        )
        return _FLOAT % (self.title.translate(marks), self.name, tabular)

    @property
    def html(self) -> str:
        marks = str.maketrans({character: html.escape(character) for character in "<>&"})
        return self._marked(marks, "<strong>%s</strong>").to_html(
            index=False, escape=False, border=0
        )

    def _marked(self, marks: dict[int, str], bold: str) -> pd.DataFrame:
        cells = self.frame.astype(str).map(lambda text: text.translate(marks))
        for i, is_bold in enumerate(self.bold):
            cells.iloc[i, 0] = bold % cells.iloc[i, 0] if is_bold else cells.iloc[i, 0]
        return cells.rename(columns=lambda name: name.translate(marks))


def measured(found: Verdict, rows: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """A row per method and a column per measure that any run has, with cells such as ``61.20 ±
    0.80``.

    The mean of a ranked method is over the shared seeds, that of another method over its own.
    """
    texts = {"method": [*found.table.index]}
    for measure in measures:
        values = per_seed(rows, measure).reindex(columns=found.table.index)
        own = [
            values[m].reindex(found.seeds if m in found.ranked else values.index).dropna()
            for m in values
        ]
        if any(map(len, own)):
            scale = scale_of(measure, max(abs(v.mean()) for v in own if len(v)))
            spreads = [
                f" ± {scale.text(v.std())}" * (len(v) > 1 and measure[:6] != "total:") for v in own
            ]
            if measure.startswith("rounds:"):
                lacks = per_seed(
                    rows[[value(run, measure) is None for run in rows["run"]]], measure
                )
                missed = [v.index.isin(lacks.get(v.name, v[:0]).dropna().index).any() for v in own]
                spreads = [
                    "+" if lower else spread for lower, spread in zip(missed, spreads, strict=True)
                ]
            cells = [
                scale.text(v.mean()) + s if len(v) else "–"
                for v, s in zip(own, spreads, strict=True)
            ]
            texts[scale.heading] = cells
    return pd.DataFrame(texts, dtype=object)


def comparison(
    found: Verdict, rows: pd.DataFrame, measures: Sequence[str], name: str, place: str
) -> Table:
    """A row per method, the best first. ``measures`` are further columns."""
    frame, heading = measured(found, rows, [found.measure, *measures]), found.scale.heading
    main, gaps = (
        frame.get(heading, pd.Series("–", frame.index)),
        frame["method"].map(found.difference),
    )
    lost = frame["method"].map(
        rows.groupby("method")["state"].agg(lambda states: ", ".join(dict.fromkeys(states)))
    )
    columns = {
        heading: main.where(main != "–", lost) + [" †" * (DIVERGED in states) for states in lost]
    }
    if found.ranked:
        compared = frame["method"].isin(found.ranked) & (frame["method"] != found.reference)
        columns[f"against {found.reference}"] = gaps.where(compared, "–")
    frame = frame.drop(columns=heading, errors="ignore")
    for i, (title, texts) in enumerate(
        (columns | {"seeds": found.table["n"].to_numpy()}).items(), start=1
    ):
        frame.insert(i, title, texts)
    bold = [method in found.leaders for method in frame["method"]]
    return Table(
        name, f"{found.direction}: {place}", frame, bold, _notes(found, rows), 1 + len(columns)
    )


def _notes(found: Verdict, rows: pd.DataFrame) -> list[str]:
    said = ["Mean ± standard deviation over seeds." * bool(found.table["n"].max() > 1)]
    said[0] += " †: a run diverged." * (DIVERGED in {*rows["state"]})
    if found.ranked:
        said[0] += f" Seeds {', '.join(map(str, found.seeds))}, which all ranked methods share."
        said[0] += " Bold: methods that are not clearly worse than any other."
        said[0] += (
            " In brackets: 95 % interval of the mean difference seed by seed (Student's t), for"
            " each pair alone."
        )
    below = [method for method in found.table.index if method not in found.ranked]
    said += [f"Not ranked, with fewer than {FEWEST} common seeds: {', '.join(below)}."] * bool(
        found.ranked and below
    )
    if rows["repeated"].any():
        names = ", ".join(run.folder.name for run in rows["run"][rows["repeated"]])
        said.append(f"Of a seed that was run twice, only the last run counts. Left out: {names}.")
    texts = varying(
        rows.set_index("method").loc[
            :, lambda f: f.columns.str.match(r"client\.|precision|privacy")
        ]
    )
    for key in texts:
        if not any(described(key, text) in method for method, text in texts[key].items()):
            who = [
                f"{text or 'none'} ({', '.join(dict.fromkeys(same.index))})"
                for text, same in texts.groupby(key)
            ]
            said.append(f"Different {symbol(key)}: {'; '.join(who)}.")
    return [*filter(None, said)]


def targets(found: Verdict, rows: pd.DataFrame, name: str, place: str) -> Table | None:
    """Rounds to the highest targets that a run reached; None if no run reached one."""
    asked = sorted({float(target) for run in rows["run"] for target in run.get("targets") or ()})
    reached = [
        f"rounds:{t:g}" for t in asked if any(value(run, f"rounds:{t:g}") for run in rows["run"])
    ]
    frame = measured(found, rows, reached[-TARGETS:])
    note = (
        "+: a run did not reach the target and counts with all its rounds, so the mean is a lower"
        " bound."
    )
    notes = [note] * any("+" in cell for cell in frame.iloc[:, 1:].to_numpy().flat)
    return (
        Table(name, f"Rounds to a test accuracy: {place}", frame, (), notes, len(frame.T))
        if reached
        else None
    )


def all_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Every run with its folder; failed and unfinished ones first."""
    rows = rows.sort_values("state", key=lambda s: -s.map(STATES.index), kind="stable")
    frame = rows[["state", "method", "place", "seed"]]
    frame = frame.assign(rounds=[f"{run.rounds} of {run.planned}" for run in rows["run"]])
    return frame.assign(
        folder=[relpath(run.folder) for run in rows["run"]], note=[run.note for run in rows["run"]]
    )
