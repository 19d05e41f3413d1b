"""The numbers behind the figures: mean curves over seeds, what a group came to, where a target was reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcfed.metrics.convergence import smooth
from gcfed.report.groups import Group, method_name
from gcfed.report.measures import value
from gcfed.report.runs import DIVERGED, FAILED, FINISHED, UNFINISHED, Run

Array = NDArray[np.float64]
ENDED = (FINISHED, DIVERGED)
WINDOW = 10


@dataclass(frozen=True)
class Quantity:
    """A column of ``metrics.csv`` as a figure shows it.

    Attributes:
        label: of the axis, with the unit.
        factor: from the column's unit to the label's.
        log: whether its logarithm is what matters.
        summed_up: the measure of a run as a whole, with {} for the column.
    """

    column: str
    label: str
    factor: float = 1.0
    log: bool = False
    higher_is_better: bool = True
    summed_up: str = "last:{}"

    @property
    def measure(self) -> str:
        return self.summed_up.format(self.column)


ACCURACY = Quantity("test/acc", "test accuracy (%)", 100, summed_up="mean:{}[10]")
ERROR = Quantity("test/relative_error", "relative error ‖W − W*‖ / ‖W*‖", log=True, higher_is_better=False)
RESULTS = (ACCURACY, ERROR)


@dataclass(frozen=True, eq=False)
class Curve:
    """x, y [n]; ``low`` and ``high`` [n] where there is a deviation to shade."""

    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None

    def thinned(self, most: int = 400) -> Curve:
        """At most so many of its points: more than a page can show make files large."""
        if len(self.x) <= most:
            return self
        keep = thin(len(self.x), most)
        low, high = (None if part is None else part[keep] for part in (self.low, self.high))
        return Curve(self.x[keep], self.y[keep], low, high)


@dataclass(frozen=True, eq=False)
class Drawing:
    """What a group shows in one panel.

    Attributes:
        mean: over the finished runs, None where there is none.
        raw: the values of the only finished run before smoothing, where they were asked for.
        partial: a curve for each run that diverged, failed or is unfinished, as far as it got.
        window: how many measurements were averaged; 1: none.
    """

    group: Group
    mean: Curve | None
    raw: Curve | None
    partial: tuple[Curve, ...]
    window: int


def thin(n: int, most: int) -> NDArray[np.int64]:
    """Positions of at most ``most`` of n points, evenly spaced, both ends among them."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(np.int64))


