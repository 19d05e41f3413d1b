"""The tables of a report, in HTML and in LaTeX."""

import html
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from os.path import relpath

import pandas as pd
from pandas import DataFrame, Series

from gcfed.data.distances import FEATURE_SKEW, LABEL_SKEW
from gcfed.folders.folder import DIVERGED, STATES, mixed_versions
from gcfed.folders.measures import CLOCK, parse, value
from gcfed.folders.summary import distance_in_words, skew_in_words
from gcfed.reporting.decision import listed
from gcfed.reporting.frame import described, symbol, varying
from gcfed.reporting.verdict import FEWEST_SEEDS, Scale, Verdict, per_seed, scale_of

MOST_TARGETS = 4  # at most so many columns of targets
#: Words that the caption of a table in LaTeX has, too.
_IN_CAPTION = re.compile(r"^rounds to | of clients' own models|, last \d+ rounds")
_LATEX = {character: rf"\{character}" for character in "&%$#_{}"}
_LATEX |= {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",
    "–": "--",
    "±": r"$\pm$",
    "−": "$-$",
    "†": r"$^\dagger$",
    "\u00a0": "~",
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
class Sheet:
    """A table whose ``frame`` holds texts. The first cell of ``bold`` rows is emphasised."""

    name: str  # of the file
    title: str
    frame: DataFrame
    bold: Sequence[bool] = ()
    notes: Sequence[str] = ()
    printed: int = 0  # the first so many columns are in LaTeX
    legend: str = ""  # of a mark in the cells, at the end of the caption in LaTeX

    @property
    def latex(self) -> str:
        marks = str.maketrans(_LATEX)
        cells = self._marked(marks, r"\textbf{%s}").iloc[:, : self.printed]
        cells = cells.rename(columns=lambda name: _IN_CAPTION.sub("", name))
        alignment = "l" + "r" * (self.printed - 1)
        tabular = cells.to_latex(index=False, column_format=f"@{{}}{alignment}@{{}}")
        caption = "; ".join(filter(None, (self.title, self.legend)))
        return _FLOAT % (caption.translate(marks), self.name, tabular)

    @property
    def html(self) -> str:
        marks = str.maketrans({character: html.escape(character) for character in "<>&"})
        cells = self._marked(marks, "<strong>%s</strong>")
        return cells.to_html(index=False, escape=False, border=0)

    def _marked(self, marks: dict[int, str], bold: str) -> DataFrame:
        cells = self.frame.astype(str).map(lambda text: text.translate(marks))
        for row, is_bold in enumerate(self.bold):
            if is_bold:
                cells.iloc[row, 0] = bold % cells.iloc[row, 0]
        return cells.rename(columns=lambda name: name.translate(marks))


def measured(verdict: Verdict, rows: DataFrame, measures: Sequence[str]) -> DataFrame:
    """A row per method and a column per measure that any run has, with cells such as ``61.20 ±
    0.80``.

    The mean of a ranked method is over the shared seeds, that of another method over its own.
    Methods that the verdict's measure does not judge have no cell of it.
    """
    texts: dict[str, list[str]] = {"method": [*verdict.table.index]}
    for measure in measures:
        values = per_seed(rows, measure)
        numbers_of = {method: _counted(method, verdict, values) for method in verdict.table.index}
        if measure == verdict.measure:
            for method in verdict.not_compared:
                numbers_of[method] = numbers_of[method][:0]
        means = [numbers.mean() for numbers in numbers_of.values() if len(numbers)]
        if not means:
            continue
        scale = scale_of(measure, means)
        missed = _missed(rows, measure)
        cells = []
        for method, numbers in numbers_of.items():
            cells.append(_cell(numbers, scale, measure, missed.get(method, set())))
        texts[scale.heading] = cells
    return DataFrame(texts, dtype=object)


def _counted(method: str, verdict: Verdict, values: DataFrame) -> Series:
    """The values of a method that count, by seed. ``values``: [seeds, methods]."""
    if method not in values:
        return Series(dtype=float)
    numbers = values[method]
    if method in verdict.ranked:
        numbers = numbers.reindex(verdict.seeds)
    return numbers.dropna()


def _missed(rows: DataFrame, measure: str) -> dict[str, set[int]]:
    """The seeds of each method that did not reach a target."""
    missed: dict[str, set[int]] = {}
    counted = rows[~rows["repeated"]]
    for method, run in zip(counted["method"], counted["run"], strict=True):
        _, is_bound = parse(measure).bounded(run)
        if run.has_ended and is_bound:
            missed.setdefault(method, set()).add(run.seed)
    return missed


def _cell(numbers: Series, scale: Scale, measure: str, missed: Set[int]) -> str:
    """``61.20 ± 0.80``; ``12+`` if a seed missed a target; ``–`` without a number."""
    if numbers.empty:
        return "–"
    text = scale.text(numbers.mean())
    if not missed.isdisjoint(numbers.index):
        return f"{text}+"
    if len(numbers) > 1 and not measure.startswith("total:"):
        text += f" ± {scale.text(numbers.std())}"
    return text


def comparison(
    verdict: Verdict, rows: DataFrame, measures: Sequence[str], name: str, place: str
) -> Sheet:
    """A row per method, the best first. ``measures`` are further columns."""
    frame = measured(verdict, rows, [verdict.measure, *measures])
    methods = frame["method"]
    heading = verdict.scale.heading
    columns = {heading: _main_column(verdict, rows, frame)}
    if verdict.ranked:
        is_compared = methods.isin(verdict.ranked) & (methods != verdict.reference)
        differences = methods.map(verdict.difference)
        differences += methods.isin(verdict.significant).map({True: "*", False: ""})
        columns[f"against {verdict.reference}"] = differences.where(is_compared, "–")
    printed = 1 + len(columns)
    columns["seeds"] = verdict.table["n"].to_numpy()
    others = frame.drop(columns=["method", heading], errors="ignore")
    others = others.drop(columns=_equal_bytes(others))
    cells = pd.concat([methods, DataFrame(columns, frame.index), others], axis=1)
    bold = [method in verdict.leaders for method in methods]
    title = f"{verdict.direction}: {place}"
    legend = ""
    if verdict.significant:
        legend = f"*: differs from {verdict.reference} also after Holm's correction"
    return Sheet(name, title, cells, bold, _notes(verdict, rows), printed, legend)


def _main_column(verdict: Verdict, rows: DataFrame, frame: DataFrame) -> Series:
    """The measure of the verdict, or why a method has no number. † marks a diverged run."""
    states = rows.groupby("method")["state"].agg(
        lambda states_of_runs: ", ".join(dict.fromkeys(states_of_runs))
    )
    states = frame["method"].map(states)
    cells = frame.get(verdict.scale.heading, Series("–", frame.index))
    cells = cells.mask(frame["method"].isin([*verdict.not_compared]), "not compared")
    cells = cells.where(cells != "–", states)
    return cells.mask(states.str.contains(DIVERGED), cells + " †")


def _equal_bytes(cells: DataFrame) -> list[str]:
    """The columns of bytes in which the methods do not differ, if there are several methods."""
    if len(cells) < 2:
        return []
    return [name for name in cells if name.endswith("(MB)") and cells[name].nunique() == 1]


def _notes(verdict: Verdict, rows: DataFrame) -> list[str]:
    notes = [_reading(verdict, rows)]
    notes += [f"Not compared: {why}." for why in verdict.not_compared.values()]
    if verdict.declared and not parse(verdict.measure).column.startswith("test/"):
        notes.append(
            "Test accuracies are the global model's, not those of the models that clients of"
            f" {listed([*verdict.declared])} use."
        )
    judged = {*verdict.ranked, *verdict.not_compared}
    below = [method for method in verdict.table.index if method not in judged]
    if verdict.ranked and below:
        notes.append(
            f"Not ranked, with fewer than {FEWEST_SEEDS} common seeds: {'; '.join(below)}."
        )
    if rows["repeated"].any():
        names = ", ".join(run.folder.name for run in rows["run"][rows["repeated"]])
        notes.append(f"Of a seed that was run twice, only the last run counts. Left out: {names}.")
    mixed = mixed_versions(rows["run"][~rows["repeated"]])
    if mixed:
        notes.append(f"{mixed[0].upper()}{mixed[1:]}.")
    notes += _different_clients(rows)
    notes += _skews(rows)
    return [note for note in notes if note]


def _skews(rows: DataFrame) -> list[str]:
    """How far the clients' labels and inputs differ, as means over the runs that measured it."""
    summaries = [run.summary for run in rows["run"]]
    figures = DataFrame(summaries, columns=[*LABEL_SKEW, FEATURE_SKEW]).astype(float)
    means = figures.mean().dropna().to_dict()
    notes = []
    if {*LABEL_SKEW} <= means.keys():
        notes.append(f"Label skew, from 0 (equal clients) to 1: {skew_in_words(means)}.")
    if FEATURE_SKEW in means:
        notes.append(f"Feature skew, 0 for clients with equal means: {distance_in_words(means)}.")
    return notes


def _reading(verdict: Verdict, rows: DataFrame) -> str:
    """How to read the numbers of a comparison."""
    sentences = []
    if verdict.table["n"].max() > 1:
        sentences.append("Mean ± standard deviation over seeds.")
    if DIVERGED in {*rows["state"]}:
        sentences.append("†: a run diverged.")
    if verdict.ranked:
        seeds = ", ".join(map(str, verdict.seeds))
        sentences.append(f"Seeds {seeds}, which all ranked methods share.")
        sentences.append("Bold: methods that are not clearly worse than any other.")
        sentences.append(
            "In brackets: 95 % interval of the mean difference seed by seed (Student's t), for"
            " each pair alone."
        )
        if verdict.correction:
            sentences.append(verdict.correction)
    return " ".join(sentences)


def _different_clients(rows: DataFrame) -> list[str]:
    """The settings of local training in which methods differ, if their names do not show it."""
    texts = rows.set_index("method")
    texts = varying(texts.loc[:, texts.columns.str.match(r"client\.|precision|privacy")])
    notes = []
    for key in texts:
        if any(described(key, text) in method for method, text in texts[key].items()):
            continue
        groups = []
        for text, same in texts.groupby(key):
            methods = ", ".join(dict.fromkeys(same.index))
            groups.append(f"{text or 'none'} ({methods})")
        notes.append(f"Different {symbol(key)}: {'; '.join(groups)}.")
    return notes


def targets(verdict: Verdict, rows: DataFrame, name: str, place: str) -> Sheet | None:
    """Rounds to the highest targets that a run reached, and seconds if all runs have a clock; None
    if no run reached one.

    Targets are accuracies of the global model, so methods whose clients use others are left out.
    """
    rows = rows[~rows["method"].isin([*verdict.declared])]
    reached = _reached(rows["run"])[-MOST_TARGETS:]
    if not reached:
        return None
    if all(len(run.curve(CLOCK)) for run in rows["run"]):
        reached += [measure.replace("rounds:", "seconds:") for measure in reached]
    frame = measured(verdict, rows, reached)
    frame = frame[~frame["method"].isin([*verdict.declared])]
    notes = []
    if any("+" in cell for cell in frame.iloc[:, 1:].to_numpy().flat):
        notes.append(
            "+: a run did not reach the target and counts with its whole length, so the mean is a"
            " lower bound."
        )
    title = f"Rounds to a test accuracy: {place}"
    return Sheet(name, title, frame, (), notes, len(frame.columns))


def _reached(runs: Series) -> list[str]:
    """The measures ``rounds:<target>`` of the targets that a run reached, ascending."""
    asked = {float(target) for run in runs for target in run.get("targets") or ()}
    reached = []
    for target in sorted(asked):
        measure = f"rounds:{target:g}"
        if 1e-4 <= target <= 1 and any(value(run, measure) for run in runs):
            reached.append(measure)
    return reached


def all_runs(rows: DataFrame) -> DataFrame:
    """Every run with its folder; those that have not ended come first."""
    rows = rows.sort_values("state", key=lambda s: -s.map(STATES.index), kind="stable")
    frame = rows[["state", "method", "place", "seed"]].copy()
    frame["rounds"] = [f"{run.rounds} of {run.planned}" for run in rows["run"]]
    frame["folder"] = [relpath(run.folder) for run in rows["run"]]
    frame["reason"] = [run.reason for run in rows["run"]]
    return frame


def harmless(frame: DataFrame) -> DataFrame:
    """A copy in which no text is a formula: spreadsheets compute cells that begin with =, +, -
    or @. Such a text gets an apostrophe in front; numbers stay.
    """
    return frame.map(lambda cell: f"'{cell}" if _is_formula(cell) else cell)


def _is_formula(cell: object) -> bool:
    if not isinstance(cell, str) or not cell.lstrip().startswith(("=", "+", "-", "@")):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
