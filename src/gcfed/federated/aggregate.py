"""Streaming aggregation of client updates. Its memory does not grow with the cohort."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal, Protocol

import numpy as np

from gcfed.federated.messages import Upload
from gcfed.federated.parallel.sums import TERMS, Sums
from gcfed.federated.received import Round
from gcfed.federated.training.forward import Params
from gcfed.utils.checked import checked
from gcfed.utils.device import on_device


class Aggregator(Protocol):
    """Turns the uploads of one round into one update.

    State that outlives a round belongs to a method.

    ``validate`` gets the run's ``Setup`` before the first round, and refuses a cohort that is too
    small. ``beside`` makes an aggregator for what clients send in addition to Δ. ``reduce`` ends
    the round on every process.

    Attributes:
        narrow: names of the tensors whose entries must be below 2¹¹, so that the sums can add them;
            all others must be below 2⁴¹. A client with a larger number counts as not finite. None:
            all finite numbers are allowed.
    """

    narrow: Set[str] | None

    def validate(self, setup: Any) -> None: ...
    def beside(self) -> Aggregator: ...
    def add(self, upload: Upload, round: Round) -> None: ...
    def reduce(self, round: Round, like: Params) -> Params: ...


def narrow_of(aggregator: Any) -> Set[str] | None:
    """Its ``narrow``.

    An aggregator without one may use a mean, so it gets only numbers that sums can add.
    """
    return getattr(aggregator, "narrow", frozenset())


@checked
class MeanAggregator:
    """Weighted mean of the finite updates: ``Δ = Σ_k p_k Δ_k / Σ_k p_k`` (McMahan et al. 2017,
    Algorithm 1).

    The result does not depend on the order of the updates, nor on the processes that trained the
    clients: Δ of trained parameters is summed in steps of 2⁻⁴⁰, all else of 2⁻⁶⁰, float64 as it is
    (:mod:`~gcfed.federated.parallel.sums`).

    Args:
        weighting: ``"uniform"``: p_k = 1 (GC-Fed, Algorithm 1, line 19). ``"samples"``: p_k = n_k
            (FedAvg).
    """

    narrow: Set[str] | None = frozenset()

    def __init__(self, weighting: Literal["uniform", "samples"] = "uniform") -> None:
        self.weighting = weighting
        self._room = 1.0  # the largest weight for which the cohort's sum fits
        # the unit of weights, which must be at most 1
        self._unit = 2.0**-24 if weighting == "samples" else 1.0
        self._sums: Sums | None = None

    def validate(self, setup: Any) -> None:
        self._room = 2.0 ** -max(0, setup.cohort.bit_length() - TERMS)
        if self.weighting == "samples" and setup.transport.own_data:
            return  # the largest n_k is not known yet, so sums stay on the wide grid
        sizes = (
            setup.data.sizes(np.arange(setup.data.num_clients))
            if self.weighting == "samples"
            else [0]
        )
        self._unit = self._room * 2.0 ** -int(max(sizes)).bit_length()
        long = any("long updates" in part.facts for part in setup.parts)
        self.narrow = frozenset() if long else frozenset(setup.names)

    def beside(self) -> MeanAggregator:
        """The plain mean, for every ``weighting``."""
        mean = MeanAggregator()
        mean._unit = self._room
        return mean

    def add(self, upload: Upload, round: Round) -> None:
        """Adds the updates of K clients, without those that are not finite."""
        if self._sums is None:
            self._sums = Sums({name: t[0] for name, t in upload.delta.items()}, self.narrow or ())
        weight = upload.finite.double() * self._unit
        if self.weighting == "samples":
            weight = weight * on_device(upload.num_samples, weight.device)
        self._sums.add(upload.delta, weight)

    def reduce(self, round: Round, like: Params) -> Params:
        """The mean over the cohort, name → ``[*shape]``; zeros if no client was finite.

        ``like`` gives the shapes to a process that trained no client.
        """
        sums, self._sums = self._sums or Sums(like, self.narrow or ()), None
        return sums.mean(round.reduce)
