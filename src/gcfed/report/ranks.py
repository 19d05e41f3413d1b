"""How far two orders agree: Spearman's ρ and Kendall's τ, with ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their places."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of the ranks: 1 the same order, −1 the reverse; NaN where one side is all equal."""
    x, y = ranks(a), ranks(b)
    mean_x, mean_y = fmean(x), fmean(y)
    scale = math.sqrt(sum((v - mean_x) ** 2 for v in x) * sum((v - mean_y) ** 2 for v in y))
    product = sum((v - mean_x) * (w - mean_y) for v, w in zip(x, y, strict=True))
    return product / scale if scale else math.nan


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's τ_b: pairs in the same order less those in the other, among the pairs without a tie.

    Divided by √((pairs without a tie in a)·(pairs without a tie in b)); NaN where one side is all equal.
    """
    pairs = list(combinations(zip(a, b, strict=True), 2))
    signs = [(_sign(p[0] - q[0]), _sign(p[1] - q[1])) for p, q in pairs]
    scale = math.sqrt(sum(abs(s) for s, _ in signs) * sum(abs(s) for _, s in signs))
    return sum(s * t for s, t in signs) / scale if scale else math.nan


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
