"""The server's program: :func:`~gcfed.federated.engine.round.run_round` calls its methods."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcfed.data.faults import Faults
from gcfed.data.schedule import Schedule
from gcfed.federated.parts import ClientPart, Order, ServerPart, upload_shapes
from gcfed.federated.parts.part import Aggregator, Setup, limit_of
from gcfed.federated.protocol.checks import finite_clients, refuse_misfit, sendable, too_large
from gcfed.federated.protocol.messages import Download, Expected, Params, Upload, nbytes
from gcfed.federated.protocol.packing import pack, unpack_download
from gcfed.federated.protocol.rounds import Received, Round
from gcfed.federated.state.store import SENT
from gcfed.utils.device import on_device

log = logging.getLogger(__name__)
SCALE = "scale the inputs"
LOWER = "lower client.optimizer.lr or set client.clip_norm"


@dataclass
class RoundSums:
    """The sums of this process in a round.

    Attributes:
        expected: the tensors that a client sends.
        means: of Δ ("delta"), and of the floats that clients send in addition to it, by name.
        parts: the sums of each part (``ServerPart.sums``).
        finite: which clients sent finite numbers only, a bool ``[K]`` on the device per upload.
        losses: the clients' losses, ``[K]`` on the device per upload.
        places: positions of the clients in the round, ``[K]`` per upload.
        up_bytes, samples, steps: of all uploads.
        large_statistics: clients that are left out only because of statistics of their inputs, such
            as a running variance. A GPU does not count them, because it would wait.
    """

    expected: Expected
    means: Mapping[str, Aggregator]
    parts: Mapping[ServerPart, Params]
    finite: list[Tensor]
    losses: list[Tensor]
    places: list[np.ndarray] = field(default_factory=list)
    up_bytes: int = 0
    samples: int = 0
    steps: int = 0
    large_statistics: int = 0

    def count(self, upload: Upload, round: Round) -> None:
        """Adds an upload's losses, bytes, samples and steps."""
        self.places.append(round.places(upload.clients))
        self.finite.append(upload.finite)
        self.losses.append(upload.loss)
        self.up_bytes += len(upload.clients) * upload.bytes_per_client
        self.samples += int(upload.num_seen.sum())
        self.steps += int(upload.num_steps.sum())

    def counts(self) -> Tensor:
        """Number of finite losses, their sum, number of finite clients, bytes, samples, steps,
        clients with large statistics.
        """
        finite_K = torch.cat(self.finite)
        loss_K = torch.cat(self.losses)
        both_K = finite_K & loss_K.isfinite()
        of_clients = torch.stack([both_K, loss_K.where(both_K, 0.0), finite_K]).sum(1)
        of_uploads = np.array(
            [self.up_bytes, self.samples, self.steps, self.large_statistics], dtype=np.float64
        )
        return torch.cat([of_clients, on_device(of_uploads, of_clients.device)])

    def losses_by_place(self, round: Round) -> Tensor:
        """The losses of this process's clients, and whether each counts (1 or 0), float64
        ``[2, cohort]`` in the order of the round.

        Clients of other processes have 0 twice, so that a sum over the processes has all losses. A
        client that has not answered, or whose loss or upload is not finite, does not count.
        """
        loss_K = torch.cat(self.losses)
        counts_K = torch.cat(self.finite) & loss_K.isfinite()
        places_K = np.concatenate([np.zeros(0, np.int64), *self.places])
        table = round.zeros(2, len(round.asked))
        where = on_device(places_K, table.device)
        table[0, where] = loss_K.where(counts_K, 0.0).to(table)
        table[1, where] = counts_K.to(table)
        return table


