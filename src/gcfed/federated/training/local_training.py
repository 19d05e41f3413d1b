"""K clients in local training: their batches, optimizer and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from gcfed.federated.network.stack import ClientStack, StackStart
from gcfed.federated.training.batches import BatchPlan, Kind
from gcfed.optim.partial import unprofiled_step

StepFunction = Callable[[int | Tensor, Kind], None]  # takes the number of a step and its kind


class LocalTraining:
    """The local training of K clients in a round: their tensors, batches, optimizer and losses."""

    def __init__(self, stack: ClientStack, plan: BatchPlan, optimizer: Optimizer) -> None:
        self.stack = stack
        self.plan = plan
        self.optimizer = optimizer
        self.optimizer_step = unprofiled_step(optimizer)
        # the active clients' losses in each step, and their numbers of labels
        self._losses: list[Tensor] = []
        self._labels: list[Tensor] = []

    def restart(self, start: StackStart, plan: BatchPlan) -> None:
        """Begins with the next K clients in the memory of the last ones, in the state before the
        first step.
        """
        old = self.stack.leaves
        self.stack.load(start)
        if self.stack.leaves is not old:  # a lone client's stay the same
            self._give_leaves(list(old.values()))
        self._reset(plan)

    def _reset(self, plan: BatchPlan) -> None:
        """Forgets what the optimizer and the losses were."""
        self.plan = plan
        self.optimizer.state.clear()
        self._losses = []
        self._labels = []

    def _give_leaves(self, old: list[Tensor]) -> None:
        """Puts the stack's present leaves in place of the old ones into the optimizer's groups."""
        now = dict(zip(old, self.stack.leaves.values(), strict=True))
        for group in self.optimizer.param_groups:
            group["params"] = [now[leaf] for leaf in group["params"]]

    def prepare(self, part: object, prepared: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what the local steps read as ``stack.prepared[part]``."""
        return prepared

    def run(self, step: StepFunction, number: int, kind: Kind) -> None:
        """Makes a step of this number and kind, after the clients without further steps have left.

        :class:`~.recorded_training.RecordedTraining` records or replays ``step``.
        """
        if kind.active < self.stack.active:
            self._shrink(kind.active)
        step(number, kind)
        if number == 0:
            self._end_first()

    def _shrink(self, n: int) -> None:
        """Goes on with the first n clients. The optimizer's states of the others do not change."""
        old = list(self.stack.leaves.values())
        self.stack.shrink(n)
        states = self.optimizer.state
        for old_leaf, leaf in zip(old, self.stack.leaves.values(), strict=True):
            state = states.pop(old_leaf, {})
            for key in entries_of_clients(state, old_leaf):
                state[key] = state[key][:n]
            states[leaf] = state
        self._give_leaves(old)

    def _end_first(self) -> None:
        """Ends the first step, in which an optimizer creates its state."""
        defaults = self.optimizer.defaults
        if not (defaults.get("fused") and defaults.get("momentum")):
            return
        for leaf in self.stack.leaves.values():
            state = self.optimizer.state[leaf]
            if "momentum_buffer" not in state:  # no gradient in the first step
                state["momentum_buffer"] = torch.zeros_like(leaf)

    def keep_losses(self, number: int | Tensor, losses: Tensor, labels: Tensor) -> None:
        """Keeps the active clients' mean losses of a step and their numbers of labels, ``[n]``
        each.
        """
        self._losses.append(losses)
        self._labels.append(labels)

    def mean_losses(self) -> Tensor:
        """Each client's mean loss over all its labels, ``[K]``."""
        losses_TK = _stacked(self._losses)
        labels_TK = _stacked(self._labels)
        return (losses_TK * labels_TK).sum(0) / labels_TK.sum(0)


def entries_of_clients(state: Mapping[str, Any], leaf: Tensor) -> list[str]:
    """The entries of a leaf's optimizer state that have a row for each client, like the leaf."""
    found = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == leaf.shape:
            found.append(key)
    return found


def _stacked(steps: list[Tensor]) -> Tensor:
    """The active clients' values of each step, ``[n]``, as ``[T, K]``; 0 for clients that are done.

    The number of active clients never grows.
    """
    if len(steps[0]) == len(steps[-1]):
        return torch.stack(steps)
    return pad_sequence(steps, batch_first=True)
