"""The server's program: one method for each line of ``run_round``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.data.faults import Faults
from gcfed.data.sampling import ClientSampler
from gcfed.federated.aggregate import Aggregator, narrow_of
from gcfed.federated.messages import Download, Expected, Upload, finite_clients, refuse_misfit, sendable
from gcfed.federated.method import Order, ServerPart, upload_shapes
from gcfed.federated.module import FederatedModule
from gcfed.federated.received import Counts, Received, Round
from gcfed.federated.stacks import Stacks
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.forward import Params
from gcfed.federated.training.solver import LocalSolver
from gcfed.utils.device import on_device


@dataclass(frozen=True)
class Server:
    """Holds the global model and the methods' server parts. It knows no algorithm by name."""

    module: FederatedModule
    parts: Sequence[ServerPart]
    aggregator: Aggregator
    sampler: ClientSampler
    solver: LocalSolver
    faults: Faults
    stores: ClientStores
    transport: Stacks
    num_clients: int
    seed: int

    def steps(self, clients: np.ndarray, index: int) -> np.ndarray:
        """How many local steps these clients do in a round, ``[K]``."""
        return self.faults.steps(self.transport.planned(clients), clients, index, self.seed)

    def draw(self, t: int) -> Round:
        """Draws the cohort of a round, without the clients that drop out by ``faults``."""
        drawn = self.sampler(t, self.num_clients, self.seed)
        cohort = self.faults.survivors(drawn, self.steps(drawn, t), t, self.seed)
        model = self.module.broadcast_state()
        return Round(
            t, self.seed, cohort, self.num_clients, dict(model), self.solver.lr(t), model=model,
            server=self.module.trainer.optimizers[0], drawn=len(drawn),
        )  # fmt: skip

    def broadcast(self, round: Round) -> Download:
        """Makes the message that goes to every client."""
        download = Download(round.index, round.seed, round.lr, round.start, round.cohort)
        for part in self.parts:
            part.on_broadcast(download, round)
        return download

    def begin(self, round: Round) -> RoundSums:
        """Makes the round's empty sums. The parts have seen the broadcast and know what clients will send."""
        shapes = upload_shapes(self.parts, round)
        notes = {name: like for part in self.parts for name, like in part.notes(round).items()}
        floats = [name for name, like in shapes.items() if all(t.is_floating_point() for t in like.values())]
        extra = {name: self.aggregator.beside() for name in floats if name != "delta"}
        sums = {part: part.sums(round) for part in self.parts}
        counts = torch.zeros(3, dtype=torch.float64, device=self.module.device)
        return RoundSums(Expected(shapes, notes), self.aggregator, extra, sums, counts, np.zeros(3))

    def receive(self, upload: Upload, sums: RoundSums, round: Round) -> None:
        """Receives K uploads. Measurements see them first, before methods edit them.

        Raises:
            MessageError: a client part sends other tensors than its server part lists in ``uploads``.
        """
        refuse_misfit(upload, sums.expected.shapes)
        if self.transport.remote:  # the server does not trust what it is sent
            upload.finite = upload.finite & sendable(upload, narrow_of(self.aggregator))
        for part in sorted(self.parts, key=lambda part: part.order is not Order.MEASURES):
            for name, term in (part.on_receive(upload, round) or {}).items():
                total = sums.parts[part][name]
                assert term.shape == total.shape, f"{part.title}: on_receive() and sums() disagree about {name}"
                total.add_(term)
        sums.add(upload, round)

    def reduce(self, sums: RoundSums, round: Round) -> Received:
        """Adds up the sums of all processes."""
        received = sums.reduce(round, np.setdiff1d(round.cohort, self.transport.missing))
        self.stores.finish_round(received.cohort, round.index)  # every process has now written its clients' states
        return received

    def finish(self, received: Received) -> None:
        """Lets the parts edit the aggregated update; first those that give it the model's coordinates."""
        for part in sorted(self.parts, key=lambda part: type(part).decode is ServerPart.decode):
            part.on_aggregate_end(received.update, received)

    def step(self, received: Received) -> bool:
        """Makes the server optimizer's step with the update, if there is one. Returns False if it undid a step that was
        not finite.
        """
        return self.module.step(received.update if received.usable else None, received.model)

    def wait(self) -> None:
        """Waits for all processes."""
        self.module.trainer.strategy.barrier()

    def row(self, received: Received) -> dict[str, Any]:
        """Columns about clients that dropped out or did fewer steps, in runs where this can happen."""
        faulty = self.faults != Faults()
        row = {}
        if faulty or self.transport.remote:
            row["train/dropped_clients"] = received.drawn - len(received.cohort)
        if faulty:
            fewer = self.steps(received.cohort, received.index) < self.transport.planned(received.cohort)
            row["train/stragglers"] = int(fewer.sum())
        return row


