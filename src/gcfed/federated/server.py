"""The server's program: :func:`~gcfed.federated.round.run_round` calls its methods in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.data.faults import Faults
from gcfed.federated.aggregate import Aggregator, narrow_of
from gcfed.federated.messages import (
    Download,
    Expected,
    Upload,
    finite_clients,
    refuse_misfit,
    sendable,
)
from gcfed.federated.method import Order, ServerPart, upload_shapes
from gcfed.federated.received import Received, Round
from gcfed.federated.setup import Setup
from gcfed.federated.training.forward import Params
from gcfed.utils.device import on_device


@dataclass
class RoundSums:
    """The sums of this process in a round."""

    expected: Expected  # the tensors that a client sends
    # of Δ ("delta"), and of the floats that clients send in addition to it, by name
    means: Mapping[str, Aggregator]
    parts: Mapping[ServerPart, Params]  # ServerPart.sums
    # which clients were finite, and their losses, [K] on the device
    clients: list[tuple[Tensor, Tensor]]
    host: np.ndarray  # bytes, samples and steps, float64 [3]


@dataclass(frozen=True)
class Server:
    """Holds the global model and the methods' server parts. It knows no algorithm by name."""

    setup: Setup
    faults: Faults
    seed: int

    @cached_property
    def parts(self) -> list[ServerPart]:
        return [part for part in self.setup.parts if isinstance(part, ServerPart)]

    def steps(self, clients: np.ndarray, index: int) -> np.ndarray:
        """How many local steps these clients do in a round, ``[K]``."""
        return self.faults.steps(self.setup.transport.planned(clients), clients, index, self.seed)

    def draw(self, t: int) -> Round:
        """Draws the cohort of a round, without the clients that drop out by ``faults``."""
        module, num_clients = self.setup.module, self.setup.data.num_clients
        drawn = self.setup.sampler(t, num_clients, self.seed)
        cohort = self.faults.survivors(drawn, self.steps(drawn, t), t, self.seed, self.setup.cohort)
        model = module.broadcast_state()
        return Round(
            t,
            self.seed,
            cohort,
            num_clients,
            dict(model),
            self.setup.solver.lr(t),
            model=model,
            server=module.trainer.optimizers[0],
            drawn=len(drawn),
            cohort=cohort,
        )

    def broadcast(self, round: Round) -> Download:
        """Makes the message that goes to every client."""
        download = Download(round.index, round.seed, round.lr, round.start, round.cohort)
        for part in self.parts:
            part.on_broadcast(download, round)
        return download

    def begin(self, round: Round) -> RoundSums:
        """Makes the round's empty sums.

        The parts have seen the broadcast and know what clients will send.
        """
        shapes, aggregator = upload_shapes(self.parts, round), self.setup.aggregator
        notes = {name: like for part in self.parts for name, like in part.notes(round).items()}
        floats = [
            name
            for name, like in shapes.items()
            if all(t.is_floating_point() for t in like.values())
        ]
        means = {name: aggregator if name == "delta" else aggregator.beside() for name in floats}
        of_parts = {part: part.sums(round) for part in self.parts}
        nobody = [(round.zeros(0).bool(), round.zeros(0))]  # a process may train no client
        return RoundSums(Expected(shapes, notes), means, of_parts, nobody, np.zeros(3))

    def receive(self, upload: Upload, sums: RoundSums, round: Round) -> None:
        """Adds up K uploads. Measurements see them first, before methods edit them.

        Raises:
            MessageError: a client part sends other tensors than its server part lists in
                ``uploads``.
        """
        refuse_misfit(upload, sums.expected.shapes)
        if self.setup.transport.remote:  # the server does not trust what it is sent
            upload.finite = upload.finite & sendable(upload, narrow_of(self.setup.aggregator))
        for part in sorted(self.parts, key=lambda part: part.order is not Order.MEASURES):
            for name, term in (part.on_receive(upload, round) or {}).items():
                total = sums.parts[part][name]
                assert term.shape == total.shape, (
                    f"{part.title}: on_receive() and sums() disagree about {name}"
                )
                total.add_(term)
        for name, mean in sums.means.items():
            mean.add(
                upload if name == "delta" else replace(upload, delta=upload.extra[name]), round
            )
        sums.clients.append((upload.finite, upload.loss))
        sums.host += (
            len(upload.clients) * upload.bytes_per_client,
            upload.num_seen.sum(),
            upload.num_steps.sum(),
        )

    def reduce(self, sums: RoundSums, round: Round) -> Received:
        """Adds up the sums of all processes.

        The first message also has the counts and the parts' sums.
        """
        finite_K, loss_K = map(torch.cat, zip(*sums.clients, strict=True))
        both_K = finite_K & loss_K.isfinite()
        counts = torch.stack([both_K, loss_K.where(both_K, 0.0), finite_K]).sum(1)
        own, totals = [torch.cat([counts, on_device(sums.host, counts.device)])], list[Tensor]()
        own += [t for part in sums.parts.values() for t in part.values()]

        def together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            if totals:
                return round.reduce(tensors)
            added = round.reduce([*tensors, *own])
            totals.extend(added[len(tensors) :])
            return added[: len(tensors)]

        sent = replace(round, reduce=together)
        means = {
            name: mean.reduce(sent, sums.expected.shapes[name]) for name, mean in sums.means.items()
        }
        counts, *rest = totals or round.reduce(own)
        results = [{name: t.unsqueeze(0) for name, t in mean.items()} for mean in means.values()]
        overflowed = ~torch.cat([finite_clients(result) for result in results]).all(0, keepdim=True)
        terms = iter(rest)
        of_parts = {
            part: {name: next(terms) for name in part_sums}
            for part, part_sums in sums.parts.items()
        }
        # the round waits for the device, once
        losses, loss, *numbers = torch.cat([counts, overflowed]).tolist()
        finite, up_bytes, samples, steps, overflows = map(int, numbers)
        received = Received(
            **vars(round) | {"cohort": np.setdiff1d(round.cohort, self.setup.transport.missing)},
            update=means.pop("delta"),
            received=means,
            sums=of_parts,
            num_finite=finite,
            up_bytes=up_bytes,
            loss=loss / losses if losses else float("nan"),
            samples=samples,
            steps=steps,
            overflowed=overflows > 0,
            usable=(finite > 0 or any("steps without clients" in part.facts for part in self.parts))
            and not overflows,
        )
        # every process has written its clients' states
        self.setup.stores.finish_round(received.cohort, round.index)
        return received

    def finish(self, received: Received) -> None:
        """Lets the parts edit the aggregated update; first those that give it the model's
        coordinates.
        """
        for part in sorted(self.parts, key=lambda part: type(part).decode is ServerPart.decode):
            part.on_aggregate_end(received.update, received)

    def step(self, received: Received) -> bool:
        """Makes the server's step with the update, if any.

        Returns False if it undid a step that was not finite.
        """
        return self.setup.module.step(received.update if received.usable else None, received.model)

    def row(self, received: Received) -> dict[str, Any]:
        """Columns about clients that dropped out or did fewer steps, in runs where
        this can happen.
        """
        faulty, transport = self.faults != Faults(), self.setup.transport
        row = (
            {"train/dropped_clients": received.drawn - len(received.cohort)}
            if faulty or transport.remote
            else {}
        )
        if faulty:
            fewer = self.steps(received.cohort, received.index) < transport.planned(received.cohort)
            row["train/stragglers"] = int(fewer.sum())
        return row
