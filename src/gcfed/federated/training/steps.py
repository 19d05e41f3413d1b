"""Runs the local steps of a stack, one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from gcfed.federated.training.batches import BatchPlan, Kind
from gcfed.federated.training.stack import ClientStack

LocalStep = Callable[[int | Tensor, Kind], None]
"""A local step of all active clients, from its number and its kind."""


class Steps:
    """K clients that are ready to train, and their losses. :mod:`gcfed.federated.graphs` has a version for GPUs.

    Attributes:
        stack, plan: the clients and their batches.
        optimizer: updates the stack's leaves; new in each round.
    """

    def __init__(self, stack: ClientStack, plan: BatchPlan, optimizer: Optimizer) -> None:
        self.stack, self.plan, self.optimizer = stack, plan, optimizer
        self._losses: list[tuple[Tensor, ...]] = []

    def prepare(self, part: object, prepared: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what the local steps read as ``stack.prepared[part]``."""
        return prepared

    def run(self, step: LocalStep, t: int, kind: Kind) -> None:
        """Runs step number t."""
        step(t, kind)

    def first_done(self) -> None:
        """Called after the first step, in which an optimizer creates its state."""
        if self.optimizer.defaults.get("fused") and self.optimizer.defaults.get("momentum"):
            for leaf in self.stack.leaves.values():
                if "momentum_buffer" not in (state := self.optimizer.state[leaf]):  # no gradient in the first step
                    state["momentum_buffer"] = torch.zeros_like(leaf)

    def note(self, number: int | Tensor, *values: Tensor) -> None:
        """Keeps the active clients' mean losses of a step and their numbers of labels, ``[n]`` each."""
        self._losses.append(values)

    def mean_losses(self) -> Tensor:
        """Each client's mean loss over all its labels, ``[K]``."""
        losses, counts = (_table(values) for values in zip(*self._losses, strict=True))
        return (losses * counts).sum(0) / counts.sum(0)


def _table(values: Sequence[Tensor]) -> Tensor:
    """Values ``[n]`` of each step as ``[T, K]``, 0 where a client is done. n never grows."""
    if len(values[0]) == len(values[-1]):
        return torch.stack(list(values))
    return pad_sequence(list(values), batch_first=True)
