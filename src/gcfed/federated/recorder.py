"""A local step, recorded once and played back: as a CUDA graph, whose kernels need no launch from Python.

A recording holds what the step did to tensors. Python in it ran once, while it was recorded: its numbers, branches and
counters are frozen. So whatever differs from step to step, and in a place from client to client, must be a tensor on
the device, as the step's number is, and nothing may wait for the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gcfed.federated.batches import Kind

Step = Callable[[], object]
MOST = 128  # kinds that are recorded at a time, in each place: a graph takes memory, and clients differ in last batches


class Graph:
    """Records steps as CUDA graphs on one stream, which must not be the default one; they share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None  # without a graph the pool would be given back

    def record(self, step: Step) -> Step:
        """Runs the step once, and returns what runs it again on the same memory.

        Without ``torch.cuda.graph``, which waits for the device and empties its cache.
        """
        graph = torch.cuda.CUDAGraph()
        enabled = gc.isenabled()
        gc.disable()  # what it frees could free memory of the device, which a capture forbids
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        finally:
            if enabled:
                gc.enable()
        graph.replay()  # while it was captured, nothing ran
        self._last = graph
        return graph.replay


class Losses:
    """The clients' mean losses in each step and their numbers of labels, ``[T, K]``, 0 where a client is done."""

    def __init__(self, k: int, steps: int) -> None:
        self.shape = steps, k
        self.steps: list[tuple[Tensor, ...]] = []  # where steps are counted on the host, which is faster on a CPU
        self.tables: tuple[Tensor, ...] = ()

    def write(self, number: int | Tensor, *values: Tensor) -> None:
        """Losses and numbers of labels of the active clients, ``[n]`` each, in a step."""
        if isinstance(number, int):
            self.steps.append(values)
            return
        self.tables = self.tables or tuple(value.new_zeros(self.shape) for value in values)
        for table, value in zip(self.tables, values, strict=True):
            table[:, : len(value)].index_copy_(0, number, value.unsqueeze(0))

    def means(self, steps: int) -> Tensor:
        """Each client's mean over all its labels in the first so many steps, ``[K]``."""
        padded = (pad_sequence(list(values), batch_first=True) for values in zip(*self.steps, strict=True))
        means, counts = (table[:steps] for table in self.tables or padded)
        return (means * counts).sum(0) / counts.sum(0)


class Recordings:
    """Steps by their kind, each recorded at its second time; the number of the step, ``[1]``, is on the device."""

    def __init__(self, device: torch.device) -> None:
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.steps: dict[Kind, Step | None] = {}


def recorded(
    step: Callable[[int | Tensor, Kind], None], recorder: Graph, recordings: Recordings
) -> Callable[[int | Tensor, Kind], None]:
    """The same step, recorded or played back; its number is counted on the device."""
    number, steps = recordings.number, recordings.steps

    def counted(kind: Kind) -> None:
        step(number, kind)
        number.add_(1)

    def play(_: int | Tensor, kind: Kind) -> None:
        if kind not in steps:
            counted(kind)
            steps[kind] = None
            return
        again = steps.pop(kind)  # to the end of those that may be forgotten
        if again is None:
            steps[kind] = recorder.record(partial(counted, kind))
        else:
            steps[kind] = again
            again()
        if len(steps) > MOST:
            del steps[next(iter(steps))]

    return play
