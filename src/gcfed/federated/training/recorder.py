"""Records local steps as CUDA graphs and replays them.

A recording repeats the operations of a step on the same memory. The step's Python code runs only
once, so a recording keeps its numbers and branches. Whatever differs between steps or clients, such
as the step's number, must be a tensor on the device at a fixed address. Nothing in a step may wait
for the device.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from gcfed.federated.network.stack import ClientStack
from gcfed.federated.training.batches import BatchPlan, Beginning, Kind, Steps
from gcfed.models.facts import is_graphable, is_recurrent
from gcfed.optim.partial import starts_at_zero

Step = Callable[[], object]
MAX_RECORDINGS = 128  # of one stack: each takes memory


def can_record(net: nn.Module, device: torch.device) -> bool:
    """Whether a CUDA graph can record this network's steps on the present stream."""
    if device.type != "cuda" or is_recurrent(net) or not is_graphable(net):
        return False
    return torch.cuda.current_stream(device) != torch.cuda.default_stream(device)


def can_replay_later(optimizer: Optimizer, rate_changes: bool) -> bool:
    """Whether later stacks can replay a step that is recorded with this optimizer.

    It must be able to start again, and to read a changing η_l from a tensor.
    """
    return starts_at_zero(optimizer) and (not rate_changes or bool(optimizer.defaults["fused"]))


class Replays(NamedTuple):
    """What later stacks need to replay the steps that are recorded of one stack.

    Attributes:
        most_steps: returns the number of local steps of the client with most samples.
        rate_changes: whether η_l differs between rounds. A step then reads it from a tensor.
    """

    most_steps: Callable[[], int]
    rate_changes: bool


