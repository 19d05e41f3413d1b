"""Messages by reference: clients train in stacks, on the process of the server's program or on several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gcfed.federated.client import ClientProgram
from gcfed.federated.faults import Faults
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.method import Order
from gcfed.federated.processes.strategy import rank_and_world
from gcfed.federated.solver import LocalSolver
from gcfed.federated.store import ClientStores
from gcfed.federated.streams import Streams, layout
from gcfed.federated.transport import Transport


class Stacks(Transport):
    """The transport of a simulation: nothing is copied.

    Args:
        program: the clients'.
        stores: what the clients keep.
        per_round: clients of a cohort, at most.
        faults: which clients drop out or do less than was asked of them.
    """

    def __init__(self, program: ClientProgram, stores: ClientStores, per_round: int, faults: Faults) -> None:
        self.program, self.stores, self.per_round, self.faults = program, stores, per_round, faults

    def steps(self, clients: np.ndarray, round: int, seed: int) -> np.ndarray:
        """Local steps that these clients do in a round, ``[K]``."""
        planned = self.program.solver.num_steps(self.program.data.sizes(clients))
        return self.faults.steps(planned, clients, round, seed)

    def arrivals(self, drawn: np.ndarray, round: int, seed: int) -> np.ndarray:
        return self.faults.survivors(drawn, self.steps(drawn, round, seed), round, seed)

    def fit(self, download: Download, clients: np.ndarray) -> Iterator[Upload]:
        program, streams = self.program, self.layout.streams
        program.module.net.train()
        program.receive(download)
        with streams.round():
            for stack in self.share(download, clients):
                with streams.stack():
                    trained = [program.train(download, stack, self._cut, streams.in_turn)]
                    with streams.in_turn():
                        yield trained.pop()  # not kept here: nothing holds an upload while the next stack trains

    def rehearse(
        self, download: Download, clients: np.ndarray, solver: LocalSolver | None = None, here: bool = False
    ) -> Iterator[Upload]:
        program = self.program
        parts = [part for part in program.parts if part.order is not Order.MEASURES and not part.sees_cohort]
        alone = ClientProgram(program.module, program.data, solver or program.solver, parts)
        alone.module.net.train()
        alone.receive(download)
        with self.stores.forgetting():
            for stack in [clients] if here else self.share(download, clients):
                yield alone.train(download, stack, self._cut, sends=False)

    def reply(self, reply: Mapping[str, Params], download: Download) -> None:
        self.program.reply(reply, download)

    def _cut(self, steps: np.ndarray, clients: np.ndarray, download: Download) -> np.ndarray:
        return self.faults.steps(steps, clients, download.round, download.seed)

    def share(self, download: Download, clients: np.ndarray) -> list[np.ndarray]:
        """This process's share of these clients, as the ids of one stack after the other."""
        mine = assign(clients, self.steps(clients, download.round, download.seed), *rank_and_world())
        return np.split(mine, range(self.layout.k, len(mine), self.layout.k)) if len(mine) else []

    @cached_property
    def layout(self) -> Layout:
        """How stacks lie on the device; asked for once the network is there."""
        solver, module, data = self.program.solver, self.program.module, self.program.data
        largest = int(data.sizes(np.arange(data.num_clients)).max())  # of the clients: no batch is larger
        k, streams = layout(
            solver.stack, min(solver.batch_size, largest), self.per_round, module.net, module.device, data
        )
        return Layout(k, Streams(module.device, streams))


@dataclass(frozen=True)
class Layout:
    """K, the clients of a stack, and the streams that stacks train on."""

    k: int
    streams: Streams


def assign(clients: np.ndarray, work: np.ndarray, rank: int, world: int) -> np.ndarray:
    """The clients that process ``rank`` of ``world`` trains, most work first.

    Largest first, each to the process with the least work so far; every process computes the same assignment.
    """
    load, mine = np.zeros(world), []
    for i in np.lexsort((clients, -work)):
        target = int(load.argmin())
        load[target] += work[i]
        if target == rank:
            mine.append(i)
    return clients[np.array(mine, dtype=np.int64)]
