"""How the stacks of a round use the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from math import ceil

import torch

from gcfed.federated.engine.client import ClientProgram
from gcfed.models.facts import activation_bytes, has_convolutions, has_dropout, may_draw
from gcfed.models.unchanged import evaluating, unchanged
from gcfed.utils.device import free_memory

MAX_STREAMS = 8  # a GPU runs as many at once


class Layout:
    """The number K of clients in a stack, and the streams of a GPU, on which the stacks of a round
    train in turn. A CPU has no streams.

    Each stack trains on one stream. The hooks after local training and the sums of uploads run on
    the round's stream, in the host's order, so equal runs have equal numbers. The stack's stream
    waits for them, because the next stack reuses the memory. A single stack also has a stream: no
    CUDA graph can be recorded on the default one.
    """

    def __init__(self, k: int, device: torch.device, num_streams: int) -> None:
        self.k = k
        self.streams = [torch.cuda.Stream(device) for _ in range(num_streams)]

    def begin_round(self) -> None:
        """The present stream becomes the round's. The stacks wait for its earlier work."""
        self._turns = cycle(self.streams)
        if self.streams:
            self._round = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(self._round)

    def next_stream(self) -> AbstractContextManager[None]:
        """Encloses a stack, on the next stream. The block must end with :meth:`in_turn`."""
        return torch.cuda.stream(next(self._turns)) if self.streams else nullcontext()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within :meth:`next_stream`, encloses what follows local training, on the round's
        stream.
        """
        if not self.streams:
            yield
            return
        trained = torch.cuda.current_stream()
        self._round.wait_stream(trained)
        with torch.cuda.stream(self._round):
            yield
        trained.wait_stream(self._round)


def make_layout(program: ClientProgram, cohort_size: int) -> Layout:
    """The layout of rounds with this number of clients, on the device of the network and the data.

    With ``client.stack=auto`` on a GPU, networks with convolutions (slow in a stack) or dropout
    train one client at a time. Networks that draw random numbers, as a user's may, use one stream:
    all streams share a generator.
    """
    device = program.module.device
    if device.type != "cuda":
        return Layout(_chosen_k(program, cohort_size) or 1, device, num_streams=0)
    k, num_streams = division(program, cohort_size, free_memory(device))
    return Layout(k, device, num_streams)


def _chosen_k(program: ClientProgram, cohort_size: int) -> int | None:
    """The K that the user has set; None for ``auto``."""
    stack = program.solver.stack
    return None if stack == "auto" else min(stack, cohort_size)


def division(program: ClientProgram, cohort_size: int, free_bytes: int) -> tuple[int, int]:
    """K and the number of streams on a GPU with this much free memory."""
    module = program.module
    net = module.net
    # Dropout in a stack depends on K, and K depends on the free memory, which must not change a
    # run.
    alone = bool(module.traits.why_alone) or has_dropout(net) or has_convolutions(net)
    room = free_bytes // _bytes_of_client(program)
    k, num_streams = divide(cohort_size, room, alone, _chosen_k(program, cohort_size))
    if may_draw(net):
        return k, 1
    return k, num_streams


def _bytes_of_client(program: ClientProgram) -> int:
    """The memory of a client in training: weights, gradients, momentum and a method's terms, and
    twice a pass's activations.
    """
    data = program.data
    net = program.module.net
    largest = int(data.sizes().max())
    batch_size = ceil(min(program.solver.batch_size, largest) / program.solver.accumulate)
    first = torch.zeros(1, dtype=torch.int64, device=program.module.device)
    sample, _ = data.fetch(first, None)
    with unchanged(net), evaluating(net):
        activations = activation_bytes(net, sample)
    weights = sum(p.nbytes for p in net.parameters())
    return 16 * weights + 2 * batch_size * activations


def divide(cohort_size: int, room: int, alone: bool, chosen: int | None = None) -> tuple[int, int]:
    """K and the number of streams of a GPU.

    Args:
        room: how many clients' memory is free.
        alone: whether clients train one at a time, unless the user has ``chosen`` a K.
    """
    room = max(1, min(cohort_size, room))
    k = chosen or (1 if alone else room)
    num_stacks = ceil(cohort_size / k)
    return k, max(1, min(num_stacks, room // k, MAX_STREAMS))
