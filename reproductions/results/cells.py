"""What the tables of the pages have in common: their runs, their cells, means of tests, and how
numbers look.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gcfed.reporting.verdict import interval
from reproductions.stored import StoredRun, chosen

Runs = Mapping[str, StoredRun]
#: The first cells of a row → its other cells; None: a cell that the data do not give.
Cells = dict[tuple[str, ...], list[str | None]]

ACCURACY = "test/acc"


class Outcome(NamedTuple):
    """What became of a prediction."""

    seen: str
    holds: bool

    def row(self) -> list[str | None]:
        return [self.seen, "holds" if self.holds else "fails"]


def one_run_each(runs: Runs, overrides: Mapping[str, Sequence[str]]) -> dict[str, StoredRun]:
    """The one run with the overrides of each name. ValueError if there is none or several."""
    found = {}
    for name, words in overrides.items():
        (found[name],) = chosen(runs, *words)
    return found


def common_round(found: Runs, longest: int) -> int:
    """The last round that all runs have, at most that of the plan."""
    ends = [int(run.metrics.index[-1]) for run in found.values()]
    return min(*ends, longest)


def means_of_last(found: Runs, end: int, rounds: int) -> dict[str, float]:
    """Of each run, the mean of the tests in the last rounds up to ``end``, in percent, as a page
    prints it.
    """
    return {name: round(up_to(run, end, rounds), 2) for name, run in found.items()}


def less(found: Mapping[str, float], name: str, other: str) -> float:
    """A difference of two printed numbers, without what their binary form adds."""
    return round(found[name] - found[other], 2)


def up_to(run: StoredRun, end: int, rounds: int = 50, column: str = ACCURACY) -> float:
    """The mean of the tests in the rounds up to ``end``, in percent."""
    curve = run.curve(column)
    inside = curve[(curve.index > end - rounds) & (curve.index <= end)]
    return 100 * inside.mean()


def last(run: StoredRun, rounds: int, column: str = ACCURACY) -> float:
    """The mean of the tests in the last rounds, in percent."""
    return up_to(run, int(run.metrics.index[-1]), rounds, column)


def last_tests(run: StoredRun, count: int, column: str = ACCURACY) -> float:
    """The mean of the last tests, in percent."""
    return 100 * float(run.curve(column).tail(count).mean())


def number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def listed(values: Iterable[float], digits: int = 1) -> str:
    """A number for each seed."""
    return ", ".join(number(value, digits) for value in values)


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def interval_text(values: Iterable[float]) -> str:
    """The 95 % interval of the mean over the seeds."""
    low, high = interval([*values])
    return f"{number(low, 1)} to {number(high, 1)}"
