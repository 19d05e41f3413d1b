"""Student's t distribution, by the incomplete beta function (Abramowitz and Stegun, Handbook of
Mathematical Functions, 26.5.27).
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
from mpmath import betainc, findroot

Key = TypeVar("Key")


@cache
def quantile(freedom: float) -> float:
    """The t that is exceeded with a probability of 2.5 %, for at least one degree of freedom."""
    root = findroot(lambda t: two_sided_p(t, freedom) - 0.05, (1.9, 13.0), solver="anderson")
    return float(root)


def two_sided_p(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than ``t``."""
    x = freedom / (freedom + t * t)
    return float(betainc(freedom / 2, 0.5, 0.0, x, regularized=True))


def paired_p(differences: Sequence[float]) -> float:
    """The p of "the mean difference is 0", by Student's t; 1 for fewer than two differences and for
    differences that are not finite.
    """
    values = np.asarray(differences, float)
    if len(values) < 2 or not np.isfinite(values).all():
        return 1.0
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    if error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return two_sided_p(mean / error, len(values) - 1)


def rejected_by_holm(ps: Mapping[Key, float], family: int, level: float = 0.05) -> list[Key]:
    """The hypotheses that are rejected, those with the smallest p first. A true one is among them
    with a probability of at most ``level`` (Holm 1979).

    Args:
        ps: the p of each hypothesis.
        family: the number of hypotheses among which these were chosen, at least that of ``ps``.
    """
    order = sorted(ps, key=lambda hypothesis: ps[hypothesis])
    for num_rejected, hypothesis in enumerate(order):
        if ps[hypothesis] > level / (family - num_rejected):
            return order[:num_rejected]
    return order
