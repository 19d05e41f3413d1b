"""The mini-batches of each client in a round, and the local steps on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.protocol.messages import Params
from gcfed.optim.partial import unprofiled_step
from gcfed.tasks import Batch
from gcfed.utils.device import on_device

# values of samples that a single client fetches at once; they stay in a core's cache
VALUES_AHEAD = 1 << 18
GROUPS = 16  # numbers of active clients for which the steps of a large stack are recorded


class Kind(NamedTuple):
    """What distinguishes local steps: steps of the same kind do the same operations."""

    active: int  # number of clients that train
    size: int  # of the largest batch
    even: bool  # whether all batches have this size, so that none is padded


@dataclass
class BatchPlan:
    """All local steps of K clients of one round, longest client first."""

    # sample indices, [K, T, B] on the device; padding repeats the client's first sample
    index: Tensor
    augment: Tensor | None  # augmentation draws, [K, T, B, A]
    # number of samples in each step, [K, T] on the host; 0 after a client has finished
    counts: np.ndarray

    def __post_init__(self) -> None:
        # What a single client has fetched: samples, labels and counts from this step on.
        self._first_fetched = 0
        self._fetched: list[tuple[Tensor, ...]] = []
        self._counts = on_device(self.counts, self.index.device, torch.float32)
        self.kinds: list[Kind] = []  # of each step, [T]
        for counts in self.counts.T.tolist():
            active = [count for count in counts if count]
            self.kinds.append(Kind(len(active), max(active), min(active) == max(active)))

    @property
    def tables(self) -> list[Tensor]:
        """The tensors that steps read, ``[K, T, …]`` on the device."""
        tables = [self._counts, self.index]
        if self.augment is not None:
            tables.append(self.augment)
        return tables

    def on(self, tables: Sequence[Tensor]) -> BatchPlan:
        """This plan with its tensors in these tables, ``[K, ≥ T, …]``."""
        plan = copy(self)
        plan._counts, plan.index, *draws = tables
        plan.augment = draws[0] if draws else None
        return plan

    @property
    def steps(self) -> np.ndarray:
        """Number of local steps of each client, ``[K]``."""
        steps_K: np.ndarray = (self.counts > 0).sum(1)
        return steps_K

    def padded(self) -> BatchPlan:
        """This plan with fewer kinds of steps: batches are padded to multiples of 8 samples.

        This changes the last bits.
        """
        plan = copy(self)
        full = self.index.shape[2]
        plan.kinds = []
        for kind in self.kinds:
            if kind.size < full:
                size = min(ceil(kind.size / 8) * 8, full)
                kind = Kind(kind.active, size, even=False)
            plan.kinds.append(kind)
        return plan

    def grouped(self) -> BatchPlan:
        """This plan with fewer kinds of steps: the number of clients that train is rounded up to a
        multiple of K/16. Clients that are done train on, and what they do must be undone. The other
        clients' last bits may change.
        """
        plan = copy(self)
        num_clients = len(self.counts)
        unit = max(1, num_clients // GROUPS)
        plan.kinds = []
        for kind in self.kinds:
            if kind.active > 1:  # a client alone uses other kernels, with other last bits
                rounded = min(ceil(kind.active / unit) * unit, num_clients)
                kind = kind._replace(active=rounded)
            plan.kinds.append(kind)
        return plan

    def cut(self, steps: np.ndarray) -> BatchPlan:
        """The plan of clients that stop after this number of steps, ``[K]``."""
        longest = int(steps.max())
        counts = np.where(np.arange(longest) < steps[:, None], self.counts[:, :longest], 0)
        augment = None if self.augment is None else self.augment[:, :longest]
        return BatchPlan(self.index[:, :longest], augment, counts)

    def batch(self, data: FederatedDataModule, step: int | Tensor, kind: Kind) -> Batch:
        """The active clients' batch of a step; the step's number may be a tensor ``[1]`` on the
        device.
        """
        if isinstance(step, int) and len(self.counts) == 1:
            x, y, counts = self._of_one(data, step, kind.size)
        else:
            index = self._at(self.index, step, kind)[:, : kind.size]
            draws = None
            if self.augment is not None:
                draws = self._at(self.augment, step, kind)[:, : kind.size]
            x, y = data.fetch(index, draws)
            counts = self._at(self._counts, step, kind)
        return Batch.of(x, y, counts, kind.even)

    def _at(self, table: Tensor, step: int | Tensor, kind: Kind) -> Tensor:
        """The active clients' rows of a table, ``[K, T, …]`` → ``[n, …]``, in a step."""
        active = table[: kind.active]
        if isinstance(step, int):
            return active[:, step]
        return active.index_select(1, step).squeeze(1)

    def _of_one(
        self, data: FederatedDataModule, step: int, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A single client's samples, labels and count in a step.

        Those of the next steps are fetched at once.
        """
        if not 0 <= step - self._first_fetched < len(self._fetched):
            self._fetch(data, step)
        x, y, counts = self._fetched[step - self._first_fetched]
        if size < y.shape[1]:
            x = x[:, :size]
            y = y[:, :size]
        if x.data_ptr() % 64:  # the last bits of a matrix product may depend on the alignment
            x = x.clone()
        return x, y, counts

    def _fetch(self, data: FederatedDataModule, step: int) -> None:
        """Fetches a single client's batches from this step on."""
        width = int(self.counts.max())
        num_steps = max(1, VALUES_AHEAD // (width * prod(data.input_shape)))
        span = slice(step, step + num_steps)
        draws = None if self.augment is None else self.augment[:, span, :width]
        x, y = data.fetch(self.index[:, span, :width], draws)
        by_step = zip(x.unbind(1), y.unbind(1), self._counts[:, span].unbind(1), strict=True)
        self._first_fetched = step
        self._fetched = list(by_step)


def split(batch: Batch, n: int, dtype: torch.dtype) -> Iterator[tuple[Batch, Tensor]]:
    """Up to n pieces of a batch, and their shares of each client's samples.

    Shares times means add up to its mean.
    """
    size = batch.y.shape[1]
    real = torch.full_like(batch.count, size) if batch.rows is None else batch.rows.sum(1)
    width = ceil(size / n)
    for start in range(0, size, width):
        piece = slice(start, start + width)
        share = (real - start).clamp(0, width).to(dtype) / real
        mask = None if batch.mask is None else batch.mask[:, piece]
        rows = None
        if batch.rows is not None:
            # If a client has no sample in a piece, the padding counts as samples: the mean is then
            # finite, and its share 0.
            rows = batch.rows[:, piece] | (share == 0).unsqueeze(1)
        count = (batch.count * share).where(share > 0, 1.0)
        yield Batch(batch.x[:, piece], batch.y[:, piece], mask, count, rows), share


@dataclass(frozen=True)
class Beginning:
    """K clients that begin to train.

    Attributes:
        model: the broadcast model, name → ``[*shape]``.
        clients, sizes: their ids and numbers of samples, ``[K]``.
        make_stack: takes a model, the clients, their numbers of samples and of steps.
        make_optimizer: makes the clients' optimizer.
    """

    model: Params
    clients: np.ndarray
    sizes: np.ndarray
    plan: BatchPlan
    make_stack: Callable[[Params, np.ndarray, np.ndarray, np.ndarray], ClientStack]
    make_optimizer: Callable[[ClientStack], Optimizer]

    def make(self, model: Params) -> tuple[ClientStack, Optimizer]:
        """A new stack of these clients, which begins with ``model``, and its optimizer."""
        stack = self.make_stack(model, self.clients, self.sizes, self.plan.steps)
        return stack, self.make_optimizer(stack)

    def make_steps(self) -> Steps:
        """These clients in new memory."""
        stack, optimizer = self.make(self.model)
        return Steps(stack, self.plan, optimizer)


class Steps:
    """K clients that are ready to train, their batches, their optimizer (new in each round) and
    their losses.

    :mod:`~gcfed.federated.training.recorder` has a version for GPUs.
    """

    def __init__(self, stack: ClientStack, plan: BatchPlan, optimizer: Optimizer) -> None:
        self.stack = stack
        self.plan = plan
        self.optimizer = optimizer
        self.update = unprofiled_step(optimizer)
        # of each step: the active clients' losses, and their numbers of labels
        self._losses: list[Tensor] = []
        self._labels: list[Tensor] = []

    def restart(self, beginning: Beginning) -> None:
        """Begins with the next K clients in the memory of the last ones, in the state before the
        first step.
        """
        old = list(self.stack.leaves.values())
        self.plan = beginning.plan
        self.stack.load(beginning.model, beginning.clients, beginning.sizes, self.plan.steps)
        self.stack.regroup(self.optimizer, old)
        self.optimizer.state.clear()
        self._losses = []
        self._labels = []

    def prepare(self, part: object, prepared: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what the local steps read as ``stack.prepared[part]``."""
        return prepared

    def run(self, step: Callable[[int | Tensor, Kind], None], t: int, kind: Kind) -> None:
        """Runs step number t of all active clients; ``step`` takes its number and its kind."""
        step(t, kind)

    def first_done(self) -> None:
        """Called after the first step, in which an optimizer creates its state."""
        defaults = self.optimizer.defaults
        if not (defaults.get("fused") and defaults.get("momentum")):
            return
        for leaf in self.stack.leaves.values():
            state = self.optimizer.state[leaf]
            if "momentum_buffer" not in state:  # no gradient in the first step
                state["momentum_buffer"] = torch.zeros_like(leaf)

    def note(self, number: int | Tensor, losses: Tensor, labels: Tensor) -> None:
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


class KeptSteps:
    """The steps of a round's stacks on a CPU, which the next K clients restart."""

    def __init__(self) -> None:
        self._kept: dict[int, Steps] = {}  # by K

    def begin(self, beginning: Beginning) -> Steps:
        """The steps of K clients, in the memory of an earlier stack of as many clients."""
        k = len(beginning.clients)
        steps = self._kept.get(k)
        if steps is not None and steps.stack.fits_network():
            steps.restart(beginning)
            return steps
        steps = beginning.make_steps()
        self._kept[k] = steps
        return steps


def _stacked(steps: list[Tensor]) -> Tensor:
    """The active clients' values of each step, ``[n]``, as ``[T, K]``; 0 for clients that are done.

    The number of active clients never grows.
    """
    if len(steps[0]) == len(steps[-1]):
        return torch.stack(steps)
    return pad_sequence(steps, batch_first=True)
