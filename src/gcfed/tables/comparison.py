"""Writes our numbers beside the paper's, as Markdown and CSV in the table's folder.

A table of your own has no printed numbers. It gets the 95 % interval of each mean, and the
difference to FedAvg or the best row, seed by seed, as the report has it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from gcfed.folders.folder import DIVERGED, mixed_versions
from gcfed.folders.measures import parse
from gcfed.folders.summary import rounds_in_words
from gcfed.tables.gathering import Cell
from gcfed.tables.plan import CellName
from gcfed.tables.ranking import (
    Difference,
    Gain,
    compare_with_paper,
    family_of,
    gains_of,
    significant,
)
from gcfed.tables.records import Printed, Table
from gcfed.utils.files import write_text


def write_comparison(
    table: Table,
    scale: str,
    cells: Sequence[Cell],
    root: Path,
    command: str,
    changes: Sequence[str],
    chosen: str,
) -> str:
    """Writes ``comparison.md`` and ``comparison.csv``; returns the first.

    Args:
        cells: those of :func:`gcfed.tables.gathering.gather`.
        changes: the overrides that the whole table does not have.
        chosen: a note with the settings that a search chose, or "".
    """
    gains: Mapping[CellName, Gain] = {}
    if not table.cells:
        gains = gains_of(cells)
    cells = sorted(cells, key=lambda cell: table.rows.index(cell.row))  # row by row
    marked = significant(gains)
    frame = DataFrame([_line(table, cell, gains, marked) for cell in cells])
    title = _title(table, scale, cells)
    notes = _notes(table, cells, gains, marked)
    if changes:
        notes.append(f"Other than the whole table: {', '.join(changes)}.")
    if chosen:
        notes.append(chosen)
    text = "\n\n".join([title, _markdown(table, frame), *notes, f"Made by: {command}"]) + "\n"
    write_text(root / "comparison.md", text)
    write_text(root / "comparison.csv", frame.to_csv(index=False))
    return text


def _line(
    table: Table, cell: Cell, gains: Mapping[CellName, Gain], marked: Collection[CellName]
) -> dict[str, Any]:
    """A cell: our mean over the finished runs, the printed number, and their difference, as text
    and as numbers.

    Args:
        gains: the differences of an own table, which has no printed numbers.
        marked: the cells whose difference gets a ``*``.
    """
    printed = table.printed(cell.row, cell.column)
    against_paper = None
    if "rounds" not in cell.differences:
        against_paper = compare_with_paper(cell.numbers, printed, table.printed_seeds)
    digits = cell.unit.digits
    if table.cells:
        difference = _text_of_difference(against_paper, digits)
    else:
        difference = _text_of_gain(gains.get(cell.name), digits)
        if cell.name in marked:
            difference += "*"
    texts = {
        "row": cell.row.label,
        "column": cell.heading,
        "ours": _text_of_ours(cell, with_interval=not table.cells),
        "paper": _text_of_paper(printed, digits),
        "difference": difference,
    }
    return texts | _numbers(cell, printed, against_paper)


def _numbers(cell: Cell, printed: Printed, against_paper: Difference | None) -> dict[str, Any]:
    """The numbers of a cell, with all their digits."""
    ours = cell.numbers
    return {
        "mean": ours.mean,
        "std": ours.std,
        "seeds": " ".join(map(str, ours.values)),
        "values": " ".join(map(str, ours.values.values())),
        "bound": ours.bound,
        "paper_mean": printed.mean,
        "paper_std": printed.std,
        "p": against_paper.p if against_paper else None,
        "measure": cell.measure,
        "folder": str(cell.works[0].folder),
    }


def _text_of_ours(cell: Cell, with_interval: bool) -> str:
    if not cell.runs:
        return "no run"
    if cell.not_compared:
        return "not compared"
    ours = cell.numbers
    digits = cell.unit.digits
    diverged = any(run.state == DIVERGED for run in cell.runs)
    if ours.mean is None:
        return "diverged" if diverged else "–"
    text = f"{ours.mean:{digits}}"
    if ours.bound:
        text += "+"
    if with_interval and ours.ends is not None:
        low, high = ours.ends
        text += f" ({low:{digits}} to {high:{digits}})"
    elif ours.std is not None:
        text += f" ({ours.std:{digits}})"
    if diverged:
        text += " †"
    if len(ours.values) < len(cell.works):
        text += f" [{len(ours.values)} of {len(cell.works)}]"
    return text


def _text_of_paper(printed: Printed, digits: str) -> str:
    if printed.mean is None:
        return printed.note or "–"
    text = f"{printed.mean:{digits}}"
    if printed.std is not None:
        text += f" ({printed.std:{digits}})"
    if printed.note == "+":
        return f"{text}+"
    return f"{text}, {printed.note}" if printed.note else text


def _text_of_difference(difference: Difference | None, digits: str) -> str:
    if difference is None:
        return ""
    text = f"{difference.value:+{digits}}"
    return text if math.isnan(difference.p) else f"{text} (p {difference.p:.2g})"


def _text_of_gain(gain: Gain | None, digits: str) -> str:
    if gain is None:
        return ""
    return f"{gain.value:+{digits}} ({gain.low:{digits}} to {gain.high:{digits}})"


def _title(table: Table, scale: str, cells: Sequence[Cell]) -> str:
    """The heading, with the rounds of the runs that have finished."""
    place = table.table or table.name
    if table.table.isalnum():
        place = f"Table {table.table}"
    names = ", ".join(name for name in (table.paper, place, table.title) if name)
    rounds = sorted({run.rounds for cell in cells for run in cell.runs})
    length = "no finished run"
    if rounds:
        length = rounds_in_words(rounds[-1])
    if len(rounds) > 1:
        length = f"{rounds[0]} to {length}"
    return f"## {names} (scale={scale}, {length})"


def _markdown(table: Table, cells: DataFrame) -> str:
    """A row for ours, the paper's and their difference."""
    kinds = {"ours": "", "paper": "*paper*", "difference": "*difference*"}
    if not table.cells:
        del kinds["paper"]
    columns = [*dict.fromkeys(cells["column"])]
    lines = []
    for row, cells_of_row in cells.set_index("column").groupby("row", sort=False):
        for kind, heading in kinds.items():
            if cells_of_row[kind].any():
                lines.append([heading or row, *cells_of_row[kind].reindex(columns, fill_value="–")])
    frame = DataFrame(lines, columns=["", *columns])
    return frame.to_markdown(index=False, disable_numparse=True)


