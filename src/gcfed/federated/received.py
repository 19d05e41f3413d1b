"""What the server knows of a round: when it begins, and once its uploads have come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gcfed.federated.parallel.sums import Reduce, sum_over_processes
from gcfed.federated.training.forward import Params


@dataclass(frozen=True, eq=False)
class Round:
    """What the server knows of a round when it begins, on every process.

    Attributes:
        index: number of rounds finished before this one; the first has index 0.
        seed: the run's seed; every draw derives from it.
        cohort: ids of the clients that are asked, ``[K]``, sorted.
        num_clients: N, the size of the population.
        start: what the server broadcasts, name → ``[*shape]``; the ``model`` of the download, where parts may replace
            entries.
        lr: η_l, the clients' learning rate in this round.
        model: the server's own model, name → ``[*shape]``.
        reduce: sums over all processes. Every process must call it, so never from a hook of an upload.
        server: the server's optimizer, whose momentum a method may send ahead; None in a loop without one.
        drawn: how many clients were drawn; ``participation.faults`` keep some of them out of the cohort.
    """

    index: int
    seed: int
    cohort: np.ndarray
    num_clients: int
    start: Params
    lr: float
    model: Params = field(default_factory=dict)
    reduce: Reduce = sum_over_processes
    server: Optimizer | None = None
    drawn: int = 0

    def places(self, clients: np.ndarray) -> list[int]:
        """Where these clients, ``[K]``, stand among those that were asked."""
        return places(self.cohort, clients)

    def zeros(self, *shape: int) -> Tensor:
        """Float64 zeros on the device of the model, for sums over the round."""
        return torch.zeros(shape, dtype=torch.float64, device=next(iter(self.start.values())).device)


@dataclass(frozen=True)
class Counts:
    """What a round's uploads count, over all processes.

    Attributes:
        loss: mean of the local training's losses that are finite, over the clients that count.
        finite: clients that count: all numbers that they sent are finite.
        overflown: whether the aggregate of finite uploads is not finite.
    """

    loss: float = float("nan")
    finite: int = 0
    up_bytes: int = 0
    samples: int = 0
    steps: int = 0
    overflown: bool = False


@dataclass(frozen=True, eq=False)
class Received(Round):
    """A round whose uploads have come: what the server knows of them, on every process.

    Attributes:
        cohort: ids of the clients whose uploads came, sorted.
        asked: ids of the clients that were asked, sorted; tables of a round have their rows in this order.
        update: the aggregated Δ, name → ``[*shape]``; ``on_aggregate_end`` may edit it.
        received: what clients sent beside Δ, by the name given to ``Upload.send``: the mean over the finite clients, or
            what another aggregator makes of them, name → ``[*shape]``.
        counts: what the uploads count.
        sums: of each server part, what it has added up (``ServerPart.sums``), over all processes.
        reply: what the server tells the cohort once the round is over, by name; ``on_aggregate_end`` fills it.
    """

    asked: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    update: Params = field(default_factory=dict)
    received: dict[str, Params] = field(default_factory=dict)
    counts: Counts = Counts()
    sums: Mapping[Any, Params] = field(default_factory=dict)
    reply: dict[str, Params] = field(default_factory=dict)

    def places(self, clients: np.ndarray) -> list[int]:
        return places(self.asked, clients)

    @property
    def num_finite(self) -> int:
        """How many clients sent finite numbers only."""
        return self.counts.finite

    @property
    def usable(self) -> bool:
        """Whether there is an update: of a client at least, and finite."""
        return self.counts.finite > 0 and not self.counts.overflown


def places(cohort: np.ndarray, clients: np.ndarray) -> list[int]:
    """Where these clients, ``[K]``, stand in a cohort."""
    place = {client: i for i, client in enumerate(cohort.tolist())}
    return [place[client] for client in clients.tolist()]
