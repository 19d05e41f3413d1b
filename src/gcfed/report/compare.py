"""A paper's table beside our runs, as a table for people and one for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gcfed.report import commands
from gcfed.report.entries import Entry, Order, entries, orders
from gcfed.report.groups import Group
from gcfed.report.notes import notes
from gcfed.report.runs import DIVERGED, FAILED, UNFINISHED, Run
from gcfed.report.sample import mean_std, numbers
from gcfed.report.tables import Cell, Row, Table, marked

if TYPE_CHECKING:
    from gcfed.report.papers import PaperTable


@dataclass(frozen=True)
class Comparison:
    """A paper's table beside our runs.

    Attributes:
        entries: its cells, by rows.
        table: for people: each row ours, then the paper's, then the difference; its notes say what differs.
        orders: of the columns with three comparable rows or more.
        command: runs all that is missing of the table in the setting that it shows; "" where no study does that.
        missing: (cells, command) of the missing seeds of a cell, or of several cells that read the same runs.
    """

    paper: PaperTable
    entries: tuple[Entry, ...]
    orders: tuple[Order, ...]
    table: Table
    command: str
    missing: tuple[tuple[str, str], ...]

    @property
    def found(self) -> bool:
        """Whether any run belongs to the table, in whatever state."""
        return any(entry.ours for entry in self.entries)


def compare(
    paper: PaperTable, groups: Iterable[Group], shown: Callable[[Run], str] = lambda run: run.folder.name
) -> Comparison:
    """The table beside the runs of the groups that match it; ``shown`` gives a run's folder as a reader may see it."""
    cells = entries(paper, groups)
    ranked = orders(cells)
    missing: dict[str, list[str]] = defaultdict(list)
    for entry in cells:
        if entry.missing:
            missing[entry.command].append(f"{entry.row}, {entry.column}")
    return Comparison(
        paper=paper,
        entries=tuple(cells),
        orders=tuple(ranked),
        table=_table(paper, cells, notes(paper, cells, ranked, shown)),
        command=commands.study(paper.name, (entry.beyond for entry in cells if entry.beyond is not None)),
        missing=tuple(("; ".join(places), command) for command, places in missing.items()),
    )


def _table(paper: PaperTable, cells: Sequence[Entry], told: Iterable[str]) -> Table:
    by_column = {column.label: [entry for entry in cells if entry.column == column.label] for column in paper.columns}
    units = {column: {entry.unit.label for entry in of_column} for column, of_column in by_column.items()}
    one_unit = len({label for labels in units.values() for label in labels}) == 1
    header = [
        f"{column} ({labels.copy().pop()})" if not one_unit and len(labels) == 1 and "" not in labels else column
        for column, labels in units.items()
    ]
    ours = {c: _marked(of_column, _ours, lambda entry: entry.ranked) for c, of_column in by_column.items()}
    theirs = {c: _marked(of_column, _theirs, lambda entry: entry.paper_ranked) for c, of_column in by_column.items()}
    rows = []
    for i, row in enumerate(paper.rows):
        of_row = [of_column[i] for of_column in by_column.values()]
        rows.append(Row((Cell(row.label), *(ours[column][i] for column in by_column))))
        rows.append(Row((Cell("paper"), *(theirs[column][i] for column in by_column)), minor=True))
        if any(entry.difference is not None for entry in of_row):
            rows.append(Row((Cell("difference"), *map(_difference, of_row)), minor=True))
    unit = f" ({cells[0].unit.label})" if one_unit and cells[0].unit.label else ""
    return Table(
        name=paper.name,
        title=f"{paper.paper}, Table {paper.table}: {paper.title}{unit}",
        header=("", *header),
        rows=tuple(rows),
        notes=tuple(told),
        records=tuple(record for entry in cells for record in _records(paper, entry)),
    )


def _marked(
    of_column: Sequence[Entry], cell: Callable[[Entry], Cell], number: Callable[[Entry], float | None]
) -> list[Cell]:
    """The column's cells, the best ones marked as they are shown; not where the rows measure different things."""
    cells = [cell(entry) for entry in of_column]
    kinds = {(entry.unit.label, entry.higher_is_better) for entry in of_column}
    if len(kinds) > 1:
        return cells
    found = [(entry.unit, number(entry)) for entry in of_column]
    numbers = [None if value is None else float(unit.text(value)) for unit, value in found]
    return marked(cells, numbers, of_column[0].higher_is_better)


def _ours(entry: Entry) -> Cell:
    sample = entry.ours
    title = "; ".join(_told(entry))
    if sample is None:
        return Cell("–", title=title, state="missing")
    if sample.mean is not None:
        text = mean_std(sample, entry.unit, wanted=len(sample.runs) + len(sample.without) + len(entry.missing))
        state = DIVERGED if sample.diverged else ""
        return Cell(text, title=title, state=state, differs=bool(entry.differences))
    if sample.without:
        return Cell(DIVERGED if sample.diverged else "–", title=title, state=DIVERGED if sample.diverged else "missing")
    state = FAILED if any(run.state == FAILED for run in sample.uncounted) else UNFINISHED
    return Cell(state, title=title, state=state)


def _told(entry: Entry) -> Iterator[str]:
    """What a page says of a cell when asked."""
    if entry.ours:
        for run, value in zip(entry.ours.runs, entry.ours.values, strict=True):
            yield f"seed {run.seed}: {entry.unit.text(value)}{' (diverged)' if run.state == DIVERGED else ''}"
        for run in entry.ours.without:
            yield f"seed {run.seed}: not measured{' (diverged)' if run.state == DIVERGED else ''}"
        for run in entry.ours.uncounted:
            yield f"seed {run.seed}: {run.state} {run.note}"
        yield from entry.differences
    elif entry.note:
        yield entry.note
    if entry.missing:
        yield f"missing: seed{'s' * (len(entry.missing) > 1)} {', '.join(map(str, entry.missing))}"


def _theirs(entry: Entry) -> Cell:
    mean, std, note = entry.paper.mean, entry.paper.std, entry.paper.note
    if mean is None:
        return Cell(note or "–")
    deviation = "" if std is None else f" ({entry.unit.text(std)})"
    if note == "+":
        return Cell(f"{entry.unit.text(mean)}+{deviation}")
    return Cell(f"{entry.unit.text(mean)}{deviation}{f', {note}' if note else ''}")


def _difference(entry: Entry) -> Cell:
    if entry.difference is None:
        return Cell("")
    text = f"{'−' if entry.difference < 0 else '+'}{entry.unit.text(abs(entry.difference))}"
    return Cell(text if entry.deviations is None else f"{text} ({abs(entry.deviations):.1f} σ)")


def _records(paper: PaperTable, entry: Entry) -> Iterator[Mapping[str, Any]]:
    """A line for the setting that is shown, and one for each other."""
    base = {
        "table": paper.name, "row": entry.row, "column": entry.column, "unit": entry.unit.label,
        "paper_mean": entry.paper.mean, "paper_std": entry.paper.std, "paper_note": entry.paper.note,
    }  # fmt: skip
    lines = [(entry, bool(entry.differences), "yes", entry.differences, entry.missing)]
    lines += [(replace(entry, ours=o.sample), o.differs, "no", o.differences, ()) for o in entry.others]
    for line, differs, shown, setting, missing in lines:
        yield {**base, **numbers(line.ours), "difference": line.difference, "deviations": line.deviations,
               "differs_from_paper": "yes" if differs else "", "shown": shown, "setting": "; ".join(setting),
               "missing_seeds": " ".join(map(str, missing))}  # fmt: skip
