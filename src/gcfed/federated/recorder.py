"""A local step, recorded once and played back: as a CUDA graph, whose kernels need no launch from Python.

A recording holds what the step did to tensors. Python in it ran once, while it was recorded: its numbers, branches and
counters are frozen. So whatever differs from step to step must be a tensor on the device, as the step's number is, and
nothing may wait for the device.
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

    def means(self) -> Tensor:
        """Each client's mean over all its labels, ``[K]``."""
        padded = (pad_sequence(list(values), batch_first=True) for values in zip(*self.steps, strict=True))
        means, counts = self.tables or padded
        return (means * counts).sum(0) / counts.sum(0)


def recorded(
    step: Callable[[int | Tensor, Kind], None], recorder: Graph, device: torch.device
) -> Callable[[int | Tensor, Kind], None]:
    """The same step, whose kinds are recorded at their second time; its number is counted on the device."""
    number = torch.zeros(1, dtype=torch.int64, device=device)
    recordings: dict[Kind, Step | None] = {}

    def counted(kind: Kind) -> None:
        step(number, kind)
        number.add_(1)

    def play(_: int | Tensor, kind: Kind) -> None:
        if kind not in recordings:
            counted(kind)
            recordings[kind] = None
        elif (again := recordings[kind]) is None:
            recordings[kind] = recorder.record(partial(counted, kind))
        else:
            again()

    return play
