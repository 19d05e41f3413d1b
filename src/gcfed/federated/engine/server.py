"""The server's program: :func:`~gcfed.federated.engine.round.run_round` calls its methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from gcfed.federated.engine.explanations import Explanations
from gcfed.federated.engine.round_sums import RoundSums
from gcfed.federated.parts import Fact, Order, ServerPart, Setup
from gcfed.federated.parts.method import expected_upload
from gcfed.federated.parts.transport import Outcome
from gcfed.federated.protocol.checks import refuse_misfit, sendable
from gcfed.federated.protocol.messages import Download, MessageError, Upload
from gcfed.federated.protocol.rounds import Received, Round
from gcfed.federated.state.downloads import keep_download, kept_download
from gcfed.participation.schedule import Schedule, Turn


@dataclass(frozen=True)
class Server:
    """Holds the global model and the methods' server parts. It knows no algorithm by name."""

    setup: Setup
    schedule: Schedule
    seed: int

    @cached_property
    def parts(self) -> list[ServerPart]:
        """The server parts, in the order of their hooks. The next two lists have the order of one
        hook each.
        """
        return [part for part in self.setup.parts if isinstance(part, ServerPart)]

    @cached_property
    def parts_on_receive(self) -> list[ServerPart]:
        """Measurements see an upload first, before methods edit it."""
        return sorted(self.parts, key=lambda part: part.order is not Order.MEASURES)

    @cached_property
    def parts_on_aggregate_end(self) -> list[ServerPart]:
        """Those that convert the aggregated update into the model's coordinates come first."""
        return sorted(self.parts, key=lambda part: not part.converts)

    def begin(self, round_index: int, turn: Turn) -> Round:
        """Makes the round of this index, which uses the uploads of the turn's clients."""
        setup = self.setup
        model = setup.module.travelling_state()
        return Round(
            index=round_index,
            seed=self.seed,
            cohort=turn.clients,
            num_clients=setup.data.num_clients,
            broadcast_model=model,
            server_model=model,
            lr=setup.solver.lr(round_index),
            optimizer=setup.module.trainer.optimizers[0],
            versions=turn.versions,
        )

    def broadcast(self, round: Round) -> Download:
        """Makes the message that goes to every client. Parts may send another model than the
        server's.
        """
        model = dict(round.server_model)
        download = Download(round.index, round.seed, round.lr, model, round.cohort)
        for part in self.parts:
            part.on_broadcast(download, round)
        if self.schedule.late:
            used_now = set(round.versions.tolist())
            used_later = self.schedule.versions_in_use(round.index + 1)
            keep_download(self.setup.stores, download, used_now, used_later)
        return download

    # ------------------------------------------------------------------------------------- uploads
    def empty_sums(self, round: Round) -> RoundSums:
        """The round's sums, without an upload.

        The parts have seen the broadcast and know what clients will send.
        """
        return RoundSums.empty(
            round,
            expected=expected_upload(self.setup.parts, round),
            aggregator=self.setup.aggregator,
            parts=self.parts,
            depends_on_losses=self.schedule.depends_on_losses,
        )

    def train_clients(self, download: Download, round: Round, sums: RoundSums) -> Outcome:
        """Lets the clients train, and adds up their uploads.

        Each client trains from the download that it has, which is an older one if it is late.
        """
        transport = self.setup.transport
        outcomes = []
        for version, clients in round.by_version():
            had = download
            if version != round.index:
                device = self.setup.module.device
                had = kept_download(self.setup.stores, version, round, device)
            receive: Callable[[Upload], None] = partial(
                self.receive, sums=sums, round=replace(round, download=had)
            )
            outcome = transport.fit(had, clients, receive, sums.expected)
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
            hint = self.explanations.undeclared(upload, sums.expected)
            raise MessageError(f"{error}{hint}") from None
        if self.setup.transport.remote:  # the server does not trust what it is sent
            upload.finite = upload.finite & sendable(upload, self.setup.aggregator.limit)
        # On a GPU the host would wait for the device. The round's warning then names both causes.
        if upload.finite.device.type == "cpu" and not all(upload.finite.tolist()):
            self.explanations.explain(upload)
        for part in self.parts_on_receive:
            sums.add_terms(part, part.on_receive(upload, round) or {})
        sums.add(upload, round)

    @cached_property
    def explanations(self) -> Explanations:
        return Explanations(self.setup)

    # -------------------------------------------------------------------------------- after uploads
    def reduce(self, sums: RoundSums, round: Round, outcome: Outcome) -> Received:
        """Adds up the sums of all processes."""
        answered = outcome.answered(round.cohort)
        return sums.received(round, answered, needs_clients=not self._steps_without_clients)

    @cached_property
    def _steps_without_clients(self) -> bool:
        return any(Fact.STEPS_WITHOUT_CLIENTS in part.facts for part in self.parts)

    def keep_states(self, received: Received) -> None:
        """Keeps the versions of the states that all processes have written.

        A client's states have the index of its download, and a server's table that of the round.
        """
        for version, clients in received.by_version():
            self.setup.stores.finish_round(clients, {version, received.index})

    def edit_update(self, received: Received) -> None:
        """Lets the parts edit the aggregated update."""
        for part in self.parts_on_aggregate_end:
            part.on_aggregate_end(received.update, received)

    def step(self, received: Received) -> bool:
        """Makes the server's step with the update, if any.

        Returns False if it undid a step that was not finite.
        """
        update = received.update if received.usable else None
        return self.setup.module.step(update, received.server_model)

    def reply(self, received: Received) -> None:
        """Sends the server's reply to the clients, if a part has one. It ends the round."""
        if received.reply:
            self.setup.transport.reply(received.reply)
            # before any process reads a state that another writes
            self.setup.module.trainer.strategy.barrier()
            # clients write some states only when they get the reply
            self.keep_states(received)
        self.setup.transport.end_round()
