"""What the tables of the pages have in common: their runs, their cells, means of tests, and how
numbers look.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gcfed.reporting.verdict import interval
from reproductions.stored import StoredRun, chosen

Runs = Mapping[str, StoredRun]
#: The first cells of a row → its other cells; None: a cell that the data do not give.
Cells = dict[tuple[str, ...], list[str | None]]

ACCURACY = "test/acc"


class Verdict(NamedTuple):
    """What became of a prediction."""

    seen: str
    holds: bool

    def row(self) -> list[str | None]:
        return [self.seen, "holds" if self.holds else "fails"]


def rows_of(verdicts: Mapping[str, Verdict], given: int = 1) -> Cells:
    """The rows of a table of predictions, by the prediction's number.

    Args:
        given: number of cells between the number and the verdict, which the page itself has.
    """
    texts: list[str | None] = [None] * given
    return {(name,): [*texts, *verdict.row()] for name, verdict in verdicts.items()}


@dataclass(frozen=True)
class Comparison:
    """The runs that a plan compares at the last round that all of them have.

    Attributes:
        overrides: the overrides of each name's one run.
        measured: so many last rounds, whose tests are averaged.
        longest: rounds of the plan.
    """

    overrides: Mapping[str, Sequence[str]]
    measured: int
    longest: int = 200

    def runs(self, stored: Runs) -> dict[str, StoredRun]:
        """The one run of each name. ValueError if a name has none or several."""
        found = {}
        for name, words in self.overrides.items():
            (found[name],) = chosen(stored, *words)
        return found

    def end(self, stored: Runs) -> int:
        """The last round that all runs have, at most that of the plan."""
        ends = [int(run.metrics.index[-1]) for run in self.runs(stored).values()]
        return min(*ends, self.longest)

    def at(self, run: StoredRun, end: int) -> float:
        """The mean of the tests in the measured rounds up to ``end``, in percent, as a page prints
        it.
        """
        return round(up_to(run, end, self.measured), 2)

    def accuracies(self, stored: Runs) -> dict[str, float]:
        """The plan's measure of each name: that of the last common rounds."""
        end = self.end(stored)
        return {name: self.at(run, end) for name, run in self.runs(stored).items()}


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
