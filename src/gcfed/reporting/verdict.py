"""Which methods lead in one place, by how much, and how sure that is."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame

from gcfed.folders.columns import is_accuracy
from gcfed.folders.measures import parse
from gcfed.reporting.decision import decide, listed
from gcfed.reporting.student import paired_p, quantile, rejected_by_holm

FEWEST_SEEDS = 3  # seeds of a method that is ranked


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
        rounded = round(self.factor * number, self.digits) + 0.0  # −0.0 becomes 0.0
        return f"{rounded:{sign},.{self.digits}f}".replace("-", "−")


def scale_of(measure: str, means: Iterable[float]) -> Scale:
    """The scale of a measure whose methods have these means, in the run's own unit.

    Errors and bytes show four digits of the largest mean that is finite.
    """
    asked = parse(measure)
    largest = max((abs(mean) for mean in means if math.isfinite(mean)), default=0.0)
    if asked.is_to_target:
        digits = 2 if asked.statistic == "seconds" and largest < 100 else 0
        return Scale(asked.title, "", 1.0, digits)
    if is_accuracy(asked.column):
        return Scale(asked.title, "%", 100.0, 2)
    unit = "MB" if asked.column.endswith("_bytes") else ""
    factor = 1e-6 if unit else 1.0
    size = factor * largest
    digits = 2
    if size > 0:
        digits = min(9, max(0, 3 - math.floor(math.log10(size))))
    return Scale(asked.title, unit, factor, digits)


def interval(values: Any) -> tuple[float, float]:
    """The 95 % interval of the mean, by Student's t; NaN for fewer than two values, and for values
    that are not finite.
    """
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    mean = np.mean(values)
    half = quantile(len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(mean - half), float(mean + half)


COMPARISON_COLUMNS = (
    "n",
    "mean",
    "std",
    "low",
    "high",
    "pairs",
    "difference",
    "from",
    "to",
    "p",
)


def compare_methods(values: DataFrame, reference: object = None) -> DataFrame:
    """A row per method, with the columns :data:`COMPARISON_COLUMNS`.

    ``n`` values have a ``mean``, a standard deviation ``std``, and a 95 % interval of the mean from
    ``low`` to ``high``. ``pairs`` are the seeds with a value of the method and of the reference:
    their mean ``difference``, its 95 % interval ``from`` and ``to``, and the ``p`` of a difference
    of 0 (Student's paired t-test, two-sided).

    Reports, tables and :meth:`gcfed.api.Comparison.table` choose the seeds, and take these numbers.

    Args:
        values: a measure, [seeds, methods], in the unit of the result; NaN if a seed has no value.
        reference: the method to which the others are compared. None: no pairs.
    """
    rows = {}
    for method in values:
        numbers = values[method].dropna()
        differences = numbers[:0]
        if reference is not None:
            differences = (numbers - values[reference]).dropna()
        rows[method] = (
            len(numbers),
            numbers.mean(),
            numbers.std(),
            *interval(numbers),
            len(differences),
            differences.mean(),
            *interval(differences),
            paired_p(differences),
        )
    return DataFrame.from_dict(rows, orient="index", columns=[*COMPARISON_COLUMNS])


def per_seed(rows: DataFrame, measure: str) -> DataFrame:
    """A measure of ended runs, [seeds, methods], or NaN.

    A run that missed a target counts with all its rounds or seconds.
    """
    has_ended = rows["run"].map(lambda run: run.has_ended).astype(bool)
    counted = rows[has_ended & ~rows["repeated"]]
    values = []
    for run in counted["run"]:
        number, _ = parse(measure).bounded(run)
        values.append(number)
    frame = DataFrame(
        {"seed": counted["seed"], "method": counted["method"], "value": np.array(values, float)}
    )
    return frame.pivot(index="seed", columns="method", values="value").dropna(how="all")


@dataclass(frozen=True)
class Verdict:
    """The methods of one place, the best first, then those that are not ranked."""

    measure: str
    scale: Scale
    #: A row of :func:`compare_methods` per method: over the shared seeds, with the difference to
    #: ``reference``; for an unranked method over its own seeds, without one.
    table: DataFrame
    ranked: list[str]  # methods that share at least three seeds
    seeds: list[int]  # the seeds that they share
    reference: str  # FedAvg if it is ranked, otherwise the best; "" if nothing is ranked
    leaders: list[str]  # methods that are not clearly worse than any other, the best first
    #: Methods whose difference to the reference stands after Holm's correction for all differences;
    #: none if there is one difference, which needs no correction.
    significant: list[str]
    not_compared: Mapping[str, str]  # methods that the measure does not judge → why
    declared: Mapping[str, str]  # methods that are not judged by the global model → their column

    @property
    def direction(self) -> str:
        """``Test accuracy, last 10 rounds (%), higher is better``."""
        heading = self.scale.heading
        return f"{heading[0].upper()}{heading[1:]}{self.better}"

    @property
    def better(self) -> str:
        return f", {'higher' if parse(self.measure).higher_is_better else 'lower'} is better"

    @property
    def headline(self) -> str:
        """What the intervals allow: ``SCAFFOLD and GC-Fed lead; GC-Fed +1.4 points over FedAvg (0.4
        to 2.4)``.
        """
        if len(self.table) == 1:
            return self._only(self.table.index[0])
        if not self.ranked:
            reasons = "; ".join(self.not_compared.values())
            return f"Not ranked: {reasons or f'this needs {FEWEST_SEEDS} seeds that methods share'}"
        text = self._leaders()
        if self.not_compared:
            is_or_are = "is" if len(self.not_compared) == 1 else "are"
            text += f"; {listed([*self.not_compared])} {is_or_are} not compared"
        return text

    def _only(self, method: str) -> str:
        """The headline of a place with one method."""
        if method in self.not_compared:
            return self.not_compared[method]
        row = self.table.loc[method]
        if not row["n"]:
            return f"{method}: no result yet"
        name = self.scale.title.partition(",")[0]
        text = f"{method}: {name} {self.scale.text(row['mean'])} {self.scale.unit}".rstrip()
        return text if self.scale.unit == "%" else text + self.better

    def _leaders(self) -> str:
        """The headline of ranked methods."""
        better = "" if self.scale.unit == "%" else self.better
        number = len(self.leaders)
        if number == len(self.ranked):
            first = "No method leads clearly"
        elif number > 3:
            first = f"{number} of {len(self.ranked)} methods lead, {self.leaders[0]} first"
        else:
            first = f"{listed(self.leaders)} {'leads' if number == 1 else 'lead'}"
        shown = [method for method in self.leaders if method != self.reference] or self.ranked[1:2]
        shown = sorted(shown, key=self.uncertain)[:3]  # stable: the best first
        if shown == self.leaders and len(shown) == 1:
            gain = self.against_reference(shown[0]).removeprefix(shown[0])
            return f"{first},{gain}{better}"
        differences = [self.against_reference(method, first=method == shown[0]) for method in shown]
        return f"{first}; {', '.join(differences)}{better}"

    def uncertain(self, method: str) -> bool:
        """Whether the interval of its difference to the reference includes 0."""
        return bool(self.table["from"][method] <= 0 <= self.table["to"][method])

    def against_reference(self, method: str, first: bool = True) -> str:
        """``GC-Fed +1.4 points over FedAvg (0.4 to 2.4)``; ``SCAFFOLD +2.2, uncertain``; ``… −0.1
        RMSE against …``.
        """
        difference, _, ends = self.difference(method, 1).partition(" ")
        unsure = self.uncertain(method)
        text = f"{method} {difference}"
        if first:
            is_over = self.table["difference"][method] > 0 and parse(self.measure).higher_is_better
            unit = "points" if self.scale.unit == "%" else self.scale.title
            text += f" {unit} {'over' if is_over else 'against'} {self.reference}"
        if first or not unsure:
            text += f" {ends}"
        return f"{text}, uncertain" if unsure else text

    @property
    def correction(self) -> str:
        """What a * at a difference means, or that none has one; "" if there is one difference."""
        if len(self.ranked) < 3:
            return ""
        number = family_size(self.ranked, self.reference)
        family = f"the {number} differences"
        if self.reference != fedavg_of(self.ranked):
            family = f"all {number} pairs, because the best method is the reference"
        corrected = f"after Holm's correction (5 %) for {family}"
        if not self.significant:
            return f"No difference to {self.reference} stands {corrected}."
        return f"*: differs from {self.reference} also {corrected}."

    def difference(self, method: str, digits: int | None = None) -> str:
        """``+1.42 (0.41 to 2.43)``, the difference to the reference; ``digits`` of percentages."""
        scale = self.scale
        if digits and scale.unit == "%":
            scale = replace(scale, digits=digits)
        difference, low, high = self.table.loc[method, ["difference", "from", "to"]]
        return f"{scale.text(difference, '+')} ({scale.text(low)} to {scale.text(high)})"


def judge(rows: DataFrame) -> Verdict:
    """``rows`` are those of one place in :func:`gcfed.reporting.frame.frame_of`."""
    by_method = rows[~rows["repeated"]].groupby("method", sort=False)["run"]
    decision = decide({method: [*runs] for method, runs in by_method})
    measure = decision.measure
    higher = parse(measure).higher_is_better
    values = per_seed(rows, measure)
    values = values.drop(columns=[*decision.not_compared], errors="ignore").dropna(how="all")
    ranked, seeds = _sharing_seeds(values)
    shared = values.loc[seeds, ranked]
    ranked = [*shared.mean().sort_values(ascending=not higher, kind="stable").index]
    reference = reference_of(ranked)
    others = [method for method in dict.fromkeys(rows["method"]) if method not in ranked]
    of_ranked = compare_methods(shared[ranked], reference)
    of_others = compare_methods(values.reindex(columns=others))
    table = of_others if of_ranked.empty else pd.concat([of_ranked, of_others])
    leaders = _leading(shared[ranked] if higher else -shared[ranked])
    significant: list[str] = []
    if len(ranked) > 2:
        ps = of_ranked["p"].drop(index=reference).to_dict()
        significant = rejected_by_holm(ps, family_size(ranked, reference))
    scale = scale_of(measure, table["mean"])
    return Verdict(
        measure,
        scale,
        table,
        ranked,
        [*shared.index],
        reference,
        leaders,
        significant,
        decision.not_compared,
        decision.declared,
    )


def _sharing_seeds(values: DataFrame) -> tuple[list[str], pd.Index]:
    """The methods that share enough seeds to be ranked, and these seeds.

    Methods with the most seeds come first, so that one with few seeds does not exclude them.
    """
    counts = values.notna().sum().sort_values(ascending=False, kind="stable")
    ranked: list[str] = []
    seeds = values.index
    for method in counts.index:
        common = seeds[values.loc[seeds, method].notna()]
        if len(common) >= FEWEST_SEEDS:
            ranked.append(method)
            seeds = common
    if len(ranked) < 2:
        return [], seeds[:0]
    return ranked, seeds


def reference_of(ranked: list[str]) -> str:
    """FedAvg if it is ranked, otherwise the best method; "" if nothing is ranked."""
    return fedavg_of(ranked) or next(iter(ranked), "")


def fedavg_of(methods: Iterable[str]) -> str:
    """FedAvg, or its only variant among the methods, such as "FedAvg, epochs 5"; "" without one."""
    variants = [name for name in methods if name.lower().partition(",")[0] == "fedavg"]
    plain = [name for name in variants if name.lower() == "fedavg"]
    chosen = plain or variants
    return chosen[0] if len(chosen) == 1 else ""


def family_size(methods: Collection[str], reference: str) -> int:
    """How many differences Holm's correction counts for the differences to a reference.

    If the reference is the best method, the results chose it, so all pairs of methods count.
    """
    number = len(methods)
    if reference == fedavg_of(methods):
        return number - 1
    return number * (number - 1) // 2


def _leading(gains: DataFrame) -> list[str]:
    """The methods that are not clearly worse than any other.

    Args:
        gains: [seeds, methods], higher is better, the best method first.
    """
    leaders = []
    for method in gains:
        highest = [interval(gains[method] - gains[other])[1] for other in gains]
        if all(high >= 0 for high in highest):
            leaders.append(method)
    return leaders
