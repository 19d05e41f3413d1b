"""What the server knows of a round: at its beginning (Round), and after its uploads (Received)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gcfed.federated.parallel.sums import sum_over_processes
from gcfed.federated.protocol.messages import Download, Params
from gcfed.utils.device import device_of


@dataclass(frozen=True, eq=False)
class Round:
    """What the server knows about a round at its beginning, on every process.

    Attributes:
        index: number of rounds finished before this one; the first has index 0.
        seed: the run's seed; every draw derives from it.
        cohort: ids of the clients whose uploads this round uses, ``[K]``, sorted. A round's tables
            have a row for each.
        num_clients: N, the size of the population.
        broadcast_model: the model of this round's download, name → ``[*shape]``. It differs from
            ``server_model`` where a method's ``on_broadcast`` has replaced tensors. In
            ``on_broadcast`` it is still the server's.
        lr: η_l, the clients' learning rate in this round.
        server_model: the server's own model before its step, name → ``[*shape]``.
        optimizer: the server's optimizer, whose momentum a method may read; None in a loop without
            one.
        versions: index of the round whose download each client of the cohort has, ``[K]``. It is
            ``index``, or less for a late client.
        download: the message to the clients; None in ``on_broadcast``. In ``on_receive`` it is
            the message that these clients trained from. It is older than the round if they are
            late.
    """

    index: int
    seed: int
    cohort: np.ndarray
    num_clients: int
    broadcast_model: Params
    lr: float
    server_model: Params = field(default_factory=dict)
    optimizer: Optimizer | None = None
    download: Download | None = None
    versions: np.ndarray = field(kw_only=True)

    def reduce(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sums of these tensors over all processes.

        Every process must call it, so do not call it in ``on_receive``.
        """
        return sum_over_processes(tensors)

    def with_download(self, download: Download) -> Round:
        """The round after the broadcast."""
        return replace(self, download=download, broadcast_model=download.broadcast_model)

    def rows(self, clients: np.ndarray) -> np.ndarray:
        """The rows of these clients, ``[K]``, in a table of the cohort."""
        return np.searchsorted(self.cohort, clients)

    def by_version(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (version, clients ``[K]``): the cohort, grouped by the version of the model that
        the clients have, the oldest first.

        The last group is that of this round. It may be empty.
        """
        for version in sorted({self.index, *self.versions.tolist()}):
            yield version, self.cohort[self.versions == version]

    def zeros(self, *shape: int) -> Tensor:
        """Float64 zeros on the device of the model, for sums over the round."""
        return torch.zeros(shape, dtype=torch.float64, device=device_of(self.broadcast_model))


@dataclass(frozen=True, eq=False)
class Received(Round):
    """A round after its uploads, on every process. All numbers are over all processes.

    Attributes:
        answered: ids of the clients of the cohort that answered, sorted.
        update: the aggregated Δ, name → ``[*shape]``; ``on_aggregate_end`` may edit it.
        extra_means: what clients sent in addition to Δ, by the name given to ``Upload.send``: the
            mean over the finite clients, or another aggregator's result, name → ``[*shape]``.
        sums: the sums of each server part (``ServerPart.sums``).
        reply: the server's message to the cohort after the round, by name; ``on_aggregate_end``
            fills it.
        num_finite: number of clients that count: those that sent finite numbers only.
        loss: mean of the finite training losses, over the clients that count.
        losses: the loss of each client that counts, by its id; empty unless the cohorts depend on
            losses.
        samples, steps: of all uploads, also of those that do not count.
        overflowed: whether the aggregate of finite uploads is not finite.
        usable: whether the server steps along the update. The update must be finite and come from
            at least one client. A part with ``Fact.STEPS_WITHOUT_CLIENTS`` needs no client.
    """

    answered: np.ndarray = field(kw_only=True)
    update: Params = field(default_factory=dict)
    extra_means: dict[str, Params] = field(default_factory=dict)
    sums: Mapping[Any, Params] = field(default_factory=dict)
    reply: dict[str, Params] = field(default_factory=dict)
    num_finite: int = 0
    loss: float = float("nan")
    losses: Mapping[int, float] = field(default_factory=dict)
    samples: int = 0
    steps: int = 0
    overflowed: bool = False
    usable: bool = False
