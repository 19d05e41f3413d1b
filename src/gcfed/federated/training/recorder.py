"""Records a function as a CUDA graph, and replays it.

A recording repeats the operations of a local step on the same memory. The step's Python code runs
only once, so a recording keeps its numbers and branches. Whatever differs between steps or clients,
such as the step's number, must be a tensor on the device at a fixed address. Nothing in a step may
wait for the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal

import torch
from torch import nn

from gcfed.models.facts import is_recordable_network, is_recurrent

Step = Callable[[], object]
#: How long a recorded step stays valid (``ClientPart.recordable``): not at all, in its stack, or in
#: all stacks of the run.
Recordable = Literal["", "stack", "run"]


def can_record(net: nn.Module, device: torch.device) -> bool:
    """Whether a CUDA graph can record this network's steps on the present stream."""
    if device.type != "cuda" or is_recurrent(net) or not is_recordable_network(net):
        return False
    return torch.cuda.current_stream(device) != torch.cuda.default_stream(device)


class Recorder:
    """Records steps as CUDA graphs that share memory, on one stream, which must not be the default
    one.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None  # keeps the pool alive

    def record(self, step: Step) -> Step:
        """Runs the step once, and returns a function that runs it again on the same memory."""
        # ``torch.cuda.graph`` would wait for the device and empty its cache
        graph = torch.cuda.CUDAGraph()
        with ExitStack() as after:
            if gc.isenabled():
                gc.disable()  # it could free memory of the device, which a capture forbids
                after.callback(gc.enable)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            after.callback(graph.capture_end)
            step()
        graph.replay()  # the capture itself computed nothing
        self._last = graph
        return graph.replay
