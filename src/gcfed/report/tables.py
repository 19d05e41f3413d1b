"""Tables for people (Markdown, LaTeX, the page) and for programs (CSV), and those of any runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from gcfed.report.groups import SYMBOLS, Group, Sample, described, sample
from gcfed.runs.folder import STATES, UNFINISHED, Run
from gcfed.runs.measures import parse, value
from gcfed.utils.files import replacing


class Unit(NamedTuple):
    """``label`` stands behind a column's name, our numbers are multiplied by ``factor``, ``digits`` are Python's."""

    label: str
    factor: float
    digits: str

    def text(self, number: float) -> str:
        """The number, already in this unit, as tables show it."""
        return f"{number:{self.digits}}".removesuffix(".0")


UNITS = {
    "percent": Unit("%", 100.0, ".2f"),
    "rounds": Unit("rounds", 1.0, ".1f"),
    "seconds": Unit("s", 1.0, ".3g"),
    "MB": Unit("MB", 1e-6, ".4g"),
    "1e-3": Unit("10⁻³", 1e3, ".3f"),
    "none": Unit("", 1.0, ".4g"),
}
#: measure → (title, unit, whether more is better)
MEASURES: dict[str, tuple[str, str, bool | None]] = {
    "mean:test/acc[10]": ("accuracy, last 10 rounds", "percent", True),
    "max:test/acc": ("best accuracy", "percent", True),
    "last:test/acc": ("accuracy at the end", "percent", True),
    "last:test/relative_error": ("relative error at the end", "none", False),
    "last:test/loss": ("test loss at the end", "none", False),
    "sum:comm/down_bytes": ("sent to clients", "MB", None),
    "sum:comm/up_bytes": ("sent by clients", "MB", None),
    "time/round_s": ("a round, median", "seconds", None),
}
#: What a name of another measure holds → (unit, whether more is better); the first that fits.
_KINDS: dict[str, tuple[str, bool | None]] = {
    "acc_diff/": ("percent", None), "bytes": ("MB", False), "acc": ("percent", True), "loss": ("none", False),
    "error": ("none", False), "seconds": ("seconds", False), "_s": ("seconds", False), "": ("none", None),
}  # fmt: skip
NOTE = (
    "Mean (sample standard deviation) over seeds, the best in bold. [n of m]: of n seeds, where there should be m; †: "
    "a run diverged, and is in the mean unless its value is not finite; +: a run that did not reach the target counts "
    "with all its rounds, so that the mean is a lower bound."
)


class Best(str):
    """A cell in bold."""


class Minor(str):
    """The first cell of a line that explains the line above it."""


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
        for suffix, text in {
            "md": self.markdown(),
            "tex": self.latex(),
            "csv": self.records.to_csv(index=False),
        }.items():
            with replacing(folder / f"{self.name}.{suffix}") as temporary:
                temporary.write_text(text, encoding="utf-8", newline="")

    def markdown(self) -> str:
        def cell(text: str) -> str:
            plain = re.sub(r"([\\`*|])", r"\\\1", text).replace("<", "&lt;")
            return f"**{plain}**" if isinstance(text, Best) else f"*{plain}*" if isinstance(text, Minor) else plain

        rows = [self.frame.columns, ["---"] * len(self.frame.columns), *self.frame.itertuples(index=False)]
        lines = "\n".join(f"| {' | '.join(map(cell, row))} |" for row in rows)
        return "\n\n".join([f"## {cell(self.title)}", lines, *map(cell, self.notes)]) + "\n"

    def latex(self) -> str:
        r"""A float with booktabs' rules, not wider than the text (``\usepackage{booktabs,graphicx}``)."""

        def cell(text: str) -> str:
            plain = "".join(_LATEX.get(character, character) for character in text)
            plain = rf"\textbf{{{plain}}}" if isinstance(text, Best) else plain
            return rf"\quad {plain}" if isinstance(text, Minor) else plain

        frame = self.frame.map(cell).rename(columns=cell)
        body = frame.to_latex(index=False, column_format="l" + "r" * (len(frame.columns) - 1)).strip()
        notes = [rf"\par\smallskip{{\footnotesize {cell(note)}\par}}" for note in self.notes]
        head = ["\\begin{table}", r"\centering\small", rf"\caption{{{cell(self.title)}}}\label{{tab:{self.name}}}"]
        narrow = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
        return "\n".join([*head, narrow, f"{body}}}", *notes, "\\end{table}\n"])


