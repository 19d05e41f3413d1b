"""Local training whose steps are recorded on a GPU, and replayed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gcfed.federated.network.stack import ClientStack, StackStart
from gcfed.federated.training.batches import BatchPlan, Kind
from gcfed.federated.training.local_training import LocalTraining, StepFunction, entries_of_clients
from gcfed.federated.training.recorder import Recorder, Step

MAX_RECORDINGS = 128  # of one stack, because each takes memory


class RecordedTraining(LocalTraining):
    """Local training that records the second step of each kind, and replays it for later ones.

    The first step is not recorded, because the optimizer creates its state in it. If there is
    ``room``, the next K clients :meth:`restart` this training: all tensors get new values in the
    same memory.

    Args:
        recorder: records a step.
        room: number of steps for which the tables have memory; 0 if no later stack uses them.
    """

    def __init__(
        self,
        recorder: Recorder,
        room: int,
        stack: ClientStack,
        plan: BatchPlan,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(stack, plan, optimizer)
        for group in optimizer.param_groups:
            group["capturable"] = plan.index.is_cuda  # SGD ignores it
        self._recorder = recorder
        self._is_reused = room > 0
        room = max(room, len(plan.kinds))
        # the number of the present step, which recordings read
        self._number = torch.zeros(1, dtype=torch.int64, device=plan.index.device)
        # The value is None for a kind that has run once. The kind that ran last is the last key.
        self._recordings: dict[Kind, Step | None] = {}
        # the losses and the numbers of labels, ``[T, K]`` each, 0 where a client is done
        self._loss_tables: list[Tensor] = []
        # the optimizer's state of each parameter, for all K clients
        self._optimizer_states: list[dict[str, Any]] = []
        self._prepared: dict[int, Mapping[str, Any]] = {}  # by part
        # views of the tensors of clients that are done and train on, and the values to restore
        self._done_rows: list[tuple[list[Tensor], list[Tensor]]] = []
        self._plan_tables = [
            table.new_zeros(len(table), room, *table.shape[2:]) for table in plan.tables
        ]
        self._place_plan(plan)

    def _place_plan(self, plan: BatchPlan) -> None:
        for table, new in zip(self._plan_tables, plan.tables, strict=True):
            table[:, : new.shape[1]].copy_(new)
        self.plan = plan.on(self._plan_tables)
        # the number of clients that are not done, in each step
        self._num_training = (plan.counts > 0).sum(0).tolist()
        self._done_rows = []

    def restart(self, start: StackStart, plan: BatchPlan) -> None:
        model = self.stack.broadcast_model  # the recordings read this memory
        torch._foreach_copy_(list(model.values()), [start.broadcast_model[name] for name in model])
        super().restart(replace(start, broadcast_model=model), plan)

    def _reset(self, plan: BatchPlan) -> None:
        cleared = [self._number, *self._loss_tables]
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for leaf, entries in zip(self.stack.leaves.values(), self._optimizer_states, strict=True):
            cleared += [value for value in entries.values() if isinstance(value, Tensor)]
            state[leaf] = dict(entries)
        torch._foreach_zero_(cleared)
        self.optimizer.state = state
        self._place_plan(plan)

    def prepare(self, part: object, prepared: Mapping[str, Any]) -> Mapping[str, Any]:
        """A copy of ``prepared`` in the memory that this part has had for the clients before."""
        if not self._is_reused:
            return prepared
        kept = self._prepared.get(id(part), {})
        old, old_layout = tree_flatten(kept)
        new, layout = tree_flatten(dict(prepared))
        if layout != old_layout or _formats(new) != _formats(old):
            self._recordings.clear()
            kept = tree_unflatten([t.clone() for t in new], layout)
            self._prepared[id(part)] = kept
        elif old:
            torch._foreach_copy_(old, new)
        return kept

    def run(self, step: StepFunction, number: int, kind: Kind) -> None:
        super().run(partial(self._run, step), number, kind)

    def _run(self, step: StepFunction, number: int | Tensor, kind: Kind) -> None:
        assert isinstance(number, int)  # the recorded step has a tensor instead
        if number > 0:
            self._keep_done(number)
        self._record_or_replay(step, kind)
        if number == len(self.plan.kinds) - 1:
            self._restore_done()

    def _keep_done(self, number: int) -> None:
        """Keeps the values of clients that are done and train on, until they are no longer active
        (:meth:`BatchPlan.grouped`).
        """
        active = self.plan.kinds[number].active
        if active < self.plan.kinds[number - 1].active:
            self._restore_done()
        first = self._num_training[number]
        last = min(self._num_training[number - 1], active)
        if first < last:
            rows = [t[first:last] for t in self._of_clients()]
            self._done_rows.append((rows, [row.clone() for row in rows]))

    def _restore_done(self) -> None:
        for rows, values in self._done_rows:
            torch._foreach_copy_(rows, values)
        self._done_rows = []

    def _of_clients(self) -> list[Tensor]:
        """All tensors that have a row for each client: weights and buffers, the optimizer's state,
        and what methods have prepared.
        """
        stack = self.stack
        tensors = stack.tensors()
        for leaf in stack.leaves.values():
            state = self.optimizer.state.get(leaf, {})
            tensors += [state[key] for key in entries_of_clients(state, leaf)]
        for prepared in stack.prepared.values():
            # A tensor for all clients may have K rows, too. Steps do not edit it, so its rows
            # get the values that they have.
            for value in tree_leaves(dict(prepared)):
                if isinstance(value, Tensor) and value.dim() and len(value) == len(stack):
                    tensors.append(value)
        return tensors

    def _record_or_replay(self, step: StepFunction, kind: Kind) -> None:
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
            replay = self._recorder.record(partial(counted, kind))
        else:
            replay()
        self._recordings[kind] = replay

    def _end_first(self) -> None:
        super()._end_first()
        if not self._optimizer_states:
            for leaf in self.stack.leaves.values():
                self._optimizer_states.append(dict(self.optimizer.state[leaf]))

    def keep_losses(self, number: int | Tensor, losses: Tensor, labels: Tensor) -> None:
        assert isinstance(number, Tensor)  # the tensor that recordings count up
        values = [losses, labels]
        if not self._loss_tables:
            shape = self._plan_tables[0].shape[1], len(self.stack)
            self._loss_tables = [value.new_zeros(shape) for value in values]
        for table, value in zip(self._loss_tables, values, strict=True):
            table[:, : len(value)].index_copy_(0, number, value.unsqueeze(0))

    def mean_losses(self) -> Tensor:
        losses, labels = self._loss_tables
        num_steps = len(self.plan.kinds)
        counts_KT, *_ = self._plan_tables
        trains_TK = counts_KT[:, :num_steps].T > 0
        losses_TK = losses[:num_steps].where(trains_TK, 0)
        labels_TK = labels[:num_steps].where(trains_TK, 0)
        return (losses_TK * labels_TK).sum(0) / labels_TK.sum(0)


def _formats(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """The shapes and types, in which tensors in the same memory agree."""
    return [(t.shape, t.dtype) for t in tensors]
