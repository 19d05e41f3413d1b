"""Units of the tables: what our numbers are multiplied with, and how many digits are shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """``label`` goes behind a column's name, "" for a bare number; ``digits`` is a format of Python's."""

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
    "GB": Unit("GB", 1e-9, ".3g"),
    "1e-3": Unit("10⁻³", 1e3, ".3f"),
    "none": Unit("", 1.0, ".4g"),
}


def unit(name: str) -> Unit:
    """By its name in a paper's table.

    Raises:
        ValueError: there is no such unit.
    """
    if name not in UNITS:
        raise ValueError(f"unit={name!r}: the units are {', '.join(UNITS)}.")
    return UNITS[name]
