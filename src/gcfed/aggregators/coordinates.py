"""Rules by coordinates: median and trimmed mean (Yin et al., ICML 2018, Definitions 1 and 2)."""

from torch import Tensor

from gcfed.aggregators.cohort import BoundedRule, CohortRule, by_coordinates, median


class Median(CohortRule):
    """The median of each coordinate; of an even number, the mean of the middle two."""

    def rule(self, updates_nD: Tensor) -> Tensor:
        return by_coordinates(lambda part: median(part.sort(0).values), updates_nD)


class TrimmedMean(BoundedRule):
    """The mean of each coordinate, without its f largest and f smallest values."""

    def rule(self, updates_nD: Tensor) -> Tensor:
        n = len(updates_nD)
        f = self.f(len(updates_nD))
        return by_coordinates(lambda part: part.sort(0).values[f : n - f].mean(0), updates_nD)
