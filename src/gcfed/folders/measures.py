"""Six measures of a run by name, such as ``last10:test/acc``, and moving means of accuracies.

====================  ==============================================================
``final:<column>``    the last value of a column of ``metrics.csv``; also ``<column>``
``best:<column>``     its highest finite value; the lowest one where less is better
``last10:<column>``   its mean over the last ten rounds
``total:<column>``    its sum over all rounds, as for ``comm/up_bytes``
``rounds:<target>``   the first round whose test accuracy is at least the target
``seconds:<target>``  the time of that round on the simulated clock (``clock/seconds``)
====================  ==============================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from gcfed.folders.columns import better
from gcfed.folders.reading import GLOBAL_TESTS
from gcfed.utils.refusal import Refusal

if TYPE_CHECKING:
    import pandas as pd

    from gcfed.folders.folder import Run

WINDOW = 10  # rounds of GC-Fed's moving mean
DECAY = 0.9  # of FedACG's exponential average
CLOCK = "clock/seconds"  # the column of the simulated time
OF_COLUMNS = ("final", "best", "last10", "total")
TO_TARGET = ("rounds", "seconds")
FORMS = (
    f"A measure is {', '.join(f'{name}:<column>' for name in OF_COLUMNS)},"
    f" {', '.join(f'{name}:<target accuracy>' for name in TO_TARGET)}, or a column."
)
#: Names of columns.
TITLES = {
    "test/acc": "test accuracy",
    "test/rmse": "RMSE",
    "test/relative_error": "relative error",
    "test/loss": "test loss",
    "test/perplexity": "perplexity",
    "val/acc": "validation accuracy",
    "personal/global_acc": "accuracy of the global model at clients",
    "personal/local_acc": "accuracy of clients' own models",
    "comm/down_bytes": "sent to clients",
    "comm/up_bytes": "sent by clients",
}
# These columns are shares from 0 to 1, which people read in percent.
_ACCURACY = re.compile(r"(^|[/_])acc(_|$)|^personal/\w+_(worst10|std)$")


def parse(measure: str, key: str = "measure") -> tuple[str, str]:
    """Name, and column or target. Raises Refusal, which names ``key``, for anything else, and
    for the best value of a column that has none.
    """
    name, colon, subject = measure.partition(":")
    if not colon:
        name = "final"
        subject = measure
    of_target = name in TO_TARGET and re.fullmatch(r"\d*\.?\d+", subject)
    if not of_target and not (name in OF_COLUMNS and subject):
        raise Refusal(f"{key}={measure!r} is not understood. {FORMS}")
    if name == "best" and better(subject) == "neither":
        raise Refusal(
            f"{key}={measure!r}: neither more nor less of {subject} is better. Take"
            f" final:{subject} or last10:{subject}."
        )
    return name, subject


def column_of(measure: str) -> str:
    """The column of ``metrics.csv`` from which a measure is computed."""
    name, subject = parse(measure)
    return "test/acc" if name in TO_TARGET else subject


def is_to_target(measure: str) -> bool:
    """Whether a measure says when a run reached a target."""
    return parse(measure)[0] in TO_TARGET


def higher_is_better(measure: str) -> bool:
    """Whether a search for this measure looks for the highest value. A measure for which neither
    is better counts as one.
    """
    name, subject = parse(measure)
    return name not in TO_TARGET and better(subject) != "lower"


def is_accuracy(column: str) -> bool:
    """Whether a column has accuracies from 0 to 1, which are shown in percent."""
    return bool(_ACCURACY.search(column))


def global_test(columns: Container[str]) -> str:
    """The column of the global model's test by which a run with these columns is judged."""
    return next((column for column in GLOBAL_TESTS if column in columns), GLOBAL_TESTS[-1])


def measure_of(column: str, rounds: Iterable[int]) -> str:
    """``last10:`` and an accuracy's column if no run is short, else ``final:``."""
    is_mean = is_accuracy(column) and not are_short(rounds)
    return f"last10:{column}" if is_mean else f"final:{column}"


def are_short(rounds: Iterable[int], window: int = WINDOW) -> bool:
    """Whether ``window`` rounds are more than a third of a run. Then its last test counts, and not
    a mean over its last rounds.

    Args:
        rounds: the number of rounds of each run.
    """
    return min(rounds, default=0) < 3 * window


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
        remedy += ", with metrics=personal data.client_test=0.2"
    raise Refusal(
        f"{key} compares global models, and the result of this method is {result}: {remedy}."
    )


def value(run: Run, measure: str) -> float | None:
    """The measure in the run's own unit (accuracies 0 to 1); None if it was not measured or is not
    finite.
    """
    name, subject = parse(measure)
    if name in TO_TARGET:
        reached = first_round(run.curve("test/acc"), float(subject))
        if reached is None or name == "rounds":
            return reached
        return seconds_at(run, reached)
    curve = run.curve(subject)
    if name == "last10":
        curve = curve[curve.index > run.rounds - WINDOW]
    if curve.empty:
        return None
    if name == "best":
        tests = finite(curve)
        measured = tests.max() if higher_is_better(measure) else tests.min()
    else:
        measured = {"final": curve.iloc[-1], "last10": curve.mean(), "total": curve.sum()}[name]
    return float(measured) if math.isfinite(measured) else None


def finite(curve: pd.Series) -> pd.Series:
    """The finite values of a curve: a test of a diverged model is never the best or the worst."""
    return curve[curve.abs() < math.inf]


def seconds_at(run: Run, round_number: int) -> float | None:
    """The simulated time at the end of a round; None if the run has no clock."""
    seconds = run.curve(CLOCK).get(round_number)
    return None if seconds is None else float(seconds)


def whole_length(run: Run, measure: str) -> float | None:
    """What a run that missed its target counts with: all its rounds or seconds."""
    if parse(measure)[0] == "seconds":
        return seconds_at(run, run.rounds)
    return run.rounds


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
    """The first round whose value is at least the target; None if no round has one."""
    reached = curve.index[(curve >= target) & (curve < math.inf)]
    return int(reached[0]) if len(reached) else None
