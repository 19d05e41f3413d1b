"""The transport: carries messages between the server and its clients, which train in stacks in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.client import ClientProgram
from gcfed.federated.graphs.streams import STREAMS, Streams
from gcfed.federated.messages import Download, Expected, Upload
from gcfed.federated.method import Order
from gcfed.federated.parallel.strategy import rank_and_world
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.forward import Params
from gcfed.federated.training.solver import LocalSolver
from gcfed.models.facts import has_convolutions, has_dropout
from gcfed.models.unchanged import evaluating
from gcfed.utils.device import free_memory


class Stacks:
    """The transport of a simulation, which passes messages by reference. Other transports inherit from it.

    Args:
        per_round: the most clients of a cohort.

    Attributes:
        remote: whether clients run on other machines, which may disappear and which keep the clients' states.
        separate_clients: whether clients are built from the config a second time, without the callbacks.
        own_data: whether the server does not know the clients' data.
        missing: clients of the last ``fit`` that did not answer.
        unasked: how many of them were sent nothing.
    """

    remote = separate_clients = own_data = False
    missing: np.ndarray = np.zeros(0, dtype=np.int64)
    unasked = 0

    def __init__(self, program: ClientProgram, stores: ClientStores, per_round: int) -> None:
        self.program, self.stores, self.per_round = program, stores, per_round

    def start(self) -> None:
        """Called once before the first round, after a checkpoint has been loaded."""

    def planned(self, clients: np.ndarray) -> np.ndarray:
        """How many local steps are asked of these clients in a round, ``[K]``."""
        return self.program.solver.num_steps(self.program.data.sizes(clients))

    def fit(self, download: Download, clients: np.ndarray, expected: Expected | None = None) -> Iterator[Upload]:
        """Trains those of the clients that this process has, and yields their uploads, K at a time.

        Args:
            expected: the tensors of an upload. A transport to sites refuses other ones.
        """
        streams = self.layout.streams
        self.program.receive(download)
        with streams.round():
            for ids in self.share(download, clients):
                with streams.stack():
                    trained = [self.program.train(download, ids, streams.in_turn)]
                    with streams.in_turn():
                        yield trained.pop()  # so that its memory is free while the next stack trains

    def rehearse(
        self, download: Download, clients: np.ndarray, solver: LocalSolver | None = None, here: bool = False
    ) -> Iterator[Upload]:
        """Yields what these clients would send. They keep nothing, and measurements do not see it.

        Args:
            solver: replaces the run's solver.
            here: train all of them on this process, because no other process calls it.
        """
        program = self.program
        parts = [
            part for part in program.parts if part.order is not Order.MEASURES and "sees the cohort" not in part.facts
        ]
        alone = replace(program, solver=solver or program.solver, parts=parts)
        alone.receive(download)
        for ids in [clients] if here else self.share(download, clients):
            yield alone.train(download, ids, sends=False)

    def reply(self, reply: Mapping[str, Params]) -> None:
        """Sends the server's reply to the clients of the round."""
        self.program.reply(reply)

    def share(self, download: Download, clients: np.ndarray) -> list[np.ndarray]:
        """The ids of the clients of each stack that this process trains."""
        work = self.program.faults.steps(self.planned(clients), clients, download.round, download.seed)
        mine = assign(clients, work, *rank_and_world())
        return np.split(mine, range(self.layout.k, len(mine), self.layout.k)) if len(mine) else []

    @cached_property
    def layout(self) -> Layout:
        """How stacks use the device; the network and the data must be there."""
        solver, module, data = self.program.solver, self.program.module, self.program.data
        largest = int(data.sizes(np.arange(data.num_clients)).max())  # no batch is larger
        batch_size = min(solver.batch_size, largest)
        alone = bool(module.traits.alone)
        k, streams = layout(solver.stack, batch_size, self.per_round, module.net, module.device, data, alone)
        return Layout(k, Streams(module.device, streams))


class Layout(NamedTuple):
    """K, the number of clients in a stack, and the streams that stacks train on."""

    k: int
    streams: Streams


def assign(clients: np.ndarray, work: np.ndarray, rank: int, world: int) -> np.ndarray:
    """The clients that process ``rank`` of ``world`` trains, most work first.

    Each client, largest first, goes to the process with the least work so far. All processes compute the same result.
    """
    load, mine = np.zeros(world), []
    for i in np.lexsort((clients, -work)):
        target = int(load.argmin())
        load[target] += work[i]
        if target == rank:
            mine.append(i)
    return clients[np.array(mine, dtype=np.int64)]


def layout(
    stack: int | str, batch_size: int, cohort: int, net: nn.Module, device: torch.device, data: FederatedDataModule,
    alone: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """K, the number of clients in a stack (``client.stack``), and the number of streams.

    With ``auto`` on a GPU, networks with convolutions (slow in a stack) or dropout train one client at a time. Networks
    that draw random numbers use one stream, because all streams share a generator. A user's network may draw.
    """
    if device.type != "cuda":
        return (1 if stack == "auto" else min(int(stack), cohort)), 1
    # A client needs memory for weights, gradients, momentum, a method's terms, and twice the activations of a batch.
    sample = data.fetch(torch.zeros(1, dtype=torch.int64, device=device), None)[0]
    client = 16 * sum(p.nbytes for p in net.parameters()) + 2 * batch_size * activation_bytes(net, sample)
    fit = max(1, min(cohort, free_memory(device) // client))
    # Dropout in a stack depends on K, and K depends on the free memory, which must not change a run.
    alone = alone or has_dropout(net) or has_convolutions(net)
    k = (1 if alone else fit) if stack == "auto" else min(int(stack), cohort)
    draws = has_dropout(net) or not type(net).__module__.startswith("gcfed.")
    return k, 1 if draws else max(1, min(-(-cohort // k), fit // k, STREAMS))


def activation_bytes(net: nn.Module, sample: Tensor) -> int:
    """Bytes of the outputs of all layers for one sample, ``[1, *input]``."""
    returned: list[int] = []

    def count(layer: nn.Module, inputs: object, output: object) -> None:
        if not list(layer.children()):
            returned.extend(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))

    with register_module_forward_hook(count), torch.no_grad(), evaluating(net):
        net(sample)
    return sum(returned)
