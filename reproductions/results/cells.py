"""What the tables of the pages have in common: their runs, their cells, a mean of tests, and how
numbers look.
"""

from collections.abc import Mapping

from reproductions.stored import StoredRun

Runs = Mapping[str, StoredRun]
#: The first cells of a row → its other cells; None: a cell that the data do not give.
Cells = dict[tuple[str, ...], list[str | None]]

ACCURACY = "test/acc"


def up_to(run: StoredRun, end: int, rounds: int = 50) -> float:
    """The mean of the tests in the rounds up to ``end``, in percent."""
    curve = run.curve(ACCURACY)
    inside = curve[(curve.index > end - rounds) & (curve.index <= end)]
    return 100 * inside.mean()


def number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
