"""Student's t distribution. With t = √ν·tan θ its density is ∝ cos^(ν−1) θ, so that the integrals
have finite bounds.

scipy has the distribution, too. It is optional (for SVHN), and reports must work without it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

POINTS = 200_001  # of the numerical integral


@cache
def quantile(freedom: float) -> float:
    """The t that is exceeded with a probability of 2.5 %."""
    angles, areas = _areas(freedom)
    return math.sqrt(freedom) * math.tan(np.interp(0.95 * areas[-1], areas, angles))


def two_sided_p(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than ``t``."""
    angles, areas = _areas(freedom)
    angle = math.atan(abs(t) / math.sqrt(freedom))
    return float(1 - np.interp(angle, angles, areas) / areas[-1])


def _areas(freedom: float) -> tuple[Any, Any]:
    """Angles θ from 0 to π/2, and the integral of the density from 0 to each."""
    angles = np.linspace(0.0, math.pi / 2, POINTS)
    heights = np.cos(angles) ** (freedom - 1.0)
    pieces = (heights[1:] + heights[:-1]) / 2
    return angles, np.concatenate([[0.0], np.cumsum(pieces)])