@dataclass(frozen=True)
class Server:
    """Holds the global model and the methods' server parts. It knows no algorithm by name."""

    setup: Setup
    schedule: Schedule
    seed: int
    advised: set[str] = field(default_factory=set)  # the advice that warnings have given

    @cached_property
    def parts(self) -> list[ServerPart]:
        return [part for part in self.setup.parts if isinstance(part, ServerPart)]

    def draw(self, t: int) -> Round:
        """Takes the schedule's next turn: the clients whose uploads this round uses."""
        setup = self.setup
        model = setup.module.broadcast_state()
        if self.schedule.download_bytes == 0:  # before the first round
            self.schedule.download_bytes = self.schedule.upload_bytes = float(nbytes(model))
        turn = self.schedule.turn(t)
        return Round(
            index=t,
            seed=self.seed,
            asked=turn.clients,
            cohort=turn.clients,
            turn=turn,
            num_clients=setup.data.num_clients,
            start=dict(model),
            model=model,
            lr=setup.solver.lr(t),
            server=setup.module.trainer.optimizers[0],
        )

    def broadcast(self, round: Round) -> Download:
        """Makes the message that goes to every client."""
        download = Download(round.index, round.seed, round.lr, round.start, round.cohort)
        for part in self.parts:
            part.on_broadcast(download, round)
        if self.schedule.late:
            self._keep(download, round)
        self.schedule.download_bytes = float(download.nbytes)
        return download

    def _keep(self, download: Download, round: Round) -> None:
        """Keeps the download for clients that answer it in a later round. Deletes downloads that no
        client has any more.
        """
        held = self.schedule.held
        stores = self.setup.stores
        stores.forget(SENT, held.union(round.turn.versions.tolist()))
        if round.index in held:
            # Bytes, because parts may edit its tensors in place later.
            stores.put(SENT, round.index, pack(vars(download)))

    def fit(
        self, download: Download, round: Round, sums: RoundSums
    ) -> Iterator[tuple[Upload, Round]]:
        """Lets each client train from the download that it has. Yields K uploads, and the round
        with the download that they answer.
        """
        transport = self.setup.transport
        for version, clients in round.turn.groups(round.index):  # one, unless clients are late
            sent = download
            if version != round.index:
                sent = self._kept(version, round)
            answered = replace(round, sent=sent)
            for upload in transport.fit(sent, clients, sums.expected, among=round.cohort):
                yield upload, answered
                del upload  # nothing holds it while the next clients train

    def _kept(self, version: int, round: Round) -> Download:
        """The download of an earlier round."""
        message = self.setup.stores.get(SENT, version)
        download = unpack_download(message).to(self.setup.module.device)
        # Tables with a row per client of the round, and measurements, belong to this round.
        download.cohort = round.cohort
        download.used = round.index
        return download

    def begin(self, round: Round) -> RoundSums:
        """Makes the round's empty sums.

        The parts have seen the broadcast and know what clients will send.
        """
        shapes = upload_shapes(self.parts, round)
        notes: dict[str, Params] = {}
        for part in self.parts:
            notes.update(part.notes(round))
        bits: dict[str, int] = {}
        packed: dict[str, int] = {}
        for own in self.setup.parts:
            if isinstance(own, ClientPart):
                bits.update(own.quantized(shapes["delta"]))
                packed.update(own.packed(shapes["delta"]))
        aggregator = self.setup.aggregator
        means: dict[str, Aggregator] = {}
        for name, like in shapes.items():
            if all(t.is_floating_point() for t in like.values()):
                means[name] = aggregator if name == "delta" else aggregator.beside()
        return RoundSums(
            expected=Expected(shapes, notes, bits, packed),
            means=means,
            parts={part: part.sums(round) for part in self.parts},
            finite=[round.zeros(0).bool()],  # a process may train no client
            losses=[round.zeros(0)],
        )

    def receive(self, upload: Upload, sums: RoundSums, round: Round) -> None:
        """Adds up K uploads.

        Raises:
            MessageError: a client part sends other tensors than its server part lists in
                ``uploads``.
        """
        refuse_misfit(upload, sums.expected.shapes)
        if self.setup.transport.remote:  # the server does not trust what it is sent
            upload.finite = upload.finite & sendable(upload, limit_of(self.setup.aggregator))
        # On a GPU the host would wait for the device.
        if upload.finite.device.type == "cpu" and not upload.finite.all():
            self._explain(upload, sums)
        # Measurements see the upload first, before methods edit it.
        for part in sorted(self.parts, key=lambda part: part.order is not Order.MEASURES):
            self._add_terms(part, part.on_receive(upload, round) or {}, sums.parts[part])
        for name, mean in sums.means.items():
            sent = upload if name == "delta" else replace(upload, delta=upload.extra[name])
            mean.add(sent, round)
        sums.count(upload, round)

    def _explain(self, upload: Upload, sums: RoundSums) -> None:
        """Names tensors whose numbers are too large for a sum, once in a run. Counts the clients
        that are left out only because of statistics of their inputs.
        """
        limit = limit_of(self.setup.aggregator)
        places: dict[str, list[str]] = {SCALE: [], LOWER: []}
        for name, largest in too_large(upload, limit).items():
            advice = SCALE if self._is_statistic(name) else LOWER
            places[advice].append(f"{name} (up to {largest:.2g})")
        for advice, names in places.items():
            if names and advice not in self.advised:
                self.advised.add(advice)
                log.warning(
                    "clients send too large numbers in %s; a sum takes numbers below %.2g: %s.",
                    shorten(", ".join(names), 200, placeholder=" …"),
                    limit,
                    advice,
                )
        steps = {name: t for name, t in upload.delta.items() if not self._is_statistic(name)}
        fit_K = sendable(replace(upload, delta=steps), limit)
        sums.large_statistics += int((fit_K & ~upload.finite).sum())

    def _is_statistic(self, name: str) -> bool:
        """Whether it is a buffer, such as a running variance, which no learning rate scales."""
        module = self.setup.module
        return name in module.travels and name not in self.setup.names

    def _add_terms(self, part: ServerPart, terms: Params, totals: Params) -> None:
        for name, term in terms.items():
            total = totals[name]
            wrong = f"{part.title}: on_receive() and sums() disagree about {name}"
            assert term.shape == total.shape, wrong
            total.add_(term)

    def reduce(self, sums: RoundSums, round: Round) -> Received:
        """Adds up the sums of all processes: first the means, then the counts and the parts'."""
        shapes = sums.expected.shapes
        means = {name: mean.reduce(round, shapes[name]) for name, mean in sums.means.items()}
        own = [sums.counts(), *sums_of_parts(sums.parts)]
        if self.schedule.hears_losses:
            own.append(sums.losses_by_place(round))
        counts, *totals = round.reduce(own)
        if self.schedule.hears_losses:
            self._learn(totals.pop(), round)
        # The round waits for the device, once.
        numbers = torch.cat([counts, overflowed(means.values())]).tolist()
        num_losses, loss_sum, num_finite, up_bytes, samples, steps, statistics, overflows = numbers
        if len(round.asked):
            self.schedule.upload_bytes = up_bytes / len(round.asked)
        stepping = num_finite > 0 or self._steps_without_clients
        received = Received.of(
            round,
            cohort=np.setdiff1d(round.cohort, self.setup.transport.missing),
            update=means.pop("delta"),
            received=means,
            sums=split_by_part(sums.parts, totals),
            num_finite=int(num_finite),
            loss=loss_sum / num_losses if num_losses else float("nan"),
            up_bytes=int(up_bytes),
            samples=int(samples),
            steps=int(steps),
            large_statistics=int(statistics),
            overflowed=overflows > 0,
            usable=stepping and not overflows,
        )
        # Every process has written its clients' states. A client's have the index of its download,
        # and a server's table that of the round.
        for version, clients in round.turn.groups(round.index):
            self.setup.stores.finish_round(clients, {version, round.index})
        return received

    def _learn(self, table: Tensor, round: Round) -> None:
        """Tells the schedule the losses of the clients that count, from the sum over all processes
        of :meth:`RoundSums.losses_by_place`.
        """
        losses, counted = table.tolist()
        learned: dict[int, float] = {}
        for client, loss, counts in zip(round.asked.tolist(), losses, counted, strict=True):
            if counts:
                learned[client] = loss
        self.schedule.learn(learned, round.index)

    @cached_property
    def _steps_without_clients(self) -> bool:
        return any("steps without clients" in part.facts for part in self.parts)

    def finish(self, received: Received) -> None:
        """Lets the parts edit the aggregated update.

        Those that convert it into the model's coordinates come first.
        """
        for part in sorted(self.parts, key=lambda part: type(part).decode is ServerPart.decode):
            part.on_aggregate_end(received.update, received)

    def step(self, received: Received) -> bool:
        """Makes the server's step with the update, if any.

        Returns False if it undid a step that was not finite.
        """
        update = received.update if received.usable else None
        return self.setup.module.step(update, received.model)

    def row(self, received: Received) -> dict[str, Any]:
        """Columns about time, and about clients that dropped out or did fewer steps, in runs in
        which this can happen.
        """
        schedule = self.schedule
        turn = received.turn
        faulty = schedule.faults != Faults()
        row: dict[str, Any] = {}
        if faulty or self.setup.transport.remote:
            unanswered = len(turn.clients) - len(received.cohort)
            row["train/dropped_clients"] = turn.lost + unanswered
        if faulty:
            row["train/stragglers"] = self._stragglers(received)
        if schedule.timed:
            row["clock/seconds"] = turn.seconds
        if schedule.late:
            staleness_K = received.index - turn.versions
            row["late/mean"] = float(staleness_K.mean()) if len(staleness_K) else 0.0
            row["late/max"] = int(staleness_K.max(initial=0))
            row["late/lost"] = turn.lost
        return row

    def _stragglers(self, received: Received) -> int:
        """Number of clients that answered and did fewer local steps than planned."""
        stragglers = 0
        for version, clients in received.turn.groups(received.index):
            answered = np.intersect1d(clients, received.cohort)
            planned = self.setup.transport.planned(answered)
            stragglers += int((self.schedule.steps(answered, version) < planned).sum())
        return stragglers


def sums_of_parts(parts: Mapping[ServerPart, Params]) -> list[Tensor]:
    """All their tensors, in order."""
    return [t for sums in parts.values() for t in sums.values()]


def split_by_part(
    parts: Mapping[ServerPart, Params], totals: Sequence[Tensor]
) -> dict[ServerPart, Params]:
    """Gives each part the totals of its sums; the reverse of :func:`sums_of_parts`."""
    remaining = iter(totals)
    return {part: {name: next(remaining) for name in sums} for part, sums in parts.items()}


def overflowed(means: Iterable[Params]) -> Tensor:
    """Whether one of these means is not finite, bool ``[1]`` on the device."""
    finite = [finite_clients({name: t.unsqueeze(0) for name, t in mean.items()}) for mean in means]
    return ~torch.cat(finite).all(0, keepdim=True)
