"""The runs that belong to each cell of a paper's table, and how they compare with what is printed there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gcfed.report.commands import beyond, command, own, simple
from gcfed.report.groups import Group
from gcfed.report.ranks import kendall, spearman
from gcfed.report.runs import Run
from gcfed.report.sample import ENDED, Sample, sample
from gcfed.report.units import Unit, unit

if TYPE_CHECKING:
    from gcfed.report.papers import Axis, PaperTable
    from gcfed.report.papers import Cell as PaperCell

# What the cells of a column must have in common for a fair comparison of its rows, where no row says otherwise.
_COMMON = ("rounds", "precision", "eval_every", "data.", "model.", "partition.", "participation.", "client.epochs",
           "client.batch_size")  # fmt: skip


@dataclass(frozen=True)
class Other:
    """Runs of a cell under another setting than those shown: "rounds 800", each key in which they differ from them.

    ``differs`` says whether it is not the paper's either.
    """

    sample: Sample
    differences: tuple[str, ...]
    differs: bool


@dataclass(frozen=True)
class Entry:
    """One cell of a paper's table and the runs that are of it. Numbers are in ``unit``.

    Attributes:
        paper: what the paper printed.
        ours: the runs of one setting: that which most of the column's cells have, the paper's before others.
        others: the runs of other settings, which a mean must not mix.
        differences: "rounds 30 (paper 800)", each a setting in which ``ours`` is not the paper's.
        common: keys and values of ``ours`` that the rows of a column should have in common.
        alike: whether ``common`` is that of most rows of the column: others have no rank among them.
        beyond: the overrides of ``ours`` beside the table's; None where no run has come to its end.
        missing: the seeds that are to be run; () where we cannot, or the paper has no number. ``command`` runs them.
        note: why there is no run of ours, from the table's file.
    """

    row: str
    column: str
    unit: Unit
    higher_is_better: bool | None
    paper: PaperCell
    ours: Sample | None
    others: tuple[Other, ...]
    differences: tuple[str, ...]
    common: Mapping[str, Any]
    alike: bool
    beyond: frozenset[str] | None
    missing: tuple[int, ...]
    command: str
    note: str

    @property
    def mean(self) -> float | None:
        return self.ours.mean if self.ours else None

    @property
    def ranked(self) -> float | None:
        """The mean, where it has a rank in its column: a bound has none, nor has a row under a setting of its own."""
        return None if self.ours is None or self.ours.at_least or not self.alike else self.ours.mean

    @property
    def paper_ranked(self) -> float | None:
        """The paper's mean likewise; the accuracy of a run that failed there is a word for that."""
        return None if self.paper.note in ("+", "failed") else self.paper.mean

    @property
    def difference(self) -> float | None:
        """Ours − the paper's; None where either is missing or only a bound."""
        if self.ours is None or self.ours.mean is None or self.paper.mean is None:
            return None
        return None if self.ours.at_least or self.paper.note == "+" else self.ours.mean - self.paper.mean

    @property
    def deviations(self) -> float | None:
        """The difference in units of √(s_ours² + s_paper²), or of the one standard deviation that there is.

        None beside a run that failed in the paper: its accuracy is a word for that, not a measurement.
        """
        if self.paper.note == "failed":
            return None
        scale = math.hypot((self.ours and self.ours.std) or 0.0, self.paper.std or 0.0)
        return None if self.difference is None or not scale else self.difference / scale


@dataclass(frozen=True)
class Order:
    """How far our order of a column's rows is the paper's: 1 the same, 0 unrelated, −1 reversed; NaN all equal."""

    column: str
    rows: int
    spearman: float
    kendall: float


def entries(paper: PaperTable, groups: Iterable[Group]) -> list[Entry]:
    """One a cell, by rows. A run is in every cell whose values its config has."""
    groups = list(groups)
    axes = [axis for row in paper.rows for axis in (row, *row.by_column.values())]
    own = {key for axis in axes for key in (*axis.match, *axis.setting)}  # what rows differ in on purpose
    found: dict[tuple[str, str], Entry] = {}
    for column in paper.columns:
        every = {k: v for k, v in (paper.common_match | column.match).items() if k not in own}
        here = [group for group in groups if _has(group, every)]
        cells = {row.label: _candidates(paper, row, column, here, own) for row in paper.rows}
        order = _ranked([candidate for of_row in cells.values() for candidate in of_row])
        extra = _extra(paper, column, cells, order)
        for row in paper.rows:
            found[row.label, column.label] = _entry(paper, row, column, cells[row.label], order, extra)
    return [found[row.label, column.label] for row in paper.rows for column in paper.columns]


def orders(cells: Sequence[Entry]) -> list[Order]:
    """Of the columns with three rows or more that both rank, in the same unit."""
    columns: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for entry in cells:
        if entry.ranked is not None and entry.paper_ranked is not None:
            columns[entry.column].append((entry.ranked, entry.paper_ranked, entry.unit.label))
    return [
        Order(column, len(ours), spearman(ours, theirs), kendall(ours, theirs))
        for column, pairs in columns.items()
        if len(pairs) > 2 and len({label for *_, label in pairs}) == 1
        for ours, theirs in [tuple(zip(*((a, b) for a, b, _ in pairs), strict=True))]
    ]


