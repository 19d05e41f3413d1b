"""What is to be said below a paper's table beside our runs: settings, mixtures, states, order of the rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gcfed.report.entries import Entry, Order
from gcfed.report.runs import DIVERGED, FAILED, UNFINISHED, Run
from gcfed.report.sample import AGAIN, BOUND, MARK, Repeat, mean_std

if TYPE_CHECKING:
    from gcfed.report.papers import PaperTable

Place = tuple[str, str]  # labels of row and column


def notes(
    paper: PaperTable, cells: Sequence[Entry], ranked: Sequence[Order], shown: Callable[[Run], str]
) -> Iterator[str]:
    """The paragraphs below the table; ``shown`` gives a run's folder as a reader may see it."""
    seeds = f"means over {paper.seeds} seeds" if paper.seeds and paper.seeds > 1 else "as printed"
    yield (
        f"Ours: mean (sample standard deviation) over seeds; [n]: of n seeds, where more are wanted. Paper: {seeds}, "
        f"{paper.source}. Best of a column in bold, second underlined, ours and the paper's apart."
    )
    if any(entry.deviations is not None for entry in cells):
        yield (
            "Difference: ours − the paper's; in parentheses in units of σ, the root of the sum of both variances, or "
            "the one standard deviation that there is."
        )
    if any(entry.ours and entry.ours.at_least for entry in cells):
        yield BOUND
    yield from _differing(cells)
    yield from _mixed(paper, cells)
    yield from _others(cells)
    yield from _repeated(cells, shown)
    yield from _states(cells)
    if ranked:
        told = "; ".join(f"{o.column}: ρ {_rank(o.spearman)}, τ {_rank(o.kendall)} of {o.rows} rows" for o in ranked)
        yield (
            "Order of the rows, ours against the paper's, by Spearman's ρ of the ranks and Kendall's τ of the pairs "
            f"(1: the same order, 0: unrelated, −1: reversed). {told}."
        )
    if paper.note:
        yield " ".join(paper.note.split())


def _rank(number: float) -> str:
    return "–" if math.isnan(number) else f"{number:.2f}".replace("-", "−")


def _differing(cells: Sequence[Entry]) -> Iterator[str]:
    """Each setting that differs, with the rows or columns that it concerns."""
    ours = {(entry.row, entry.column): entry.differences for entry in cells if entry.ours}
    concerned: dict[str, list[Place]] = defaultdict(list)
    for place, differences in ours.items():
        for difference in differences:
            concerned[difference].append(place)
    by_places: dict[str, list[str]] = defaultdict(list)
    for difference, places in concerned.items():
        by_places[_places(places, list(ours))].append(difference)
    if ours:
        told = "; ".join(f"{places}: {', '.join(differences)}" for places, differences in by_places.items())
        yield f"Where our setting is not the paper's (≠): {told}." if told else "Our settings are the paper's."


def _places(some: Sequence[Place], every: Sequence[Place]) -> str:
    if len(some) == len(every):
        return "everywhere"
    for kind, axis in (("column", 1), ("row", 0)):
        labels = dict.fromkeys(place[axis] for place in some)
        if sum(place[axis] in labels for place in every) == len(some):
            return f"{kind}{'s' * (len(labels) > 1)} {' and '.join(labels)}"
    return " and ".join(f"{row} ({column})" for row, column in some)


def _mixed(paper: PaperTable, cells: Sequence[Entry]) -> Iterator[str]:
    """Where the rows of a column are not under one setting, and which of them have a rank."""
    for column in paper.columns:
        here = [entry for entry in cells if entry.column == column.label and entry.ours and entry.ours.values]
        for key in dict.fromkeys(key for entry in here for key in entry.common):
            rows: dict[str, list[str]] = defaultdict(list)
            for entry in here:
                rows[str(entry.common.get(key, "none"))].append(entry.row)
            if len(rows) > 1:
                told = ", ".join(f"{value} ({', '.join(labels)})" for value, labels in rows.items())
                among = ", ".join(entry.row for entry in here if entry.alike) or "none"
                yield f"The rows of {column.label} are not alike in {key}: {told}. Ranked: {among}."


def _others(cells: Sequence[Entry], most: int = 8) -> Iterator[str]:
    told = [
        f"{entry.row}, {entry.column}: "
        f"{mean_std(other.sample, entry.unit, wanted=0) if other.sample.values else 'not measured'} "
        f"with {', '.join(other.differences)}"
        for entry in cells
        for other in entry.others
        if other.sample.values or other.sample.without
    ]
    if told:
        more = f"; and {len(told) - most} more, in the CSV" if len(told) > most else ""
        yield f"Runs of other settings, in no mean above: {'; '.join(told[:most])}{more}."


def _repeated(cells: Sequence[Entry], shown: Callable[[Run], str]) -> Iterator[str]:
    """Names further runs of a seed, each once though several columns may read it."""
    named: dict[Any, str] = {}
    for entry in cells:
        for repeat in entry.ours.repeated if entry.ours else ():
            where = f"{entry.row}, {entry.column}, seed {repeat.run.seed}"
            named.setdefault(repeat.run.folder, f"{where}: {shown(repeat.run)} ({_apart(repeat, entry)})")
    if named:
        yield f"{AGAIN}: {'; '.join(named.values())}."


def _apart(repeat: Repeat, entry: Entry) -> str:
    if repeat.difference is None:
        return repeat.run.state
    return f"{'−' if repeat.difference < 0 else '+'}{entry.unit.text(abs(repeat.difference))}"


def _states(cells: Sequence[Entry]) -> Iterator[str]:
    """Names the runs that did not end well, each once though several columns may read it."""
    named: dict[str, dict[Any, str]] = defaultdict(dict)
    for entry in cells:
        for sample in (*([entry.ours] if entry.ours else []), *(other.sample for other in entry.others)):
            for run in (*sample.diverged, *sample.uncounted):
                named[run.state].setdefault(run.folder, f"{entry.row}, {entry.column}, seed {run.seed}: {run.note}")
    heads = {
        DIVERGED: f"Diverged (marked {MARK}; in the mean unless its value is not finite)",
        FAILED: "Failed (in no mean)",
        UNFINISHED: "Unfinished (in no mean)",
    }
    for state, head in heads.items():
        if named[state]:
            yield f"{head}: {'; '.join(named[state].values())}."