def window_of(measurements: int) -> int:
    """10, the papers', where that is no more than a fifth of the measurements: of 7 tests nothing is to be smoothed."""
    return int(np.clip(measurements // 5, 1, WINDOW))


def measured(groups: Iterable[Group], column: str) -> list[Group]:
    """The groups of which a run has a finite value of the column."""
    return [g for g in groups if any(np.isfinite(run.curve(column)[1]).any() for run in g.runs)]


def results_of(groups: Sequence[Group]) -> list[tuple[Quantity, list[Group]]]:
    """Test accuracies, and relative errors of regressions, each with the groups that have them."""
    found = [(quantity, measured(groups, quantity.column)) for quantity in RESULTS]
    return [(quantity, members) for quantity, members in found if members]


def reached(run: Run) -> float:
    """The last round that counts: of a run that diverged the last one with finite clients and a finite test loss."""
    if run.state != DIVERGED:
        return float(run.rounds)
    rounds, nan = run.columns["round"], np.full(len(run.columns["round"]), np.nan)
    loss, acc = (run.columns.get(f"test/{name}", nan) for name in ("loss", "acc"))
    clients, lost = (run.columns.get(f"train/{name}", nan) for name in ("clients", "nonfinite_clients"))
    tested = ~np.isnan(loss) | ~np.isnan(acc)
    good = ~(((lost > 0) & (lost == clients)) | (tested & ~np.isfinite(loss)))
    return float(rounds[good][-1]) if good.any() else 0.0


def drawing(
    group: Group,
    quantity: Quantity,
    *,
    window: int | None = None,
    raw: bool = False,
    x: Callable[[Run], Array] | None = None,
) -> Drawing:
    """The curves of a group.

    Each run is smoothed by itself; the mean and the sample standard deviation are over the finished runs, at the rounds
    that all of them measured.

    Args:
        window: a trailing mean over so many measurements; by default :func:`window_of` those of the finished run that
            has the fewest.
        raw: whether a single finished run shows its values before smoothing, too.
        x: of each row of a run's metrics, [rows]; by default its rounds.
    """
    finished = [run for run in group.runs if run.state == FINISHED]
    others = [run for run in group.runs if run.state != FINISHED]
    if window is None:
        counts = [len(run.curve(quantity.column)[0]) for run in finished or others]
        window = min((window_of(count) for count in counts if count), default=1)

    def smoothed(run: Run, window: int, until: float = np.inf) -> tuple[Array, Array, Array]:
        rounds, values = run.curve(quantity.column)
        kept = (rounds <= until) & np.isfinite(values)
        rounds, values = rounds[kept], smooth(quantity.factor * values[kept], window)
        return rounds, rounds if x is None else x(run)[np.searchsorted(run.columns["round"], rounds)], values

    known = [run for run in finished if len(smoothed(run, 1)[0])]
    alone = known[0] if raw and len(known) == 1 and window > 1 else None
    partial = [Curve(*smoothed(run, window, reached(run))[1:]) for run in others if quantity.column in run.columns]
    return Drawing(
        group,
        _mean([smoothed(run, window) for run in known]),
        None if alone is None else Curve(*smoothed(alone, 1)[1:]),
        tuple(curve for curve in partial if len(curve.x)),
        window,
    )


def _mean(curves: Sequence[tuple[Array, Array, Array]]) -> Curve | None:
    """Over the runs' (rounds, x, y), at their common rounds."""
    if not curves:
        return None
    rounds = curves[0][0]
    for other, _, _ in curves[1:]:
        rounds = np.intersect1d(rounds, other)
    if not len(rounds):
        return None
    x, y = (np.stack([curve[i][np.searchsorted(curve[0], rounds)] for curve in curves]) for i in (1, 2))
    mean = y.mean(0)
    if len(curves) == 1:
        return Curve(x[0], mean)
    std = y.std(0, ddof=1)
    return Curve(x.mean(0), mean, mean - std, mean + std)


def crossing(curve: Curve, target: float) -> float | None:
    """The first x at which the curve is at the target or above."""
    above = np.flatnonzero(curve.y >= target)
    return float(curve.x[above[0]]) if len(above) else None


def target_of(drawings: Sequence[Drawing]) -> tuple[float, str] | None:
    """An accuracy in percent to mark, and its label.

    The highest of the runs' ``targets`` that half of the curves reach, but not all at once; without one it is FedAvg's
    peak, as in FedGC's Figure 6, if there are others to compare with it.
    """
    means = [part.mean for part in drawings if part.mean is not None]
    targets = {100 * float(t) for part in drawings for run in part.group.runs for t in run.get("targets") or ()}
    for target in sorted(targets, reverse=True):
        hits = [x for curve in means if (x := crossing(curve, target)) is not None]
        if hits and 2 * len(hits) >= len(means) and max(hits) > means[0].x[0]:
            return target, f"{target:g} %"
    base = [d.mean for d in drawings if d.mean is not None and method_name(d.group.setting) == "FedAvg"]
    if base and len(means) > len(base):
        peak = max(float(curve.y.max()) for curve in base)
        return peak, f"FedAvg:\n{peak:.1f} %"
    return None


def score(group: Group, quantity: Quantity) -> float:
    """What the group came to, for choosing whom to draw: higher is better; −∞ where nothing is known."""
    values = [v for run in group.runs if (v := value(run, quantity.measure)) is not None]
    return float(np.mean(values)) * (1 if quantity.higher_is_better else -1) if values else -np.inf


def result_score(group: Group) -> float:
    """:func:`score` by accuracy, or by the relative error where there is none."""
    return next((score(group, quantity) for quantity, _ in results_of([group])), -np.inf)


def ended(group: Group, measure: str, factor: float = 1.0) -> Array:
    """The measure of each run that came to its end and has it, [runs]."""
    values = [value(run, measure) for run in group.runs if run.state in ENDED]
    return factor * np.array([v for v in values if v is not None], dtype=np.float64)


def mean_std(values: Array) -> tuple[float, float]:
    """Mean and sample standard deviation; 0 of a single value."""
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0


def troubles(groups: Sequence[Group]) -> str:
    """``2 of 3 seeds diverged``; "" where every run finished."""
    runs = [run for group in groups for run in group.runs]
    counts = Counter(run.state for run in runs)
    told = [(counts[state], state) for state in (DIVERGED, FAILED, UNFINISHED) if counts[state]]
    if not told:
        return ""
    if told[0][0] == len(runs):
        return told[0][1]
    noun = "seeds" if len(groups) == 1 else "runs"
    first, *others = (f"{count} of {len(runs)} {noun} {state}" for count, state in told)
    return ", ".join([first, *(other.replace(f" of {len(runs)} {noun}", "") for other in others)])
