"""What is read off a run: accuracies as the field reports them, rounds and costs to a target, measures by name."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gcfed.runs.folder import Run
from gcfed.runs.reading import FINITE
from gcfed.utils.checked import SettingError, fits

if TYPE_CHECKING:
    import pandas as pd

WINDOW, DECAY = 10, 0.9  # tests in GC-Fed's moving mean, and FedACG's exponential average
_PATTERNS = [
    re.compile(r"(?P<how>max|min|mean|sum|last):(?P<column>[^\[\]]+)(?:\[(?P<number>\d+)(?P<tests> tests)?\])?"),
    re.compile(
        r"rounds:(?P<column>[^\[\]]+?)(?:\[(?P<window>\d+)\])?(?P<how>>=|<=)(?P<number>-?\d*\.?\d+(?:e[+-]?\d+)?)"
    ),
    re.compile(r"(?P<column>[^:@]+)(?P<how>@)(?P<number>\d+)"),
    re.compile(r"(?P<column>[^:@]+)(?P<how>)(?P<number>)"),
]
FORMS = (
    "There are keys of summary.json (test/acc_smooth10, bytes_to_target/0.8), columns of metrics.csv reduced over the "
    "rounds (max:test/acc; min:, mean:, sum:, last: too), over the last 10 of them (mean:test/acc[10]) or over the "
    "last 10 tests of no fewer (mean:test/acc[10 tests]), the last test up to a round (test/acc@500), and the first "
    "round at a target (rounds:test/acc>=0.8, rounds:test/loss<=0.5; rounds:test/acc[10]>=0.8 of means of ten rounds)."
)


def smooth(curve: pd.Series) -> pd.Series:
    """Each test's mean with the nine before it, as far as there are so many: GC-Fed's tables."""
    return curve.rolling(WINDOW, min_periods=1).mean()


def average(curve: pd.Series) -> pd.Series:
    """e₀ = a₀, eᵢ = 0.9·eᵢ₋₁ + 0.1·aᵢ, as FedACG reports its accuracies."""
    return curve.ewm(alpha=1 - DECAY, adjust=False).mean()


def first_round(curve: pd.Series, target: float, *, at_most: bool = False) -> int | None:
    """The first round whose value is at least the target, or with ``at_most`` at most; None if no round has one."""
    values = curve.to_numpy()
    reached = curve.index[np.isfinite(values) & ((values <= target) if at_most else (values >= target))]
    return int(reached[0]) if len(reached) else None


def total(run: Run, cost: str) -> float | None:
    """What a run took in all of ``rounds_to_target``, ``bytes_to_target``, …; None where that is not known."""
    if cost.startswith("rounds"):
        return float(run.rounds)
    sent = [float(run.summary.get(f"comm/{way}_bytes", math.nan)) for way in ("down", "up")]
    return _finite(sum(sent)) if cost.startswith("bytes") else None


def until(values: pd.Series, round_number: int | None) -> float | None:
    """The sum of a column up to a round, that included; None for no round."""
    return None if round_number is None else values.loc[:round_number].sum().item()


class Measure(NamedTuple):
    """A measure's parts."""

    how: str  # max, min, mean, sum, last; ">=" or "<=": the first round at a target; "@": at a round; "": a figure
    column: str  # or a key of the summary
    number: float  # the window in rounds, infinite for all of them; the target; the round
    window: int = 1  # of a target: rounds whose tests are averaged
    in_tests: bool = False  # the window is in tests

    @property
    def is_target(self) -> bool:
        return self.how in (">=", "<=")

    @property
    def kind(self) -> tuple[str, bool | None]:
        """In which unit it is shown, and whether more is better; None for neither."""
        return ("rounds", False) if self.is_target else next(_KINDS[part] for part in _KINDS if part in self.column)


#: What of a column's name says its kind; the first that fits.
_KINDS: dict[str, tuple[str, bool | None]] = {
    "acc_diff/": ("percent", None), "_std": ("percent", None), "personal/": ("percent", True), "comm/": ("MB", None),
    "time/": ("seconds", None), "bytes": ("MB", False), "acc": ("percent", True), "loss": ("none", False),
    "error": ("none", False), "seconds": ("seconds", False), "": ("none", None),
}  # fmt: skip


@lru_cache(maxsize=256)
def parse(measure: str, key: str = "measure") -> Measure:
    """The parts of a measure as :func:`value` reads it.

    Raises:
        SettingError: it is none; names the key that it is given by, and says which there are.
    """
    for pattern in _PATTERNS:
        if match := pattern.fullmatch(fits(key, measure, str)):
            parts = match.groupdict()
            number = float(parts["number"] or math.inf)
            window, in_tests = int(parts.get("window") or 1), bool(parts.get("tests"))
            return Measure(parts["how"], parts["column"], number, window, in_tests)
    raise SettingError(key, f"={measure!r} is not understood. {FORMS}")


def value(run: Run, measure: str) -> float | None:
    """The measure in the run's own unit (accuracies 0 to 1); None where it was not measured, reached or is not finite.

    Raises:
        ValueError: the string is none of :data:`FORMS`.
    """
    if measure not in run.known:
        run.known[measure] = _value(run, *parse(measure))
    return run.known[measure]


def _value(run: Run, how: str, name: str, number: float, window: int, in_tests: bool) -> float | None:
    if not how:
        key, _, target = name.rpartition("/")
        costs = run.summary.get(key)
        found = costs.get(target) if isinstance(costs, dict) else run.summary.get(name)
        return _finite(found) if isinstance(found, int | float) else None
    curve = run.curve(name)
    if how in (">=", "<="):
        if window > 1 and len(curve):  # rounds without a test count for nothing
            means = curve.reindex(range(1, curve.index[-1] + 1)).rolling(window, min_periods=1).mean()
            curve = means[curve.index]
        return first_round(curve, number, at_most=how == "<=")
    rounds, values = curve.index.to_numpy(), curve.to_numpy()
    if how == "@":
        values = values[rounds <= number] if run.rounds >= number else values[:0]
    elif in_tests:
        values = values[-int(number) :] if 0 < number <= len(values) else values[:0]
    else:
        values = values[rounds > run.rounds - number]
    if not len(values):
        return None
    return _finite(values[-1] if how in ("@", "last") else getattr(np, how)(values))


def _finite(number: float) -> float | None:
    return float(number) if abs(number) < FINITE else None
