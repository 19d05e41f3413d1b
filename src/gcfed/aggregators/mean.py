"""The mean of updates, the default of every run, and that weighted by samples."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Literal

import numpy as np

from gcfed.federated.parallel.sums import TERMS, Sums
from gcfed.federated.parts import Accumulator, Aggregator, Fact, Params, Round, Setup, Upload
from gcfed.utils.checked import checked
from gcfed.utils.device import on_device


@checked
class MeanAggregator(Aggregator):
    """Weighted mean of the finite updates: ``Δ = Σ_k p_k Δ_k / Σ_k p_k`` (McMahan et al. 2017,
    Algorithm 1).

    The result does not depend on the order of the updates, nor on the processes that trained the
    clients: Δ of trained parameters is summed in steps of 2⁻⁴⁰, all else of 2⁻⁶⁰
    (:mod:`~gcfed.federated.parallel.sums`). Only tensors in float64 are added as they are, so their
    last bits depend on the order. Numbers must be below 2⁶¹.

    Args:
        weighting: ``"uniform"``: p_k = 1 (GC-Fed, Algorithm 1, line 19). ``"samples"``: p_k = n_k
            (FedAvg).
    """

    def __init__(self, weighting: Literal["uniform", "samples"] = "uniform") -> None:
        self.weighting = weighting
        self.narrow: Set[str] = frozenset()  # names of the trained parameters
        # the clients' numbers of samples; None if the server does not know them
        self._sizes: Callable[[np.ndarray], np.ndarray] | None = None

    def bind(self, setup: Setup) -> None:
        if self.weighting == "samples":
            if setup.transport.own_data:
                return  # the largest n_k is not known yet, so sums stay on the wide grid
            self._sizes = setup.data.sizes
        long = any(Fact.LONG_UPDATES in part.facts for part in setup.parts)
        self.narrow = frozenset() if long else frozenset(setup.names)

    def new_sum(self, round: Round) -> MeanSum:
        return MeanSum(self.weighting == "samples", self._unit(round), self.narrow)

    def new_extra_sum(self, round: Round) -> MeanSum:
        """The plain mean, for every ``weighting``."""
        return MeanSum(by_samples=False, unit=_room(round))

    def _unit(self, round: Round) -> float:
        """The unit of the round's weights, which makes every weight at most 1."""
        room = _room(round)
        if self.weighting == "uniform":
            return room
        if self._sizes is None:
            return room * 2.0**-24  # for clients of at most 2²⁴ samples
        # not by the largest client of all: the grid would be too coarse for small ones
        largest = int(self._sizes(round.cohort).max(initial=0))
        return room * 2.0 ** -largest.bit_length()


def _room(round: Round) -> float:
    """The largest weight for which the sum over the round's cohort fits its grid."""
    return 2.0 ** -max(0, len(round.cohort).bit_length() - TERMS)


class MeanSum(Accumulator):
    """A round's weighted sum.

    Args:
        by_samples: the weights are ``unit`` times the numbers of samples, or else ``unit``.
        narrow: names of the tensors whose terms are below 2¹¹.
    """

    def __init__(self, by_samples: bool, unit: float, narrow: Set[str] = frozenset()) -> None:
        self.by_samples = by_samples
        self.unit = unit
        self.narrow = narrow
        self._sums: Sums | None = None  # made with the first upload, because it takes memory

    def add(self, upload: Upload) -> None:
        if self._sums is None:
            self._sums = Sums({name: t[0] for name, t in upload.delta.items()}, self.narrow)
        weight_K = upload.finite.double() * self.unit
        if self.by_samples:
            weight_K = weight_K * on_device(upload.num_samples, weight_K.device)
        self._sums.add(upload.delta, weight_K)

    def reduce(self, like: Params) -> Params:
        sums = self._sums or Sums(like, self.narrow)
        self._sums = None
        return sums.mean()
