"""How the field reads a learning curve: smoothed accuracy, its best value, rounds to a target. NumPy only.

A curve is a list of measurements, NaN where a round was not tested. Such entries count for nothing: a window of 10
holds the last 10 *tests*, and results are NaN at the same places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcfed.utils.number import number

Curve = NDArray[np.float64]


def smooth(values: ArrayLike, window: int = 10) -> Curve:
    """Trailing mean: entry i is the mean of the last min(window, i+1) values, as in GC-Fed's tables.

    Raises:
        ValueError: ``window`` is less than 1.
    """
    number("window", window, 1, whole=True)
    smoothed = np.array(values, dtype=np.float64)
    tested = ~np.isnan(smoothed)
    padded = np.concatenate([np.zeros(window - 1), smoothed[tested]])
    if tested.any():
        sums = np.lib.stride_tricks.sliding_window_view(padded, window).sum(axis=-1)
        smoothed[tested] = sums / np.minimum(np.arange(len(sums)) + 1, window)
    return smoothed


def exponential_moving_average(values: ArrayLike, decay: float = 0.9) -> Curve:
    """e₀ = a₀, eᵢ = decay·eᵢ₋₁ + (1 − decay)·aᵢ, as FedACG reports its accuracies.

    Raises:
        ValueError: ``decay`` is not in [0, 1).
    """
    number("decay", decay, 0, 1, below=True)
    averaged = np.array(values, dtype=np.float64)
    average = np.nan
    for i in np.flatnonzero(~np.isnan(averaged)):
        average = averaged[i] if np.isnan(average) else decay * average + (1 - decay) * averaged[i]
        averaged[i] = average
    return averaged


def rounds_to_target(rounds: ArrayLike, values: ArrayLike, target: float) -> int | None:
    """The first round with a value of at least ``target``; None if no round has one."""
    reached = np.asarray(rounds)[np.asarray(values, dtype=np.float64) >= target]
    return int(reached.min()) if reached.size else None


@dataclass(frozen=True)
class Summary:
    """One run's accuracy in a few numbers; accuracies in the unit of the curve, NaN where too little was tested."""

    final: float
    best: float
    best_round: int | None
    smoothed: float  # mean of the last 10 tests
    averaged: float  # exponential moving average after the last test
    rounds_to: dict[float, int | None]  # target → first round that reached it, on the raw curve
    rounds_to_averaged: dict[float, int | None]  # the same on the exponential moving average, as FedACG counts
    diff_mean: float  # of the change from one test to the next, GC-Fed's Table 2
    diff_std: float  # population standard deviation
    diff_min: float


def summarize(rounds: ArrayLike, acc: ArrayLike, targets: Sequence[float] = ()) -> Summary:
    """Summarize an accuracy curve: ``acc[i]`` was measured after round ``rounds[i]``, rounds ascending."""
    curve = np.asarray(acc, dtype=np.float64)
    tested = ~np.isnan(curve)
    rounds, curve = np.asarray(rounds)[tested], curve[tested]
    averaged = exponential_moving_average(curve)
    best = int(curve.argmax()) if curve.size else None
    change = np.diff(curve) if curve.size > 1 else np.full(1, np.nan)
    return Summary(
        final=_last(curve),
        best=np.nan if best is None else float(curve[best]),
        best_round=None if best is None else int(rounds[best]),
        smoothed=_last(smooth(curve)),
        averaged=_last(averaged),
        rounds_to={target: rounds_to_target(rounds, curve, target) for target in targets},
        rounds_to_averaged={target: rounds_to_target(rounds, averaged, target) for target in targets},
        diff_mean=float(change.mean()),
        diff_std=float(change.std()),
        diff_min=float(change.min()),
    )


def _last(curve: Curve) -> float:
    return float(curve[-1]) if curve.size else np.nan
