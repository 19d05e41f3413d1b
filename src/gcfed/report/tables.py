"""Tables for people (Markdown, LaTeX, the page) and for programs (CSV), and those of any runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
NOTE = (
    "Mean (sample standard deviation) over seeds, the best in bold. [n of m]: of n seeds, where others have m; †: a run "
    "diverged, and is in the mean unless its value is not finite; +: a run that did not reach the target counts with "
    "all its rounds, so that the mean is a lower bound."
)


class Best(str):
    """A cell in bold."""


class Minor(str):
    """The first cell of a line that explains the line above it."""


@dataclass(frozen=True)
class Table:
    """``frame`` is of texts, one column a column; ``records``, a line a number, are for programs."""

    name: str  # of its files
    title: str
    frame: pd.DataFrame
    records: pd.DataFrame
    notes: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """``<name>.md``, ``.tex`` and ``.csv``."""
        for suffix, text in {"md": self.markdown(), "tex": self.latex(), "csv": self.records.to_csv(index=False)}.items():
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
        r"""A float with booktabs' rules, as wide as the text at most (``\usepackage{booktabs,graphicx}``)."""

        def cell(text: str) -> str:
            plain = "".join(_LATEX.get(character, character) for character in text)
            wrapped = rf"\textbf{{{plain}}}" if isinstance(text, Best) else plain
            return rf"\quad {wrapped}" if isinstance(text, Minor) else wrapped

        texts = self.frame.map(cell).rename(columns=cell)
        body = texts.to_latex(index=False, column_format="l" + "r" * (len(texts.columns) - 1)).strip()
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering\small",
                rf"\caption{{{cell(self.title)}}}\label{{tab:{self.name}}}",
                r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
                rf"{body}}}",
                *(rf"\par\smallskip{{\footnotesize {cell(note)}\par}}" for note in self.notes),
                r"\end{table}",
                "",
            ]
        )


_LATEX = {character: rf"\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "–": "--", "…": r"\dots{}", "†": r"\textdagger{}", "½": r"$\frac12$",
    "§": r"\S{}", "²": "$^2$", "³": "$^3$", "⁻": "$^-$", "’": "'", "‖": r"$\Vert$", "√": r"$\surd$",
} | {
    symbol: f"$\\{name}$" for symbol, name in zip(
        "αβγδηθλμνρστΔ±×·≥≤≠→−",
        "alpha beta gamma delta eta theta lambda mu nu rho sigma tau Delta pm times cdot geq leq neq to -".split(),
        strict=True,
    )
} | {"−": "$-$"}  # fmt: skip


def mark_best(cells: Sequence[str], numbers: Sequence[float | None], higher_is_better: bool | None) -> list[str]:
    """The cells with the best of their numbers in bold, ties too. None takes no part; one number alone is not best."""
    known = [number for number in numbers if number is not None]
    if higher_is_better is None or len(set(known)) < 2:
        return list(cells)
    best = max(known) if higher_is_better else min(known)
    return [Best(cell) if number == best else cell for cell, number in zip(cells, numbers, strict=True)]


def mean_text(s: Sample, unit: Unit, wanted: int) -> str:
    """``61.20 (0.80) [2 of 3] †``: mean, deviation, seeds where more are wanted, diverged runs; or why there is none."""
    if s.mean is None:
        return f"diverged at seed {', '.join(map(str, s.diverged))}" if s.diverged else states(s.others) or "–"
    std = "" if s.std is None else f" ({unit.text(s.std)})"
    count = f" [{len(s.values)} of {wanted}]" if len(s.values) < wanted else ""
    return f"{unit.text(s.mean)}{'+' * s.bound}{std}{count}{' †' * bool(s.diverged)}"


def states(runs: Iterable[Run]) -> str:
    """``failed at seed 2, 50 of 800 rounds at seed 3``, of runs that have not come to their end."""
    return ", ".join(
        f"{f'{run.rounds} of {run.planned} rounds' if run.state == UNFINISHED else run.state} at seed {run.seed}"
        for run in runs
        if not run.has_ended
    )


def describe(measure: str) -> tuple[str, Unit, bool | None]:
    """Title, unit and whether more is better, of any measure."""
    if measure in MEASURES:
        title, unit, higher = MEASURES[measure]
        return title, UNITS[unit], higher
    parts = parse(measure)
    column, number = re.fullmatch(r"(.*?)(?:/([\d.]+))?", parts.column).groups()  # type: ignore[union-attr]
    if parts.is_target or number:
        goal = parts.number if parts.is_target else float(number)
        what = "rounds" if parts.is_target else column.partition("_")[0]
        name = f"{what} to {f'{100 * goal:g} %' if parts.column != 'test/loss' else f'{goal:g}'}"
        name += "" if column in ("test/acc", "bytes_to_target") else f" ({column})"
        return name, UNITS["rounds" if parts.is_target else "MB" if "bytes" in column else "seconds"], False
    kinds = {"acc_diff/": ("percent", None), "bytes": ("MB", False), "acc": ("percent", True), "loss": ("none", False),
             "error": ("none", False), "_s": ("seconds", False)}  # fmt: skip
    unit, higher = next((kind for part, kind in kinds.items() if part in column), ("none", None))
    return measure, UNITS[unit], higher


def main_measure(groups: Sequence[Group]) -> str:
    """What the runs are judged by: accuracy, else the relative error, else the loss."""
    wanted = ("mean:test/acc[10]", "last:test/relative_error", "last:test/loss")
    columns = {name for group in groups for run in group.runs for name in run.metrics}
    return next((measure for measure in wanted if parse(measure).column in columns), wanted[-1])


