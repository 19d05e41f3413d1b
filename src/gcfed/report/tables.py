"""Tables for people (Markdown, LaTeX, the page) and for programs (CSV), and how their numbers are shown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from gcfed.report.groups import Group, Sample, sample
from gcfed.runs.folder import UNFINISHED, Run
from gcfed.runs.measures import higher_is_better, parse
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

    def differences(self, *numbers: float, sign: str = "-") -> list[str]:
        """Points with one digit behind the dot, as far as it says anything."""
        digits = ".1f" if self.label == "%" and max(map(abs, numbers)) >= 0.095 else ".2g"
        return [f"{number:{sign}{digits}}".replace("-", "−") for number in numbers]


class Column(NamedTuple):
    """How a measure is shown."""

    title: str
    unit: Unit
    higher: bool | None  # whether more is better; None: neither
    measure: str

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit.label})" if self.unit.label not in ("", "rounds") else self.title

    def of(self, group: Group) -> Sample:
        """The measure over the group's seeds, in the column's unit."""
        return sample(group, self.measure, self.unit.factor)


UNITS = {
    "percent": Unit("%", 100.0, ".2f"),
    "points": Unit("%", 100.0, ".3g"),
    "rounds": Unit("rounds", 1.0, ".1f"),
    "seconds": Unit("s", 1.0, ".3g"),
    "MB": Unit("MB", 1e-6, ".4g"),
    "1e-3": Unit("10⁻³", 1e3, ".3f"),
    "none": Unit("", 1.0, ".4g"),
}
LAST_TESTS = "mean:test/acc[10 tests]"
#: The measures that are shown unless others are asked for, and their titles.
MEASURES = {
    LAST_TESTS: "accuracy, last 10 tests",
    "max:test/acc": "best accuracy",
    "last:test/acc": "accuracy at the end",
    "last:test/relative_error": "relative error at the end",
    "last:test/loss": "test loss at the end",
    "sum:comm/down_bytes": "sent to clients",
    "sum:comm/up_bytes": "sent by clients",
    "time/round_s": "a round, median",
}
_TITLES = MEASURES | {"mean:test/acc[10]": "accuracy, last 10 rounds"}
#: The unit of what the column of a measure holds; the first that fits.
_COLUMNS = {
    "_std": "percent", "personal/": "percent", "comm/": "MB", "time/": "seconds", "bytes": "MB", "acc": "percent",
    "seconds": "seconds", "": "none",
}  # fmt: skip
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}"}  # no \\[length]
_LATEX |= {character: rf"\{character}" for character in "&%$#_{}"}
_FLOAT = r"""%% For LuaLaTeX or XeLaTeX, with booktabs, graphicx and a font that has Greek letters.
\begin{table}
\centering\small
\caption{%s}\label{tab:%s}
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%%
\begin{tabular}{%s}
\toprule
%s
\midrule
%s
\bottomrule
\end{tabular}}
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
        texts = {"md": self.markdown, "tex": self.latex(), "csv": self.records.to_csv(index=False)}
        write_texts({folder / f"{self.name}.{suffix}": text for suffix, text in texts.items()})

    def _marked(self, kind: str, columns: int | None = None) -> pd.DataFrame:
        return self.frame.iloc[:, :columns].map(marked, kind=kind).rename(columns=partial(marked, kind=kind))

    @cached_property
    def markdown(self) -> str:
        title, *notes = (marked(text, "md") for text in (self.title, *self.notes))
        lines = self._marked("md").to_markdown(index=False, disable_numparse=True)
        return "\n\n".join([f"## {title}", lines, *notes]) + "\n"

    def latex(self) -> str:
        """A float, not wider than the text."""
        title, *notes = (marked(text, "tex") for text in (self.title, *self.notes))
        cells = self._marked("tex")
        head, *rows = (rf"{' & '.join(row)} \\" for row in [[*cells], *cells.to_numpy()])
        notes = [rf"\par\smallskip{{\footnotesize {note}\par}}" for note in notes]
        align = "l" + "r" * (len(cells.columns) - 1)
        return _FLOAT % (title, self.name, align, head, "\n".join(rows), "\n".join(notes))

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


def describe(measure: str) -> Column:
    """How any measure is shown."""
    parts = parse(measure)
    if parts.is_target:
        goal = f"{100 * parts.number:g} %" if "acc" in parts.column else f"{parts.number:g}"
        of = f" of {parts.column}" * (parts.column != "test/acc") + f", mean of {parts.window}" * (parts.window > 1)
        return Column(f"rounds to {goal}{of}", UNITS["rounds"], False, measure)
    title = _TITLES.get(measure, measure)
    if (tested := measure.replace("val/", "test/")) in _TITLES and tested != measure:
        title = f"validation {_TITLES[tested].removeprefix('test ')}"
    if match := re.fullmatch(r"(\w+)_to_target/([\d.]+)", measure):
        title = f"{match[1].replace('_', ' ')} to {100 * float(match[2]):g} %"
    unit = next(unit for part, unit in _COLUMNS.items() if part in parts.column)
    return Column(title, UNITS[unit], higher_is_better(measure), measure)
