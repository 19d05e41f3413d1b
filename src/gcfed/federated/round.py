"""One communication round: how messages travel, what the server knows of it, and what it counts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.solver import LocalSolver
from gcfed.federated.sums import Reduce, sum_over_processes
from gcfed.utils.device import on_device


class Transport(Protocol):
    """The seam between the server's program and the clients', which cannot tell one transport from another."""

    remote: bool = False
    """Whether clients are on machines of their own: they vanish, know only themselves, and what the server's parts
    keep of them lies there."""
    apart: bool = False
    """Whether clients are in another process, with which ends what they keep in no store."""
    own_data: bool = False
    """Whether clients have data that the server does not know, so that its partition describes nobody."""
    missing: np.ndarray = np.zeros(0, dtype=np.int64)
    """Clients of the last ``fit`` that have not come back."""
    unasked: int = 0
    """How many of the missing were sent nothing."""

    def start(self) -> None:
        """Called once before the first round; a checkpoint has been loaded."""
        return

    def planned(self, clients: np.ndarray) -> np.ndarray:
        """Local steps that are asked of these clients in a round, ``[K]``."""

    def fit(self, download: Download, clients: np.ndarray) -> Iterator[Upload]:
        """Local training of these clients: their uploads, K at a time, those that this process trains."""

    def rehearse(
        self, download: Download, clients: np.ndarray, solver: LocalSolver | None = None, here: bool = False
    ) -> Iterator[Upload]:
        """What these clients would send, each for itself; they keep nothing of it, and nothing is measured.

        They train by ``solver`` in place of the run's; ``here``: all of them on this process, which asks alone.
        """

    def reply(self, reply: Mapping[str, Params], download: Download) -> None:
        """Tells the clients of a round something when it is over."""

    def test(self, model: Callable[[], Params]) -> Mapping[str, tuple[float, float]] | None:
        """A test by the clients of the model, a copy of which ``model`` makes: column → mean score and the samples
        behind it, none where nobody has tested; None: the server tests.
        """
        return None


Shapes = Callable[[], tuple[Mapping[str, Params], Mapping[str, Params]]]
"""Tells what a client sends in the present round: ``"delta"`` and the names beside it → tensors like its own; and what
is noted of it.
"""


@dataclass
class Round:
    """What the server knows of a round, on every process.

    Attributes:
        index: number of rounds finished before this one; the first has index 0.
        seed: the run's seed; every draw derives from it.
        cohort: ids of all participating clients, ``[K]``, sorted; from the aggregation on of those that came back.
        num_clients: N, the size of the population.
        start: what the server broadcasts, name → ``[*shape]``; the ``model`` of the download.
        lr: η_l, the clients' learning rate in this round.
        reduce: every process must call it, so never from a hook of an upload.
        server: the server's optimizer, whose momentum a method may send ahead; None in a loop without one.
        lost: clients that were drawn and did not come back: they are not in the cohort.
        reply: what the server tells the cohort once the round is over, by name; ``on_aggregate_end`` fills it.
        num_finite: clients whose updates were finite; known from ``on_aggregate_end`` on.
        received: what clients sent beside Δ, by the name given to ``Upload.send``: the mean over the finite clients, or
            what another aggregator makes of them, name → ``[*shape]``; known from ``on_aggregate_end`` on.
        asked: the cohort as it was when the broadcast went out, in whose order tables of a round have their rows.
    """

    index: int
    seed: int
    cohort: np.ndarray
    num_clients: int
    start: Params
    lr: float
    reduce: Reduce = sum_over_processes
    server: Optimizer | None = None
    lost: int = 0
    reply: dict[str, Params] = field(default_factory=dict)
    num_finite: int = 0
    received: dict[str, Params] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asked = self.cohort

    def lose(self, clients: np.ndarray) -> None:
        """These clients of the cohort have not come back."""
        self.cohort = np.setdiff1d(self.cohort, clients)
        self.lost += len(clients)

    def places(self, clients: np.ndarray) -> list[int]:
        """Where these clients, ``[K]``, stand among those that were asked."""
        return places(self.asked, clients)


def places(cohort: np.ndarray, clients: np.ndarray) -> list[int]:
    """Where these clients, ``[K]``, stand in a cohort."""
    place = {client: i for i, client in enumerate(cohort.tolist())}
    return [place[client] for client in clients.tolist()]


class Totals(NamedTuple):
    """What a round counted, over all processes.

    Attributes:
        loss: sum of the losses of the clients that are finite with theirs; ``losses`` is their number.
        finite: clients whose uploads count.
        overflown: processes whose mean of finite uploads is not finite.
    """

    loss: float
    losses: float
    finite: float
    up_bytes: float
    samples: float
    steps: float
    overflown: float


class Tally:
    """Counts the uploads that this process takes; on the device, for which nothing waits before :meth:`totals`."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._counts = np.zeros(3, dtype=np.int64)

    def add(self, upload: Upload) -> None:
        assert upload.loss is not None
        assert upload.num_seen is not None
        both = upload.finite & upload.loss.isfinite()
        self._sums += torch.stack([upload.loss.where(both, 0.0).double().sum(), both.sum(), upload.finite.sum()])
        up_bytes = len(upload.clients) * upload.bytes_per_client
        self._counts += (up_bytes, int(upload.num_seen.sum()), int(upload.num_steps.sum()))

    def totals(self, overflown: Tensor, reduce: Reduce) -> Totals:
        """Adds up all processes; the round's one wait for the device."""
        counts = on_device(self._counts, self._sums.device, self._sums.dtype)
        (sums,) = reduce([torch.cat([self._sums, counts, overflown])])
        return Totals(*sums.tolist())
