"""Five measures of a run by name, such as ``last10:test/acc``, and moving means of accuracies.

==========================
========================================================================== ``final:<column>``
the last value of a column of ``metrics.csv``; also written as ``<column>`` ``best:<column>``
its highest value; the lowest one of a loss, an error, a perplexity or a cost ``last10:<column>``
its mean over the last ten rounds ``total:<column>``          its sum over all rounds, as for
``comm/up_bytes`` ``rounds:<target>``         the first round whose test accuracy is at least the
target, as in ``rounds:0.8`` ==========================
==========================================================================
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from gcfed.utils.refusal import Refusal

if TYPE_CHECKING:
    import pandas as pd

    from gcfed.runs.folder import Run

WINDOW, DECAY = 10, 0.9  # rounds of GC-Fed's moving mean, and of FedACG's exponential average
NAMES = ("final", "best", "last10", "total", "rounds")
FORMS = (
    f"A measure is {', '.join(f'{name}:<column>' for name in NAMES[:-1])}, rounds:<target"
    " accuracy>, or a column."
)
# In these columns, less is better.
_LOWER = re.compile(
    "loss|error|rmse|mse|mae|perplexity|distance|divergence|epsilon|bytes|seconds|time/|comm/"
)


def parse(measure: str, key: str = "measure") -> tuple[str, str]:
    """Name, and column or target. Raises ValueError, which names ``key``, for anything else."""
    name, colon, of = measure.partition(":")
    name, of = (name, of) if colon else ("final", measure)
    if name not in NAMES or not of or (name == "rounds" and not re.fullmatch(r"\d*\.?\d+", of)):
        raise Refusal(f"{key}={measure!r} is not understood. {FORMS}")
    return name, of


def higher_is_better(measure: str) -> bool:
    name, of = parse(measure)
    return name != "rounds" and not _LOWER.search(of)


def value(run: Run, measure: str) -> float | None:
    """The measure in the run's own unit (accuracies 0 to 1); None if it was not measured or is not
    finite.
    """
    name, of = parse(measure)
    if name == "rounds":
        return first_round(run.curve("test/acc"), float(of))
    curve = run.curve(of)
    if name == "last10":
        curve = curve[curve.index > run.rounds - WINDOW]
    if curve.empty:
        return None
    if name == "best":
        found = curve.max() if higher_is_better(measure) else curve.min()
    else:
        found = {"final": curve.iloc[-1], "last10": curve.mean(), "total": curve.sum()}[name]
    return float(found) if math.isfinite(found) else None


def smooth(curve: pd.Series, rounds: int = WINDOW) -> pd.Series:
    """For each test, the mean of the tests in the last ``rounds`` rounds, including its own
    (GC-Fed's tables).
    """
    # rounds without a test are NaN
    every = range(1, curve.index[-1] + 1) if len(curve) else curve.index
    return curve.reindex(every).rolling(rounds, min_periods=1).mean()[curve.index]


def first_round(curve: pd.Series, target: float) -> int | None:
    """The first round whose value is at least the target; None if no round has one."""
    reached = curve.index[(curve >= target) & (curve < math.inf)]
    return int(reached[0]) if len(reached) else None
