"""A local step, recorded once and played back: as a CUDA graph, whose kernels need no launch from Python.

A recording holds what the step did to tensors. Python in it ran once, while it was recorded: its numbers, branches and
counters are frozen. So whatever differs from step to step must be a tensor on the device, as the step's number is, and
nothing may wait for the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gcfed.federated.batches import Kind

Step = Callable[[], object]
Operation = tuple[Any, Sequence[Any], dict[str, Any], list[Tensor] | None]
#: Operations that bring a number to the host.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal", "is_nonzero")


class Recorder(Protocol):
    """Records steps and plays them back."""

    def record(self, step: Step) -> Step:
        """Runs the step once, and returns what runs it again on the same memory."""


class Graph:
    """Records CUDA graphs on one stream, which must not be the default one; they share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None  # without a graph the pool would be given back

    def record(self, step: Step) -> Step:
        """As :class:`Recorder`. Without ``torch.cuda.graph``, which waits for the device and empties its cache."""
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


class Tape(TorchDispatchMode):
    """Records operations on a CPU, with the semantics of a CUDA graph: by it the tests prove that a step can be one.

    Attributes:
        operations: of the last recording: operation, arguments, and the tensors that its results go to, None where it
            writes to its arguments.

    Raises:
        RuntimeError: a step waits for the device, or takes a number from the host; names the operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def record(self, step: Step) -> Step:
        operations: list[Operation] = []
        self.operations = operations
        with self:
            step()

        @torch.no_grad()
        def replay() -> None:
            for operation, args, kwargs, results in operations:
                again = operation(*args, **kwargs)
                for result, new in zip(results or (), _tensors(again), strict=False):
                    result.copy_(new)

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name in WAITS or (name.startswith("index") and any(t.dtype == torch.bool for t in _tensors(args[1:2]))):
            raise RuntimeError(f"a recorded step waits for the device: {name}")
        if name == "lift_fresh":
            raise RuntimeError("a recorded step takes a number from the host: torch.tensor")
        out = func(*args, **kwargs)
        results = _tensors(out)
        if func._schema.is_mutable:
            self.operations.append((func, args, kwargs, None))
        elif not name.startswith(("empty", "new_empty")):
            known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
            if not any(t.untyped_storage()._cdata in known for t in results):  # a view stays one
                self.operations.append((func, args, kwargs, results))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


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
    step: Callable[[int | Tensor, Kind], None], recorder: Recorder, device: torch.device
) -> Callable[[int | Tensor, Kind], None]:
    """The same step, whose kinds are recorded at their second time; its number is counted on the device."""
    number = torch.zeros(1, dtype=torch.int64, device=device)
    seen: set[Kind] = set()
    recordings: dict[Kind, Callable[[], object]] = {}

    def counted(kind: Kind) -> None:
        step(number, kind)
        number.add_(1)

    def play(_: int | Tensor, kind: Kind) -> None:
        if kind in recordings:
            recordings[kind]()
        elif kind in seen:
            recordings[kind] = recorder.record(partial(counted, kind))
        else:
            counted(kind)
            seen.add(kind)

    return play
