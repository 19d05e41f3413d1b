"""What is read off runs: accuracies as the field reports them, costs to a target, measures by name, over seeds too."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gcfed.runs.folder import DIVERGED, UNFINISHED, Run
from gcfed.runs.reading import FINITE
from gcfed.utils.checked import SettingError, fits

if TYPE_CHECKING:
    import pandas as pd

WINDOW, DECAY = 10, 0.9  # rounds of GC-Fed's moving mean, and of FedACG's exponential average
_PATTERNS = [
    re.compile(r"(?P<how>max|min|mean|sum|last):(?P<column>[^\[\]]+)(?:\[(?P<number>\d+)\])?"),
    re.compile(
        r"rounds:(?P<column>[^\[\]]+?)(?:\[(?P<window>\d+)\])?(?P<how>>=|<=)(?P<number>-?\d*\.?\d+(?:e[+-]?\d+)?)"
    ),
    re.compile(r"(?P<column>[^:@]+)(?P<how>@)(?P<number>\d+)"),
    re.compile(r"(?P<column>[^:@]+)(?P<how>)(?P<number>)"),
]
FORMS = (
    "There are keys of summary.json (test/acc_smooth10, bytes_to_target/0.8), columns of metrics.csv reduced over the "
    "rounds (max:test/acc; min:, mean:, sum:, last: too) or over the last 10 of them (mean:test/acc[10]), the last "
    "test up to a round (test/acc@500), and the first round at a target (rounds:test/acc>=0.8, rounds:test/loss<=0.5; "
    "rounds:test/acc[10]>=0.8 of means of ten rounds)."
)

LAST_ROUNDS = f"mean:test/acc[{WINDOW}]"
#: The measures that are shown beside the one that decides unless others are asked for, and their titles.
MEASURES = {
    "max:test/acc": "best accuracy",
    "last:test/acc": "accuracy at the end",
    "last:test/relative_error": "relative error at the end",
    "last:test/rmse": "RMSE at the end",
    "last:test/loss": "test loss at the end",
    "sum:comm/down_bytes": "sent to clients",
    "sum:comm/up_bytes": "sent by clients",
    "time/round_s": "a round, median",
}
_TITLES = MEASURES | {LAST_ROUNDS: f"accuracy, last {WINDOW} rounds"}


def smooth(curve: pd.Series, rounds: int = WINDOW) -> pd.Series:
    """Of each test the mean with those of the rounds before it, so many with its own: GC-Fed's tables."""
    every = range(1, curve.index[-1] + 1) if len(curve) else curve.index  # those without a test count for nothing
    return curve.reindex(every).rolling(rounds, min_periods=1).mean()[curve.index]


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
    "rounds_to": ("rounds", False), "error": ("none", False), "rmse": ("none", False), "seconds": ("seconds", False),
    "": ("none", None),
}  # fmt: skip


@lru_cache(maxsize=256)
def parse(measure: str, key: str = "measure") -> Measure:
    """The parts of a measure; or SettingError, with the key that it is given by and all :data:`FORMS`."""
    for pattern in _PATTERNS:
        if match := pattern.fullmatch(fits(key, measure, str)):
            parts = match.groupdict()
            number = float(parts["number"] or math.inf)
            return Measure(parts["how"], parts["column"], number, int(parts.get("window") or 1))
    raise SettingError(key, f"={measure!r} is not understood. {FORMS}")


def value(run: Run, measure: str) -> float | None:
    """The measure in the run's own unit (accuracies 0 to 1); None where it was not measured or is not finite."""
    if measure not in run.known:
        run.known[measure] = _value(run, *parse(measure))
    return run.known[measure]


def _value(run: Run, how: str, name: str, number: float, window: int) -> float | None:
    if not how:
        key, _, target = name.rpartition("/")
        costs = run.summary.get(key)
        found = costs.get(target) if isinstance(costs, dict) else run.summary.get(name)
        return _finite(found) if isinstance(found, int | float) else None
    curve = run.curve(name)
    if how in (">=", "<="):
        return first_round(smooth(curve, window) if window > 1 else curve, number, at_most=how == "<=")
    rounds, values = curve.index.to_numpy(), curve.to_numpy()
    if how == "@":
        values = values[rounds <= number] if run.rounds >= number else values[:0]
    else:
        values = values[rounds > run.rounds - number]
    if not len(values):
        return None
    return _finite(values[-1] if how in ("@", "last") else getattr(np, how)(values))


def _finite(number: float) -> float | None:
    return float(number) if abs(number) < FINITE else None


