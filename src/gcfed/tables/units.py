"""The units in which a table shows its measures."""

from __future__ import annotations

from typing import NamedTuple

from gcfed.folders.columns import is_accuracy
from gcfed.folders.measures import parse


class Unit(NamedTuple):
    """How numbers are shown: the name in a column's heading, the factor, and the format."""

    name: str
    factor: float
    digits: str


UNITS = {
    "percent": Unit("%", 100.0, ".2f"),
    "points": Unit("%", 100.0, ".3g"),
    "rounds": Unit("", 1.0, ".0f"),
    "seconds": Unit("s", 1.0, ".3g"),
    "1e-3": Unit("10⁻³", 1e3, ".3f"),
    "none": Unit("", 1.0, ".4g"),
}


def unit_of(measure: str) -> Unit:
    """The unit of a measure whose table names none."""
    asked = parse(measure)
    if asked.is_to_target:
        return UNITS[asked.statistic]
    return UNITS["percent" if is_accuracy(asked.column) else "none"]
