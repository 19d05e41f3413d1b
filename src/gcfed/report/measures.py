"""What a table reports of a run, named by a short string."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from gcfed.report.runs import Array, Run

REDUCTIONS: dict[str, Callable[[Array], float]] = {
    "max": np.max,
    "min": np.min,
    "mean": np.mean,
    "sum": np.sum,
    "last": lambda values: values[-1],
}
_REDUCED = re.compile(r"(max|min|mean|sum|last):([^\[\]]+)(?:\[(\d+)\])?")
_ROUNDS = re.compile(r"rounds:(.+)>=([\d.]+)")
_AT = re.compile(r"([^:@]+)@(\d+)")


def value(run: Run, measure: str) -> float | None:
    """The measure in the run's own unit (accuracies 0 to 1); None where it was not measured, reached or is not finite.

    - ``test/acc_smooth10``, ``acc_diff/std``, ``bytes_to_target/0.8``: a figure of ``summary.json``
    - ``mean:test/acc[10]``: over the tests of the run's last 10 rounds; ``max:``, ``min:``, ``sum:``, ``last:`` too,
      and without ``[…]`` over all rounds
    - ``test/acc_ema@500``: the last test up to round 500, of a run that got there
    - ``rounds:test/acc_ema>=0.81``: the first round that reached it

    Raises:
        ValueError: the string is none of these.
    """
    if match := _REDUCED.fullmatch(measure):
        reduction, name, window = match.groups()
        rounds, values = run.curve(name)
        kept = values if window is None else values[rounds > run.rounds - int(window)]
        return _finite(REDUCTIONS[reduction](kept)) if len(kept) else None
    if match := _ROUNDS.fullmatch(measure):
        rounds, values = run.curve(match[1])
        reached = rounds[values >= float(match[2])]
        return float(reached[0]) if len(reached) else None
    if match := _AT.fullmatch(measure):
        rounds, values = run.curve(match[1])
        kept = values[rounds <= int(match[2])]
        return _finite(kept[-1]) if len(kept) and run.rounds >= int(match[2]) else None
    if ":" in measure or "@" in measure:
        raise ValueError(f"measure={measure!r} is not understood: see gcfed.report.measures.value for what there is.")
    return _of_summary(run, measure)


def _of_summary(run: Run, name: str) -> float | None:
    key, _, target = name.rpartition("/")
    found = run.summary.get(name)
    if found is None and isinstance(run.summary.get(key), dict):
        found = run.summary[key].get(target)
    return _finite(found) if isinstance(found, int | float) else None


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None
