"""Measures of a table's cell by name, such as ``mean:test/acc[10]``, and their units.

==========================  =================================================================
``best_round``              a number of ``summary.json``
``max:<column>``            over all rounds; also ``min:``, ``mean:`` and ``last:``
``mean:<column>[10]``       over the last ten rounds
``<column>@500``            the last test up to a round
``rounds:<column>>=0.8``    the first round at a target; ``rounds:<column>[10]>=0.8``: of the mean
                            of the tests in the last ten rounds
==========================  =================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from gcfed.folders.columns import better
from gcfed.folders.folder import Run
from gcfed.folders.measures import (
    TITLES,
    are_short,
    finite,
    first_round,
    higher_is_better,
    is_accuracy,
    smooth,
)
from gcfed.folders.written import Written
from gcfed.utils.refusal import Refusal


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
#: Words for a measure of several tests.
HOW = {"max": "highest of the", "min": "lowest of the", "mean": "mean of the"}
FORMS = [
    # of all or the last rounds
    re.compile(r"(?P<how>max|min|mean|last):(?P<column>[^\[\]]+)(?:\[(?P<number>\d+)\])?"),
    # to a target
    re.compile(
        r"(?P<how>rounds):(?P<column>[^\[\]]+?)(?:\[(?P<window>\d+)\])?>=(?P<number>[\d.]+)"
    ),
    re.compile(r"(?P<column>[^:@]+)(?P<how>@)(?P<number>\d+)"),  # the last test up to a round
    re.compile(r"(?P<column>[^:@]+)(?P<how>)(?P<number>)"),  # a number of summary.json
]


def measured(run: Run, measure: str) -> float | None:
    """A measure of a run, in its own unit.

    Infinite: it did not reach the target. None: there is no finite number.
    """
    match = _form_of(measure)
    statistic = match["how"]
    if not statistic:
        return _finite(run.summary.get(match["column"]))
    curve = run.curve(match["column"])
    if curve.empty:
        return None
    if statistic == "rounds":
        return _rounds_to(curve, float(match["number"]), match["window"])
    number = float(match["number"] or math.inf)
    if statistic == "@":
        before = curve[curve.index <= number]
        if run.rounds < number or before.empty:
            return None
        return _finite(before.iloc[-1])
    last = curve[curve.index > run.rounds - number]
    if last.empty:
        return None
    if statistic == "last":
        return _finite(last.iloc[-1])
    if statistic == "mean":
        return _finite(last.mean())
    tests = finite(last)
    return _finite(float(tests.max() if statistic == "max" else tests.min()))


def column_of(measure: str) -> str:
    """The column, or the number of ``summary.json``, from which a measure is computed.

    Raises Refusal for a measure of another form.
    """
    return _form_of(measure)["column"]


def require_written(measure: str, written: Written, key: str) -> None:
    """Raises Refusal for a measure that a run never has.

    Args:
        key: the setting that names the measure, such as ``search.metric=last:test/ac``.
    """
    if _form_of(measure)["how"]:
        written.require(column_of(measure), key)
    else:
        written.require_number(measure, key)


def refuse_without_direction(measure: str, key: str) -> None:
    """Raises Refusal for a measure that cannot choose between runs."""
    column = column_of(measure)
    if _form_of(measure)["how"] != "rounds" and better(column) == "neither":
        raise Refusal(
            f"{key}={measure}: neither more nor less of {column} is better: choose by another"
            " column, such as last:val/acc."
        )


def less_is_better(measure: str) -> bool:
    """Whether a run with a smaller value is the better one."""
    match = _form_of(measure)
    return match["how"] == "rounds" or not higher_is_better(match["column"])


def unit_of(measure: str) -> Unit:
    """The unit of a measure whose table names none."""
    match = _form_of(measure)
    if match["how"] == "rounds":
        return UNITS["rounds"]
    return UNITS["percent" if is_accuracy(match["column"]) else "none"]


def of_short_runs(measure: str, rounds: Sequence[int]) -> str:
    """The measure, or the last test instead of a mean over more than a third of a run."""
    match = _form_of(measure)
    is_mean = match["how"] == "mean" and match["number"]
    if is_mean and are_short(rounds, int(match["number"])):
        return f"last:{match['column']}"
    return measure


def in_words(measure: str) -> str:
    """``test accuracy, mean of the tests in the last 10 rounds``."""
    match = _form_of(measure)
    statistic = match["how"]
    name = TITLES.get(match["column"], match["column"])
    if not statistic:
        return name
    if statistic == "@":
        return f"{name} at round {match['number']}"
    if statistic == "rounds":
        window = match["window"]
        mean = f", mean of the tests in the last {window} rounds" if window else ""
        return f"rounds until {name}{mean} is at least {match['number']}"
    if statistic == "last":
        return f"{name}, last test"
    which = "tests"
    if match["number"]:
        which += f" in the last {match['number']} rounds"
    return f"{name}, {HOW[statistic]} {which}"


def _form_of(measure: str) -> re.Match[str]:
    for form in FORMS:
        match = form.fullmatch(measure)
        if match:
            return match
    raise Refusal(
        f"measure={measure} must be max:test/acc (min:, mean:, last:), mean:test/acc[10],"
        " rounds:test/acc>=0.8, test/acc@500 or a number of summary.json."
    )


def _rounds_to(curve: pd.Series, target: float, window: str | None) -> float:
    """The first round at the target; with a window, of the mean of the tests in so many rounds."""
    if window:
        curve = smooth(curve, int(window))
    reached = first_round(curve, target)
    return math.inf if reached is None else float(reached)


def _finite(value: Any) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
