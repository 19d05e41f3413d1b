"""Scales vectors and targets of a regression to mean 0 and deviation 1."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy import ndarray

from gcfed.data.base import FLOATS, Split


def standardized(splits: Sequence[Split], aside: ndarray) -> tuple[list[Split], dict[str, ndarray]]:
    """The splits with their float samples and targets scaled, and the means and deviations: those
    of the first split, without the rows ``aside``.

    Columns of 0 and 1 stay as they are; constant columns get a deviation of 1.
    """
    scaling: dict[str, ndarray] = {}
    scaled = list(splits)
    for key in ("x", "y"):
        values = getattr(splits[0], key)
        if values.dtype not in FLOATS:
            continue
        mean, std = _mean_and_deviation(np.delete(values, aside, 0))
        scaling |= {f"{key}_mean": mean, f"{key}_std": std}
        for i, split in enumerate(scaled):
            values_scaled = (getattr(split, key) - mean) / std
            scaled[i] = replace(split, **{key: values_scaled.astype(values.dtype)})
    return scaled, scaling


def _mean_and_deviation(values_nd: ndarray) -> tuple[ndarray, ndarray]:
    """Of each column, float64 [d]."""
    are_switches = ((values_nd == 0) | (values_nd == 1)).all(0)
    are_constant = np.ptp(values_nd, 0) == 0
    mean = np.where(are_switches, 0.0, values_nd.mean(0, np.float64))
    std = np.where(are_switches | are_constant, 1.0, values_nd.std(0, np.float64))
    return mean, std