class Graph:
    """Records steps as CUDA graphs, which share memory, on one stream.

    It must not be the default stream.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None  # keeps the pool alive

    def record(self, step: Step) -> Step:
        """Runs the step once, and returns a function that runs it again on the same memory.

        ``torch.cuda.graph`` would wait for the device and empty its cache.
        """
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


class Recorder:
    """Makes the recorded steps of all stacks of one stream.

    ``graph`` records a step; by default a new :class:`Graph`.

    It keeps recordings for two values of K, because most cohorts are split into stacks of one size
    and a smaller one.
    """

    def __init__(self, graph: Any = None) -> None:
        self.graph = graph or Graph()
        self._kept: dict[int, RecordedSteps] = {}  # by K

    def begin(self, beginning: Beginning, replays: Replays | None) -> RecordedSteps:
        """The steps of K clients. They replay those of an earlier stack of as many clients.

        Args:
            replays: None if each stack records its own steps.
        """
        if replays is None:
            stack, optimizer = beginning.make(beginning.model)
            return RecordedSteps(self.graph, 0, stack, beginning.plan, optimizer)
        k = len(beginning.clients)
        if k in self._kept:
            steps = self._kept.pop(k)
            steps.restart(beginning)
        else:
            if len(self._kept) > 1:  # the new ones need the memory of the older ones
                oldest = next(iter(self._kept))
                del self._kept[oldest]
            steps = self._first(beginning, replays)
        self._kept[k] = steps
        return steps

    def _first(self, beginning: Beginning, replays: Replays) -> RecordedSteps:
        """Steps that later stacks of as many clients will replay."""
        # the stack gets the models of later rounds in the same memory
        model = {name: t.clone() for name, t in beginning.model.items()}
        stack, optimizer = beginning.make(model)
        plan = beginning.plan
        if replays.rate_changes:
            for group in optimizer.param_groups:
                # float32, as fused kernels on a GPU read it
                group["lr"] = torch.zeros((), device=plan.index.device)
        return RecordedSteps(self.graph, replays.most_steps(), stack, plan, optimizer)


class RecordedSteps(Steps):
    """The steps of a stack: records the second one of each kind, and replays later ones.

    The first step is not recorded, because the optimizer creates its state in it. If there is
    ``room``, the next K clients :meth:`restart` these steps: all tensors get new values in the same
    memory.

    Args:
        graph: records a step.
        room: number of steps for which the tables have memory; 0 if no later stack uses them.
    """

    def __init__(
        self, graph: Any, room: int, stack: ClientStack, plan: BatchPlan, optimizer: Optimizer
    ) -> None:
        super().__init__(stack, plan, optimizer)
        for group in optimizer.param_groups:
            group["capturable"] = plan.index.is_cuda  # SGD ignores it
        self._graph = graph
        self.lasts = room > 0
        room = max(room, len(plan.kinds))
        self._number = torch.zeros(1, dtype=torch.int64, device=plan.index.device)  # of the step
        # None for a kind that has run once; the most recent one is the last
        self._recordings: dict[Kind, Step | None] = {}
        # losses and numbers of labels, ``[T, K]`` each, 0 where a client is done
        self._tables: list[Tensor] = []
        # of the optimizer: each parameter's, of all K clients
        self._state: list[dict[str, Any]] = []
        self._prepared: dict[int, Mapping[str, Any]] = {}  # by part
        # Clients that are done and train on: views of their tensors, and their values
        self._done: list[tuple[list[Tensor], list[Tensor]]] = []
        self._plan = [table.new_zeros(len(table), room, *table.shape[2:]) for table in plan.tables]
        self._place(plan)

    def _place(self, plan: BatchPlan) -> None:
        for table, new in zip(self._plan, plan.tables, strict=True):
            table[:, : new.shape[1]].copy_(new)
        self.plan = plan.on(self._plan)
        self._training = (plan.counts > 0).sum(0).tolist()  # clients that are not done, by step
        self._done = []

    def restart(self, beginning: Beginning) -> None:
        """Begins with the next K clients, in the state before the first step."""
        start = self.stack.start
        plan = beginning.plan
        old = list(self.stack.leaves.values())
        torch._foreach_copy_(list(start.values()), [beginning.model[name] for name in start])
        self.stack.load(start, beginning.clients, beginning.sizes, plan.steps)
        cleared = [self._number, *self._tables]
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for leaf, entries in zip(self.stack.leaves.values(), self._state, strict=True):
            cleared += [value for value in entries.values() if isinstance(value, Tensor)]
            state[leaf] = dict(entries)
        torch._foreach_zero_(cleared)
        self.optimizer.state = state
        self.stack.regroup(self.optimizer, old)
        self._place(plan)

    def prepare(self, part: object, prepared: Mapping[str, Any]) -> Mapping[str, Any]:
        """A copy of ``prepared`` in the memory that this part's tensors had for
        the clients before.
        """
        if not self.lasts:
            return prepared
        kept = self._prepared.get(id(part), {})
        old, old_layout = tree_flatten(kept)
        new, layout = tree_flatten(dict(prepared))
        if layout != old_layout or [t.shape for t in new] != [t.shape for t in old]:
            self._recordings.clear()
            kept = tree_unflatten([t.clone() for t in new], layout)
            self._prepared[id(part)] = kept
        elif old:
            torch._foreach_copy_(old, new)
        return kept

    def run(self, step: Callable[[int | Tensor, Kind], None], t: int, kind: Kind) -> None:
        if t > 0:
            self._keep_done(t)
        self._run(step, kind)
        if t == len(self.plan.kinds) - 1:
            self._restore_done()

    def _keep_done(self, t: int) -> None:
        """Keeps the values of clients that are done and train on, until they are no longer active
        (:meth:`BatchPlan.grouped`).
        """
        active = self.plan.kinds[t].active
        if active < self.plan.kinds[t - 1].active:
            self._restore_done()
        first = self._training[t]
        last = min(self._training[t - 1], active)
        if first < last:
            rows = self.stack.rows(first, last, self.optimizer)
            self._done.append((rows, [row.clone() for row in rows]))

    def _restore_done(self) -> None:
        for rows, values in self._done:
            torch._foreach_copy_(rows, values)
        self._done = []

    def _run(self, step: Callable[[int | Tensor, Kind], None], kind: Kind) -> None:
        def counted(kind: Kind) -> None:
            step(self._number, kind)
            self._number.add_(1)

        if kind not in self._recordings:
            if len(self._recordings) == MAX_RECORDINGS:
                least_recent = next(iter(self._recordings))
                del self._recordings[least_recent]
            counted(kind)
            self._recordings[kind] = None
            return
        replay = self._recordings.pop(kind)
        if replay is None:
            replay = self._graph.record(partial(counted, kind))
        else:
            replay()
        self._recordings[kind] = replay

    def first_done(self) -> None:
        super().first_done()
        if not self._state:
            for leaf in self.stack.leaves.values():
                self._state.append(dict(self.optimizer.state[leaf]))

    def note(self, number: int | Tensor, *values: Tensor) -> None:
        assert isinstance(number, Tensor)  # on the device
        if not self._tables:
            shape = self._plan[0].shape[1], len(self.stack)
            self._tables = [value.new_zeros(shape) for value in values]
        for table, value in zip(self._tables, values, strict=True):
            table[:, : len(value)].index_copy_(0, number, value.unsqueeze(0))

    def mean_losses(self) -> Tensor:
        losses, labels = self._tables
        num_steps = len(self.plan.kinds)
        counts_KT, *_ = self._plan
        trains_TK = counts_KT[:, :num_steps].T > 0
        losses_TK = losses[:num_steps].where(trains_TK, 0)
        labels_TK = labels[:num_steps].where(trains_TK, 0)
        return (losses_TK * labels_TK).sum(0) / labels_TK.sum(0)