@dataclass
class RoundSums:
    """The sums of this process in a round.

    Attributes:
        expected: the tensors that a client sends.
        delta: the sum of Δ.
        extra: the sums of what clients send in addition to Δ, by name.
        parts: the sums of each server part (``ServerPart.sums``).
        counts: the number of finite losses, their sum, and finite clients: float64 ``[3]`` on the device, so that
            nothing waits for it.
        host: bytes, samples and steps, float64 ``[3]``.
    """

    expected: Expected
    delta: Aggregator
    extra: Mapping[str, Aggregator]
    parts: Mapping[ServerPart, Params]
    counts: Tensor
    host: np.ndarray

    def add(self, upload: Upload, round: Round) -> None:
        """Adds the uploads of K clients."""
        for name, aggregator in self.extra.items():
            aggregator.add(replace(upload, delta=upload.extra[name]), round)
        self.delta.add(upload, round)
        assert upload.loss is not None
        assert upload.num_seen is not None
        both = upload.finite & upload.loss.isfinite()
        self.counts[:3] += torch.stack([both, upload.loss.where(both, 0.0).double(), upload.finite]).sum(1)
        self.host += len(upload.clients) * upload.bytes_per_client, upload.num_seen.sum(), upload.num_steps.sum()

    def reduce(self, round: Round, answered: np.ndarray) -> Received:
        """The round with the sums of all processes; ``answered`` has the ids of the clients that sent an upload."""
        shapes, totals = self.expected.shapes, list[Tensor]()
        own = [torch.cat([self.counts, on_device(self.host, self.counts.device)])]
        own += [t for sums in self.parts.values() for t in sums.values()]

        def together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            """Sums tensors over all processes. The first message also carries this round's own numbers."""
            if totals:
                return round.reduce(tensors)
            added = round.reduce([*tensors, *own])
            totals.extend(added[len(tensors) :])
            return added[: len(tensors)]

        update = self.delta.reduce(sent := replace(round, reduce=together), shapes["delta"])
        extra = {name: aggregator.reduce(sent, shapes[name]) for name, aggregator in self.extra.items()}
        counts, *rest = totals or round.reduce(own)
        results = [{name: t.unsqueeze(0) for name, t in part.items()} for part in (update, *extra.values())]
        overflown = ~torch.cat([finite_clients(part) for part in results]).all(0, keepdim=True)
        terms = iter(rest)
        sums = {part: {name: next(terms) for name in sums} for part, sums in self.parts.items()}
        losses, loss, *numbers = torch.cat([counts, overflown]).tolist()  # the round waits for the device, once
        mean = loss / losses if losses else float("nan")
        finite, up_bytes, samples, steps, overflows = map(int, numbers)
        return Received(
            **vars(round), answered=answered, update=update, received=extra, sums=sums,
            counts=Counts(mean, finite, up_bytes, samples, steps, overflows > 0),
            always=any("steps without clients" in part.facts for part in self.parts),
        )  # fmt: skip
