"""Which methods lead in one place, by how much, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from gcfed.runs.folder import FINISHED
from gcfed.runs.measures import WINDOW, higher_is_better, parse, value

FEWEST = 3  # seeds of a method that is ranked
#: Names of columns.
TITLES = {
    "test/acc": "test accuracy",
    "test/rmse": "RMSE",
    "test/relative_error": "relative error",
    "test/loss": "test loss",
    "val/acc": "validation accuracy",
    "personal/global_acc": "global model on clients' own tests",
    "personal/local_acc": "local models on clients' own tests",
    "comm/down_bytes": "sent to clients",
    "comm/up_bytes": "sent by clients",
}


@dataclass(frozen=True)
class Scale:
    """How the numbers of a measure are shown: times ``factor``; means and spreads with the same
    ``digits``.
    """

    title: str
    unit: str
    factor: float
    digits: int

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def text(self, number: float, sign: str = "") -> str:
        return f"{self.factor * number:{sign},.{self.digits}f}".replace("-", "−")


def scale_of(measure: str, largest: float = 1.0) -> Scale:
    """``largest`` is the largest number, in the run's own unit.

    Errors and bytes show four digits of it.
    """
    name, of = parse(measure)
    if name == "rounds":
        return Scale(f"rounds to {100 * float(of):g}\u00a0%", "", 1.0, 0)
    title = TITLES.get(of, of)
    title += {"last10": f", last {WINDOW} rounds", "best": ", best", "total": ""}.get(name, "")
    if of.endswith("acc"):
        return Scale(title, "%", 100.0, 2)
    unit, factor = ("MB", 1e-6) if of.endswith("_bytes") else ("", 1.0)
    size = abs(factor * largest)
    return Scale(
        title, unit, factor, min(9, max(0, 3 - math.floor(math.log10(size)))) if size > 0 else 2
    )


def interval(values: Any) -> tuple[float, float]:
    """The 95 % interval of the mean, by Student's t; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan, math.nan
    mean, half = (
        np.mean(values),
        _quantile(len(values)) * np.std(values, ddof=1) / math.sqrt(len(values)),
    )
    return float(mean - half), float(mean + half)


