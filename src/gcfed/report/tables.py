"""Tables of text, and their Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gcfed.utils.files import replacing


@dataclass(frozen=True)
class Cell:
    """One cell, in plain text.

    Attributes:
        title: what a page shows when the pointer rests on it; Markdown and LaTeX leave it out.
        state: "" for a plain cell, else "diverged", "failed", "unfinished" or "missing".
        differs: the setting is not that of the number to compare it with; shown as ≠.
    """

    text: str
    bold: bool = False
    underline: bool = False
    title: str = ""
    state: str = ""
    differs: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a table; its first cell is its label.

    ``minor`` lines belong to the line above them, which they explain (the paper's number, the difference).
    """

    cells: tuple[Cell, ...]
    minor: bool = False


@dataclass(frozen=True)
class Table:
    """What a person reads (``header``, ``rows``, ``notes``) and the same for programs (``records``).

    Attributes:
        name: stem of its files.
        header: one text a column.
        notes: paragraphs below it, in plain text.
        records: one mapping a number, with the same keys each: the lines of the CSV.
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()


def marked(cells: Sequence[Cell], values: Sequence[float | None], higher_is_better: bool | None) -> list[Cell]:
    """The cells with the best value bold and the second underlined, as in GC-Fed's tables; ties share a mark.

    Values are compared as given: round them as they are shown. None takes no part, and one value alone is not best.
    """
    ranked = sorted({value for value in values if value is not None}, reverse=bool(higher_is_better))
    if higher_is_better is None or sum(value is not None for value in values) < 2 or len(ranked) < 2:
        return list(cells)
    best, second = ranked[:2]
    return [
        replace(cell, bold=value == best, underline=value == second) for cell, value in zip(cells, values, strict=True)
    ]


def write_table(table: Table, folder: Path) -> list[Path]:
    """Writes ``<name>.md``, ``.tex`` and ``.csv``; returns their paths."""
    texts = {".md": markdown(table), ".tex": latex(table), ".csv": as_csv(table)}
    for suffix, text in texts.items():
        with replacing(folder / f"{table.name}{suffix}") as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")
    return [folder / f"{table.name}{suffix}" for suffix in texts]


def markdown(table: Table, level: int = 2) -> str:
    """Heading, table and notes; the labels of minor lines are in italics."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def label(row: Row) -> str:
        text = _decorated(row.cells[0], "**{}**", "<ins>{}</ins>", markdown_text)
        return f"*{text}*" if row.minor and text else text

    rows = [
        line([label(row), *(_decorated(cell, "**{}**", "<ins>{}</ins>", markdown_text) for cell in row.cells[1:])])
        for row in table.rows
    ]
    rule = line(["---:" if number else "---" for number in _numbers(table)])
    body = "\n".join([line([markdown_text(text) for text in table.header]), rule, *rows])
    notes = [markdown_text(note) for note in table.notes]
    return "\n\n".join([f"{'#' * level} {markdown_text(table.title)}", body, *notes]) + "\n"


def latex(table: Table) -> str:
    """A float with booktabs' rules (``\\usepackage{booktabs}``); the notes are below the table."""
    lines = []
    for i, row in enumerate(table.rows):
        cells = [_decorated(cell, r"\textbf{{{}}}", r"\underline{{{}}}", _latex_text) for cell in row.cells]
        if row.minor:
            cells[0] = rf"\quad {cells[0]}"
        elif i and table.rows[i - 1].minor:
            lines.append(r"\addlinespace")
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex_text(table.title)}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{{''.join('r' if number else 'l' for number in _numbers(table))}}}",
            r"\toprule",
            " & ".join(map(_latex_text, table.header)) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            *(rf"\par\medskip{{\footnotesize {_latex_text(note)}\par}}" for note in table.notes),
            r"\end{table}",
            "",
        ]
    )


def as_csv(table: Table) -> str:
    """The records, a line each; floats with all their digits, None as an empty cell."""
    names = list(dict.fromkeys(name for record in table.records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(table.records)
    return text.getvalue()


def _numbers(table: Table) -> list[bool]:
    """Of each column whether it has numbers, which go to the right."""
    columns = zip(*([cell.text for cell in row.cells] for row in table.rows), strict=True)
    told = [any(text[:1].isdigit() or text[:1] in ("+", "−") for text in column) for column in columns]
    return [False, *(told[1:] or [False] * (len(table.header) - 1))]


def _decorated(cell: Cell, bold: str, underline: str, escape: Callable[[str], str]) -> str:
    text = escape(cell.text)
    marked = bold.format(text) if cell.bold else underline.format(text) if cell.underline else text
    return f"{marked} {escape('≠')}" if cell.differs else marked


def markdown_text(text: str) -> str:
    for special in "\\`*|":
        text = text.replace(special, f"\\{special}")
    return " ".join(text.replace("<", "&lt;").split())


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "–": "--", "…": r"\dots{}", "−": "$-$", "±": r"$\pm$", "≥": r"$\geq$", "≤": r"$\leq$",
    "×": r"$\times$", "√": r"$\surd$", "²": "$^2$", "‖": r"$\Vert$", "†": r"\textdagger{}", "→": r"$\to$",
    "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "Δ": r"$\Delta$", "η": r"$\eta$",
    "θ": r"$\theta$", "λ": r"$\lambda$", "μ": r"$\mu$", "ν": r"$\nu$", "ρ": r"$\rho$", "σ": r"$\sigma$",
    "τ": r"$\tau$", "≠": r"$\neq$", "³": "$^3$", "⁻": "$^-$", "§": r"\S{}", "·": r"$\cdot$", "°": r"$^\circ$",
    "∞": r"$\infty$", "½": r"$\frac12$", "₁": "$_1$", "₂": "$_2$", "₃": "$_3$", "ₐ": "$_a$", "ₖ": "$_k$",
    "ₗ": "$_l$", "ₛ": "$_s$", "’": "'",
}  # fmt: skip


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
