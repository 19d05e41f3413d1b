"""Measures of a run by name, such as ``last10:test/acc``, and moving means of accuracies.

==========================  =================================================================
``final:<column>``          the last value of a column of ``metrics.csv``; also ``last:<column>``
                            and ``<column>``
``best:<column>``           its highest finite value; the lowest one where less is better
``max:``, ``min:``          its highest, its lowest finite value
``mean:``, ``median:``      over all rounds
``total:<column>``          its sum over all rounds, as for ``comm/up_bytes``
``mean:<column>[10]``       over the last ten rounds; also ``last10:<column>``
``<column>@500``            the last value up to round 500; ``mean:<column>[10]@500``
``rounds:<column>>=0.8``    the first round at a target; ``rounds:0.8`` is the test accuracy's;
                            ``rounds:<column>[10]>=0.8``: of the mean of the tests in ten rounds;
                            ``rounds:test/loss<=0.5``: of a column of which less is better
``seconds:<column>>=0.8``   the time of that round on the simulated clock (``clock/seconds``)
``best_round``              a number that only ``summary.json`` has
==========================  =================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from gcfed.folders.columns import (
    SUMMARY_STATISTICS,
    better,
    is_accuracy,
    is_summary_number,
    known_better,
    named_better,
    title_of,
)
from gcfed.utils.refusal import Refusal

if TYPE_CHECKING:
    import pandas as pd

    from gcfed.folders.folder import Run

WINDOW = 10  # rounds of GC-Fed's moving mean
DECAY = 0.9  # of FedACG's exponential average
ROUNDING = 1e-7  # of float32, in which earlier versions averaged a test
CLOCK = "clock/seconds"  # the column of the simulated time
OWN_TESTS = "metrics=personal data.client_test=0.2"  # lets clients test their own models
TO_TARGET = ("rounds", "seconds")
#: What is computed from the values of a column.
STATISTICS: dict[str, Callable[[Any], Any]] = {
    "last": lambda curve: curve.iloc[-1],
    "max": lambda curve: finite(curve).max(),
    "min": lambda curve: finite(curve).min(),
    "mean": methodcaller("mean"),
    "median": methodcaller("median"),
    "total": methodcaller("sum"),
}
FORMS = (
    "A measure is final:, best:, max:, min:, mean:, median: or total:<column>, last10:<column> or"
    " mean:<column>[10], <column>@<round>, rounds: or seconds:<target accuracy>,"
    " rounds:<column>>=<target>, rounds:<column><=<target>, a column, or a number of summary.json."
)
#: Short forms → the form that they stand for.
SHORT_FORMS = {
    r"final:(.+)": r"last:\1",
    r"last10:([^@]+)(@\d+)?": r"mean:\1[10]\2",
    r"([^:@]+@\d+)": r"last:\1",
    r"(rounds|seconds):(\d*\.?\d+)": r"\1:test/acc>=\2",
}
_FORM = re.compile(
    r"(?P<statistic>\w+):(?P<column>[^\[\]@<>]+?)(?:\[(?P<window>\d+)\])?"
    r"(?:@(?P<until>\d+)|(?P<sign>[<>]=)(?P<target>\d*\.?\d+))?"
)
_NAME = re.compile(r"[^:@\[\]]+")


@dataclass(frozen=True)
class Measure:
    """The parts of a measure."""

    statistic: str  # of STATISTICS or TO_TARGET; "" for a number of ``summary.json``
    column: str  # or that number's name
    window: int | None = None  # of the last so many rounds; to a target: of means of so many rounds
    until: int | None = None  # up to this round
    target: float | None = None
    at_most: bool = False  # whether a value at or below the target reaches it

    @property
    def is_to_target(self) -> bool:
        """Whether it says when a run reached a target."""
        return self.target is not None

    @property
    def higher_is_better(self) -> bool:
        """Whether a search looks for the highest value. A measure for which neither is better
        counts as one.
        """
        return not self.is_to_target and better(self.column) != "lower"

    @property
    def title(self) -> str:
        """``test accuracy, last 10 rounds``, ``rounds to 80 %``."""
        name = title_of(self.column)
        means = f" in means of {self.window} rounds" if self.window else ""
        if self.target is not None:
            if self.column == "test/acc":
                return f"{self.statistic} to {100 * self.target:g}\u00a0%{means}"
            return f"{self.statistic} to {name} {self.target:g}{means}"
        words = {"max": "highest", "min": "lowest", "median": "median"}
        words["max" if better(self.column) == "higher" else "min"] = "best"
        # a title without a word is that of the last value, the whole sum, or the mean of a window
        if self.window:
            words["total"] = "total"
        else:
            words["mean"] = "mean"
        parts = [name]
        if self.statistic in words:
            parts.append(words[self.statistic])
        if self.window:
            parts.append(f"last {self.window} rounds")
        at = "" if self.until is None else f" at round {self.until}"
        return ", ".join(parts) + at

    def of(self, run: Run) -> float | None:
        """The measure in the run's own unit (accuracies 0 to 1); None if it was not measured, is
        not finite, or if the run did not reach the target.
        """
        if not self.statistic:
            number = run.summary.get(self.column)
            is_number = isinstance(number, int | float) and math.isfinite(number)
            return number if is_number else None
        curve = run.curve(self.column)
        if self.target is not None:
            return self._reached(run, smooth(curve, self.window) if self.window else curve)
        end = run.rounds if self.until is None else self.until
        first = end - self.window + 1 if self.window else 1
        curve = curve.loc[first:end]
        if curve.empty or run.rounds < end:
            return None
        number = STATISTICS[self.statistic](curve)
        return float(number) if math.isfinite(number) else None

    def _reached(self, run: Run, curve: pd.Series) -> float | None:
        assert self.target is not None
        if self.at_most:
            reached = first_round(-curve, -self.target)
        else:
            reached = first_round(curve, self.target)
        if reached is None or self.statistic == "rounds":
            return reached
        return seconds_at(run, reached)

    def bounded(self, run: Run) -> tuple[float | None, bool]:
        """The measure, and whether it is a lower bound: a run that missed its target counts with
        all its rounds or seconds.
        """
        number = self.of(run)
        if number is not None or not self.is_to_target or run.curve(self.column).empty:
            return number, False
        whole = run.rounds if self.statistic == "rounds" else seconds_at(run, run.rounds)
        return whole, True


def parse(measure: str, key: str = "measure") -> Measure:
    """The parts of a measure.

    Raises Refusal, which names ``key``, for any other text; for ``best:`` of a column whose best
    value is not known; and for the plain name of a column if ``summary.json`` has another number
    under it than the last value.
    """
    if _NAME.fullmatch(measure):
        return _of_name(measure, key)
    match = _FORM.fullmatch(full_form(measure))
    if match is None or not _is_known(match["statistic"], match["target"]):
        raise Refusal(f"{key}={measure!r} is not understood. {FORMS}")
    column = match["column"]
    statistic = match["statistic"]
    _check_rounds(match, f"{key}={measure!r}")
    if statistic == "best":
        if better(column) == "neither":
            raise Refusal(
                f"{key}={measure!r}: neither more nor less of {column} is better. Take"
                f" final:{column} or last10:{column}."
            )
        if named_better(column) is None:
            raise Refusal(
                f"{key}={measure!r}: it is not known whether more or less of {column} is better."
                f" Write max:{column} or min:{column}."
            )
        statistic = "max" if better(column) == "higher" else "min"
    at_most = match["sign"] == "<="
    if match["sign"] and better(column) == ("higher" if at_most else "lower"):
        raise Refusal(
            f"{key}={measure!r}: a target of {column} is reached from the other side. Write"
            f" {'>=' if at_most else '<='} in it."
        )
    return Measure(
        statistic,
        column,
        window=int(match["window"]) if match["window"] else None,
        until=int(match["until"]) if match["until"] else None,
        target=float(match["target"]) if match["target"] else None,
        at_most=at_most,
    )


def _check_rounds(match: re.Match[str], setting: str) -> None:
    """Raises Refusal for the last value of a window, and for a window or a round 0."""
    column = match["column"]
    if match["window"] and match["statistic"] == "last":
        raise Refusal(
            f"{setting}: final: and last: are one value. Write mean:{column}[{match['window']}] for"
            " the mean over these rounds."
        )
    for number in (match["window"], match["until"]):
        if number is not None and int(number) < 1:
            raise Refusal(f"{setting}: rounds count from 1, so {number} is none.")


def full_form(measure: str) -> str:
    """The measure without short forms: ``rounds:test/acc>=0.8`` for ``rounds:0.8``."""
    for short, long in SHORT_FORMS.items():
        measure = re.sub(f"^{short}$", long, measure)
    return measure


def _of_name(name: str, key: str) -> Measure:
    """A number of ``summary.json``, or the last value of a column."""
    if name in SUMMARY_STATISTICS:
        raise Refusal(
            f"{key}={name!r} may be the last round or all of them. Take final:{name} or"
            f" {SUMMARY_STATISTICS[name]}:{name}."
        )
    return Measure("" if is_summary_number(name) else "last", name)


def _is_known(statistic: str, target: str | None) -> bool:
    if target is not None:
        return statistic in TO_TARGET
    return statistic == "best" or statistic in STATISTICS


def value(run: Run, measure: str) -> float | None:
    """A measure of a run by its name: see :meth:`Measure.of`."""
    return parse(measure).of(run)


def measure_of(column: str, rounds: Iterable[int]) -> str:
    """The measure of a column by which runs of so many rounds are compared: ``last10:`` or
    ``final:``.
    """
    return measure_of_last(column, window_of(column, rounds))


def window_of(column: str, rounds: Iterable[int]) -> int:
    """Of how many rounds a comparison takes the mean: ten for an accuracy if no run is short, else
    1, the last value.
    """
    return WINDOW if is_accuracy(column) and not are_short(rounds) else 1


def measure_of_last(column: str, rounds: int) -> str:
    """The measure of a column's mean over the last ``rounds`` rounds: ``last10:test/acc``."""
    if rounds == 1:
        return f"final:{column}"
    return f"last10:{column}" if rounds == WINDOW else f"mean:{column}[{rounds}]"


