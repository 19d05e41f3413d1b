"""The simulation: clients train in stacks. Each process trains its share of a cohort."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from gcfed.federated.engine.client import ClientProgram, ClientRound
from gcfed.federated.engine.layout import Layout, make_layout
from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.parts import Fact, Order
from gcfed.federated.parts.transport import Outcome, Transport
from gcfed.federated.protocol.messages import Download, Expected, Params, Upload
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.solver import LocalSolver


class ProgramTransport(Transport):
    """A transport whose server has the clients' program: their data, solver and parts."""

    def __init__(self, program: ClientProgram, stores: ClientStores) -> None:
        self.program = program
        self.stores = stores

    def planned(self, clients: np.ndarray) -> np.ndarray:
        return self.program.solver.num_steps(self.program.data.sizes(clients))


class Simulation(ProgramTransport):
    """The transport that trains the clients in the processes of the run. It passes messages by
    reference.

    Args:
        cohort_size: number of clients of a round; of a
            :class:`~gcfed.participation.sampling.PoissonSampler` the mean number. No stack has
            more clients.
    """

    remote = separate_clients = own_data = False

    def __init__(self, program: ClientProgram, stores: ClientStores, cohort_size: int) -> None:
        super().__init__(program, stores)
        self.cohort_size = cohort_size
        self._client_round: ClientRound | None = None  # to which the server may reply

    def start(self) -> None:
        """There is nothing to start."""

    def fit(
        self,
        download: Download,
        clients: np.ndarray,
        receive: Callable[[Upload], None],
        expected: Expected | None = None,
    ) -> Outcome:
        """Trains this process's share. ``expected`` is for transports that send messages."""
        rank, world = rank_and_world()
        # A site has all its clients in one process. It does not know how much work others have.
        cohort = download.cohort if world > 1 else clients
        client_round = self.program.take_download(download)
        if self.program.reply_parts:
            self._client_round = client_round
        stacks = self.deal(client_round, clients, cohort, rank, world)
        for upload in self._uploads(client_round, stacks):
            receive(upload)
            del upload  # its memory is free while the next stack trains
        return Outcome()

    def rehearse(
        self,
        download: Download,
        clients: np.ndarray,
        solver: LocalSolver | None = None,
        here: bool = False,
    ) -> Iterator[Upload]:
        program = self.program
        parts = []
        for part in program.parts:
            if part.order is not Order.MEASURES and Fact.SEES_COHORT not in part.facts:
                parts.append(part)
        rehearsal = replace(program, solver=solver or program.solver, parts=parts)
        # Equal steps train in the memory of the run's; on a GPU they replay its recordings.
        if solver is None and rehearsal.in_steps == program.in_steps:
            rehearsal.memory = program.memory
        rank, world = (0, 1) if here else rank_and_world()
        client_round = rehearsal.take_download(download)
        stacks = self.deal(client_round, clients, clients, rank, world)
        yield from self._uploads(client_round, stacks, sends=False)

    def _uploads(
        self, client_round: ClientRound, stacks: Sequence[np.ndarray], sends: bool = True
    ) -> Iterator[Upload]:
        """Trains one stack after another, and yields its uploads on the round's stream."""
        layout = self.layout
        layout.begin_round()
        for drawn in client_round.draw(stacks):
            with layout.next_stream():
                upload = client_round.train(drawn, layout.in_turn, sends=sends)
                with layout.in_turn():
                    yield upload
                del upload

    def reply(self, reply: Mapping[str, Params]) -> None:
        if self._client_round is not None:
            self._client_round.reply(reply)

    def end_round(self) -> None:
        self._client_round = None

    def deal(
        self,
        client_round: ClientRound,
        clients: np.ndarray,
        cohort: np.ndarray,
        rank: int,
        world: int,
    ) -> list[np.ndarray]:
        """The ids of the clients of each stack that process ``rank`` of ``world`` trains, those
        with most local steps first.

        Args:
            cohort: the clients whose work the processes share; ``clients`` are all or some of them.
        """
        mine = assign(cohort, client_round.num_steps(cohort), rank, world)
        if len(clients) < len(cohort):
            mine = mine[np.isin(mine, clients)]
        size = self.layout.k
        return [mine[first : first + size] for first in range(0, len(mine), size)]

    @cached_property
    def layout(self) -> Layout:
        """How stacks use the device; the network and the data must be there."""
        return make_layout(self.program, self.cohort_size)


def assign(clients: np.ndarray, work: np.ndarray, rank: int, world: int) -> np.ndarray:
    """The clients that process ``rank`` of ``world`` trains, most work first.

    Each client, largest first, goes to the process with the least work so far. Of several such
    processes it goes to the last one, because the first one also writes checkpoints and logs. All
    processes compute the same result.
    """
    order = np.lexsort((clients, -work))
    load = np.zeros(world)
    owner = np.zeros(len(clients), dtype=np.int64)
    for i in order:
        owner[i] = world - 1 - load[::-1].argmin()
        load[owner[i]] += work[i]
    mine: np.ndarray = clients[order[owner[order] == rank]]
    return mine