def _notes(
    table: Table,
    cells: Sequence[Cell],
    gains: Mapping[CellName, Gain],
    marked: Collection[CellName],
) -> list[str]:
    """What a reader must know: source, measure, differences, and what is not compared."""
    notes = []
    if table.source:
        notes.append(f"Source: {table.source}. {table.note}")
    notes += _measures(cells)
    notes += _listed_differences(cells)
    if table.cells and any("rounds" in cell.differences for cell in cells):
        notes.append("Runs with other rounds than the paper's have no difference to its numbers.")
    notes += dict.fromkeys(
        f"Not compared: {cell.not_compared}." for cell in cells if cell.not_compared
    )
    mixed = mixed_versions(run for cell in cells for run in cell.runs)
    if mixed:
        notes.append(f"{mixed[0].upper()}{mixed[1:]}.")
    if table.unstated:
        unstated = table.unstated.strip().rstrip(".")
        notes.append(f"Not stated: {unstated}; ours are the experiment's.")
    marks = "[n of m]: of n seeds; †: a run diverged; +: a lower bound"
    if table.cells:
        notes.append(
            f"Mean (sample standard deviation) over seeds; {marks}; p: Welch's test of the two"
            " means, where a single run of ours has the paper's standard deviation."
        )
        return notes
    notes.append(f"Mean (95 % interval, Student's t) over seeds; {marks}.")
    references = dict.fromkeys(gain.reference for gain in gains.values())
    if references:
        notes.append(
            f"Differences are to {' or '.join(references)}, seed by seed, with their 95 % interval."
        )
    if len(gains) > 1:
        family = f"the {len(gains)} differences of this table"
        if family_of(gains) > len(gains):
            family = f"{family_of(gains)} pairs: all of a column whose best row is the reference"
        stands = "*: a difference that stands also" if marked else "No difference stands"
        notes.append(
            f"Each interval is for one difference alone. {stands} after Holm's correction (5 %)"
            f" for {family}."
        )
    return notes


def _listed_differences(cells: Sequence[Cell]) -> list[str]:
    """In what ours differ, with the rows that do if it is not all."""
    rows: dict[str, dict[str, None]] = {}  # a difference → the rows that have it
    for cell in cells:
        for text in cell.differences.values():
            rows.setdefault(text, {})[cell.row.label] = None
    number = len({cell.row.label for cell in cells})
    texts = []
    for text, having in rows.items():
        texts.append(f"{text} [{', '.join(having)}]" if len(having) < number else text)
    return [f"Ours differs in {'; '.join(texts)}."] if texts else []


def _measures(cells: Sequence[Cell]) -> list[str]:
    """The measure of our numbers, or of each column if they differ."""
    by_column: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.measure:
            words = f"{parse(cell.measure).title} ({cell.measure})"
            by_column.setdefault(cell.column.label, {})[words] = None
    texts = {column: " or ".join(words) for column, words in by_column.items()}
    if len({*texts.values()}) == 1:
        return [f"Measure: {next(iter(texts.values()))}."]
    return [f"Measures: {'; '.join(f'{column}: {text}' for column, text in texts.items())}."]