def are_short(rounds: Iterable[int], window: int = WINDOW) -> bool:
    """Whether ``window`` rounds are more than a third of a run. Then its last test counts, and not
    a mean over its last rounds.

    Args:
        rounds: the number of rounds of each run.
    """
    return min(rounds, default=0) < 3 * window


def check_direction(measure: str, direction: str, key: str, remedy: str) -> None:
    """Raises Refusal if a search in this direction would choose the worst run.

    Args:
        direction: ``maximize`` or ``minimize``. It decides for a column that is not this project's,
            unless the name says that less is better.
        key: the setting that chose the measure, such as ``optimized_metric``.
        remedy: the setting of the direction.
    """
    asked = parse(measure, key)
    if not asked.higher_is_better and direction == "maximize":
        raise Refusal(f"{measure} is better where it is smaller: set {remedy}=minimize.")
    is_largest_best = asked.higher_is_better and known_better(asked.column) == "higher"
    if is_largest_best and direction == "minimize":
        raise Refusal(f"{measure} is better where it is larger: set {remedy}=maximize.")


def check_judges(column: str, result: str, key: str) -> None:
    """Raises Refusal if a search by this column compares the global models of a method whose
    clients use others.

    Args:
        result: the column that the run's methods declare as their result, or "".
        key: the setting that chose the column, such as ``optimized_metric=test/acc``.
    """
    if not result or not column.startswith(("test/", "val/")):
        return
    remedy = f"choose by final:{result}"
    if result.startswith("personal/"):
        remedy += f", with {OWN_TESTS}"
    raise Refusal(
        f"{key} compares global models, and the result of this method is {result}: {remedy}."
    )


