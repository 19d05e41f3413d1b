"""One measure over the seeds of a setting: how it is computed, in which unit, and how it is written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from gcfed.report.groups import Group
from gcfed.runs.folder import DIVERGED, UNFINISHED, Run
from gcfed.runs.measures import parse, total, value

LAST_TESTS = "mean:test/acc[10 tests]"
#: The measures that are shown unless others are asked for, and their titles.
MEASURES = {
    LAST_TESTS: "accuracy, last 10 tests",
    "max:test/acc": "best accuracy",
    "last:test/acc": "accuracy at the end",
    "last:test/relative_error": "relative error at the end",
    "last:test/loss": "test loss at the end",
    "sum:comm/down_bytes": "sent to clients",
    "sum:comm/up_bytes": "sent by clients",
    "time/round_s": "a round, median",
}
_TITLES = MEASURES | {"mean:test/acc[10]": "accuracy, last 10 rounds"}
PERMUTED = 16  # pairs of which all signs are tried


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

    def over(self, seeds: Iterable[int]) -> Sample:
        """Those of these seeds."""
        return replace(self, values={seed: self.values[seed] for seed in seeds if seed in self.values})

    @property
    def record(self) -> dict[str, Any]:
        """What a CSV has of it."""
        seeds, values = " ".join(map(str, self.values)), " ".join(map(repr, self.values.values()))
        return {"mean": self.mean, "std": self.std, "bound": "yes" * self.bound, "seeds": seeds, "values": values}


def sample(group: Group, measure: str, factor: float = 1.0) -> Sample:
    """The measure over a group's seeds, times a factor.

    A target that a run did not reach has what the run took in all, its rounds or bytes.
    """
    parts = parse(measure)
    cost, _, target = parts.column.rpartition("/")
    values, bound = {}, False
    for run in (run for run in group.runs if run.has_ended):
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

    def of(self, group: Group) -> Sample:
        """The measure over the group's seeds, in the column's unit."""
        return sample(group, self.measure, self.factor)

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

    def cell(self, group: Group, s: Sample, wanted: int) -> str:
        """``61.20 (0.80) [2 of 3] †``: mean, deviation, seeds if there should be more, a diverged run; or why none."""
        diverged = ", ".join(str(run.seed) for run in group.runs if run.state == DIVERGED)
        if s.mean is None:
            return f"diverged at seed {diverged}" if diverged else states(group.runs) or "–"
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


class Paired(NamedTuple):
    """How far one sample is above another one, seed by seed; NaN where the seeds are too few to say."""

    n: int
    difference: float = math.nan
    low: float = math.nan  # of the 95 % interval
    high: float = math.nan
    p: float = math.nan  # two-sided: of all choices of the differences' signs, the share whose mean is as far from 0

    @property
    def is_open(self) -> bool:
        return self.low <= 0 <= self.high

    def between(self, column: Column) -> str:
        return "\u00a0to\u00a0".join(column.differences(self.low, self.high))


def paired(one: Sample, other: Sample) -> Paired:
    """Mean, interval and exact permutation test of the differences over common seeds; p of at most 16 of them."""
    d = np.array([one.values[seed] - other.values[seed] for seed in one.values if seed in other.values])
    if len(d) < 2:
        return Paired(len(d), *d)
    p = math.nan
    if len(d) <= PERMUTED:
        signs = 1 - 2 * (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1)  # all +1 first
        means = np.abs(signs @ d) / len(d)
        p = float((means >= means[0] * (1 - 1e-9)).mean())
    return Paired(len(d), float(d.mean()), *interval(d), p)


def interval(values: Any) -> tuple[float, float]:
    """The 95 % interval of the mean, by Student's t; NaN of fewer than two values."""
    if len(values) < 2:
        return math.nan, math.nan
    mean, half = np.mean(values), _quantile(len(values)) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(mean - half), float(mean + half)


@cache
def _quantile(n: int) -> float:
    """Student's t with n − 1 degrees of freedom at 97.5 %: with t = √(n − 1)·tan θ its density is ∝ cosⁿ⁻² θ."""
    angles = np.linspace(0, math.pi / 2, 100_001)
    heights = np.cos(angles) ** (n - 2)
    areas = np.concatenate([[0.0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    return math.sqrt(n - 1) * math.tan(np.interp(0.95 * areas[-1], areas, angles))