@dataclass(frozen=True)
class _Candidate:
    """The runs of one setting that match a cell, and the part of it that the rows of a column should share."""

    row: str
    runs: tuple[Run, ...]
    setting: Mapping[str, Any]
    common: tuple[tuple[str, Any], ...]
    differences: tuple[str, ...]

    @property
    def ended(self) -> int:
        return len({run.seed for run in self.runs if run.state in ENDED})

    @property
    def example(self) -> Run | None:
        return next((run for run in self.runs if run.state in ENDED), None)


def _has(group: Group, match: Mapping[str, Any]) -> bool:
    return all(same(group.runs[0].get(key), wanted) for key, wanted in match.items())


def _candidates(
    paper: PaperTable, row: Axis, column: Axis, groups: Sequence[Group], own: Collection[str]
) -> list[_Candidate]:
    match = paper.match(row, column)
    if paper.command_overrides(row, column) is None or paper.measure_of(row, column) is None or not match:
        return []
    return [
        _Candidate(
            row.label,
            group.runs,
            group.setting,
            tuple((k, v) for k, v in group.setting.items() if k.startswith(_COMMON) and k not in own),
            _differences(paper, row, column, group.runs[0]),
        )
        for group in groups
        if _has(group, match)
    ]


def same(ours: Any, theirs: Any) -> bool:
    """Whether a config's value is the table's: 1 is 1.0, and a list is its items."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def _differences(paper: PaperTable, row: Axis, column: Axis, run: Run) -> tuple[str, ...]:
    told = []
    for key, theirs in paper.settings(row, column).items():
        if not same(ours := run.get(key), theirs):
            why = f": {paper.departures[key].rstrip('.')}" if key in paper.departures else ""
            told.append(f"{key} {_value(ours)} (paper {_value(theirs)}{why})")
    return tuple(told)


def _value(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text.rpartition(".")[2] if text.startswith(("gcfed.", "torch.")) else text


def _between(theirs: Mapping[str, Any], shown: Mapping[str, Any]) -> tuple[str, ...]:
    keys = [key for key in {**theirs, **shown} if theirs.get(key) != shown.get(key)]
    return tuple(f"{key} {_value(theirs.get(key))}" for key in keys)


def _ranked(candidates: Sequence[_Candidate]) -> dict[tuple[Any, ...], int]:
    """The common parts, best first: that of most rows, then the closest to the paper, then that of most runs."""
    rows: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    far: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    runs: dict[tuple[Any, ...], int] = defaultdict(int)
    for c in candidates:
        rows[c.common] |= {c.row} if c.ended else set()
        far[c.common].append(len(c.differences))
        runs[c.common] += c.ended
    best = sorted(rows, key=lambda common: (-len(rows[common]), min(far[common]), -runs[common]))
    return {common: place for place, common in enumerate(best)}


def _best(candidates: Sequence[_Candidate], order: Mapping[tuple[Any, ...], int]) -> list[_Candidate]:
    return sorted(candidates, key=lambda c: (not c.ended, order[c.common], len(c.differences), -c.ended))


def _entry(
    paper: PaperTable,
    row: Axis,
    column: Axis,
    candidates: Sequence[_Candidate],
    order: Mapping[tuple[Any, ...], int],
    extra: tuple[str, ...],
) -> Entry:
    shown, measure = unit(paper.unit_of(row, column)), paper.measure_of(row, column)
    best = _best(candidates, order)
    samples = [sample(c.runs, measure or "", shown.factor) for c in best]
    example = best[0].example if best else None
    base, printed = paper.command_overrides(row, column), paper.cells[row.label, column.label]
    only = row.by_column.get(column.label)
    can_be_run = base is not None and measure is not None and printed.mean is not None
    missing = _missing(samples[:1], paper.seeds or 1) if can_be_run else ()
    told = base or ()
    return Entry(
        row=row.label,
        column=column.label,
        unit=shown,
        higher_is_better=paper.higher_is_better_of(row, column),
        paper=printed,
        ours=samples[0] if samples else None,
        others=tuple(
            Other(s, _between(c.setting, best[0].setting), bool(c.differences))
            for s, c in zip(samples[1:], best[1:], strict=True)
        ),
        differences=best[0].differences if best else (),
        common=dict(best[0].common) if best else {},
        alike=bool(best) and order[best[0].common] == 0,
        beyond=None if example is None else beyond(example, told),
        missing=missing,
        command=command(own(example) if example else (*told, *extra), missing) if missing else "",
        note=(only and only.note) or row.note or column.note,
    )


def _missing(samples: Sequence[Sample], seeds: int) -> tuple[int, ...]:
    """The lowest seeds that fill up to so many."""
    done = {run.seed for s in samples for run in (*s.runs, *s.without)}
    wanted = max(0, seeds - len(done))
    return tuple([seed for seed in range(1, wanted + len(done) + 1) if seed not in done][:wanted])


def _extra(
    paper: PaperTable,
    column: Axis,
    cells: Mapping[str, Sequence[_Candidate]],
    order: Mapping[tuple[Any, ...], int],
) -> tuple[str, ...]:
    """What a cell without runs needs beside the table's overrides to be as the column's other cells: ``rounds=30``."""
    best = _best([c for of_row in cells.values() for c in of_row], order)
    example = best[0].example if best else None
    if example is None:
        return ()
    row = next(row for row in paper.rows if row.label == best[0].row)
    return simple(example, paper.command_overrides(row, column) or ())