def finite(curve: pd.Series) -> pd.Series:
    """The finite values of a curve: a test of a diverged model is never the best or the worst."""
    return curve[curve.abs() < math.inf]


def seconds_at(run: Run, round_number: int) -> float | None:
    """The simulated time at the end of a round; None if the run has no clock."""
    seconds = run.curve(CLOCK).get(round_number)
    return None if seconds is None else float(seconds)


def smooth(curve: pd.Series, rounds: int = WINDOW) -> pd.Series:
    """For each test, the mean of the tests in the last ``rounds`` rounds, including its own
    (GC-Fed's tables). It is infinite if one of them is not finite.
    """
    # rounds without a test are NaN
    every = range(1, curve.index[-1] + 1) if len(curve) else curve.index
    means = curve.reindex(every).rolling(rounds, min_periods=1).mean()
    # pandas leaves infinities out of a rolling mean
    is_infinite = (curve.abs() == math.inf).astype(float)
    has_infinite = is_infinite.reindex(every).rolling(rounds, min_periods=1).max() > 0
    return means.mask(has_infinite, math.inf)[curve.index]


def first_round(curve: pd.Series, target: float) -> int | None:
    """The first round whose value is at least the target, up to rounding; None if no round has
    one.
    """
    least = target - ROUNDING * abs(target)
    reached = curve.index[(curve >= least) & (curve < math.inf)]
    return int(reached[0]) if len(reached) else None
