"""The server's program: what each line of ``run_round`` asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.data.sampling import ClientSampler
from gcfed.federated.aggregate import Aggregator, narrow_of
from gcfed.federated.faults import Faults
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, MessageError, Upload, finite_clients, refuse_other, sendable
from gcfed.federated.method import Order, ServerPart, upload_shapes
from gcfed.federated.module import FederatedModule
from gcfed.federated.received import Counts, Received, Round
from gcfed.federated.solver import LocalSolver
from gcfed.federated.store import ClientStores
from gcfed.federated.transport import Expected, Transport
from gcfed.utils.device import on_device


@dataclass(frozen=True)
class Server:
    """Knows the global model, the methods' server parts and what clients send; no algorithm by name."""

    module: FederatedModule
    parts: Sequence[ServerPart]
    aggregator: Aggregator
    sampler: ClientSampler
    solver: LocalSolver
    faults: Faults
    stores: ClientStores
    transport: Transport
    num_clients: int
    seed: int

    def steps(self, clients: np.ndarray, index: int) -> np.ndarray:
        """Local steps that these clients do in a round, ``[K]``."""
        return self.faults.steps(self.transport.planned(clients), clients, index, self.seed)

    def draw(self, t: int) -> Round:
        """The cohort of a round: the clients that were drawn, without those that will not come back."""
        drawn = self.sampler(t, self.num_clients, self.seed)
        cohort = self.faults.survivors(drawn, self.steps(drawn, t), t, self.seed)
        model = self.module.broadcast_state()
        return Round(
            t, self.seed, cohort, self.num_clients, dict(model), self.solver.lr(t), model=model,
            server=self.module.trainer.optimizers[0], drawn=len(drawn),
        )  # fmt: skip

    def broadcast(self, round: Round) -> Download:
        """What goes to every client."""
        download = Download(round.index, round.seed, round.lr, round.start, round.cohort)
        for part in self.parts:
            part.on_broadcast(download, round)
        return download

    def begin(self, round: Round) -> RoundSums:
        """Called once the broadcast is complete: parts know by now what clients send."""
        shapes = upload_shapes(self.parts, round)
        notes = {name: like for part in self.parts for name, like in part.notes(round).items()}
        floats = {n for n, like in shapes.items() if all(t.is_floating_point() for t in like.values())}
        beside = {name: self.aggregator.beside() for name in shapes if name in floats and name != "delta"}
        sums = {part: part.sums(round) for part in self.parts}
        return RoundSums(Expected(shapes, notes), self.aggregator, beside, Tally(self.module.device), sums)

    def receive(self, upload: Upload, sums: RoundSums, round: Round) -> None:
        """Takes in K uploads. Measurements see them first, as they came.

        Raises:
            ValueError: a client part sends other tensors than its server part reads; names method and key.
        """
        self._refuse_misfit(upload, sums.expected.shapes, round)
        if self.transport.remote:  # a site decides for itself what is finite, and need not say the truth
            upload.finite = upload.finite & sendable(upload, narrow_of(self.aggregator))
        for part in sorted(self.parts, key=lambda part: part.order is not Order.MEASURES):
            sums.take(part, part.on_receive(upload, round) or {})
        sums.add(upload, round)

    def _refuse_misfit(self, upload: Upload, shapes: Mapping[str, Params], round: Round) -> None:
        for name in {**shapes, **upload.extra}:
            sent = upload.delta if name == "delta" else upload.extra.get(name, {})
            try:
                refuse_other(f"an upload's {name}", sent, shapes.get(name, {}), len(upload.clients))
            except MessageError as error:
                lists = [part for part in self.parts if name in part.uploads(round)] or self.parts
                who = " or ".join(dict.fromkeys(part.title for part in lists))
                raise ValueError(f"{who}: send does not send what uploads() lists: {error}") from None

    def reduce(self, sums: RoundSums, round: Round) -> Received:
        """The sums of all processes."""
        came = np.setdiff1d(round.cohort, self.transport.missing)
        update, beside, counts, parts = sums.reduce(round)
        self.stores.finish_round(came, round.index)  # only now has every process written what its clients keep
        known = {name: value for name, value in vars(round).items() if name != "cohort"}
        return Received(
            **known, cohort=came, asked=round.cohort, update=update, received=beside, counts=counts, sums=parts
        )

    def finish(self, received: Received) -> None:
        for part in self.parts:
            part.on_aggregate_end(received.update, received)

    def step(self, received: Received) -> bool:
        """The server's optimizer takes the update, if there is one; False: its step was not finite and is undone."""
        return self.module.step(received.update if received.usable else None, received.model)

    def wait(self) -> None:
        """For all processes."""
        self.module.trainer.strategy.barrier()

    def row(self, received: Received) -> dict[str, Any]:
        """What goes into the row of metrics where clients may be absent or slow."""
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
    """What a round adds up: Δ, what clients send beside it, by name, counts, and what the parts add up."""

    expected: Expected
    delta: Aggregator
    beside: Mapping[str, Aggregator]
    tally: Tally
    parts: Mapping[ServerPart, Params]

    def take(self, part: ServerPart, terms: Params) -> None:
        """Adds terms to a part's own sums."""
        for name, term in terms.items():
            total = self.parts[part][name]
            if term.shape != total.shape:
                shapes = f"{(*term.shape,)}, and sums() has it as {(*total.shape,)}"
                raise ValueError(f"{part.title}: on_receive adds {name} as {shapes}.")
            total.add_(term)

    def add(self, upload: Upload, round: Round) -> None:
        for name, aggregator in self.beside.items():
            aggregator.add(replace(upload, delta=upload.extra[name]), round)
        self.delta.add(upload, round)
        self.tally.add(upload)

    def reduce(self, round: Round) -> tuple[Params, dict[str, Params], Counts, Mapping[ServerPart, Params]]:
        """Over all processes: the update, the means of what went beside it, the counts, and the sums of the parts."""
        shapes, own = self.expected.shapes, [t for sums in self.parts.values() for t in sums.values()]
        update = self.delta.reduce(round, shapes["delta"])
        beside = {name: aggregator.reduce(round, shapes[name]) for name, aggregator in self.beside.items()}
        results = [{name: t.unsqueeze(0) for name, t in part.items()} for part in (update, *beside.values())]
        finite = torch.cat([finite_clients(part) for part in results]).all(0, keepdim=True)
        tally, *totals = round.reduce([self.tally.numbers(~finite), *own])
        rest = iter(totals)
        sums = {part: {name: next(rest) for name in sums} for part, sums in self.parts.items()}
        return update, beside, counts_of(tally), sums


class Tally:
    """Counts the uploads that this process takes; on the device, for which nothing waits before :func:`counts_of`."""

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

    def numbers(self, overflown: Tensor) -> Tensor:
        """All of them, ``[7]``, which add up over processes; ``overflown`` is a bool ``[1]``."""
        return torch.cat([self._sums, on_device(self._counts, self._sums.device, self._sums.dtype), overflown])


def counts_of(tally: Tensor) -> Counts:
    """The counts of all processes, from the sum of :meth:`Tally.numbers`; the round's one wait for the device."""
    loss, losses, finite, up_bytes, samples, steps, overflows = tally.tolist()
    loss = loss / losses if losses else float("nan")
    return Counts(int(finite), loss, int(up_bytes), int(samples), int(steps), overflows > 0)
