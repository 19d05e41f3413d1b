"""One communication round, from top to bottom."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.optim import Optimizer

from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, nbytes
from gcfed.federated.sums import Reduce, sum_over_processes

if TYPE_CHECKING:
    from gcfed.federated.server import Server


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
        reply: what the server tells the cohort once the round is over, by name; ``on_aggregate_end`` fills it.
    """

    asked: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    update: Params = field(default_factory=dict)
    received: dict[str, Params] = field(default_factory=dict)
    counts: Counts = field(default_factory=lambda: Counts())
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


@dataclass(frozen=True)
class Counts:
    """What a round's uploads count, over all processes.

    Attributes:
        finite: clients whose numbers are finite; only these count.
        loss: mean of the local training's losses that are finite, over these clients.
        overflown: whether the aggregate of finite uploads is not finite.
    """

    finite: int = 0
    loss: float = float("nan")
    up_bytes: int = 0
    samples: int = 0
    steps: int = 0
    overflown: bool = False


def run_round(t: int, server: Server) -> tuple[dict[str, Any], Received]:
    """Draws a cohort, sends the model, takes the uploads, steps and replies.

    Returns:
        The row of metrics, and what was received. Clients learn nothing that is not in a message.
    """
    started, transport = time.perf_counter(), server.transport
    round = server.draw(t)
    download = server.broadcast(round)
    sums = server.begin(round)
    for upload in transport.fit(download, round.cohort):  # K clients at a time, in any order
        server.receive(upload, sums, round)
        del upload  # nothing holds it while the next clients train
    received = server.reduce(sums, round)
    if received.usable:
        server.finish(received)
    refused = not server.step(received)  # in every round, for Lightning counts them by it
    if received.reply:
        transport.reply(received.reply, download)
        server.wait()  # no process may read a client's state before another has written it
    return row_of(received, download, server, refused, started), received


def row_of(round: Received, download: Download, server: Server, refused: bool, started: float) -> dict[str, Any]:
    """The round's row of metrics, as far as it is known before the test."""
    counts, came = round.counts, len(round.cohort)
    sent = round.drawn - server.transport.unasked
    return {
        "round": round.index + 1,
        **({"train/loss": counts.loss} if came else {}),
        "train/clients": came,
        "train/nonfinite_clients": came - counts.finite,
        "train/refused_steps": int(counts.overflown) + int(refused),
        "train/samples": counts.samples,
        "train/steps": counts.steps,
        "comm/down_bytes": sent * download.nbytes + came * sum(map(nbytes, round.reply.values())),
        "comm/up_bytes": counts.up_bytes,
        "time/train_s": time.perf_counter() - started,
        **server.row(round),
    }


def places(cohort: np.ndarray, clients: np.ndarray) -> list[int]:
    """Where these clients, ``[K]``, stand in a cohort."""
    place = {client: i for i, client in enumerate(cohort.tolist())}
    return [place[client] for client in clients.tolist()]
