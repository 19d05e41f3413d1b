"""What a table reports of a run, named by a short string."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gcfed.report.runs import DIVERGED, Array, Run

REDUCTIONS: dict[str, Callable[[Array], float]] = {
    "max": np.max,
    "min": np.min,
    "mean": np.mean,
    "sum": np.sum,
    "last": lambda values: values[-1],
}
_REDUCED = re.compile(r"(max|min|mean|sum|last):([^\[\]]+)(?:\[(\d+)\])?")
_ROUNDS = re.compile(r"rounds:(.+?)(>=|<=)(.*)")
_AT = re.compile(r"([^:@]+)@(\d+)")
FORMS = (
    "There are keys of summary.json (test/acc_smooth10), columns of metrics.csv reduced over the rounds "
    "(max:test/acc; min:, mean:, sum:, last: too) or over the last 10 of them (mean:test/acc[10]), at a round "
    "(test/acc@500), and the first round at a target (rounds:test/acc>=0.8, rounds:test/loss<=0.5)."
)


@dataclass(frozen=True)
class Measure:
    """A measure's parts.

    Attributes:
        how: a key of :data:`REDUCTIONS`; ">=" or "<=": the first round at a target; "@": at a round; "": a figure of
            the summary, ``column`` being its key.
        number: the window in rounds, infinite for all of them; the target; the round.
    """

    how: str
    column: str
    number: float = math.inf

    @property
    def is_target(self) -> bool:
        return self.how in (">=", "<=")


@lru_cache(maxsize=256)
def parse(measure: str) -> Measure:
    """The parts of a measure as :func:`value` reads it.

    Raises:
        ValueError: it is none; says which there are.
    """
    if match := _REDUCED.fullmatch(measure):
        how, column, window = match.groups()
        return Measure(how, column, math.inf if window is None else int(window))
    if match := _ROUNDS.fullmatch(measure):
        column, how, text = match.groups()
        try:
            return Measure(how, column, float(text))
        except ValueError:
            raise ValueError(f"measure={measure!r}: the target {text!r} is no number. {FORMS}") from None
    if match := _AT.fullmatch(measure):
        return Measure("@", match[1], int(match[2]))
    if ":" in measure or "@" in measure:
        raise ValueError(f"measure={measure!r} is not understood. {FORMS}")
    return Measure("", measure)


def value(run: Run, measure: str) -> float | None:
    """The measure in the run's own unit (accuracies 0 to 1); None where it was not measured, reached or is not finite.

    - ``test/acc_smooth10``, ``acc_diff/std``, ``bytes_to_target/0.8``: a figure of ``summary.json``
    - ``mean:test/acc[10]``: over the tests of the run's last 10 rounds; ``max:``, ``min:``, ``sum:``, ``last:`` too,
      and without ``[…]`` over all rounds
    - ``test/acc_ema@500``: the last test up to round 500, of a run that got there
    - ``rounds:test/acc_ema>=0.81``, ``rounds:test/loss<=0.5``: the first round that reached it

    Raises:
        ValueError: the string is none of these.
    """
    parts = parse(measure)
    if not parts.how:
        return _of_summary(run, parts.column)
    if parts.is_target:
        rounds, values = run.curve(parts.column)
        hit = values >= parts.number if parts.how == ">=" else values <= parts.number
        reached = rounds[hit & np.isfinite(values)]
        return float(reached[0]) if len(reached) else None
    if parts.how == "@" and run.rounds < parts.number:
        return None
    kept = measured(run, parts)
    return _finite(REDUCTIONS.get(parts.how, REDUCTIONS["last"])(kept)) if len(kept) else None


def measured(run: Run, parts: Measure) -> Array:
    """The values [n] that a reduction, or the value at a round, is of."""
    rounds, values = _curve(run, parts.column)
    return values[rounds <= parts.number if parts.how == "@" else rounds > run.rounds - parts.number]


def _curve(run: Run, name: str) -> tuple[Array, Array]:
    """As ``run.curve``, but empty cells of a diverged run's tests are infinite.

    In a file NaN is an empty cell, and the last number would be one from before the run diverged.
    """
    if run.state != DIVERGED or name not in run.columns:
        return run.curve(name)
    rounds, values = run.columns["round"], run.columns[name]
    accuracies = run.columns.get("test/acc")
    if accuracies is None:  # a regression
        tested = (rounds % run.get("eval_every", 1) == 0) | (rounds == rounds[-1])
    else:
        tested = ~np.isnan(accuracies)
    values = np.where(tested & np.isnan(values), np.inf, values)
    known = ~np.isnan(values)
    return rounds[known], values[known]


def _of_summary(run: Run, name: str) -> float | None:
    key, _, target = name.rpartition("/")
    found = run.summary.get(name)
    if found is None and isinstance(run.summary.get(key), dict):
        found = run.summary[key].get(target)
    return _finite(found) if isinstance(found, int | float) else None


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None
