"""How the field reads a learning curve: smoothed accuracy, its best value, rounds to a target. NumPy only.

A curve is a list of measurements, NaN where a round was not tested. Such entries count for nothing: a window of 10
holds the last 10 *tests*, and results are NaN at the same places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Curve = NDArray[np.float64]


def smooth(values: ArrayLike, window: int = 10) -> Curve:
    """Trailing mean: entry i is the mean of the last min(window, i+1) values, as in GC-Fed's tables.

    Raises:
        ValueError: ``window`` is less than 1.
    """
    if window < 1:
        raise ValueError(f"window={window} holds no value; give at least 1")
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
    if not 0 <= decay < 1:
        raise ValueError(f"decay={decay} is out of range; give a number in [0, 1), for instance 0.9")
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
    """One run's accuracy in a few numbers; accuracies in the unit of the curve, NaN where nothing was tested."""

    final: float
    best: float
    best_round: int | None
    smoothed: float  # mean of the last 10 tests
    rounds_to: dict[float, int | None]  # target → first round that reached it, on the raw curve


def summarize(rounds: ArrayLike, acc: ArrayLike, targets: Sequence[float] = ()) -> Summary:
    """Summarize an accuracy curve: ``acc[i]`` was measured after round ``rounds[i]``, rounds ascending."""
    curve = np.asarray(acc, dtype=np.float64)
    tested = ~np.isnan(curve)
    rounds, curve = np.asarray(rounds)[tested], curve[tested]
    rounds_to = {target: rounds_to_target(rounds, curve, target) for target in targets}
    if not curve.size:
        return Summary(np.nan, np.nan, None, np.nan, rounds_to)
    best = int(curve.argmax())
    return Summary(float(curve[-1]), float(curve[best]), int(rounds[best]), float(smooth(curve)[-1]), rounds_to)
