"""Which method of a federation is ahead, by how much, and how sure that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from gcfed.report.groups import Group, is_fedavg
from gcfed.runs.folder import FINISHED
from gcfed.runs.measures import LAST_ROUNDS, MEASURES, WINDOW, Column, Sample, describe, parse

KINDS = 20  # sets of seeds that are tried
PERMUTED = 16  # pairs of which all signs are tried


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


def equal_seeds(values: pd.DataFrame) -> pd.DataFrame:
    """Of these seeds × methods the part without gaps that compares the most, of two methods or more; empty where no two
    have a seed in common. Tried are the seeds of each method, and those that any two share."""
    has = values.notna()
    kinds = [np.array(kind) for kind, _ in Counter(map(tuple, has.T.to_numpy())).most_common(KINDS)]
    parts = [values.loc[one & other].dropna(axis=1) for one, other in combinations_with_replacement(kinds, 2)]
    return max((part for part in parts if part.shape[1] > 1), key=lambda part: part.size, default=values.iloc[:0])


def main_measure(groups: Sequence[Group]) -> str:
    """What decides: the accuracy of the last ten rounds if all that finished have so many, or where none has, all that
    were tested; else of the last test; without accuracies the relative error, else the RMSE, else the loss."""
    runs = [run for group in groups for run in group.runs]
    tested = [run for run in runs if len(run.curve("test/acc"))]
    finished = [run for run in tested if run.state == FINISHED]
    if min((run.curve("test/acc").index[-1] for run in finished or tested), default=0) >= WINDOW:
        return LAST_ROUNDS
    wanted = ("last:test/acc", "last:test/relative_error", "last:test/rmse", "last:test/loss")
    columns = {name for run in runs for name in run.metrics}
    return next((measure for measure in wanted if parse(measure).column in columns), wanted[-1])


@dataclass(frozen=True, eq=False)
class Verdict:
    """The methods of a federation, the best first: those with equal seeds, then those that lack some."""

    column: Column  # of the measure that decides
    groups: Sequence[Group]
    samples: Sequence[Sample]  # of the first ones over their equal seeds
    ranked: int  # so many methods have equal seeds
    reference: int  # FedAvg as it is, else the best

    @property
    def other(self) -> int:
        """Whom the best is compared with: the reference, or the next one where the best is it."""
        return self.reference or 1

    @property
    def lead(self) -> Paired:
        return paired(self.samples[0], self.samples[self.other])

    def sample(self, i: int, column: Column) -> Sample:
        """A method's measure over the seeds that it is compared on."""
        return column.of(self.groups[i].runs, self.samples[i].values if i < self.ranked else None)

    @property
    def headline(self) -> str:
        """``GC-Fed +4.2 points over FedAvg``."""
        if not self.ranked:
            return "No two methods have a seed in common"
        best, gap = self.groups[0].method, self._gap(self.lead.difference, sign="+")
        over = "over" if self.column.higher else "against"
        return f"{best}{':' * (', ' in best)} {gap} {over} {self.groups[self.other].method}"

    @property
    def sureness(self) -> str:
        """``10 seeds, 95 % interval 3.3 to 5.2, p = 0.002``, or why there is none."""
        n, p = self.lead.n, self.lead.p
        if n < 2:
            return "one seed, which says nothing about chance" if n else "equal seeds would compare them"
        text = f"{n} seeds, 95 % interval {self.lead.between(self.column)}"
        if (least := 2.0 ** (1 - n)) > 0.05:
            return f"{text}; with {n} seeds p cannot be below {least:.3g}"
        return f"{text}, p = {p:.2g}" if p == p else text

    @property
    def remarks(self) -> list[str]:
        """What must be known beside it: who is not told apart, who is next, by which measures another one is ahead."""
        said = ["These seeds do not tell the two apart."] * self.lead.is_open
        if self.ranked and self.other != 1:
            pair = paired(*self.samples[:2])
            apart = ", not told apart" * pair.is_open
            said.append(f"Next is {self.groups[1].method}, {self._gap(abs(pair.difference))} behind{apart}.")
        ahead = []
        for column in map(describe, MEASURES if self.ranked else ()):
            best, other = (column.rank(self.sample(i, column)) for i in (0, self.other))
            if column.higher is None or best is None or other is None:
                continue
            if (other > best) if column.higher else (other < best):
                texts = f"{column.text(other)} to {column.text(best)} {column.unit}".strip()
                ahead.append(f"{column.title} ({texts})")
        return said + [f"{self.groups[self.other].method} is ahead by {' and '.join(ahead)}."] * bool(ahead)

    def _gap(self, number: float, sign: str = "-") -> str:
        unit = "points" if self.column.unit == "%" else self.column.unit
        return f"{self.column.differences(number, sign=sign)[0]} {unit}".strip()

    def against(self, i: int) -> tuple[dict[str, Any], str]:
        """How far a method is from the reference: what a CSV has of it, and what a table shows."""
        reference = self.groups[self.reference].method
        pair = paired(self.samples[i], self.samples[self.reference])
        gap = self.column.differences(pair.difference, sign="+")[0] if pair.n and i != self.reference else "–"
        text = f"{gap} ({pair.between(self.column)})" if gap != "–" and pair.n > 1 else gap
        return {"ranked": "yes" * (i < self.ranked), "reference": reference, **pair._asdict()}, text


def verdict(groups: Sequence[Group]) -> Verdict | None:
    """None where fewer than two methods have a result."""
    column = describe(main_measure(groups))
    samples = {i: column.of(group.runs) for i, group in enumerate(groups)}
    values = pd.DataFrame({i: pd.Series(s.values, dtype=float) for i, s in samples.items()})
    if values.notna().any().sum() < 2:
        return None
    equal = equal_seeds(values)
    order = [*equal.mean().sort_values(ascending=not column.higher, kind="stable").index] if len(equal) else []
    ranked, samples = len(order), samples | {i: column.of(groups[i].runs, equal.index) for i in order}
    order += sorted(samples.keys() - {*order}, key=lambda i: (not samples[i].values, i))
    plain = (place for place, i in enumerate(order[:ranked]) if _is_plain(groups[i]))
    return Verdict(column, [groups[i] for i in order], [samples[i] for i in order], ranked, next(plain, 0))


def _is_plain(group: Group) -> bool:
    """FedAvg without anything on top."""
    run = group.runs[0]
    on_top = run.get("gc._target_") or run.get("quantization._target_")
    means = str(run.get("aggregator._target_", "Mean")).rpartition(".")[2].startswith("Mean")
    return is_fedavg(run) and not on_top and means
