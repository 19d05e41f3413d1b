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
#: How measures and columns are called.
TITLES = {
    "test/acc": "test accuracy", "test/rmse": "RMSE", "test/relative_error": "relative error", "test/loss": "test loss",
    "val/acc": "validation accuracy", "personal/global_acc": "global model on clients' own tests",
    "personal/local_acc": "local models on clients' own tests", "comm/down_bytes": "sent to clients",
    "comm/up_bytes": "sent by clients",
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """How the numbers of a measure are shown: times ``factor``, with the same ``digits`` for means and spreads."""

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
    """``largest``: of the numbers, in the run's own unit; errors and bytes have four digits of it."""
    name, of = parse(measure)
    if name == "rounds":
        return Scale(f"rounds to {100 * float(of):g}\u00a0%", "", 1.0, 0)
    title = TITLES.get(of, of)
    title += {"last10": f", last {WINDOW} rounds", "best": ", best", "total": ""}.get(name, "")
    if of.endswith("acc"):
        return Scale(title, "%", 100.0, 2)
    unit, factor = ("MB", 1e-6) if of.endswith("_bytes") else ("", 1.0)
    size = abs(factor * largest)
    return Scale(title, unit, factor, min(9, max(0, 3 - math.floor(math.log10(size)))) if size > 0 else 2)


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


def main_measure(rows: pd.DataFrame) -> str:
    """What methods are compared by: the accuracy of the last ten rounds, if they are at most a third of every finished
    run, else that of the last test; without accuracies the relative error, the RMSE or the loss of the last test."""
    tested = {name for run in rows["run"] for name in run.metrics}
    column = next((c for c in ("test/acc", "test/relative_error", "test/rmse") if c in tested), "test/loss")
    finished = [run.rounds for run in rows["run"] if run.state == FINISHED and column in run.metrics]
    return f"{'last10' if column == 'test/acc' and min(finished, default=0) >= 3 * WINDOW else 'final'}:{column}"


def per_seed(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """A measure of the runs that ended: [seeds, methods], NaN where there is none. Rounds to a target that a run did
    not reach are all its rounds."""
    rows = rows[~rows["repeated"] & rows["state"].isin(["finished", "diverged"])]
    values = [value(run, measure) for run in rows["run"]]
    if measure.startswith("rounds:"):
        values = [run.rounds if v is None else v for v, run in zip(values, rows["run"], strict=True)]
    frame = pd.DataFrame({"seed": rows["seed"], "method": rows["method"], "value": np.array(values, float)})
    return frame.pivot(index="seed", columns="method", values="value").dropna(how="all")


@dataclass(frozen=True)
class Verdict:
    """The methods of one place, the best first, then those that are not ranked."""

    measure: str
    scale: Scale
    #: By method: n, mean, std over the common seeds (unranked: over its own); difference to ``reference``, low, high.
    table: pd.DataFrame
    ranked: list[str]  # methods with at least three seeds that all of them share
    seeds: list[int]  # which they share
    reference: str  # FedAvg if it is ranked, else the best; "" where nothing is ranked
    leaders: list[str]  # the best, and methods that these seeds do not tell apart from it

    @property
    def direction(self) -> str:
        """``Test accuracy, last 10 rounds (%), higher is better``."""
        words = f"{self.scale.heading}, {'higher' if higher_is_better(self.measure) else 'lower'} is better"
        return words[0].upper() + words[1:]

    @property
    def headline(self) -> str:
        """What the intervals allow: ``SCAFFOLD and GC-Fed lead; GC-Fed +1.4 points over FedAvg (0.4 to 2.4)``."""
        if not self.ranked:
            if len(self.table) == 1:
                method, row = self.table.index[0], self.table.iloc[0]
                number = f"{self.scale.text(row['mean'])} {self.scale.unit}".strip()
                return f"{method}: {number}" if row["n"] else f"{method}: no result yet"
            return f"Not ranked: fewer than {FEWEST} common seeds"
        *others, last = self.leaders
        first = f"{', '.join(others)} and {last} lead" if others else f"{last} leads"
        if len(self.leaders) > 3:
            first = f"{len(self.leaders)} of {len(self.ranked)} methods lead, {self.leaders[0]} first"
        if len(self.leaders) == len(self.ranked):
            first = "No method leads clearly"
        shown = [m for m in self.leaders if m != self.reference] or self.ranked[1:2]
        shown = sorted(shown, key=self.uncertain)[:3]  # stable: the best first
        if [last] == self.leaders == shown:
            return first + self.gap(last).removeprefix(last)
        return f"{first}; {', '.join(self.gap(method, i == 0) for i, method in enumerate(shown))}"

    def uncertain(self, method: str) -> bool:
        """Whether the interval of its difference to the reference has 0 in it."""
        return bool(self.table["low"][method] <= 0 <= self.table["high"][method])

    def gap(self, method: str, first: bool = True) -> str:
        """``GC-Fed +1.4 points over FedAvg (0.4 to 2.4)``; ``SCAFFOLD +2.2, uncertain``."""
        difference, _, ends = self.difference(method, 1).partition(" ")
        is_over = self.table["difference"][method] > 0 and higher_is_better(self.measure)
        points = " points" * (self.scale.unit == "%")
        words = f"{points} {'over' if is_over else 'against'} {self.reference}" * first
        unsure = self.uncertain(method)
        return f"{method} {difference}{words}{f' {ends}' * (first or not unsure)}{', uncertain' * unsure}"

    def difference(self, method: str, digits: int | None = None) -> str:
        """``+1.42 (0.41 to 2.43)``, the difference to the reference; ``digits`` of percentages."""
        scale = replace(self.scale, digits=digits) if digits and self.scale.unit == "%" else self.scale
        gap, low, high = self.table.loc[method, ["difference", "low", "high"]]
        return f"{scale.text(gap, '+')} ({scale.text(low)} to {scale.text(high)})"


def verdict(rows: pd.DataFrame) -> Verdict:
    """``rows``: the part of :func:`gcfed.report.frame.frame_of` with one place."""
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
    reference = next((method for method in ranked if method.lower() == "fedavg"), ranked[0] if ranked else "")
    table = []
    for method in dict.fromkeys([*ranked, *rows["method"]]):
        own = shared[method] if method in ranked else values.reindex(columns=[method])[method].dropna()
        gap = shared[method] - shared[reference] if method in ranked else own[:0]
        table.append((method, len(own), own.mean(), own.std(), gap.mean(), *interval(gap)))
    frame = pd.DataFrame(table, columns=["method", "n", "mean", "std", "difference", "low", "high"]).set_index("method")
    behind = {method: interval(shared[method] - shared[ranked[0]]) for method in ranked}
    leaders = [method for method, (low, high) in behind.items() if low <= 0 <= high]  # the best: 0 <= 0 <= 0
    scale = scale_of(measure, frame["mean"].abs().max())
    return Verdict(measure, scale, frame, ranked, [*shared.index], reference, leaders)
