"""Student's t distribution, by the incomplete beta function (Abramowitz and Stegun, Handbook of
Mathematical Functions, 26.5.27).
"""

from __future__ import annotations

from functools import cache

from mpmath import betainc, findroot


@cache
def quantile(freedom: float) -> float:
    """The t that is exceeded with a probability of 2.5 %, for at least one degree of freedom."""
    root = findroot(lambda t: two_sided_p(t, freedom) - 0.05, (1.9, 13.0), solver="anderson")
    return float(root)


def two_sided_p(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than ``t``."""
    x = freedom / (freedom + t * t)
    return float(betainc(freedom / 2, 0.5, 0.0, x, regularized=True))