_LATEX = {character: rf"\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "…": r"\dots{}",
    "†": r"\textdagger{}",
    "½": r"$\frac12$",
    "§": r"\S{}",
    "²": "$^2$",
    "³": "$^3$",
    "⁻": "$^-$",
    "−": "$-$",
    "’": "'",
    "‖": r"$\Vert$",
    "√": r"$\surd$",
}
_MATH = (
    "αalpha βbeta γgamma δdelta ηeta θtheta λlambda μmu νnu ρrho σsigma τtau ΔDelta ±pm ×times ·cdot ≥geq ≤leq ≠neq →to"
)
_LATEX |= {word[0]: rf"$\{word[1:]}$" for word in _MATH.split()}


def mark_best(cells: Sequence[str], numbers: Sequence[float | None], higher_is_better: bool | None) -> list[str]:
    """The cells with the best of their numbers in bold, ties too. None takes no part; one number alone is not best."""
    known = {number for number in numbers if number is not None}
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
    if measure in MEASURES:
        title, unit, higher = MEASURES[measure]
        return title, UNITS[unit], higher
    parts = parse(measure)
    if parts.is_target:
        goal = f"{100 * parts.number:g} %" if "acc" in parts.column else f"{parts.number:g}"
        return f"rounds to {goal}{f' of {parts.column}' * (parts.column != 'test/acc')}", UNITS["rounds"], False
    if match := re.fullmatch(r"(\w+)_to_target/([\d.]+)", parts.column):
        title = f"{match[1].replace('_', ' ')} to {100 * float(match[2]):g} %"
    unit, higher = next(kind for part, kind in _KINDS.items() if part in parts.column)
    return (title if match else measure), UNITS[unit], higher


def main_measure(groups: Sequence[Group]) -> str:
    """What the runs are judged by: accuracy, else the relative error, else the loss."""
    wanted = ("mean:test/acc[10]", "last:test/relative_error", "last:test/loss")
    columns = {name for group in groups for run in group.runs for name in run.metrics}
    return next((measure for measure in wanted if parse(measure).column in columns), wanted[-1])


def by_federation(groups: Sequence[Group]) -> dict[str, list[Group]]:
    places = dict.fromkeys(group.federation for group in groups)
    return {place: [group for group in groups if group.federation == place] for place in places}


def measured(groups: Sequence[Group], measures: Sequence[str], name: str, title: str) -> Table | None:
    """A row a group, a column a measure; None where no run has any. Each federation's best is in bold."""
    columns: dict[str, list[str]] = {}
    records = []
    for measure in measures:
        heading, unit, higher = describe(measure)
        cells: list[str] = []
        for here in by_federation(groups).values():
            samples = [sample(group, measure, unit.factor) for group in here]
            most = max(len(s.values) for s in samples)
            numbers = [None if s.mean is None or s.bound else float(unit.text(s.mean)) for s in samples]
            # Why a run has no number stands in the first column only.
            texts = [
                mean_text(s, unit, most) if g.has_ended or not columns else "–"
                for g, s in zip(here, samples, strict=True)
            ]
            cells += mark_best(texts, numbers, higher)
            for group, s in zip(here, samples, strict=True):
                about = {"federation": group.federation, "method": group.method, "setting": group.setting}
                records.append({**about, "measure": measure, "unit": unit.label, **s.record})
        if any(record["mean"] is not None for record in records if record["measure"] == measure):
            columns[f"{heading} ({unit.label})" if unit.label not in ("", "rounds") else heading] = cells
    if not columns:
        return None
    places = pd.Series([group.federation for group in groups])
    frame = pd.DataFrame(
        {"federation": places.mask(places.duplicated(), ""), "method": [g.method for g in groups], **columns}
    )
    notes = [NOTE]
    if places.nunique() == 1:
        frame = frame.drop(columns="federation")
        found = {key: {str(group.values.get(key, "")) for group in groups} for key in SYMBOLS}
        common = ", ".join(
            described(key, texts.pop()) for key, texts in found.items() if len(texts) == 1 and any(texts)
        )
        notes[0] += f" All: {common}." * bool(common)
    if lost := [f"{group.label}: {text}" for group in groups if (text := states(group.runs))]:
        notes.append(f"In no mean: {'; '.join(lost)}.")
    if again := [f"{group.method}, seed {run.seed}: {run.folder.name}" for group in groups for run in group.repeated]:
        notes.append(f"Further runs of one seed, of which the last one to end counts: {'; '.join(again)}.")
    return Table(name, title, frame, pd.DataFrame(records).dropna(subset="mean"), tuple(notes))


