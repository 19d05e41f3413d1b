"""Streaming aggregation of client updates: memory does not grow with the cohort."""

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
    """Turns the uploads of one round into one update; ``add`` streams, ``reduce`` ends the round on every process.
    What lasts longer than a round is a method's (``server_state``).

    ``beside`` makes one for what clients send beside Δ; ``validate`` meets the run's ``Setup`` before the first
    round, and refuses a cohort that is too small.

    ``narrow`` is what its sums take: updates below 2¹¹ of the parameters of these names, all else below 2⁴¹. A client
    that sends more counts as one whose numbers are not finite. None: it takes all finite numbers.
    """

    narrow: Set[str] | None

    def validate(self, setup: Any) -> None: ...
    def beside(self) -> Aggregator: ...
    def add(self, upload: Upload, round: Round) -> None: ...
    def reduce(self, round: Round, like: Params) -> Params: ...


def narrow_of(aggregator: Any) -> Set[str] | None:
    """Its ``narrow``. A rule that says nothing of it may add up by a mean: it gets what a sum takes."""
    return getattr(aggregator, "narrow", frozenset())


@checked
class MeanAggregator:
    """Weighted mean of the finite updates: ``Δ = Σ_k p_k Δ_k / Σ_k p_k`` (McMahan et al. 2017, Algorithm 1).

    It does not depend on which process trained whom, nor on the order: Δ of trained parameters is summed in steps of
    2⁻⁴⁰, all else in steps of 2⁻⁶⁰ (:mod:`gcfed.federated.parallel.sums`). Float64 tensors are summed as they come.

    Args:
        weighting: ``"uniform"`` is p_k = 1, GC-Fed's Algorithm 1, line 19; ``"samples"`` is p_k = n_k, FedAvg's own.
    """

    narrow: Set[str] | None = frozenset()

    def __init__(self, weighting: Literal["uniform", "samples"] = "uniform") -> None:
        self.weighting = weighting
        self._room = 1.0  # the largest weight with which a sum of the cohort fits
        self._unit = 2.0**-24 if weighting == "samples" else 1.0  # of weights, which must be at most 1
        self._sums: Sums | None = None

    def validate(self, setup: Any) -> None:
        self._room = 2.0 ** -max(0, setup.cohort.bit_length() - TERMS)
        if self.weighting == "samples" and setup.transport.own_data:
            return  # nobody knows the largest n_k: sums stay on the wide grid
        sizes = setup.data.sizes(np.arange(setup.data.num_clients)) if self.weighting == "samples" else [0]
        self._unit = self._room * 2.0 ** -int(max(sizes)).bit_length()
        self.narrow = (
            frozenset() if any("long updates" in part.facts for part in setup.parts) else frozenset(setup.names)
        )

    def beside(self) -> MeanAggregator:
        """The plain mean, whatever the weights of the updates."""
        mean = MeanAggregator()
        mean._unit = self._room
        return mean

    def add(self, upload: Upload, round: Round) -> None:
        """Takes in the updates of K clients; one with a number that is not finite counts for nothing."""
        if self._sums is None:
            self._sums = Sums({name: t[0] for name, t in upload.delta.items()}, self.narrow or ())
        weight = upload.finite.double() * self._unit
        if self.weighting == "samples":
            weight = weight * on_device(upload.num_samples, weight.device)
        self._sums.add(upload.delta, weight)

    def reduce(self, round: Round, like: Params | None = None) -> Params:
        """The mean over the cohort, name → ``[*shape]`` of ``like``, by default the model's; zeros where no client was
        finite. A process that trained no client of this cohort knows the shapes from ``like`` alone.
        """
        sums, self._sums = self._sums or Sums(like or round.start, self.narrow or ()), None
        return sums.mean(round.reduce)
