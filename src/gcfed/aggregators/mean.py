"""The weighted mean of updates (FedAvg), and the default of every run."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Literal

import numpy as np

from gcfed.federated.parallel.sums import LIMIT, TERMS, Sums
from gcfed.federated.parts import Fact, Params, Round, Setup, Upload
from gcfed.utils.checked import checked
from gcfed.utils.device import on_device


@checked
class MeanAggregator:
    """Weighted mean of the finite updates: ``Δ = Σ_k p_k Δ_k / Σ_k p_k`` (McMahan et al. 2017,
    Algorithm 1).

    The result does not depend on the order of the updates, nor on the processes that trained the
    clients: Δ of trained parameters is summed in steps of 2⁻⁴⁰, all else of 2⁻⁶⁰, float64 as it is
    (:mod:`~gcfed.federated.parallel.sums`). Numbers must be below 2⁶¹.

    Args:
        weighting: ``"uniform"``: p_k = 1 (GC-Fed, Algorithm 1, line 19). ``"samples"``: p_k = n_k
            (FedAvg).
    """

    limit = LIMIT
    narrow: Set[str] = frozenset()  # names of the trained parameters

    def __init__(self, weighting: Literal["uniform", "samples"] = "uniform") -> None:
        self.weighting = weighting
        self._room = 1.0  # the largest weight for which the cohort's sum fits
        # the unit of weights, which must be at most 1
        self._unit = 2.0**-24 if weighting == "samples" else 1.0
        # the clients' numbers of samples, which choose the unit of a round; None: it is the same
        self._sizes: Callable[[np.ndarray], np.ndarray] | None = None
        self._sums: Sums | None = None

    def validate(self, setup: Setup) -> None:
        self._room = 2.0 ** -max(0, setup.most_clients.bit_length() - TERMS)
        if self.weighting == "samples":
            if setup.transport.own_data:
                return  # the largest n_k is not known yet, so sums stay on the wide grid
            self._sizes = setup.data.sizes
        self._unit = self._room
        long = any(Fact.LONG_UPDATES in part.facts for part in setup.parts)
        self.narrow = frozenset() if long else frozenset(setup.names)

    def for_extra(self) -> MeanAggregator:
        """The plain mean, for every ``weighting``."""
        mean = MeanAggregator()
        mean._unit = self._room
        return mean

    def add(self, upload: Upload, round: Round) -> None:
        """Adds the updates of K clients, without those that are not finite."""
        if self._sums is None:
            self._sums = Sums({name: t[0] for name, t in upload.delta.items()}, self.narrow)
            if self._sizes is not None:
                # not by the largest client of all: the grid would be too coarse for small ones
                largest = int(self._sizes(round.cohort).max())
                self._unit = self._room * 2.0 ** -largest.bit_length()
        weight = upload.finite.double() * self._unit
        if self.weighting == "samples":
            weight = weight * on_device(upload.num_samples, weight.device)
        self._sums.add(upload.delta, weight)

    def reduce(self, round: Round, like: Params) -> Params:
        """The mean over the cohort, name → ``[*shape]``; zeros if no client was finite.

        ``like`` gives the shapes to a process that trained no client.
        """
        sums = self._sums or Sums(like, self.narrow)
        self._sums = None
        return sums.mean()