@cache
def _quantile(n: int) -> float:
    """Student's t with n − 1 degrees of freedom at 97.5 %: with t = √(n − 1)·tan θ its density is ∝
    cosⁿ⁻² θ.
    """
    angles = np.linspace(0, math.pi / 2, 100_001)
    heights = np.cos(angles) ** (n - 2)
    areas = np.concatenate([[0.0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    return math.sqrt(n - 1) * math.tan(np.interp(0.95 * areas[-1], areas, angles))


def main_measure(rows: pd.DataFrame) -> str:
    """The measure that ranks the methods: the accuracy of the last ten rounds if they are at most a
    third of every finished run, otherwise that of the last test. Without accuracies: relative
    error, RMSE or loss of the last test.
    """
    tested = {name for run in rows["run"] for name in run.metrics}
    column = next(
        (c for c in ("test/acc", "test/relative_error", "test/rmse") if c in tested), "test/loss"
    )
    finished = [
        run.rounds for run in rows["run"] if run.state == FINISHED and column in run.metrics
    ]
    long_runs = min(finished, default=0) >= 3 * WINDOW
    measure = "last10" if column == "test/acc" and long_runs else "final"
    return f"{measure}:{column}"


def per_seed(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """A measure of ended runs, [seeds, methods], or NaN.

    A run that missed a target counts with all its rounds.
    """
    rows = rows[~rows["repeated"] & rows["state"].isin(["finished", "diverged"])]
    values = [value(run, measure) for run in rows["run"]]
    if measure.startswith("rounds:"):
        values = [
            run.rounds if v is None else v for v, run in zip(values, rows["run"], strict=True)
        ]
    frame = pd.DataFrame(
        {"seed": rows["seed"], "method": rows["method"], "value": np.array(values, float)}
    )
    return frame.pivot(index="seed", columns="method", values="value").dropna(how="all")


@dataclass(frozen=True)
class Verdict:
    """The methods of one place, the best first, then those that are not ranked."""

    measure: str
    scale: Scale
    #: A row per method: n, mean and std over the shared seeds (an unranked method: over its own
    #: seeds), and its difference to ``reference`` with its interval, low and high.
    table: pd.DataFrame
    ranked: list[str]  # methods that share at least three seeds
    seeds: list[int]  # the seeds that they share
    reference: str  # FedAvg if it is ranked, otherwise the best; "" if nothing is ranked
    leaders: list[str]  # methods that are not clearly worse than any other, the best first

    @property
    def direction(self) -> str:
        """``Test accuracy, last 10 rounds (%), higher is better``."""
        heading = self.scale.heading
        return f"{heading[0].upper()}{heading[1:]}{self.better}"

    @property
    def better(self) -> str:
        return f", {'higher' if higher_is_better(self.measure) else 'lower'} is better"

    @property
    def headline(self) -> str:
        """What the intervals allow: ``SCAFFOLD and GC-Fed lead; GC-Fed +1.4 points over FedAvg (0.4
        to 2.4)``.
        """
        better = self.better * (self.scale.unit != "%")
        if len(self.table) == 1:
            method, row = self.table.index[0], self.table.iloc[0]
            number = (
                f"{self.scale.title.partition(',')[0]} {self.scale.text(row['mean'])}"
                f" {self.scale.unit}".rstrip()
            )
            return f"{method}: {number}{better}" if row["n"] else f"{method}: no result yet"
        if not self.ranked:
            return f"Not ranked: fewer than {FEWEST} common seeds"
        *others, last = self.leaders
        first = f"{', '.join(others)} and {last} lead" if others else f"{last} leads"
        if len(self.leaders) > 3:
            first = (
                f"{len(self.leaders)} of {len(self.ranked)} methods lead, {self.leaders[0]} first"
            )
        if len(self.leaders) == len(self.ranked):
            first = "No method leads clearly"
        shown = [m for m in self.leaders if m != self.reference] or self.ranked[1:2]
        shown = sorted(shown, key=self.uncertain)[:3]  # stable: the best first
        if [last] == self.leaders == shown:
            return first + self.gap(last).removeprefix(last) + better
        return (
            f"{first};"
            f" {', '.join(self.gap(method, i == 0) for i, method in enumerate(shown))}{better}"
        )

    def uncertain(self, method: str) -> bool:
        """Whether the interval of its difference to the reference includes 0."""
        return bool(self.table["low"][method] <= 0 <= self.table["high"][method])

    def gap(self, method: str, first: bool = True) -> str:
        """``GC-Fed +1.4 points over FedAvg (0.4 to 2.4)``; ``SCAFFOLD +2.2, uncertain``; ``… −0.1
        RMSE against …``.
        """
        difference, _, ends = self.difference(method, 1).partition(" ")
        is_over = self.table["difference"][method] > 0 and higher_is_better(self.measure)
        unit = "points" if self.scale.unit == "%" else self.scale.title
        words = f" {unit} {'over' if is_over else 'against'} {self.reference}" * first
        unsure = self.uncertain(method)
        return (
            f"{method}"
            f" {difference}{words}{f' {ends}' * (first or not unsure)}{', uncertain' * unsure}"
        )

    def difference(self, method: str, digits: int | None = None) -> str:
        """``+1.42 (0.41 to 2.43)``, the difference to the reference; ``digits`` of percentages."""
        scale = (
            replace(self.scale, digits=digits) if digits and self.scale.unit == "%" else self.scale
        )
        gap, low, high = self.table.loc[method, ["difference", "low", "high"]]
        return f"{scale.text(gap, '+')} ({scale.text(low)} to {scale.text(high)})"


def verdict(rows: pd.DataFrame) -> Verdict:
    """``rows`` are those of one place in :func:`gcfed.reporting.frame.frame_of`."""
    measure = main_measure(rows)
    values, higher = per_seed(rows, measure), higher_is_better(measure)
    counts = values.notna().sum().sort_values(ascending=False, kind="stable")
    ranked, seeds = list[str](), values.index
    for method in counts.index:  # those with the most seeds first
        common = seeds[values.loc[seeds, method].notna()]
        if len(common) >= FEWEST:
            ranked, seeds = [*ranked, method], common
    ranked = ranked if len(ranked) > 1 else []
    shared = values.loc[seeds if ranked else [], ranked]
    ranked = [*shared.mean().sort_values(ascending=not higher, kind="stable").index]
    reference = next(
        (method for method in ranked if method.lower() == "fedavg"), ranked[0] if ranked else ""
    )
    table = []
    for method in dict.fromkeys([*ranked, *rows["method"]]):
        own = (
            shared[method]
            if method in ranked
            else values.reindex(columns=[method])[method].dropna()
        )
        gap = shared[method] - shared[reference] if method in ranked else own[:0]
        table.append((method, len(own), own.mean(), own.std(), gap.mean(), *interval(gap)))
    frame = pd.DataFrame(
        table, columns=["method", "n", "mean", "std", "difference", "low", "high"]
    ).set_index("method")
    # [seeds, methods]; a method is clearly worse if an interval is below 0
    gains = (1 if higher else -1) * shared
    leaders = [
        m for m in ranked if all(interval(gains[m] - gains[other])[1] >= 0 for other in ranked)
    ]
    scale = scale_of(measure, frame["mean"].abs().max())
    return Verdict(measure, scale, frame, ranked, [*shared.index], reference, leaders)