@dataclass(frozen=True)
class Sample:
    """One measure over the seeds of a group, in the unit that it is shown in."""

    values: Mapping[int, float]  # by seed, of runs that came to their end and have one
    bound: bool = False  # a run did not reach the target: its rounds stand in ``values``, the mean is a lower bound

    @property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample's; None for fewer than two runs, and of bounds."""
        return stdev(self.values.values()) if len(self.values) > 1 and not self.bound else None

    @property
    def record(self) -> dict[str, Any]:
        """What a CSV has of it."""
        seeds, values = " ".join(map(str, self.values)), " ".join(map(repr, self.values.values()))
        return {"mean": self.mean, "std": self.std, "bound": "yes" * self.bound, "seeds": seeds, "values": values}


def sample(runs: Iterable[Run], measure: str, factor: float = 1.0) -> Sample:
    """The measure over runs of several seeds, times a factor.

    A target that a run did not reach has what the run took in all, its rounds or bytes.
    """
    parts = parse(measure)
    cost, _, target = parts.column.rpartition("/")
    values, bound = {}, False
    for run in (run for run in runs if run.has_ended):
        number = value(run, measure)
        if number is None and (
            len(run.curve(parts.column)) if parts.is_target else target in (run.summary.get(cost) or ())
        ):
            number, bound = total(run, "rounds" if parts.is_target else cost), True
        if number is not None:
            values[run.seed] = factor * number
    return Sample(values, bound)


class Column(NamedTuple):
    """How a measure is shown: our numbers are multiplied by ``factor``; ``digits`` are Python's."""

    title: str
    unit: str
    factor: float
    digits: str
    higher: bool | None  # whether more is better; None: neither
    measure: str

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit not in ("", "rounds") else self.title

    def of(self, runs: Iterable[Run], seeds: Container[int] | None = None) -> Sample:
        """The measure over these or all seeds of the runs, in the column's unit."""
        return sample((run for run in runs if seeds is None or run.seed in seeds), self.measure, self.factor)

    def text(self, number: float) -> str:
        """The number, already in this unit, as tables show it."""
        digits = ".0f" if "g" in self.digits and 1000 <= abs(number) < 1e9 else self.digits
        return f"{number:{digits}}".removesuffix(".0")

    def rank(self, s: Sample) -> float | None:
        """The mean as it is shown, by which the best is marked; None where there is none, or a bound."""
        return None if s.mean is None or s.bound else float(self.text(s.mean))

    def differences(self, *numbers: float, sign: str = "-") -> list[str]:
        """Points with one digit behind the dot, as far as it says anything."""
        digits = ".1f" if self.unit == "%" and max(map(abs, numbers)) >= 0.095 else ".2g"
        return [f"{number:{sign}{digits}}".replace("-", "−") for number in numbers]

    def cell(self, runs: Sequence[Run], s: Sample, wanted: int) -> str:
        """``61.20 (0.80) [2 of 3] †``: mean, deviation, seeds if there should be more, a diverged run; or why none."""
        diverged = ", ".join(str(run.seed) for run in runs if run.state == DIVERGED)
        if s.mean is None:
            return f"diverged at seed {diverged}" if diverged else states(runs) or "–"
        std = "" if s.std is None else f" ({self.text(s.std)})"
        count = f" [{len(s.values)} of {wanted}]" if len(s.values) < wanted else ""
        return f"{self.text(s.mean)}{'+' * s.bound}{std}{count}{' †' * bool(diverged)}"


#: What stands behind a column's name, the factor and the digits.
UNITS = {
    "percent": ("%", 100.0, ".2f"),
    "points": ("%", 100.0, ".3g"),
    "rounds": ("rounds", 1.0, ".1f"),
    "seconds": ("s", 1.0, ".3g"),
    "MB": ("MB", 1e-6, ".4g"),
    "1e-3": ("10⁻³", 1e3, ".3f"),
    "none": ("", 1.0, ".4g"),
}


def describe(measure: str) -> Column:
    """How any measure is shown."""
    parts = parse(measure)
    (unit, higher), title = parts.kind, _TITLES.get(measure, measure)
    if parts.is_target:
        goal = f"{100 * parts.number:g} %" if "acc" in parts.column else f"{parts.number:g}"
        of = f" of {parts.column}" * (parts.column != "test/acc") + f", mean of {parts.window}" * (parts.window > 1)
        title = f"rounds to {goal}{of}"
    elif (tested := measure.replace("val/", "test/")) in _TITLES and tested != measure:
        title = f"validation {_TITLES[tested].removeprefix('test ')}"
    elif match := re.fullmatch(r"(\w+)_to_target/([\d.]+)", measure):
        title = f"{match[1].replace('_', ' ')} to {100 * float(match[2]):g} %"
    return Column(title, *UNITS[unit], higher, measure)


def states(runs: Iterable[Run]) -> str:
    """``failed at seed 2, 50 of 800 rounds at seed 3``, of runs that have not come to their end."""
    lost = [(run, f"{run.rounds} of {run.planned} rounds" if run.state == UNFINISHED else run.state) for run in runs]
    return ", ".join(f"{state} at seed {run.seed}" for run, state in lost if not run.has_ended)
