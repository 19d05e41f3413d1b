"""Compares our numbers: with the printed ones, or with those of the reference row."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from gcfed.folders.measures import parse
from gcfed.reporting.student import rejected_by_holm, two_sided_p
from gcfed.reporting.verdict import compare_methods, family_size, reference_of
from gcfed.tables.gathering import Cell, Numbers
from gcfed.tables.plan import CellName
from gcfed.tables.records import Printed


class Gain(NamedTuple):
    """A row's mean difference to the reference of its column over their common seeds, and the 95 %
    interval.
    """

    reference: str
    value: float
    low: float
    high: float
    p: float  # of a difference of 0


class Sample(NamedTuple):
    """A mean over ``seeds`` runs and their sample standard deviation; None for a single run."""

    mean: float
    std: float | None
    seeds: int


class Difference(NamedTuple):
    """Ours less theirs, and the two-sided p of "both have the same mean"."""

    value: float
    p: float


def gains_of(cells: Sequence[Cell]) -> dict[CellName, Gain]:
    """The difference of each cell to FedAvg in its column, or to the best row."""
    columns: dict[str, list[Cell]] = {}
    for cell in cells:
        columns.setdefault(cell.column.label, []).append(cell)
    gains: dict[CellName, Gain] = {}
    for column, cells_of_column in columns.items():
        for row, gain in _gains_in_column(cells_of_column).items():
            gains[row, column] = gain
    return gains


def significant(gains: Mapping[CellName, Gain]) -> list[CellName]:
    """The cells whose difference stands after Holm's correction for all of them; none for a single
    difference, which needs no correction.
    """
    if len(gains) < 2:
        return []
    ps = {cell: gain.p for cell, gain in gains.items()}
    return rejected_by_holm(ps, family_of(gains))


def family_of(gains: Mapping[CellName, Gain]) -> int:
    """How many differences Holm's correction counts in a table."""
    rows: dict[str, list[str]] = {}  # by column
    for row, column in gains:
        rows.setdefault(column, []).append(row)
    references = {column: gain.reference for (_, column), gain in gains.items()}
    sizes = []
    for column, reference in references.items():
        sizes.append(family_size([*rows[column], reference], reference))
    return sum(sizes)


def _gains_in_column(cells: Sequence[Cell]) -> dict[str, Gain]:
    """By row. Only rows with the measure of the first one are compared."""
    ranked: list[tuple[float, str]] = []
    numbers_of: dict[str, Mapping[int, float]] = {}  # by row, then by seed
    for cell in cells:
        numbers = cell.numbers
        if numbers.mean is None or numbers.bound or cell.measure is None:
            continue
        if cell.measure != cells[0].measure:
            continue
        sign = -1 if parse(cell.measure).higher_is_better else 1
        ranked.append((sign * numbers.mean, cell.row.label))
        numbers_of[cell.row.label] = numbers.values
    reference = reference_of([row for _, row in sorted(ranked)])
    table = compare_methods(pd.DataFrame(numbers_of), reference)
    gains: dict[str, Gain] = {}
    for row, line in table[table["pairs"] > 1].iterrows():
        if row != reference:
            gains[str(row)] = Gain(
                reference, line["difference"], line["from"], line["to"], line["p"]
            )
    return gains


def compare_with_paper(ours: Numbers, printed: Printed, seeds: int) -> Difference | None:
    """Ours less the paper's; p is NaN if the paper has no deviation or does not say its seeds."""
    if ours.mean is None or ours.bound or printed.mean is None or printed.note == "+":
        return None
    difference = compare_means(
        Sample(ours.mean, ours.std, len(ours.values)), Sample(printed.mean, printed.std, seeds)
    )
    return difference or Difference(ours.mean - printed.mean, math.nan)


def compare_means(ours: Sample, theirs: Sample) -> Difference | None:
    """Welch's test, which does not assume equal variances (Welch 1947).

    A single run of ours has the printed standard deviation. None if theirs has none, or a single
    run, or if nothing varies.
    """
    if theirs.std is None or theirs.seeds < 2:
        return None
    their_part = theirs.std**2 / theirs.seeds
    if ours.std is None:
        our_part = theirs.std**2 / ours.seeds
        freedom: float = theirs.seeds - 1
    else:
        our_part = ours.std**2 / ours.seeds
        freedom = _freedom(our_part, ours.seeds, their_part, theirs.seeds)
    error = math.sqrt(our_part + their_part)
    if error == 0.0:
        return None
    value = ours.mean - theirs.mean
    return Difference(value, two_sided_p(value / error, freedom))


def _freedom(our_part: float, our_seeds: int, their_part: float, their_seeds: int) -> float:
    """Degrees of freedom by Welch and Satterthwaite; the parts are variances of means."""
    spread = our_part**2 / (our_seeds - 1) + their_part**2 / (their_seeds - 1)
    return (our_part + their_part) ** 2 / spread if spread else 1.0
