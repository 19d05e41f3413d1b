"""The server's program: :func:`~gcfed.federated.engine.round.run_round` calls its methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from gcfed.data.schedule import Schedule, Turn
from gcfed.federated.engine.explanations import Explanations
from gcfed.federated.engine.round_sums import Counts, RoundSums
from gcfed.federated.parts import ClientPart, Order, ServerPart, Setup, upload_shapes
from gcfed.federated.parts.part import Aggregator, limit_of
from gcfed.federated.parts.transport import Outcome
from gcfed.federated.protocol.checks import are_finite, refuse_misfit, sendable
from gcfed.federated.protocol.messages import (
    Download,
    Expected,
    MessageError,
    Params,
    Upload,
    quantized_nbytes,
)
from gcfed.federated.protocol.rounds import Received, Round
from gcfed.federated.state.downloads import keep_download, kept_download


@dataclass(frozen=True)
class Server:
    """Holds the global model and the methods' server parts. It knows no algorithm by name."""

    setup: Setup
    schedule: Schedule
    seed: int

    @cached_property
    def parts(self) -> list[ServerPart]:
        return [part for part in self.setup.parts if isinstance(part, ServerPart)]

    def begin(self, round_index: int, turn: Turn) -> Round:
        """The round of this index, which uses the uploads of these clients."""
        setup = self.setup
        model = setup.module.broadcast_state()
        return Round(
            index=round_index,
            seed=self.seed,
            scheduled=turn.clients,
            cohort=turn.clients,
            num_clients=setup.data.num_clients,
            start=dict(model),
            model=model,
            lr=setup.solver.lr(round_index),
            optimizer=setup.module.trainer.optimizers[0],
            versions=turn.versions if self.schedule.late else None,
        )

    def broadcast(self, round: Round) -> Download:
        """Makes the message that goes to every client."""
        download = Download(round.index, round.seed, round.lr, round.start, round.cohort)
        for part in self.parts:
            part.on_broadcast(download, round)
        if round.versions is not None:
            used_now = set(round.versions.tolist())
            used_later = self.schedule.versions_in_use(round.index + 1)
            keep_download(self.setup.stores, download, used_now, used_later)
        return download

    # ------------------------------------------------------------------------------------- uploads
    def empty_sums(self, round: Round) -> RoundSums:
        """The round's sums, without an upload.

        The parts have seen the broadcast and know what clients will send.
        """
        expected = self._expected(round)
        loss_table = None
        if self.schedule.hears_losses:
            loss_table = round.zeros(2, len(round.scheduled))
        return RoundSums(
            expected=expected,
            means=self._empty_means(expected),
            part_sums={part: part.sums(round) for part in self.parts},
            finite=[round.zeros(0).bool()],  # a process may train no client
            losses=[round.zeros(0)],
            loss_table=loss_table,
        )

    def _expected(self, round: Round) -> Expected:
        """What a client sends in this round."""
        shapes = upload_shapes(self.parts, round)
        notes: dict[str, Params] = {}
        for part in self.parts:
            notes.update(part.notes(round))
        bits: dict[str, int] = {}
        packed: dict[str, int] = {}
        for client_part in self.setup.parts:
            if isinstance(client_part, ClientPart):
                bits.update(client_part.quantized(shapes["delta"]))
                packed.update(client_part.packed(shapes["delta"]))
        for name, bits_per_number in bits.items():
            packed[name] = quantized_nbytes(shapes["delta"][name].numel(), bits_per_number)
        return Expected(shapes, notes, bits, packed)

    def _empty_means(self, expected: Expected) -> dict[str, Aggregator]:
        """An aggregator for Δ, and for each set of floats that clients send in addition to it."""
        means = {"delta": self.setup.aggregator}
        for name, like in expected.shapes.items():
            is_float = all(t.is_floating_point() for t in like.values())
            if name != "delta" and is_float:
                means[name] = self.setup.aggregator.for_extra()
        return means

    def train_clients(self, download: Download, round: Round, sums: RoundSums) -> Outcome:
        """Lets the clients train, and adds up their uploads.

        Each client trains from the download that it has, which is an older one if it is late.
        """
        transport = self.setup.transport
        outcomes = []
        for version, clients in round.by_version():
            sent = download
            if version != round.index:
                device = self.setup.module.device
                sent = kept_download(self.setup.stores, version, round, device)
            receive: Callable[[Upload], None] = partial(
                self.receive, sums=sums, round=replace(round, sent=sent)
            )
            outcome = transport.fit(sent, clients, receive, sums.expected, among=round.scheduled)
            outcomes.append(outcome)
        missing = np.concatenate([outcome.missing for outcome in outcomes])
        return Outcome(missing, sum(outcome.num_unsent for outcome in outcomes))

    def receive(self, upload: Upload, sums: RoundSums, round: Round) -> None:
        """Adds up K uploads.

        Raises:
            MessageError: a client part sends other tensors than its server part lists in
                ``uploads``.
        """
        try:
            refuse_misfit(upload, sums.expected.shapes)
        except MessageError as error:
            raise MessageError(f"{error}{self._undeclared(upload, sums.expected)}") from None
        if self.setup.transport.remote:  # the server does not trust what it is sent
            upload.finite = upload.finite & sendable(upload, limit_of(self.setup.aggregator))
        # On a GPU the host would wait for the device.
        if upload.finite.device.type == "cpu" and not all(upload.finite.tolist()):
            self.explanations.explain(upload)
        # Measurements see the upload first, before methods edit it.
        for part in sorted(self.parts, key=lambda part: part.order is not Order.MEASURES):
            sums.add_terms(part, part.on_receive(upload, round) or {})
        sums.add(upload, round)

    def _undeclared(self, upload: Upload, expected: Expected) -> str:
        """Names what was sent without being listed, and the parts that may have sent it."""
        names = [name for name in upload.extra if name not in expected.shapes]
        if not names:
            return ""
        senders = []
        for part in self.setup.parts:
            if isinstance(part, ClientPart) and part.overrides("send"):
                senders.append(type(part).__name__)
        by = f", and {' or '.join(senders)} sends it in send()" if senders else ""
        return (
            f" No method lists {', '.join(names)}{by}: list it in the method's uploads(), or do not"
            " send it."
        )

    @cached_property
    def explanations(self) -> Explanations:
        return Explanations(self.setup)

    # -------------------------------------------------------------------------------- after uploads
    def reduce(self, sums: RoundSums, round: Round, outcome: Outcome) -> Received:
        """Adds up the sums of all processes."""
        means = sums.total_means(round)
        totals = sums.totals(round)
        losses = {} if totals.losses is None else losses_by_client(totals.losses, round)
        is_finite = are_finite(t for mean in means.values() for t in mean.values())
        # one transfer, because the host waits for the device
        *numbers, is_update_finite = torch.cat([totals.counts, is_finite.view(1)]).tolist()
        counts = Counts(*numbers)
        overflowed = not is_update_finite
        has_step = counts.num_finite > 0 or self._steps_without_clients
        return Received.of(
            round,
            cohort=outcome.answered(round.scheduled),
            update=means.pop("delta"),
            extra_means=means,
            sums=totals.part_sums,
            num_finite=int(counts.num_finite),
            loss=counts.mean_loss,
            losses=losses,
            samples=int(counts.samples),
            steps=int(counts.steps),
            overflowed=overflowed,
            usable=has_step and not overflowed,
        )

    @cached_property
    def _steps_without_clients(self) -> bool:
        return any("steps without clients" in part.facts for part in self.parts)

    def record(self, received: Received, download: Download, expected: Expected) -> None:
        """Records what later rounds depend on: states, losses, and the sizes of messages."""
        self._record_states(received)
        self.schedule.learn(received.losses, received.index)
        self.schedule.download_bytes = float(download.nbytes)
        self.schedule.upload_bytes = float(expected.nbytes)

    def _record_states(self, received: Received) -> None:
        """Records the states that all processes have written.

        A client's states have the index of its download, and a server's table that of the round.
        """
        for version, clients in received.by_version():
            self.setup.stores.finish_round(clients, {version, received.index})

    def finish(self, received: Received) -> None:
        """Lets the parts edit the aggregated update.

        Those that convert it into the model's coordinates come first.
        """
        for part in sorted(self.parts, key=lambda part: not part.converts):
            part.on_aggregate_end(received.update, received)

    def step(self, received: Received) -> bool:
        """Makes the server's step with the update, if any.

        Returns False if it undid a step that was not finite.
        """
        update = received.update if received.usable else None
        return self.setup.module.step(update, received.model)

    def reply(self, received: Received) -> None:
        """Sends the server's reply to the clients, if a part has one."""
        if not received.reply:
            return
        self.setup.transport.reply(received.reply)
        # before any process reads a state that another writes
        self.setup.module.trainer.strategy.barrier()
        self._record_states(received)  # those that clients write only when they hear the reply


def losses_by_client(table: Tensor, round: Round) -> dict[int, float]:
    """The losses of the clients that count, from :attr:`RoundSums.loss_table` of all processes."""
    losses, counted = table.tolist()
    found: dict[int, float] = {}
    for client, loss, counts in zip(round.scheduled.tolist(), losses, counted, strict=True):
        if counts:
            found[client] = loss
    return found
