"""Streaming aggregation of client updates: memory does not grow with the cohort."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gcfed.federated.exact import ExactSum, reduce_sums
from gcfed.federated.round import Round
from gcfed.federated.stack import Params, nbytes
from gcfed.utils.device import on_device
from gcfed.utils.number import choice, flag


@dataclass
class Upload:
    """What K clients send up; hooks ``on_upload`` may rewrite ``delta`` (quantize, project, …) and
    ``bytes_per_client``, and :meth:`send` more.

    Attributes:
        clients: ids, ``[K]``.
        num_samples: size of their data sets, ``[K]``.
        delta: updates ``w_k − w`` relative to the broadcast w, name → ``[K, *shape]``.
        num_steps: number of their local steps, ``[K]``.
        finite: which clients sent finite numbers only, bool ``[K]`` on the device.
        bytes_per_client: what each of them really sends.
        extra: what they send beside Δ, by name; see :meth:`send`.
    """

    clients: np.ndarray
    num_samples: np.ndarray
    num_steps: np.ndarray
    delta: Params
    finite: Tensor
    bytes_per_client: int
    extra: dict[str, Params] = field(default_factory=dict)

    def send(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Sends more than Δ: ``tensors``, name → ``[K, *shape]``, whose mean becomes ``round.received[name]``, or
        what the run's aggregator makes of them.

        The method's ``uploads`` must list ``name``. A client whose numbers are not all finite counts for nothing.
        """
        self.extra[name] = dict(tensors)
        self.bytes_per_client += nbytes(tensors) // len(self.clients)


class Aggregator(Protocol):
    """Turns the uploads of one round into one update; ``add`` streams, ``reduce`` ends the round on every process.
    What lasts longer than a round is a method's (``server_state``).

    ``beside`` makes one for what clients send beside Δ; ``validate`` refuses a cohort that is too small.
    """

    def validate(self, cohort: int) -> None: ...

    def beside(self) -> "Aggregator": ...

    def add(self, upload: Upload, round: Round) -> None: ...

    def reduce(self, round: Round, like: Params) -> Params: ...


class MeanAggregator:
    """Weighted mean of the finite updates: ``Δ = Σ_k p_k Δ_k / Σ_k p_k`` (McMahan et al. 2017, Algorithm 1).

    In float32 it does not depend on which process trained whom, nor on the order (:mod:`gcfed.federated.exact`), unless
    ``exact`` is false: then terms are added in float64 as they come.

    Args:
        weighting: ``"uniform"`` is p_k = 1, GC-Fed's Algorithm 1, line 19; ``"samples"`` is p_k = n_k, FedAvg's own.
        exact: whether the sum knows no order; 1.5 ms of a round of 40 on the digits (docs/performance.md).

    Raises:
        ValueError: unknown weighting.
    """

    def __init__(self, weighting: str = "uniform", exact: bool = True) -> None:
        self.weighting = choice("aggregator.weighting", weighting, ("uniform", "samples"))
        self.exact = flag("aggregator.exact", exact)
        self._sums: dict[str, ExactSum] = {}
        self._weight: Tensor | None = None

    def validate(self, cohort: int) -> None: ...

    def beside(self) -> "MeanAggregator":
        """The plain mean, whatever the weights of the updates."""
        return MeanAggregator(exact=self.exact)

    def add(self, upload: Upload, round: Round) -> None:
        """Takes in the updates of K clients; one with a number that is not finite counts for nothing."""
        weight = upload.finite.to(torch.float32)
        if self.weighting == "samples":
            weight = weight * on_device(upload.num_samples, weight.device)
        self.add_weighted(upload.delta, weight)

    def add_weighted(self, values: Params, weight: Tensor) -> None:
        """Takes in tensors ``[K, *shape]`` with weights ``[K]``."""
        weight = weight.double()
        self._weight = weight.sum() if self._weight is None else self._weight + weight.sum()
        for name, value in values.items():
            if name not in self._sums:
                self._sums[name] = ExactSum(value[0], exact=self.exact)
            self._sums[name].add(value, weight)

    def reduce(self, round: Round, like: Params | None = None) -> Params:
        """The mean over the cohort, name → ``[*shape]`` of ``like``, by default the model's; zeros where no client was
        finite. A process that trained no client of this cohort knows the shapes from ``like`` alone.
        """
        like = like or round.start
        sums = {name: self._sums.get(name) or ExactSum(t, exact=self.exact) for name, t in like.items()}
        device = next(iter(like.values())).device
        weight = self._weight if self._weight is not None else torch.zeros((), dtype=torch.float64, device=device)
        (total,) = reduce_sums(list(sums.values()), round, weight)
        self._sums, self._weight = {}, None
        total = torch.where(total > 0, total, 1.0)
        return {name: s.over(total) for name, s in sums.items()}


def finite_clients(delta: Params) -> Tensor:
    """bool ``[K]``, on the device and without a synchronisation.

    A sum is finite where its terms are; one that overflows has terms that no model survives.
    """
    sums = [t.sum(dim=tuple(range(1, t.dim()))) if t.dim() > 1 else t for t in delta.values()]
    return torch.stack([s.to(torch.float64) for s in sums]).isfinite().all(0)
