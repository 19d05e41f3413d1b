"""Rules by coordinates: median and trimmed mean (Yin et al., ICML 2018, Definitions 1 and 2).

Memory: that of one cohort on every process.
"""

from torch import Tensor

from gcfed.aggregators.cohort import BoundedRule, CohortRule, by_coordinates


class Median(CohortRule):
    """The median of each coordinate; of an even number, the mean of the middle two."""

    def rule(self, updates_nD: Tensor) -> Tensor:
        n = len(updates_nD)

        def median(part: Tensor) -> Tensor:
            ordered = part.sort(0).values
            return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2

        return by_coordinates(median, updates_nD)


class TrimmedMean(BoundedRule):
    """The mean of each coordinate without its f largest and f smallest numbers."""

    def rule(self, updates_nD: Tensor) -> Tensor:
        n, f = len(updates_nD), self.f(len(updates_nD))
        return by_coordinates(lambda part: part.sort(0).values[f : n - f].mean(0), updates_nD)