def targets(groups: Sequence[Group]) -> Table | None:
    """Rounds and bytes to each of the runs' own target accuracies that one of them reached."""
    runs = [run for group in groups for run in group.runs if run.has_ended]
    asked = sorted({float(target) for run in runs for target in run.get("targets") or ()})
    reached = [t for t in asked if any(value(run, f"rounds:test/acc>={t:g}") is not None for run in runs)]
    measures = [f"rounds:test/acc>={t:g}" for t in reached] + [f"bytes_to_target/{t:g}" for t in reached]
    known = [g for g in groups if any(value(r, measure) is not None for r in g.runs for measure in measures[:1])]
    return measured(known, measures, "targets", "Rounds and bytes to a target accuracy")


def best(groups: Sequence[Group]) -> Table | None:
    """The best method of each federation, and the next one."""
    rows, records = [], []
    for place, here in by_federation(groups).items():
        heading, unit, higher = describe(main_measure(here))
        found = [
            (s.mean, group, s)
            for group in here
            if (s := sample(group, main_measure(here), unit.factor)).mean is not None
        ]
        found.sort(key=lambda item: item[0], reverse=bool(higher))
        most = max((len(s.values) for *_, s in found), default=0)
        texts = [f"{group.method}: {mean_text(s, unit, most)} {unit.label}".strip() for _, group, s in found[:2]]
        if texts:
            rows.append({"federation": place, "by": heading, "best": Best(texts[0]), "next": (*texts, "–")[1]})
        records += [{"federation": place, "method": group.method, "by": heading, **s.record} for _, group, s in found]
    note = "The two best means, each over its seeds (sample standard deviation)."
    return (
        Table("best", "Best of each federation", pd.DataFrame(rows), pd.DataFrame(records), (note,)) if rows else None
    )


def all_runs(runs: Sequence[Run], groups: Sequence[Group], places: dict[Path, str]) -> Table:
    """Every run, those that did not end well first."""
    names = {run.folder: group for group in groups for run in (*group.runs, *group.repeated)}
    records = pd.DataFrame(
        {
            "state": run.state,
            "method": names[run.folder].method if run.folder in names else "?",
            "federation": names[run.folder].federation if run.folder in names else "?",
            "seed": run.seed,
            "rounds": f"{run.rounds} of {run.planned}",
            "final": value(run, "last:test/acc"),
            "best": value(run, "max:test/acc"),
            "error": value(run, "last:test/relative_error"),
            "seconds": value(run, "sum:time/round_s"),
            "folder": places[run.folder],
            "note": run.note,
        }
        for run in sorted(runs, key=lambda run: -STATES.index(run.state))
    )
    frame = records.astype(object)
    for name, form in {"final": "{:.2%}", "best": "{:.2%}", "error": "{:.3g}", "seconds": "{:.0f}"}.items():
        frame[name] = ["–" if pd.isna(number) else form.format(number) for number in records[name]]
    frame = frame.loc[:, (frame != "–").any()].astype(str)
    return Table("runs", "All runs", frame, records, ("Seconds are those of all rounds together.",))
