"""Rules by distances: Krum (Blanchard et al., NeurIPS 2017, Section 4) and multi-Krum (Section 6),
Bulyan (El Mhamdi et al., ICML 2018, Section 4).

An update's score is the sum of its squared distances to the n − f − 2 nearest others.
"""

import torch
from torch import Tensor

from gcfed.aggregators.cohort import BoundedRule, by_coordinates, median


def squared_distances(updates_nD: Tensor) -> Tensor:
    """``[n, D]`` → ``[n, n]``.

    Not by a matrix product, which would round small distances to zero.
    """
    return torch.cdist(updates_nD, updates_nD, compute_mode="donot_use_mm_for_euclid_dist").square()


def scores(squares_nn: Tensor, f: int) -> Tensor:
    """``[n, n]`` → ``[n]``; each update's nearest neighbour is itself and does not count."""
    return squares_nn.sort(1).values[:, 1 : max(2, len(squares_nn) - f - 1)].sum(1)


class Krum(BoundedRule):
    """The update with the lowest score."""

    spare = 3

    def rule(self, updates_nD: Tensor) -> Tensor:
        return updates_nD[scores(squared_distances(updates_nD), self.f(len(updates_nD))).argmin()]


class MultiKrum(Krum):
    """The mean of the n − f updates with the lowest scores."""

    def rule(self, updates_nD: Tensor) -> Tensor:
        n = len(updates_nD)
        f = self.f(len(updates_nD))
        chosen = scores(squared_distances(updates_nD), f).argsort(stable=True)[: n - f]
        return updates_nD[chosen.sort().values].mean(0)


class Bulyan(BoundedRule):
    """Krum chooses n − 2f updates one by one.

    A coordinate is the mean of its n − 4f values nearest to the median.
    """

    per_hostile = 4
    spare = 3

    def rule(self, updates_nD: Tensor) -> Tensor:
        n = len(updates_nD)
        f = self.f(len(updates_nD))
        squares = squared_distances(updates_nD)
        left = list(range(n))
        while len(left) > 2 * f:
            left.pop(int(scores(squares[left][:, left], f).argmin()))
        chosen = updates_nD[[i for i in range(n) if i not in left]]

        def middle(part: Tensor) -> Tensor:
            ordered = part.sort(0).values
            nearest = (ordered - median(ordered)).abs().argsort(dim=0, stable=True)[: n - 4 * f]
            return ordered.gather(0, nearest).mean(0)

        return by_coordinates(middle, chosen)
