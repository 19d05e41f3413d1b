"""The difference between our mean and a printed mean, and Welch's t-test."""

from __future__ import annotations

import math
from typing import NamedTuple

from gcfed.reporting.student import two_sided_p


class Sample(NamedTuple):
    """A mean over ``seeds`` runs and their sample standard deviation; None for a single run."""

    mean: float
    std: float | None
    seeds: int


class Difference(NamedTuple):
    """Ours less theirs, and the two-sided p of "both have the same mean"."""

    value: float
    p: float


def compare_means(ours: Sample, theirs: Sample) -> Difference | None:
    """Welch's test, which does not assume equal variances (Welch 1947).

    A single run of ours has the printed standard deviation. None if theirs has none, or a single
    run, or if nothing varies.
    """
    if theirs.std is None or theirs.seeds < 2:
        return None
    their_part = theirs.std**2 / theirs.seeds
    if ours.std is None:
        our_part = theirs.std**2 / ours.seeds
        freedom: float = theirs.seeds - 1
    else:
        our_part = ours.std**2 / ours.seeds
        freedom = _freedom(our_part, ours.seeds, their_part, theirs.seeds)
    error = math.sqrt(our_part + their_part)
    if error == 0.0:
        return None
    value = ours.mean - theirs.mean
    return Difference(value, two_sided_p(value / error, freedom))


def _freedom(our_part: float, our_seeds: int, their_part: float, their_seeds: int) -> float:
    """Degrees of freedom by Welch and Satterthwaite; the parts are variances of means."""
    spread = our_part**2 / (our_seeds - 1) + their_part**2 / (their_seeds - 1)
    return (our_part + their_part) ** 2 / spread if spread else 1.0