def measured(groups: Sequence[Group], measures: Sequence[str], name: str, title: str, *, federation: bool) -> Table | None:
    """A row a group, a column a measure; None where no run has any. Each federation's best is in bold."""
    columns: dict[str, list[str]] = {}
    records = []
    for measure in measures:
        heading, unit, higher = describe(measure)
        samples = [sample(group, measure, unit.factor) for group in groups]
        if not any(s.values for s in samples):
            continue
        cells: list[str] = []
        for place in dict.fromkeys(group.federation for group in groups):
            here = [(group, s) for s, group in zip(samples, groups, strict=True) if group.federation == place]
            numbers = [None if s.mean is None or s.bound else float(unit.text(s.mean)) for _, s in here]
            most = max(len(s.values) for _, s in here)
            # why a run has no number stands in the first column only
            texts = ["–" if columns and not any(r.has_ended for r in g.runs) else mean_text(s, unit, most) for g, s in here]
            cells += mark_best(texts, numbers, higher)
        columns[f"{heading} ({unit.label})" if unit.label not in ("", "rounds") else heading] = cells
        for group, s in zip(groups, samples, strict=True):
            about = {"federation": group.federation, "method": group.method, "setting": group.setting}
            records.append({**about, "measure": measure, "unit": unit.label, **s.record})
    if not columns:
        return None
    places = pd.Series([group.federation for group in groups])
    first = {"federation": places.mask(places.duplicated(), "")} if federation else {}
    frame = pd.DataFrame({**first, "method": [group.method for group in groups], **columns})
    return Table(name, title, frame, pd.DataFrame(records), tuple(_notes(groups, federation)))


def _notes(groups: Sequence[Group], federation: bool) -> Iterator[str]:
    """What the groups share, how to read the cells, and which runs are in no mean."""
    keys = [key for key in SYMBOLS if len({group.values.get(key) for group in groups}) == 1]
    common = ", ".join(described(key, str(groups[0].values[key])) for key in keys if key in groups[0].values)
    yield f"{NOTE}{f' All: {common}.' * bool(common and not federation)}"
    lost = [f"{g.method}: {text}" for g in groups if (text := states(g.runs))]
    again = [f"{g.method}, seed {run.seed}: {run.folder.name}" for g in groups for run in g.repeated]
    if lost and not federation:
        yield f"In no mean: {'; '.join(lost)}."
    if again and not federation:
        yield f"Further runs of one seed, of which the last one to end counts: {'; '.join(again)}."


def targets(groups: Sequence[Group]) -> Table | None:
    """Rounds and bytes to each of the runs' own target accuracies that one of them reached."""
    runs = [run for group in groups for run in group.runs if run.has_ended]
    asked = sorted({float(target) for run in runs for target in run.get("targets") or ()})
    reached = [t for t in asked if any(value(run, f"rounds:test/acc>={t:g}") is not None for run in runs)]
    measures = [f"rounds:test/acc>={t:g}" for t in reached] + [f"bytes_to_target/{t:g}" for t in reached]
    known = [group for group in groups if reached and sample(group, f"bytes_to_target/{reached[0]:g}").values]
    return measured(known, measures, "targets", "Rounds and bytes to a target accuracy", federation=True)


def best(groups: Sequence[Group]) -> Table | None:
    """The best method of each federation, and the next one."""
    rows, records = [], []
    for place in dict.fromkeys(group.federation for group in groups):
        here = [group for group in groups if group.federation == place]
        heading, unit, higher = describe(main_measure(here))
        found = [(group, s) for group in here if (s := sample(group, main_measure(here), unit.factor)).mean is not None]
        found.sort(key=lambda pair: pair[1].mean or 0.0, reverse=bool(higher))
        if found:
            most = max(len(s.values) for _, s in found)
            told = [f"{group.method}: {mean_text(s, unit, most)} {unit.label}".strip() for group, s in found[:2]]
            rows.append({"federation": place, "by": heading, "best": Best(told[0]), "next": (*told, "–")[1]})
            records += [{"federation": place, "method": group.method, "measure": heading, **s.record} for group, s in found]
    if not rows:
        return None
    note = "The methods with the two best means, each over its seeds (sample standard deviation)."
    return Table("best", "Best of each federation", pd.DataFrame(rows), pd.DataFrame(records), (note,))


def all_runs(runs: Sequence[Run], groups: Sequence[Group], places: dict[Path, str]) -> Table:
    """Every run, those that did not end well first."""
    of_run = {run.folder: group for group in groups for run in (*group.runs, *group.repeated)}
    records = [
        {
            "state": run.state,
            "method": of_run[run.folder].method if run.folder in of_run else "?",
            "federation": of_run[run.folder].federation if run.folder in of_run else "?",
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
    ]
    table = pd.DataFrame(records)
    texts = {"final": "{:.2%}", "best": "{:.2%}", "error": "{:.3g}", "seconds": "{:.0f}"}
    frame = table.astype({name: object for name in texts})
    for name, form in texts.items():
        frame[name] = ["–" if pd.isna(number) else form.format(number) for number in table[name]]
    frame = frame.drop(columns=[name for name in texts if table[name].isna().all()]).astype(str)
    return Table("runs", "All runs", frame, table, ("Seconds are those of all rounds together.",))
